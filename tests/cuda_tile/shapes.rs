//! Every cut of a tensor-core block that an H200 chooses, by name.

use candle::Result;
use candle_paged_attn::cache::KvDtype;
use candle_paged_attn::cuda::Tables;
use candle_paged_attn::registry::Arch;
use rayon::prelude::*;
use testkit::cases::{CaseSpec, Scales};

use crate::cases::{all_right, check};
use crate::require_nvrtc;
use crate::specs::spec;

/// A call, and how its kernel's name ends.
type Row = (CaseSpec, &'static str);

/// Checks calls on an H200, and that each has the kernel named.
#[track_caller]
fn check_all(rows: &[Row]) {
    let check = |(spec, wanted): &Row| -> Result<()> {
        let ends = format!("_{wanted}");
        check(&Arch::sm90(), spec, Tables::Host, |selection| selection.kernel().ends_with(&ends))
    };
    all_right(rows.par_iter().map(check).collect());
}

fn bf16() -> CaseSpec {
    CaseSpec { kv_heads: 1, ..spec(KvDtype::Bf16, Scales::None) }
}

fn fp8() -> CaseSpec {
    CaseSpec { kv_heads: 1, ..spec(KvDtype::Fp8, Scales::PerToken) }
}

/// `base` for one sequence of `tiles` tiles among `batch`, the others short.
fn one_of(batch: usize, tiles: i64, base: CaseSpec) -> CaseSpec {
    let lens = (0..batch as i64).map(|i| if i == 0 { 128 * tiles - 7 } else { 3 + i }).collect();
    CaseSpec { lens, ..base }
}

#[test]
fn decode_by_clusters() {
    require_nvrtc!();
    let unsplit = |batch, tiles, base| CaseSpec { max_partitions: Some(1), ..one_of(batch, tiles, base) };
    check_all(&[
        (unsplit(1, 8, fp8()), "w1x4s3c16k16"),
        (unsplit(1, 15, bf16()), "w1x4s3c16k16"),
        (unsplit(1, 16, fp8()), "w1x4s3c32k16"),
        (unsplit(1, 129, bf16()), "w1x4s3c32k16"),
        (unsplit(1, 129, fp8()), "w1x8s3c32k16"),
        (unsplit(5, 8, fp8()), "w1x4s3c32k8"),
        (unsplit(15, 8, bf16()), "w1x4s3c16k8"),
        (unsplit(30, 4, bf16()), "w1x4s3c32k4"),
        (unsplit(30, 4, fp8()), "w1x8s3c16k4"),
        (unsplit(20, 4, fp8()), "w1x4s3c32k4"),
        (unsplit(20, 4, bf16()), "w1x4s3c16k4"),
        (unsplit(49, 2, fp8()), "w1x4s3c32k2"),
        (unsplit(50, 2, fp8()), "w1x8s3c16k2"),
        (unsplit(64, 2, bf16()), "w1x4s3c16k2"),
        (unsplit(3, 8, CaseSpec { head_dim: 256, ..bf16() }), "w1x4s3c16k16"),
        (unsplit(3, 8, CaseSpec { head_dim: 256, ..fp8() }), "w1x4s3c16k16"),
        (unsplit(3, 8, CaseSpec { head_dim: 64, kv_dtype: KvDtype::F16, ..bf16() }), "w1x4s3c16k16"),
    ]);
}

#[test]
fn decode_by_single_blocks() {
    require_nvrtc!();
    let slots = |budget, tiles, base| CaseSpec { workgroup_budget: Some(budget), ..one_of(1, tiles, base) };
    let many = |base| CaseSpec { lens: (0..140).map(|i| 1 + i * 7 % 200).collect(), workgroup_budget: Some(150), ..base };
    let alone = CaseSpec { lens: (0..200).map(|i| if i == 77 { 1200 } else { 1 + i * 7 % 200 }).collect(), ..bf16() };
    check_all(&[
        (slots(3, 3, bf16()), "w1x4s4c16"),
        (slots(3, 3, fp8()), "w1x4s4c32"),
        (slots(2, 6, bf16()), "w1x4s2c32"),
        (slots(2, 6, fp8()), "w1x4s4c32"),
        (slots(2, 35, fp8()), "w1x8s2c32"),
        (many(bf16()), "w1x4s3c16"),
        (many(fp8()), "w1x4s2c32"),
        (alone, "w1x8s3c16"),
    ]);
}

#[test]
fn verify_by_warpgroups() {
    require_nvrtc!();
    let verify = |base| CaseSpec { group: 16, query_lens: vec![4], lens: vec![300, 70], workgroup_budget: Some(4), ..base };
    let in_turns = |base| CaseSpec { group: 16, query_lens: vec![4], lens: (0..270).map(|i| 5 + i * 7 % 90).collect(), ..base };
    let scalar = CaseSpec { scales: Scales::Scalar, ..fp8() };
    check_all(&[
        (verify(bf16()), "wg4x2s3c64"),
        (verify(scalar.clone()), "wg4x2s4c64"),
        (verify(fp8()), "wg4x2s4c64"),
        (in_turns(bf16()), "wg4x1s3c64"),
        (in_turns(scalar), "wg4x1s4c64"),
        (in_turns(fp8()), "wg4x1s3c64"),
    ]);
}

#[test]
fn verify_by_warps() {
    require_nvrtc!();
    let rows =
        |query_len, base| CaseSpec { group: 16, query_lens: vec![query_len], lens: vec![300, 70], workgroup_budget: Some(4), ..base };
    let unsplit = |batch, tiles, base| CaseSpec { max_partitions: Some(1), workgroup_budget: None, ..one_of(batch, tiles, rows(4, base)) };
    let of = |head_dim, base| CaseSpec { head_dim, ..base };
    check_all(&[
        (rows(4, of(64, bf16())), "w4x2s3c32"),
        (rows(2, of(64, bf16())), "w2x2s3c32"),
        (rows(4, of(256, bf16())), "w4x2s3c32"),
        (rows(2, of(256, fp8())), "w2x2s3c32"),
        (unsplit(1, 16, bf16()), "w4x2s3c32k16"),
        (unsplit(1, 15, fp8()), "w4x2s3c32k8"),
        (unsplit(30, 4, fp8()), "w4x2s3c32k4"),
        (unsplit(40, 2, bf16()), "w4x2s3c32k2"),
    ]);
}
