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
        let want: Vec<u32> = (0..64i32).map(|t| (0..20).map(|i| x[((i * 37 + t) % 600 & 63) as usize] * t).sum::<i32>() as u32).collect();
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
