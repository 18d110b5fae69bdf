//! Every kind of mistake is found where it is made, and its nearest correct neighbour passes.

mod support;

use cdna_sim::{Error, Fault, Launch, Memory, Module};
use sim_memory::OutOfBounds;
use support::assemble;

/// Loads the first argument, a buffer's address, into s[4:5], and 4 times the work item into v1.
const PROLOGUE: &str = "s_load_dwordx2 s[4:5], s[0:1], 0x0\nv_lshlrev_b32_e32 v1, 2, v0\ns_waitcnt lgkmcnt(0)\n";

/// Runs a body on `threads` work items and a buffer of `words` words filled with their indices.
fn run_with(body: &str, lds: usize, scratch: usize, words: usize, threads: u32, adjust: impl Fn(&mut Launch)) -> Result<Vec<u32>, Error> {
    let module = Module::load(&assemble(body, "gfx942", lds, scratch)).unwrap();
    let memory = Memory::new();
    let data: Vec<u8> = (0..words as u32).flat_map(u32::to_le_bytes).collect();
    let buffer = memory.upload(&data).unwrap();
    let mut launch = Launch { instruction_limit: 10_000, ..Launch::new([1, 1, 1], [threads, 1, 1]) };
    adjust(&mut launch);
    module.launch(&memory, module.kernel("test")?, &buffer.to_le_bytes(), &launch)?;
    let bytes = memory.read(buffer, data.len()).unwrap();
    Ok(bytes.chunks(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect())
}

fn run(body: &str, lds: usize, words: usize, threads: u32) -> Result<Vec<u32>, Error> {
    run_with(&format!("{PROLOGUE}{body}"), lds, 0, words, threads, |_| {})
}

/// The fault, and the error's text must name the instruction, the wave and (where one is given) the lane.
#[track_caller]
fn expect(result: Result<Vec<u32>, Error>, text: &str, wave: usize, lane: Option<usize>) -> Fault {
    let error = result.expect_err("the mistake was not found");
    let message = error.to_string();
    let site = error.site().unwrap_or_else(|| panic!("{message}")).clone();
    assert!(site.text.starts_with(text), "{message}");
    assert_eq!((site.wave, site.lane), (wave, lane), "{message}");
    assert!(
        message.contains(&site.text) && message.contains(&format!("{:#x}", site.address)) && message.contains(&format!("wave {wave}")),
        "{message}"
    );
    error.fault().unwrap().clone()
}

#[test]
fn global_accesses_outside_allocations() {
    require_clang!();
    let store = "global_store_dword v1, v0, s[4:5]\n";
    let out = run(store, 0, 128, 128).unwrap();
    assert_eq!(out, (0..128).collect::<Vec<u32>>());
    let fault = expect(run(store, 0, 127, 128), "global_store_dword", 1, Some(63));
    assert!(matches!(fault, Fault::GlobalOutOfBounds(OutOfBounds { access: "store", bytes: 4, .. })), "{fault:?}");
    let load = "global_load_dwordx2 v[2:3], v1, s[4:5] offset:4\ns_waitcnt vmcnt(0)\n";
    assert!(run(load, 0, 66, 64).is_ok());
    let fault = expect(run(load, 0, 65, 64), "global_load_dwordx2", 0, Some(63));
    assert!(matches!(fault, Fault::GlobalOutOfBounds(OutOfBounds { access: "load", bytes: 8, .. })), "{fault:?}");
    let scalar = "s_load_dwordx4 s[8:11], s[4:5], 0x8\ns_waitcnt lgkmcnt(0)\n";
    assert!(run(scalar, 0, 6, 64).is_ok());
    assert!(matches!(expect(run(scalar, 0, 5, 64), "s_load_dwordx4", 0, None), Fault::GlobalOutOfBounds(_)));
}

#[test]
fn inactive_lanes_access_nothing() {
    require_clang!();
    // The same store as above, guarded.
    let guarded = "v_cmp_gt_u32_e32 vcc, 100, v0\ns_and_saveexec_b64 s[6:7], vcc\nglobal_store_dword v1, v0, s[4:5]\n";
    assert!(run(guarded, 0, 100, 128).is_ok());
    assert!(run(guarded, 0, 99, 128).is_err());
}

#[test]
fn buffer_accesses_outside_the_descriptor_read_zero_and_write_nothing() {
    require_clang!();
    // 16 of the 64 words are in range; words past them are loaded as 0, stores to them are dropped.
    let body = "s_mov_b32 s6, 64\ns_mov_b32 s7, 0x20000\nbuffer_load_dword v2, v1, s[4:7], 0 offen offset:4\ns_waitcnt vmcnt(0)\n\
                v_add_u32_e32 v2, 0x100, v2\nbuffer_store_dword v2, v1, s[4:7], 0 offen\n";
    let out = run(body, 0, 64, 64).unwrap();
    let want: Vec<u32> = (0..64)
        .map(|i| {
            if i < 15 {
                i + 1 + 0x100
            } else if i == 15 {
                0x100
            } else {
                i
            }
        })
        .collect();
    assert_eq!(out, want);
    // A descriptor that promises more than there is lets nothing pass.
    assert!(run(&body.replace("s6, 64", "s6, 0x1000"), 0, 64, 64).is_err());
}

#[test]
fn registers_before_the_wait_for_their_load() {
    require_clang!();
    let two = "global_load_dword v2, v1, s[4:5]\nglobal_load_dword v3, v1, s[4:5] offset:4\n";
    // In order: vmcnt(1) proves the first load and not the second.
    assert!(run(&format!("{two}s_waitcnt vmcnt(1)\nv_add_u32_e32 v4, v2, v2\n"), 0, 65, 64).is_ok());
    for (wait, used) in [("vmcnt(1)", "v3"), ("vmcnt(2)", "v2"), ("lgkmcnt(0)", "v2")] {
        let fault = expect(run(&format!("{two}s_waitcnt {wait}\nv_add_u32_e32 v4, {used}, v0\n"), 0, 65, 64), "v_add_u32", 0, None);
        assert!(matches!(&fault, Fault::UnfinishedLoad { register, .. } if register == used), "{fault:?}");
    }
    // Overwriting the destination of a load in flight is as wrong; by a later load of the same kind it is not.
    assert!(run(&format!("{two}v_mov_b32_e32 v3, 0\n"), 0, 65, 64).is_err());
    assert!(run(&format!("{two}global_load_dword v3, v1, s[4:5]\n"), 0, 65, 64).is_ok());
    // A store counts, too.
    let behind_store = "global_load_dword v2, v1, s[4:5]\nglobal_store_dword v1, v0, s[4:5]\ns_waitcnt vmcnt(1)\nv_mov_b32_e32 v3, v2\n";
    assert!(run(behind_store, 0, 64, 64).is_ok());
}

#[test]
fn scalar_loads_come_back_in_any_order() {
    require_clang!();
    let two = "s_load_dword s6, s[4:5], 0x0\ns_load_dword s7, s[4:5], 0x4\n";
    assert!(run(&format!("{two}s_waitcnt lgkmcnt(0)\ns_add_u32 s8, s6, s7\n"), 0, 64, 64).is_ok());
    let fault = expect(run(&format!("{two}s_waitcnt lgkmcnt(1)\ns_mov_b32 s8, s6\n"), 0, 64, 64), "s_mov_b32", 0, None);
    assert!(matches!(fault, Fault::UnfinishedLoad { .. }));
    // LDS alone is in order.
    let lds = "ds_read_b32 v2, v1\nds_read_b32 v3, v1 offset:4\ns_waitcnt lgkmcnt(1)\n";
    assert!(run(&format!("{lds}v_mov_b32_e32 v4, v2\n"), 512, 64, 64).is_ok());
    assert!(run(&format!("{lds}v_mov_b32_e32 v4, v3\n"), 512, 64, 64).is_err());
}

#[test]
fn flat_loads_need_both_counters() {
    require_clang!();
    let flat = "v_mov_b32_e32 v2, s4\nv_mov_b32_e32 v3, s5\nflat_load_dword v4, v[2:3]\n";
    for (wait, right) in [("vmcnt(0) lgkmcnt(0)", true), ("vmcnt(0)", false), ("lgkmcnt(0)", false)] {
        assert_eq!(run(&format!("{flat}s_waitcnt {wait}\nv_mov_b32_e32 v5, v4\n"), 0, 64, 64).is_ok(), right, "{wait}");
    }
}

#[test]
fn lds_outside_the_group_segment() {
    require_clang!();
    assert!(run("ds_write_b32 v1, v0\n", 256, 64, 64).is_ok());
    let fault = expect(run("ds_write_b32 v1, v0\n", 252, 64, 64), "ds_write_b32", 0, Some(63));
    assert!(matches!(fault, Fault::SegmentOutOfBounds { segment: "LDS", offset: 252, .. }), "{fault:?}");
}

/// Wave 0 writes and wave 1 reads the same words (or the other way round), with `between` in between.
fn exchange(first: &str, between: &str, second: &str) -> Result<Vec<u32>, Error> {
    let body = format!(
        "v_and_b32_e32 v1, 0xff, v1\nv_readfirstlane_b32 s6, v0\ns_cmp_eq_u32 s6, 0\ns_cbranch_scc0 skip_first\n{first}\nskip_first:\n{between}\n\
         s_cmp_eq_u32 s6, 0\ns_cbranch_scc1 skip_second\n{second}\nskip_second:\ns_waitcnt lgkmcnt(0)\n"
    );
    run(&body, 256, 64, 128)
}

#[test]
fn lds_races_between_waves() {
    require_clang!();
    let (write, read) = ("ds_write_b32 v1, v0", "ds_read_b32 v2, v1");
    assert!(exchange(write, "s_waitcnt lgkmcnt(0)\ns_barrier", read).is_ok());
    // No barrier.
    let fault = expect(exchange(write, "s_waitcnt lgkmcnt(0)", read), "ds_read_b32", 1, Some(0));
    assert!(matches!(fault, Fault::LdsRace { access: "read", other_access: "write", other_wave: 0, offset: 0, .. }), "{fault:?}");
    // A barrier without the wait before it.
    let fault = expect(exchange(write, "s_barrier", read), "ds_read_b32", 1, Some(0));
    assert!(matches!(fault, Fault::LdsRace { other_wave: 0, .. }));
    // Wait after the barrier: too late.
    assert!(exchange(write, "s_barrier\ns_waitcnt lgkmcnt(0)", read).is_err());
    // Write after read, write after write.
    assert!(exchange(read, "s_waitcnt lgkmcnt(0)\ns_barrier", write).is_ok());
    let fault = expect(exchange(read, "s_waitcnt lgkmcnt(0)", write), "ds_write_b32", 1, Some(0));
    assert!(matches!(fault, Fault::LdsRace { access: "write", other_access: "read", .. }), "{fault:?}");
    assert!(exchange(write, "s_nop 0", write).is_err());
    // Different words, reads only, atomics only.
    assert!(exchange("ds_write_b32 v1, v0", "s_nop 0", "v_mov_b32_e32 v3, 0").is_ok());
    assert!(exchange(read, "s_nop 0", read).is_ok());
    assert!(exchange("ds_add_u32 v1, v0", "s_nop 0", "ds_add_u32 v1, v0").is_ok());
    assert!(exchange("ds_add_u32 v1, v0", "s_nop 0", read).is_err());
    // Halves of a word are different words.
    assert!(exchange("ds_write_b16 v1, v0", "s_nop 0", "ds_write_b16 v1, v0 offset:2").is_ok());
    assert!(exchange("ds_write_b16 v1, v0", "s_nop 0", "ds_write_b16 v1, v0").is_err());
}

#[test]
fn loads_to_lds_are_proven_by_vmcnt() {
    require_clang!();
    let load = "s_mov_b32 m0, 0\nglobal_load_lds_dword v1, s[4:5]\n";
    let read = "ds_read_b32 v2, v1\ns_waitcnt lgkmcnt(0)\nglobal_store_dword v1, v2, s[4:5]\n";
    let out = run(&format!("{load}s_waitcnt vmcnt(0)\n{read}"), 256, 64, 64).unwrap();
    assert_eq!(out, (0..64).collect::<Vec<u32>>());
    let fault = expect(run(&format!("{load}s_waitcnt lgkmcnt(0)\n{read}"), 256, 64, 64), "ds_read_b32", 0, Some(0));
    assert!(matches!(fault, Fault::LdsRace { other_wave: 0, .. }), "{fault:?}");
}

#[test]
fn divergent_barriers() {
    require_clang!();
    let early = "v_readfirstlane_b32 s6, v0\ns_cmp_eq_u32 s6, 0\ns_cbranch_scc0 go\ns_endpgm\ngo:\ns_barrier\n";
    let fault = expect(run(early, 0, 64, 128), "s_barrier", 1, None);
    assert!(matches!(&fault, Fault::BarrierDivergence(text) if text.contains("[0]")), "{fault:?}");
    assert!(run("s_barrier\n", 0, 64, 128).is_ok());
    // Two barriers that each wave takes one of.
    let apart = "v_readfirstlane_b32 s6, v0\ns_cmp_eq_u32 s6, 0\ns_cbranch_scc0 other\ns_barrier\ns_endpgm\nother:\ns_barrier\n";
    assert!(matches!(expect(run(apart, 0, 64, 128), "s_barrier", 0, None), Fault::BarrierDivergence(_)));
    assert!(run_with(&format!("{PROLOGUE}{apart}"), 0, 0, 64, 128, |launch| launch.same_barrier = false).is_ok());
}

#[test]
fn runaway_loops() {
    require_clang!();
    let counted = |n: u32| format!("s_movk_i32 s6, {n}\nagain:\ns_sub_u32 s6, s6, 1\ns_cmp_lg_u32 s6, 0\ns_cbranch_scc1 again\n");
    assert!(run(&counted(3000), 0, 64, 64).is_ok());
    assert!(matches!(expect(run(&counted(4000), 0, 64, 64), "s_", 0, None), Fault::Runaway(10_000)));
    let forever = "s_cmp_eq_u32 s4, s4\nagain:\ns_cbranch_scc1 again\n";
    assert!(matches!(expect(run(forever, 0, 64, 64), "s_cbranch_scc1", 0, None), Fault::Runaway(10_000)));
    assert!(matches!(expect(run("again:\ns_branch again\n", 0, 64, 64), "s_branch", 0, None), Fault::Runaway(10_000)));
}

#[test]
fn unknown_instructions_stop_where_they_stand() {
    require_clang!();
    let fault = expect(run("v_cvt_off_f32_i4_e32 v2, v0\n", 0, 64, 64), "v_cvt_off_f32_i4", 0, None);
    assert!(matches!(fault, Fault::Unsupported(_)));
    // Not reached: no error.
    assert!(run("s_branch over\nv_cvt_off_f32_i4_e32 v2, v0\nover:\n", 0, 64, 64).is_ok());
    // A known instruction with a modifier that is not.
    assert!(matches!(expect(run("v_mad_u32_u24 v2, v0, v0, v0 clamp\n", 0, 64, 64), "v_mad_u32_u24", 0, None), Fault::Unsupported(_)));
}

#[test]
fn registers_outside_the_allocation() {
    require_clang!();
    assert!(run("v_mov_b32_e32 v31, 0\nv_accvgpr_write_b32 a15, 0\n", 0, 64, 64).is_ok());
    assert!(matches!(
        expect(run("v_mov_b32_e32 v32, 0\nv_accvgpr_write_b32 a15, 0\n", 0, 64, 64), "v_mov_b32", 0, None),
        Fault::RegisterOutOfRange(_)
    ));
    assert!(run("v_accvgpr_write_b32 a16, 0\n", 0, 64, 64).is_err());
    // Without AGPRs the whole file is VGPRs.
    assert!(run("v_mov_b32_e32 v47, 0\n", 0, 64, 64).is_ok());
    assert!(run("v_mov_b32_e32 v48, 0\n", 0, 64, 64).is_err());
}

#[test]
fn scratch_outside_the_private_segment() {
    require_clang!();
    let body = |offset: u32| format!("scratch_store_dword off, v0, off offset:{offset}\n");
    assert!(run_with(&body(12), 0, 16, 64, 64, |_| {}).is_ok());
    let fault = expect(run_with(&body(16), 0, 16, 64, 64, |_| {}), "scratch_store_dword", 0, Some(0));
    assert!(matches!(fault, Fault::SegmentOutOfBounds { segment: "scratch", .. }));
}
