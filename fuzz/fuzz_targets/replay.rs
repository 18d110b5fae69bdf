//! Arbitrary bytes as a case file: nothing may panic, and every failure says something.
//!
//! Needs nightly and cargo-fuzz: `cargo +nightly fuzz run replay`. Good starting points are recorded calls, which any program that uses
//! the crate writes with `CANDLE_PAGED_ATTN_RECORD=fuzz/corpus/replay`. `tests/fuzz_replay.rs` does the like on stable.
#![no_main]

use candle_paged_attn::Case;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Err(error) = Case::from_bytes(bytes).and_then(|case| case.run()) {
        assert!(!error.to_string().trim().is_empty());
    }
});
