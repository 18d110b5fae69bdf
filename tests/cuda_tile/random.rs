//! Random calls, against float64. `RANDOM_CALLS` (24 by default) of them, drawn from `RANDOM_SEED` (1): the same number gives the same calls.

use candle::{DType, Result};
use candle_paged_attn::cache::{CacheLayout, KvDtype};
use candle_paged_attn::cuda::Tables;
use candle_paged_attn::registry::Arch;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rayon::prelude::*;
use testkit::cases::{Case, CaseSpec, Poison, Scales};

use crate::call::Call;
use crate::cases::{all_right, archs, check_case};
use crate::require_nvrtc;
use crate::specs::forms;

fn pick<T: Copy>(rng: &mut StdRng, of: &[T]) -> T {
    *of.choose(rng).unwrap()
}

/// A cache and heads that tensor cores take, or any.
fn form(rng: &mut StdRng) -> CaseSpec {
    let mut kv = forms().to_vec();
    let (head_dims, layouts, queries): (&[usize], &[CacheLayout], &[DType]) = if rng.random_bool(0.7) {
        (&[64, 128, 128, 128, 256], &[CacheLayout::Nhd, CacheLayout::Hnd], &[DType::BF16, DType::F16])
    } else {
        kv.extend([(KvDtype::F32, Scales::None), (KvDtype::Mxfp4, Scales::None)]);
        (&[8, 40, 64, 72, 80, 96, 104, 112, 160, 192, 512, 576], &CacheLayout::ALL, &[DType::BF16, DType::F16, DType::F32])
    };
    let (kv_dtype, scales) = pick(rng, &kv);
    CaseSpec {
        kv_heads: pick(rng, &[1, 1, 2, 3]),
        group: pick(rng, &[1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 20, 24, 40, 64]),
        head_dim: pick(rng, head_dims),
        // Of more than one token: a scale tensor of one element is a factor of the cache, whatever its shape.
        page_size: pick(rng, &[2, 3, 8, 16, 16, 24, 32, 48, 64, 100, 128, 128, 256, 1000, 1024]),
        layout: pick(rng, layouts),
        q_dtype: pick(rng, queries),
        kv_dtype,
        scales,
        ..CaseSpec::default()
    }
}

/// Lengths at the bounds of pages, tiles and chunks, and about the query's, as many as the simulator takes in a second or so.
fn lengths(rng: &mut StdRng, form: &CaseSpec, query_lens: &[usize]) -> Vec<i64> {
    let page = form.page_size as i64;
    let mut left = 8_000_000usize;
    let len = |&query_len: &usize| {
        let query = query_len as i64;
        let bounds = [0, 1, query - 1, query, query + 1, -3, page, 2 * page + 1, 128, 129, 64 * 5 - 1, 255];
        let len = if rng.random_bool(0.5) { pick(rng, &bounds) } else { rng.random_range(1..1200) };
        let of_a_token = (query_len * form.group).next_multiple_of(16).max(16) * form.kv_heads * form.head_dim;
        let len = len.min((left / of_a_token) as i64);
        left = left.saturating_sub(of_a_token * len.max(8) as usize);
        len
    };
    query_lens.iter().map(len).collect()
}

fn call(rng: &mut StdRng) -> CaseSpec {
    let form = form(rng);
    let batch = if rng.random_bool(0.1) { rng.random_range(20..60) } else { rng.random_range(1..6) };
    let most = if form.group >= 24 { 6 } else { 16 };
    let mut query_len = |least| if rng.random_bool(0.4) { 1 } else { rng.random_range(least..=most) };
    let longest = query_len(1);
    let ragged: Vec<usize> = (0..batch).map(|_| query_len(0)).collect();
    let is_ragged = batch > 1 && rng.random_bool(0.3);
    let each = if is_ragged { ragged.clone() } else { vec![longest; batch] };
    let lens = lengths(rng, &form, &each);
    CaseSpec {
        seed: rng.random(),
        lens,
        query_lens: if is_ragged { ragged } else { vec![longest] },
        per_head: rng.random_bool(0.2),
        window: pick(rng, &[None, None, Some(1), Some(17), Some(128), Some(129), Some(5000)]),
        softcap: pick(rng, &[None, None, None, Some(0.5), Some(50.0), Some(1e5)]),
        sinks: rng.random_bool(0.3),
        softmax_scale: pick(rng, &[None, None, None, Some(-0.2), Some(0.0)]),
        // An F32 query's tolerance is for scores of about 1.
        q_factor: if form.q_dtype == DType::F32 { 1.0 } else { pick(rng, &[1.0, 1.0, 16.0]) },
        plan_free: rng.random_bool(0.15),
        max_partitions: pick(rng, &[None, None, Some(1), Some(3)]),
        workgroup_budget: pick(rng, &[None, None, Some(2), Some(7), Some(50)]),
        poison: pick(rng, &[Poison::NaN, Poison::Infinity]),
        page_strided: rng.random_bool(0.2),
        q_strided: rng.random_bool(0.2),
        signed_tables: rng.random_bool(0.7),
        ..form
    }
}

/// A call that an arch takes, where its tables are.
fn drawn(seed: u64) -> (Arch, Case, Tables) {
    let mut rng = StdRng::seed_from_u64(seed);
    loop {
        let (spec, arch) = (call(&mut rng), archs().choose(&mut rng).unwrap().clone());
        let tables = pick(&mut rng, &[Tables::Host, Tables::Device]);
        let Ok(case) = spec.build() else { continue };
        if Call::new(&case, &arch, tables).is_ok() {
            return (arch, case, tables);
        }
    }
}

#[test]
fn random_calls() {
    require_nvrtc!();
    let number = |name: &str, default: u64| std::env::var(name).ok().map_or(default, |value| value.parse().unwrap());
    let (calls, seed) = (number("RANDOM_CALLS", 24), number("RANDOM_SEED", 1));
    let check = |i: u64| -> Result<()> {
        let (arch, case, tables) = drawn(seed.wrapping_mul(1 << 32).wrapping_add(i));
        check_case(&arch, &case, tables, |_| true)
    };
    all_right((0..calls).into_par_iter().map(check).collect());
}
