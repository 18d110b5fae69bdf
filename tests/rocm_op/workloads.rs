//! The minimax20 workloads with their whole contexts, against the CPU's F32 arithmetic (itself checked against float64). Tables are only as wide as
//! the contexts.

use candle::{DType, Device, Result, Tensor};
use candle_paged_attn::cache::{CacheDims, CacheLayout, KvDtype};
use candle_paged_attn::{DecodeOptions, KvScale, paged_decode_with_lse, rocm};
use float8::F8E4M3;
use half::bf16;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use testkit::reference::floats;
use testkit::workloads::{Fp8Scale, Workload, families};

use crate::support::*;

/// Elements that a cache repeats.
const BLOCK: usize = 1 << 20;

/// A call of a workload over a cache that has its pages and one more, in random order.
struct Call {
    q: Tensor,
    key: Tensor,
    value: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    options: DecodeOptions,
}

impl Call {
    fn new(workload: &Workload) -> Result<Self> {
        let mut rng = StdRng::seed_from_u64(1);
        let cpu = &Device::Cpu;
        let lens: Vec<u32> = workload.contexts().iter().map(|&tokens| tokens as u32).collect();
        let page_size = workload.page_size;
        let needs: Vec<usize> = lens.iter().map(|&len| (len as usize).div_ceil(page_size)).collect();
        let (pages, width) = (needs.iter().sum::<usize>() + 1, needs.iter().max().copied().unwrap_or(0) + 1);
        let mut free: Vec<u32> = (0..pages as u32).collect();
        free.shuffle(&mut rng);
        let mut ids = vec![u32::MAX; lens.len() * width];
        for (row, &need) in ids.chunks_mut(width).zip(&needs) {
            row[..need].copy_from_slice(&free.split_off(free.len() - need));
        }
        let dims = CacheDims { pages, page_size, kv_heads: workload.num_kv_heads, head_dim: workload.head_dim };
        let kv = workload.kv_dtype();
        let mut scale = || -> Result<KvScale> {
            let shape = (pages, dims.kv_heads, page_size);
            Ok(match workload.fp8_scale {
                None => KvScale::None,
                Some(Fp8Scale::Scalar) => KvScale::Scalar(rng.random_range(0.5..1.5)),
                Some(Fp8Scale::PerToken) => KvScale::Tensor(Tensor::rand(0.8f32, 1.25, shape, cpu)?),
            })
        };
        let (k_scale, v_scale) = (scale()?, scale()?);
        let layout = CacheLayout::Shuffled;
        let rows = (workload.batch * workload.query_len, workload.num_q_heads, workload.head_dim);
        Ok(Self {
            q: Tensor::randn(0f32, 1., rows, cpu)?.to_dtype(DType::BF16)?,
            key: cache(&layout.key_shape(dims, kv), kv)?,
            value: cache(&layout.value_shape(dims, kv), kv)?,
            block_tables: Tensor::from_vec(ids, (lens.len(), width), cpu)?,
            context_lens: Tensor::new(lens, cpu)?,
            options: DecodeOptions { layout, k_scale, v_scale, max_partitions: workload.max_partitions, ..DecodeOptions::default() },
        })
    }

    /// Worst relative L2 of a row.
    fn check(&self) -> Result<f64> {
        let Self { key, value, block_tables, context_lens, options, .. } = self;
        let (out, lse) = rocm::paged_decode(device(), &self.q, key, value, block_tables, context_lens, options)?;
        let (want, want_lse) = paged_decode_with_lse(&self.q.to_dtype(DType::F32)?, key, value, block_tables, context_lens, options)?;
        let row = out.dims()[1] * out.dims()[2];
        let (out, want) = (floats(&out)?, floats(&want)?);
        let error = |(got, want): (&[f64], &[f64])| {
            let square: f64 = got.iter().zip(want).map(|(g, w)| (g - w) * (g - w)).sum();
            (square / want.iter().map(|w| w * w).sum::<f64>()).sqrt()
        };
        let worst = out.chunks(row).zip(want.chunks(row)).map(error).fold(0.0, |worst: f64, e| if e.is_nan() { e } else { worst.max(e) });
        let (lse, want_lse) = (floats(&lse)?, floats(&want_lse)?);
        assert!(lse.iter().zip(&want_lse).all(|(got, want)| (got - want).abs() < 0.05), "LSE");
        Ok(worst)
    }
}

/// Normal values, repeated.
fn cache(shape: &[usize], kv: KvDtype) -> Result<Tensor> {
    let elements = shape.iter().product();
    let block: Vec<f32> = Tensor::randn(0f32, 1., BLOCK.min(elements), &Device::Cpu)?.to_vec1()?;
    match kv {
        KvDtype::Fp8 => repeated(block.into_iter().map(F8E4M3::from_f32).collect(), elements, shape),
        _ => repeated(block.into_iter().map(bf16::from_f32).collect(), elements, shape),
    }
}

fn repeated<T: candle::WithDType>(block: Vec<T>, elements: usize, shape: &[usize]) -> Result<Tensor> {
    Tensor::from_vec(block.iter().copied().cycle().take(elements).collect::<Vec<_>>(), shape, &Device::Cpu)
}

#[test]
fn minimax20() {
    let [minimax20, ..] = families().unwrap();
    for workload in &minimax20.workloads {
        let start = std::time::Instant::now();
        let worst = Call::new(workload).and_then(|call| call.check()).unwrap_or_else(|e| panic!("{}: {e}", workload.name));
        println!("{:<32} {worst:.2e} in {:.1} s", workload.name, start.elapsed().as_secs_f64());
        let bar = if workload.kv_dtype() == KvDtype::Fp8 { 0.08 } else { 8e-3 };
        assert!(worst <= bar, "{}: relative L2 {worst:.3e}", workload.name);
    }
}
