//! `AppendAndAttend`: the same as writing and then decoding, and nothing changes on an error.

use candle::{Device, Result, Tensor};
use candle_paged_attn::cache::{CacheLayout, KvDtype, PagePool, PagedKvCache, Quantization};
use candle_paged_attn::{AppendAndAttend, paged_decode};
use testkit::assert_same;
use testkit::bits::bits;
use testkit::reference::{attention, floats};
use testkit::step::{Step, config};

fn cache(layout: CacheLayout, dtype: KvDtype, quantization: Quantization) -> Result<PagedKvCache> {
    PagedKvCache::new(config(dtype, quantization, Some(layout)), &Device::Cpu)
}

fn forms() -> Vec<(KvDtype, Quantization)> {
    vec![
        (KvDtype::F32, Quantization::None),
        (KvDtype::Bf16, Quantization::None),
        (KvDtype::F16, Quantization::None),
        (KvDtype::Fp8, Quantization::None),
        (KvDtype::Fp8, Quantization::Scalar { k: 0.02, v: 0.03 }),
        (KvDtype::Fp8, Quantization::PerToken),
        (KvDtype::Mxfp4, Quantization::Block),
    ]
}

#[test]
fn it_writes_and_then_attends() -> Result<()> {
    for layout in CacheLayout::ALL {
        for (dtype, quantization) in forms() {
            if dtype == KvDtype::Mxfp4 && matches!(layout, CacheLayout::Vllm | CacheLayout::Shuffled) {
                continue;
            }
            let step = Step::new()?;
            let cache = cache(layout, dtype, quantization)?;
            let (op, k, v) = step.prefill(&cache, &Device::Cpu)?;
            let out = op.apply(&step.q, &k, &v)?;
            let layer = cache.layer(1)?;
            let options = cache.decode_options(1)?;
            let args = (&step.block_tables, &op.context_lens);
            let again = paged_decode(&step.q, &layer.key, &layer.value, args.0, args.1, &options)?;
            assert_same!(bits(&out), bits(&again), "{layout:?} {dtype:?}");
            attention(&step.q, &layer.key, &layer.value, args.0, args.1, &options)?.compare(&out, None, 8e-3, 0.)?;
            let (untouched, _) = cache.gather(0, &[3, 7, 1], 40)?;
            assert!(floats(&untouched)?.iter().all(|v| *v == 0.), "the other layer stays as it was");
        }
    }
    Ok(())
}

#[test]
fn a_step_explains_itself_and_writes_nothing() -> Result<()> {
    let step = Step::new()?;
    let cache = cache(CacheLayout::Nhd, KvDtype::Bf16, Quantization::None)?;
    let (op, k, v) = step.prefill(&cache, &Device::Cpu)?;
    let before = bits(&cache.layer(1)?.key);
    let summary = op.explain(&step.q)?;
    assert!(summary.tasks == 2 && summary.selection.kernel().starts_with("cpu_"), "{summary:?}");
    assert_same!(bits(&cache.layer(1)?.key), before);
    op.apply(&step.q, &k, &v)?;
    assert_ne!(bits(&cache.layer(1)?.key), before);
    Ok(())
}

#[test]
fn the_attended_cache_holds_the_written_tokens() -> Result<()> {
    let step = Step::new()?;
    let cache = cache(CacheLayout::Hnd, KvDtype::F32, Quantization::None)?;
    let (op, k, v) = step.prefill(&cache, &Device::Cpu)?;
    op.apply(&step.q, &k, &v)?;
    step.check_tokens(&cache, "F32")
}

#[test]
fn an_error_changes_nothing() -> Result<()> {
    let step = Step::new()?;
    let cache = cache(CacheLayout::Nhd, KvDtype::Bf16, Quantization::None)?;
    let (op, k, v) = step.prefill(&cache, &Device::Cpu)?;
    let before = bits(&cache.layer(1)?.key);
    let device = &Device::Cpu;
    type Edit<'a> = Box<dyn Fn(&mut AppendAndAttend<'_>) + 'a>;
    let wrong: Vec<(&str, Edit<'_>)> = vec![
        ("layer", Box::new(|op| op.layer = 2)),
        ("block_tables", Box::new(|op| op.block_tables = Tensor::new(&[[3i32, 7, 99], [9, -1, -1]], device).unwrap())),
        ("context_lens", Box::new(|op| op.context_lens = Tensor::new(&[4000u32, 5], device).unwrap())),
        ("slot_mapping", Box::new(|op| op.slot_mapping = Tensor::new(&[1i64, 2, 3, 12 * 16], device).unwrap())),
        ("softcap", Box::new(|op| op.options.softcap = Some(-1.))),
    ];
    for (name, edit) in wrong {
        let mut op = op.clone();
        edit(&mut op);
        let message = op.apply(&step.q, &k, &v).expect_err(name).to_string();
        assert!(message.contains(name), "{message:?} does not name {name}");
        assert_same!(bits(&cache.layer(1)?.key), before, "{name}");
    }
    let message = op.apply(&step.q, &k.narrow(0, 0, 3)?, &v.narrow(0, 0, 3)?).unwrap_err().to_string();
    assert!(message.contains("k:") && message.contains("4 rows"), "{message}");
    let shared = cache.layer(1)?.key.narrow(0, 0, 1)?.reshape((16, 2, 64))?.narrow(0, 0, 4)?;
    let message = op.apply(&step.q, &shared, &v).unwrap_err().to_string();
    assert!(message.contains("k: shares its storage"), "{message}");
    assert_same!(bits(&cache.layer(1)?.key), before);
    Ok(())
}

#[test]
fn a_pool_of_another_page_size_is_refused() -> Result<()> {
    let cache = cache(CacheLayout::Nhd, KvDtype::F32, Quantization::None)?;
    let page_size = cache.config().dims.page_size;
    let mut pool = PagePool::new(12, page_size / 2)?;
    let sequence = pool.allocate();
    let append = pool.append(sequence, &[1, 2, 3])?;
    let batch = pool.batch(&[(sequence, &append)], &Device::Cpu)?;
    let message = AppendAndAttend::new(&cache, 0, &batch).unwrap_err().to_string();
    assert!(message.contains(&format!("{} tokens", page_size / 2)) && message.contains(&page_size.to_string()), "{message}");
    Ok(())
}
