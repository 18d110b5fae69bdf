//! Small calls of every kernel variant. `tests/cuda_tile` makes them where there is no GPU.

use candle::{DType, Device, IndexOp, Result, Tensor};
use candle_paged_attn::KvScale;
use candle_paged_attn::cache::{CacheLayout, KvDtype};
use candle_paged_attn::registry::CudaShape;
use testkit::cases::{Case, CaseSpec, Scales};

use crate::specs::{self, forms, spec};

/// Cases whose blocks an H200 cuts one way.
pub struct Cut {
    pub name: &'static str,
    pub is: fn(&CudaShape) -> bool,
    pub specs: Vec<CaseSpec>,
}

/// Every form that the tensor-core tile reads, and the options at once.
fn forms_of(base: &CaseSpec) -> Vec<CaseSpec> {
    let forms = forms().map(|(kv_dtype, scales)| CaseSpec { kv_dtype, scales, ..base.clone() });
    let options = |spec: CaseSpec| CaseSpec { window: Some(50), softcap: Some(20.0), sinks: true, page_size: 24, ..spec };
    let per_head = |spec: CaseSpec| CaseSpec { per_head: true, page_size: 128, ..spec };
    let [bf16, _, _, scalar, token] = forms.clone();
    let some = [bf16, scalar, token];
    forms.into_iter().chain(some.clone().map(options)).chain(some.map(per_head)).collect()
}

/// The first `count` of [`forms_of`].
fn some_of(base: &CaseSpec, count: usize) -> Vec<CaseSpec> {
    forms_of(base).into_iter().take(count).collect()
}

pub fn decode() -> Vec<Cut> {
    let base = CaseSpec { lens: vec![300, 0, 17], ..spec(KvDtype::Bf16, Scales::None) };
    let is: fn(&CudaShape) -> bool = |cut| cut.row_warps == 1;
    let short = CaseSpec { lens: vec![100, 17], ..base.clone() };
    let unsplit = CaseSpec { max_partitions: Some(1), lens: vec![1300, 40], ..base.clone() };
    let full = CaseSpec { max_partitions: Some(1), kv_heads: 1, lens: (0..60).map(|i| 300 - i).collect(), ..base.clone() };
    let many = CaseSpec { kv_heads: 1, lens: (0..140).map(|i| 5 + i % 30).collect(), ..base.clone() };
    let ragged = CaseSpec { query_lens: vec![1, 3, 2], group: 2, ..base.clone() };
    let wide = CaseSpec { head_dim: 256, ..base.clone() };
    let narrow = CaseSpec { head_dim: 64, ..base.clone() };
    vec![
        Cut { name: "decode", is, specs: forms_of(&base) },
        Cut { name: "decode of short rows", is, specs: some_of(&short, 5) },
        Cut { name: "decode by clusters", is: |cut| cut.row_warps == 1 && cut.cluster > 1, specs: forms_of(&unsplit) },
        Cut { name: "decode by clusters on most SMs", is: |cut| cut.row_warps == 1 && cut.cluster == 2, specs: some_of(&full, 5) },
        Cut { name: "decode, blocks beside each other on an SM", is, specs: some_of(&many, 5) },
        Cut { name: "a few rows more", is, specs: forms_of(&ragged) },
        Cut { name: "decode of head_dim 256", is, specs: some_of(&wide, 5) },
        Cut { name: "decode of head_dim 64", is, specs: some_of(&narrow, 2) },
    ]
}

pub fn verify() -> Vec<Cut> {
    let base = CaseSpec { group: 16, query_lens: vec![4], lens: vec![300, 70], ..spec(KvDtype::Bf16, Scales::None) };
    let is: fn(&CudaShape) -> bool = |cut| cut.row_warps > 1;
    let unsplit = CaseSpec { max_partitions: Some(1), lens: vec![1300, 40], ..base.clone() };
    let many = CaseSpec { lens: (0..70).map(|i| 5 + i % 90).collect(), ..base.clone() };
    let ragged = CaseSpec { query_lens: vec![5, 1, 0], lens: vec![300, 200, 40], ..base.clone() };
    let wide = CaseSpec { head_dim: 256, group: 8, ..base.clone() };
    let few = CaseSpec { head_dim: 64, group: 8, query_lens: vec![3], ..base.clone() };
    vec![
        Cut { name: "verify", is, specs: forms_of(&base) },
        Cut { name: "verify by clusters", is: |cut| cut.row_warps > 1 && cut.cluster > 1, specs: some_of(&unsplit, 5) },
        Cut { name: "verify, more blocks than SMs", is, specs: some_of(&many, 5) },
        Cut { name: "verify in turns", is: |cut| cut.row_warps > 1 && cut.groups == 1, specs: specs::verify_in_turns() },
        Cut { name: "verify, ragged", is, specs: forms_of(&ragged) },
        Cut { name: "verify of head_dim 256", is, specs: some_of(&wide, 5) },
        Cut { name: "verify of head_dim 64", is, specs: some_of(&few, 2) },
    ]
}

pub fn plain() -> Vec<CaseSpec> {
    let takes_tensor_cores = |spec: &CaseSpec| spec.kv_dtype == KvDtype::F16 && matches!(spec.layout, CacheLayout::Nhd | CacheLayout::Hnd);
    let others = specs::plain().into_iter().filter(|spec| !takes_tensor_cores(spec));
    others.map(|spec| CaseSpec { lens: vec![270, 0, 33], ..spec }).collect()
}

/// Reducers of one warp a row, four and eight; of these with a row's channels in one block and in several. With the warps that an H200 takes.
pub fn reducers() -> Vec<(CaseSpec, usize)> {
    let base = CaseSpec { kv_heads: 1, ..spec(KvDtype::Bf16, Scales::None) };
    let of = |batch: usize, tokens: i64, group, query_len| CaseSpec {
        lens: (0..batch as i64).map(|i| tokens - i * 9).collect(),
        group,
        query_lens: vec![query_len],
        ..base.clone()
    };
    // A few partial results a row, a dozen and many; of few rows and of more than half the SMs.
    vec![(of(40, 400, 4, 1), 1), (of(8, 2600, 4, 1), 4), (of(8, 2600, 16, 1), 4), (of(1, 5200, 4, 1), 8), (of(1, 5200, 16, 5), 8)]
}

/// What a tile copies 16 bytes at a time where it can, and by elements elsewhere: queries and token scales that begin and step between these.
pub fn between_sixteen_bytes() -> Result<Vec<Case>> {
    let of = |(kv, scales, page_size)| -> Result<Case> {
        let mut case = CaseSpec { lens: vec![700, 64, 5], query_lens: vec![4], group: 16, page_size, ..spec(kv, scales) }.build()?;
        let (rows, heads, head_dim) = case.q.dims3()?;
        // Two elements between heads: multiples of four bytes.
        let gap = Tensor::zeros((rows, heads, 2), DType::BF16, &Device::Cpu)?;
        case.q = Tensor::cat(&[&case.q, &gap], 2)?.narrow(2, 0, head_dim)?;
        if let (KvScale::Tensor(k), KvScale::Tensor(v)) = (&case.options.k_scale, &case.options.v_scale) {
            // K's begin four bytes on; V's have another value between each two.
            let (pages, heads, tokens) = k.dims3()?;
            let ahead = Tensor::full(f32::NAN, (pages, heads, 1), &Device::Cpu)?;
            let shifted = Tensor::cat(&[&ahead, k], 2)?.narrow(2, 1, tokens)?;
            let between = Tensor::full(f32::NAN, v.dims(), &Device::Cpu)?;
            let apart = Tensor::stack(&[v, &between], 3)?.narrow(3, 0, 1)?.squeeze(3)?;
            (case.options.k_scale, case.options.v_scale) = (KvScale::Tensor(shifted), KvScale::Tensor(apart));
        }
        Ok(case)
    };
    [(KvDtype::Fp8, Scales::PerToken, 128), (KvDtype::Fp8, Scales::PerToken, 16), (KvDtype::Bf16, Scales::None, 128)]
        .map(of)
        .into_iter()
        .collect()
}

/// Calls with an infinity in one head of the first query row, and without.
pub fn one_infinite_head() -> Result<Vec<[Case; 2]>> {
    let of = |base| -> Result<[Case; 2]> {
        let finite = CaseSpec { lens: vec![40], ..base }.build()?;
        let infinity = Tensor::full(f32::INFINITY, (1, 1, 1), &Device::Cpu)?.to_dtype(finite.q.dtype())?;
        let q = finite.q.slice_assign(&[0..1, INFINITE_HEAD..INFINITE_HEAD + 1, 5..6], &infinity)?;
        Ok([Case { q, ..finite.clone() }, finite])
    };
    specs::decode_and_verify().map(of).collect()
}

const INFINITE_HEAD: usize = 1;

/// Runs a pair of [`one_infinite_head`]: that head is no number, every other one is right.
pub fn check_infinite_head([infinite, finite]: &[Case; 2], run: impl Fn(&Case) -> Result<(Tensor, Tensor)>) -> Result<()> {
    let on_cpu = |(out, lse): (Tensor, Tensor)| -> Result<_> { Ok((out.to_device(&Device::Cpu)?, lse.to_device(&Device::Cpu)?)) };
    let (out, lse) = on_cpu(run(infinite)?)?;
    let (finite_out, finite_lse) = on_cpu(run(finite)?)?;
    let head = out.i((0, INFINITE_HEAD))?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
    if head.iter().any(|x| x.is_finite()) {
        candle::bail!("the output of a query with an infinity is {:?}", &head[..4])
    }
    let heads = INFINITE_HEAD..INFINITE_HEAD + 1;
    let out = out.slice_assign(&[0..1, heads.clone(), 0..finite.spec.head_dim], &finite_out.i((0..1, heads.clone()))?)?;
    let lse = lse.slice_assign(&[0..1, heads.clone()], &finite_lse.i((0..1, heads))?)?;
    finite.expected()?.compare(&out, Some(&lse), finite.spec.cuda_tolerance(), 2e-3).map(drop)
}
