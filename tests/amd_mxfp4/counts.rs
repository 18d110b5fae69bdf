//! What a steady tile executes, and what a specialization takes of a CU.

use candle::DType;
use candle_paged_attn::registry::Arch;
use cdna_sim::Class;
use testkit::cases::CaseSpec;

use crate::call::TileCall;
use crate::cases::base;
use crate::compile::{KERNEL, flags_of, module};
use crate::require_clang;

/// Counts of a wave and tile: a run of ten tiles less a run of nine, over four waves.
#[test]
fn steady_tiles() {
    require_clang!();
    let columns = ["VALU", "exp", "MFMA", "LDS", "conflicts", "VMEM", "SMEM", "SALU", "waits", "barriers", "bytes"];
    println!("{:34}{}", "", columns.map(|name| format!("{name:>10}")).concat());
    for (head_dim, page_size, m) in [(128, 128, 1), (128, 16, 1), (128, 128, 2), (128, 128, 4), (64, 128, 1), (256, 128, 1), (256, 128, 2)]
    {
        let spec = |tiles: i64| CaseSpec {
            head_dim,
            page_size,
            group: 16,
            query_lens: vec![m],
            lens: vec![tiles * 256],
            plan_free: true,
            ..base()
        };
        let [nine, ten] =
            [9, 10].map(|tiles| TileCall::new(spec(tiles).build().unwrap(), Arch::gfx950()).unwrap().one_group().run().unwrap().counters);
        let class = |class: Class| ten.class(class) - nine.class(class);
        let counts = [
            class(Class::Vector),
            class(Class::Transcendental),
            class(Class::Matrix),
            ten.lds_accesses - nine.lds_accesses,
            ten.lds_bank_conflicts - nine.lds_bank_conflicts,
            class(Class::VectorMemory),
            class(Class::ScalarMemory),
            class(Class::Scalar) + class(Class::Branch),
            class(Class::Wait),
            class(Class::Barrier),
            ten.global_loaded - nine.global_loaded,
        ];
        let name = format!("head_dim {head_dim} page {page_size} M-tiles {m}");
        println!("{name:34}{}", counts.map(|count| format!("{:10}", count / 4)).concat());
        assert_eq!((class(Class::Barrier), ten.lds_bank_conflicts - nine.lds_bank_conflicts), (0, 0), "{name}");
    }
}

/// No specialization spills; LDS is at most what the registry says.
#[test]
fn registers_and_lds() {
    require_clang!();
    println!("{:50} VGPRs AGPRs    LDS (registry)", "");
    for (head_dim, m) in [(64, 1), (64, 4), (128, 1), (128, 2), (128, 4), (192, 1), (192, 2), (256, 1), (256, 2), (512, 1), (1024, 1)] {
        for q_dtype in [DType::BF16, DType::F32] {
            let spec = CaseSpec { head_dim, q_dtype, group: 16, query_lens: vec![m], page_size: 64, lens: vec![1], ..base() };
            let selection = TileCall::new(spec.build().unwrap(), Arch::gfx950()).unwrap().selection;
            let module = module("gfx950", &flags_of(&selection));
            let kernel = module.kernel(KERNEL).unwrap();
            let (total, split) = kernel.register_file();
            let (lds, name) = (kernel.group_segment_size, format!("{} {q_dtype:?}", selection.kernel()));
            println!("{name:50} {total:5} {:5} {lds:6} ({})", total - split, selection.lds_bytes);
            assert!(lds <= selection.lds_bytes && kernel.private_segment_size == 0, "{name}");
        }
    }
}
