//! AMD's own paged-attention code objects give the float64 answer.
//!
//! They are the measure of the simulator: hand-written by others, right on hardware. Skipped, with the reason, where the wheel that carries
//! them cannot be had.

mod support;

use cdna_sim::{Launch, Memory, Module};
use rand::{Rng, SeedableRng, rngs::StdRng};
use support::{aiter, relative_l2};

const HEAD: usize = 128;
const PAGE: usize = 16;

/// Element type of Q and O, and of the cache.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Ty {
    Bf16,
    F16,
    /// FNUZ E4M3 with a scale a token.
    Fp8,
    /// Integers with a scale a token.
    Int8,
}

impl Ty {
    /// Whether a scale a token belongs to it.
    fn scaled(self) -> bool {
        matches!(self, Ty::Fp8 | Ty::Int8)
    }

    /// What the values are multiplied by to use the format's range.
    fn range(self) -> f64 {
        if self == Ty::Int8 { 30.0 } else { 1.0 }
    }

    fn bytes(self) -> usize {
        if self.scaled() { 1 } else { 2 }
    }

    /// Elements of 16 bytes.
    fn x(self) -> usize {
        16 / self.bytes()
    }

    /// Encodes `value` and returns what it became.
    fn encode(self, value: f64, out: &mut Vec<u8>) -> f64 {
        match self {
            Ty::Bf16 => {
                let bits = half::bf16::from_f64(value);
                out.extend(bits.to_le_bytes());
                bits.to_f64()
            }
            Ty::F16 => {
                let bits = half::f16::from_f64(value);
                out.extend(bits.to_le_bytes());
                bits.to_f64()
            }
            Ty::Fp8 => {
                let format = cdna_sim::float::MiniFloat::E4m3Fnuz;
                let code = format.encode(value, true);
                out.push(code);
                format.decode(code).into()
            }
            Ty::Int8 => {
                let code = (value * self.range()).round().clamp(-127.0, 127.0) as i8;
                out.push(code as u8);
                code.into()
            }
        }
    }

    fn decode(self, bytes: &[u8]) -> f64 {
        let bits = u16::from_le_bytes([bytes[0], bytes[1]]);
        if self == Ty::Bf16 { half::bf16::from_bits(bits).to_f64() } else { half::f16::from_bits(bits).to_f64() }
    }
}

/// A decode call.
struct Case {
    file: &'static str,
    q: Ty,
    kv: Ty,
    gqa: usize,
    /// Query tokens a sequence, and whether each sees only its past.
    q_len: usize,
    causal: bool,
    kv_heads: usize,
    lens: Vec<usize>,
    /// The loads that the object uses without having waited for them, by the start of their text; empty where there are none.
    bets: &'static str,
}

/// Random inputs, in the layouts of the kernels, and the answer.
struct Inputs {
    q: Vec<u8>,
    k: Vec<u8>,
    v: Vec<u8>,
    k_scale: Vec<u8>,
    v_scale: Vec<u8>,
    table: Vec<u8>,
    table_row: usize,
    lens: Vec<u8>,
    answer: Vec<f64>,
}

impl Inputs {
    fn new(case: &Case, seed: u64) -> Self {
        let rng = &mut StdRng::seed_from_u64(seed);
        let mut gauss = {
            let mut inner = StdRng::seed_from_u64(seed + 1);
            move || (0..12).map(|_| inner.random::<f64>()).sum::<f64>() - 6.0
        };
        let (heads, x) = (case.kv_heads, case.kv.x());
        let blocks: usize = case.lens.iter().map(|len| len.div_ceil(PAGE)).sum();
        let pages = blocks + 3;
        let values = pages * heads * PAGE * HEAD;
        let (mut k, mut v) = (Vec::new(), Vec::new());
        let k_values: Vec<f64> = (0..values).map(|_| case.kv.encode(gauss(), &mut k)).collect();
        let v_values: Vec<f64> = (0..values).map(|_| case.kv.encode(gauss(), &mut v)).collect();
        let mut scales = |bytes: &mut Vec<u8>| -> Vec<f64> {
            let mut one = || {
                let scale = rng.random_range(0.5f32..1.5) / case.kv.range() as f32;
                bytes.extend(scale.to_le_bytes());
                f64::from(scale)
            };
            (0..pages * heads * PAGE).map(|_| one()).collect()
        };
        let (mut k_scale, mut v_scale) = (Vec::new(), Vec::new());
        let (ks, vs) = (scales(&mut k_scale), scales(&mut v_scale));
        let scale_of = |scales: &[f64], page: usize, head: usize, t: usize| {
            if case.kv.scaled() { scales[(page * heads + head) * PAGE + t] } else { 1.0 }
        };
        let k_at = |page: usize, head: usize, t: usize, d: usize| {
            k_values[(((page * heads + head) * (HEAD / x) + d / x) * PAGE + t) * x + d % x] * scale_of(&ks, page, head, t)
        };
        let v_at = |page: usize, head: usize, t: usize, d: usize| {
            v_values[(((page * heads + head) * (PAGE / x) + t / x) * HEAD + d) * x + t % x] * scale_of(&vs, page, head, t)
        };
        // Pages in a random order.
        let mut order: Vec<usize> = (0..pages).collect();
        (1..pages).rev().for_each(|i| order.swap(i, rng.random_range(0..=i)));
        let table_row = case.lens.iter().map(|len| len.div_ceil(PAGE)).max().unwrap_or(0);
        let (mut q, mut table, mut answer, mut lens) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let mut used = 0;
        for &len in &case.lens {
            let row: Vec<usize> = order[used..used + len.div_ceil(PAGE)].to_vec();
            used += row.len();
            // Entries past the sequence name a page that does not exist: reading through them would be caught.
            table.extend((0..table_row).flat_map(|i| row.get(i).map_or(0x00ff_ffff, |&page| page as u32).to_le_bytes()));
            lens.extend((len as u32).to_le_bytes());
            for row_head in 0..case.q_len * heads {
                let (token, head) = (row_head / heads, row_head % heads);
                let seen = if case.causal { len - (case.q_len - 1 - token) } else { len };
                for _ in 0..case.gqa {
                    let query: Vec<f64> = (0..HEAD).map(|_| case.q.encode(gauss(), &mut q)).collect();
                    let score =
                        |t: usize| (0..HEAD).map(|d| query[d] * k_at(row[t / PAGE], head, t % PAGE, d)).sum::<f64>() / (HEAD as f64).sqrt();
                    let scores: Vec<f64> = (0..seen).map(score).collect();
                    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
                    let total: f64 = weights.iter().sum();
                    let value = |d: usize| (0..seen).map(|t| weights[t] * v_at(row[t / PAGE], head, t % PAGE, d)).sum::<f64>() / total;
                    answer.extend((0..HEAD).map(value));
                }
            }
        }
        Self { q, k, v, k_scale, v_scale, table, table_row, lens, answer }
    }
}

/// Runs a case and returns the relative L2 error, the wave instructions and this thread's seconds in them.
fn run(case: &Case, seed: u64) -> Result<Option<(f64, u64, f64)>, cdna_sim::Error> {
    let object = match aiter(case.file) {
        Ok(object) => object,
        Err(reason) => {
            println!("SKIPPED {}: {reason}", case.file);
            return Ok(None);
        }
    };
    let module = Module::load(&object)?;
    let inputs = Inputs::new(case, seed);
    let memory = Memory::new();
    let put = |data: &[u8]| memory.upload(data).unwrap();
    let out_len = inputs.answer.len() * 2;
    let out = put(&vec![0xff; out_len]);
    let kernel = module.object.kernels[0].clone();
    let mut args = vec![0u8; kernel.kernarg_size];
    let mut set = |name: &str, bytes: &[u8]| {
        let arg = kernel.args.iter().find(|arg| arg.name == name).unwrap_or_else(|| panic!("no argument {name}"));
        args[arg.offset..arg.offset + bytes.len()].copy_from_slice(bytes);
    };
    for (name, address) in [
        ("O", out),
        ("Q", put(&inputs.q)),
        ("K", put(&inputs.k)),
        ("V", put(&inputs.v)),
        ("BT", put(&inputs.table)),
        ("CL", put(&inputs.lens)),
        ("KQ", put(&inputs.k_scale)),
        ("VQ", put(&inputs.v_scale)),
    ] {
        set(name, &address.to_le_bytes());
    }
    if case.q_len > 1 {
        let starts: Vec<u8> = (0..=case.lens.len()).flat_map(|i| ((i * case.q_len) as u32).to_le_bytes()).collect();
        set("QTP", &put(&starts).to_le_bytes());
    }
    let scale = std::f64::consts::LOG2_E / (HEAD as f64).sqrt();
    set("sclg", &(scale as f32).to_le_bytes());
    let head_bytes = PAGE * HEAD * case.kv.bytes();
    for (name, value) in [
        ("mblk", inputs.table_row),
        ("batch", case.kv_heads),
        ("Qs", case.kv_heads * case.gqa * HEAD * 2),
        ("Bs", case.kv_heads * head_bytes),
        ("KVs", head_bytes),
        ("GQA", case.gqa),
    ] {
        set(name, &(value as u32).to_le_bytes());
    }
    // Each wave has code of its own in places, barriers included.
    let launch = Launch {
        same_barrier: false,
        proven_loads: case.bets.is_empty(),
        ..Launch::new([case.kv_heads as u32, case.lens.len() as u32, 1], [256, 1, 1])
    };
    let start = thread_time();
    let counters = module.launch(&memory, &kernel, &args, &launch)?;
    let seconds = (thread_time() - start) as f64 * 1e-9;
    for &(load, used) in counters.unproven.keys() {
        let text = module.program.at(load).map_or("", |i| &*module.program.insts[i].text);
        assert!(text.starts_with(case.bets), "{}: `{text}` at {load:#x} is used at {used:#x} before its wait", case.file);
    }
    assert_eq!(case.bets.is_empty(), counters.unproven.is_empty(), "{}", case.file);
    let bytes = memory.read(out, out_len).unwrap();
    let got: Vec<f64> = bytes.chunks(2).map(|pair| case.q.decode(pair)).collect();
    Ok(Some((relative_l2(&got, &inputs.answer), counters.instructions(), seconds)))
}

/// Nanoseconds that this thread has had a core.
fn thread_time() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or(0)
}

/// The rate on one core; meaningless in debug builds, so it is asked for by name.
#[test]
#[ignore = "a measurement"]
fn speed_on_one_core() {
    let case = Case {
        file: "pa_bf16_noquant_gqa16_1tg_4w.co",
        q: Ty::Bf16,
        kv: Ty::Bf16,
        gqa: 16,
        q_len: 1,
        causal: false,
        kv_heads: 4,
        lens: vec![1024; 8],
        bets: "buffer_load_dword v",
    };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    let rate = pool.install(|| {
        let rates = (0..3).map(|seed| run(&case, seed).unwrap().map(|outcome| outcome.1 as f64 / outcome.2));
        rates.flatten().fold(None, |best: Option<f64>, rate| Some(best.map_or(rate, |best| best.max(rate))))
    });
    let Some(rate) = rate else { return };
    println!("{:.2} M wave instructions a second and core", rate / 1e6);
    assert!(rate > 1e6);
}

#[test]
fn code_objects_give_the_float64_answer() {
    use Ty::{Bf16, F16, Fp8, Int8};
    // Lengths that end inside a page and inside a tile of 256 tokens, and on the edge of both.
    let lens = vec![2, 37, 256, 515, 1030];
    let case = |file, q, kv, gqa, q_len, causal, bets| Case { file, q, kv, gqa, q_len, causal, kv_heads: 2, lens: lens.clone(), bets };
    // Two kinds of wait are missing in these objects, which on hardware the time in between makes up for: the 16-bit ones use a page-table entry
    // whose load is one short of being proven by vmcnt, and the last iteration of 8-bit ones for 16 heads feeds MFMAs from LDS reads without
    // an lgkmcnt. Everything else in them is proven.
    let (entry, tail) = ("buffer_load_dword v", "ds_read_b64 v");
    let cases = [
        case("pa_bf16_noquant_gqa16_1tg_4w.co", Bf16, Bf16, 16, 1, false, entry),
        case("pa_bf16_noquant_gqa8_1tg_4w.co", Bf16, Bf16, 8, 1, false, entry),
        case("pa_bf16_noquant_gqa8_1tg_4w_mtp_msk0.co", Bf16, Bf16, 8, 2, false, entry),
        case("pa_bf16_noquant_gqa8_1tg_4w_mtp_msk1.co", Bf16, Bf16, 8, 2, true, entry),
        case("pa_fp16_noquant_gqa16_1tg_4w.co", F16, F16, 16, 1, false, entry),
        case("pa_fp16_noquant_gqa8_1tg_4w.co", F16, F16, 8, 1, false, entry),
        case("pa_fp16_noquant_gqa8_1tg_4w_mtp_msk0.co", F16, F16, 8, 2, false, entry),
        case("pa_fp16_noquant_gqa8_1tg_4w_mtp_msk1.co", F16, F16, 8, 2, true, entry),
        case("pa_bf16_pertokenFp8_gqa16_2tg_4w.co", Bf16, Fp8, 16, 1, false, tail),
        case("pa_bf16_pertokenFp8_gqa8_2tg_4w.co", Bf16, Fp8, 8, 1, false, ""),
        case("pa_bf16_pertokenFp8_gqa8_2tg_4w_hp.co", Bf16, Fp8, 8, 1, false, ""),
        case("pa_bf16_pertokenFp8_gqa8_2tg_4w_uhp.co", Bf16, Fp8, 8, 1, false, ""),
        case("pa_bf16_pertokenFp8_gqa8_1tg_4w_mtp_msk0.co", Bf16, Fp8, 8, 2, false, ""),
        case("pa_bf16_pertokenFp8_gqa8_1tg_4w_mtp_msk1.co", Bf16, Fp8, 8, 2, true, ""),
        case("pa_bf16_pertokenFp8_gqa16_1tg_4w_mtp_msk1.co", Bf16, Fp8, 16, 2, true, tail),
        case("pa_fp16_pertokenFp8_gqa8_2tg_4w.co", F16, Fp8, 8, 1, false, ""),
        case("pa_fp16_pertokenFp8_gqa16_2tg_4w.co", F16, Fp8, 16, 1, false, tail),
        case("pa_bf16_pertokenInt8_gqa8_2tg_4w.co", Bf16, Int8, 8, 1, false, ""),
        case("pa_bf16_pertokenInt8_gqa8_1tg_4w_mtp_msk1.co", Bf16, Int8, 8, 2, true, ""),
        case("pa_fp16_pertokenInt8_gqa8_2tg_4w.co", F16, Int8, 8, 1, false, ""),
    ];
    let mut wrong = Vec::new();
    for case in &cases {
        match run(case, 7) {
            Ok(Some((error, instructions, _))) => {
                println!("{}: {error:.2e}, {instructions} wave instructions", case.file);
                if error >= if case.kv.scaled() { 0.08 } else { 1e-2 } {
                    wrong.push(format!("{}: relative L2 {error}", case.file));
                }
            }
            Ok(None) => {}
            Err(e) => wrong.push(format!("{}: {e}", case.file)),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
