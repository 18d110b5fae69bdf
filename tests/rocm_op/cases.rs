//! The op's cases in the staged form.

use testkit::cases::CaseSpec;

use crate::support::*;

#[test]
fn first() {
    for (kv_dtype, scales) in forms() {
        let spec = CaseSpec { lens: vec![37, 300, 1], head_dim: 128, ..spec(kv_dtype, scales) };
        let start = std::time::Instant::now();
        println!("{kv_dtype:?} {scales:?}: {:.2e} in {:?}", check(&spec), start.elapsed());
    }
}
