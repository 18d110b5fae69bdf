//! Brings queries, keys and values into the units the products read: in place where the cache already holds them so, else through scratch.

use half::{bf16, f16};

use super::ahead::Stretches;
use super::gemm::{BLOCK, KeyBlock, Stored, StoredRows};
use super::isa::Isa;
use super::job::{KvData, KvView, QueryData, QueryView, Scale};
use super::math::Math;
use super::pages::{Segment, Segments};
use super::workspace::{BLOCKS, STEP, Workspace};

/// Keys of a step as the score product reads them.
pub(super) struct Keys {
    pub chunks: usize,
    pub chunk_units: usize,
    pub blocks: [KeyBlock; BLOCKS],
}

/// A run of values: unit u at `data + u * stride` bytes, dims contiguous.
#[derive(Clone, Copy)]
pub(super) struct Run {
    /// First token, counted from the step's begin.
    pub first: usize,
    pub units: usize,
    pub data: *const u8,
    pub stride: usize,
}

/// Values of a step: at most one run a key block and page boundary.
pub(super) struct Values {
    runs: [Run; BLOCKS + 1],
    len: usize,
    /// The one run's values, where its units are still to be made.
    pub stored: Option<StoredRows>,
}

impl Values {
    pub fn iter(&self) -> impl Iterator<Item = Run> + '_ {
        self.runs[..self.len].iter().copied()
    }
}

/// Whether stored elements are what `A` computes with.
fn native<A: Math>(data: &KvData<'_>) -> bool {
    matches!((data, A::PAIR), (KvData::F32(_), 1) | (KvData::Bf16(_), 2))
}

/// Address of stored element `at`.
#[inline(always)]
fn address(data: &KvData<'_>, at: usize) -> *const u8 {
    match data {
        KvData::F32(x) => x.as_ptr().wrapping_add(at).cast(),
        KvData::F16(x) => x.as_ptr().wrapping_add(at).cast(),
        KvData::Bf16(x) => x.as_ptr().wrapping_add(at).cast(),
        KvData::Fp8(x) => x.as_ptr().wrapping_add(at).cast(),
        KvData::Mxfp4(x) => x.as_ptr().wrapping_add(at),
    }
}

/// Elements `at..at + n` as `A`'s elements; `scales` are the E8M0 scales of an MXFP4 run.
#[inline(always)]
unsafe fn decode<I: Isa, A: Math>(data: &KvData<'_>, at: usize, scales: *const u8, n: usize, to: *mut u8) {
    let from = address(data, at);
    unsafe {
        match (data, A::PAIR) {
            (KvData::F32(_), 1) => from.copy_to_nonoverlapping(to, 4 * n),
            (KvData::F16(_), 1) => I::f16_to_f32(from.cast(), to.cast(), n),
            (KvData::Bf16(_), 1) => I::bf16_to_f32(from.cast(), to.cast(), n),
            (KvData::Fp8(_), 1) => I::fp8_to_f32(from, to.cast(), n),
            (KvData::Mxfp4(_), 1) => I::mxfp4_to_f32(from, scales, to.cast(), n),
            (KvData::Bf16(_), _) => from.copy_to_nonoverlapping(to, 2 * n),
            (KvData::Fp8(_), _) => I::fp8_to_bf16(from, to.cast(), n),
            (KvData::Mxfp4(_), _) => I::mxfp4_to_bf16(from, scales, to.cast(), n),
            (KvData::F32(_) | KvData::F16(_), _) => unreachable!("pairs hold no F32 or F16"),
        }
    }
}

/// The E8M0 scales of one token, null where there are none.
#[inline(always)]
fn block_scales(scale: &Scale<'_>, head: usize, page: usize, slot: usize) -> *const u8 {
    match *scale {
        Scale::Block { data, start, page_stride, head_stride, token_stride } => {
            data.as_ptr().wrapping_add(start + page * page_stride + head * head_stride + slot * token_stride)
        }
        _ => std::ptr::null(),
    }
}

/// The cache of one KV head.
pub(super) struct Head<'a, 'b> {
    pub view: &'a KvView<'b>,
    pub head: usize,
    pub head_dim: usize,
    pub page_size: usize,
}

impl Head<'_, '_> {
    fn base(&self, segment: &Segment) -> usize {
        let s = &self.view.strides;
        s.start + segment.page * s.page + self.head * s.head
    }

    /// Offset of dim 0 of the segment's token `i`.
    #[inline(always)]
    fn token(&self, segment: &Segment, i: usize) -> usize {
        let (s, slot) = (&self.view.strides, segment.slot + i);
        let within = if slot < s.token_chunk {
            slot * s.token
        } else {
            slot / s.token_chunk * s.token_chunk_stride + slot % s.token_chunk * s.token
        };
        self.base(segment) + within
    }

    /// Where the segment's elements lie.
    pub fn stretches(&self, segment: &Segment) -> Stretches {
        let s = &self.view.strides;
        let data = address(&self.view.data, self.token(segment, 0));
        let bytes = |elements: usize| match self.view.data {
            KvData::F32(_) => 4 * elements,
            KvData::F16(_) | KvData::Bf16(_) => 2 * elements,
            KvData::Fp8(_) | KvData::Mxfp4(_) => elements,
        };
        let row = if matches!(self.view.data, KvData::Mxfp4(_)) { self.head_dim / 2 } else { self.head_dim };
        if self.rows_are_contiguous() {
            Stretches::new(data, segment.tokens, bytes(row), bytes(s.token))
        } else if s.dim_chunk != usize::MAX {
            Stretches::new(data, self.head_dim / s.dim_chunk, bytes(segment.tokens * s.dim_chunk), bytes(s.dim_chunk_stride))
        } else if s.token_chunk != usize::MAX {
            let pieces = segment.tokens.div_ceil(s.token_chunk);
            Stretches::new(data, pieces, bytes(self.head_dim * s.token_chunk), bytes(s.token_chunk_stride))
        } else {
            Stretches::new(data, self.head_dim, bytes(segment.tokens), bytes(s.dim))
        }
    }

    /// Whether each token's dims are contiguous.
    fn rows_are_contiguous(&self) -> bool {
        self.view.strides.dim == 1 && self.view.strides.dim_chunk >= self.head_dim
    }

    #[inline(always)]
    unsafe fn decode_row<I: Isa, A: Math>(&self, segment: &Segment, i: usize, to: *mut u8) {
        let scales = block_scales(&self.view.scale, self.head, segment.page, segment.slot + i);
        unsafe { decode::<I, A>(&self.view.data, self.token(segment, i), scales, self.head_dim, to) }
    }

    /// Keys of a step of `tokens`. Blocks that are not whole, or not in one page, or not in `A`'s elements go through `work.keys`.
    #[inline(always)]
    pub unsafe fn keys<I: Isa, A: Math>(&self, segments: &Segments, tokens: usize, work: &Workspace) -> Keys {
        let s = &self.view.strides;
        let x = if self.rows_are_contiguous() { self.head_dim } else { s.dim_chunk };
        let scratch = |block: usize| KeyBlock {
            data: unsafe { work.keys.add(block * BLOCK * x * A::BYTES) },
            token: x * A::BYTES,
            chunk: STEP * x * A::BYTES,
        };
        let mut keys = Keys { chunks: self.head_dim / x, chunk_units: x / A::PAIR, blocks: std::array::from_fn(scratch) };
        let in_place = native::<A>(&self.view.data);
        for segment in segments.iter() {
            let mut i = 0;
            while i < segment.tokens {
                let at = segment.first + i;
                if in_place && at.is_multiple_of(BLOCK) && i + BLOCK <= segment.tokens {
                    let data = address(&self.view.data, self.token(&segment, i));
                    keys.blocks[at / BLOCK] = KeyBlock { data, token: s.token * A::BYTES, chunk: s.dim_chunk_stride * A::BYTES };
                    i += BLOCK;
                    continue;
                }
                let n = (BLOCK - at % BLOCK).min(segment.tokens - i);
                unsafe { self.stage_keys::<I, A>(&segment, i, n, x, work.keys.add(at * x * A::BYTES)) };
                i += n;
            }
        }
        debug_assert!(tokens <= STEP);
        keys
    }

    /// Decodes `n` tokens' keys from the segment's token `i` on, in chunks of `x` dims.
    #[inline(always)]
    unsafe fn stage_keys<I: Isa, A: Math>(&self, segment: &Segment, i: usize, n: usize, x: usize, to: *mut u8) {
        let s = &self.view.strides;
        unsafe {
            if x == self.head_dim {
                for t in 0..n {
                    self.decode_row::<I, A>(segment, i + t, to.add(t * x * A::BYTES));
                }
                return;
            }
            for chunk in 0..self.head_dim / x {
                let from = self.token(segment, i) + chunk * s.dim_chunk_stride;
                let to = to.add(chunk * STEP * x * A::BYTES);
                if s.token == x {
                    decode::<I, A>(&self.view.data, from, std::ptr::null(), n * x, to);
                    continue;
                }
                for t in 0..n {
                    decode::<I, A>(&self.view.data, from + t * s.token, std::ptr::null(), x, to.add(t * x * A::BYTES));
                }
            }
        }
    }

    /// Values of a step of `tokens`; `staged` asks for a copy even where the cache could be read in place.
    #[inline(always)]
    pub unsafe fn values<I: Isa, A: Math>(&self, segments: &Segments, tokens: usize, staged: bool, work: &Workspace) -> Values {
        let stride = work.width * 4;
        let whole = Run { first: 0, units: tokens.div_ceil(A::PAIR), data: work.values.cast(), stride };
        let mut values = Values { runs: [whole; BLOCKS + 1], len: 1, stored: None };
        let in_place = A::PAIR == 1 && native::<A>(&self.view.data) && self.rows_are_contiguous() && self.head_dim == work.width;
        unsafe {
            if in_place && !staged && self.page_size >= BLOCK {
                values.len = 0;
                for segment in segments.iter() {
                    let data = address(&self.view.data, self.token(&segment, 0));
                    values.runs[values.len] =
                        Run { first: segment.first, units: segment.tokens, data, stride: self.view.strides.token * 4 };
                    values.len += 1;
                }
            } else if !staged && let Some(kind) = self.stored::<I, A>() {
                values.stored = Some(self.stored_rows(kind, segments, work));
            } else if self.rows_are_contiguous() {
                self.stage_rows::<I, A>(segments, tokens, work);
            } else {
                self.stage_columns::<I, A>(segments, tokens, work);
            }
        }
        values
    }

    /// What `I` can multiply straight from the cache's rows, if this cache is that.
    fn stored<I: Isa, A: Math>(&self) -> Option<Stored> {
        if A::PLAIN || !I::WEIGHS_STORED || !self.rows_are_contiguous() || !self.head_dim.is_multiple_of(64) {
            return None;
        }
        match (&self.view.data, A::PAIR) {
            (KvData::F16(_), 1) => Some(Stored::F16),
            (KvData::Bf16(_), 2) => Some(Stored::Bf16),
            (KvData::Fp8(_), 2) => Some(Stored::Fp8),
            (KvData::Mxfp4(_), 2) => Some(Stored::Mxfp4),
            _ => None,
        }
    }

    /// The rows of a step's tokens, and zeros for the rest.
    fn stored_rows(&self, kind: Stored, segments: &Segments, work: &Workspace) -> StoredRows {
        let mut stored = StoredRows { kind, rows: [work.zeros; STEP + 1], scales: [std::ptr::null(); STEP + 1] };
        for segment in segments.iter() {
            for i in 0..segment.tokens {
                let t = segment.first + i;
                stored.rows[t] = address(&self.view.data, self.token(&segment, i));
                stored.scales[t] = block_scales(&self.view.scale, self.head, segment.page, segment.slot + i);
            }
        }
        stored
    }

    /// Values whose dims are contiguous: rows, two of them side by side where units are pairs.
    #[inline(always)]
    unsafe fn stage_rows<I: Isa, A: Math>(&self, segments: &Segments, tokens: usize, work: &Workspace) {
        unsafe {
            let mut even = work.zeros;
            for segment in segments.iter() {
                for i in 0..segment.tokens {
                    let t = segment.first + i;
                    let to = work.values.add(t / A::PAIR * work.width);
                    if A::PAIR == 1 {
                        self.decode_row::<I, A>(&segment, i, to.cast());
                        continue;
                    }
                    let row = if native::<A>(&self.view.data) {
                        address(&self.view.data, self.token(&segment, i))
                    } else {
                        let room = work.staged.add(t % 2 * self.head_dim * A::BYTES);
                        self.decode_row::<I, A>(&segment, i, room);
                        room.cast_const()
                    };
                    if t % 2 == 0 {
                        even = row;
                    }
                    if t % 2 == 1 || t + 1 == tokens {
                        let odd = if t % 2 == 1 { row } else { work.zeros };
                        I::interleave(even.cast(), odd.cast(), to, self.head_dim);
                    }
                }
            }
        }
    }

    /// Values whose tokens are neighbours, chunk by chunk: transposed.
    #[inline(always)]
    unsafe fn stage_columns<I: Isa, A: Math>(&self, segments: &Segments, tokens: usize, work: &Workspace) {
        let s = &self.view.strides;
        for segment in segments.iter() {
            let mut i = 0;
            while i < segment.tokens {
                let slot = segment.slot + i;
                let left = if s.token_chunk == usize::MAX { segment.tokens } else { s.token_chunk - slot % s.token_chunk };
                let n = left.min(segment.tokens - i);
                unsafe { self.stage_piece::<I, A>(self.token(&segment, i), segment.first + i, n, work) };
                i += n;
            }
        }
        if A::PAIR == 2 && tokens % 2 == 1 {
            // The last pair's second token is not owned.
            for d in 0..self.head_dim {
                unsafe { *work.values.add(tokens / 2 * work.width + d) &= 0xffff }
            }
        }
    }

    /// `n` neighbouring tokens whose first is at element `from` and is token `t` of the step.
    #[inline(always)]
    unsafe fn stage_piece<I: Isa, A: Math>(&self, from: usize, t: usize, n: usize, work: &Workspace) {
        let (data, stride) = (&self.view.data, self.view.strides.dim);
        let to = unsafe { work.values.add(t / A::PAIR * work.width) };
        let room = n.next_multiple_of(A::PAIR);
        unsafe {
            if self.view.strides.token != 1 || !t.is_multiple_of(A::PAIR) {
                self.gather::<I, A>(from, t, n, work);
            } else if native::<A>(data) && n.is_multiple_of(A::PAIR) {
                I::transpose(address(data, from).cast(), stride * A::BYTES, to, work.width, self.head_dim, n / A::PAIR);
            } else {
                if stride == room && n == room {
                    decode::<I, A>(data, from, std::ptr::null(), n * self.head_dim, work.staged);
                } else {
                    for d in 0..self.head_dim {
                        decode::<I, A>(data, from + d * stride, std::ptr::null(), n, work.staged.add(d * room * A::BYTES));
                    }
                }
                I::transpose(work.staged.cast(), room * A::BYTES, to, work.width, self.head_dim, room / A::PAIR);
            }
        }
    }

    /// Element by element.
    unsafe fn gather<I: Isa, A: Math>(&self, from: usize, t: usize, n: usize, work: &Workspace) {
        let s = &self.view.strides;
        let values = work.values.cast::<u8>();
        for i in 0..n {
            let unit = (t + i) / A::PAIR * work.width * 4 + (t + i) % A::PAIR * A::BYTES;
            for d in 0..self.head_dim {
                unsafe { decode::<I, A>(&self.view.data, from + i * s.token + d * s.dim, std::ptr::null(), 1, values.add(unit + 4 * d)) }
            }
        }
    }
}

/// How many BF16 terms hold a query element to the accuracy its dtype deserves; 1 in f32.
pub(super) fn query_terms<A: Math>(query: &QueryView<'_>) -> usize {
    match query.data {
        QueryData::Bf16(_) => 1,
        _ => A::PAIR,
    }
}

/// Whether queries are packed with two units side by side. Chunks of keys are 16 bytes stored, so they hold an even number of units.
pub(super) fn twins<I: Isa, A: Math>(head_dim: usize, rows: usize) -> bool {
    !A::PLAIN && I::twins(rows) && (head_dim / A::PAIR).is_multiple_of(2)
}

/// Packs `count` flattened (query, head-in-group) rows as units `[terms][units][rows]`, or `[terms][units / 2][rows][2]` (see [`twins`]);
/// padding rows are zeros.
#[inline(always)]
pub(super) unsafe fn pack_query<I: Isa, A: Math>(
    query: &QueryView<'_>,
    place: impl Fn(usize) -> usize,
    count: usize,
    head_dim: usize,
    work: &Workspace,
) {
    let units = head_dim / A::PAIR;
    for term in 0..query_terms::<A>(query) {
        unsafe {
            let staged = work.staged.cast::<u32>();
            for r in 0..work.rows {
                let to = staged.add(r * units);
                if r < count {
                    stage_query::<A>(query, place(r), term, head_dim, to);
                } else {
                    to.write_bytes(0, units);
                }
            }
            let to = work.query.add(term * units * work.rows);
            if !twins::<I, A>(head_dim, work.rows) {
                I::transpose(staged, units * 4, to, work.rows, work.rows, units);
                continue;
            }
            for twin in 0..units / 2 {
                for r in 0..work.rows {
                    *to.cast::<[u32; 2]>().add(twin * work.rows + r) = *staged.add(r * units).cast::<[u32; 2]>().add(twin);
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn stage_query<A: Math>(query: &QueryView<'_>, at: usize, term: usize, n: usize, to: *mut u32) {
    unsafe {
        match (&query.data, A::PAIR) {
            (QueryData::F32(x), 1) => x[at..at + n].as_ptr().copy_to_nonoverlapping(to.cast(), n),
            (QueryData::F16(x), 1) => x[at..at + n].iter().enumerate().for_each(|(i, x)| *to.cast::<f32>().add(i) = x.to_f32()),
            (QueryData::Bf16(x), 1) => x[at..at + n].iter().enumerate().for_each(|(i, x)| *to.cast::<f32>().add(i) = x.to_f32()),
            (QueryData::Bf16(x), _) => x[at..at + n].as_ptr().copy_to_nonoverlapping(to.cast(), n),
            (QueryData::F32(x), _) => {
                x[at..at + n].iter().enumerate().for_each(|(i, &x)| *to.cast::<bf16>().add(i) = bf16_term(x, term));
            }
            (QueryData::F16(x), _) => {
                x[at..at + n].iter().enumerate().for_each(|(i, x): (usize, &f16)| *to.cast::<bf16>().add(i) = bf16_term(x.to_f32(), term));
            }
        }
    }
}

/// Term 0 of `x` is the nearest BF16, term 1 the nearest to what that leaves.
#[inline(always)]
fn bf16_term(x: f32, term: usize) -> bf16 {
    let high = bf16::from_f32(x);
    match term {
        0 => high,
        // An overflow or NaN has no remainder.
        _ if !high.is_finite() => bf16::ZERO,
        _ => bf16::from_f32(x - high.to_f32()),
    }
}
