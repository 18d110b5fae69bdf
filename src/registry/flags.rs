//! The schedule flags of the AMD tile kernel and the exact conditions of each.

use std::hash::{Hash, Hasher};

use candle::DType;

use super::arch::{Arch, ArchName};
use super::problem::{Problem, ScaleMode};
use crate::cache::KvDtype;

/// Dwords that fit beside the pointer to the other arguments in the scalar registers a wave starts with.
const MAX_KERNARG_PRELOAD: usize = 16;

/// What a flag misses whose schedule no kernel has yet. Reads on after "needs".
const UNWRITTEN: &str = "to be written";

/// Declares [`Flags`] and [`Missing`] with the same fields, so that a flag cannot exist without its condition.
macro_rules! flags {
    ($($(#[$doc:meta])* $field:ident = $name:literal,)*) => {
        /// What a schedule of the tile kernel does differently from the generic one. All off except on AMD.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Flags {
            $($(#[$doc])* pub $field: bool,)*
            /// KERNARG_PRELOAD: leading kernel-argument dwords preloaded into scalar registers; 0 is off. gfx950 uses 14 of at most 16
            /// (work_info, block table, Q, max_blocks, num_seqs, Q strides, partial maxima or reduce_info, K), for every KV dtype.
            pub kernarg_preload: usize,
        }

        /// For each flag the first requirement that a problem misses on an arch; `None` where the flag is set.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct Missing {
            $($(#[$doc])* pub $field: Option<&'static str>,)*
        }

        // As one word: every call finds its kernels by their keys.
        impl Hash for Flags {
            fn hash<H: Hasher>(&self, state: &mut H) {
                let bits = [$(self.$field),*].into_iter().fold(0u64, |bits, set| bits << 1 | u64::from(set));
                (bits, self.kernarg_preload).hash(state);
            }
        }

        impl Flags {
            /// Every schedule there is.
            pub(crate) const ALL: Self = Self { $($field: true,)* kernarg_preload: MAX_KERNARG_PRELOAD };
            /// The generic one.
            #[cfg_attr(not(feature = "rocm"), expect(dead_code))]
            pub(crate) const NONE: Self = Self { $($field: false,)* kernarg_preload: 0 };

            /// Every flag's name and whether it is set, in declaration order (the preload count apart).
            pub fn all(&self) -> Vec<(&'static str, bool)> {
                vec![$(($name, self.$field),)*]
            }

            /// Sets a flag by its name; false where there is none of this name.
            pub fn set(&mut self, flag: &str) -> bool {
                match flag {
                    $($name => self.$field = true,)*
                    _ => return false,
                }
                true
            }

            /// Names of the flags that are set, in declaration order (the preload count apart).
            pub fn names(&self) -> Vec<&'static str> {
                self.all().into_iter().filter_map(|(name, set)| set.then_some(name)).collect()
            }
        }

        impl Missing {
            /// Every flag's name with the first requirement missed.
            pub fn all(&self) -> Vec<(&'static str, Option<&'static str>)> {
                vec![$(($name, self.$field),)*]
            }

            /// With those flags that `written` lacks missing, too.
            pub(super) fn among(self, written: &Flags) -> Self {
                Self { $($field: self.$field.or((!written.$field).then_some(UNWRITTEN)),)* }
            }

            pub(super) fn flags(&self, kernarg_preload: usize) -> Flags {
                Flags { $($field: self.$field.is_none(),)* kernarg_preload }
            }
        }
    };
}

flags! {
    /// Fused BF16 multi-query tile: Q in padded LDS rows, a private P and row-sum slot for each M-tile so that one publication barrier serves all,
    /// V carried across M-tiles, K16 packs paired into the K32 MFMA, at most 256 VGPRs, the last tile peeled with the V tail mask.
    bf16_mtp_fused = "BF16_MTP_FUSED",
    /// K and V loaded nontemporally.
    bf16_decode_nt_kv = "BF16_DECODE_NT_KV",
    /// Q issued before the page ids and staged while K is in flight.
    decode_q_early = "DECODE_Q_EARLY",
    /// The last tile's V issued right after QK.
    decode_last_v_after_qk = "DECODE_LAST_V_AFTER_QK",
    /// Prologue: scales issued after Q, so that waiting for them does not drain K.
    fp8_scales_after_q = "FP8_SCALES_AFTER_Q",
    /// Loop: the next tile's scales staged late, so that waiting for them does not drain K and V.
    fp8_loop_scales_late = "FP8_LOOP_SCALES_LATE",
    /// K scale folded into exp2's multiply-add; P times one v_scale / v_max factor a chunk, shared by the M-tiles; PV rescaled by v_max
    /// (over owned tokens only). Two waves per SIMD.
    fp8_mtp4_lean = "FP8_MTP4_LEAN",
    /// Q reread from LDS for each tile.
    fp8_mtp4_q_lds = "FP8_MTP4_Q_LDS",
    /// The next tile's page ids carried in registers.
    fp8_mtp4_pages_ahead = "FP8_MTP4_PAGES_AHEAD",
    /// V prefetched and kept in flight.
    page16_vpipe = "PAGE16_VPIPE",
    /// The next tile's page ids loaded ahead of this tile's V.
    page16_pages_first = "PAGE16_PAGES_FIRST",
    /// The next K issued right after QK.
    page16_early_k = "PAGE16_EARLY_K",
    /// V loaded nontemporally, K cached.
    fp8_decode_nt_v = "FP8_DECODE_NT_V",
    /// The tile kernel stores normalized rows; no reducer launch. Sequences without a task are zero-filled by their slot.
    direct_output = "DIRECT_OUTPUT",
    /// Eight waves as two four-wave groups on alternate tiles, merged once.
    dual_group = "DUAL_GROUP",
    /// |Q| reduced as packed 16-bit integer maxima, then DPP integer maxima.
    packed_q_absmax = "PACKED_Q_ABSMAX",
    /// Head-256 decode pipe: the schedule of head_dim 256 single-M tiles.
    head256_pipe = "HEAD256_PIPE",
    /// Only the peeled last tile masks scores.
    head256_interior_unmasked = "HEAD256_INTERIOR_UNMASKED",
    /// The first conversion of each packed FP8 word takes an undefined old word.
    fp8_pack_no_old = "FP8_PACK_NO_OLD",
    /// MXFP4 tile: each wave owns 64 tokens, no barrier a tile, one merge after the loop.
    mxfp4_tile = "MXFP4_TILE",
    /// The whole task's page ids staged in LDS before the loop (MXFP4; where they do not fit, ids are read tile by tile).
    mxfp4_staged_pages = "MXFP4_STAGED_PAGES",
}

/// How an AMD tile covers the rows of one KV head, and what of it fits in LDS.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fit {
    /// M-tiles of one workgroup.
    pub m_tiles: usize,
    /// Workgroups that share one (task, KV head).
    pub row_groups: usize,
    /// An MXFP4 task's page ids fit beside the rest.
    pub staged_pages: bool,
    /// Two copies of the layout fit.
    pub two_copies: bool,
}

/// The first requirement that does not hold.
fn first_missing(requirements: &[(bool, &'static str)]) -> Option<&'static str> {
    requirements.iter().find(|(holds, _)| !holds).map(|&(_, what)| what)
}

impl Missing {
    /// The conditions, flag by flag.
    ///
    /// Terms: *decode* is query_len 1; *single-M* is rows (query_len * group) that fill one 16-row tile; *scalar FP8* is no scale or one factor;
    /// *MTP4* is query_len 4. Where a flag is named after BF16 it holds for BF16 caches alone: F16 takes the generic BF16 schedule with F16 MFMAs.
    pub(super) fn of(p: &Problem, arch: &Arch, fit: &Fit) -> Self {
        let gfx950 = (arch.name == ArchName::Gfx950, "gfx950");
        let gfx942 = arch.name == ArchName::Gfx942;
        let bf16 = (p.kv_dtype == KvDtype::Bf16, "a BF16 cache");
        let fp8 = (p.kv_dtype == KvDtype::Fp8, "an FP8 cache");
        let mxfp4 = (p.kv_dtype == KvDtype::Mxfp4, "an MXFP4 cache");
        let scalar_fp8 = fp8.0 && p.scales != ScaleMode::PerToken;
        let per_token = (p.scales == ScaleMode::PerToken, "per-token scales");
        let head128 = (p.head_dim == 128, "head_dim 128");
        let page128 = (p.page_size == 128, "page 128");
        let page16 = (p.page_size == 16, "page 16");
        let decode = (p.query_len <= 1, "one query token");
        let single_m = (p.m_tiles() == 1, "rows of one M-tile");
        let multi_m = ((2..=4).contains(&fit.m_tiles), "2 to 4 M-tiles");
        let no_window = (!p.windowed, "no window");
        // The fused schedules fold the scale into exp2 and take the maximum over unscaled scores: neither a negative scale nor tanh commutes with that.
        let positive = (p.positive_scale, "a positive softmax scale");
        let no_softcap = (!p.softcap, "no softcap");

        // An F32 query has P in two parts, of which those of four M-tiles do not fit two workgroups' LDS side by side.
        let q16 = (matches!(p.query_dtype, DType::BF16 | DType::F16), "a 16-bit query");
        let mtp_fused = first_missing(&[gfx950, bf16, q16, head128, page128, multi_m, no_window, positive, no_softcap]);
        let mtp4 = (p.query_len == 4, "4 query tokens (MTP4)");
        let mtp4_lean = first_missing(&[gfx950, fp8, per_token, head128, page128, mtp4, multi_m, no_window, positive, no_softcap]);

        // The head-256 schedule serves every dtype but MXFP4, whose tile has its own. It comes first: a page-16 head-256 tile is not on the V pipe
        // (twice the V registers), which is why interior tiles go unmasked there too.
        let pipe_arch = (gfx950.0 || gfx942, "gfx942 or gfx950");
        let head256 = (p.head_dim == 256, "head_dim 256");
        let head256_pipe = first_missing(&[pipe_arch, head256, (!mxfp4.0, "a cache other than MXFP4"), single_m, decode]);
        let no_pipe = (head256_pipe.is_some(), "not the head-256 pipe");

        // Streaming fights the page-16 V pipe, and that pipe has its own place for V; the BF16 decode schedule is for every other page size.
        let not_page16 = (!page16.0, "a page other than 16");
        let bf16_decode = first_missing(&[gfx950, bf16, decode, single_m, not_page16]);
        let q_early_family = scalar_fp8 && (page16.0 || head256.0) || bf16.0 || fp8.0 && head128.0 && page128.0;
        let q_early = (q_early_family, "BF16, scalar FP8 of page 16 or head_dim 256, or FP8 of head_dim 128 and page 128");

        // Head-256 orders per-token scales ahead of K, so nothing is to be gained by moving them.
        let scales_late = first_missing(&[gfx950, fp8, per_token, page128, no_pipe]);

        // V of 256 tokens is kept in registers: up to head_dim 128 beside Q and K.
        let narrow = (p.head_dim <= 128, "head_dim up to 128");
        let vpipe_kv = (fp8.0 || bf16.0, "an FP8 or BF16 cache");
        let vpipe = [gfx950, page16, single_m, narrow, vpipe_kv];
        let per_tensor = (!per_token.0, "no per-token scales");
        let scalar = (scalar_fp8, "an FP8 cache without per-token scales");

        // F16 shares the store of BF16, and a plan-free call has one task a sequence just as a plan of one partition.
        let one_partition = (p.one_partition(), "one partition, or no plan");
        let direct = [one_partition, (!p.sinks, "no sinks"), (p.output_like_query, "output strides equal to the query's")];

        let dual_arch = (gfx950.0 || gfx942 && head128.0, "gfx950, or gfx942 at head_dim 128");
        let dual_kv = (scalar_fp8 || bf16.0 || mxfp4.0, "scalar FP8, BF16 or MXFP4");
        // Half the registers hold no O of a larger MXFP4 tile (each wave has all of it), and of these others a part of K and V: what comes late
        // is predicted to cost more than a second group gains.
        let dual_fits = if mxfp4.0 { p.head_dim <= 256 } else { p.head_dim != if fp8.0 { 512 } else { 192 } };
        let dual_head = (dual_fits, "MXFP4 of head_dim up to 256, BF16 of another than 192, FP8 of another than 512");
        let workgroups = p.workgroups().saturating_mul(fit.row_groups);
        let sparse = (workgroups <= arch.compute_units, "at most one workgroup a CU");
        // The lane-wise merge of the two groups holds one M-tile; with one query token more than 16 heads a KV head are rare.
        let dual = [
            one_partition,
            dual_arch,
            dual_kv,
            dual_head,
            decode,
            single_m,
            no_window,
            no_pipe,
            sparse,
            (fit.two_copies, "room for two LDS copies"),
        ];

        let absmax_arch = (gfx950.0 || gfx942 && p.head_dim <= 256, "gfx950, or gfx942 up to head_dim 256");

        Self {
            bf16_mtp_fused: mtp_fused,
            bf16_decode_nt_kv: bf16_decode,
            decode_q_early: first_missing(&[gfx950, decode, single_m, q_early]),
            decode_last_v_after_qk: bf16_decode,
            fp8_scales_after_q: scales_late,
            fp8_loop_scales_late: scales_late,
            fp8_mtp4_lean: mtp4_lean,
            fp8_mtp4_q_lds: mtp4_lean,
            fp8_mtp4_pages_ahead: mtp4_lean,
            page16_vpipe: first_missing(&vpipe),
            page16_pages_first: first_missing(&vpipe).or(first_missing(&[per_tensor])),
            page16_early_k: first_missing(&vpipe).or(first_missing(&[scalar])),
            fp8_decode_nt_v: first_missing(&[gfx950, fp8, page128, decode, single_m]),
            direct_output: first_missing(&direct),
            dual_group: first_missing(&dual),
            packed_q_absmax: first_missing(&[fp8, absmax_arch, q16]),
            head256_pipe,
            head256_interior_unmasked: head256_pipe.or(first_missing(&[gfx950, no_window])),
            fp8_pack_no_old: first_missing(&[gfx950, fp8]),
            mxfp4_tile: first_missing(&[gfx950, mxfp4]),
            mxfp4_staged_pages: first_missing(&[gfx950, mxfp4, (fit.staged_pages, "room for the task's page ids")]),
        }
    }
}

/// Dwords preloaded on `arch`: the configured count, at most the 16 that fit user scalar registers.
pub(super) fn kernarg_preload(p: &Problem, arch: &Arch) -> usize {
    match arch.name {
        ArchName::Gfx950 | ArchName::Gfx1250 => p.kernarg_preload.min(MAX_KERNARG_PRELOAD),
        _ => 0,
    }
}
