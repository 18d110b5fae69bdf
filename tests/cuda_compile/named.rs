//! The specializations that the GPU's tests and the benchmarks name, and some more.

use std::collections::HashSet;

use candle::DType;
use candle_paged_attn::cache::{CacheLayout, KvDtype};
use candle_paged_attn::cuda::specialize::{self, REDUCER_SPLIT, REDUCER_WARPS, ReducerCut, WriteKey};
use candle_paged_attn::jit::Specialization;
use candle_paged_attn::plan::{HostPlan, PlanRequest};
use candle_paged_attn::registry::{Arch, Problem, ScaleMode, select};
use testkit::cases::CaseSpec;
use testkit::workloads::{Fp8Scale, Workload, families};

use crate::specs;

/// Each once.
pub fn specializations(arch: &Arch) -> Vec<Specialization> {
    let mut all = vec![];
    for problem in problems(arch) {
        let selection = select(&problem, arch).unwrap();
        all.push(specialize::tile(&selection).unwrap());
        for cut in reducer_cuts(problem.head_dim, specialize::leaves_f16(&selection)) {
            let Problem { head_dim, query_dtype, ragged, per_head_tables, .. } = problem;
            all.push(specialize::reduce(arch.name, head_dim, query_dtype, ragged, per_head_tables, cut).unwrap());
        }
        let rows = problem.batch * if problem.per_head_tables { problem.kv_heads } else { 1 };
        all.extend(specialize::plan(arch, rows, problem.ragged).ok());
    }
    all.extend(writes(arch));
    let mut seen = HashSet::new();
    all.retain(|spec| seen.insert((spec.kernel.clone(), spec.defines.clone())));
    all
}

fn reducer_cuts(head_dim: usize, f16: bool) -> Vec<ReducerCut> {
    let mut cuts = REDUCER_WARPS.map(|warps| ReducerCut { warps, split: 1, f16 }).to_vec();
    if [64, 128, 256, 512].contains(&head_dim) {
        cuts.extend(REDUCER_WARPS[1..].iter().map(|&warps| ReducerCut { warps, split: REDUCER_SPLIT, f16 }));
    }
    cuts
}

fn problems(arch: &Arch) -> Vec<Problem> {
    let cases = [specs::tensor_cores(), specs::plain(), specs::sizes(), specs::options(), specs::many_sequences()].concat();
    let mut problems: Vec<Problem> = cases.iter().map(|spec| of_case(spec, arch)).collect();
    let workloads = families().unwrap().into_iter().flat_map(|family| family.workloads);
    problems.extend(workloads.map(|workload| of_workload(&workload, arch)));
    // Few short rows are walked whole.
    let whole = |p: &Problem| {
        (p.batch <= 33 && p.query_len == 1).then(|| [8, 16].map(|task_tiles| Problem { plan_free: true, task_tiles, ..p.clone() }))
    };
    let whole: Vec<Problem> = problems.iter().filter_map(whole).flatten().collect();
    // With tables on the device it is not known that tasks are short.
    let unknown: Vec<Problem> = problems.iter().map(|p| Problem { task_tiles: usize::MAX, ..p.clone() }).collect();
    problems.extend(whole.into_iter().chain(unknown));
    let wide = Problem { layout: CacheLayout::Nhd, head_dim: 256, query_len: 4, capacity: 132, ..Problem::default() };
    for (kv_dtype, scales) in [(KvDtype::Bf16, ScaleMode::None), (KvDtype::F16, ScaleMode::None), (KvDtype::Fp8, ScaleMode::PerToken)] {
        problems.extend([wide.clone(), Problem { query_len: 1, ..wide.clone() }].map(|p| Problem { kv_dtype, scales, ..p }));
    }
    problems
}

/// `p` with what its plan says.
fn planned(p: Problem, lens: &[i32], query_lens: &[usize], budget: Option<usize>, arch: &Arch) -> Problem {
    let heads = if p.per_head_tables { 1 } else { p.kv_heads };
    let request = PlanRequest {
        max_partitions: p.max_partitions,
        workgroup_budget: budget,
        max_context_len: lens.iter().max().map(|&longest| longest.max(0) as usize),
        ..PlanRequest::new(lens, query_lens, heads)
    };
    let plan = if p.plan_free { HostPlan::free(&request, arch) } else { HostPlan::new(&request, arch).unwrap() };
    Problem { capacity: plan.capacity(), task_tiles: plan.longest_task(), ..p }
}

fn of_case(spec: &CaseSpec, arch: &Arch) -> Problem {
    let heads = if spec.per_head { spec.kv_heads } else { 1 };
    let lens: Vec<i32> = spec.lens.iter().flat_map(|&len| std::iter::repeat_n(len as i32, heads)).collect();
    let problem = spec.problem();
    let query_len = problem.query_len;
    planned(problem, &lens, &[query_len], spec.workgroup_budget, arch)
}

fn of_workload(w: &Workload, arch: &Arch) -> Problem {
    let lens: Vec<i32> = w.contexts().into_iter().map(|tokens| tokens as i32).collect();
    let problem = Problem {
        batch: w.batch,
        q_heads: w.num_q_heads,
        kv_heads: w.num_kv_heads,
        head_dim: w.head_dim,
        page_size: w.page_size,
        query_len: w.query_len,
        kv_dtype: w.kv_dtype(),
        layout: CacheLayout::Nhd,
        scales: match (w.kv_dtype(), w.fp8_scale) {
            (KvDtype::Mxfp4, _) => ScaleMode::Block,
            (_, Some(Fp8Scale::PerToken)) => ScaleMode::PerToken,
            (_, Some(Fp8Scale::Scalar)) => ScaleMode::Scalar,
            (_, None) => ScaleMode::None,
        },
        max_pages: w.table_width(),
        plan_free: w.plan_free,
        max_partitions: w.max_partitions,
        ..Problem::default()
    };
    planned(problem, &lens, &[w.query_len], None, arch)
}

/// Every form of a cache in every layout, from each dtype in turn.
fn writes(arch: &Arch) -> Vec<Specialization> {
    let forms = [
        (KvDtype::F32, ScaleMode::None),
        (KvDtype::F16, ScaleMode::None),
        (KvDtype::Bf16, ScaleMode::None),
        (KvDtype::Fp8, ScaleMode::Scalar),
        (KvDtype::Fp8, ScaleMode::PerToken),
        (KvDtype::Mxfp4, ScaleMode::Block),
    ];
    let all = forms.into_iter().flat_map(|(kv_dtype, scales)| CacheLayout::ALL.map(|layout| (kv_dtype, scales, layout)));
    let held = all.filter(|(kv_dtype, _, layout)| *kv_dtype != KvDtype::Mxfp4 || matches!(layout, CacheLayout::Nhd | CacheLayout::Hnd));
    let key = |(i, (kv_dtype, scales, layout))| {
        let dtype = [DType::F32, DType::BF16, DType::F16][i % 3];
        (WriteKey { arch: arch.name, head_dim: 64, page_size: 16, dtype, kv_dtype, scales, layout }, i % 2 == 0)
    };
    held.enumerate().map(key).map(|(key, latest)| specialize::write_with(&key, key.dtype, latest).unwrap()).collect()
}
