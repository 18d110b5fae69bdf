//! Shared by the tests: kernels around a few instructions.
#![allow(dead_code)]

use ptx_sim::{Early, Error, Fault, Launch, Memory, Module};

/// Registers that a body may use: `%r` (32 bits), `%rd` (64), `%f`, `%p`, `%h` (16); `%rd0` is the address of the output, `%rd1` of the input, `%r0` the thread.
const HEAD: &str = "
.version 8.0
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry kernel(
    .param .u64 kernel_param_0,
    .param .u64 kernel_param_1
)
{
    .reg .pred %p<16>;
    .reg .b16 %h<16>;
    .reg .f32 %f<160>;
    .reg .b32 %r<64>;
    .reg .b64 %rd<32>;
    ld.param.u64 %rd0, [kernel_param_0];
    ld.param.u64 %rd1, [kernel_param_1];
    mov.u32 %r0, %tid.x;
";

/// Ends a body: thread `t` of CTA `c` stores `%r1` as word `c * threads + t` of the output.
const TAIL: &str = "
    mov.u32 %r60, %ctaid.x;
    mov.u32 %r61, %ntid.x;
    mad.lo.s32 %r60, %r60, %r61, %r0;
    mul.wide.u32 %rd30, %r60, 4;
    add.s64 %rd30, %rd0, %rd30;
    st.global.u32 [%rd30], %r1;
    ret;
}
";

/// The words that a kernel of `body` leaves, run by `threads` threads of each of `ctas` CTAs, which are one cluster.
pub fn run_cluster(body: &str, input: &[u32], ctas: u32, threads: u32) -> Result<Vec<u32>, Error> {
    run_all(body, input, ctas, threads, false)
}

/// The fault that a body ends with, if any, where the kernel before may still write the output, but not the input.
pub fn early_fault(body: &str) -> Option<Fault> {
    run_all(body, &[0; 64], 1, 32, true).err().map(|error| error.fault().unwrap_or_else(|| panic!("{error}")).clone())
}

fn run_all(body: &str, input: &[u32], ctas: u32, threads: u32, early: bool) -> Result<Vec<u32>, Error> {
    let module = Module::parse(&format!("{HEAD}{body}{TAIL}"))?;
    let memory = Memory::new();
    let bytes: Vec<u8> = input.iter().chain(&[0; 4]).flat_map(|word| word.to_le_bytes()).collect();
    let (input, words) = (memory.upload(&bytes).unwrap(), (ctas * threads) as usize);
    let output = memory.alloc(words * 4).unwrap();
    let params = [output.to_le_bytes(), input.to_le_bytes()].concat();
    let settled = [input];
    let early = early.then_some(Early { settled: &settled, starts_next: false });
    let launch = Launch { grid: [ctas, 1, 1], threads, cluster: ctas, dynamic_shared: 64 << 10, early };
    module.kernel("kernel").unwrap().launch(&memory, &params, &launch)?;
    let left = memory.read(output, words * 4).unwrap();
    Ok(left.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect())
}

/// The words that one CTA leaves.
pub fn run(body: &str, input: &[u32], threads: u32) -> Result<Vec<u32>, Error> {
    run_cluster(body, input, 1, threads)
}

/// The fault that a body ends with.
pub fn fault(body: &str, threads: u32) -> Fault {
    let error = run(body, &[0; 64], threads).expect_err("the mistake was not found");
    error.fault().unwrap_or_else(|| panic!("{error}")).clone()
}

/// Whether a body is a race, and between what.
pub fn race(body: &str, threads: u32) -> (&'static str, String) {
    match fault(body, threads) {
        Fault::Race { access, other, .. } => (access, other),
        other => panic!("{other}"),
    }
}
