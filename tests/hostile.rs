//! Calls that nobody should make: each gives the right answer or an error that names the argument. Nothing panics, aborts, hangs or races.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use candle::op::BackpropOp;
use candle::{CpuStorage, DType, Device, Result, Storage, Tensor};
use candle_paged_attn::cache::{CacheDims, CacheLayout, LayerCache, PagePool, copy_pages, gather, reshape_and_cache};
use candle_paged_attn::plan::{DecodePlan, HostPlan, PlanRequest};
use candle_paged_attn::registry::{Arch, Problem, missing_requirements, select};
use candle_paged_attn::{
    Case, DecodeOptions, KvScale, PlanChoice, merge_attention_states, paged_decode, paged_decode_into, paged_decode_with_lse,
};
use testkit::assert_same;
use testkit::bits::bits;
use testkit::reference::{attention, floats};

const CPU: Device = Device::Cpu;

/// Two sequences of 20 and 5 tokens over pages of 16; 4 query and 2 KV heads of 8 channels.
struct Call {
    q: Tensor,
    key: Tensor,
    value: Tensor,
    tables: Tensor,
    lens: Tensor,
    options: DecodeOptions,
}

impl Call {
    fn new() -> Result<Self> {
        let cache = Tensor::randn(0f32, 1., (6, 2, 16, 2, 8), &CPU)?;
        Ok(Self {
            q: Tensor::randn(0f32, 1., (2, 4, 8), &CPU)?,
            key: cache.narrow(1, 0, 1)?.squeeze(1)?,
            value: cache.narrow(1, 1, 1)?.squeeze(1)?,
            tables: Tensor::new(&[[3u32, 1], [4, 9999]], &CPU)?,
            lens: Tensor::new(&[20u32, 5], &CPU)?,
            options: DecodeOptions::default(),
        })
    }

    fn run(&self) -> Result<(Tensor, Tensor)> {
        paged_decode_with_lse(&self.q, &self.key, &self.value, &self.tables, &self.lens, &self.options)
    }

    fn decode_into(&self, out: &Tensor) -> Result<()> {
        paged_decode_into(out, &self.q, &self.key, &self.value, &self.tables, &self.lens, &self.options)
    }

    /// The error of every entry point, each of which must name `argument`.
    fn refused(&self, argument: &str) {
        let Self { q, key, value, tables, lens, options } = self;
        let errors = [paged_decode(q, key, value, tables, lens, options).err(), self.run().err()];
        for error in errors {
            names(error, argument);
        }
    }

    fn check(&self) -> Result<()> {
        let (out, lse) = self.run()?;
        attention(&self.q, &self.key, &self.value, &self.tables.clamp(0u32, 5u32)?, &self.lens, &self.options)?.compare(
            &out,
            Some(&lse),
            1e-5,
            1e-5,
        )?;
        Ok(())
    }
}

fn names(error: Option<candle::Error>, argument: &str) {
    let message = error.expect("this should have been refused").to_string();
    assert!(message.contains(argument), "{message:?} does not name {argument:?}");
}

/// A tensor that claims more elements than its storage has.
fn overlong(shape: &[usize], elements: usize) -> Tensor {
    Tensor::from_storage(Storage::Cpu(CpuStorage::F32(vec![0.5; elements])), shape, BackpropOp::none(), false)
}

/// Runs `f` on a thread of its own; false where it has not ended in time.
fn ends(f: impl FnOnce() + Send + 'static) -> bool {
    let (done, waiting) = mpsc::channel();
    std::thread::spawn(move || {
        f();
        done.send(()).ok();
    });
    waiting.recv_timeout(Duration::from_secs(20)).is_ok()
}

#[test]
fn tensors_that_reach_past_their_storage() -> Result<()> {
    let call = Call::new()?;
    for key in [true, false] {
        let long = overlong(&[6, 16, 2, 8], 100);
        let (key, value, name) = match key {
            true => (long, call.value.clone(), "key_cache"),
            false => (call.key.clone(), long, "value_cache"),
        };
        Call { key, value, ..Call::new()? }.refused(name);
    }
    Call { q: overlong(&[2, 4, 8], 10), ..Call::new()? }.refused("q:");
    names(call.decode_into(&overlong(&[2, 4, 8], 10)).err(), "out:");
    let tables = Tensor::from_storage(Storage::Cpu(CpuStorage::U32(vec![1])), (2, 2), BackpropOp::none(), false);
    Call { tables, ..Call::new()? }.refused("block_tables:");
    let lens = Tensor::from_storage(Storage::Cpu(CpuStorage::U32(vec![1])), 2, BackpropOp::none(), false);
    Call { lens, ..Call::new()? }.refused("context_lens:");
    let options = DecodeOptions { sinks: Some(overlong(&[4], 2)), ..Default::default() };
    Call { options, ..Call::new()? }.refused("sinks:");
    let (key, value) = (call.key.to_dtype(DType::F8E4M3)?, call.value.to_dtype(DType::F8E4M3)?);
    for shape in [vec![6, 2, 16], vec![1]] {
        let options = DecodeOptions { v_scale: KvScale::Tensor(overlong(&shape, 0)), ..Default::default() };
        Call { key: key.clone(), value: value.clone(), options, ..Call::new()? }.refused("v_scale:");
    }
    Ok(())
}

#[test]
fn outputs_whose_elements_share_memory() -> Result<()> {
    let call = Call::new()?;
    for out in [
        Tensor::zeros((1, 4, 8), DType::F32, &CPU)?.broadcast_as((2, 4, 8))?,
        Tensor::zeros((2, 1, 8), DType::F32, &CPU)?.broadcast_as((2, 4, 8))?,
    ] {
        names(call.decode_into(&out).err(), "out:");
        assert!(floats(&out)?.iter().all(|&x| x == 0.0));
    }
    Ok(())
}

#[test]
fn broadcast_inputs_are_read() -> Result<()> {
    let call = Call::new()?;
    let wide = |t: &Tensor, dim, n: usize| -> Result<Tensor> {
        let mut shape = t.dims().to_vec();
        shape[dim] = n;
        t.narrow(dim, 0, 1)?.broadcast_as(shape)
    };
    Call { q: wide(&call.q, 0, 2)?, ..Call::new()? }.check()?;
    Call { q: wide(&call.q, 1, 4)?, ..Call::new()? }.check()?;
    Call { key: wide(&call.key, 0, 6)?, value: wide(&call.value, 2, 2)?, ..Call::new()? }.check()?;
    Call { key: wide(&call.key, 1, 16)?, value: wide(&call.value, 1, 16)?, ..Call::new()? }.check()
}

#[test]
fn sizes_that_no_memory_holds() -> Result<()> {
    let one = Tensor::zeros((1, 4, 8), DType::F32, &CPU)?;
    for rows in [1 << 40, 1 << 60] {
        Call { q: one.broadcast_as((rows, 4, 8))?, ..Call::new()? }.refused("q:");
    }
    let dims = CacheDims { pages: i32::MAX as usize, page_size: 1024, kv_heads: 64, head_dim: 1024 };
    let config = candle_paged_attn::cache::CacheConfig {
        layers: 1,
        dims,
        dtype: candle_paged_attn::cache::KvDtype::F32,
        layout: None,
        quantization: candle_paged_attn::cache::Quantization::None,
    };
    names(candle_paged_attn::cache::PagedKvCache::new(config, &CPU).err(), "pages");
    Ok(())
}

#[test]
fn score_options_at_their_ends() -> Result<()> {
    let with = |options: DecodeOptions| -> Result<Call> { Ok(Call { options, ..Call::new()? }) };
    for scale in [0.0, -0.0, 1e-45, -2.0, 1e-20] {
        with(DecodeOptions { softmax_scale: Some(scale), ..Default::default() })?.check()?;
    }
    for scale in [f32::MAX, f32::MIN, f32::NAN, f32::INFINITY] {
        with(DecodeOptions { softmax_scale: Some(scale), ..Default::default() })?.refused("softmax_scale");
    }
    for softcap in [1e-30, 1e-6, 1e6, 1e30] {
        with(DecodeOptions { softcap: Some(softcap), ..Default::default() })?.check()?;
    }
    for softcap in [0.0, -1.0, f32::NAN, f32::INFINITY, 1e-45, f32::MAX] {
        with(DecodeOptions { softcap: Some(softcap), ..Default::default() })?.refused("softcap");
    }
    for window in [1, 16, 20, usize::MAX, i64::MAX as usize, i64::MAX as usize + 1] {
        with(DecodeOptions { window: Some(window), ..Default::default() })?.check()?;
    }
    with(DecodeOptions { max_partitions: Some(usize::MAX), ..Default::default() })?.check()?;
    with(DecodeOptions { workgroup_budget: Some(usize::MAX), ..Default::default() })?.refused("workgroup_budget");
    Ok(())
}

#[test]
fn writers_and_readers_of_one_tensor_do_not_deadlock() -> Result<()> {
    // K and V are views of one storage, so a reader that locked it twice would wait for itself behind a writer.
    let call = Call::new()?;
    let layer = LayerCache { key: call.key.clone(), value: call.value.clone(), k_scale: KvScale::None, v_scale: KvScale::None };
    let k = Tensor::randn(0f32, 1., (1, 2, 8), &CPU)?;
    let slots = Tensor::new(&[0i64], &CPU)?;
    let stop = std::sync::Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let writer = std::thread::spawn(move || {
        while !stopped.load(Ordering::Relaxed) {
            reshape_and_cache(&k, &k, &slots, &layer, CacheLayout::Nhd).unwrap();
        }
    });
    let ended = ends(move || {
        let out = call.q.zeros_like().unwrap();
        for _ in 0..5_000 {
            let Call { q, key, value, tables, lens, options } = &call;
            paged_decode(q, key, value, tables, lens, options).unwrap();
            call.run().unwrap();
            call.decode_into(&out).unwrap();
        }
    });
    assert!(ended, "reader and writer wait for each other");
    stop.store(true, Ordering::Relaxed);
    writer.join().unwrap();
    Ok(())
}

#[test]
fn caches_that_overlap_are_not_written() -> Result<()> {
    let pages = Tensor::zeros((7, 16, 2, 8), DType::F32, &CPU)?;
    let k = Tensor::ones((1, 2, 8), DType::F32, &CPU)?;
    let slots = Tensor::new(&[0i64], &CPU)?;
    let layer = LayerCache { key: pages.narrow(0, 0, 6)?, value: pages.narrow(0, 1, 6)?, k_scale: KvScale::None, v_scale: KvScale::None };
    names(reshape_and_cache(&k, &k, &slots, &layer, CacheLayout::Nhd).err(), "value_cache: is the same memory");
    // One tensor for both scales: V's would overwrite K's.
    let scales = Tensor::ones((6, 2, 16), DType::F32, &CPU)?;
    let fp8 = || Tensor::zeros((6, 16, 2, 8), DType::F8E4M3, &CPU);
    let scale = || KvScale::Tensor(scales.clone());
    let layer = LayerCache { key: fp8()?, value: fp8()?, k_scale: scale(), v_scale: scale() };
    names(reshape_and_cache(&k, &k, &slots, &layer, CacheLayout::Nhd).err(), "v_scale: is the same memory");
    assert!(floats(&scales)?.iter().all(|&x| x == 1.0));
    // Halves of one tensor do not overlap.
    let halves = Tensor::ones((6, 2, 2, 16), DType::F32, &CPU)?;
    let half = |i| Ok::<_, candle::Error>(KvScale::Tensor(halves.narrow(1, i, 1)?.squeeze(1)?));
    let layer = LayerCache { key: fp8()?, value: fp8()?, k_scale: half(0)?, v_scale: half(1)? };
    reshape_and_cache(&k, &k, &slots, &layer, CacheLayout::Nhd)?;
    let both = Tensor::zeros((6, 16, 2, 16), DType::F32, &CPU)?;
    let half = |i: usize| both.narrow(3, 8 * i, 8);
    let layer = LayerCache { key: half(0)?, value: half(1)?, k_scale: KvScale::None, v_scale: KvScale::None };
    reshape_and_cache(&k, &k, &slots, &layer, CacheLayout::Nhd)?;
    assert!(gather(&layer, CacheLayout::Nhd, &[0], usize::MAX).is_err());
    assert!(gather(&layer, CacheLayout::Nhd, &[6], 1).is_err());
    assert!(copy_pages(&layer, CacheLayout::Nhd, &[(0, u32::MAX)]).is_err());
    Ok(())
}

#[test]
fn ids_of_another_pool() -> Result<()> {
    let (mut a, mut b) = (PagePool::new(4, 2)?, PagePool::new(4, 2)?);
    let (in_a, in_b) = (a.allocate(), b.allocate());
    assert_ne!(in_a, in_b);
    assert!(b.append(in_a, &[1]).is_err() && b.free(in_a).is_err() && b.fork(in_a).is_err() && b.commit(in_a).is_err());
    b.append(in_b, &[1])?;
    assert!(b.pages_needed(in_b, usize::MAX)? > 4);
    names(PagePool::new(i32::MAX as usize, usize::MAX).err(), "pages");
    Ok(())
}

#[test]
fn hostile_plans() -> Result<()> {
    let call = Call::new()?;
    let run = |work: Vec<[i32; 4]>, reduce: Vec<[i32; 2]>| {
        let plan = DecodePlan::from_host(HostPlan { work, reduce }, &CPU)?;
        let plan = DecodePlan::from_tensors(plan.work_info().clone(), plan.reduce_info().clone())?;
        let options = DecodeOptions { plan: PlanChoice::Given(plan), ..Default::default() };
        let Call { q, key, value, tables, lens, .. } = &call;
        paged_decode(q, key, value, tables, lens, &options)
    };
    let good = run(vec![[0, 0, 1, 0], [1, 0, 1, 0]], vec![[0, 1], [1, 1]])?;
    assert_same!(bits(&good), bits(&call.run()?.0));
    let records =
        [[0, 0, 1, 0], [1, 0, 1, 0], [-1, 0, 0, 0], [-2, 0, 0, 0], [1, 0, i32::MAX, 0], [0, i32::MIN, 1, 0], [7, 0, 1, 0], [0, 0, 1, 1]];
    let ends = [0, 1, 2, -1, i32::MIN, i32::MAX];
    for a in records {
        for b in records {
            for first in ends {
                for count in ends {
                    if let Ok(out) = run(vec![a, b], vec![[0, 1], [first, count]]) {
                        assert_same!(bits(&out), bits(&good), "{a:?} {b:?} {first} {count}");
                    }
                }
            }
        }
    }
    assert!(DecodePlan::from_tensors(Tensor::zeros((2, 4), DType::U32, &CPU)?, Tensor::zeros((2, 2), DType::U32, &CPU)?).is_err());
    assert!(DecodePlan::from_tensors(Tensor::zeros(8, DType::U32, &CPU)?, Tensor::zeros(4, DType::U32, &CPU)?).is_err());
    let transposed = Tensor::new(&[[0i32, 1], [0, 0], [1, 1], [0, 0]], &CPU)?.t()?;
    let reduce = Tensor::new(&[[0i32, 1], [1, 1]], &CPU)?;
    let options = DecodeOptions { plan: PlanChoice::Given(DecodePlan::from_tensors(transposed, reduce)?), ..Default::default() };
    let out = Call { options, ..call }.run()?.0;
    assert_same!(bits(&out), bits(&good));
    Ok(())
}

#[test]
fn problems_of_any_size() {
    let sizes = [0, 1, 8, 1 << 31, usize::MAX / 2, usize::MAX];
    let archs: Vec<Arch> = vec![Arch::gfx942(304), Arch::gfx950(), Arch::gfx1250(), Arch::sm80(), Arch::sm90(), Arch::host().unwrap()];
    type Set = fn(&mut Problem, usize);
    let fields: [Set; 9] = [
        |p, n| p.batch = n,
        |p, n| p.q_heads = n,
        |p, n| p.kv_heads = n,
        |p, n| p.head_dim = n,
        |p, n| p.page_size = n,
        |p, n| p.query_len = n,
        |p, n| p.max_pages = n,
        |p, n| p.capacity = n,
        |p, n| p.kernarg_preload = n,
    ];
    for arch in &archs {
        for (i, a) in fields.iter().enumerate() {
            for b in &fields[i..] {
                for m in sizes {
                    for n in sizes {
                        for kv_dtype in [candle_paged_attn::cache::KvDtype::Bf16, candle_paged_attn::cache::KvDtype::Mxfp4] {
                            let mut problem = Problem { kv_dtype, ..Problem::default() };
                            if kv_dtype == candle_paged_attn::cache::KvDtype::Mxfp4 {
                                problem.scales = candle_paged_attn::registry::ScaleMode::Block;
                                problem.layout = CacheLayout::Nhd;
                            }
                            a(&mut problem, m);
                            b(&mut problem, n);
                            let (_, _) = (select(&problem, arch), missing_requirements(&problem, arch));
                        }
                    }
                }
            }
        }
        let request = PlanRequest { workgroup_budget: Some(usize::MAX), ..PlanRequest::new(&[i32::MAX; 3], &[usize::MAX], usize::MAX) };
        assert!(HostPlan::new(&request, arch).is_ok());
    }
}

#[test]
fn tables_and_lengths_at_their_ends() -> Result<()> {
    // The last slot of the table, U32 and I32, transposed, and more than it holds.
    let call = Call { lens: Tensor::new(&[32u32, 16], &CPU)?, ..Call::new()? };
    call.check()?;
    let want = bits(&call.run()?.0);
    let tables = Tensor::new(&[[3i32, 4], [1, -1]], &CPU)?.t()?;
    let lens = Tensor::new(&[32i32, 16], &CPU)?;
    let Call { q, key, value, .. } = &call;
    assert_same!(bits(&paged_decode(q, key, value, &tables, &lens, &call.options)?), want);
    for (lens, place) in [([33u32, 16], "sequence 0"), ([32, u32::MAX], "sequence 1"), ([32, 17], "sequence 1")] {
        names(paged_decode(q, key, value, &tables, &Tensor::new(&lens, &CPU)?, &call.options).err(), place);
    }
    for lens in [[i32::MIN, -1], [0, 0]] {
        let (out, lse) = paged_decode_with_lse(q, key, value, &tables, &Tensor::new(&lens, &CPU)?, &call.options)?;
        assert!(floats(&out)?.iter().all(|&x| x == 0.0) && floats(&lse)?.iter().all(|&x| x == f64::NEG_INFINITY));
    }
    // Nothing at all.
    let none = |shape: &[usize]| Tensor::zeros(shape, DType::U32, &CPU);
    let q = Tensor::zeros((0, 4, 8), DType::F32, &CPU)?;
    for (tables, lens) in [(none(&[0, 2])?, none(&[0])?), (none(&[0, 2, 0])?, none(&[0, 2])?), (none(&[3, 0])?, none(&[3])?)] {
        let (out, lse) = paged_decode_with_lse(&q, key, value, &tables, &lens, &call.options)?;
        assert_eq!((out.dims(), lse.dims()), (&[0, 4, 8][..], &[0, 4][..]));
    }
    // Ragged, with sequences of no rows.
    let options = DecodeOptions { query_start: Some(Tensor::new(&[0u32, 0, 2, 2, 2], &CPU)?), ..Default::default() };
    let tables = Tensor::new(&[[9u32, 9], [3, 1], [9, 9], [9, 9]], &CPU)?;
    Call { tables, lens: Tensor::new(&[20u32, 20, 0, 32], &CPU)?, options, ..Call::new()? }.check()?;
    for starts in [[0i32, 0, 3], [1, 1, 2], [0, 2, 1], [0, -1, 2], [0, i32::MAX, 2]] {
        let options = DecodeOptions { query_start: Some(Tensor::new(&starts, &CPU)?), ..Default::default() };
        Call { options, ..Call::new()? }.refused("query_start");
    }
    Ok(())
}

#[test]
fn a_bad_query_row_stays_alone() -> Result<()> {
    let call = Call::new()?;
    let clean = floats(&call.run()?.0)?;
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut q = call.q.flatten_all()?.to_vec1::<f32>()?;
        q[9] = bad;
        let q = Tensor::from_vec(q, (2, 4, 8), &CPU)?;
        let Call { key, value, tables, lens, options, .. } = &call;
        let (out, _) = paged_decode_with_lse(&q, key, value, tables, lens, options)?;
        for (at, (&got, &want)) in floats(&out)?.iter().zip(&clean).enumerate() {
            assert!(at / 8 == 1 || got == want, "{bad} reached element {at}");
        }
    }
    Ok(())
}

#[test]
fn merges_of_anything() -> Result<()> {
    let state = |x: f32, lse: f32| -> Result<_> { Ok((Tensor::full(x, (2, 3, 4), &CPU)?, Tensor::full(lse, (2, 3), &CPU)?)) };
    let merge = |parts: &[(f32, f32)]| -> Result<(f64, f64)> {
        let parts = parts.iter().map(|&(x, lse)| state(x, lse)).collect::<Result<Vec<_>>>()?;
        let (outs, lses): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
        let (out, lse) = merge_attention_states(&outs, &lses)?;
        Ok((floats(&out)?[5], floats(&lse)?[2]))
    };
    let none = f32::NEG_INFINITY;
    assert_eq!(merge(&[(0.3, -7.0)])?, (f64::from(0.3f32), -7.0));
    assert_eq!(merge(&[(0.3, f32::MAX), (f32::NAN, none)])?, (f64::from(0.3f32), f64::from(f32::MAX)));
    assert_eq!(merge(&[(f32::NAN, none), (f32::INFINITY, none)])?, (0.0, f64::NEG_INFINITY));
    assert_eq!(merge(&[(1.0, f32::MIN), (2.0, f32::MAX)])?, (2.0, f64::from(f32::MAX)));
    let (out, lse) = merge(&[(1.0, f32::NAN), (2.0, 0.0)])?;
    assert!(out.is_nan() && lse.is_nan());
    let many = vec![(1.5f32, 2.0f32); 10_000];
    let (out, lse) = merge(&many)?;
    assert!((out - 1.5).abs() < 1e-4 && (lse - (2.0 + 10_000f64.ln())).abs() < 1e-4, "{out} {lse}");
    for shape in [vec![3, 0], vec![0, 4]] {
        let (out, lse) = (Tensor::zeros(shape.clone(), DType::F32, &CPU)?, Tensor::zeros(shape[0], DType::F32, &CPU)?);
        assert_eq!(merge_attention_states(&[out], &[lse])?.0.dims(), shape);
    }
    Ok(())
}

#[test]
fn every_legal_call_can_be_recorded() -> Result<()> {
    let options = DecodeOptions { query_start: Some(Tensor::new(&[0i32, 1, 2], &CPU)?), window: Some(3), ..Default::default() };
    let call = Call { options, ..Call::new()? };
    let Call { q, key, value, tables, lens, options } = &call;
    let case = Case::from_bytes(&Case::capture(q, key, value, tables, lens, options)?.to_bytes()?)?;
    assert_same!(bits(&case.run()?.0), bits(&call.run()?.0));
    assert!(case.key_cache.dims()[0] < 6, "only the pages that are read are kept");
    Ok(())
}

#[test]
fn appends_from_many_threads_stay_apart() -> Result<()> {
    use candle_paged_attn::AppendAndAttend;
    use candle_paged_attn::cache::{CacheConfig, KvDtype, PagedKvCache, Quantization};
    const STEPS: usize = 40;
    let dims = CacheDims { pages: 16, page_size: 16, kv_heads: 2, head_dim: 32 };
    let config = CacheConfig { layers: 1, dims, dtype: KvDtype::Fp8, layout: None, quantization: Quantization::PerToken };
    let cache = PagedKvCache::new(config.clone(), &CPU)?;
    let inputs: Vec<Tensor> = (0..4).map(|_| Tensor::randn(0f32, 1., (STEPS, 3, 4, 32), &CPU)).collect::<Result<_>>()?;
    // Sequence i owns pages 4i to 4i + 3.
    let decode = |cache: &PagedKvCache, i: usize| -> Result<Vec<Vec<f64>>> {
        let first = 4 * i as u32;
        let block_tables = Tensor::new(&[[first + 3, first, first + 2]], &CPU)?;
        let pages = [first + 3, first, first + 2].map(i64::from);
        let step = |t: usize| {
            let op = AppendAndAttend {
                cache,
                layer: 0,
                slot_mapping: Tensor::new(&[pages[t / 16] * 16 + t as i64 % 16], &CPU)?,
                block_tables: block_tables.clone(),
                context_lens: Tensor::new(&[t as u32 + 1], &CPU)?,
                options: DecodeOptions::default(),
            };
            let part = |at: usize, heads: usize| inputs[i].narrow(0, t, 1)?.narrow(1, at, 1)?.squeeze(1)?.narrow(1, 0, heads);
            floats(&op.apply(&part(0, 4)?, &part(1, 2)?, &part(2, 2)?)?)
        };
        (0..STEPS).map(step).collect()
    };
    let together = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|i| (decode, &cache, i)).map(|(decode, cache, i)| scope.spawn(move || decode(cache, i))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Result<Vec<_>>>()
    })?;
    for (i, got) in together.into_iter().enumerate() {
        assert_eq!(got, decode(&PagedKvCache::new(config.clone(), &CPU)?, i)?, "sequence {i}");
    }
    Ok(())
}
