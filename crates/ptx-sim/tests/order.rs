//! Synchronization that orders less than it seems to, each beside the same code with what it takes.

mod support;

use ptx_sim::Fault;
use support::{fault, race, run, run_cluster};

fn misuse(body: &str, threads: u32) -> String {
    match fault(body, threads) {
        Fault::Misuse(why) => why,
        other => panic!("{other}"),
    }
}

#[test]
fn masks_that_are_not_the_lanes() {
    // Lanes whose own bit is not set, or that name others who do not name them.
    assert!(misuse("shfl.sync.bfly.b32 %r1, %r0, 1, 31, 0xffff;", 32).contains("mask"));
    let two = |low: &str| {
        format!(
            "setp.lt.u32 %p1, %r0, 16;\nand.b32 %r3, %r0, 1;\nsetp.eq.s32 %p2, %r3, 0;\nselp.b32 %r2, {low}, 0xffff0000, %p1;\nvote.sync.ballot.b32 %r1, %p2, %r2;"
        )
    };
    assert!(misuse(&two("0x1ffff"), 32).contains("mask"));
    // Two sets of lanes at one instruction, each of its own.
    assert_eq!(run(&two("0xffff"), &[], 32).unwrap(), [[0x5555; 16], [0x5555_0000; 16]].concat());
    let half = |body: &str| format!("mov.u32 %r1, 7;\nsetp.gt.u32 %p1, %r0, 15;\n@%p1 bra $out;\n{body}\n$out:");
    let found = run(&half("shfl.sync.bfly.b32 %r1, %r0, 1, 31, 0xffff;"), &[], 32).unwrap();
    assert_eq!(found[..17], [1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14, 7]);
    // What a lane has that does not take part is not what its register holds.
    assert_eq!(run(&half("shfl.sync.bfly.b32 %r1, %r0, 16, 31, 0xffff;"), &[], 32).unwrap()[3], u32::MAX);
}

/// Lanes that have ended are not waited for by those that name them; one whose guard is off goes on.
#[test]
fn lanes_that_ended_or_pass_by() {
    let body = "mov.u32 %r1, 1;\nsetp.lt.u32 %p1, %r0, 4;\n@%p1 ret;\nvote.sync.ballot.b32 %r1, %p1, -1;\nnot.b32 %r1, %r1;";
    assert_eq!(run(body, &[], 32).unwrap(), [[0; 4].as_slice(), &[u32::MAX; 28]].concat());
    // Lane i comes to the instruction in its iteration i % 2.
    let body = "
        and.b32 %r2, %r0, 1;
        mov.u32 %r3, 0;
    $loop:
        setp.eq.u32 %p1, %r2, %r3;
        @%p1 shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;
        add.s32 %r3, %r3, 1;
        setp.lt.u32 %p2, %r3, 2;
        @!%p1 bra $loop;";
    assert_eq!(run(body, &[], 32).unwrap(), (0..32).map(|i| i ^ 1).collect::<Vec<_>>());
}

/// Warp 0's lanes write, its lane 0 makes an mbarrier known and arrives; warp 1 waits for that.
fn arrival(sync: &str) -> String {
    format!(
        "mov.u32 %r2, dynamic;
        mov.u32 %r1, 0;
        shl.b32 %r3, %r0, 2;
        and.b32 %r3, %r3, 127;
        add.s32 %r3, %r3, %r2;
        setp.ne.s32 %p1, %r0, 0;
        @!%p1 mbarrier.init.shared::cta.b64 [%r2+1024], 1;
        bar.sync 0;
        setp.gt.u32 %p2, %r0, 31;
        @%p2 bra $waits;
        st.shared.u32 [%r3], %r0;
        {sync}
        @!%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2+1024], 0;
        bra.uni $end;
    $waits:
        mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p3, [%r2+1024], 0;
        @!%p3 bra $waits;
        ld.shared.u32 %r1, [%r3];
    $end:"
    )
}

#[test]
fn a_lane_releases_its_own_work() {
    let found = run(&arrival("bar.warp.sync -1;"), &[], 64).unwrap();
    assert_eq!(found[32..], (0..32).collect::<Vec<_>>());
    assert_eq!(race(&arrival(""), 64).0, "read");
}

#[test]
fn each_lane_arrives() {
    let body = |arrive: &str| {
        format!(
            "mov.u32 %r2, dynamic;\nmov.u32 %r1, 0;\nsetp.eq.s32 %p1, %r0, 0;\n@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;\nbar.warp.sync -1;\n{arrive}"
        )
    };
    let arrive = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 8;";
    assert!(fault(&body(arrive), 32).to_string().contains("ends before it has waited") || misuse(&body(arrive), 32).contains("arrivals"));
    assert!(misuse(&body("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 1048576;"), 32).contains("counts"));
    assert!(run(&body("@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 0;"), &[], 32).is_ok());
    // All lanes make it; one makes it twice; it is written over.
    assert_eq!(race("mov.u32 %r2, dynamic;\nmbarrier.init.shared::cta.b64 [%r2], 1;", 32).0, "write");
    for over in ["mbarrier.init.shared::cta.b64 [%r2], 1;", "st.shared.u32 [%r2+4], 1;"] {
        let (_, other) = race(&body(&format!("@%p1 {over}")), 32);
        assert!(other.contains("mbarrier"), "{other}");
    }
    assert!(misuse(&body("").replace("bar.warp.sync -1;", arrive), 32).contains("known to have been made"));
}

/// A loop around the look that counts, and lanes that look before others have done what is looked for.
#[test]
fn looks_in_vain() {
    let waits = "$waits:\nadd.s32 %r1, %r1, 1;\nsetp.gt.u32 %p4, %r1, 1000000;\n@%p4 bra $end;\nmbarrier.try_wait.parity";
    let counting = arrival("bar.warp.sync -1;").replace("$waits:\n        mbarrier.try_wait.parity", waits);
    assert!(counting.contains("%p4"));
    assert!(run(&counting, &[], 64).is_ok());
    let never = counting
        .replace("@!%p1 mbarrier.arrive", "@%p4 mbarrier.arrive")
        .replace("setp.ne.s32 %p1", "setp.ne.s32 %p4, %r0, %r0;\nsetp.ne.s32 %p1");
    assert!(matches!(fault(&never, 64), Fault::Deadlock(_)));
}

/// A CTA of a cluster sends its rank to the other.
fn sends(init: &str, before: &str, wait: &str) -> String {
    format!(
        "mov.u32 %r2, dynamic;
        mov.u32 %r3, %ctaid.x;
        xor.b32 %r4, %r3, 1;
        mov.u32 %r1, 0;
        {before}
        setp.ne.s32 %p1, %r0, 0;
        @%p1 bra $made;
        {init}
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2+1024], 256;
    $made:
        bar.warp.sync -1;
        barrier.cluster.arrive.relaxed.aligned;
        {wait}
        add.s32 %r5, %r2, 1024;
        shl.b32 %r6, %r0, 3;
        add.s32 %r6, %r6, %r2;
        mapa.shared::cluster.u32 %r7, %r6, %r4;
        mapa.shared::cluster.u32 %r8, %r5, %r4;
        st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%r7], {{%r3, %r3}}, [%r8];
    $again:
        mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r5], 0;
        @!%p2 bra $again;
        ld.shared.u32 %r1, [%r6];"
    )
}

#[test]
fn mbarriers_that_the_cluster_does_not_know_yet() {
    let (init, fence) = ("mbarrier.init.shared::cta.b64 [%r2+1024], 1;", "fence.mbarrier_init.release.cluster;");
    let (meet, wait) =
        ("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;", "barrier.cluster.wait.acquire.aligned;");
    let right = [init, fence].concat();
    let run = |body: &str| run_cluster(body, &[], 2, 32);
    let why = |body: &str| run(body).unwrap_err().to_string();
    for before in ["", meet] {
        assert_eq!(run(&sends(&right, before, wait)).unwrap(), [[1; 32], [0; 32]].concat());
    }
    assert!(why(&sends(&[fence, init].concat(), "", wait)).contains("known to have been made"));
    // A round that ended before does not do: CTA 1 sends when CTA 0 has come, but does not wait for it.
    let early = "setp.eq.s32 %p3, %r3, 0;\n@%p3 barrier.cluster.wait.acquire.aligned;";
    assert!(why(&sends(&right, meet, early)).contains("known to have been made"));
    assert!(why(&sends(&right, "barrier.cluster.wait.acquire.aligned;", wait)).contains("without an arrival"));
    assert!(why(&sends(&right, "barrier.cluster.arrive.relaxed.aligned;", wait)).contains("second arrival"));
    // A rank that the cluster does not have, which is not another's.
    assert!(why(&sends(&right, "mov.u32 %r4, 256;", wait)).contains("CTA 256"));
}

#[test]
fn a_cta_that_ends_before_what_is_sent_to_it_has_come() {
    let init = "mbarrier.init.shared::cta.b64 [%r2+1024], 1;\nfence.mbarrier_init.release.cluster;";
    let body = sends(init, "", "barrier.cluster.wait.acquire.aligned;");
    let (sent, _) = body.split_once("$again:").unwrap();
    let error = run_cluster(sent, &[], 2, 32).unwrap_err().to_string();
    assert!(error.contains("ends before it has waited") || error.contains("has ended"), "{error}");
}

/// The cluster waits for those that have not ended.
#[test]
fn warps_that_end_before_the_cluster_meets() {
    let meet = "barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;";
    let body = |before: &str| format!("mov.u32 %r1, 3;\nsetp.lt.u32 %p1, %r0, 32;\n{before}\n@%p1 bra $end;\n{meet}\n$end:");
    for before in ["", meet, "barrier.cluster.arrive.relaxed.aligned;\n@!%p1 barrier.cluster.wait.acquire.aligned;"] {
        assert_eq!(run_cluster(&body(before), &[], 2, 64).unwrap(), [3; 128], "{before}");
    }
}

/// Warp 0 waits for warp 1's first arrival, warp 2 for its second, which `between` may hold back until warp 0 has come.
#[test]
fn rounds_of_a_barrier_that_could_mix() {
    let body = |between: &str, other: &str| {
        format!(
            "mov.u32 %r2, dynamic;
            mov.u32 %r1, 9;
            shr.u32 %r3, %r0, 5;
            setp.eq.s32 %p1, %r3, 0;
            setp.eq.s32 %p2, %r3, 1;
            setp.eq.s32 %p3, %r0, 32;
            @!%p1 bra $one;
            bar.sync 1, 64;
            ld.shared.u32 %r1, [%r2];
            {other}
            bra.uni $end;
        $one:
            @!%p2 bra $two;
            @%p3 st.shared.u32 [%r2], 5;
            bar.arrive 1, 64;
            {between}
            @%p3 st.shared.u32 [%r2+4], 6;
            bar.arrive 1, 64;
            bra.uni $end;
        $two:
            {other}
            bar.sync 1, 64;
            ld.shared.u32 %r1, [%r2+4];
        $end:"
        )
    };
    let found = run(&body("bar.sync 2, 96;", "bar.sync 2, 96;"), &[], 96).unwrap();
    assert_eq!((found[0], found[32], found[64]), (5, 9, 6));
    assert!(misuse(&body("", ""), 96).contains("round before"));
}

/// The lanes that wait stand before the code of the lane that they wait for.
#[test]
fn lanes_that_look_before_another_arrives() {
    let body = "
        mov.u32 %r2, dynamic;
        mov.u32 %r1, 4;
        setp.eq.s32 %p1, %r0, 0;
        @%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
        bar.warp.sync -1;
        @%p1 bra $late;
    $wait:
        mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r2], 0;
        @!%p2 bra $wait;
        bra.uni $end;
    $late:
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 0;
        bra.uni $wait;
    $end:";
    assert_eq!(run(body, &[], 32).unwrap(), [4; 32]);
}

/// A barrier of all threads goes on without warps that ended, before or after the others came; one with a count does not.
#[test]
fn warps_that_end_before_a_barrier() {
    let body =
        |leaver: &str, sync: &str| format!("mov.u32 %r1, 3;\nsetp.{leaver}.u32 %p1, %r0, 32;\n@%p1 bra $end;\n{sync}\n{sync}\n$end:");
    for leaver in ["lt", "ge"] {
        assert_eq!(run(&body(leaver, "bar.sync 0;"), &[], 64).unwrap(), [3; 64]);
        assert!(matches!(fault(&body(leaver, "bar.sync 0, 64;"), 64), Fault::Deadlock(_) | Fault::Misuse(_)));
    }
}
