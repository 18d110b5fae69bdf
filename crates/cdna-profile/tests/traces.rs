//! Counts, waits and times of hand-written kernels against what their texts say.

#[path = "../../cdna-sim/tests/support/mod.rs"]
mod support;

use std::collections::BTreeMap;

use cdna_profile::counts::Bytes;
use cdna_profile::waits::waits;
use cdna_profile::{Counts, Machine, Static, Tag, Tags, Timing, time};
use cdna_sim::{Launch, Memory, Module, Trace};

/// A run of a kernel whose arguments are the addresses of K, V, output and page ids, 8 KiB each.
struct Run {
    module: Module,
    trace: Trace,
    tags: Tags,
}

const ALLOCATION: usize = 8192;

fn run(body: &str, arch: &str, threads: u32) -> Run {
    let module = Module::load(&support::assemble(body, arch, 4096, 0)).unwrap();
    let memory = Memory::new();
    let mut tags = Tags::default();
    let mut args = vec![];
    for tag in [Tag::Key, Tag::Value, Tag::Output, Tag::PageIds] {
        let address = memory.alloc(ALLOCATION).unwrap();
        tags.name(address, ALLOCATION, tag);
        args.extend(address.to_le_bytes());
    }
    let kernel = module.kernel("test").unwrap();
    let (_, trace) = module.trace(&memory, kernel, &args, &Launch::new([1; 3], [threads, 1, 1]), [0; 3]).unwrap();
    Run { trace, tags, module }
}

const PROLOGUE: &str = "
s_load_dwordx8 s[4:11], s[0:1], 0x0
v_lshlrev_b32 v1, 4, v0
s_waitcnt lgkmcnt(0)
";

const BODY: &str = "
global_load_dwordx4 v[4:7], v1, s[4:5]
global_load_dwordx4 v[8:11], v1, s[6:7] nt
global_load_dword v2, v1, s[10:11]
s_waitcnt vmcnt(2)
v_exp_f32 v4, v4
v_cvt_f16_f32 v5, v5
s_nop 3
v_mfma_f32_16x16x16_f16 a[0:3], v[4:5], v[6:7], 0
ds_write_b32 v1, v4
s_waitcnt lgkmcnt(0)
s_barrier
ds_read_b32 v3, v1
s_waitcnt vmcnt(0) lgkmcnt(0)
v_add_u32 v3, v3, v2
global_store_dword v1, v3, s[8:9]
";

#[test]
fn counts_are_those_of_the_text() {
    require_clang!();
    for (arch, conflicts) in [("gfx942", 6.0), ("gfx950", 3.0)] {
        let Run { module, trace, tags } = run(&format!("{PROLOGUE}{BODY}"), arch, 128);
        let counts = Counts::of_trace(&module.program, &trace, &tags).per(&Counts::default(), 2.0);
        let one = |tag| BTreeMap::from([(tag, 1.0)]);
        let cached = |bytes| Bytes { cached: bytes, nontemporal: 0.0 };
        let want = Counts {
            instructions: 19.0,
            valu: 3.0,
            transcendental: 1.0,
            conversions: 1.0,
            mfma: BTreeMap::from([("16x16x16_f16".to_string(), 1.0)]),
            lds: 2.0,
            lds_read: 256.0,
            lds_written: 256.0,
            // Lanes 16 bytes apart: four of them want a bank at a time.
            lds_conflicts: 2.0 * conflicts,
            vmem: 4.0,
            scalar_loads: 1.0,
            nops: 2.0,
            barriers: 1.0,
            waits: 4.0,
            forced: BTreeMap::from([(Tag::Key, 1.0), (Tag::Value, 1.0), (Tag::PageIds, 1.0)]),
            drained: one(Tag::Value),
            loaded: BTreeMap::from([
                (Tag::Key, cached(1024.0)),
                (Tag::Value, Bytes { cached: 0.0, nontemporal: 1024.0 }),
                (Tag::PageIds, cached(256.0)),
                (Tag::Other, cached(32.0)),
            ]),
            stored: BTreeMap::from([(Tag::Output, cached(256.0))]),
            ..Counts::default()
        };
        assert_eq!(counts, want, "{arch}");

        let waits = &waits(&module.program, &trace, &tags)[1];
        assert_eq!(waits[1].forced, BTreeMap::from([(Tag::Key, 1)]));
        assert_eq!(waits[1].left, BTreeMap::from([(Tag::Value, 1), (Tag::PageIds, 1)]));
        assert!(waits[1].early.is_empty() && waits[3].early == [Tag::Value] && waits[3].left.is_empty());

        let whole = Static::of(&module.program, module.kernel("test").unwrap(), &module.object.kernels);
        assert_eq!((whole.valu, whole.conversions, whole.lds, whole.barriers, whole.lds_bytes), (3, 1, 2, 1, 4096), "{arch}");
    }
}

/// A machine with round numbers.
fn machine() -> Machine {
    Machine {
        memory_latency: 1000.0,
        l2_latency: 500.0,
        l1_latency: 100.0,
        fill: 64.0,
        barrier: 50.0,
        scalar_latency: 10.0,
        ..cdna_profile::constants::GFX950
    }
}

fn estimate(body: &str, threads: u32) -> Timing {
    let Run { module, trace, tags } = run(body, "gfx950", threads);
    time(&module.program, &trace, &tags, 1, &machine(), 64.0)
}

/// What `body` adds to an empty kernel.
fn cycles(body: &str, threads: u32) -> f64 {
    estimate(&format!("{PROLOGUE}{body}"), threads).cycles - estimate(PROLOGUE, threads).cycles
}

#[test]
fn times_are_those_of_the_rules() {
    require_clang!();
    let adds = "v_add_f32 v2, v2, v2\n".repeat(10);
    assert_eq!(cycles(&adds, 64), 40.0);
    // A wave on each SIMD, then two.
    assert_eq!(cycles(&adds, 256), 40.0);
    assert_eq!(cycles(&adds, 512), 80.0);
    // An exponential's unit is busy for 16 cycles: the next issues then, a scalar instruction earlier.
    assert_eq!(cycles("v_exp_f32 v2, v2\nv_add_f32 v3, v3, v3\n", 64), 20.0);
    assert_eq!(cycles("v_exp_f32 v2, v2\ns_add_u32 s12, s12, s12\n", 64), 8.0);
    assert_eq!(cycles("s_nop 7\n", 64), 32.0);
    // Four passes of four cycles; a vector instruction may follow after two slots, packed F32 only after seven, the result after eight.
    let mfma = "v_mfma_f32_16x16x32_f16 v[8:11], v[4:7], v[4:7], 0\n";
    assert_eq!(cycles(&mfma.repeat(3), 64), 16.0 + 16.0 + 4.0);
    assert_eq!(cycles(&format!("{mfma}v_add_f32 v2, v2, v2\n"), 64), 8.0 + 4.0);
    assert_eq!(cycles(&format!("{mfma}v_pk_add_f32 v[2:3], v[2:3], v[2:3]\n"), 64), 28.0 + 4.0);
    assert_eq!(cycles(&format!("{mfma}v_add_f32 v2, v8, v2\n"), 64), 32.0 + 4.0);
    // 64 bytes a cycle on the way in, 1000 cycles, 64 bytes a cycle for new lines.
    let load = "global_load_dwordx4 v[4:7], v1, s[4:5]\n";
    let wait = "s_waitcnt vmcnt(0)\n";
    assert_eq!(cycles(&format!("{load}{wait}"), 64), 16.0 + 1000.0 + 16.0 + 4.0);
    // Again: the lines are in the cache. Page ids are nearer than K.
    assert_eq!(cycles(&format!("{load}{wait}{load}{wait}"), 64), 1036.0 + 16.0 + 100.0 + 4.0);
    assert_eq!(cycles(&format!("global_load_dword v2, v0, s[10:11]\n{wait}"), 64), 4.0 + 500.0 + 2.0 + 4.0);
    // A wait for the younger of two waits for the older, too.
    let both = format!("{load}global_load_dword v2, v0, s[10:11]\n{wait}");
    assert_eq!(cycles(&both, 64), 1036.0 + 2.0);
    // A line on its way is not there earlier for the second that asks for it.
    assert_eq!(cycles(&format!("{load}{load}{wait}"), 64), 1036.0);
    // The wave that loads holds up the other at the barrier.
    let late = format!("v_cmp_gt_u32 vcc, 64, v0\ns_cbranch_vccz .Lskip\n{load}{wait}.Lskip:\ns_barrier\n");
    let timing = estimate(&format!("{PROLOGUE}{late}"), 128);
    let stall = timing.stalls[&cdna_profile::timing::Stall::Barrier];
    assert_eq!(timing.cycles - estimate(PROLOGUE, 128).cycles, 8.0 + 1036.0 + 4.0 + 50.0);
    assert!((stall - (1036.0 / 2.0 + 50.0)).abs() < 1.0, "{stall}");
}
