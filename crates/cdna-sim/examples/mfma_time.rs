//! Prints how long the simulator takes for one MFMA of each common shape.

use std::{hint::black_box, time::Instant};

use cdna_sim::float::Fp8Encoding;
use cdna_sim::mfma::{MfmaOp, Modifiers, Scale, execute};

fn main() {
    let shapes = [
        "v_mfma_f32_16x16x16_bf16",
        "v_mfma_f32_32x32x8_bf16",
        "v_mfma_f32_16x16x32_bf16",
        "v_mfma_f32_32x32x16_f16",
        "v_mfma_f32_16x16x32_fp8_fp8",
        "v_mfma_f32_16x16x4_f32",
        "v_mfma_i32_16x16x32_i8",
        "v_mfma_f32_4x4x4_16b_f16",
        "v_mfma_scale_f32_16x16x128_f8f6f4",
        "v_mfma_scale_f32_32x32x64_f8f6f4",
    ];
    for mnemonic in shapes {
        let Some(op) = MfmaOp::from_mnemonic(mnemonic) else { continue };
        let mut modifiers = Modifiers::none(Fp8Encoding::Ocp);
        if op.scaled {
            let one = Scale::constant(1f32.to_bits());
            modifiers = Modifiers { cbsz: 4, blgp: 4, scales: Some([one.clone(), one]), ..modifiers };
        }
        let registers = |count| vec![[0x3c3c_3c3c; 64]; count];
        let (Ok(a), Ok(b)) = (op.a_registers(&modifiers), op.b_registers(&modifiers)) else { continue };
        let (a, b, c) = (registers(a), registers(b), registers(op.c_registers()));
        let runs = 20_000;
        let best = (0..5).map(|_| {
            let start = Instant::now();
            for _ in 0..runs {
                let _ = black_box(execute(op, black_box(&a), black_box(&b), black_box(&c), &modifiers));
            }
            start.elapsed().as_secs_f64() / f64::from(runs)
        });
        println!("{mnemonic:36} {:6.2} us", best.fold(f64::MAX, f64::min) * 1e6);
    }
}
