//! Work is captured once and replayed.

use candle::{DType, Result, bail};
use candle_paged_attn::rocm::{Kernel, RocmDevice, RocmGraph, RocmTensor};

use crate::support::*;

/// A device with tensors of 256 floats, and a graph of `out = in + 1`.
struct Captured {
    device: RocmDevice,
    kernel: Kernel,
    input: RocmTensor,
    out: RocmTensor,
    graph: RocmGraph,
}

fn captured() -> Captured {
    let device = device();
    let kernel = device.load(code_object(), "add").unwrap();
    let [input, out] = [0, 1].map(|_| RocmTensor::zeros(256, DType::F32, &device).unwrap());
    let graph = device.capture(|| add(&device, &kernel, &input, &out, 1.0)).unwrap();
    Captured { device, kernel, input, out, graph }
}

#[test]
fn a_replay_reads_the_inputs_of_its_time_and_overwrites_the_output() -> Result<()> {
    let _beside = beside_others();
    let Captured { device, input, out, graph, .. } = captured();
    assert_eq!(values(&out), vec![0.0; 256], "a capture runs nothing");
    for round in 0..3 {
        let data = (counting(256) * f64::from(round + 2))?;
        input.copy_from(&data)?;
        out.fill_bytes(0xff)?;
        graph.replay()?;
        assert_eq!(values(&out), (data + 1.0)?.to_vec1::<f32>()?);
    }
    assert_eq!((device.counts().launches, device.counts().replays), (1, 3));
    Ok(())
}

#[test]
fn fills_copies_and_memory_of_the_pool_can_be_captured() -> Result<()> {
    let _beside = beside_others();
    let Captured { device, kernel, input, out, .. } = captured();
    let work = || {
        let [a, b] = [0, 1].map(|_| RocmTensor::empty(256, DType::F32, &device));
        let (a, b) = (a?, b?);
        a.fill_bytes(0)?;
        a.narrow(0, 0, 128)?.copy_from_device(&input.narrow(0, 128, 128)?)?;
        add(&device, &kernel, &a, &b, 1.0)?;
        drop(a);
        // Where `a` was.
        let c = RocmTensor::empty(256, DType::F32, &device)?;
        add(&device, &kernel, &b, &c, 2.0)?;
        add(&device, &kernel, &c, &out, 4.0)
    };
    work()?;
    let before = device.counts();
    let graph = device.capture(work)?;
    // What the graph needs stays its own, whatever else is allocated and written now.
    let others: Vec<_> = (0..8).map(|_| RocmTensor::empty(256, DType::F32, &device)).collect::<Result<_>>()?;
    others.iter().try_for_each(|other| other.fill_bytes(0xff))?;
    input.copy_from(&counting(256))?;
    graph.replay()?;
    others.iter().try_for_each(|other| other.fill_bytes(0xff))?;
    let want: Vec<f32> = (0..256).map(|i| if i < 128 { i as f32 + 135.0 } else { 7.0 }).collect();
    assert_eq!(values(&out), want);
    drop(others);
    assert_eq!(device.counts().live_allocations, before.live_allocations + 2, "two blocks for three temporaries");
    drop(graph);
    assert_eq!(device.counts().live_allocations, before.live_allocations);
    Ok(())
}

#[test]
fn a_graph_keeps_what_it_uses_and_nothing_else() -> Result<()> {
    let _beside = beside_others();
    let device = device();
    let kernel = device.load(code_object(), "add")?;
    let (input, out) = (RocmTensor::from_tensor(&counting(256), &device)?, RocmTensor::zeros(256, DType::F32, &device)?);
    let apart = RocmTensor::zeros(300, DType::F32, &device)?;
    let graph = device.capture(|| add(&device, &kernel, &input, &out, 1.0))?;
    drop((input, apart));
    assert_eq!(device.counts().live_allocations, 2);
    let others: Vec<_> = (0..4).map(|_| RocmTensor::zeros(256, DType::F32, &device)).collect::<Result<_>>()?;
    graph.replay()?;
    assert_eq!(values(&out), (counting(256) + 1.0)?.to_vec1::<f32>()?);
    drop((graph, others));
    assert_eq!(device.counts().live_allocations, 1);
    Ok(())
}

#[test]
fn what_a_graph_cannot_hold_is_refused_and_the_capture_goes_on() -> Result<()> {
    let _beside = beside_others();
    let Captured { device, kernel, input, out, graph } = captured();
    device.trim()?;
    let second = device.capture(|| {
        assert!(device.is_capturing());
        assert_error(device.synchronize(), &["synchronizing while a graph is being captured"]);
        assert_error(input.copy_from(&counting(256)), &["uploading host data while a graph is being captured"]);
        assert_error(device.upload(&[&[1]]), &["uploading host data while a graph is being captured"]);
        assert_error(out.to_tensor(), &["downloading device data while a graph is being captured"]);
        assert_error(device.load(code_object(), "reverse"), &["loading kernel reverse while a graph is being captured"]);
        assert_error(device.trim(), &["trimming the pool while a graph is being captured"]);
        assert_error(graph.replay(), &["replaying a graph while a graph is being captured"]);
        assert_error(device.capture(|| Ok(())), &["captured already"]);
        assert_error(device.alloc(1 << 20), &["no free block of 1048576 bytes", "once before the capture"]);
        add(&device, &kernel, &input, &out, 2.0)
    })?;
    assert!(!device.is_capturing());
    input.copy_from(&counting(256))?;
    second.replay()?;
    assert_eq!(values(&out), (counting(256) + 2.0)?.to_vec1::<f32>()?);
    Ok(())
}

#[test]
fn work_that_fails_or_panics_ends_the_capture() -> Result<()> {
    let _alone = alone();
    let Captured { device, kernel, input, out, graph } = captured();
    let before = simulator().map(|simulator| simulator.alive());
    let failed = device.capture(|| {
        add(&device, &kernel, &input, &out, 2.0)?;
        bail!("the work's own error")
    });
    assert_error(failed, &["the work's own error"]);
    assert!(!device.is_capturing());
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        device.capture(|| -> Result<()> {
            add(&device, &kernel, &input, &out, 2.0).unwrap();
            panic!("a panic inside a capture")
        })
    }));
    assert!(panicked.is_err() && !device.is_capturing());
    assert_eq!(simulator().map(|simulator| simulator.alive()), before);
    input.copy_from(&counting(256))?;
    graph.replay()?;
    assert_eq!(values(&out), (counting(256) + 1.0)?.to_vec1::<f32>()?);
    Ok(())
}

#[test]
fn other_threads_are_refused_while_one_captures() -> Result<()> {
    let _beside = beside_others();
    let Captured { device, kernel, input, out, .. } = captured();
    let second = device.capture(|| {
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                assert_error(add(&device, &kernel, &input, &out, 9.0), &["launch", "another thread is capturing"]);
                assert_error(out.fill_bytes(0), &["fill", "another thread is capturing"]);
                assert_error(device.synchronize(), &["while a graph is being captured"]);
            });
            other.join().unwrap();
        });
        add(&device, &kernel, &input, &out, 3.0)
    })?;
    second.replay()?;
    assert_eq!(values(&out), vec![3.0; 256]);
    Ok(())
}

#[test]
fn a_graph_may_go_while_it_runs_and_while_another_is_captured() -> Result<()> {
    let _alone = alone();
    let Captured { device, kernel, input, out, graph } = captured();
    input.copy_from(&counting(256))?;
    graph.replay()?;
    drop(graph);
    assert_eq!(values(&out), (counting(256) + 1.0)?.to_vec1::<f32>()?);
    let temporary = RocmTensor::zeros(256, DType::F32, &device)?;
    let first = device.capture(|| add(&device, &kernel, &input, &temporary, 5.0))?;
    drop(temporary);
    first.replay()?;
    let second = device.capture(|| {
        drop(first);
        add(&device, &kernel, &input, &out, 6.0)
    })?;
    if let Some(simulator) = simulator() {
        assert_eq!((simulator.count("graph_execs"), simulator.count("graphs")), (1, 0));
    }
    assert_eq!(device.counts().live_allocations, 2);
    second.replay()?;
    assert_eq!(values(&out), (counting(256) + 6.0)?.to_vec1::<f32>()?);
    Ok(())
}
