//! Cache writes leave the CPU's bytes.

use candle::{DType, Result};
use candle_paged_attn::cache::{CacheDims, CacheLayout, KvDtype};
use candle_paged_attn::cuda::specialize::{WriteKey, write_with};
use candle_paged_attn::registry::Arch;
use rayon::prelude::*;
use testkit::writes::{WriteForm, WriteScales};

use crate::cases::{all_right, archs};
use crate::device::{Device, Shape};
use crate::require_nvrtc;

/// An error unless every tensor's bytes are the CPU's. `repeats`: tokens share slots, and of those the last one stays.
fn check(arch: &Arch, form: WriteForm, seed: u64, repeats: bool) -> Result<()> {
    let write = form.random(seed, repeats);
    let WriteForm { sources: [dtype, value], kv, scales, layout, dims } = form;
    let CacheDims { head_dim, page_size, .. } = dims;
    // As for the tile, an FP8 cache without scales has scalar ones of 1.
    let scales = if kv == KvDtype::Fp8 && scales == WriteScales::None { WriteScales::Scalar } else { scales };
    let key = WriteKey { arch: arch.name, head_dim, page_size, dtype, kv_dtype: kv, scales: scales.mode(), layout };
    let kernel = write_with(&key, value, repeats)?;
    let device = Device::default();
    let placed = write.place(|data| device.upload(data))?;
    let (grid, threads) = write.shape();
    let shape = Shape::new(grid.map(|blocks| blocks as usize), threads as usize);
    let results = || placed.written.iter().map(|&(base, len)| device.read(base, len)).collect::<Vec<_>>();
    let checked = device.launch(&kernel, shape, &placed.arguments).and_then(|()| write.check(&results(), &write.on_cpu()?));
    checked.map_err(|error| error.context(format!("{} for {arch}: {form:?}", kernel.kernel)))
}

/// The given caches on every arch, each with one of the shapes and pairs of sources.
fn check_all(kinds: &[(KvDtype, WriteScales, CacheLayout)]) {
    let shapes = [(128, 16, 2), (64, 32, 1), (192, 16, 3), (1024, 64, 1), (128, 128, 1), (96, 48, 2)];
    let sources = [[DType::BF16; 2], [DType::F16; 2], [DType::F32; 2], [DType::F32, DType::BF16], [DType::BF16, DType::F16]];
    let cases: Vec<_> = archs().into_iter().flat_map(|arch| kinds.iter().map(move |&kind| (arch.clone(), kind))).collect();
    let check = |(n, (arch, (kv, scales, layout)))| {
        let (head_dim, page_size, kv_heads) = shapes[n % shapes.len()];
        let dims = CacheDims { pages: 100 / page_size + 1, page_size, kv_heads, head_dim };
        let form = WriteForm { sources: sources[n % sources.len()], kv, scales, layout, dims };
        check(&arch, form, n as u64, n % 2 == 1)
    };
    all_right(cases.into_par_iter().enumerate().map(check).collect());
}

fn in_every_layout(forms: &[(KvDtype, WriteScales)]) -> Vec<(KvDtype, WriteScales, CacheLayout)> {
    CacheLayout::ALL.iter().flat_map(|&layout| forms.iter().map(move |&(kv, scales)| (kv, scales, layout))).collect()
}

#[test]
fn numbers() {
    require_nvrtc!();
    let none = [KvDtype::F32, KvDtype::Bf16, KvDtype::F16].map(|kv| (kv, WriteScales::None));
    check_all(&in_every_layout(&[&none[..], &[(KvDtype::F16, WriteScales::Scalar)]].concat()));
}

#[test]
fn fp8() {
    require_nvrtc!();
    let scales = [WriteScales::None, WriteScales::Scalar, WriteScales::Token, WriteScales::TokenAndScalar];
    check_all(&in_every_layout(&scales.map(|scales| (KvDtype::Fp8, scales))));
}

#[test]
fn mxfp4() {
    require_nvrtc!();
    check_all(&[CacheLayout::Nhd, CacheLayout::Hnd].map(|layout| (KvDtype::Mxfp4, WriteScales::Block, layout)));
}
