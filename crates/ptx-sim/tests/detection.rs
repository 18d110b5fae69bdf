//! Mistakes that a GPU would keep quiet about, each beside the same code without it.

mod support;

use ptx_sim::{Error, Fault, Launch, Memory, Module};
use support::{early_fault, fault, race, run, run_cluster};

/// Each thread writes its word of shared memory; `between`; and reads the word `distance` threads on.
fn exchange(between: &str, distance: u32) -> String {
    format!(
        "mov.u32 %r2, dynamic;
        shl.b32 %r3, %r0, 2;
        add.s32 %r2, %r2, %r3;
        st.shared.u32 [%r2], %r0;
        {between}
        xor.b32 %r4, %r3, {};
        mov.u32 %r5, dynamic;
        add.s32 %r5, %r5, %r4;
        ld.shared.u32 %r1, [%r5];",
        4 * distance
    )
}

#[test]
fn reads_that_nothing_orders_after_a_write() {
    let expected: Vec<u32> = (0..128).map(|i| i ^ 32).collect();
    assert_eq!(run(&exchange("bar.sync 0;", 32), &[], 128).unwrap(), expected);
    // Whichever of the two comes first in the simulator's order, the other is not ordered after it.
    let (_, other) = race(&exchange("", 32), 128);
    assert!(other.contains("of warp 0"), "{other}");
    // A barrier of the warp orders its lanes alone.
    assert!(run(&exchange("bar.warp.sync -1;", 1), &[], 128).is_ok());
    assert_eq!(race(&exchange("", 1), 32).0, "read");
    race(&exchange("bar.warp.sync -1;", 32), 64);
    // A shuffle brings lanes together, but orders no memory.
    assert_eq!(race(&exchange("shfl.sync.idx.b32 %r6, %r0, 0, 31, -1;", 1), 32).0, "read");
}

#[test]
fn writes_that_nothing_orders_after_a_read() {
    let overwrite = |between: &str| format!("{}\n{between}\nst.shared.u32 [%r5], %r0;\nbar.sync 0;", exchange("bar.sync 0;", 32));
    // Each word is written by whom its reader is: in order. By its owner: only behind a barrier.
    assert!(run(&overwrite(""), &[], 64).is_ok());
    let own = |between: &str| format!("{}\n{between}\nst.shared.u32 [%r2], %r0;", exchange("bar.sync 0;", 32));
    assert!(run(&own("bar.sync 0;"), &[], 64).is_ok());
    race(&own(""), 64);
}

#[test]
fn two_lanes_that_write_one_word() {
    assert_eq!(race("mov.u32 %r2, dynamic;\nst.shared.u32 [%r2], %r0;", 32).0, "write");
}

/// Warp 1 writes, arrives and goes on; warp 0 waits for it.
#[test]
fn an_arrival_orders_what_came_before_it_alone() {
    let body = |after: &str| {
        format!(
            "mov.u32 %r2, dynamic;
            mov.u32 %r1, 5;
            setp.lt.u32 %p1, %r0, 32;
            @%p1 bra $reader;
            setp.ne.s32 %p2, %r0, 32;
            @%p2 bra $written;
            st.shared.u32 [%r2], 7;
        $written:
            bar.warp.sync -1;
            bar.arrive 3, 64;
            {after}
            bra.uni $end;
        $reader:
            bar.sync 3, 64;
            ld.shared.u32 %r1, [%r2];
        $end:"
        )
    };
    let found = run(&body(""), &[], 64).unwrap();
    assert_eq!((found[0], found[40]), (7, 5));
    let late = "@!%p2 st.shared.u32 [%r2], 8;";
    assert!(matches!(fault(&body(late), 64), Fault::Race { .. }));
}

/// Each thread copies 16 bytes of the input and reads what the thread `distance` on copied.
fn copies(wait: &str, distance: u32) -> String {
    format!(
        "mov.u32 %r2, dynamic;
        shl.b32 %r3, %r0, 4;
        add.s32 %r4, %r2, %r3;
        cvt.u64.u32 %rd2, %r3;
        and.b64 %rd2, %rd2, 127;
        add.s64 %rd2, %rd1, %rd2;
        cp.async.cg.shared.global.L2::128B [%r4], [%rd2], 16, 16;
        cp.async.commit_group;
        {wait}
        xor.b32 %r5, %r3, {};
        add.s32 %r5, %r2, %r5;
        ld.shared.v2.u32 {{%r6, %r1}}, [%r5];",
        16 * distance
    )
}

#[test]
fn copies_that_are_not_waited_for() {
    let input: Vec<u32> = (0..64).collect();
    let found = run(&copies("cp.async.wait_group 0;\nbar.sync 0;", 33), &input, 64).unwrap();
    assert_eq!(found, (0..64).map(|i| (i ^ 33) % 8 * 4 + 1).collect::<Vec<_>>());
    assert!(run(&copies("cp.async.wait_group 0;", 0), &input, 64).is_ok());
    for wait in ["", "bar.sync 0;", "cp.async.wait_group 1;\nbar.sync 0;"] {
        let (access, other) = race(&copies(wait, 0), 64);
        assert!(access == "read" && other.contains("not waited for"), "{other}");
    }
    // Another warp's copies need its wait and a barrier.
    race(&copies("cp.async.wait_group 0;", 32), 64);
}

/// CTA `c` sends its rank to CTA `c ^ 1`.
fn sends(init_fence: &str, expected: u32) -> String {
    format!(
        "mov.u32 %r2, dynamic;
        setp.ne.s32 %p1, %r0, 0;
        @%p1 bra $made;
        mbarrier.init.shared::cta.b64 [%r2+1024], 1;
        {init_fence}
        {{.reg .b64 s; mbarrier.arrive.expect_tx.shared::cta.b64 s, [%r2+1024], {expected};}}
    $made:
        bar.warp.sync -1;
        barrier.cluster.arrive.relaxed.aligned;
        bar.sync 0;
        barrier.cluster.wait.acquire.aligned;
        mov.u32 %r3, %ctaid.x;
        xor.b32 %r4, %r3, 1;
        cvt.rn.f32.u32 %f1, %r3;
        add.s32 %r5, %r2, 1024;
        shl.b32 %r6, %r0, 3;
        add.s32 %r6, %r6, %r2;
        {{.reg .b32 a, b; mapa.shared::cluster.u32 a, %r6, %r4; mapa.shared::cluster.u32 b, %r5, %r4;
        st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [a], {{%f1, %f1}}, [b];}}
        {{.reg .pred p; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%r5], 0; @!p bra again;}}
        ld.shared.f32 %f2, [%r6+4];
        cvt.rzi.u32.f32 %r1, %f2;"
    )
}

#[test]
fn values_that_ctas_send_each_other() {
    let fence = "fence.mbarrier_init.release.cluster;";
    let found = run_cluster(&sends(fence, 256), &[], 2, 32).unwrap();
    assert_eq!(found, [[1; 32], [0; 32]].concat());
    let error = |init_fence: &str, expected| run_cluster(&sends(init_fence, expected), &[], 2, 32).unwrap_err();
    assert!(matches!(error("", 256).fault(), Some(Fault::Misuse(why)) if why.contains("known to have been made")));
    // Bytes that never come.
    assert!(matches!(error(fence, 264).fault(), Some(Fault::Deadlock(_))));
    // Without the wait nothing is there yet, or is seen.
    let without = sends(fence, 256).lines().filter(|line| !line.contains("try_wait")).collect::<Vec<_>>().join("\n");
    assert!(matches!(run_cluster(&without, &[], 2, 32).unwrap_err().fault(), Some(Fault::Race { access: "read", .. } | Fault::Misuse(_))));
}

#[test]
fn accesses_outside() {
    assert!(matches!(fault("add.s64 %rd2, %rd1, 4096;\nld.global.u32 %r1, [%rd2];", 32), Fault::Global(_)));
    assert!(matches!(fault("mov.u64 %rd2, 0;\nst.global.u32 [%rd2], 1;", 32), Fault::Global(_)));
    assert!(matches!(fault("ld.global.u32 %r1, [%rd1+2];", 32), Fault::Misaligned { .. }));
    assert!(matches!(fault("mov.u32 %r2, dynamic;\nld.shared.u32 %r1, [%r2+65536];", 32), Fault::Shared { .. }));
    assert!(matches!(fault("ld.shared.u32 %r1, [0];", 32), Fault::Shared { .. }));
    assert!(matches!(fault("mov.u32 %r2, dynamic;\nld.shared.u32 %r1, [%r2+2];", 32), Fault::Misaligned { .. }));
}

#[test]
fn lanes_and_warps_that_do_not_come() {
    let divergent = "setp.lt.u32 %p1, %r0, 16;\n@%p1 bra $out;\nshfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;\n$out:\n";
    assert!(matches!(fault(&format!("{divergent} mov.u32 %r1, 0;"), 32), Fault::Divergence { .. }));
    let alone = "setp.lt.u32 %p1, %r0, 32;\n@%p1 bra $out;\nbar.sync 1, 64;\n$out:\n";
    match fault(alone, 64) {
        Fault::Deadlock(why) => assert!(why.contains("warp 1 at `bar.sync 1, 64`"), "{why}"),
        other => panic!("{other}"),
    }
    let counts = "setp.lt.u32 %p1, %r0, 32;\n@%p1 bar.sync 1, 64;\n@!%p1 bar.sync 1, 96;";
    assert!(matches!(fault(counts, 64), Fault::Misuse(_)));
}

#[test]
fn what_is_not_supported_is_refused_when_it_is_read() {
    let parse =
        |line: &str| Module::parse(&format!(".visible .entry k()\n{{\n.reg .b32 %r<4>;\n.reg .b64 %rd<4>;\n{line}\nret;\n}}")).map(drop);
    assert!(parse("add.s32 %r1, %r2, %r3;").is_ok());
    for line in [
        "tex.2d.v4.f32 %r1, %r2;",
        "add.s32 %r1, %r2, %r9;",
        "add.s32 %r1, %r2;",
        "ld.u32 %r1, [%rd1];",
        "add.rz.f32 %r1, %r2, %r3;",
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%r1}, {%r2}, {%r3}, {%r1};",
        "bra $nowhere;",
        "call (%r1), f, (%r2);",
    ] {
        match parse(line) {
            Err(Error::Syntax { .. }) => {}
            other => panic!("{line}: {other:?}"),
        }
    }
}

#[test]
fn launches_that_do_not_fit() {
    let module = Module::parse(".visible .entry k(.param .u64 p)\n.maxntid 128, 1, 1\n{\nret;\n}").unwrap();
    let (memory, fits) = (Memory::new(), Launch { grid: [4, 1, 1], threads: 128, cluster: 2, dynamic_shared: 0, early: None });
    let launch = |params: &[u8], launch: Launch| module.kernel("k").unwrap().launch(&memory, params, &launch);
    assert_eq!(launch(&[0; 8], fits).unwrap().instructions, 16);
    assert!(launch(&[0; 4], fits).is_err());
    for wrong in [
        Launch { threads: 0, ..fits },
        Launch { threads: 48, ..fits },
        Launch { threads: 256, ..fits },
        Launch { cluster: 3, ..fits },
        Launch { cluster: 0, ..fits },
        Launch { grid: [4, 0, 1], ..fits },
        Launch { dynamic_shared: 1 << 20, ..fits },
    ] {
        assert!(matches!(launch(&[0; 8], wrong), Err(Error::Launch { .. })), "{wrong:?}");
    }
}

#[test]
fn what_is_not_settled_ahead_of_the_wait() {
    let load = |from: &str| format!("ld.global.u32 %r1, [{from}];");
    let wait = "griddepcontrol.wait;";
    let early = |body: &str| match early_fault(body) {
        None => None,
        Some(Fault::Early { access, .. }) => Some(access),
        Some(other) => panic!("{other}"),
    };
    assert_eq!(early(&format!("{}{wait}", load("%rd1"))), None);
    assert_eq!(early(&format!("{wait}{}", load("%rd0"))), None);
    assert_eq!(early(&format!("{}{wait}", load("%rd0"))), Some("load"));
    // The store at the end.
    assert_eq!(early(&load("%rd1")), Some("store"));
    let next = "griddepcontrol.launch_dependents;";
    assert_eq!(early(&format!("{wait}{next}{}", load("%rd1"))), None);
    assert!(matches!(early_fault(&format!("{next}{wait}{}", load("%rd1"))), Some(Fault::Misuse(_))));
    let copies = "mov.u32 %r2, dynamic; cp.async.ca.shared.global [%r2], [%rd0], 4, 4;";
    assert_eq!(early(&format!("setp.eq.u32 %p1, %r0, 0; @!%p1 bra $on; {copies} $on: {wait} mov.u32 %r1, 0;")), Some("load"));
    // A lane that has not waited.
    assert_eq!(early(&format!("setp.lt.u32 %p1, %r0, 7; @%p1 bra $on; {wait} $on: mov.u32 %r1, 0;")), Some("store"));
    assert!(matches!(early_fault("mov.u64 %rd1, 16; ld.global.u32 %r1, [%rd1];"), Some(Fault::Global(_))));
}
