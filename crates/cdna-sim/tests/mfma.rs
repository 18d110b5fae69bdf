//! MFMA against f64 matrix products, with layouts written from the lane's side: which element a lane's item is.

use cdna_sim::float::{Fp8Encoding, MiniFloat, e8m0_to_f64};
use cdna_sim::mfma::{Input, MfmaOp, Modifiers, Register, Scale, execute};
use half::{bf16, f16};
use rand::{Rng, SeedableRng, rngs::StdRng};

const MNEMONICS: [&str; 35] = [
    "v_mfma_f32_32x32x1_2b_f32",
    "v_mfma_f32_16x16x1_4b_f32",
    "v_mfma_f32_4x4x1_16b_f32",
    "v_mfma_f32_32x32x2_f32",
    "v_mfma_f32_16x16x4_f32",
    "v_mfma_f32_32x32x4_2b_f16",
    "v_mfma_f32_16x16x4_4b_f16",
    "v_mfma_f32_4x4x4_16b_f16",
    "v_mfma_f32_32x32x8_f16",
    "v_mfma_f32_16x16x16_f16",
    "v_mfma_f32_32x32x4_2b_bf16",
    "v_mfma_f32_16x16x4_4b_bf16",
    "v_mfma_f32_4x4x4_16b_bf16",
    "v_mfma_f32_32x32x8_bf16",
    "v_mfma_f32_16x16x16_bf16",
    "v_mfma_f32_16x16x32_f16",
    "v_mfma_f32_32x32x16_f16",
    "v_mfma_f32_16x16x32_bf16",
    "v_mfma_f32_32x32x16_bf16",
    "v_mfma_i32_32x32x4_2b_i8",
    "v_mfma_i32_16x16x4_4b_i8",
    "v_mfma_i32_4x4x4_16b_i8",
    "v_mfma_i32_32x32x16_i8",
    "v_mfma_i32_16x16x32_i8",
    "v_mfma_i32_32x32x32_i8",
    "v_mfma_i32_16x16x64_i8",
    "v_mfma_f32_16x16x32_fp8_fp8",
    "v_mfma_f32_16x16x32_fp8_bf8",
    "v_mfma_f32_16x16x32_bf8_fp8",
    "v_mfma_f32_32x32x16_bf8_bf8",
    "v_mfma_f32_32x32x16_fp8_bf8",
    "v_mfma_f32_16x16x128_f8f6f4",
    "v_mfma_f32_32x32x64_f8f6f4",
    "v_mfma_scale_f32_16x16x128_f8f6f4",
    "v_mfma_scale_f32_32x32x64_f8f6f4",
];

fn op(mnemonic: &str) -> MfmaOp {
    MfmaOp::from_mnemonic(mnemonic).unwrap_or_else(|| panic!("{mnemonic}"))
}

/// How the test reads and writes the items of an input.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Kind {
    F32,
    F16,
    Bf16,
    I8,
    Mini(MiniFloat),
}

impl Kind {
    fn of(input: Input, selector: u32, fp8: Fp8Encoding) -> Kind {
        match input {
            Input::F32 => Kind::F32,
            Input::F16 => Kind::F16,
            Input::Bf16 => Kind::Bf16,
            Input::I8 => Kind::I8,
            Input::Fp8 => Kind::Mini(fp8.fp8()),
            Input::Bf8 => Kind::Mini(fp8.bf8()),
            Input::F8F6F4 => {
                Kind::Mini([MiniFloat::E4m3, MiniFloat::E5m2, MiniFloat::E2m1, MiniFloat::E2m1, MiniFloat::E2m1][selector as usize])
            }
        }
    }

    fn bits(self) -> usize {
        match self {
            Kind::F32 => 32,
            Kind::F16 | Kind::Bf16 => 16,
            Kind::I8 => 8,
            Kind::Mini(MiniFloat::E2m1) => 4,
            Kind::Mini(_) => 8,
        }
    }

    fn encode(self, x: f64) -> u32 {
        match self {
            Kind::F32 => (x as f32).to_bits(),
            Kind::F16 => u32::from(f16::from_f64(x).to_bits()),
            Kind::Bf16 => u32::from(bf16::from_f64(x).to_bits()),
            Kind::I8 => u32::from(x as i8 as u8),
            Kind::Mini(format) => u32::from(format.encode(x, true)),
        }
    }

    fn decode(self, code: u32) -> f64 {
        match self {
            Kind::F32 => f64::from(f32::from_bits(code)),
            Kind::F16 => f16::from_bits(code as u16).to_f64(),
            Kind::Bf16 => bf16::from_bits(code as u16).to_f64(),
            Kind::I8 => f64::from(code as u8 as i8),
            Kind::Mini(format) => f64::from(format.decode(code as u8)),
        }
    }
}

/// The (block, row of A or column of B, k) of item `item` of lane `lane`, from the tables of the ISA document.
fn element(op: &MfmaOp, kind: Kind, lane: usize, item: usize) -> (usize, usize, usize) {
    let items = op.m * op.k * op.blocks / 64;
    match (op.m, op.blocks) {
        (4, 16) => (lane / 4, lane % 4, item),
        (16, 4) => (lane / 16, lane % 16, item),
        (32, 2) => (lane / 32, lane % 32, item),
        (16, 1) if op.a == Input::F8F6F4 && kind.bits() == 8 => (0, lane % 16, 16 * (lane / 16) + item % 16 + 64 * (item / 16)),
        (32, 1) if op.a == Input::F8F6F4 && kind.bits() == 8 => (0, lane % 32, 16 * (lane / 32) + item % 16 + 32 * (item / 16)),
        (16, 1) => (0, lane % 16, items * (lane / 16) + item),
        (32, 1) => (0, lane % 32, items * (lane / 32) + item),
        other => panic!("{other:?}"),
    }
}

/// The (block, row, column) of register `register` of lane `lane` of C and D.
fn result(op: &MfmaOp, lane: usize, register: usize) -> (usize, usize, usize) {
    match (op.m, op.blocks) {
        (4, 16) => (lane / 4, register, lane % 4),
        (16, _) => (register / 4, 4 * (lane / 16) + register % 4, lane % 16),
        (32, _) => (register / 16, 8 * (register % 16 / 4) + 4 * (lane / 32) + register % 4, lane % 32),
        other => panic!("{other:?}"),
    }
}

/// Matrices as `[block][row or column][k]`, and what they are in registers.
fn inputs(op: &MfmaOp, kind: Kind, mut value: impl FnMut() -> f64) -> (Vec<Vec<Vec<f64>>>, Vec<Register>) {
    let per_word = 32 / kind.bits();
    let words = op.m * op.k * op.blocks / 64 / per_word;
    let mut matrix = vec![vec![vec![f64::NAN; op.k]; op.m]; op.blocks];
    let mut registers = vec![[0u32; 64]; words];
    for (word, register) in registers.iter_mut().enumerate() {
        for (lane, bits) in register.iter_mut().enumerate() {
            for part in 0..per_word {
                let (block, row, k) = element(op, kind, lane, word * per_word + part);
                let code = kind.encode(value());
                matrix[block][row][k] = kind.decode(code);
                *bits |= code << (part * kind.bits());
            }
        }
    }
    (matrix, registers)
}

fn sum(op: &MfmaOp, a: &[f64], b: &[f64], factor: impl Fn(usize) -> f64) -> (f64, f64) {
    (0..op.k).fold((0.0, 0.0), |(sum, size), k| {
        let product = a[k] * b[k] * factor(k / 32);
        (sum + product, size + product.abs())
    })
}

/// Every mnemonic with every format selection and scale byte that it has.
fn cases(rng: &mut StdRng) -> Vec<(&'static str, MfmaOp, Modifiers)> {
    let mut cases = vec![];
    for mnemonic in MNEMONICS {
        let op = op(mnemonic);
        let selectors: &[u32] = if op.a == Input::F8F6F4 { &[0, 1, 4] } else { &[0] };
        for fp8 in [Fp8Encoding::Ocp, Fp8Encoding::Fnuz] {
            for &cbsz in selectors {
                for &blgp in selectors {
                    let scale =
                        |rng: &mut StdRng| Scale { register: std::array::from_fn(|_| scale_word(rng)), byte: rng.random_range(0..4) };
                    let scales = op.scaled.then(|| [scale(rng), scale(rng)]);
                    cases.push((mnemonic, op, Modifiers { cbsz, blgp, scales, ..Modifiers::none(fp8) }));
                }
            }
        }
    }
    cases
}

/// Four E8M0 scales from 1/8 to 8.
fn scale_word(rng: &mut StdRng) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|_| rng.random_range(124..=130)))
}

fn factor(modifiers: &Modifiers, op: &MfmaOp, row: usize, column: usize, k_block: usize) -> f64 {
    let Some([a, b]) = &modifiers.scales else { return 1.0 };
    let byte = |scale: &Scale, index: usize| scale.register[index + op.m * k_block].to_le_bytes()[scale.byte as usize];
    e8m0_to_f64(byte(a, row)) * e8m0_to_f64(byte(b, column))
}

fn check(op: &MfmaOp, mnemonic: &str, modifiers: &Modifiers, rng: &mut StdRng, whole: bool) {
    let [a_kind, b_kind] =
        [(op.a, modifiers.cbsz), (op.b, modifiers.blgp)].map(|(input, selector)| Kind::of(input, selector, modifiers.fp8));
    let mut draw = || if whole { f64::from(rng.random_range(-3..=3i32)) } else { rng.random_range(-2.0..2.0) };
    let (a, a_registers) = inputs(op, a_kind, &mut draw);
    let (b, b_registers) = inputs(op, b_kind, &mut draw);
    assert_eq!(op.a_registers(modifiers), Ok(a_registers.len()), "{mnemonic}");
    assert_eq!(op.b_registers(modifiers), Ok(b_registers.len()), "{mnemonic}");
    let integer = op.a == Input::I8;
    let c: Vec<Register> = (0..op.c_registers())
        .map(|_| {
            std::array::from_fn(|_| {
                let x: i32 = rng.random_range(-1000..1000);
                if integer { x as u32 } else { (x as f32 / 8.0).to_bits() }
            })
        })
        .collect();
    let d = execute(*op, &a_registers, &b_registers, &c, modifiers).unwrap();
    assert_eq!(d.len(), c.len());
    for (register, (c, d)) in c.iter().zip(&d).enumerate() {
        for lane in 0..64 {
            let (block, row, column) = result(op, lane, register);
            let number = |word: u32| if integer { f64::from(word as i32) } else { f64::from(f32::from_bits(word)) };
            let (product, size) = sum(op, &a[block][row], &b[block][column], |k_block| factor(modifiers, op, row, column, k_block));
            let (want, got) = (number(c[lane]) + product, number(d[lane]));
            let tolerance = if whole || integer { 0.0 } else { (size + want.abs() + number(c[lane]).abs()) * 2f64.powi(-23) };
            assert!((got - want).abs() <= tolerance, "{mnemonic} {modifiers:?} D[{block}][{row}][{column}] {got} for {want}");
        }
    }
}

#[test]
fn whole_numbers_multiply_exactly() {
    let mut rng = StdRng::seed_from_u64(21);
    for (mnemonic, op, modifiers) in cases(&mut rng) {
        check(&op, mnemonic, &modifiers, &mut rng, true);
    }
}

#[test]
fn random_matrices_stay_within_f32_accumulation() {
    let mut rng = StdRng::seed_from_u64(22);
    for (mnemonic, op, modifiers) in cases(&mut rng) {
        for _ in 0..4 {
            check(&op, mnemonic, &modifiers, &mut rng, false);
        }
    }
}

#[test]
fn the_identity_returns_the_other_matrix() {
    for mnemonic in ["v_mfma_f32_16x16x16_bf16", "v_mfma_f32_16x16x32_f16", "v_mfma_f32_32x32x16_bf16", "v_mfma_f32_16x16x128_f8f6f4"] {
        let op = op(mnemonic);
        let modifiers = Modifiers::none(Fp8Encoding::Ocp);
        let kind = Kind::of(op.a, 0, Fp8Encoding::Ocp);
        let mut next = 0;
        let (b, b_registers) = inputs(&op, kind, || {
            next += 1;
            f64::from(next % 16)
        });
        let per_word = 32 / kind.bits();
        let mut a = vec![[0u32; 64]; b_registers.len()];
        for lane in 0..64 {
            for item in 0..a.len() * per_word {
                let (_, row, k) = element(&op, kind, lane, item);
                a[item / per_word][lane] |= kind.encode(if row == k { 1.0 } else { 0.0 }) << (item % per_word * kind.bits());
            }
        }
        let d = execute(op, &a, &b_registers, &vec![[0; 64]; op.c_registers()], &modifiers).unwrap();
        for (register, d) in d.iter().enumerate() {
            for (lane, &word) in d.iter().enumerate() {
                let (_, row, column) = result(&op, lane, register);
                let want = if row < op.k { b[0][column][row] } else { 0.0 };
                assert_eq!(f64::from(f32::from_bits(word)), want, "{mnemonic}");
            }
        }
    }
}

/// Runs an MFMA on random whole numbers and returns it as `[register][lane]`, with the inputs first put through lane maps.
fn with_lanes(op: MfmaOp, modifiers: &Modifiers, a_lane: impl Fn(usize) -> usize, b_lane: impl Fn(usize) -> usize) -> Vec<Register> {
    let mut rng = StdRng::seed_from_u64(23);
    let mut draw = || f64::from(rng.random_range(-3..=3i32));
    let (_, a) = inputs(&op, Kind::F16, &mut draw);
    let (_, b) = inputs(&op, Kind::F16, &mut draw);
    let a: Vec<Register> = a.iter().map(|r| std::array::from_fn(|lane| r[a_lane(lane)])).collect();
    let b: Vec<Register> = b.iter().map(|r| std::array::from_fn(|lane| r[b_lane(lane)])).collect();
    execute(op, &a, &b, &vec![[0; 64]; op.c_registers()], modifiers).unwrap()
}

#[test]
fn broadcasts_read_other_lanes() {
    let plain = Modifiers::none(Fp8Encoding::Ocp);
    let four = op("v_mfma_f32_4x4x4_16b_f16");
    for (cbsz, abid) in [(1, 1), (2, 3), (4, 0), (4, 13)] {
        let size = 64 >> cbsz;
        let got = with_lanes(four, &Modifiers { cbsz, abid, ..plain.clone() }, |l| l, |l| l);
        assert_eq!(got, with_lanes(four, &plain, |l| l % size + size * abid as usize, |l| l), "cbsz {cbsz} abid {abid}");
        assert_ne!(got, with_lanes(four, &plain, |l| l, |l| l));
    }
    let sources: [fn(usize) -> usize; 8] =
        [|l| l, |l| l % 32, |l| l % 32 + 32, |l| (l + 16) % 64, |l| l % 16, |l| l % 16 + 16, |l| l % 16 + 32, |l| l % 16 + 48];
    for mnemonic in ["v_mfma_f32_4x4x4_16b_f16", "v_mfma_f32_32x32x8_f16"] {
        for (blgp, source) in sources.into_iter().enumerate() {
            let got = with_lanes(op(mnemonic), &Modifiers { blgp: blgp as u32, ..plain.clone() }, |l| l, |l| l);
            assert_eq!(got, with_lanes(op(mnemonic), &plain, |l| l, source), "{mnemonic} blgp {blgp}");
        }
    }
}

#[test]
fn overflow_saturates_only_under_fp16_ovfl() {
    let plain = Modifiers::none(Fp8Encoding::Ocp);
    let saturating = Modifiers { fp16_ovfl: true, ..plain.clone() };
    let run = |mnemonic: &str, a: u32, c: u32, modifiers: &Modifiers| {
        let op = op(mnemonic);
        let [a, b] = [vec![[a; 64]; op.a_registers(modifiers).unwrap()], vec![[0x7f7f_7f7f; 64]; op.b_registers(modifiers).unwrap()]];
        execute(op, &a, &b, &vec![[c; 64]; op.c_registers()], modifiers).unwrap()[0][0]
    };
    let f32s = ["v_mfma_f32_16x16x16_bf16", "v_mfma_f32_16x16x4_f32"];
    for mnemonic in f32s {
        assert_eq!(run(mnemonic, 0x7f7f_7f7f, 0, &plain), f32::INFINITY.to_bits(), "{mnemonic}");
        assert_eq!(run(mnemonic, 0xff7f_ff7f, 0, &saturating), f32::MIN.to_bits(), "{mnemonic}");
        assert_eq!(run(mnemonic, 0, 0xff80_0000, &saturating), 0xff80_0000, "{mnemonic} keeps an infinite C");
        assert!(f32::from_bits(run(mnemonic, 0, f32::NAN.to_bits(), &saturating)).is_nan(), "{mnemonic}");
        assert!(f32::from_bits(run(mnemonic, 0x7fc0_7fc0, 0, &plain)).is_nan(), "{mnemonic}");
    }
    let i8s = "v_mfma_i32_16x16x32_i8";
    assert_eq!(run(i8s, 0x0101_0101, i32::MAX as u32, &plain), (i32::MAX as u32).wrapping_add(32 * 127));
    assert_eq!(run(i8s, 0x0101_0101, i32::MAX as u32, &saturating), i32::MAX as u32);
    assert_eq!(run(i8s, 0xffff_ffff, i32::MIN as u32, &saturating), i32::MIN as u32);
}

#[test]
fn nan_scales_and_nan_codes_reach_their_rows_alone() {
    let op = op("v_mfma_scale_f32_16x16x128_f8f6f4");
    let one = Scale::constant(1f32.to_bits());
    let mut scales = [one.clone(), one];
    // Row 5, k from 64 on: lane 5 + 16 * 2.
    scales[0].register[37] = 0xff;
    let modifiers = Modifiers { cbsz: 4, blgp: 4, scales: Some(scales), ..Modifiers::none(Fp8Encoding::Ocp) };
    let d = execute(op, &[[0x2222_2222; 64]; 4], &[[0x2222_2222; 64]; 4], &[[0; 64]; 4], &modifiers).unwrap();
    for (register, d) in d.iter().enumerate() {
        for (lane, &word) in d.iter().enumerate() {
            let (_, row, _) = result(&op, lane, register);
            let x = f32::from_bits(word);
            assert!(if row == 5 { x.is_nan() } else { x == 128.0 }, "row {row}: {x}");
        }
    }
}

#[test]
fn f32_inputs_are_a_chain_of_fused_multiply_adds() {
    let op = op("v_mfma_f32_16x16x4_f32");
    let mut rng = StdRng::seed_from_u64(24);
    let [a, b]: [Vec<Register>; 2] = [(); 2].map(|_| vec![std::array::from_fn(|_| rng.random_range(-1.0..1.0f32).to_bits())]);
    let d = execute(op, &a, &b, &[[1e-3f32.to_bits(); 64]; 4], &Modifiers::none(Fp8Encoding::Fnuz)).unwrap();
    for row in 0..16 {
        for column in 0..16 {
            let chain =
                (0..4).fold(1e-3f32, |sum, k| f32::from_bits(a[0][row + 16 * k]).mul_add(f32::from_bits(b[0][column + 16 * k]), sum));
            assert_eq!(d[row % 4][column + 16 * (row / 4)], chain.to_bits());
        }
    }
    let flush = Modifiers { flush_f32_sources: true, ..Modifiers::none(Fp8Encoding::Fnuz) };
    let (tiny, large) = ([[1u32; 64]], [[1e30f32.to_bits(); 64]]);
    assert_eq!(execute(op, &tiny, &large, &[[0; 64]; 4], &flush).unwrap(), [[0; 64]; 4]);
    assert_ne!(execute(op, &tiny, &large, &[[0; 64]; 4], &Modifiers::none(Fp8Encoding::Fnuz)).unwrap()[0][0], 0);
}

#[test]
fn mnemonics_and_refusals() {
    for (old, new) in
        [("v_mfma_f32_16x16x16_bf16_1k", "v_mfma_f32_16x16x16_bf16"), ("v_mfma_f32_32x32x8_bf16_1k", "v_mfma_f32_32x32x8_bf16")]
    {
        assert_eq!(MfmaOp::from_mnemonic(old), MfmaOp::from_mnemonic(new));
    }
    for unknown in [
        "v_mfma_f64_16x16x4_f64",
        "v_mfma_f32_16x16x8_xf32",
        "v_smfmac_f32_16x16x32_bf16",
        "v_mfma_f32_16x16x64_bf16",
        "v_mfma_f32_16x32x16_bf16",
        "v_mfma_i32_16x16x16_bf16",
        "v_mfma_scale_f32_16x16x32_bf16",
        "v_mfma_f32_16x16x16x16_bf16",
        "v_mfma_",
        "v_add_f32",
    ] {
        assert_eq!(MfmaOp::from_mnemonic(unknown), None, "{unknown}");
    }
    let plain = Modifiers::none(Fp8Encoding::Ocp);
    let refused = |mnemonic: &str, modifiers: Modifiers| op(mnemonic).check(&modifiers).unwrap_err().to_string();
    assert!(refused("v_mfma_f32_16x16x128_f8f6f4", Modifiers { cbsz: 2, ..plain.clone() }).contains("FP6"));
    assert!(refused("v_mfma_f32_16x16x128_f8f6f4", Modifiers { blgp: 5, ..plain.clone() }).contains("no F8F6F4 format"));
    assert!(refused("v_mfma_f32_16x16x16_bf16", Modifiers { cbsz: 1, ..plain.clone() }).contains("cbsz 1"));
    assert!(refused("v_mfma_f32_4x4x4_16b_f16", Modifiers { cbsz: 1, abid: 2, ..plain.clone() }).contains("abid 2"));
    assert!(refused("v_mfma_f32_4x4x4_16b_f16", Modifiers { cbsz: 40, ..plain.clone() }).contains("cbsz 40"));
    assert!(refused("v_mfma_f32_16x16x16_bf16", Modifiers { blgp: 8, ..plain.clone() }).contains("blgp 8"));
    assert!(refused("v_mfma_scale_f32_16x16x128_f8f6f4", plain.clone()).contains("scale"));
    let too_few = execute(op("v_mfma_f32_16x16x16_bf16"), &[[0; 64]], &[[0; 64]; 2], &[[0; 64]; 4], &plain).unwrap_err();
    assert!(too_few.to_string().contains("[1, 2, 4]"), "{too_few}");
}
