//! What the op holds to on every GPU, over the backend's own way of making a call.

use candle::{DType, Device, Result, Tensor};
use candle_paged_attn::cache::{CacheDims, CacheLayout, KvDtype};
use candle_paged_attn::plan::{DecodePlan, PlanRequest};
use candle_paged_attn::registry::Arch;
use candle_paged_attn::{KvScale, PlanChoice, merge_attention_states};

use crate::assert_same;
use crate::bits::bits;
use crate::cases::{Case, CaseSpec, Poison};
use crate::reference::floats;

/// Makes a case's call; gives output and LSE, on the CPU.
pub type Call<'a> = &'a dyn Fn(&Case) -> Result<(Tensor, Tensor)>;

/// Panics unless `result` is an error that names every fragment.
#[track_caller]
pub fn refuses<T>(result: Result<T>, fragments: &[&str]) {
    let Err(error) = result else { panic!("no error, where one with {fragments:?} was due") };
    let message = error.to_string();
    fragments.iter().for_each(|fragment| assert!(message.contains(fragment), "{message:?} does not name {fragment:?}"));
}

/// What an error names, and what of a call is made wrong for that.
pub type Wrong = (&'static [&'static str], fn(&mut Case));

/// A call of two sequences of 40 and 50 tokens and head_dim 64 over a BF16 cache is refused after each of these.
pub fn wrong_arguments() -> Vec<Wrong> {
    fn tensor(data: &[u32]) -> Tensor {
        Tensor::new(data, &Device::Cpu).unwrap()
    }
    vec![
        (&["q", "F64"], |c| c.q = c.q.to_dtype(DType::F64).unwrap()),
        (&["q", "7", "2 KV heads"], |c| c.q = c.q.narrow(1, 0, 7).unwrap()),
        (&["q", "head_dim 32", "64"], |c| c.q = c.q.narrow(2, 0, 32).unwrap()),
        (&["q", "contiguous"], |c| c.q = c.q.transpose(1, 2).unwrap().contiguous().unwrap().transpose(1, 2).unwrap()),
        (&["q", "1 rows", "batch 2"], |c| c.q = c.q.narrow(0, 0, 1).unwrap()),
        (&["value_cache", "F16", "BF16"], |c| c.value_cache = c.value_cache.to_dtype(DType::F16).unwrap()),
        (&["context_lens", "sequence 1", "5000"], |c| c.context_lens = tensor(&[40, 5000])),
        (&["context_lens", "[1]", "[2]"], |c| c.context_lens = tensor(&[40])),
        (&["context_lens", "I64"], |c| c.context_lens = c.context_lens.to_dtype(DType::I64).unwrap()),
        (&["block_tables", "9000", "sequence 1", "column 1", "cache of"], |c| {
            c.block_tables = tensor(&[0, 1, 2, 0, 0, 9000, 1, 2]).reshape((2, 4)).unwrap();
        }),
        (&["block_tables", "-1", "sequence 1", "column 2"], |c| {
            c.block_tables = Tensor::new(&[[0i32, 1, 2, 0], [0, 1, -1, 2]], &Device::Cpu).unwrap();
        }),
        (&["softmax_scale", "NaN"], |c| c.options.softmax_scale = Some(f32::NAN)),
        (&["window", "0"], |c| c.options.window = Some(0)),
        (&["max_partitions"], |c| c.options.max_partitions = Some(0)),
        (&["sinks", "[8]", "[3]"], |c| c.options.sinks = Some(Tensor::zeros(3, DType::F32, &Device::Cpu).unwrap())),
        (&["k_scale", "Bf16"], |c| c.options.k_scale = KvScale::Scalar(2.0)),
        (&["query_start", "sequence 1", "3", "2"], |c| c.options.query_start = Some(tensor(&[0, 3, 2]))),
    ]
}

/// `base` with each option.
pub fn options(base: &CaseSpec) -> Vec<CaseSpec> {
    vec![
        CaseSpec { window: Some(100), ..base.clone() },
        CaseSpec { softcap: Some(3.0), ..base.clone() },
        CaseSpec { sinks: true, ..base.clone() },
        CaseSpec { per_head: true, window: Some(33), ..base.clone() },
        CaseSpec { softmax_scale: Some(-0.2), ..base.clone() },
        CaseSpec { plan_free: true, sinks: true, ..base.clone() },
        CaseSpec { max_partitions: Some(1), ..base.clone() },
        CaseSpec { max_partitions: Some(2), workgroup_budget: Some(1), ..base.clone() },
        CaseSpec { query_lens: vec![1, 3, 5], window: Some(64), sinks: true, softcap: Some(20.0), ..base.clone() },
        CaseSpec { q_dtype: DType::F16, signed_tables: false, ..base.clone() },
    ]
}

/// `base` with more query rows a KV head than a block takes.
pub fn many_rows(base: &CaseSpec) -> [CaseSpec; 3] {
    [
        CaseSpec { group: 16, kv_heads: 1, query_lens: vec![9], lens: vec![300, 20], ..base.clone() },
        CaseSpec { group: 16, kv_heads: 1, query_lens: vec![70, 1], lens: vec![300, 400], ..base.clone() },
        CaseSpec { group: 5, kv_heads: 2, query_lens: vec![0, 33, 1, 2], lens: vec![9, 300, 1, 259], per_head: true, ..base.clone() },
    ]
}

/// Three sequences of `base` with what a cache that the crate owns is to serve; `other`: a layout that it may have, too.
pub fn over_a_cache(base: &CaseSpec, other: CacheLayout) -> Vec<CaseSpec> {
    let base = CaseSpec { query_lens: vec![2], lens: vec![700, 0, 130], ..base.clone() };
    let mut specs = vec![
        CaseSpec { window: Some(100), ..base.clone() },
        CaseSpec { per_head: true, sinks: true, softcap: Some(7.0), layout: other, ..base.clone() },
        CaseSpec { query_lens: vec![1, 3, 70], ..base.clone() },
        CaseSpec { plan_free: true, signed_tables: false, q_dtype: DType::F32, q_strided: true, ..base.clone() },
    ];
    if base.kv_dtype != KvDtype::Mxfp4 {
        specs.push(CaseSpec { layout: CacheLayout::Vllm, max_partitions: Some(2), ..base });
    }
    specs
}

/// Panics if it shows whether NaN or infinity is in what nothing attends.
pub fn poison_changes_nothing(base: &CaseSpec, call: Call<'_>) -> Result<()> {
    let spec = CaseSpec { lens: vec![1, 255, 0, 301], query_lens: vec![3], window: Some(100), ..base.clone() };
    let nan = call(&spec.build()?)?;
    let infinity = call(&CaseSpec { poison: Poison::Infinity, ..spec.clone() }.build()?)?;
    assert_same!((bits(&nan.0), bits(&nan.1)), (bits(&infinity.0), bits(&infinity.1)), "{spec:?}");
    Ok(())
}

/// Panics unless sequences without tokens, caches without pages, tables without columns and empty batches give zeros of the right shape.
pub fn empty_contexts_give_zeros(base: &CaseSpec, call: Call<'_>) -> Result<()> {
    let is_empty = |(out, lse): &(Tensor, Tensor)| -> Result<bool> {
        Ok(floats(out)?.iter().all(|v| *v == 0.0) && floats(lse)?.iter().all(|v| *v == f64::NEG_INFINITY))
    };
    for max_partitions in [None, Some(1)] {
        let spec = CaseSpec { lens: vec![0, -5, 9], sinks: max_partitions.is_none(), max_partitions, ..base.clone() };
        let case = spec.build()?;
        let (out, lse) = call(&case)?;
        assert!(is_empty(&(out.narrow(0, 0, 2)?, lse.narrow(0, 0, 2)?))?, "{spec:?}");
        case.expected()?.compare(&out, Some(&lse), 8e-3, 2e-3)?;
    }
    let empty = CaseSpec { lens: vec![], ..base.clone() };
    assert_eq!(call(&empty.build()?)?.0.dims(), [0, base.kv_heads * base.group, base.head_dim]);
    let mut none = CaseSpec { lens: vec![0, 0], ..base.clone() }.build()?;
    let CaseSpec { kv_heads, head_dim, page_size, layout, kv_dtype, .. } = none.spec;
    for (pages, columns) in [(0, 3), (2, 0)] {
        let dims = CacheDims { pages, page_size, kv_heads, head_dim };
        none.key_cache = Tensor::zeros(layout.key_shape(dims, kv_dtype), kv_dtype.dtype(), &Device::Cpu)?;
        none.value_cache = Tensor::zeros(layout.value_shape(dims, kv_dtype), kv_dtype.dtype(), &Device::Cpu)?;
        none.block_tables = Tensor::zeros((2, columns), DType::U32, &Device::Cpu)?;
        assert!(is_empty(&call(&none)?)?, "{pages} pages, {columns} columns");
    }
    Ok(())
}

/// Panics unless attention over two parts of a context, merged, is that over the whole.
pub fn merged_parts_are_the_whole(base: &CaseSpec, call: Call<'_>) -> Result<()> {
    let case = CaseSpec { lens: vec![300, 300], page_size: 16, sinks: true, ..base.clone() }.build()?;
    let part = |from: usize, tokens: u32, sinks: bool| {
        let mut part = case.clone();
        part.block_tables = case.block_tables.narrow(1, from, case.block_tables.dim(1)? - from)?;
        part.context_lens = Tensor::new(&[tokens, tokens], &Device::Cpu)?;
        part.options.sinks = case.options.sinks.clone().filter(|_| sinks);
        call(&part)
    };
    let ((a, a_lse), (b, b_lse)) = (part(0, 128, false)?, part(8, 172, true)?);
    let (merged, lse) = merge_attention_states(&[a, b], &[a_lse, b_lse])?;
    case.expected()?.compare(&merged, Some(&lse), 8e-3, 2e-3)?;
    Ok(())
}

/// Panics unless a call by its own plan, a given one and none are right, and, where it is `checked`, a plan for other lengths is refused.
pub fn plans_agree(base: &CaseSpec, arch: &Arch, checked: bool, call: Call<'_>) -> Result<()> {
    let lens = [3000, 0, 700];
    let case = CaseSpec { lens: lens.map(i64::from).to_vec(), query_lens: vec![2], ..base.clone() }.build()?;
    let request = PlanRequest { max_partitions: Some(3), ..PlanRequest::new(&lens, &[2], base.kv_heads) };
    let plan = DecodePlan::new(&request, arch, &Device::Cpu)?;
    for plan in [PlanChoice::Default, PlanChoice::Given(plan.clone()), PlanChoice::Free] {
        let mut case = case.clone();
        case.options.plan = plan;
        let (out, lse) = call(&case)?;
        case.expected()?.compare(&out, Some(&lse), 8e-3, 2e-3)?;
    }
    if checked {
        let mut stale = case.clone();
        stale.context_lens = Tensor::new(&[3000u32, 0, 300], &Device::Cpu)?;
        stale.options.plan = PlanChoice::Given(plan);
        refuses(call(&stale), &["plan row 2", "made for other lengths"]);
    }
    Ok(())
}
