//! Random cache writes: new rows of every kind into caches full of garbage, and what a kernel is told of them.

use std::borrow::Cow;

use candle::{DType, Device, Result, Tensor, bail};
use candle_paged_attn::KvScale;
use candle_paged_attn::cache::{CacheDims, CacheLayout, KvDtype, KvStrides, LayerCache, reshape_and_cache};
use candle_paged_attn::registry::ScaleMode;
use half::{bf16, f16};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use crate::arguments::Arguments;
use crate::raw::{bytes, f32s, storage_bytes};

/// Where scales come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteScales {
    None,
    Scalar,
    /// K's; V has one factor.
    TokenAndScalar,
    Token,
    Block,
}

impl WriteScales {
    pub fn mode(self) -> ScaleMode {
        match self {
            Self::None => ScaleMode::None,
            Self::Scalar => ScaleMode::Scalar,
            Self::TokenAndScalar | Self::Token => ScaleMode::PerToken,
            Self::Block => ScaleMode::Block,
        }
    }
}

/// What is written, and a cache with room for a few tokens.
#[derive(Clone, Copy, Debug)]
pub struct WriteForm {
    /// Dtypes of k and v.
    pub sources: [DType; 2],
    pub kv: KvDtype,
    pub scales: WriteScales,
    pub layout: CacheLayout,
    pub dims: CacheDims,
}

/// A write of a form.
pub struct Write {
    pub form: WriteForm,
    pub layer: LayerCache,
    pub k: Tensor,
    pub v: Tensor,
    /// Some are negative or past the cache.
    pub slots: Vec<i64>,
}

/// A write's tensors in device memory.
pub struct PlacedWrite {
    pub arguments: Arguments,
    /// Where each paged tensor's storage is, and its bytes.
    pub written: Vec<(u64, usize)>,
}

impl WriteForm {
    /// Tokens in random slots; `repeats`: a few of them share one.
    pub fn random(self, seed: u64, repeats: bool) -> Write {
        let mut rng = StdRng::seed_from_u64(seed);
        let all = (self.dims.pages * self.dims.page_size) as i64;
        let mut slots: Vec<i64> = (0..all).collect();
        slots.shuffle(&mut rng);
        slots.truncate(37);
        if repeats {
            slots.extend_from_within(..5);
            slots.extend_from_within(..2);
        }
        for past in [-1, i64::MIN, all, i64::MAX] {
            let at = rng.random_range(0..slots.len());
            slots[at] = past;
        }
        let [k, v] = self.sources.map(|dtype| rows(&mut rng, slots.len(), self.dims, dtype));
        Write { form: self, layer: self.layer(&mut rng), k, v, slots }
    }

    fn layer(&self, rng: &mut StdRng) -> LayerCache {
        let Self { dims, kv, layout, .. } = *self;
        let shape = [dims.pages, dims.kv_heads, dims.page_size];
        let [k_scale, v_scale] = match self.scales {
            WriteScales::None => [KvScale::None, KvScale::None],
            WriteScales::Scalar => [0.37, 2.5].map(KvScale::Scalar),
            WriteScales::Token => [0, 1].map(|_| KvScale::Tensor(garbage(rng, &shape, DType::F32))),
            WriteScales::TokenAndScalar => [KvScale::Tensor(garbage(rng, &shape, DType::F32)), KvScale::Scalar(0.5)],
            WriteScales::Block => [0, 1].map(|_| KvScale::Tensor(garbage(rng, &[&shape[..], &[dims.head_dim / 32]].concat(), DType::U8))),
        };
        let key = garbage(rng, &layout.key_shape(dims, kv), kv.dtype());
        LayerCache { key, value: garbage(rng, &layout.value_shape(dims, kv), kv.dtype()), k_scale, v_scale }
    }
}

impl Write {
    /// The slots as the CPU takes them: those past the cache are left out.
    pub fn kept_slots(&self) -> Vec<i64> {
        let all = (self.form.dims.pages * self.form.dims.page_size) as i64;
        self.slots.iter().map(|&slot| if slot < all { slot } else { -1 }).collect()
    }

    /// What the CPU leaves in each paged tensor's storage; it writes the layer itself.
    pub fn on_cpu(&self) -> Result<Vec<Vec<u8>>> {
        let slots = Tensor::new(self.kept_slots(), &Device::Cpu)?;
        reshape_and_cache(&self.k, &self.v, &slots, &self.layer, self.form.layout)?;
        paged(&self.layer).iter().map(storage_bytes).collect()
    }

    /// The arguments `WriteArgs`; `place` puts bytes into device memory.
    pub fn place(&self, place: impl Fn(&[u8]) -> u64) -> Result<PlacedWrite> {
        let Self { form, layer, k, v, slots } = self;
        let with_start = |tensor: &Tensor| -> Result<_> {
            let data = storage_bytes(tensor)?;
            let base = place(&data);
            Ok((base, data.len(), base + (tensor.layout().start_offset() * tensor.dtype().size_in_bytes()) as u64))
        };
        let tensors = paged(layer).iter().map(with_start).collect::<Result<Vec<_>>>()?;
        let mut scale_tensors = tensors[2..].iter();
        let [(k_scale, k_scale_stride), (v_scale, v_scale_stride)] = [&layer.k_scale, &layer.v_scale].map(|scale| match scale {
            KvScale::None => (place(&1f32.to_le_bytes()), [0; 3]),
            KvScale::Scalar(factor) => (place(&factor.to_le_bytes()), [0; 3]),
            KvScale::Tensor(scales) => (scale_tensors.next().map_or(0, |placed| placed.2), [0, 1, 2].map(|axis| scales.stride()[axis])),
        });
        let inside = |strides: KvStrides| [strides.page, strides.head, strides.token];
        let sources = [k.stride()[0], k.stride()[1], v.stride()[0], v.stride()[1]];
        let caches = [form.layout.key_strides(layer.key.layout()), form.layout.value_strides(layer.value.layout())].map(inside);
        let strides = [&sources[..], caches.as_flattened(), &k_scale_stride, &v_scale_stride].concat();
        let mut arguments = Arguments::default();
        arguments.longs([with_start(k)?.2, with_start(v)?.2, place(&bytes(slots, i64::to_le_bytes))]);
        arguments.longs([tensors[0].2, tensors[1].2, k_scale, v_scale]).longs(strides.into_iter().map(|n| n as u64));
        arguments.ints([slots.len(), form.dims.kv_heads, form.dims.pages].map(|n| n as i32));
        Ok(PlacedWrite { arguments, written: tensors.iter().map(|&(base, len, _)| (base, len)).collect() })
    }

    /// The launch: grid and threads.
    pub fn shape(&self) -> ([u32; 3], u32) {
        ([self.slots.len().div_ceil(16) as u32, self.form.dims.kv_heads as u32, 2], 256)
    }

    /// The same bytes, but for the NaNs of an F32 cache: whether one is quiet is lost or kept on the way from another dtype.
    fn quieted<'a>(&self, bytes: &'a [u8]) -> Cow<'a, [u8]> {
        if self.form.kv != KvDtype::F32 {
            return Cow::Borrowed(bytes);
        }
        let quiet = |x: f32| if x.is_nan() { x.to_bits() | 1 << 22 } else { x.to_bits() };
        f32s(bytes).into_iter().flat_map(|x| quiet(x).to_le_bytes()).collect()
    }

    /// An error where bytes of a paged tensor are not the expected ones.
    pub fn check(&self, got: &[Vec<u8>], want: &[Vec<u8>]) -> Result<()> {
        let pairs = got.iter().zip(want).map(|(got, want)| (self.quieted(got), self.quieted(want)));
        for ((got, want), name) in pairs.zip(["key", "value", "scales", "v_scales"]) {
            let differ: Vec<_> = (0..want.len()).filter(|&at| got[at] != want[at]).collect();
            if let Some(&at) = differ.first() {
                let (many, all) = (differ.len(), want.len());
                bail!("{many} of {all} bytes of {name} differ, the first is {at}: {:#04x}, not {:#04x}", got[at], want[at])
            }
        }
        Ok(())
    }
}

/// Bit patterns as a tensor of `dtype`.
fn tensor(bits: Vec<u32>, shape: Vec<usize>, dtype: DType) -> Tensor {
    let cpu = &Device::Cpu;
    match dtype {
        DType::F32 => Tensor::from_vec(bits.into_iter().map(f32::from_bits).collect::<Vec<_>>(), shape, cpu),
        DType::F16 => Tensor::from_vec(bits.into_iter().map(|x| f16::from_bits(x as u16)).collect::<Vec<_>>(), shape, cpu),
        DType::BF16 => Tensor::from_vec(bits.into_iter().map(|x| bf16::from_bits(x as u16)).collect::<Vec<_>>(), shape, cpu),
        DType::F8E4M3 => Tensor::from_vec(bits.into_iter().map(|x| float8::F8E4M3::from_bits(x as u8)).collect::<Vec<_>>(), shape, cpu),
        DType::U8 => Tensor::from_vec(bits.into_iter().map(|x| x as u8).collect::<Vec<_>>(), shape, cpu),
        other => panic!("{other:?}"),
    }
    .unwrap()
}

/// A tensor of garbage, a view of every other part of one with twice the pages' size.
fn garbage(rng: &mut StdRng, shape: &[usize], dtype: DType) -> Tensor {
    let mut whole = shape.to_vec();
    whole.insert(1, 2);
    let bits = (0..whole.iter().product()).map(|_| rng.random()).collect();
    tensor(bits, whole, dtype).narrow(1, rng.random_range(0..2), 1).unwrap().squeeze(1).unwrap()
}

/// New rows `[tokens, heads, head_dim]` out of wider ones: plain values, any bit pattern, ties, zeros, one huge or tiny value among others.
fn rows(rng: &mut StdRng, tokens: usize, dims: CacheDims, dtype: DType) -> Tensor {
    let wide = dims.kv_heads + 1;
    let mut bits = Vec::new();
    for _ in 0..tokens * wide {
        let kind = rng.random_range(0..8);
        let level = [1.0, 0.01, 300.0, 1e-30][rng.random_range(0..4)];
        let mut row: Vec<f32> = (0..dims.head_dim)
            .map(|_| match kind {
                0 => rng.random_range(-64i32..64) as f32 * 0.25 * level,
                1 => 0.0,
                2 => f32::from_bits(rng.random()),
                _ => rng.random_range(-4.0..4.0f32) * level,
            })
            .collect();
        if kind == 3 {
            row[rng.random_range(0..dims.head_dim)] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e38, -0.0][rng.random_range(0..5)];
        }
        bits.extend(row.into_iter().map(|x| match (dtype, kind) {
            (DType::F32, _) => x.to_bits(),
            (_, 2) => x.to_bits() >> 16,
            (DType::F16, _) => f16::from_f32(x).to_bits().into(),
            _ => bf16::from_f32(x).to_bits().into(),
        }));
    }
    tensor(bits, vec![tokens, wide, dims.head_dim], dtype).narrow(1, 1, dims.kv_heads).unwrap()
}

/// The paged tensors of a layer: K, V, and their scales where they are paged.
pub fn paged(layer: &LayerCache) -> Vec<Tensor> {
    let scales = [&layer.k_scale, &layer.v_scale].into_iter().filter_map(|scale| match scale {
        KvScale::Tensor(scales) => Some(scales.clone()),
        _ => None,
    });
    [layer.key.clone(), layer.value.clone()].into_iter().chain(scales).collect()
}
