//! Exact conversions between f32 and the 8-bit and 4-bit KV formats.
