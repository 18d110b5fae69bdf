//! Cache writes leave the CPU's bytes; FNUZ ones on gfx942 those that src/quant defines.

use candle::DType;
use candle_paged_attn::KvScale;
use candle_paged_attn::cache::{CacheDims, CacheLayout, KvDtype, KvStrides};
use candle_paged_attn::quant::fp8;
use cdna_sim::{Memory, Module};
use rayon::prelude::*;
use testkit::raw::storage_bytes;
use testkit::writes::{Write, WriteForm, WriteScales, paged};

use crate::build::{launch, module, upload};
use crate::require_clang;

/// A specialization.
#[derive(Clone, Copy, Debug)]
struct Kernel {
    arch: &'static str,
    form: WriteForm,
}

/// What a row of FNUZ E4M3 with its own or a given factor is: codes, and the scale that was chosen.
fn fnuz_row(values: &[f32], factor: Option<f32>) -> (Vec<u8>, f32) {
    let scale = factor.unwrap_or_else(|| fp8::token_scale_fnuz(values.iter().fold(0.0, |most: f32, x| most.max(x.abs()))));
    (values.iter().map(|x| fp8::encode_e4m3_fnuz(x / scale)).collect(), scale)
}

impl Kernel {
    fn code(&self, name: &str) -> String {
        let WriteForm { sources, kv, scales, layout, dims } = self.form;
        let modes = [WriteScales::None, WriteScales::Scalar, WriteScales::Token, WriteScales::Block];
        let kvs = [KvDtype::Bf16, KvDtype::F16, KvDtype::Fp8, KvDtype::Mxfp4];
        let layouts = [CacheLayout::Shuffled, CacheLayout::Vllm, CacheLayout::Nhd, CacheLayout::Hnd];
        let number = match name {
            "PA_HEAD_DIM" => dims.head_dim,
            "PA_PAGE" => dims.page_size,
            "PA_QUERY" => [DType::BF16, DType::F16, DType::F32].iter().position(|dtype| *dtype == sources[0]).unwrap(),
            "PA_KV" => kvs.iter().position(|known| *known == kv).unwrap(),
            "PA_SCALES" => modes.iter().position(|known| *known == scales).unwrap_or(2),
            _ => layouts.iter().position(|known| *known == layout).unwrap(),
        };
        number.to_string()
    }

    fn module(&self) -> Module {
        let names = ["PA_HEAD_DIM", "PA_PAGE", "PA_QUERY", "PA_KV", "PA_SCALES", "PA_LAYOUT"];
        let codes = names.map(|name| self.code(name));
        let defines: Vec<_> = names.into_iter().zip(codes.iter().map(String::as_str)).collect();
        module("write", self.arch, &defines)
    }

    /// What the write leaves in each paged tensor's storage. The CPU writes the layer itself.
    fn expected(&self, write: &Write) -> Vec<Vec<u8>> {
        if self.arch != "gfx942" || self.form.kv != KvDtype::Fp8 {
            return write.on_cpu().unwrap();
        }
        let (Write { layer, k, v, .. }, layout) = (write, self.form.layout);
        let tensors = paged(layer);
        let mut stored: Vec<_> = tensors.iter().map(|tensor| storage_bytes(tensor).unwrap()).collect();
        let strides = [layout.key_strides(layer.key.layout()), layout.value_strides(layer.value.layout())];
        for (side, (rows, scale)) in [(k, &layer.k_scale), (v, &layer.v_scale)].into_iter().enumerate() {
            let factor = match scale {
                KvScale::None => Some(1.0),
                KvScale::Scalar(factor) => Some(*factor),
                KvScale::Tensor(_) => None,
            };
            let rows = rows.to_dtype(DType::F32).unwrap().to_vec3::<f32>().unwrap();
            for (token, &slot) in write.kept_slots().iter().enumerate().filter(|(_, slot)| **slot >= 0) {
                let page_size = self.form.dims.page_size;
                let (page, offset) = (slot as usize / page_size, slot as usize % page_size);
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

    /// Tokens in random slots, some of them negative or past the cache, give the expected bytes everywhere.
    fn check(&self, seed: u64) {
        let module = self.module();
        let write = self.form.random(seed, false);
        let memory = Memory::new();
        let placed = write.place(|data| upload(&memory, data)).unwrap();
        let (grid, threads) = write.shape();
        launch(&module, &memory, &placed.arguments, grid, threads);
        let got: Vec<_> = placed.written.iter().map(|&(base, len)| memory.read(base, len).unwrap()).collect();
        write.check(&got, &self.expected(&write)).unwrap_or_else(|error| panic!("{self:?}: {error}"));
    }
}

/// The given caches on the given archs, each with one of the shapes and sources.
fn check_all(kinds: &[(KvDtype, WriteScales, CacheLayout)], archs: &[&'static str]) {
    let shapes = [(128, 16, 2), (64, 32, 1), (192, 16, 3), (1024, 64, 1), (128, 128, 1)];
    let sources = [DType::BF16, DType::F16, DType::F32];
    let cases: Vec<_> = archs.iter().flat_map(|&arch| kinds.iter().map(move |&kind| (arch, kind))).collect();
    cases.into_par_iter().enumerate().for_each(|(n, (arch, (kv, scales, layout)))| {
        let (head_dim, page_size, kv_heads) = shapes[n % shapes.len()];
        let dims = CacheDims { pages: 100 / page_size + 1, page_size, kv_heads, head_dim };
        let form = WriteForm { sources: [sources[n % sources.len()]; 2], kv, scales, layout, dims };
        Kernel { arch, form }.check(n as u64);
    });
}

#[test]
fn sixteen_bit_writes_are_the_cpus() {
    require_clang!();
    let forms = [(KvDtype::Bf16, WriteScales::None), (KvDtype::F16, WriteScales::None), (KvDtype::F16, WriteScales::Scalar)];
    let kinds = CacheLayout::ALL.iter().flat_map(|&layout| forms.map(|(kv, scales)| (kv, scales, layout)));
    check_all(&kinds.collect::<Vec<_>>(), &["gfx942"]);
    check_all(&[(KvDtype::Bf16, WriteScales::Scalar, CacheLayout::Shuffled)], &["gfx950"]);
}

#[test]
fn fp8_writes_are_the_cpus() {
    require_clang!();
    let scales = [WriteScales::None, WriteScales::Scalar, WriteScales::Token, WriteScales::TokenAndScalar];
    let kinds = CacheLayout::ALL.iter().flat_map(|&layout| scales.map(|scales| (KvDtype::Fp8, scales, layout)));
    check_all(&kinds.collect::<Vec<_>>(), &["gfx942", "gfx950"]);
}

#[test]
fn mxfp4_writes_are_the_cpus() {
    require_clang!();
    let kinds = [CacheLayout::Nhd, CacheLayout::Hnd].map(|layout| (KvDtype::Mxfp4, WriteScales::Block, layout));
    check_all(&kinds, &["gfx942", "gfx950"]);
}
