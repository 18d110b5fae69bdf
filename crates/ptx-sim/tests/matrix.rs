//! Matrix products and the loads for them against plain loops, with fragments as the PTX ISA draws them.

mod support;

use half::{bf16, f16};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use support::run;

/// Small numbers that every format has: sums of their products are exact.
fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut rng = StdRng::seed_from_u64(seed);
    (0..count).map(|_| rng.random_range(-8..=8) as f32 * 0.5).collect()
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
}

fn as_f16(x: &[f32]) -> Vec<u8> {
    x.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect()
}

fn as_bf16(x: &[f32]) -> Vec<u8> {
    x.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect()
}

fn as_e4m3(x: &[f32]) -> Vec<u8> {
    x.iter().map(|&x| float8::F8E4M3::from_f32(x).to_bits()).collect()
}

/// Word `offset + 32 * i + lane` of the input, into `%r{first + i}` of a lane, for `count` of them.
fn load(first: usize, offset: usize, count: usize) -> String {
    let one = |i: usize| {
        format!(
            "and.b32 %r50, %r0, 31;\nmul.wide.u32 %rd2, %r50, 4;\nadd.s64 %rd2, %rd1, %rd2;\nld.global.u32 %r{}, [%rd2+{}];\n",
            first + i,
            4 * (offset + 32 * i)
        )
    };
    (0..count).map(one).collect()
}

/// `C[row][column] = sum of A[row][i] B[column][i]`.
fn product(a: &[f32], b: &[f32], k: usize, row: usize, column: usize) -> f32 {
    (0..k).map(|i| a[row * k + i] * b[column * k + i]).sum()
}

#[test]
fn products_of_a_warp() {
    let (a, b, c) = (numbers(1, 16 * 16), numbers(2, 8 * 16), numbers(3, 16 * 8));
    for (name, bytes) in [("f16", as_f16 as fn(&[f32]) -> Vec<u8>), ("bf16", as_bf16)] {
        let pair = |x: &[f32], at: usize| words(&bytes(&x[at..at + 2]))[0];
        let mut input = vec![];
        // Registers 0 to 3: rows g and g + 8 at columns 2t, then at 2t + 8.
        for i in 0..4 {
            input.extend((0..32).map(|lane| pair(&a, (lane / 4 + i % 2 * 8) * 16 + lane % 4 * 2 + i / 2 * 8)));
        }
        for i in 0..2 {
            input.extend((0..32).map(|lane| pair(&b, lane / 4 * 16 + lane % 4 * 2 + i * 8)));
        }
        let place = |lane: usize, i: usize| (lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2);
        for i in 0..4 {
            input.extend((0..32).map(|lane| c[place(lane, i).0 * 8 + place(lane, i).1].to_bits()));
        }
        for i in 0..4 {
            let body = format!(
                "{}mov.b32 %f0, %r16;\nmov.b32 %f1, %r17;\nmov.b32 %f2, %r18;\nmov.b32 %f3, %r19;
                mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 {{%f0,%f1,%f2,%f3}}, {{%r10,%r11,%r12,%r13}}, {{%r14,%r15}}, \
                {{%f0,%f1,%f2,%f3}};\nmov.b32 %r1, %f{i};",
                load(10, 0, 10)
            );
            let found = run(&body, &input, 32).unwrap();
            for (lane, found) in found.iter().enumerate() {
                let (row, column) = place(lane, i);
                assert_eq!(f32::from_bits(*found), product(&a, &b, 16, row, column) + c[row * 8 + column], "{name} {lane} {i}");
            }
        }
    }
}

#[test]
fn matrices_of_eight_rows() {
    // Matrix m, row r, column c holds 64m + 8r + c.
    let input: Vec<u32> = words(&(0..256u16).flat_map(u16::to_le_bytes).collect::<Vec<_>>());
    let fill = "mov.u32 %r2, dynamic;\nshl.b32 %r3, %r0, 4;\nadd.s32 %r2, %r2, %r3;\ncvt.u64.u32 %rd2, %r3;\nadd.s64 %rd2, %rd1, %rd2;
        ld.global.v4.u32 {%r4,%r5,%r6,%r7}, [%rd2];\nst.shared.v4.u32 [%r2], {%r4,%r5,%r6,%r7};\nbar.warp.sync -1;\n";
    for (trans, name) in [(false, ""), (true, ".trans")] {
        for matrix in 0..4 {
            let body =
                format!("{fill}ldmatrix.sync.aligned.m8n8.x4{name}.shared.b16 {{%r10,%r11,%r12,%r13}}, [%r2];\nmov.u32 %r1, %r1{matrix};");
            let found = run(&body, &input, 32).unwrap();
            for (lane, word) in found.iter().enumerate() {
                let at = |i: usize| {
                    let (outer, inner) = (lane / 4, lane % 4 * 2 + i);
                    64 * matrix + if trans { 8 * inner + outer } else { 8 * outer + inner }
                };
                assert_eq!((word & 0xffff, word >> 16), (at(0) as u32, at(1) as u32), "{trans} {matrix} {lane}");
            }
        }
    }
}

/// Shared memory as `bytes` lie in a swizzled matrix: the address of byte `at` of row `row`, with `rows` of 128 bytes to a block of columns.
fn swizzled(row: usize, at: usize, rows: usize) -> usize {
    let plain = at / 128 * (rows * 128) + row * 128 + at % 128;
    plain ^ (plain / 128 % 8 * 16)
}

fn stored(matrix: &[u8], row_bytes: usize) -> Vec<u32> {
    let rows = matrix.len() / row_bytes;
    let mut memory = vec![0; rows * row_bytes.next_multiple_of(128)];
    matrix.iter().enumerate().for_each(|(i, byte)| memory[swizzled(i / row_bytes, i % row_bytes, rows)] = *byte);
    words(&memory)
}

/// 128 threads copy the input's words from `from` on into the dynamic memory.
fn fill(from: usize, count: usize) -> String {
    format!(
        "mov.u32 %r40, %r0;
        $fill:
        mul.wide.u32 %rd2, %r40, 4;
        add.s64 %rd2, %rd1, %rd2;
        ld.global.u32 %r41, [%rd2+{}];
        shl.b32 %r42, %r40, 2;
        mov.u32 %r43, dynamic;
        add.s32 %r42, %r42, %r43;
        st.shared.u32 [%r42], %r41;
        add.s32 %r40, %r40, 128;
        setp.lt.u32 %p1, %r40, {count};
        @%p1 bra $fill;
        fence.proxy.async.shared::cta;
        bar.sync 0;\n",
        4 * from
    )
}

fn sums(count: usize) -> (String, String) {
    let zeros = (0..count).map(|i| format!("mov.f32 %f{i}, 0f00000000;\n")).collect();
    (zeros, (0..count).map(|i| format!("%f{i}")).collect::<Vec<_>>().join(","))
}

/// A descriptor of what lies at the dynamic memory's beginning, in `%rd3`.
fn descriptor(leading: usize) -> String {
    format!(
        "mov.u32 %r44, dynamic;\nshr.u32 %r44, %r44, 4;\ncvt.u64.u32 %rd3, %r44;\nor.b64 %rd3, %rd3, {:#x};\n",
        1u64 << 62 | 64 << 32 | (leading as u64 / 16) << 16
    )
}

/// `A[64, 32]` in registers times `B[64, 32]` in rows along k, of E4M3.
#[test]
fn products_of_a_warpgroup_along_rows() {
    let (a, b) = (numbers(4, 64 * 32), numbers(5, 64 * 32));
    let bytes = as_e4m3(&a);
    let mut input = vec![];
    // By warp, then register: rows g, g + 8 at columns 4t, then at 4t + 16.
    for warp in 0..4 {
        for i in 0..4 {
            let at = |lane: usize| (warp * 16 + lane / 4 + i % 2 * 8) * 32 + lane % 4 * 4 + i / 2 * 16;
            input.extend((0..32).map(|lane| words(&bytes[at(lane)..at(lane) + 4])[0]));
        }
    }
    input.extend(stored(&as_e4m3(&b), 32));
    let (zeros, list) = sums(32);
    for i in [0, 1, 2, 7, 30] {
        let body = format!(
            "{zeros}{}shr.u32 %r45, %r0, 5;\nmul.wide.u32 %rd4, %r45, 512;\nadd.s64 %rd1, %rd1, %rd4;\n{}{}
            wgmma.fence.sync.aligned;
            wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {{{list}}}, {{%r10,%r11,%r12,%r13}}, %rd3, 1, 1, 1;
            wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\nmov.b32 %r1, %f{i};",
            fill(512, 64 * 32),
            load(10, 0, 4),
            descriptor(16)
        );
        let found = run(&body, &input, 128).unwrap();
        for (thread, found) in found.iter().enumerate() {
            let (row, column) = (thread / 32 * 16 + thread % 32 / 4 + i % 4 / 2 * 8, i / 4 * 8 + thread % 4 * 2 + i % 2);
            assert_eq!(f32::from_bits(*found), product(&a, &b, 32, row, column), "{thread} {i}");
        }
    }
}

/// `A[64, 16]` and `B[16, 128]`, both in shared memory: A's rows along k, B's along the columns.
#[test]
fn products_of_a_warpgroup_across_rows() {
    let (a, b) = (numbers(6, 64 * 16), numbers(7, 16 * 128));
    // A behind B, whose two blocks of columns take 4 KiB.
    let input = [stored(&as_bf16(&b), 256), stored(&as_bf16(&a), 32)].concat();
    let (zeros, list) = sums(64);
    for i in [0, 3, 33, 62] {
        let body = format!(
            "{zeros}{}{}
            add.s64 %rd4, %rd3, {};
            wgmma.fence.sync.aligned;
            wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {{{list}}}, %rd4, %rd3, 1, 1, 1, 0, 1;
            wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\nmov.b32 %r1, %f{i};",
            fill(0, input.len()),
            descriptor(16 * 128),
            4096 / 16
        );
        let found = run(&body, &input, 128).unwrap();
        for (thread, found) in found.iter().enumerate() {
            let (row, column) = (thread / 32 * 16 + thread % 32 / 4 + i % 4 / 2 * 8, i / 4 * 8 + thread % 4 * 2 + i % 2);
            let expected: f32 = (0..16).map(|k| a[row * 16 + k] * b[k * 128 + column]).sum();
            assert_eq!(f32::from_bits(*found), expected, "{thread} {i}");
        }
    }
}
