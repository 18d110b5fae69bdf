//! One small call of every kernel variant, small enough for `scripts/sanitize-cuda`, which watches each memory access.

use candle::{DType, Device, Result, Tensor};
use candle_paged_attn::cache::{CacheLayout, KvDtype, PagedKvCache};
use candle_paged_attn::explain_call;
use candle_paged_attn::registry::{CudaShape, Selection};
use testkit::cases::{CaseSpec, Scales};
use testkit::step::{DIMS, check_page_copies, config};

use crate::specs;
use crate::support::*;

/// Checks a case with its tables on the device, where the planner runs too; gives what was chosen for it.
fn check_on_device(device: &Device, spec: &CaseSpec) -> Result<Selection> {
    let case = spec.build()?;
    let call = on(&case, device, Tables::Device)?;
    let selection =
        explain_call(&call.q, &call.key_cache, &call.value_cache, &call.block_tables, &call.context_lens, &call.options)?.selection;
    let (out, lse) = run(&call)?;
    case.expected()?.compare(&out, Some(&lse), tolerance(spec), 2e-3)?;
    Ok(selection)
}

/// Panics unless every case is right and has a tensor-core cut that is as `wanted`.
fn check_cut(device: &Device, wanted: &str, is: fn(&CudaShape) -> bool, specs: &[CaseSpec]) {
    for spec in specs {
        let selection = check_on_device(device, spec).unwrap_or_else(|e| panic!("{wanted}: {spec:?}: {e}"));
        let cut = selection.key.cuda.unwrap_or_else(|| panic!("{wanted}: {}: {spec:?}", selection.reason));
        assert!(is(&cut), "{wanted}, not {}: {spec:?}", selection.reason);
        println!("{wanted}: {}", selection.kernel());
    }
}

/// Every form that the tensor-core tile reads, and the options at once.
fn forms_of(base: &CaseSpec) -> Vec<CaseSpec> {
    let forms = forms().map(|(kv_dtype, scales)| CaseSpec { kv_dtype, scales, ..base.clone() });
    let options = |spec: CaseSpec| CaseSpec { window: Some(50), softcap: Some(20.0), sinks: true, page_size: 24, ..spec };
    let per_head = |spec: CaseSpec| CaseSpec { per_head: true, page_size: 128, ..spec };
    let [bf16, .., token] = forms.clone();
    forms.into_iter().chain([options(bf16.clone()), options(token.clone()), per_head(bf16), per_head(token)]).collect()
}

#[test]
fn decode_tiles() {
    let Some(device) = gpu("decode_tiles") else { return };
    let base = CaseSpec { lens: vec![300, 0, 17], ..spec(KvDtype::Bf16, Scales::None) };
    let one_row_warp = |cut: &CudaShape| cut.row_warps == 1;
    check_cut(&device, "decode", one_row_warp, &forms_of(&base));
    check_cut(&device, "decode of short rows", one_row_warp, &forms_of(&CaseSpec { lens: vec![100, 17], ..base.clone() })[..5]);
    let unsplit = CaseSpec { max_partitions: Some(1), lens: vec![1300, 40], ..base.clone() };
    check_cut(&device, "decode by clusters", |cut| cut.row_warps == 1 && cut.cluster > 1, &forms_of(&unsplit));
    let full = CaseSpec { max_partitions: Some(1), kv_heads: 1, lens: (0..60).map(|i| 300 - i).collect(), ..base.clone() };
    check_cut(&device, "decode by clusters on most SMs", |cut| cut.row_warps == 1 && cut.cluster == 2, &forms_of(&full)[..5]);
    let many = CaseSpec { kv_heads: 1, lens: (0..140).map(|i| 5 + i % 30).collect(), ..base.clone() };
    check_cut(&device, "decode, blocks beside each other on an SM", one_row_warp, &forms_of(&many)[..5]);
    let ragged = CaseSpec { query_lens: vec![1, 3, 2], group: 2, ..base.clone() };
    check_cut(&device, "a few rows more", one_row_warp, &forms_of(&ragged));
    let wide = CaseSpec { head_dim: 256, ..base.clone() };
    check_cut(&device, "decode of head_dim 256", one_row_warp, &forms_of(&wide)[..5]);
    let narrow = CaseSpec { head_dim: 64, ..base };
    check_cut(&device, "decode of head_dim 64", one_row_warp, &forms_of(&narrow)[..2]);
}

#[test]
fn verify_tiles() {
    let Some(device) = gpu("verify_tiles") else { return };
    let base = CaseSpec { group: 16, query_lens: vec![4], lens: vec![300, 70], ..spec(KvDtype::Bf16, Scales::None) };
    let shared = |cut: &CudaShape| cut.row_warps > 1;
    check_cut(&device, "verify", shared, &forms_of(&base));
    let unsplit = CaseSpec { max_partitions: Some(1), lens: vec![1300, 40], ..base.clone() };
    check_cut(&device, "verify by clusters", |cut| cut.row_warps > 1 && cut.cluster > 1, &forms_of(&unsplit)[..5]);
    let many = CaseSpec { lens: (0..70).map(|i| 5 + i % 90).collect(), ..base.clone() };
    check_cut(&device, "verify, more blocks than SMs", shared, &forms_of(&many)[..5]);
    check_cut(&device, "verify in turns", |cut| cut.row_warps > 1 && cut.groups == 1, &specs::verify_in_turns());
    let ragged = CaseSpec { query_lens: vec![5, 1, 0], lens: vec![300, 200, 40], ..base.clone() };
    check_cut(&device, "verify, ragged", shared, &forms_of(&ragged));
    let wide = CaseSpec { head_dim: 256, group: 8, ..base.clone() };
    check_cut(&device, "verify of head_dim 256", shared, &forms_of(&wide)[..5]);
    let few = CaseSpec { head_dim: 64, group: 8, query_lens: vec![3], ..base };
    check_cut(&device, "verify of head_dim 64", shared, &forms_of(&few)[..2]);
}

#[test]
fn plain_tiles() {
    let Some(device) = gpu("plain_tiles") else { return };
    let takes_tensor_cores = |spec: &CaseSpec| spec.kv_dtype == KvDtype::F16 && matches!(spec.layout, CacheLayout::Nhd | CacheLayout::Hnd);
    for spec in specs::plain().into_iter().filter(|spec| !takes_tensor_cores(spec)) {
        let spec = CaseSpec { lens: vec![270, 0, 33], ..spec };
        let selection = check_on_device(&device, &spec).unwrap_or_else(|e| panic!("{spec:?}: {e}"));
        assert!(selection.key.cuda.is_none(), "{}", selection.reason);
    }
}

/// Reducers of one warp a row, four and eight; of these with a row's channels in one block and in several.
#[test]
fn reducers() {
    let Some(device) = gpu("reducers") else { return };
    let base = CaseSpec { kv_heads: 1, ..spec(KvDtype::Bf16, Scales::None) };
    let of = |batch: usize, tokens: i64, group, query_len| CaseSpec {
        lens: (0..batch as i64).map(|i| tokens - i * 9).collect(),
        group,
        query_lens: vec![query_len],
        ..base.clone()
    };
    // A few partial results a row, a dozen and many; of few rows and of more than half the SMs.
    for (spec, warps) in
        [(of(40, 400, 4, 1), 1), (of(8, 2600, 4, 1), 4), (of(8, 2600, 16, 1), 4), (of(1, 5200, 4, 1), 8), (of(1, 5200, 16, 5), 8)]
    {
        let selection = check_on_device(&device, &spec).unwrap_or_else(|e| panic!("{spec:?}: {e}"));
        let wanted = format!("a reducer of {warps} warp");
        assert!(selection.reason.to_string().contains(&wanted), "{wanted}, not {}: {spec:?}", selection.reason);
    }
}

/// Every form of a cache is written, its slots on the host and on the device, and its pages copied and read.
#[test]
fn writes_and_copies() -> Result<()> {
    let Some(device) = gpu("writes_and_copies") else { return Ok(()) };
    for (i, (dtype, quantization, layout)) in caches().into_iter().enumerate() {
        let input = [DType::F32, DType::BF16, DType::F16][i % 3];
        let cache = PagedKvCache::new(config(dtype, quantization, Some(layout)), &*device)?;
        let rows =
            |seed: f32| Tensor::randn(seed, 1., (5, DIMS.kv_heads, DIMS.head_dim), &Device::Cpu)?.to_dtype(input)?.to_device(&device);
        let slots = Tensor::new(&[7i64, 8, -1, 8, 191], &Device::Cpu)?;
        cache.write(0, &rows(0.0)?, &rows(1.0)?, &slots)?;
        cache.write(1, &rows(0.0)?, &rows(1.0)?, &slots.to_device(&device)?)?;
        check_page_copies(&cache, &device)?;
        if layout == CacheLayout::Nhd {
            cache.gather(0, &[0, 11], 20)?;
        }
    }
    Ok(())
}
