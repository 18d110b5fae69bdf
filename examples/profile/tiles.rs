//! Tiles of common shapes, generic and selected: the counts that docs/kernels.md shows.

use anyhow::{Context, Result, bail};
use candle_paged_attn::registry::Arch;

use crate::measure::Profile;
use crate::{parse, profiles};

/// Names of shapes and their options; eight sequences of 8192 tokens each.
const TILES: [(&str, &str); 11] = [
    ("BF16 decode, page 128", "--kv bf16"),
    ("BF16 decode, page 16", "--kv bf16 --page-size 16"),
    ("FP8 decode, page 128", "--kv fp8"),
    ("FP8 decode, page 64", "--kv fp8 --page-size 64"),
    ("FP8 decode, page 16", "--kv fp8 --page-size 16"),
    ("FP8 per token decode, page 128", "--kv fp8 --scales per-token"),
    ("FP8 decode, D256, 8 heads, page 64", "--kv fp8 --head-dim 256 --q-heads 8 --page-size 64"),
    ("BF16 verify q4, page 128", "--kv bf16 --query-len 4"),
    ("FP8 verify q4, page 128", "--kv fp8 --query-len 4"),
    ("FP8 per token verify q4, page 128", "--kv fp8 --scales per-token --query-len 4"),
    ("MXFP4 decode, page 16", "--kv mxfp4 --page-size 16"),
];

/// A shape's generic tile and the one that the registry selects.
pub struct Tile {
    pub name: &'static str,
    pub generic: Profile,
    pub selected: Profile,
}

/// Compiles and runs the tiles of each shape.
pub fn measure(arch: &Arch) -> Result<Vec<Tile>> {
    let tile = |(name, options)| {
        let shape = parse(&format!("{options} --batch 8 --context 8192")).shape.resolve(arch).context(name)?;
        let Ok([generic, selected]) = <[_; 2]>::try_from(profiles(&shape, arch, None)?) else {
            bail!("{name}: on {arch} the generic tile is selected")
        };
        Ok(Tile { name, generic, selected })
    };
    TILES.into_iter().map(tile).collect()
}
