//! Kernel-argument bytes, for harnesses that launch a code object without the crate.

/// Values one after another, as a kernel without padding between its arguments takes them.
#[derive(Clone, Debug, Default)]
pub struct Arguments(pub Vec<u8>);

impl Arguments {
    pub fn u64(&mut self, value: u64) -> &mut Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    pub fn u32(&mut self, value: usize) -> &mut Self {
        self.0.extend((value as u32).to_le_bytes());
        self
    }

    /// Pointers (0 for none), strides.
    pub fn longs(&mut self, values: impl IntoIterator<Item = u64>) -> &mut Self {
        values.into_iter().fold(self, Self::u64)
    }

    pub fn ints(&mut self, values: impl IntoIterator<Item = i32>) -> &mut Self {
        values.into_iter().for_each(|value| self.0.extend(value.to_le_bytes()));
        self
    }

    pub fn f32(&mut self, value: f32) -> &mut Self {
        self.0.extend(value.to_le_bytes());
        self
    }
}
