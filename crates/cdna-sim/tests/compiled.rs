//! What clang makes of small HIP kernels gives the host's answers, on both architectures.

mod support;

use cdna_sim::{Counters, Launch, Memory, Module};
use rand::{Rng, SeedableRng, rngs::StdRng};
use support::compile;

const BASIC: &str = include_str!("kernels/basic.hip");
const ARCHS: [&str; 2] = ["gfx942", "gfx950"];

fn bytes<T: Copy, const N: usize>(values: &[T], to: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|&x| to(x)).collect()
}

fn floats(memory: &Memory, address: u64, count: usize) -> Vec<f32> {
    let data = memory.read(address, 4 * count).unwrap();
    data.chunks(4).map(|word| f32::from_le_bytes(word.try_into().unwrap())).collect()
}

fn words(memory: &Memory, address: u64, count: usize) -> Vec<u32> {
    floats(memory, address, count).into_iter().map(f32::to_bits).collect()
}

#[track_caller]
fn launch(module: &Module, memory: &Memory, name: &str, args: &[u8], grid: u32, block: u32) -> Counters {
    let kernel = module.kernel(name).unwrap();
    module.launch(memory, kernel, args, &Launch::new([grid, 1, 1], [block, 1, 1])).unwrap_or_else(|e| panic!("{name}: {e}"))
}

fn pointers(addresses: &[u64]) -> Vec<u8> {
    bytes(addresses, u64::to_le_bytes)
}

fn random(count: usize, seed: u64) -> Vec<f32> {
    let mut rng = StdRng::seed_from_u64(seed);
    (0..count).map(|_| rng.random_range(-2.0..2.0)).collect()
}

#[test]
fn vector_add_with_a_guard() {
    require_clang!();
    for arch in ARCHS {
        let module = Module::load(&compile(BASIC, arch, &[])).unwrap();
        let memory = Memory::new();
        let n = 1000;
        let (a, b) = (random(n, 1), random(n, 2));
        let [pa, pb] = [&a, &b].map(|x| memory.upload(&bytes(x, f32::to_le_bytes)).unwrap());
        let out = memory.alloc(4 * n).unwrap();
        let args = [pointers(&[pa, pb, out]), (n as u32).to_le_bytes().to_vec()].concat();
        let counters = launch(&module, &memory, "add", &args, 4, 256);
        let want: Vec<f32> = a.iter().zip(&b).map(|(x, y)| x + y).collect();
        assert_eq!(floats(&memory, out, n), want);
        assert_eq!((counters.global_loaded, counters.global_stored, counters.workgroups), (8 * n as u64, 4 * n as u64, 4));
    }
}

#[test]
fn reduction_and_softmax() {
    require_clang!();
    for arch in ARCHS {
        let module = Module::load(&compile(BASIC, arch, &[])).unwrap();
        let memory = Memory::new();
        let x = random(1024, 3);
        let input = memory.upload(&bytes(&x, f32::to_le_bytes)).unwrap();
        let (sums, soft) = (memory.alloc(16).unwrap(), memory.alloc(4096).unwrap());
        let counters = launch(&module, &memory, "sum", &pointers(&[input, sums]), 4, 256);
        assert_eq!(counters.class(cdna_sim::Class::Barrier), 16);
        for (row, got) in x.chunks(256).zip(floats(&memory, sums, 4)) {
            let want: f64 = row.iter().copied().map(f64::from).sum();
            assert!((f64::from(got) - want).abs() < 1e-4, "{got} {want}");
        }
        launch(&module, &memory, "softmax", &pointers(&[input, soft]), 4, 256);
        for (row, got) in x.chunks(256).zip(floats(&memory, soft, 1024).chunks(256)) {
            let total: f64 = row.iter().map(|&x| f64::from(x).exp()).sum();
            row.iter().zip(got).for_each(|(&x, &got)| {
                let want = f64::from(x).exp() / total;
                assert!((f64::from(got) - want).abs() < 1e-6 * want, "{got} {want}");
            });
        }
    }
}

/// C = A B^T in double precision on what bf16 keeps.
fn product(a: &[half::bf16], b: &[half::bf16], k: usize) -> Vec<f64> {
    (0..256).map(|at| (0..k).map(|i| a[at / 16 * k + i].to_f64() * b[at % 16 * k + i].to_f64()).sum()).collect()
}

fn tile(module: &Module, name: &str, k: usize) {
    let memory = Memory::new();
    let [a, b] = [4, 5].map(|seed| random(16 * k, seed).into_iter().map(half::bf16::from_f32).collect::<Vec<_>>());
    let [pa, pb] = [&a, &b].map(|x| memory.upload(&bytes(x, half::bf16::to_le_bytes)).unwrap());
    let out = memory.alloc(1024).unwrap();
    let counters = launch(module, &memory, name, &pointers(&[pa, pb, out]), 1, 64);
    assert_eq!(counters.mfma.values().sum::<u64>(), 1);
    for (got, want) in floats(&memory, out, 256).into_iter().zip(product(&a, &b, k)) {
        assert!((f64::from(got) - want).abs() < 1e-4, "{got} {want}");
    }
}

#[test]
fn matrix_tiles() {
    require_clang!();
    for arch in ARCHS {
        tile(&Module::load(&compile(BASIC, arch, &[])).unwrap(), "tile", 16);
    }
    tile(&Module::load(&compile(include_str!("kernels/gfx950.hip"), "gfx950", &[])).unwrap(), "tile32", 32);
}

#[test]
fn integers_halves_and_atomics() {
    require_clang!();
    for arch in ARCHS {
        let module = Module::load(&compile(BASIC, arch, &[])).unwrap();
        let memory = Memory::new();
        let mut rng = StdRng::seed_from_u64(6);
        let n = 700;
        let x: Vec<i32> = (0..n).map(|_| rng.random_range(-100_000..100_000)).collect();
        let input = memory.upload(&bytes(&x, i32::to_le_bytes)).unwrap();
        let (out, total, count) = (memory.alloc(12 * n).unwrap(), memory.alloc(4).unwrap(), memory.alloc(4).unwrap());
        let divisor = 37i32;
        let args = [pointers(&[input, out, total, count]), bytes(&[n as i32, divisor], i32::to_le_bytes)].concat();
        launch(&module, &memory, "mixed", &args, 3, 256);
        for (i, (&x, got)) in x.iter().zip(words(&memory, out, 3 * n).chunks(3)).enumerate() {
            let wide = i64::from(x) * 1_234_567 + i as i64;
            let bits = (wide >> 7) as u32 ^ (x / divisor) as u32 ^ ((x % divisor) as u32) << 16;
            let half = half::f16::from_f32(x as f32 * 0.01).to_f32();
            let bf16 = half::bf16::from_f32(x as f32 * 0.37);
            assert_eq!(got, [bits, half.to_bits(), bf16.to_bits().into()], "{x}");
        }
        assert_eq!(words(&memory, count, 1), [n as u32]);
        assert_eq!(floats(&memory, total, 1), [x.iter().map(|x| (x & 3) as f32).sum::<f32>()]);
    }
}

#[test]
fn scratch_and_constant_tables() {
    require_clang!();
    for arch in ARCHS {
        let module = Module::load(&compile(BASIC, arch, &[])).unwrap();
        let memory = Memory::new();
        let x: Vec<i32> = (0..64).map(|i| i * i - 40).collect();
        let input = memory.upload(&bytes(&x, i32::to_le_bytes)).unwrap();
        let out = memory.alloc(256).unwrap();
        let counters = launch(&module, &memory, "spill", &[pointers(&[input, out]), 20u32.to_le_bytes().to_vec()].concat(), 1, 64);
        assert!(counters.scratch > 0);
        let want: Vec<u32> = (0..64i32).map(|t| (0..20).map(|i| x[((i * 37 + t) % 600 % 64) as usize] * t).sum::<i32>() as u32).collect();
        assert_eq!(words(&memory, out, 64), want);
        launch(&module, &memory, "lookup", &pointers(&[input, out]), 1, 64);
        let want: Vec<f32> = x.iter().map(|x| (1 << (x & 7)) as f32).collect();
        assert_eq!(floats(&memory, out, 64), want);
    }
}

#[test]
fn arguments_arrive_preloaded_and_through_the_prologue() {
    require_clang!();
    for arch in ARCHS {
        let module = Module::load(&compile(BASIC, arch, &["-mllvm", "-amdgpu-kernarg-preload-count=8"])).unwrap();
        let kernel = module.kernel("add").unwrap();
        assert!(kernel.preload_length > 0);
        let executed = [true, false].map(|preload| {
            let memory = Memory::new();
            let x = random(256, 9);
            let input = memory.upload(&bytes(&x, f32::to_le_bytes)).unwrap();
            let out = memory.alloc(1024).unwrap();
            let args = [pointers(&[input, input, out]), 256u32.to_le_bytes().to_vec()].concat();
            let counters = module.launch(&memory, kernel, &args, &Launch { preload, ..Launch::new([1, 1, 1], [256, 1, 1]) }).unwrap();
            assert_eq!(floats(&memory, out, 256), x.iter().map(|x| x + x).collect::<Vec<_>>());
            counters.class(cdna_sim::Class::ScalarMemory)
        });
        assert_eq!(executed[0], 0);
        assert!(executed[1] > 0);
    }
}

#[test]
fn conversions_of_cdna4() {
    require_clang!();
    let module = Module::load(&compile(include_str!("kernels/gfx950.hip"), "gfx950", &[])).unwrap();
    let memory = Memory::new();
    let x = random(128, 10);
    let input = memory.upload(&bytes(&x, f32::to_le_bytes)).unwrap();
    let out = memory.alloc(256).unwrap();
    launch(&module, &memory, "narrow", &pointers(&[input, out]), 1, 64);
    let want: Vec<u8> = x.iter().flat_map(|&x| half::bf16::from_f32(x).to_le_bytes()).collect();
    assert_eq!(memory.read(out, 256).unwrap(), want);
}

/// Assembles a body for gfx950 that stores `count` words a lane from v8 on, and returns them by lane.
fn registers(body: &str, lds: usize, count: usize) -> Vec<Vec<u32>> {
    let shift = count.trailing_zeros() + 2;
    let width = ["", "x2", "", "x4"][count - 1];
    let source = format!(
        "s_load_dwordx2 s[4:5], s[0:1], 0x0\nv_lshlrev_b32_e32 v1, 2, v0\ns_waitcnt lgkmcnt(0)\n{body}\nv_lshlrev_b32_e32 v2, {shift}, v0\n\
         global_store_dword{width} v2, v[8:{}], s[4:5]\n",
        7 + count
    );
    let module = Module::load(&support::assemble(&source, "gfx950", lds, 0)).unwrap();
    let memory = Memory::new();
    let out = memory.alloc(64 * 4 * count).unwrap();
    launch(&module, &memory, "test", &pointers(&[out]), 1, 64);
    words(&memory, out, 64 * count).chunks(count).map(<[u32]>::to_vec).collect()
}

#[test]
fn transposing_reads_give_each_lane_a_column() {
    require_clang!();
    // LDS byte i holds i (mod 256) after each lane has written eight of them; lane l reads at 8 l, so a group of 16 lanes reads a matrix.
    let fill = "v_lshlrev_b32_e32 v3, 3, v0\nv_mul_u32_u24_e32 v4, 0x808, v0\n\
                v_and_b32_e32 v4, 0x1f, v0\nv_lshlrev_b32_e32 v4, 3, v4\ns_mov_b32 s6, 0x1010101\nv_mul_lo_u32 v4, v4, s6\n\
                v_add_u32_e32 v5, 0x7060504, v4\nv_add_u32_e32 v4, 0x3020100, v4\nds_write_b64 v3, v[4:5]\ns_waitcnt lgkmcnt(0)\n";
    for bits in [16, 8, 4] {
        let got = registers(&format!("{fill}ds_read_b64_tr_b{bits} v[8:9], v3\ns_waitcnt lgkmcnt(0)"), 512, 2);
        let memory: Vec<u8> = (0..512).map(|i| i as u8).collect();
        let element =
            |at: usize| (0..bits).fold(0u64, |x, bit| x | u64::from(memory[(at * bits + bit) / 8] >> ((at * bits + bit) % 8) & 1) << bit);
        for (lane, got) in got.iter().enumerate() {
            // The group's matrix starts at its first lane's address and has rows of 16 elements.
            let first = lane / 16 * 16 * 64 / bits;
            let want = (0..64 / bits).fold(0, |x, row| x | element(first + 16 * row + lane % 16) << (bits * row));
            assert_eq!(u64::from(got[0]) | u64::from(got[1]) << 32, want, "b{bits}, lane {lane}");
        }
    }
}

#[test]
fn scaled_conversions() {
    require_clang!();
    // 3.0 and -1.5 divided by a scale of 2 (its exponent alone counts) as FP4 into byte 2, as FP8 into the upper half, and back.
    let set = "v_mov_b32_e32 v4, 0x40400000\nv_mov_b32_e32 v5, 0xbfc00000\nv_mov_b32_e32 v6, 0x40200000\nv_mov_b32_e32 v8, 0\nv_mov_b32_e32 v9, 0\n";
    let to = "v_cvt_scalef32_pk_fp4_f32 v8, v4, v5, v6 op_sel:[0,0,0,1]\nv_cvt_scalef32_pk_fp8_f32 v9, v4, v5, v6 op_sel:[0,0,0,1]\n";
    let format = cdna_sim::float::MiniFloat::E4m3;
    let [high, low] = [-0.75, 1.5].map(|x| u32::from(format.encode(x, false)));
    // E2M1 has 1.5 (code 3); -0.75 lies between -0.5 (9) and -1 (10) and goes to the even one.
    assert_eq!(registers(&format!("{set}{to}"), 0, 2)[17], [0xa3 << 16, (high << 8 | low) << 16]);
    let from = format!(
        "{set}{to}v_mov_b32_e32 v7, v8\nv_mov_b32_e32 v10, v9\nv_cvt_scalef32_pk_f32_fp4 v[8:9], v7, v6 op_sel:[0,1,0]\nv_cvt_scalef32_pk_f32_fp8 v[10:11], v10, v6 op_sel:[1,0,0]\n"
    );
    let got = registers(&from, 0, 4)[40].iter().map(|&bits| f32::from_bits(bits)).collect::<Vec<_>>();
    assert_eq!(got, [3.0, -2.0, 3.0, -1.5]);
}

#[test]
fn clamped_integers_saturate_and_signed_counts_find_the_top_bit() {
    require_clang!();
    let body = "v_mov_b32_e32 v2, 0x7ffffff0\nv_sub_u32_e64 v8, 5, v0 clamp\nv_add_u32_e64 v9, -3, v0 clamp\n\
                v_add_i32 v10, v2, v0 clamp\nv_mov_b32_e32 v3, 0x10003\nv_pk_sub_u16 v11, v3, v0 clamp\n";
    for (lane, got) in registers(body, 0, 4).into_iter().enumerate() {
        let lane = lane as u32;
        let halves = 3u32.saturating_sub(lane) | 1 << 16;
        assert_eq!(
            got,
            [5u32.saturating_sub(lane), (u32::MAX - 2).saturating_add(lane), (0x7fff_fff0 + lane).min(i32::MAX as u32), halves]
        );
    }
    let body = "s_mov_b32 s6, 0xfffff000\ns_flbit_i32 s7, s6\nv_mov_b32_e32 v8, s7\ns_mov_b32 s6, -1\ns_flbit_i32 s7, s6\nv_mov_b32_e32 v9, s7\n\
                s_mov_b32 s6, 5\ns_mov_b32 s7, 0\ns_flbit_i32_i64 s8, s[6:7]\nv_mov_b32_e32 v10, s8\nv_mov_b32_e32 v11, 0\n";
    assert_eq!(registers(body, 0, 4)[0], [20, u32::MAX, 61, 0]);
}

#[test]
fn extremes_of_three_take_nan_where_there_is_one() {
    require_clang!();
    // 2, -3 and 5; -3 and the magnitude of -3; NaN wins, and -infinity loses.
    let body = "v_mov_b32_e32 v2, 2.0\nv_mov_b32_e32 v3, 0xc0400000\nv_mov_b32_e32 v4, 0x40a00000\nv_mov_b32_e32 v5, 0x7fc00000\n\
                v_mov_b32_e32 v6, 0xff800000\nv_maximum3_f32 v8, v2, v3, v4\nv_minimum3_f32 v9, v3, |v3|, v2\n\
                v_maximum3_f32 v10, v4, v5, v2\nv_maximum3_f32 v11, v6, v3, v6\n";
    assert_eq!(registers(body, 0, 4)[9], [5f32, -3.0, f32::NAN, -3.0].map(f32::to_bits));
}

#[test]
fn sub_dwords_are_extended_where_they_say_so() {
    require_clang!();
    // The selection on gfx9's carry arithmetic, whose carry is an operand too: 0xd7f4 - (the sign-extended 0xf954) borrows.
    let body = "v_mov_b32_e32 v2, 0x1234d7f4\nv_mov_b32_e32 v3, 0xf9540000\n\
                v_sub_co_u32_sdwa v8, vcc, v2, sext(v3) dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_0 src1_sel:WORD_1\n\
                v_mov_b32_e32 v9, vcc_lo\n";
    assert_eq!(registers(body, 0, 2)[3], [0xdea0, u32::MAX]);
}

#[test]
fn packed_moves_take_a_half_of_each_source() {
    require_clang!();
    let set = "v_mov_b32_e32 v2, 1\nv_mov_b32_e32 v3, 2\nv_mov_b32_e32 v4, 3\nv_mov_b32_e32 v5, 4\n";
    for (select, want) in [("", [1, 3]), (" op_sel:[0,1]", [1, 4]), (" op_sel:[1,0]", [2, 3]), (" op_sel:[1,1]", [2, 4])] {
        assert_eq!(registers(&format!("{set}v_pk_mov_b32 v[8:9], v[2:3], v[4:5]{select}\n"), 0, 2)[7], want, "{select}");
    }
}

#[test]
fn lanes_exchange_as_the_controls_say() {
    require_clang!();
    // Source lane of each lane, or none: then the lane keeps its old value, here 1000.
    type Source = fn(i32) -> Option<i32>;
    fn row(lane: i32, column: i32) -> Option<i32> {
        (0..16).contains(&column).then_some(lane / 16 * 16 + column)
    }
    let controls: [(&str, Source); 13] = [
        ("quad_perm:[3,0,1,1]", |l| Some(l / 4 * 4 + [3, 0, 1, 1][l as usize % 4])),
        ("row_shl:3", |l| row(l, l % 16 + 3)),
        ("row_shr:5", |l| row(l, l % 16 - 5)),
        ("row_ror:4", |l| row(l, (l + 12) % 16)),
        ("row_newbcast:6", |l| row(l, 6)),
        ("row_mirror", |l| row(l, 15 - l % 16)),
        ("row_half_mirror", |l| row(l, l % 16 / 8 * 8 + 7 - l % 8)),
        ("row_bcast:15", |l| (l >= 16).then_some(l / 16 * 16 - 1)),
        ("row_bcast:31", |l| (l >= 32).then_some(31)),
        ("wave_shl:1", |l| (l < 63).then_some(l + 1)),
        ("wave_shr:1", |l| (l > 0).then_some(l - 1)),
        ("wave_rol:1", |l| Some((l + 1) % 64)),
        ("wave_ror:1", |l| Some((l + 63) % 64)),
    ];
    let got = |body: &str| registers(body, 0, 1).into_iter().map(|lane| lane[0] as i32).collect::<Vec<_>>();
    for (control, source) in controls {
        let body = |more: &str| format!("v_mov_b32_e32 v8, 0x3e8\nv_mov_b32_dpp v8, v0 {control} row_mask:0xf bank_mask:0xf{more}\n");
        let want = |none| (0..64).map(|l| source(l).unwrap_or(none)).collect::<Vec<_>>();
        assert_eq!(got(&body("")), want(1000), "{control}");
        assert_eq!(got(&body(" bound_ctrl:1")), want(0), "{control}");
    }
    // Masked rows and banks stay unchanged; so do lanes whose source is inactive.
    let masked = got("v_mov_b32_e32 v8, 0x3e8\nv_mov_b32_dpp v8, v0 row_mirror row_mask:0x5 bank_mask:0x3\n");
    let want = |l: i32| if l / 16 % 2 == 0 && l % 16 < 8 { l / 16 * 16 + 15 - l % 16 } else { 1000 };
    assert_eq!(masked, (0..64).map(want).collect::<Vec<_>>());
    let inactive = got(
        "v_mov_b32_e32 v8, 0x3e8\ns_mov_b64 s[6:7], exec\ns_mov_b64 exec, 0xff00ff\nv_mov_b32_dpp v8, v0 row_shl:4 row_mask:0xf bank_mask:0xf\ns_mov_b64 exec, s[6:7]\n",
    );
    let active = |l: i32| l < 24 && l % 16 < 8;
    assert_eq!(inactive, (0..64).map(|l| if active(l) && active(l + 4) { l + 4 } else { 1000 }).collect::<Vec<_>>());
    type Target = fn(i32) -> i32;
    let swaps: [(&str, Target); 6] = [
        ("ds_swizzle_b32 v8, v0 offset:swizzle(QUAD_PERM,2,3,0,0)\ns_waitcnt lgkmcnt(0)", |l| l / 4 * 4 + [2, 3, 0, 0][l as usize % 4]),
        ("ds_swizzle_b32 v8, v0 offset:swizzle(SWAP,16)\ns_waitcnt lgkmcnt(0)", |l| l ^ 16),
        ("ds_swizzle_b32 v8, v0 offset:swizzle(BROADCAST,8,3)\ns_waitcnt lgkmcnt(0)", |l| l / 8 * 8 + 3),
        ("v_xor_b32_e32 v3, 0x84, v1\nds_bpermute_b32 v8, v3, v0\ns_waitcnt lgkmcnt(0)", |l| l ^ 33),
        ("v_mov_b32_e32 v8, v0\nv_add_u32_e32 v3, 0x64, v0\nv_permlane32_swap_b32_e32 v8, v3", |l| if l < 32 { l } else { 100 + l - 32 }),
        (
            "v_mov_b32_e32 v3, v0\nv_add_u32_e32 v8, 0x64, v0\nv_permlane16_swap_b32_e32 v3, v8",
            |l| if l & 16 == 0 { l + 16 } else { 100 + l },
        ),
    ];
    for (body, source) in swaps {
        assert_eq!(got(body), (0..64).map(source).collect::<Vec<_>>(), "{body}");
    }
}
