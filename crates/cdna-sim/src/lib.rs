//! A functional simulator of CDNA3 (gfx942) and CDNA4 (gfx950) instructions.

pub mod float;
pub mod mfma;
