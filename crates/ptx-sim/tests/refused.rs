//! Texts and launches that are refused: what is not supported, and what is no PTX. Nothing of it may panic, or be executed as something else.

mod support;

use ptx_sim::{Error, Launch, Memory, Module};
use support::run;

fn parse(body: &str) -> Result<(), Error> {
    let registers = ".reg .pred %p<8>;\n.reg .b16 %h<8>;\n.reg .f32 %f<80>;\n.reg .b32 %r<8>;\n.reg .b64 %rd<8>;";
    Module::parse(&format!(".extern .shared .align 16 .b8 dynamic[];\n.visible .entry k(.param .u64 p)\n{{\n{registers}\n{body}\nret;\n}}"))
        .map(drop)
}

fn refused(bodies: &[&str]) {
    for body in bodies {
        assert!(matches!(parse(body), Err(Error::Syntax { .. })), "{body}: {:?}", parse(body));
    }
}

#[test]
fn modifiers_that_would_be_executed_as_others() {
    refused(&[
        "add.sat.f32 %f1, %f2, %f3;",
        "add.cc.u32 %r1, %r2, %r3;",
        "mul.s32 %r1, %r2, %r3;",
        "mul.wide.u64 %rd1, %rd2, %rd3;",
        "mad.hi.s32 %r1, %r2, %r3, %r4;",
        "neg.ftz.f32 %f1, %f2;",
        "max.xorsign.abs.f32 %f1, %f2, %f3;",
        "min.NaN.f32 %f1, %f2, %f3;",
        "fma.rn.f16 %h1, %h2, %h3, %h4;",
        "prmt.b32.f4e %r1, %r2, %r3, %r4;",
        "setp.lt.f16 %p1, %h2, %h3;",
        "setp.lt.s32 %p1|%p2, %r2, %r3;",
        "cvt.f32.f32 %f1, %f2;",
        "cvt.rz.f32.s32 %f1, %r2;",
        "cvt.rz.f16.f32 %h1, %f2;",
        "cvt.rn.relu.f16x2.f32 %r1, %f2, %f3;",
        "cvt.rn.satfinite.bf16x2.f32 %r1, %f2, %f3;",
        "cvt.s16.s32 %r1, %r2;",
        "ld.global.v4.u32 {%r1, %r2}, [%rd1];",
        "ld.global.u32 {%r1, %r2}, [%rd1];",
        "ld.global.v4.u64 {%rd1, %rd2, %rd3, %rd4}, [%rd5];",
        "st.global.v4.b64 [%rd5], {%rd1, %rd2, %rd3, %rd4};",
        "ld.volatile.shared.u32 %r1, [%r2];",
        "st.shared.u8 [%r2], %r1;",
        "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%r1,%r2,%r3,%r4}, {%r1,%r2,%r3,%r4}, {%r1,%r2}, {%r1,%r2,%r3,%r4};",
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1,%f2,%f3,%f4}, {%r1,%r2,%r3,%r4,%r5}, {%r1,%r2}, {%f1,%f2,%f3,%f4};",
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1,%r2,%r3,%r4,%r5}, [%r2];",
    ]);
    let sums = (0..32).map(|i| format!("%f{i}")).collect::<Vec<_>>().join(",");
    let wgmma = |name: &str, rest: &str| format!("wgmma.mma_async.sync.aligned.m64n64k16.{name} {{{sums}}}, %rd1, %rd2, {rest};");
    assert!(parse(&wgmma("f32.f16.f16", "1, 1, 1, 0, 0")).is_ok());
    // Half sums, a negated operand, A across, too few operands, too few sums.
    let few = wgmma("f32.f16.f16", "1, 1, 1, 0, 0").replace("%f31", "%f30").replace(",%f30}", "}");
    refused(&[
        &wgmma("f16.f16.f16", "1, 1, 1, 0, 0"),
        &wgmma("f32.f16.f16", "1, -1, 1, 0, 0"),
        &wgmma("f32.f16.f16", "1, 1, 1, 1, 0"),
        &wgmma("f32.f16.f16", "1, 1, 1"),
        &few,
    ]);
}

#[test]
fn synchronizations_that_would_be_others() {
    refused(&[
        "bar.warp.sync 0xffff;",
        "barrier.sync 0;",
        "barrier.cluster.arrive.release.aligned;",
        "cp.async.bulk.commit_group;",
        "cp.async.ca.shared.global [%r1], [%rd1], 16, %p1;",
        "cp.async.cg.shared.global [%r1], [%rd1], 64;",
        "cp.async.cg.shared.global [%r1], [%rd1], 8;",
        // The policy is not the bytes to read.
        "cp.async.cg.shared.global.L2::cache_hint [%r1], [%rd1], 16, %rd2;",
        "fence.proxy.async.global;",
        "mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], 0;",
        "mbarrier.arrive.expect_tx.relaxed.cluster.shared::cta.b64 _, [%r1], 8;",
        "activemask.b32 %r1;",
    ]);
}

#[test]
fn operands_that_are_none() {
    refused(&[
        "mov.b32 %r1, {};",
        "mov.b32 {}, %r1;",
        "mov.b32 %r1, {{%h1, %h2}, %h3};",
        "mov.b32 %r1, {%h1, %h2, %h3};",
        "add.s32 5, %r1, %r2;",
        "add.s32 %r1, _, %r2;",
        "add.s32 %r1, [%r2], %r3;",
        "add.s32 %rd1, %r2, %r3;",
        "add.s32 %r1, %rd2, %r3;",
        "selp.b32 %r1, %r2, %r3, %r4;",
        "@%r1 add.s32 %r1, %r2, %r3;",
        "mov.f32 %f1, 0f3F8;",
        "mov.u32 %r1, 010;",
        "mov.u32 %r1, %laneid.x;",
    ]);
    for deep in
        [format!("mov.b32 %r1, {}1{};", "{".repeat(1 << 17), "}".repeat(1 << 17)), format!("mov.b32 %r1, {}1;", "1|".repeat(1 << 17))]
    {
        assert!(parse(&deep).is_err());
    }
}

#[test]
fn texts_that_are_no_kernels() {
    refused(&[
        "add.s32 %r1, %r2, %r3\n}\n{",
        "}\n.visible .entry k()\n{",
        ".visible .entry inner() {\nret;\n}",
        "$a:\n$a:",
        ".reg .b32 %r1;",
        ".reg .f64 %d<4>;",
        ".reg .b32 %x<4000000000>;",
        ".shared .align 0 .b8 x[4];",
        ".shared .align 3 .b8 x[4];",
        ".shared .align 8 .b64 x[2305843009213693952];",
        ".local .align 8 .b8 x[4294967296];",
        ".shared .align 16 .v2 .b8 x[4];",
        // It would lie where the launch's memory begins.
        "mov.u32 %r1, dynamic;\n.shared .align 16 .b8 late[64];",
    ]);
    for text in
        [".visible .entry k()\n{\nret;", ".visible .entry k()\n.reqntid 64, 1, 1\n{\nret;\n}", ".extern .shared .align 0 .b8 dynamic[];"]
    {
        assert!(matches!(Module::parse(text), Err(Error::Syntax { .. })), "{text}");
    }
}

/// A branch goes to the label of the nearest block around it that has it, not of one inside, nor of one declared before farther out.
#[test]
fn labels_belong_to_their_blocks() {
    let body = "
        mov.u32 %r1, 0;
        bra again;
        {
        again:
            add.s32 %r1, %r1, 100;
        }
    again:
        add.s32 %r1, %r1, 1;";
    assert_eq!(run(body, &[], 32).unwrap(), [1; 32]);
    let body = "
        mov.u32 %r1, 0;
    next:
        add.s32 %r1, %r1, 1;
        setp.gt.u32 %p1, %r1, 5;
        @%p1 bra out;
        {
            { bra next; }
            add.s32 %r1, %r1, 100;
        next:
            add.s32 %r1, %r1, 10;
        }
    out:";
    assert_eq!(run(body, &[], 32).unwrap(), [11; 32]);
}

#[test]
fn launches_beyond_all_numbers() {
    let module = Module::parse(".visible .entry k()\n{\n.shared .align 16 .b8 x[16];\nret;\n}").unwrap();
    let fits = Launch { grid: [1, 1, 1], threads: 32, cluster: 1, dynamic_shared: 0, early: None };
    for wrong in [Launch { dynamic_shared: u32::MAX - 8, ..fits }, Launch { grid: [u32::MAX, 1, 1], ..fits }] {
        let found = module.kernel("k").unwrap().launch(&Memory::new(), &[], &wrong);
        assert!(matches!(found, Err(Error::Launch { .. })), "{wrong:?}");
    }
}
