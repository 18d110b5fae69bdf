//! One workgroup of a tile kernel on the simulator: device memory with random contents, arguments, and the trace of its waves.

use anyhow::{Context, Result, bail};
use candle::DType;
use candle_paged_attn::cache::{CacheLayout, KvDtype};
use candle_paged_attn::jit::{Compiler, JitSettings};
use candle_paged_attn::plan::TILE_TOKENS;
use candle_paged_attn::registry::{KernelKey, ScaleMode, Selection};
use candle_paged_attn::rocm::specialize;
use cdna_profile::{Counts, Static, Tag, Tags};
use cdna_sim::{KernelInfo, Launch, Memory, Module, Trace};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use testkit::arguments::Arguments;

/// A compiled kernel.
pub struct Kernel {
    pub selection: Selection,
    pub module: Module,
    name: String,
}

/// What one workgroup did.
pub struct Run {
    pub trace: Trace,
    pub tags: Tags,
    pub counts: Counts,
}

impl Kernel {
    /// Compiles a selection, or takes it from the cache, with the switches `off` off.
    pub fn compile(selection: Selection, off: &[&str]) -> Result<Self> {
        let mut specialization = specialize::tile(&selection)?;
        specialization.defines.extend(off.iter().map(|name| (name.to_string(), "0".to_string())));
        let object = Compiler::new(JitSettings::default()).code_object(&specialization)?;
        let module = Module::load(&object).with_context(|| specialization.kernel.clone())?;
        Ok(Self { selection, module, name: specialization.kernel })
    }

    pub fn info(&self) -> Result<&KernelInfo> {
        Ok(self.module.kernel(&self.name)?)
    }

    pub fn static_counts(&self) -> Result<Static> {
        Ok(Static::of(&self.module.program, self.info()?, &self.module.object.kernels))
    }

    /// Runs a workgroup whose task is `tiles` whole tiles of one sequence with `query_len` new tokens.
    pub fn run(&self, tiles: usize, query_len: usize) -> Result<Run> {
        let mut call = Call::new(&self.selection.key);
        let args = call.arguments(&self.selection, tiles, query_len)?;
        let grid = [1, 1, self.selection.row_groups as u32];
        let block = [self.selection.threads as u32, 1, 1];
        let launch = Launch { dynamic_lds: self.selection.staged_bytes, ..Launch::new(grid, block) };
        let (_, trace) = self.module.trace(&call.memory, self.info()?, &args, &launch, [0; 3])?;
        let counts = Counts::of_trace(&self.module.program, &trace, &call.tags);
        Ok(Run { trace, tags: call.tags, counts })
    }
}

/// Device memory of one call.
struct Call<'a> {
    key: &'a KernelKey,
    memory: Memory,
    tags: Tags,
    rng: StdRng,
}

impl<'a> Call<'a> {
    fn new(key: &'a KernelKey) -> Self {
        Self { key, memory: Memory::new(), tags: Tags::default(), rng: StdRng::seed_from_u64(1) }
    }

    fn upload(&mut self, tag: Tag, bytes: &[u8]) -> Result<u64> {
        let address = self.memory.upload(bytes).context("memory for the call")?;
        self.tags.name(address, bytes.len(), tag);
        Ok(address)
    }

    fn words(&mut self, tag: Tag, words: impl IntoIterator<Item = u32>) -> Result<u64> {
        let bytes: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
        self.upload(tag, &bytes)
    }

    /// Finite elements of moderate size in the dtype's encoding.
    fn elements(&mut self, tag: Tag, count: usize, encode: fn(&mut StdRng) -> u16, bytes: usize) -> Result<u64> {
        let rng = &mut self.rng;
        let data: Vec<u8> = (0..count).flat_map(|_| encode(rng).to_le_bytes().into_iter().take(bytes)).collect();
        self.upload(tag, &data)
    }

    fn cache(&mut self, tag: Tag, elements: usize) -> Result<u64> {
        match self.key.kv_dtype {
            KvDtype::Bf16 => self.elements(tag, elements, bf16, 2),
            KvDtype::F16 => self.elements(tag, elements, f16, 2),
            KvDtype::Fp8 => self.elements(tag, elements, fp8, 1),
            KvDtype::Mxfp4 => self.elements(tag, elements / 2, |rng| rng.random(), 1),
            KvDtype::F32 => bail!("the AMD kernels have no F32 cache"),
        }
    }

    /// Scales of `tokens` tokens, and their page stride.
    fn scales(&mut self, tag: Tag, tokens: usize) -> Result<(u64, usize)> {
        let key = self.key;
        match key.scales {
            ScaleMode::None | ScaleMode::Scalar => Ok((self.words(tag, [0.5f32.to_bits()])?, 0)),
            ScaleMode::PerToken => {
                let scales: Vec<u32> = (0..tokens).map(|_| self.rng.random_range(0.5f32..1.5).to_bits()).collect();
                Ok((self.words(tag, scales)?, key.page_size))
            }
            ScaleMode::Block => {
                let blocks = key.head_dim / 32;
                Ok((self.elements(tag, tokens * blocks, |rng| rng.random_range(124..128), 1)?, key.page_size * blocks))
            }
        }
    }

    /// The bytes of the kernel's arguments (`kernels/common/args.h`).
    fn arguments(&mut self, selection: &Selection, tiles: usize, query_len: usize) -> Result<Vec<u8>> {
        let key = self.key;
        let direct = key.flags.direct_output;
        let (dim, group) = (key.head_dim, key.group);
        let context = tiles * TILE_TOKENS;
        let pages = context.div_ceil(key.page_size).max(1);
        let rows = selection.row_groups * key.m_tiles * 16;
        let vectors = query_len * group;

        let work = self.words(Tag::Records, [0, 0, tiles as u32, 0])?;
        let lens = self.words(Tag::Records, [context as u32])?;
        let starts = self.words(Tag::Records, [0, query_len as u32])?;
        // Pages lie where they happen to: neighbours in the table are not neighbours in memory.
        let table: Vec<u32> = (0..pages).map(|page| ((page * 7 + 3) % pages) as u32).collect();
        let distinct = if pages.is_multiple_of(7) { (0..pages as u32).rev().collect() } else { table };
        let tables = self.words(Tag::PageIds, distinct)?;
        let q = match key.query_dtype {
            DType::BF16 => self.elements(Tag::Query, vectors * dim, bf16, 2)?,
            DType::F16 => self.elements(Tag::Query, vectors * dim, f16, 2)?,
            _ => {
                let values: Vec<u32> = (0..vectors * dim).map(|_| self.rng.random_range(-1f32..1.0).to_bits()).collect();
                self.words(Tag::Query, values)?
            }
        };
        let (statistics, reduce) = (self.upload(Tag::Output, &vec![0xff; rows * 8])?, self.words(Tag::Records, [0, 1])?);
        let tokens = pages * key.page_size;
        let cache = self.cache(Tag::Key, tokens * dim)?;
        let value = self.cache(Tag::Value, tokens * dim)?;
        let (k_scale, scale_page) = self.scales(Tag::KeyScales, tokens)?;
        let (v_scale, _) = self.scales(Tag::ValueScales, tokens)?;
        let out = self.upload(Tag::Output, &vec![0xff; rows.max(vectors) * dim * 4])?;

        // Elements of a page's head; bytes in an MXFP4 cache.
        let packed = if key.kv_dtype == KvDtype::Mxfp4 { 2 } else { 1 };
        let page = key.page_size * dim / packed;
        let token = if matches!(key.layout, CacheLayout::Nhd | CacheLayout::Hnd) { dim / packed } else { 1 };
        let scale_token = if key.scales == ScaleMode::Block { dim / 32 } else { 1 };

        let mut args = Arguments::default();
        args.u64(work).u64(tables).u64(q).u32(pages).u32(1).u32(group * dim).u32(dim);
        args.u64(if direct { reduce } else { statistics }).u64(cache);
        args.u64(value).u64(k_scale).u64(v_scale).u64(lens).u64(if key.ragged { starts } else { 0 });
        args.u64(out).u64(0).u64(pages as u64);
        for (page, token) in [(page, token), (page, token), (scale_page, scale_token), (scale_page, scale_token)] {
            args.u64(page as u64).u64(page as u64).u64(token as u64);
        }
        args.u64((group * dim) as u64).u64(dim as u64);
        args.f32((dim as f32).sqrt().recip() * std::f32::consts::LOG2_E).f32(30.0);
        args.u32(if key.windowed { context } else { 0 }).u32(query_len).u32(1).u32(pages).u32(rows).u32(query_len);
        Ok(args.0)
    }
}

fn bf16(rng: &mut StdRng) -> u16 {
    half::bf16::from_f32(rng.random_range(-1.0..1.0)).to_bits()
}

fn f16(rng: &mut StdRng) -> u16 {
    half::f16::from_f32(rng.random_range(-1.0..1.0)).to_bits()
}

/// A sign, a middling exponent, a mantissa: the same in both encodings up to a factor of 2.
fn fp8(rng: &mut StdRng) -> u16 {
    rng.random_range(0x20..0x40) | rng.random_range(0..2u16) << 7
}
