//! A kernel's costs per steady tile, and the predicted time of a call.

use anyhow::Result;
use candle_paged_attn::plan::HostPlan;
use candle_paged_attn::registry::{Arch, Flags, Selection};
use cdna_profile::counts::Bytes;
use cdna_profile::predict::Chain;
use cdna_profile::{Counts, Grid, Machine, Predicted, Static, Timing, predict, time};
use serde::Serialize;

use crate::call::{Kernel, Run};

/// Waves of a tile group.
const GROUP_WAVES: f64 = 4.0;
/// Tiles of the shorter run: past the prologue, and as many for both groups of a dual kernel.
const TILES: usize = 6;
/// Tiles that the longer run has more: both parities, or both groups.
const MORE: usize = 2;

/// A kernel per steady 256-token tile.
#[derive(Serialize)]
pub struct Profile {
    pub kernel: String,
    pub flags: Vec<&'static str>,
    pub binary: Static,
    /// LDS of a workgroup, with what a launch adds to the binary's.
    pub lds_bytes: usize,
    /// Workgroups that a compute unit holds.
    pub resident: usize,
    /// A wave's executed instructions and bytes, mean over the four waves of a group.
    pub tile: Counts,
    /// Predicted, of one workgroup alone on its compute unit.
    pub predicted_timing: Timing,
    pub predicted_tile_us: f64,
    /// Predicted, of the whole call.
    pub predicted_call: Option<Predicted>,
}

/// The call's tasks.
pub struct Tasks {
    pub workgroups: usize,
    pub longest: usize,
    pub kv_bytes: f64,
    pub query_len: usize,
}

impl Tasks {
    pub fn new(plan: &HostPlan, heads: usize, row_groups: usize, kv_bytes: f64, query_len: usize) -> Self {
        let lengths = plan.work.iter().filter(|task| task[0] >= 0).map(|task| task[2].abs_diff(task[1]) as usize);
        let (tasks, longest) = lengths.fold((0, 0), |(tasks, longest), tiles| (tasks + usize::from(tiles > 0), longest.max(tiles)));
        Self { workgroups: tasks * heads * row_groups, longest, kv_bytes, query_len }
    }
}

/// What a wave executes over.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Span {
    /// A steady tile.
    Tile,
    /// A task of one tile, from its first instruction to its last.
    Task,
}

/// A wave's counts over a span, and how long one workgroup alone on its compute unit is predicted to take.
pub struct Cost {
    pub counts: Counts,
    pub us: f64,
    /// VGPRs and AGPRs of a wave.
    pub registers: usize,
    /// Whether a second launch merges partial results.
    pub reduced: bool,
}

/// Compiles and runs `selection` with `query_len` new tokens.
pub fn cost(selection: Selection, query_len: usize, span: Span) -> Result<Cost> {
    let kernel = Kernel::compile(selection, &[])?;
    let machine = Machine::of(kernel.module.object.arch);
    let (counts, timing) = match span {
        Span::Tile => steady(&kernel, query_len)?,
        Span::Task => {
            let run = kernel.run(1, query_len)?;
            let waves = kernel.selection.threads as f64 / 64.0;
            (run.counts.per(&Counts::default(), waves), estimate(&kernel, &run, 1, machine.fill))
        }
    };
    let registers = kernel.static_counts()?.registers;
    Ok(Cost { counts, us: machine.us(timing.cycles), registers, reduced: kernel.selection.needs_reducer() })
}

/// A steady tile: what a wave executes, and what one workgroup alone is predicted to take.
fn steady(kernel: &Kernel, query_len: usize) -> Result<(Counts, Timing)> {
    let (short, long) = (kernel.run(TILES, query_len)?, kernel.run(TILES + MORE, query_len)?);
    let timing = |run: &Run| estimate(kernel, run, 1, Machine::of(kernel.module.object.arch).fill);
    Ok((long.counts.per(&short.counts, GROUP_WAVES * MORE as f64), timing(&long).per(&timing(&short), MORE as f64)))
}

/// Compiles and runs `selection`.
pub fn profile(selection: Selection, arch: &Arch, tasks: &Tasks) -> Result<Profile> {
    let kernel = Kernel::compile(selection, &[])?;
    let (tile, predicted_timing) = steady(&kernel, tasks.query_len)?;
    let machine = Machine::of(kernel.module.object.arch);
    let resident = resident(&kernel, arch)?;
    Ok(Profile {
        kernel: kernel.selection.kernel(),
        flags: kernel.selection.flags().names(),
        binary: kernel.static_counts()?,
        lds_bytes: lds_bytes(&kernel)?,
        resident,
        predicted_tile_us: machine.us(predicted_timing.cycles),
        predicted_timing,
        predicted_call: if tasks.longest > 0 { Some(call(&kernel, arch, tasks, resident, nontemporal(&tile))?) } else { None },
        tile,
    })
}

fn estimate(kernel: &Kernel, run: &Run, workgroups: usize, fill: f64) -> Timing {
    time(&kernel.module.program, &run.trace, &run.tags, workgroups, Machine::of(kernel.module.object.arch), fill)
}

/// Workgroups that a compute unit's registers, LDS and wave slots hold.
fn resident(kernel: &Kernel, arch: &Arch) -> Result<usize> {
    const REGISTERS: usize = 512;
    const WAVE_SLOTS: usize = 8;
    let info = kernel.info()?;
    let (registers, _) = info.register_file();
    let waves = (REGISTERS / registers).min(WAVE_SLOTS);
    let by_waves = waves * 4 / kernel.selection.threads.div_ceil(64);
    let by_lds = arch.lds_bytes.checked_div(lds_bytes(kernel)?).unwrap_or(usize::MAX);
    Ok(by_waves.min(by_lds))
}

/// LDS of a workgroup, what the launch adds included.
fn lds_bytes(kernel: &Kernel) -> Result<usize> {
    Ok(kernel.info()?.group_segment_size + kernel.selection.staged_bytes)
}

/// Longest task that is run as it is; longer ones are extrapolated from it.
const MOST_TILES: usize = 12;

/// The part of what a tile loads that nontemporal loads do.
fn nontemporal(tile: &Counts) -> f64 {
    let sum = |of: fn(&Bytes) -> f64| tile.loaded.values().map(of).sum::<f64>();
    sum(|bytes| bytes.nontemporal) / sum(Bytes::total).max(1.0)
}

fn call(kernel: &Kernel, arch: &Arch, tasks: &Tasks, resident: usize, nontemporal: f64) -> Result<Predicted> {
    let grid = Grid { compute_units: arch.compute_units, workgroups: tasks.workgroups, resident, kv_bytes: tasks.kv_bytes, nontemporal };
    let sim = kernel.module.object.arch;
    let machine = Machine::of(sim);
    let chain_of = |run: &Run| {
        let cycles = |fill| estimate(kernel, run, grid.together(), fill).cycles;
        Chain { shared: cycles(grid.share(machine)), alone: cycles(machine.fill) }
    };
    let run = |tiles| kernel.run(tiles, tasks.query_len);
    let waves = kernel.selection.threads / 64;
    let (counts, chain) = if tasks.longest <= MOST_TILES {
        let run = run(tasks.longest)?;
        let chain = chain_of(&run);
        (run.counts, chain)
    } else {
        let (short, long) = (run(MOST_TILES - MORE)?, run(MOST_TILES)?);
        let beyond = (tasks.longest - MOST_TILES) as f64 / MORE as f64;
        let (few, many) = (chain_of(&short), chain_of(&long));
        let extend = |few: f64, many: f64| many + beyond * (many - few);
        let chain = Chain { shared: extend(few.shared, many.shared), alone: extend(few.alone, many.alone) };
        (long.counts.per(&short.counts, 1.0 / beyond).plus(&long.counts), chain)
    };
    Ok(predict(sim, &grid, &counts, waves, chain, kernel.selection.needs_reducer()))
}

/// The generic tile of the same call: a selection without the schedules that tune it.
pub fn generic(selection: &Selection) -> Selection {
    let flags = selection.flags();
    let kept = Flags { direct_output: flags.direct_output, mxfp4_tile: flags.mxfp4_tile, ..Flags::default() };
    with_schedules(selection, kept)
}

/// The same call's tile with other schedules, whatever the registry thinks of them; the compiler refuses what does not go together.
pub fn with_flags(selection: &Selection, flags: Flags, arch: &Arch) -> Selection {
    // A bound that the kernel asserts: it takes what it needs.
    Selection { lds_bytes: arch.lds_bytes, ..with_schedules(selection, flags) }
}

fn with_schedules(selection: &Selection, flags: Flags) -> Selection {
    let mut other = selection.clone();
    other.key.flags = flags;
    other.staged_bytes = if flags.mxfp4_staged_pages { selection.staged_bytes } else { 0 };
    other.threads = if flags.dual_group { 512 } else { 256 };
    other.waves_per_eu = if flags.bf16_mtp_fused || flags.fp8_mtp4_lean { 2 } else { 0 };
    other
}

/// Bytes of K, V and scales of `tokens` tokens.
pub fn kv_bytes(selection: &Selection, heads: usize, tokens: usize) -> f64 {
    use candle_paged_attn::cache::KvDtype;
    use candle_paged_attn::registry::ScaleMode;
    let key = &selection.key;
    let element = match key.kv_dtype {
        KvDtype::F32 => 4.0,
        KvDtype::Bf16 | KvDtype::F16 => 2.0,
        KvDtype::Fp8 => 1.0,
        KvDtype::Mxfp4 => 0.5,
    };
    let scales = match key.scales {
        ScaleMode::PerToken => 4.0,
        ScaleMode::Block => key.head_dim as f64 / 32.0,
        ScaleMode::None | ScaleMode::Scalar => 0.0,
    };
    2.0 * (tokens * heads) as f64 * (key.head_dim as f64 * element + scales)
}
