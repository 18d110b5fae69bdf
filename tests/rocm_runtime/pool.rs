//! Freed memory is used again, up to a cap, and given back when there is none left.

use candle::{DType, Result};
use candle_paged_attn::rocm::RocmTensor;

use crate::support::*;

#[test]
fn a_freed_block_serves_the_next_request_of_its_size() -> Result<()> {
    let _beside = beside_others();
    let device = device();
    let first = device.alloc(10_000)?;
    let address = first.address();
    assert_eq!(address % 256, 0);
    let counts = device.counts();
    assert!((10_000..=12_500).contains(&counts.live_bytes), "{counts:?}");
    assert_eq!((counts.live_allocations, counts.cached_bytes), (1, 0));
    drop(first);
    assert_eq!((device.counts().live_bytes, device.counts().cached_bytes), (0, counts.live_bytes));
    let again = device.alloc(9_900)?;
    assert_eq!((again.address(), again.bytes()), (address, 9_900));
    assert_ne!(device.alloc(10_000)?.address(), address);
    drop(again);
    device.trim()?;
    assert_eq!((device.counts().live_bytes, device.counts().cached_bytes), (0, 0));
    Ok(())
}

#[test]
fn no_bytes_need_no_memory() -> Result<()> {
    let _beside = beside_others();
    let device = device();
    let nothing = device.alloc(0)?;
    assert_eq!((nothing.address(), nothing.bytes(), device.counts().live_allocations), (0, 0, 0));
    let tensor = RocmTensor::zeros((0, 3), DType::F32, &device)?;
    assert_eq!(tensor.address(), 0);
    Ok(())
}

#[test]
fn at_most_the_cap_is_kept() -> Result<()> {
    let _beside = beside_others();
    let device = device_with_cap(3 << 20);
    let blocks = [1usize, 2, 4, 1].map(|mib| device.alloc(mib << 20).unwrap());
    assert_eq!(device.counts().live_bytes, 8 << 20);
    drop(blocks);
    let kept = device.counts().cached_bytes;
    assert!(kept > 0 && kept <= 3 << 20, "{kept}");
    let device = device_with_cap(0);
    drop(device.alloc(100)?);
    assert_eq!(device.counts().cached_bytes, 0);
    Ok(())
}

#[test]
fn more_than_there_is_is_an_error_with_the_numbers() -> Result<()> {
    let _beside = beside_others();
    let device = device();
    let _live = device.alloc(1 << 20)?;
    let name = format!("device 0 ({})", device.arch().name);
    assert_error(
        device.alloc(1 << 45),
        &["hipMalloc: out of memory (hipErrorOutOfMemory, 2)", "asked for 35184372088832 bytes", "1048576 in use here", " free", &name],
    );
    assert_error(device.alloc(usize::MAX), &["18446744073709551615 bytes"]);
    device.alloc(1 << 20)?;
    assert_eq!(device.counts().live_allocations, 1);
    Ok(())
}

#[test]
fn a_steady_state_asks_the_runtime_for_work_alone() -> Result<()> {
    let _alone = alone();
    let Some(simulator) = simulator() else { return Ok(()) };
    let device = device();
    let kernel = device.load(code_object(), "add")?;
    let out = RocmTensor::zeros(1000, DType::F32, &device)?;
    let step = |step: usize| {
        let input = RocmTensor::from_tensor(&(counting(1000) + step as f64)?, &device)?;
        let temporary = RocmTensor::empty(1000 + step, DType::F32, &device)?;
        add(&device, &kernel, &input, &temporary, 1.0)?;
        add(&device, &kernel, &temporary.narrow(0, 0, 1000)?, &out, 1.0)
    };
    [0, 99].into_iter().try_for_each(step)?;
    let asked = || ["mallocs", "synchronizations", "implicit_synchronizations"].map(|name| simulator.count(name));
    let (before, pinned) = (asked(), simulator.count("host_mallocs"));
    (0..100).try_for_each(step)?;
    assert_eq!(asked(), before);
    if !simulator.queues() {
        assert_eq!(simulator.count("host_mallocs"), pinned);
    }
    assert_eq!(values(&out), (counting(1000) + 101.0)?.to_vec1::<f32>()?);
    Ok(())
}

#[test]
fn kept_memory_is_given_back_before_a_request_fails() -> Result<()> {
    let _alone = alone();
    let Some(simulator) = simulator() else { return Ok(()) };
    let device = device();
    drop(device.alloc(5 << 20)?);
    let kept = device.counts().cached_bytes;
    assert!(kept >= 5 << 20);
    let before = simulator.count("allocations");
    simulator.clear();
    simulator.fail("hipMalloc", 1, 0);
    let block = device.alloc(1 << 20)?;
    assert_eq!(simulator.failed().as_deref(), Some("hipMalloc"));
    assert_eq!((device.counts().cached_bytes, simulator.count("allocations")), (0, before));
    // Nothing kept: no second try.
    simulator.clear();
    simulator.fail("hipMalloc", 1, 0);
    assert_error(device.alloc(2 << 20), &["hipMalloc: out of memory", "asked for 2097152 bytes"]);
    simulator.clear();
    drop((device.alloc(2 << 20)?, block));
    Ok(())
}
