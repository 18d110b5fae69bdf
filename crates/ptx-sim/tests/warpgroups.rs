//! Products of a warpgroup, by their rules and against them.

mod support;

use ptx_sim::Fault;
use support::{fault, race, run};

/// Fills shared memory with ones, `fence`, and multiplies by `product`, in which `D, A, B` stand for the operands; then `after`.
fn body(fence: &str, product: &str, after: &str) -> String {
    let zeros: String = (0..32).map(|i| format!("mov.f32 %f{i}, 0f00000000;\n")).collect();
    let sums = (0..32).map(|i| format!("%f{i}")).collect::<Vec<_>>().join(",");
    format!(
        "{zeros}
        mov.u32 %r2, dynamic;
        mad.lo.s32 %r3, %r0, 64, %r2;
        mov.u32 %r4, 0x3f803f80;
        st.shared.v4.u32 [%r3], {{%r4, %r4, %r4, %r4}};
        st.shared.v4.u32 [%r3+16], {{%r4, %r4, %r4, %r4}};
        st.shared.v4.u32 [%r3+32], {{%r4, %r4, %r4, %r4}};
        st.shared.v4.u32 [%r3+48], {{%r4, %r4, %r4, %r4}};
        setp.eq.s32 %p1, %r0, 0;
        setp.lt.u32 %p2, %r0, 32;
        {fence}
        bar.sync 0;
        shr.u32 %r5, %r2, 4;
        cvt.u64.u32 %rd2, %r5;
        or.b64 %rd2, %rd2, 0x4000004000010000;
        {}
        wgmma.commit_group.sync.aligned;
        {after}
        mov.b32 %r1, %f5;",
        product.replace("D, A, B", &format!("{{{sums}}}, %rd2, %rd2"))
    )
}

const PROXY: &str = "fence.proxy.async.shared::cta;";
const FENCE: &str = "wgmma.fence.sync.aligned;";
const PRODUCT: &str = "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 D, A, B, 1, 1, 1, 0, 0;";
const WAIT: &str = "wgmma.wait_group.sync.aligned 0;";

fn misuse(body: &str) -> String {
    match fault(body, 128) {
        Fault::Misuse(why) => why,
        other => panic!("{other}"),
    }
}

#[test]
fn what_tensor_cores_read_is_fenced_and_left_alone() {
    let body = |fence: &str, wait: &str| {
        let overwrite = format!("{wait}\nbar.sync 0;\nst.shared.u32 [%r3], 0;");
        body(fence, &[FENCE, PRODUCT].concat(), &overwrite)
    };
    assert_eq!(run(&body(PROXY, WAIT), &[], 128).unwrap(), [16f32.to_bits(); 128]);
    let (access, other) = race(&body("", WAIT), 128);
    assert!(access == "read by wgmma" && other.contains("fence.proxy.async"), "{other}");
    let (access, other) = race(&body(PROXY, ""), 128);
    assert!(access == "write" && other.contains("wgmma"), "{other}");
    assert_eq!(race(&body(PROXY, "wgmma.wait_group.sync.aligned 1;"), 128).0, "write");
}

#[test]
fn registers_that_are_not_waited_for() {
    let twice = [FENCE, PRODUCT, PRODUCT].concat();
    assert_eq!(run(&body(PROXY, &twice, WAIT), &[], 128).unwrap(), [32f32.to_bits(); 128]);
    assert!(misuse(&body(PROXY, &twice, "")).contains("not waited for"));
    assert!(misuse(&body(PROXY, &twice, "wgmma.wait_group.sync.aligned 1;")).contains("not waited for"));
    assert!(misuse(&body(PROXY, &twice, "mov.f32 %f7, 0f00000000;")).contains("not waited for"));
    // The group waited for is not the last that sums into them.
    let later = format!("{FENCE}{PRODUCT}wgmma.commit_group.sync.aligned;{PRODUCT}");
    assert!(misuse(&body(PROXY, &later, "wgmma.wait_group.sync.aligned 1;")).contains("not waited for"));
    assert!(misuse(&body(PROXY, PRODUCT, WAIT)).contains("wgmma.fence"));
}

#[test]
fn warps_and_lanes_that_differ() {
    let some = format!("{FENCE}@%p2 {PRODUCT}");
    assert!(misuse(&body(PROXY, &some, WAIT)).contains("warpgroup"));
    let other = format!("{FENCE}@%p2 {PRODUCT}\n@!%p2 {PRODUCT}");
    assert!(misuse(&body(PROXY, &other, WAIT)).contains("warpgroup"));
    let matrices = format!("@%p2 add.s64 %rd2, %rd2, 64;\n{FENCE}{PRODUCT}");
    assert!(misuse(&body(PROXY, &matrices, WAIT)).contains("same matrices"));
    let adds = format!("{FENCE}{}", PRODUCT.replace("B, 1", "B, %p1"));
    assert!(misuse(&body(PROXY, &adds, WAIT)).contains("differs"));
    assert!(misuse(&body("selp.b32 %r6, 1, 0, %p1;\nbar.sync %r6;", PRODUCT, WAIT)).contains("differs"));
}

/// A lane's fence is for its own writes.
#[test]
fn a_fence_of_one_lane() {
    let product = [FENCE, PRODUCT].concat();
    assert!(matches!(fault(&body(&format!("@%p1 {PROXY}"), &product, WAIT), 128), Fault::Divergence { .. }));
}
