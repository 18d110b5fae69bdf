//! Tensors as the bytes that a kernel reads.

use candle::{CpuStorage, DType, Device, Result, Storage, Tensor, bail};
use candle_paged_attn::KvScale;
use candle_paged_attn::quant::fp8;

/// A tensor's storage as bytes, where it starts in it, and its strides in elements.
#[derive(Clone, Debug)]
pub struct Raw {
    pub bytes: Vec<u8>,
    /// In bytes.
    pub offset: u64,
    pub strides: Vec<usize>,
}

impl Raw {
    pub fn of(tensor: &Tensor) -> Result<Self> {
        let offset = (tensor.layout().start_offset() * tensor.dtype().size_in_bytes()) as u64;
        Ok(Self { bytes: storage_bytes(tensor)?, offset, strides: tensor.stride().to_vec() })
    }

    /// A scale times `factor` (E8M0 as it is), and its strides of page, head and token: 0 where it is one for all.
    pub fn of_scale(scale: &KvScale, factor: f32) -> Result<Self> {
        let tensor = match scale {
            KvScale::None => Tensor::new(&[1f32], &Device::Cpu)?,
            KvScale::Scalar(s) => Tensor::new(&[*s], &Device::Cpu)?,
            KvScale::Tensor(t) => t.clone(),
        };
        let is_as_stored = tensor.dtype() == DType::U8 || factor == 1.0;
        let mut raw = Self::of(&if is_as_stored { tensor.clone() } else { (tensor.to_dtype(DType::F32)? * f64::from(factor))? })?;
        if tensor.elem_count() == 1 {
            raw.strides = vec![0];
        }
        raw.strides.resize(3, 0);
        Ok(raw)
    }

    /// FP8 in the encoding of gfx942, with half the value.
    pub fn fnuz(mut self) -> Self {
        self.bytes.iter_mut().for_each(|code| *code = fp8::ocp_to_fnuz(*code));
        self
    }
}

/// The bytes of a CPU tensor's whole storage.
pub fn storage_bytes(tensor: &Tensor) -> Result<Vec<u8>> {
    let (storage, _) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else { bail!("a CPU tensor is wanted") };
    Ok(match storage {
        CpuStorage::BF16(v) => bytes(v, |x| x.to_le_bytes()),
        CpuStorage::F16(v) => bytes(v, |x| x.to_le_bytes()),
        CpuStorage::F32(v) => bytes(v, f32::to_le_bytes),
        CpuStorage::I32(v) => bytes(v, i32::to_le_bytes),
        CpuStorage::U32(v) => bytes(v, u32::to_le_bytes),
        CpuStorage::U8(v) => v.clone(),
        CpuStorage::F8E4M3(v) => v.iter().map(|x| x.to_bits()).collect(),
        _ => bail!("{:?} is no operand", tensor.dtype()),
    })
}

/// Numbers one after another, by `to`.
pub fn bytes<T: Copy, const N: usize>(values: &[T], to: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|&x| to(x)).collect()
}

/// The F32 values of little-endian bytes.
pub fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|word| f32::from_le_bytes(*word)).collect()
}

/// The I32 values of little-endian bytes.
pub fn i32s(bytes: &[u8]) -> Vec<i32> {
    bytes.as_chunks().0.iter().map(|word| i32::from_le_bytes(*word)).collect()
}
