//! Cache tensors: writes, copies and gathers against element-by-element models that know the layouts only as tensor shapes.

use candle::{DType, Device, Result, Storage, Tensor};
use candle_paged_attn::KvScale;
use candle_paged_attn::cache::{
    CacheConfig, CacheDims, CacheLayout, KvDtype, LayerCache, PagedKvCache, Quantization, copy_pages, gather, reshape_and_cache,
};
use candle_paged_attn::quant::mxfp4;
use float8::F8E4M3;
use half::{bf16, f16};
use rand::{Rng, SeedableRng, rngs::StdRng};

const CPU: Device = Device::Cpu;
const DTYPES: [KvDtype; 5] = [KvDtype::F32, KvDtype::F16, KvDtype::Bf16, KvDtype::Fp8, KvDtype::Mxfp4];
const INPUTS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// The bits of every element of a tensor's whole storage, whatever the view.
fn storage_bits(tensor: &Tensor) -> Vec<u32> {
    let (storage, _) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else { panic!("not on the CPU") };
    match tensor.dtype() {
        DType::F32 => storage.as_slice::<f32>().unwrap().iter().map(|v| v.to_bits()).collect(),
        DType::F16 => storage.as_slice::<f16>().unwrap().iter().map(|v| v.to_bits().into()).collect(),
        DType::BF16 => storage.as_slice::<bf16>().unwrap().iter().map(|v| v.to_bits().into()).collect(),
        DType::F8E4M3 => storage.as_slice::<F8E4M3>().unwrap().iter().map(|v| v.to_bits().into()).collect(),
        DType::U8 => storage.as_slice::<u8>().unwrap().iter().map(|&v| v.into()).collect(),
        other => panic!("{other:?}"),
    }
}

/// A tensor of random bits, NaN and all.
fn random_bits(rng: &mut StdRng, shape: &[usize], dtype: DType) -> Tensor {
    let n = shape.iter().product::<usize>();
    match dtype {
        DType::F32 => Tensor::from_vec((0..n).map(|_| f32::from_bits(rng.random())).collect(), shape, &CPU),
        DType::F16 => Tensor::from_vec((0..n).map(|_| f16::from_bits(rng.random())).collect(), shape, &CPU),
        DType::BF16 => Tensor::from_vec((0..n).map(|_| bf16::from_bits(rng.random())).collect(), shape, &CPU),
        DType::F8E4M3 => Tensor::from_vec((0..n).map(|_| F8E4M3::from_bits(rng.random())).collect(), shape, &CPU),
        _ => Tensor::from_vec((0..n).map(|_| rng.random::<u8>()).collect(), shape, &CPU),
    }
    .unwrap()
}

/// Elements numbered by their place in the storage, seen through the same view as `tensor`; then in (page, head, token, dim) order.
fn places(tensor: &Tensor, layout: CacheLayout, dims: CacheDims, is_key: bool) -> Vec<usize> {
    let (shape, stride, start) = (tensor.dims(), tensor.stride(), tensor.layout().start_offset());
    let at = |index: &[usize]| start + index.iter().zip(stride).map(|(i, s)| i * s).sum::<usize>();
    let width = if shape.len() == 4 && matches!(layout, CacheLayout::Nhd | CacheLayout::Hnd) { shape[3] } else { dims.head_dim };
    let mut places = Vec::new();
    for p in 0..dims.pages {
        for h in 0..dims.kv_heads {
            for t in 0..dims.page_size {
                for d in 0..width {
                    places.push(match (layout, is_key) {
                        (CacheLayout::Nhd, _) => at(&[p, t, h, d]),
                        (CacheLayout::Hnd, _) => at(&[p, h, t, d]),
                        (CacheLayout::Vllm | CacheLayout::Shuffled, true) => at(&[p, h, d / shape[4], t, d % shape[4]]),
                        (CacheLayout::Vllm, false) => at(&[p, h, d, t]),
                        (CacheLayout::Shuffled, false) => at(&[p, h, t / shape[4], d, t % shape[4]]),
                    });
                }
            }
        }
    }
    places
}

/// K and V caches: two tensors, two halves of one `[pages, 2, ..]`, or slices of wider tensors.
fn views(rng: &mut StdRng, kind: usize, key_shape: &[usize], value_shape: &[usize], dtype: DType) -> (Tensor, Tensor) {
    if kind == 1 && key_shape == value_shape {
        let mut both = key_shape.to_vec();
        both.insert(1, 2);
        let both = random_bits(rng, &both, dtype);
        return (both.narrow(1, 0, 1).unwrap().squeeze(1).unwrap(), both.narrow(1, 1, 1).unwrap().squeeze(1).unwrap());
    }
    let mut one = |shape: &[usize]| match kind {
        2 => {
            let wide: Vec<usize> = shape.iter().enumerate().map(|(i, n)| if i < 3 { n + 2 } else { *n }).collect();
            let wide = random_bits(rng, &wide, dtype);
            (0..3).fold(wide, |t, axis| t.narrow(axis, 1, shape[axis]).unwrap())
        }
        _ => random_bits(rng, shape, dtype),
    };
    (one(key_shape), one(value_shape))
}

/// k or v `[tokens, heads, dim]` in a dtype, contiguous or a slice of a fused projection.
fn new_tokens(rng: &mut StdRng, tokens: usize, dims: CacheDims, dtype: DType, fused: bool) -> Tensor {
    let heads = if fused { dims.kv_heads + 3 } else { dims.kv_heads };
    let n = tokens * heads * dims.head_dim;
    let data: Vec<f32> = (0..n).map(|_| rng.random_range(-4.0f32..4.0) * 2f32.powi(rng.random_range(-9..3))).collect();
    let tensor = Tensor::from_vec(data, (tokens, heads, dims.head_dim), &CPU).unwrap().to_dtype(dtype).unwrap();
    if fused { tensor.narrow(1, 2, dims.kv_heads).unwrap() } else { tensor }
}

/// The stored bits, scale bits and values of one row, by the definitions of the formats.
fn stored(row: &[f32], dtype: KvDtype, scale: &KvScale) -> (Vec<u32>, Vec<u32>, Vec<f32>) {
    let factor = match scale {
        KvScale::Scalar(factor) => *factor,
        KvScale::Tensor(t) if t.elem_count() == 1 && t.rank() != 3 => t.flatten_all().unwrap().to_vec1::<f32>().unwrap()[0],
        KvScale::Tensor(_) if dtype == KvDtype::Fp8 => match row.iter().fold(0f32, |m, v| m.max(v.abs())) {
            0.0 => 1.0,
            absmax => absmax / 448.0,
        },
        _ => 1.0,
    };
    let scale_bits = match scale {
        KvScale::Tensor(t) if t.rank() == 3 => vec![factor.to_bits()],
        _ => vec![],
    };
    let scaled = row.iter().map(|v| v / factor);
    match dtype {
        KvDtype::F32 => (scaled.clone().map(f32::to_bits).collect(), scale_bits, scaled.map(|v| v * factor).collect()),
        KvDtype::F16 => {
            let codes: Vec<f16> = scaled.map(f16::from_f32).collect();
            (codes.iter().map(|c| c.to_bits().into()).collect(), scale_bits, codes.iter().map(|c| c.to_f32() * factor).collect())
        }
        KvDtype::Bf16 => {
            let codes: Vec<bf16> = scaled.map(bf16::from_f32).collect();
            (codes.iter().map(|c| c.to_bits().into()).collect(), scale_bits, codes.iter().map(|c| c.to_f32() * factor).collect())
        }
        KvDtype::Fp8 => {
            let codes: Vec<F8E4M3> = scaled.map(F8E4M3::from_f32).collect();
            (codes.iter().map(|c| c.to_bits().into()).collect(), scale_bits, codes.iter().map(|c| c.to_f32() * factor).collect())
        }
        KvDtype::Mxfp4 => {
            let (mut bytes, mut scales, mut values) = (vec![], vec![], vec![0.0; row.len()]);
            for (block, values) in row.as_chunks::<32>().0.iter().zip(values.as_chunks_mut::<32>().0) {
                let mut packed = [0; 16];
                let scale = mxfp4::quantize_block(block, &mut packed);
                mxfp4::dequantize_block(&packed, scale, values);
                scales.push(scale.into());
                bytes.extend(packed.map(u32::from));
            }
            (bytes, scales, values)
        }
    }
}

fn scales(rng: &mut StdRng, dims: CacheDims, dtype: KvDtype, kind: usize) -> KvScale {
    let CacheDims { pages, page_size, kv_heads, head_dim } = dims;
    match (dtype, kind % 4) {
        (KvDtype::Mxfp4, _) => KvScale::Tensor(random_bits(rng, &[pages, kv_heads, page_size, head_dim / 32], DType::U8)),
        (_, 0) => KvScale::None,
        (_, 1) => KvScale::Scalar(rng.random_range(0.01..2.0)),
        (KvDtype::Fp8, 2) => {
            let wide = random_bits(rng, &[pages, kv_heads + 1, page_size + 1], DType::F32);
            KvScale::Tensor(wide.narrow(1, 1, kv_heads).unwrap().narrow(2, 0, page_size).unwrap())
        }
        _ => KvScale::Tensor(Tensor::new(&[rng.random_range(0.01f32..2.0)], &CPU).unwrap()),
    }
}

/// Distinct-or-not slots with skips among them.
fn draw_slots(rng: &mut StdRng, tokens: usize, dims: CacheDims) -> Vec<i64> {
    let limit = (dims.pages * dims.page_size) as i64;
    (0..tokens).map(|_| if rng.random_bool(0.15) { -rng.random_range(1..9) } else { rng.random_range(0..limit) }).collect()
}

fn write_and_gather(rng: &mut StdRng, dims: CacheDims, layout: CacheLayout, dtype: KvDtype, case: usize, tokens: usize) {
    let (key, value) = views(rng, case % 3, &layout.key_shape(dims, dtype), &layout.value_shape(dims, dtype), dtype.dtype());
    let (k_scale, v_scale) = (scales(rng, dims, dtype, case), scales(rng, dims, dtype, case / 3));
    let cache = LayerCache { key, value, k_scale, v_scale };
    let input = INPUTS[case % 3];
    let (k, v) = (
        new_tokens(rng, tokens, dims, input, case.is_multiple_of(2)),
        new_tokens(rng, tokens, dims, INPUTS[(case + 1) % 3], case.is_multiple_of(5)),
    );
    let slots = draw_slots(rng, tokens, dims);
    let slot_mapping = Tensor::from_vec(slots.clone(), tokens, &CPU).unwrap();

    let shared = storage_bits(&cache.key).len() != cache.key.elem_count() && case % 3 == 1;
    let mut expected: Vec<Vec<u32>> = vec![storage_bits(&cache.key), storage_bits(&cache.value)];
    let mut expected_scales: Vec<Option<Vec<u32>>> =
        [&cache.k_scale, &cache.v_scale].map(|s| if let KvScale::Tensor(t) = s { Some(storage_bits(t)) } else { None }).into();
    let mut values: Vec<std::collections::HashMap<usize, Vec<f32>>> = vec![Default::default(), Default::default()];
    for (side, (tensor, new, scale)) in [(&cache.key, &k, &cache.k_scale), (&cache.value, &v, &cache.v_scale)].into_iter().enumerate() {
        let places = places(tensor, layout, dims, side == 0);
        let width = places.len() / (dims.pages * dims.kv_heads * dims.page_size);
        let new: Vec<Vec<Vec<f32>>> = new.to_dtype(DType::F32).unwrap().force_contiguous().unwrap().to_vec3().unwrap();
        for (token, &slot) in slots.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
            for (head, new) in new[token].iter().enumerate() {
                let (page, offset) = (slot as usize / dims.page_size, slot as usize % dims.page_size);
                let row = (page * dims.kv_heads + head) * dims.page_size + offset;
                let (bits, scale_bits, decoded) = stored(new, dtype, scale);
                // Halves of one tensor have one storage: the last comparison is against both sides' writes.
                let target = if shared { 0 } else { side };
                bits.iter().enumerate().for_each(|(d, &bits)| expected[target][places[row * width + d]] = bits);
                if let (KvScale::Tensor(t), Some(expected)) = (scale, &mut expected_scales[side])
                    && t.rank() >= 3
                {
                    let at = t.layout().start_offset() + page * t.stride()[0] + head * t.stride()[1] + offset * t.stride()[2];
                    scale_bits.iter().enumerate().for_each(|(b, &bits)| expected[at + b] = bits);
                }
                values[side].insert(slot as usize * dims.kv_heads + head, decoded);
            }
        }
    }
    if shared {
        expected[1] = expected[0].clone();
    }

    reshape_and_cache(&k, &v, &slot_mapping, &cache, layout).unwrap();
    let what = format!("{dims:?} {layout:?} {dtype:?} case {case} {:?} {:?}", cache.k_scale, cache.v_scale);
    assert!(storage_bits(&cache.key) == expected[0], "key: {what}");
    assert!(storage_bits(&cache.value) == expected[1], "value: {what}");
    for (scale, expected) in [&cache.k_scale, &cache.v_scale].into_iter().zip(expected_scales) {
        if let KvScale::Tensor(t) = scale {
            assert!(storage_bits(t) == expected.unwrap(), "scale: {what}");
        }
    }

    // Gather with the pages in a shuffled order; only slots that were written have known values.
    let mut pages: Vec<u32> = (0..dims.pages as u32).collect();
    rand::seq::SliceRandom::shuffle(&mut pages[..], rng);
    let len = rng.random_range(0..=dims.pages * dims.page_size);
    let (k, v) = gather(&cache, layout, &pages, len).unwrap();
    for (side, gathered) in [k, v].into_iter().enumerate() {
        assert_eq!((gathered.dtype(), gathered.dims()), (DType::F32, &[len, dims.kv_heads, dims.head_dim][..]));
        for (token, heads) in gathered.to_vec3::<f32>().unwrap().into_iter().enumerate() {
            for (head, row) in heads.into_iter().enumerate() {
                let slot = pages[token / dims.page_size] as usize * dims.page_size + token % dims.page_size;
                if let Some(expected) = values[side].get(&(slot * dims.kv_heads + head)) {
                    assert_eq!(&row, expected, "{what}");
                }
            }
        }
    }
}

#[test]
fn writes_touch_their_slots_alone_and_gather_reads_them_back() {
    let mut rng = StdRng::seed_from_u64(21);
    let mut cases = 0;
    for layout in CacheLayout::ALL {
        for dtype in DTYPES {
            for case in 0..36 {
                let split = matches!(layout, CacheLayout::Vllm | CacheLayout::Shuffled);
                let x = if split { dtype.elements_per_16_bytes() } else { 1 };
                let dims = CacheDims {
                    pages: rng.random_range(1..6),
                    page_size: x * rng.random_range(1..4),
                    kv_heads: rng.random_range(1..4),
                    head_dim: if dtype == KvDtype::Mxfp4 { 32 * rng.random_range(1..4) } else { x * 8 * rng.random_range(1..4) },
                };
                if layout.check(dims, dtype).is_ok() {
                    let tokens = rng.random_range(0..12);
                    write_and_gather(&mut rng, dims, layout, dtype, case, tokens);
                    cases += 1;
                }
            }
        }
    }
    assert_eq!(cases, (4 * 4 + 2) * 36);
}

#[test]
fn a_prompt_chunk_on_the_pool_of_threads_is_the_same() {
    let mut rng = StdRng::seed_from_u64(22);
    let dims = CacheDims { pages: 40, page_size: 32, kv_heads: 2, head_dim: 64 };
    for (case, dtype) in DTYPES.into_iter().enumerate() {
        write_and_gather(&mut rng, dims, CacheLayout::Hnd, dtype, 2 + case, 700);
    }
}

fn config(dtype: KvDtype, quantization: Quantization) -> CacheConfig {
    let dims = CacheDims { pages: 4, page_size: 16, kv_heads: 2, head_dim: 64 };
    CacheConfig { layers: 2, dims, dtype, layout: None, quantization }
}

fn quantizations(dtype: KvDtype) -> Vec<Quantization> {
    match dtype {
        KvDtype::Fp8 => vec![Quantization::None, Quantization::Scalar { k: 0.5, v: 0.25 }, Quantization::PerToken],
        KvDtype::Mxfp4 => vec![Quantization::Block],
        _ => vec![Quantization::None],
    }
}

#[test]
fn a_cache_writes_copies_and_gathers_by_layer() -> Result<()> {
    let mut rng = StdRng::seed_from_u64(23);
    for dtype in DTYPES {
        for quantization in quantizations(dtype) {
            let cache = PagedKvCache::new(config(dtype, quantization), &CPU)?;
            let dims = cache.config().dims;
            let mut bytes = 0;
            for layer in 0..2 {
                let LayerCache { key, value, k_scale, v_scale } = cache.layer(layer)?;
                let paged = [k_scale, v_scale].into_iter().filter_map(|s| if let KvScale::Tensor(t) = s { Some(t) } else { None });
                bytes += [key, value].into_iter().chain(paged).map(|t| t.elem_count() * t.dtype().size_in_bytes()).sum::<usize>();
            }
            assert_eq!(bytes, cache.config().page_bytes()? * dims.pages);
            let (k, v) = (new_tokens(&mut rng, 16, dims, DType::F32, false), new_tokens(&mut rng, 16, dims, DType::F32, false));
            cache.write(1, &k, &v, &Tensor::arange(16i64, 32, &CPU)?)?;
            let (k1, v1) = cache.gather(1, &[1], 16)?;
            let worst = |a: &Tensor, b: &Tensor| (a - b)?.abs()?.max_all()?.to_scalar::<f32>();
            let limit = if dtype == KvDtype::Mxfp4 { 4.0 } else { 1.1 };
            assert!(worst(&k, &k1)? < limit && worst(&v, &v1)? < limit && worst(&k1, &k1.zeros_like()?)? > 1.0);
            // In order: 1 -> 3, then 3 (already 1's content) -> 0, then the blank 2 -> 1.
            cache.copy_pages(&[(1, 3), (3, 0), (2, 1)])?;
            for page in [0, 3] {
                let (k, v) = cache.gather(1, &[page], 16)?;
                assert_eq!((worst(&k, &k1)?, worst(&v, &v1)?), (0.0, 0.0), "{dtype:?}");
            }
            for (layer, page) in [(1, 1), (1, 2), (0, 0), (0, 3)] {
                assert_eq!(worst(&cache.gather(layer, &[page], 16)?.0, &k1.zeros_like()?)?, 0.0);
            }
            assert!(cache.copy_pages(&[(0, 1), (0, 4)]).unwrap_err().to_string().contains("(0, 4) at index 1 in a cache of 4 pages"));
            assert!(cache.write(2, &k, &v, &Tensor::arange(0i64, 16, &CPU)?).unwrap_err().to_string().contains("layer: 2"));
        }
    }
    Ok(())
}

#[test]
fn page_copies_move_bytes_in_every_form() {
    let mut rng = StdRng::seed_from_u64(24);
    for layout in CacheLayout::ALL {
        for dtype in DTYPES {
            let dims = CacheDims { pages: 5, page_size: 16, kv_heads: 2, head_dim: 32 };
            for kind in 0..3 {
                if layout.check(dims, dtype).is_err() {
                    continue;
                }
                let (key, value) = views(&mut rng, kind, &layout.key_shape(dims, dtype), &layout.value_shape(dims, dtype), dtype.dtype());
                let cache = LayerCache { key, value, k_scale: scales(&mut rng, dims, dtype, 2), v_scale: scales(&mut rng, dims, dtype, 0) };
                let mut expected = [storage_bits(&cache.key), storage_bits(&cache.value)];
                let shared = kind == 1 && layout.key_shape(dims, dtype) == layout.value_shape(dims, dtype);
                let pairs = [(0, 2), (2, 4), (3, 3), (1, 0)];
                for (side, tensor) in [&cache.key, &cache.value].into_iter().enumerate() {
                    let places = places(tensor, layout, dims, side == 0);
                    let page = places.len() / dims.pages;
                    let target = if shared { 0 } else { side };
                    for (src, dst) in pairs {
                        for i in 0..page {
                            expected[target][places[dst * page + i]] = expected[target][places[src * page + i]];
                        }
                    }
                }
                if shared {
                    expected[1] = expected[0].clone();
                }
                copy_pages(&cache, layout, &pairs.map(|(s, d)| (s as u32, d as u32))).unwrap();
                assert!(
                    storage_bits(&cache.key) == expected[0] && storage_bits(&cache.value) == expected[1],
                    "{layout:?} {dtype:?} {kind}"
                );
            }
        }
    }
}

#[test]
fn what_is_not_finite_is_not_hidden() -> Result<()> {
    let dims = CacheDims { pages: 1, page_size: 4, kv_heads: 1, head_dim: 64 };
    for (dtype, quantization, nan_values, inf_values) in [
        (KvDtype::Fp8, Quantization::PerToken, 1, 64),
        (KvDtype::Mxfp4, Quantization::Block, 32, 32),
        (KvDtype::Fp8, Quantization::None, 1, 0),
    ] {
        let cache = PagedKvCache::new(CacheConfig { layers: 1, dims, dtype, layout: None, quantization }, &CPU)?;
        let mut data = vec![1f32; 2 * 64];
        (data[5], data[64 + 40]) = (f32::NAN, f32::INFINITY);
        let k = Tensor::from_vec(data, (2, 1, 64), &CPU)?;
        cache.write(0, &k, &k, &Tensor::new(&[0i64, 1], &CPU)?)?;
        let rows = cache.gather(0, &[0], 2)?.0.to_vec3::<f32>()?;
        let count = |row: &[f32]| row.iter().filter(|v| v.is_nan()).count();
        assert_eq!((count(&rows[0][0]), count(&rows[1][0])), (nan_values, inf_values), "{dtype:?} {quantization:?}");
        assert_eq!(rows[0][0][63], 1.0);
    }
    Ok(())
}

#[test]
fn wrong_writes_are_refused_before_the_first_byte() -> Result<()> {
    let cache = PagedKvCache::new(config(KvDtype::F32, Quantization::None), &CPU)?;
    let (layer, layout) = (cache.layer(0)?.clone(), cache.layout());
    let k = Tensor::ones((3, 2, 64), DType::F32, &CPU)?;
    let slots = Tensor::new(&[0i64, 1, 2], &CPU)?;
    let with = |key: &Tensor, value: &Tensor, k_scale: KvScale| LayerCache {
        key: key.clone(),
        value: value.clone(),
        k_scale,
        v_scale: KvScale::None,
    };
    let fp8 = PagedKvCache::new(config(KvDtype::Fp8, Quantization::None), &CPU)?.layer(0)?.clone();
    let mxfp4 = PagedKvCache::new(config(KvDtype::Mxfp4, Quantization::Block), &CPU)?.layer(0)?.clone();
    let per_token = KvScale::Tensor(Tensor::zeros((4, 2, 16), DType::F32, &CPU)?);
    let short = Tensor::ones((3, 2, 32), DType::F32, &CPU)?;
    let transposed = Tensor::ones((3, 64, 2), DType::F32, &CPU)?.transpose(1, 2)?;
    let repeated = Tensor::zeros((1, 16, 2, 64), DType::F32, &CPU)?.broadcast_as((4, 16, 2, 64))?;
    let heads_last = Tensor::zeros((4, 16, 64, 2), DType::F32, &CPU)?.transpose(2, 3)?;
    let cases: Vec<(&str, Result<()>)> = vec![
        ("k: [tokens, 2, 64] goes with this cache, got [3, 2, 32]", reshape_and_cache(&short, &k, &slots, &layer, layout)),
        ("v: [tokens, 2, 64] goes with this cache, got [3, 2, 32]", reshape_and_cache(&k, &short, &slots, &layer, layout)),
        ("v: 2 tokens beside k's 3", reshape_and_cache(&k, &k.narrow(0, 0, 2)?, &slots, &layer, layout)),
        ("k: the shape is [tokens, kv_heads, head_dim]", reshape_and_cache(&k.flatten_all()?, &k, &slots, &layer, layout)),
        ("v: the dtype is F32, F16 or BF16, got F64", reshape_and_cache(&k, &k.to_dtype(DType::F64)?, &slots, &layer, layout)),
        ("k: head_dim is contiguous", reshape_and_cache(&transposed, &k, &slots, &layer, layout)),
        ("slot_mapping: I64 [3]", reshape_and_cache(&k, &k, &slots.narrow(0, 0, 2)?, &layer, layout)),
        ("slot_mapping: I64 [3]", reshape_and_cache(&k, &k, &slots.to_dtype(DType::U32)?, &layer, layout)),
        (
            "slot 64 of token 2 in a cache of 64 slots (4 pages of 16)",
            reshape_and_cache(&k, &k, &Tensor::new(&[0i64, 63, 64], &CPU)?, &layer, layout),
        ),
        ("slot 9223372036854775807", reshape_and_cache(&k, &k, &Tensor::new(&[0i64, 1, i64::MAX], &CPU)?, &layer, layout)),
        ("value_cache: ", reshape_and_cache(&k, &k, &slots, &with(&layer.key, &fp8.value, KvScale::None), layout)),
        ("value_cache: is the same memory", reshape_and_cache(&k, &k, &slots, &with(&layer.key, &layer.key, KvScale::None), layout)),
        ("key_cache: elements of", reshape_and_cache(&k, &k, &slots, &with(&repeated, &layer.value, KvScale::None), layout)),
        (
            "key_cache: the last dim is contiguous",
            reshape_and_cache(&k, &k, &slots, &with(&heads_last, &layer.value, KvScale::None), layout),
        ),
        ("key_cache: ", reshape_and_cache(&k, &k, &slots, &with(&layer.key.flatten_all()?, &layer.value, KvScale::None), layout)),
        (
            "k_scale: a scale per token goes with an FP8 cache",
            reshape_and_cache(&k, &k, &slots, &with(&layer.key, &layer.value, per_token.clone()), layout),
        ),
        (
            "k_scale: a scale is finite and not 0, got NaN",
            reshape_and_cache(&k, &k, &slots, &with(&fp8.key, &fp8.value, KvScale::Scalar(f32::NAN)), layout),
        ),
        (
            "k_scale: a scale is finite and not 0, got 0",
            reshape_and_cache(&k, &k, &slots, &with(&fp8.key, &fp8.value, KvScale::Scalar(0.0)), layout),
        ),
        ("k_scale: F32 [3] is neither", {
            let scale = KvScale::Tensor(Tensor::ones(3, DType::F32, &CPU)?);
            reshape_and_cache(&k, &k, &slots, &with(&fp8.key, &fp8.value, scale), layout)
        }),
        (
            "k_scale: an MXFP4 cache needs its U8 block scales",
            reshape_and_cache(&k, &k, &slots, &with(&mxfp4.key, &mxfp4.value, KvScale::None), layout),
        ),
        (
            "k_scale: U8 block scales go with an MXFP4 cache",
            reshape_and_cache(&k, &k, &slots, &with(&fp8.key, &fp8.value, mxfp4.k_scale.clone()), layout),
        ),
    ];
    for (expected, result) in cases {
        let error = result.expect_err(expected).to_string();
        assert!(error.contains(expected), "{error:?} should contain {expected:?}");
    }
    let own_slots = layer.key.narrow(0, 0, 1)?.squeeze(0)?.narrow(0, 0, 3)?;
    for (name, k, v) in [("k", &own_slots, &k), ("v", &k, &own_slots)] {
        let error = reshape_and_cache(k, v, &slots, &layer, layout).unwrap_err().to_string();
        assert!(error.contains(&format!("{name}: shares its storage with key_cache")), "{error}");
    }
    for tensor in [&layer.key, &layer.value, &fp8.key, &fp8.value, &mxfp4.key] {
        assert!(storage_bits(tensor).iter().all(|&bits| bits == 0), "a refused write wrote");
    }
    assert!(gather(&layer, layout, &[0, 4], 17).unwrap_err().to_string().contains("page id 4 at index 1 in a cache of 4 pages"));
    assert!(gather(&layer, layout, &[0, 4], 16).is_ok(), "pages past the length are not looked at");
    assert!(gather(&layer, layout, &[0], 17).unwrap_err().to_string().contains("2 pages of 16, got 1"));
    Ok(())
}

#[test]
fn impossible_caches_are_refused() {
    let base = config(KvDtype::Bf16, Quantization::None);
    let dims = |change: fn(&mut CacheDims)| {
        let mut config = base.clone();
        change(&mut config.dims);
        config
    };
    for (expected, config) in [
        ("layers: at least 1", CacheConfig { layers: 0, ..base.clone() }),
        ("pages: at least 1", dims(|d| d.pages = 0)),
        ("page_size: at least 1", dims(|d| d.page_size = 0)),
        ("kv_heads: at least 1", dims(|d| d.kv_heads = 0)),
        ("pages: page ids are 31-bit", dims(|d| d.pages = 1 << 31)),
        ("head_dim: a multiple of 8 up to 1024, got 100", dims(|d| d.head_dim = 100)),
        ("head_dim: a multiple of 8 up to 1024, got 1152921504606846976", dims(|d| d.head_dim = 1 << 60)),
        ("page_size: at most 1024, got 1025", dims(|d| d.page_size = 1025)),
        ("address space", dims(|d| d.kv_heads = 1 << 60)),
        ("address space", dims(|d| (d.pages, d.kv_heads) = (1 << 30, 1 << 30))),
        ("no memory for", dims(|d| (d.pages, d.kv_heads) = (1 << 20, 1 << 24))),
        (
            "layout: vllm needs a page_size that 8 divides, got 12",
            CacheConfig { layout: Some(CacheLayout::Vllm), ..dims(|d| d.page_size = 12) },
        ),
        ("Block does not go with bf16", CacheConfig { quantization: Quantization::Block, ..base.clone() }),
        ("quantized by Block", config(KvDtype::Mxfp4, Quantization::PerToken)),
        ("scales are finite and above 0", config(KvDtype::Fp8, Quantization::Scalar { k: 1.0, v: 0.0 })),
    ] {
        let error = PagedKvCache::new(config, &CPU).map(|_| ()).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error:?} should contain {expected:?}");
    }
}

#[test]
fn sizes_past_the_address_space_are_errors() {
    for (dtype, quantization, head_dim) in
        [(KvDtype::Mxfp4, Quantization::Block, usize::MAX / 4), (KvDtype::Fp8, Quantization::PerToken, usize::MAX / 8)]
    {
        let base = config(dtype, quantization);
        let dims = CacheDims { head_dim, ..base.dims };
        assert!(CacheConfig { dims, ..base }.page_bytes().is_err());
    }
    for (layout, dtype, shape) in
        [(CacheLayout::Nhd, KvDtype::Mxfp4, &[0, 8, 1, 1 << 63][..]), (CacheLayout::Vllm, KvDtype::F32, &[0, 1, 1 << 62, 8, 4])]
    {
        let error = layout.dims_of_key(shape, dtype).unwrap_err().to_string();
        assert!(error.contains("key_cache") && error.contains("address space"), "{error}");
    }
}
