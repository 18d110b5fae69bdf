//! The calls that the GPU's tests make, against float64.

use candle::{Device, Error, Result, Tensor};
use candle_paged_attn::cache::{CacheLayout, KvDtype};
use candle_paged_attn::cuda::Tables;
use candle_paged_attn::registry::{Arch, ArchName, Selection};
use rayon::prelude::*;
use testkit::cases::{Case, CaseSpec, Scales};
use testkit::errors::chain;

use crate::call::Call;
use crate::cuts;
use crate::require_nvrtc;
use crate::specs::{self, spec};

/// Archs that kernels are written for.
pub fn archs() -> [Arch; 3] {
    [Arch::sm90(), Arch::sm89(), Arch::sm80()]
}

/// Makes a call and compares it with the float64 answer. Errors, which say what the call was: something is wrong, or the kernel that is chosen is not as
/// `wanted`.
pub fn check(arch: &Arch, spec: &CaseSpec, tables: Tables, wanted: impl Fn(&Selection) -> bool) -> Result<()> {
    check_case(arch, &spec.build()?, tables, wanted)
}

/// [`check`] of a call that was built.
pub fn check_case(arch: &Arch, case: &Case, tables: Tables, wanted: impl Fn(&Selection) -> bool) -> Result<()> {
    let (call, spec) = (Call::new(case, arch, tables)?, &case.spec);
    let selection = call.selection();
    let compare = |(out, lse): (Tensor, Tensor)| case.expected()?.compare(&out, Some(&lse), spec.cuda_tolerance(), 2e-3);
    let checked = if wanted(selection) { call.run().and_then(compare).map(drop) } else { Err(Error::msg("another kernel is wanted")) };
    let context = || format!("{arch}, tables on the {tables:?}: {}: {}: {spec:?}", selection.kernel(), selection.reason);
    checked.map_err(|error| error.context(context()))
}

/// Panics with the first few errors.
#[track_caller]
pub fn all_right(results: Vec<Result<()>>) {
    let calls = results.len();
    let errors: Vec<String> = results.into_iter().filter_map(Result::err).map(|error| chain(&error.into())).collect();
    let shown = &errors[..errors.len().min(5)];
    assert!(errors.is_empty(), "{} of {calls} calls:\n{}", errors.len(), shown.join("\n\n"));
}

/// Sequences of a call that all archs make: more of them change the tasks alone, and take the simulator long.
const MOST_SEQUENCES: usize = 16;

/// Every call on every arch, those of many sequences on an H200.
pub fn on_archs(specs: &[CaseSpec]) -> Vec<(Arch, &CaseSpec)> {
    let all = archs().into_iter().flat_map(|arch| specs.iter().map(move |spec| (arch.clone(), spec)));
    all.filter(|(arch, spec)| spec.lens.len() <= MOST_SEQUENCES || arch.name == ArchName::Sm90).collect()
}

/// Checks every call.
#[track_caller]
pub fn check_all(specs: &[CaseSpec]) {
    all_right(on_archs(specs).par_iter().map(|(arch, spec)| check(arch, spec, Tables::Host, |_| true)).collect());
}

#[test]
fn the_tensor_core_tile_in_every_form() {
    require_nvrtc!();
    check_all(&specs::tensor_cores());
}

#[test]
fn the_plain_tile_in_every_layout_and_dtype() {
    require_nvrtc!();
    check_all(&specs::plain());
}

#[test]
fn every_head_dim_page_size_and_group() {
    require_nvrtc!();
    check_all(&specs::sizes());
}

#[test]
fn every_option_in_every_form() {
    require_nvrtc!();
    check_all(&specs::options());
}

#[test]
fn many_sequences() {
    require_nvrtc!();
    check_all(&specs::many_sequences());
}

/// From one token to 1024, in each layout that holds such pages.
#[test]
fn pages() {
    require_nvrtc!();
    let both = |base: CaseSpec| {
        [(KvDtype::Bf16, Scales::None), (KvDtype::Fp8, Scales::PerToken)].map(|(kv_dtype, scales)| CaseSpec {
            kv_dtype,
            scales,
            ..base.clone()
        })
    };
    let of = |page_size: usize, layout| CaseSpec { page_size, layout, lens: vec![270, 3], ..spec(KvDtype::Bf16, Scales::None) };
    let of_each = |pages: &'static [usize], layouts: [CacheLayout; 2]| {
        pages.iter().flat_map(move |&page| layouts.into_iter().flat_map(move |layout| both(of(page, layout))))
    };
    let rows = of_each(&[1, 2, 24, 64, 1024], [CacheLayout::Nhd, CacheLayout::Hnd]);
    let chunks = of_each(&[16, 48, 1024], [CacheLayout::Vllm, CacheLayout::Shuffled]);
    // More pages a task than a warp has ids of at once.
    let many = [(4, 1, 1), (16, 4, 2)].into_iter().flat_map(|(group, query_len, page)| {
        let query_lens = vec![query_len];
        both(CaseSpec { kv_heads: 1, group, query_lens, lens: vec![1500], workgroup_budget: Some(2), ..of(page, CacheLayout::Nhd) })
    });
    check_all(&rows.chain(chunks).chain(many).collect::<Vec<_>>());
}

#[test]
fn an_infinite_query_is_its_own_heads_alone() {
    require_nvrtc!();
    let pairs = cuts::one_infinite_head().unwrap();
    let calls: Vec<_> = archs().into_iter().flat_map(|arch| pairs.iter().map(move |pair| (arch.clone(), pair))).collect();
    let check = |(arch, pair): &(Arch, &[Case; 2])| {
        let checked = cuts::check_infinite_head(pair, |case| Call::new(case, arch, Tables::Host)?.run());
        checked.map_err(|error| error.context(format!("{arch}: {:?}", pair[0].spec)))
    };
    all_right(calls.par_iter().map(check).collect());
}

#[test]
fn queries_and_token_scales_between_sixteen_bytes() {
    require_nvrtc!();
    let cases = cuts::between_sixteen_bytes().unwrap();
    let calls: Vec<_> = archs().into_iter().flat_map(|arch| cases.iter().map(move |case| (arch.clone(), case))).collect();
    all_right(calls.par_iter().map(|(arch, case)| check_case(arch, case, Tables::Host, |_| true)).collect());
}

#[test]
fn empty_batches_and_caches() {
    require_nvrtc!();
    let of = |lens: &[i64]| CaseSpec { lens: lens.to_vec(), ..spec(KvDtype::Bf16, Scales::None) };
    check_all(&[of(&[0, -3]), of(&[])]);
}

/// Tables that the host does not check: page ids are clamped to the cache, lengths to the table.
#[test]
fn wild_tables_stay_inside() {
    require_nvrtc!();
    let decode = specs::forms().map(|(kv_dtype, scales)| CaseSpec { lens: vec![300, 70], ..spec(kv_dtype, scales) });
    let [bf16, ..] = &decode;
    let (plain, apart) = (CaseSpec { layout: CacheLayout::Vllm, ..bf16.clone() }, CaseSpec { page_size: 24, ..bf16.clone() });
    let verify = decode.clone().map(|spec| CaseSpec { group: 16, query_lens: vec![4], ..spec });
    let all: Vec<_> = decode.into_iter().chain(verify).chain([plain, apart]).collect();
    let check = |spec: &CaseSpec| -> Result<()> {
        let mut case = spec.build()?;
        let first_past = case.key_cache.dims()[0] as i32;
        for (page, tokens) in [(first_past, 300), (-1, 300), (i32::MIN, 300), (-1, i32::MAX)] {
            case.block_tables = Tensor::full(page, case.block_tables.dims().to_vec(), &Device::Cpu)?;
            case.context_lens = Tensor::full(tokens, spec.lens.len(), &Device::Cpu)?;
            let ran = Call::new(&case, &Arch::sm90(), Tables::Device)?.run();
            ran.map_err(|error| error.context(format!("pages {page}, {tokens} tokens: {spec:?}")))?;
        }
        Ok(())
    };
    all_right(all.par_iter().map(check).collect());
}
