//! The kernels of a shape on an AMD GPU.

use anyhow::Result;
use candle_paged_attn::plan::{PlanRequest, capacity};
use candle_paged_attn::registry::{Arch, ArchName, M_TILE_ROWS, Problem, ScaleMode};
use candle_paged_attn::rocm::specialize::{self, WriteKey};

use crate::kernels::Kernels;
use crate::options::{KvArg, ScalesArg};
use crate::shape::Shape;

impl Kernels {
    /// Tiles and the cache write of one KV dtype.
    pub fn add_amd(&mut self, shape: &Shape, kv: KvArg, arch: &Arch) -> Result<()> {
        if arch.name == ArchName::Gfx1250 {
            specialize::select(&Problem::default(), arch).err().into_iter().for_each(|error| self.note(error.to_string()));
        } else {
            let tile = |problem| specialize::tile(&specialize::select(&problem, arch)?);
            let tiles = problems(shape, kv, arch)?.into_iter().map(tile).collect::<candle::Result<Vec<_>>>()?;
            tiles.into_iter().for_each(|tile| self.push(tile));
        }
        self.push(specialize::write(&write_key(shape, kv, arch))?);
        Ok(())
    }

    /// Reducers and planners, whatever the cache stores.
    pub fn add_amd_helpers(&mut self, shape: &Shape, arch: &Arch) -> Result<()> {
        for ragged in shape.raggedness() {
            for threads in specialize::REDUCER_THREADS {
                self.push(specialize::reduce(arch.name, shape.head_dim, shape.dtype.into(), ragged, threads)?);
            }
            let rows = shape.max_batch * shape.rows_a_sequence();
            let buckets = std::iter::successors(Some(1_usize), |bucket| bucket.checked_mul(2)).take_while(|&bucket| bucket < 2 * rows);
            // A batch that no planner's block holds is planned on the host.
            buckets.map_while(|bucket| specialize::plan(arch, bucket, ragged).ok()).for_each(|plan| self.push(plan));
        }
        Ok(())
    }
}

/// New tokens of the longest sequence. A ragged batch may have any number: as many as fill one to four M-tiles, the most of a workgroup.
fn longest(shape: &Shape, ragged: bool) -> Vec<usize> {
    let group = (shape.q_heads / shape.kv_heads).max(1);
    let any = if ragged { (4 * M_TILE_ROWS).div_ceil(group) } else { 0 };
    shape.query_lens.iter().copied().chain(1..=any).collect()
}

/// The calls whose kernels may differ: each query length, even and ragged, split over workgroups and not (then with sinks, too, which the
/// reducer adds), one sequence and many.
fn problems(shape: &Shape, kv: KvArg, arch: &Arch) -> Result<Vec<Problem>> {
    let mut problems = vec![];
    for (ragged, query_len) in shape.raggedness().flat_map(|ragged| longest(shape, ragged).into_iter().map(move |len| (ragged, len))) {
        let splits = [(None, false), (Some(1), false), (Some(1), true)];
        for ((max_partitions, sinks), batch) in splits.into_iter().flat_map(|split| [1, shape.max_batch].map(|batch| (split, batch))) {
            let (context_lens, query_lens) = (vec![1; batch * shape.rows_a_sequence()], [query_len]);
            let heads = shape.kv_heads / shape.rows_a_sequence();
            let request = PlanRequest { max_partitions, ..PlanRequest::new(&context_lens, &query_lens, heads) };
            let problem = Problem {
                batch,
                q_heads: shape.q_heads,
                kv_heads: shape.kv_heads,
                head_dim: shape.head_dim,
                page_size: shape.page_size,
                query_len,
                query_dtype: shape.dtype.into(),
                kv_dtype: kv.into(),
                layout: shape.layout(kv, arch),
                scales: scale_mode(shape, kv),
                per_head_tables: shape.per_head_tables,
                ragged,
                windowed: shape.window,
                softcap: shape.softcap,
                sinks,
                max_partitions,
                capacity: capacity(&request, arch)?,
                ..Problem::default()
            };
            problems.extend(table_widths(kv).into_iter().map(|max_pages| Problem { max_pages, ..problem.clone() }));
        }
    }
    Ok(problems)
}

fn write_key(shape: &Shape, kv: KvArg, arch: &Arch) -> WriteKey {
    WriteKey {
        arch: arch.name,
        head_dim: shape.head_dim,
        page_size: shape.page_size,
        dtype: shape.dtype.into(),
        kv_dtype: kv.into(),
        scales: scale_mode(shape, kv),
        layout: shape.layout(kv, arch),
    }
}

fn scale_mode(shape: &Shape, kv: KvArg) -> ScaleMode {
    match (kv, shape.scales) {
        (KvArg::Mxfp4, _) => ScaleMode::Block,
        (KvArg::F32 | KvArg::F16 | KvArg::Bf16, _) | (_, ScalesArg::None) => ScaleMode::None,
        (_, ScalesArg::Scalar) => ScaleMode::Scalar,
        (_, ScalesArg::PerToken) => ScaleMode::PerToken,
    }
}

/// Widths of block tables between which kernels differ: of MXFP4 caches, whose tiles keep page ids in LDS while they fit, every 4 KiB of ids up to
/// what no workgroup has.
fn table_widths(kv: KvArg) -> Vec<usize> {
    match kv {
        KvArg::Mxfp4 => (0..=40).map(|step| 1 + step * 1024).collect(),
        _ => vec![Problem::default().max_pages],
    }
}

#[cfg(test)]
mod tests {
    use candle_paged_attn::jit::Specialization;

    use super::*;

    #[test]
    fn a_shape_has_the_kernels_of_all_its_calls() {
        let shape = Shape { query_lens: vec![1, 4], max_batch: 5, ..Shape::default() };
        let mut names = Kernels::names(&shape, &Arch::gfx950());
        let ragged = names.iter().filter(|name| name.ends_with("_ragged")).count();
        assert_eq!(ragged, 3 + 4, "{names:?}");
        names.retain(|name| !name.ends_with("_ragged"));
        let wanted = [
            "pa_bf16_d128_p128_m1_nt",
            "pa_bf16_d128_p128_m1_nt_direct_dual",
            "pa_bf16_d128_p128_m1_nt_dual",
            "pa_bf16_d128_p128_m4_mtp_fused",
            "pa_bf16_d128_p128_m4_mtp_fused_direct",
            "pa_write_bf16_d128_p128_bf16_shuffled",
            "pa_reduce_d128_bf16_t64",
            "pa_reduce_d128_bf16_t1024",
            "pa_plan_r1_minmax",
            "pa_plan_r2_minmax",
            "pa_plan_r4_minmax",
            "pa_plan_r8_minmax",
        ];
        for name in wanted {
            assert!(names.iter().any(|n| n == name), "{name}: {names:?}");
        }
        // Tiles come ragged too, under the same names, and then with every number of M-tiles.
        let count = |name: &str| names.iter().filter(|n| *n == name).count();
        assert_eq!(
            [count("pa_bf16_d128_p128_m1_nt"), count("pa_bf16_d128_p128_m3_mtp_fused"), count("pa_bf16_d128_p128_m4_mtp_fused_direct")],
            [2, 1, 2]
        );
    }

    #[test]
    fn tables_of_every_width_have_their_mxfp4_tiles() {
        let shape = Shape { kv: vec![KvArg::Mxfp4], even: true, max_batch: 1, page_size: 16, ..Shape::default() };
        let mut kernels = Kernels::default();
        kernels.add(&shape, &[Arch::gfx950()]).unwrap();
        let is = |spec: &Specialization, name: &str| spec.defines.iter().any(|(define, value)| define == name && value == "1");
        for (dual, staged) in [(true, true), (false, true), (false, false)] {
            let there = |spec: &&Specialization| {
                is(spec, "PA_DIRECT_OUTPUT") && is(spec, "PA_DUAL_GROUP") == dual && is(spec, "PA_MXFP4_STAGED_PAGES") == staged
            };
            assert_eq!(kernels.specializations.iter().filter(there).count(), 1, "two groups: {dual}, ids staged: {staged}");
        }
    }

    #[test]
    fn gfx1250_has_a_note_in_place_of_the_tile() {
        let mut kernels = Kernels::default();
        kernels.add(&Shape::default(), &[Arch::gfx1250()]).unwrap();
        assert!(kernels.notes.len() == 1 && kernels.notes[0].contains("gfx1250"), "{:?}", kernels.notes);
        assert!(kernels.specializations.iter().all(|spec| !spec.defines.iter().any(|(name, _)| name == "PA_M_TILES")));
    }

    #[test]
    fn a_cache_that_one_gpu_has_no_kernel_for_is_a_note() {
        let shape = Shape { kv: vec![KvArg::Bf16, KvArg::Mxfp4], even: true, ..Shape::default() };
        let mut kernels = Kernels::default();
        kernels.add(&shape, &[Arch::gfx942(304), Arch::gfx950()]).unwrap();
        assert!(kernels.notes.len() == 1 && kernels.notes[0].contains("gfx942"), "{:?}", kernels.notes);
        let mxfp4 = kernels.specializations.iter().filter(|spec| spec.kernel.contains("mxfp4"));
        assert!(mxfp4.clone().count() > 0 && mxfp4.into_iter().all(|spec| spec.arch == ArchName::Gfx950));
        let error = Kernels::default().add(&shape, &[Arch::gfx942(304)]).unwrap_err();
        assert!(error.to_string().contains("MXFP4"), "{error}");
    }

    #[test]
    fn bad_shapes_are_named() {
        let error = |shape: Shape| Kernels::default().add(&shape, &[Arch::gfx950()]).unwrap_err();
        assert!(format!("{:#}", error(Shape { head_dim: 100, ..Shape::default() })).contains("head_dim"));
        assert!(error(Shape { max_batch: 0, ..Shape::default() }).to_string().contains("max_batch"));
        assert!(error(Shape { kv: vec![], ..Shape::default() }).to_string().contains("kv"));
    }
}
