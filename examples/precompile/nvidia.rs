//! The kernels of a shape on an NVIDIA GPU: those that a cache of it is warmed up with.

use anyhow::Result;
use candle::Device;
use candle_paged_attn::cache::{CacheConfig, CacheDims, ExpectedCalls, PagedKvCache, Quantization};
use candle_paged_attn::cuda::expected_kernels;
use candle_paged_attn::registry::{Arch, M_TILE_ROWS};

use crate::kernels::Kernels;
use crate::options::{KvArg, ScalesArg};
use crate::shape::Shape;

/// Sliding windows between which kernels may differ: how long a row gets decides how far it is split.
const WINDOWS: [usize; 3] = [128, 4095, 1 << 20];

impl Kernels {
    /// Tiles, reducers, planners and cache writes of one KV dtype.
    pub fn add_nvidia(&mut self, shape: &Shape, kv: KvArg, arch: &Arch) -> Result<()> {
        // One page: how many there are makes no difference.
        let dims = CacheDims { pages: 1, page_size: shape.page_size, kv_heads: shape.kv_heads, head_dim: shape.head_dim };
        let (dtype, layout) = (kv.into(), Some(shape.layout(kv, arch)));
        let cache = PagedKvCache::new(CacheConfig { layers: 1, dims, dtype, layout, quantization: quantization(shape, kv) }, &Device::Cpu)?;
        let windows = if shape.window { WINDOWS.map(Some).to_vec() } else { vec![None] };
        for ragged in shape.raggedness() {
            for &window in &windows {
                let calls = ExpectedCalls {
                    batch: shape.max_batch,
                    query_len: longest(shape, ragged),
                    max_pages: shape.max_context.div_ceil(shape.page_size),
                    ragged,
                    per_head_tables: shape.per_head_tables,
                    window,
                    // Any cap has the same kernels.
                    softcap: shape.softcap.then_some(30.0),
                    ..ExpectedCalls::new(shape.q_heads, shape.dtype.into())
                };
                expected_kernels(&cache, &calls, arch)?.into_iter().for_each(|kernel| self.push(kernel));
            }
        }
        Ok(())
    }
}

/// New tokens of the longest sequence; of ragged batches at least as many as have every cut of a tile.
fn longest(shape: &Shape, ragged: bool) -> usize {
    let group = (shape.q_heads / shape.kv_heads).max(1);
    let any = if ragged { (4 * M_TILE_ROWS).div_ceil(group) } else { 1 };
    shape.query_lens.iter().copied().max().unwrap_or(1).max(any)
}

fn quantization(shape: &Shape, kv: KvArg) -> Quantization {
    match (kv, shape.scales) {
        (KvArg::Mxfp4, _) => Quantization::Block,
        (KvArg::F32 | KvArg::F16 | KvArg::Bf16, _) | (_, ScalesArg::None) => Quantization::None,
        (_, ScalesArg::Scalar) => Quantization::Scalar { k: 1.0, v: 1.0 },
        (_, ScalesArg::PerToken) => Quantization::PerToken,
    }
}

#[cfg(test)]
mod tests {
    use candle_paged_attn::jit::{Compiler, JitSettings};
    use candle_paged_attn::registry::ArchName;
    use clap::Parser;

    use super::*;
    use crate::{Args, run, summary, table};

    #[test]
    fn a_shape_has_the_kernels_of_all_its_calls() {
        let shape = Shape { query_lens: vec![1, 4], max_batch: 5, even: true, kv: vec![KvArg::Bf16, KvArg::Fp8], ..Shape::default() };
        let names = Kernels::names(&shape, &Arch::sm90());
        for wanted in [
            "pa_sm90_bf16_d128_p128_w",
            "pa_sm90_bf16_d128_p128_wg",
            "pa_sm90_fp8_d128_p128_w",
            "pa_reduce_d128_bf16",
            "pa_plan_r8",
            "pa_write_fp8",
        ] {
            assert!(names.iter().any(|name| name.starts_with(wanted)), "{wanted}: {names:?}");
        }
        assert!(!names.iter().any(|name| name.contains("ragged")), "{names:?}");
        let ragged = Kernels::names(&Shape { even: false, ..shape }, &Arch::sm90());
        assert!(names.iter().all(|name| ragged.contains(name)) && ragged.iter().any(|name| name.contains("ragged")), "{ragged:?}");
    }

    #[test]
    fn other_caches_have_the_plain_tile() {
        let shape = Shape { kv: vec![KvArg::F32, KvArg::Mxfp4], even: true, max_batch: 1, head_dim: 96, ..Shape::default() };
        let names = Kernels::names(&shape, &Arch::sm80());
        assert!(
            names.iter().any(|name| name == "pa_sm80_f32_d96_p128_plain")
                && names.iter().any(|name| name == "pa_sm80_mxfp4_d96_p128_plain"),
            "{names:?}"
        );
    }

    #[test]
    fn a_filled_cache_serves_without_a_compiler() {
        if let Err(missing) = Compiler::new(JitSettings::default()).compiler_of(ArchName::Sm90) {
            println!("SKIPPED a_filled_cache_serves_without_a_compiler: {missing}");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let cache = folder.path().to_str().unwrap();
        let options = "--kv fp8 --scales per-token --even --max-batch 2 --max-context 4096 --page-size 16 --jobs 2 --arch sm89,sm90";
        let precompile =
            || run(&Args::try_parse_from(["precompile", "--cache", cache].into_iter().chain(options.split(' '))).unwrap()).unwrap();
        let first = precompile();
        let table = table::draw(&first.jobs);
        assert!(first.complete() && table.contains("pa_sm89_fp8_d128_p16_w") && table.contains("pa_sm90_fp8_d128_p16_w"), "{table}");
        assert!(summary(&precompile()).contains(" 0 compiled"));
        let settings = JitSettings { nvrtc: Some("/nonexistent".into()), cache_dir: Some(folder.path().into()), ..JitSettings::default() };
        let without = Compiler::new(settings);
        first.jobs.iter().for_each(|job| drop(without.code_object(&job.spec).unwrap()));
    }

    #[test]
    fn bad_shapes_are_named() {
        let error = |shape: Shape| format!("{:#}", Kernels::default().add(&shape, &[Arch::sm90()]).unwrap_err());
        assert!(error(Shape { head_dim: 100, ..Shape::default() }).contains("head_dim"));
        assert!(error(Shape { q_heads: 7, kv_heads: 2, ..Shape::default() }).contains("q_heads"));
        assert!(error(Shape { max_context: 0, ..Shape::default() }).contains("max_context"));
    }
}
