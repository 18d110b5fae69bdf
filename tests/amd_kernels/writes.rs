//! Cache writes leave the CPU's bytes; FNUZ ones on gfx942 those that src/quant defines.

use candle::{CpuStorage, DType, Device, Storage, Tensor};
use candle_paged_attn::KvScale;
use candle_paged_attn::cache::{CacheDims, CacheLayout, KvDtype, KvStrides, LayerCache, reshape_and_cache};
use candle_paged_attn::quant::fp8;
use cdna_sim::{Memory, Module};
use half::{bf16, f16};
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng, rngs::StdRng};
use rayon::prelude::*;

use crate::build::{Args, bytes, launch, module, upload};
use crate::require_clang;

/// PA_SCALES.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scales {
    None,
    Scalar,
    /// K's; V has one factor.
    TokenAndScalar,
    Token,
    Block,
}

/// A specialization, and a cache with room for a few tokens.
#[derive(Clone, Copy, Debug)]
struct Kernel {
    arch: &'static str,
    source: DType,
    kv: KvDtype,
    scales: Scales,
    layout: CacheLayout,
    dims: CacheDims,
}

/// A tensor's storage, as bytes.
fn storage(tensor: &Tensor) -> Vec<u8> {
    match &*tensor.storage_and_layout().0 {
        Storage::Cpu(CpuStorage::F32(data)) => bytes(data, f32::to_le_bytes),
        Storage::Cpu(CpuStorage::F16(data)) => bytes(data, f16::to_le_bytes),
        Storage::Cpu(CpuStorage::BF16(data)) => bytes(data, bf16::to_le_bytes),
        Storage::Cpu(CpuStorage::F8E4M3(data)) => data.iter().map(|x| x.to_bits()).collect(),
        Storage::Cpu(CpuStorage::U8(data)) => data.clone(),
        _ => panic!("a dtype that caches have"),
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

/// What a row of FNUZ E4M3 with its own or a given factor is: codes, and the scale that was chosen.
fn fnuz_row(values: &[f32], factor: Option<f32>) -> (Vec<u8>, f32) {
    let scale = factor.unwrap_or_else(|| fp8::token_scale_fnuz(values.iter().fold(0.0, |most: f32, x| most.max(x.abs()))));
    (values.iter().map(|x| fp8::encode_e4m3_fnuz(x / scale)).collect(), scale)
}

/// The paged tensors of a layer: K, V, and their scales where they are paged.
fn paged(layer: &LayerCache) -> Vec<Tensor> {
    let scales = [&layer.k_scale, &layer.v_scale].into_iter().filter_map(|scale| match scale {
        KvScale::Tensor(scales) => Some(scales.clone()),
        _ => None,
    });
    [layer.key.clone(), layer.value.clone()].into_iter().chain(scales).collect()
}

impl Kernel {
    fn code(&self, name: &str) -> String {
        let scales = [Scales::None, Scales::Scalar, Scales::Token, Scales::Block];
        let kvs = [KvDtype::Bf16, KvDtype::F16, KvDtype::Fp8, KvDtype::Mxfp4];
        let layouts = [CacheLayout::Shuffled, CacheLayout::Vllm, CacheLayout::Nhd, CacheLayout::Hnd];
        let number = match name {
            "PA_HEAD_DIM" => self.dims.head_dim,
            "PA_PAGE" => self.dims.page_size,
            "PA_QUERY" => [DType::BF16, DType::F16, DType::F32].iter().position(|dtype| *dtype == self.source).unwrap(),
            "PA_KV" => kvs.iter().position(|kv| *kv == self.kv).unwrap(),
            "PA_SCALES" => scales.iter().position(|scales| *scales == self.scales).unwrap_or(2),
            _ => layouts.iter().position(|layout| *layout == self.layout).unwrap(),
        };
        number.to_string()
    }

    fn module(&self) -> Module {
        let names = ["PA_HEAD_DIM", "PA_PAGE", "PA_QUERY", "PA_KV", "PA_SCALES", "PA_LAYOUT"];
        let codes = names.map(|name| self.code(name));
        let defines: Vec<_> = names.into_iter().zip(codes.iter().map(String::as_str)).collect();
        module("write", self.arch, &defines)
    }

    fn layer(&self, rng: &mut StdRng) -> LayerCache {
        let Self { dims, kv, layout, .. } = *self;
        let shape = [dims.pages, dims.kv_heads, dims.page_size];
        let [k_scale, v_scale] = match self.scales {
            Scales::None => [KvScale::None, KvScale::None],
            Scales::Scalar => [0.37, 2.5].map(KvScale::Scalar),
            Scales::Token => [0, 1].map(|_| KvScale::Tensor(garbage(rng, &shape, DType::F32))),
            Scales::TokenAndScalar => [KvScale::Tensor(garbage(rng, &shape, DType::F32)), KvScale::Scalar(0.5)],
            Scales::Block => [0, 1].map(|_| KvScale::Tensor(garbage(rng, &[&shape[..], &[dims.head_dim / 32]].concat(), DType::U8))),
        };
        let key = garbage(rng, &layout.key_shape(dims, kv), kv.dtype());
        LayerCache { key, value: garbage(rng, &layout.value_shape(dims, kv), kv.dtype()), k_scale, v_scale }
    }

    /// What the write leaves in each paged tensor's storage. The CPU writes `layer` itself.
    fn expected(&self, layer: &LayerCache, [k, v]: [&Tensor; 2], slots: &[i64]) -> Vec<Vec<u8>> {
        let tensors = paged(layer);
        if self.arch != "gfx942" || self.kv != KvDtype::Fp8 {
            let slots = Tensor::new(slots, &Device::Cpu).unwrap();
            reshape_and_cache(k, v, &slots, layer, self.layout).unwrap();
            return tensors.iter().map(storage).collect();
        }
        let mut stored: Vec<_> = tensors.iter().map(storage).collect();
        let strides = [self.layout.key_strides(layer.key.layout()), self.layout.value_strides(layer.value.layout())];
        for (side, (rows, scale)) in [(k, &layer.k_scale), (v, &layer.v_scale)].into_iter().enumerate() {
            let factor = match scale {
                KvScale::None => Some(1.0),
                KvScale::Scalar(factor) => Some(*factor),
                KvScale::Tensor(_) => None,
            };
            let rows = rows.to_dtype(DType::F32).unwrap().to_vec3::<f32>().unwrap();
            for (token, &slot) in slots.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
                let (page, offset) = (slot as usize / self.dims.page_size, slot as usize % self.dims.page_size);
                for (head, values) in rows[token].iter().enumerate() {
                    let (codes, scale) = fnuz_row(values, factor);
                    codes.iter().enumerate().for_each(|(d, &code)| stored[side][strides[side].offset(page, head, offset, d)] = code);
                    if factor.is_none() {
                        let at = KvStrides::of_scale(tensors[2 + side].layout()).offset(page, head, offset, 0);
                        stored[2 + side][4 * at..4 * at + 4].copy_from_slice(&scale.to_le_bytes());
                    }
                }
            }
        }
        stored
    }

    /// What the kernel leaves in each paged tensor's storage.
    fn write(&self, module: &Module, layer: &LayerCache, [k, v]: [&Tensor; 2], slots: &[i64]) -> Vec<Vec<u8>> {
        let memory = Memory::new();
        let place = |tensor: &Tensor| {
            let data = storage(tensor);
            let base = upload(&memory, &data);
            (base, data.len(), base + (tensor.layout().start_offset() * tensor.dtype().size_in_bytes()) as u64)
        };
        let tensors: Vec<_> = paged(layer).iter().map(place).collect();
        let mut scale_tensors = tensors[2..].iter();
        let [(k_scale, k_scale_stride), (v_scale, v_scale_stride)] = [&layer.k_scale, &layer.v_scale].map(|scale| match scale {
            KvScale::None => (0, [0; 3]),
            KvScale::Scalar(factor) => (upload(&memory, &factor.to_le_bytes()), [0; 3]),
            KvScale::Tensor(scales) => (scale_tensors.next().unwrap().2, [0, 1, 2].map(|axis| scales.stride()[axis])),
        });
        let inside = |strides: KvStrides| [strides.page, strides.head, strides.token];
        let sources = [k.stride()[0], k.stride()[1], v.stride()[0], v.stride()[1]];
        let caches = [self.layout.key_strides(layer.key.layout()), self.layout.value_strides(layer.value.layout())].map(inside);
        let strides = [&sources[..], caches.as_flattened(), &k_scale_stride, &v_scale_stride].concat();
        let slot_mapping = upload(&memory, &bytes(slots, i64::to_le_bytes));
        let pointers = [place(k).2, place(v).2, slot_mapping, tensors[0].2, tensors[1].2, k_scale, v_scale];
        let sizes = [slots.len(), self.dims.kv_heads, self.dims.pages].map(|n| n as i32);
        let args = Args::default().longs(pointers).longs(strides.into_iter().map(|n| n as u64)).ints(sizes);
        launch(module, &memory, &args, [slots.len().div_ceil(16) as u32, self.dims.kv_heads as u32, 2], 256);
        tensors.iter().map(|&(base, len, _)| memory.read(base, len).unwrap()).collect()
    }

    /// Tokens in random slots, some of them negative or past the cache, give the expected bytes everywhere.
    fn check(&self, seed: u64) {
        let module = self.module();
        let mut rng = StdRng::seed_from_u64(seed);
        let all = (self.dims.pages * self.dims.page_size) as i64;
        let mut slots: Vec<i64> = (0..all).collect();
        slots.shuffle(&mut rng);
        slots.truncate(37);
        for past in [-1, i64::MIN, all, i64::MAX] {
            let at = rng.random_range(0..slots.len());
            slots[at] = past;
        }
        let [k, v] = [0, 1].map(|_| rows(&mut rng, slots.len(), self.dims, self.source));
        let layer = self.layer(&mut rng);
        let got = self.write(&module, &layer, [&k, &v], &slots);
        let kept: Vec<i64> = slots.iter().map(|&slot| if slot < all { slot } else { -1 }).collect();
        let want = self.expected(&layer, [&k, &v], &kept);
        for ((got, want), name) in got.iter().zip(&want).zip(["key", "value", "scales", "v_scales"]) {
            let differ: Vec<_> = (0..want.len()).filter(|&at| got[at] != want[at]).collect();
            let first = differ.first().map(|&at| (at, got[at], want[at]));
            assert!(differ.is_empty(), "{self:?}: {} of {} bytes of {name} differ, the first {first:?}", differ.len(), want.len());
        }
    }
}

/// The given caches on the given archs, each with one of the shapes and sources.
fn check_all(kinds: &[(KvDtype, Scales, CacheLayout)], archs: &[&'static str]) {
    let shapes = [(128, 16, 2), (64, 32, 1), (192, 16, 3), (1024, 64, 1), (128, 128, 1)];
    let sources = [DType::BF16, DType::F16, DType::F32];
    let cases: Vec<_> = archs.iter().flat_map(|&arch| kinds.iter().map(move |&kind| (arch, kind))).collect();
    cases.into_par_iter().enumerate().for_each(|(n, (arch, (kv, scales, layout)))| {
        let (head_dim, page_size, kv_heads) = shapes[n % shapes.len()];
        let dims = CacheDims { pages: 100 / page_size + 1, page_size, kv_heads, head_dim };
        Kernel { arch, source: sources[n % sources.len()], kv, scales, layout, dims }.check(n as u64);
    });
}

#[test]
fn sixteen_bit_writes_are_the_cpus() {
    require_clang!();
    let forms = [(KvDtype::Bf16, Scales::None), (KvDtype::F16, Scales::None), (KvDtype::F16, Scales::Scalar)];
    let kinds = CacheLayout::ALL.iter().flat_map(|&layout| forms.map(|(kv, scales)| (kv, scales, layout)));
    check_all(&kinds.collect::<Vec<_>>(), &["gfx942"]);
    check_all(&[(KvDtype::Bf16, Scales::Scalar, CacheLayout::Shuffled)], &["gfx950"]);
}

#[test]
fn fp8_writes_are_the_cpus() {
    require_clang!();
    let scales = [Scales::None, Scales::Scalar, Scales::Token, Scales::TokenAndScalar];
    let kinds = CacheLayout::ALL.iter().flat_map(|&layout| scales.map(|scales| (KvDtype::Fp8, scales, layout)));
    check_all(&kinds.collect::<Vec<_>>(), &["gfx942", "gfx950"]);
}

#[test]
fn mxfp4_writes_are_the_cpus() {
    require_clang!();
    let kinds = [CacheLayout::Nhd, CacheLayout::Hnd].map(|layout| (KvDtype::Mxfp4, Scales::Block, layout));
    check_all(&kinds, &["gfx942", "gfx950"]);
}
