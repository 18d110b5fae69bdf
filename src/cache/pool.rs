//! [`PagePool`]: which pages belong to which sequence. Numbers only; the tensors are [`PagedKvCache`](super::PagedKvCache)'s.
//!
//! One step of a serving engine:
//! 1. [`PagePool::allocate_with_prefix`] for each request that joins; only the tokens after the shared prefix need computing.
//! 2. [`PagePool::append`] of each sequence's new tokens (a prompt chunk, a sampled token, or that and drafts to verify).
//! 3. [`PagedKvCache::copy_pages`](super::PagedKvCache::copy_pages) of the copies of every append, in order, before any write.
//! 4. The model runs: each layer writes k and v to the slots, then attends over the tables of [`PagePool::batch`].
//! 5. [`PagePool::truncate`] of drafts that were rejected, then [`PagePool::commit`].
//! 6. [`PagePool::free`] of sequences that are done.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use candle::{Result, bail};

use super::prefix::{NodeId, Parent, PrefixIndex};

/// A sequence of a [`PagePool`]. Never given out twice in one process; to any other pool it is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SeqId {
    /// Which pool of the process gave it out: no other pool takes it for one of its own.
    pool: u64,
    number: u64,
}

impl fmt::Display for SeqId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.number.fmt(f)
    }
}

/// Pools made by this process so far.
static POOLS: AtomicU64 = AtomicU64::new(0);

/// Stands in a table where a sequence has no page: past its end, or evicted behind a sliding window. Never a valid page id.
pub const NO_PAGE: u32 = u32::MAX;

/// What has to happen so that appended tokens can be written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Append {
    /// The slot of each appended token: `page * page_size + offset`.
    pub slots: Vec<i64>,
    /// Pages (src, dst) to copy first, in order: a shared last page gets a copy of its own before it is written.
    pub copies: Vec<(u32, u32)>,
}

/// Pages of a fixed number and size, shared by reference count.
///
/// - A sequence owns a reference to each of its pages. [`PagePool::fork`] and a found prefix share them; whoever appends to a shared,
///   partly filled last page gets a copy of it.
/// - A full page whose tokens are committed can be found by later sequences with the same tokens before and in it. When its last owner
///   lets go it stays findable until its page is needed; the one let go longest ago is reused first.
/// - Every method that fails leaves the pool as it was.
pub struct PagePool {
    page_size: usize,
    pages: Vec<Page>,
    /// Pages of no owner and no findable content.
    free: Vec<u32>,
    /// Pages of no owner that can be found, by when they were let go.
    cached: BTreeMap<u64, u32>,
    index: PrefixIndex,
    sequences: HashMap<SeqId, Sequence>,
    next_sequence: SeqId,
    clock: u64,
}

#[derive(Clone, Default)]
struct Page {
    owners: u32,
    /// Where the prefix index has it.
    node: Option<NodeId>,
    /// Its key in `cached` while it has no owner.
    released: u64,
}

#[derive(Clone, Default)]
struct Sequence {
    salt: u64,
    tokens: Vec<u32>,
    /// Tokens whose K and V are known to be written.
    committed: usize,
    /// `NO_PAGE` for the first `evicted` ones.
    pages: Vec<u32>,
    evicted: usize,
    /// The length below which a roll-back would need evicted pages.
    floor: usize,
    /// The prefix index's nodes of its first full committed pages.
    chain: Vec<NodeId>,
}

impl PagePool {
    /// `pages` free pages of `page_size` tokens. Both at least 1; page ids are 31-bit.
    ///
    /// Both are to be those of the cache's [`CacheDims`](super::CacheDims). The pool does not see the cache: a pool with smaller pages gives wrong slots
    /// that no call can tell from right ones.
    pub fn new(pages: usize, page_size: usize) -> Result<Self> {
        if page_size == 0 || pages == 0 {
            bail!("pages, page_size: at least 1, got {pages} pages of {page_size}")
        }
        if pages > i32::MAX as usize || pages.checked_mul(page_size).is_none_or(|slots| slots > i64::MAX as usize) {
            bail!("pages: page ids are 31-bit and slots 63-bit, got {pages} pages of {page_size}")
        }
        let (mut entries, mut free) = (Vec::new(), Vec::new());
        if entries.try_reserve_exact(pages).is_err() || free.try_reserve_exact(pages).is_err() {
            bail!("pages: no memory for the book-keeping of {pages} pages")
        }
        entries.resize(pages, Page::default());
        free.extend((0..pages as u32).rev());
        Ok(Self {
            page_size,
            pages: entries,
            free,
            cached: BTreeMap::new(),
            index: PrefixIndex::new(Default::default()),
            sequences: HashMap::new(),
            next_sequence: SeqId { pool: POOLS.fetch_add(1, Ordering::Relaxed), number: 0 },
            clock: 0,
        })
    }

    /// Tokens of a page.
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// Pages in all.
    pub fn total_pages(&self) -> usize {
        self.pages.len()
    }

    /// Pages that no sequence owns and that hold nothing findable.
    pub fn free_pages(&self) -> usize {
        self.free.len()
    }

    /// Pages that no sequence owns, kept for their content until they are needed.
    pub fn cached_pages(&self) -> usize {
        self.cached.len()
    }

    /// Pages that an append can get: free and cached ones.
    pub fn available_pages(&self) -> usize {
        self.free.len() + self.cached.len()
    }

    /// Sequences that own `page` (0 for an id that is not in the pool).
    pub fn owners(&self, page: u32) -> usize {
        self.pages.get(page as usize).map_or(0, |page| page.owners as usize)
    }

    /// Live sequences, in no order.
    pub fn sequences(&self) -> impl Iterator<Item = SeqId> {
        self.sequences.keys().copied()
    }

    /// Tokens of a sequence, uncommitted ones included: its context length.
    pub fn context_len(&self, sequence: SeqId) -> Result<usize> {
        Ok(self.get(sequence)?.tokens.len())
    }

    /// The token ids of a sequence.
    pub fn tokens(&self, sequence: SeqId) -> Result<&[u32]> {
        Ok(&self.get(sequence)?.tokens)
    }

    /// The page ids of a sequence in token order: its block table. [`NO_PAGE`] where a page was evicted behind a window.
    pub fn block_table(&self, sequence: SeqId) -> Result<&[u32]> {
        Ok(&self.get(sequence)?.pages)
    }

    /// A new empty sequence, apart from every prefix.
    pub fn allocate(&mut self) -> SeqId {
        self.insert(Sequence::default())
    }

    /// A new sequence that already holds the longest findable prefix of `prompt`, and that prefix's length: a multiple of the page size,
    /// and less than the prompt's, so that at least one token is left to compute. The rest of the prompt is the caller's to append.
    ///
    /// K and V must depend on the tokens before and on nothing else; where something else counts (an adapter, an image), give each its
    /// own `salt`.
    pub fn allocate_with_prefix(&mut self, prompt: &[u32], salt: u64) -> (SeqId, usize) {
        let found = self.find_prefix(prompt, salt);
        let len = found.len() * self.page_size;
        let sequence = Sequence {
            salt,
            tokens: prompt[..len].to_vec(),
            committed: len,
            pages: found.iter().map(|&(_, page)| page).collect(),
            chain: found.iter().map(|&(node, _)| node).collect(),
            ..Sequence::default()
        };
        sequence.pages.iter().for_each(|&page| self.retain(page));
        (self.insert(sequence), len)
    }

    /// The length of the prefix that [`PagePool::allocate_with_prefix`] would find now.
    pub fn prefix_len(&self, prompt: &[u32], salt: u64) -> usize {
        self.find_prefix(prompt, salt).len() * self.page_size
    }

    /// Pages that appending `tokens` more tokens would take: new ones, and the copy of a shared last page.
    pub fn pages_needed(&self, sequence: SeqId, tokens: usize) -> Result<usize> {
        let sequence = self.get(sequence)?;
        let pages = sequence.tokens.len().saturating_add(tokens).div_ceil(self.page_size) - sequence.pages.len();
        Ok(pages + usize::from(tokens > 0 && self.shared_tail(sequence).is_some()))
    }

    /// Adds tokens to a sequence, none of them committed yet.
    ///
    /// An error where the pages do not suffice; see [`PagePool::pages_needed`] and [`PagePool::available_pages`].
    pub fn append(&mut self, sequence: SeqId, tokens: &[u32]) -> Result<Append> {
        let needed = self.pages_needed(sequence, tokens.len())?;
        let available = self.available_pages();
        if needed > available {
            let (total, count) = (self.total_pages(), tokens.len());
            bail!("pages: {count} more tokens of sequence {sequence} take {needed} pages, {available} of {total} are available")
        }
        if tokens.is_empty() {
            return Ok(Append::default());
        }
        let copies = self.own_tail(sequence)?;
        let mut fresh = Vec::with_capacity(needed - copies.len());
        while fresh.len() + copies.len() < needed {
            fresh.push(self.take()?);
        }
        let id = sequence;
        let sequence = self.get_mut(id)?;
        sequence.pages.extend(fresh);
        sequence.tokens.extend_from_slice(tokens);
        Ok(Append { slots: self.last_slots(id, tokens.len())?.collect(), copies })
    }

    /// The slots of the last `tokens` tokens of a sequence that has as many.
    pub(super) fn last_slots(&self, sequence: SeqId, tokens: usize) -> Result<impl Iterator<Item = i64>> {
        let (sequence, page_size) = (self.get(sequence)?, self.page_size);
        let end = sequence.tokens.len();
        Ok((end - tokens..end).map(move |at| (sequence.pages[at / page_size] as usize * page_size + at % page_size) as i64))
    }

    /// Declares that K and V of all of a sequence's tokens are written: it may be forked, and its full pages may be found.
    pub fn commit(&mut self, sequence: SeqId) -> Result<()> {
        let id = sequence;
        let mut sequence = std::mem::take(self.get_mut(id)?);
        sequence.committed = sequence.tokens.len();
        for at in sequence.chain.len()..sequence.committed / self.page_size {
            match self.publish(&sequence, at) {
                Some(node) => sequence.chain.push(node),
                None => break,
            }
        }
        self.sequences.insert(id, sequence);
        Ok(())
    }

    /// Shortens a sequence to its first `len` tokens (rejected drafts) and lets go of the pages past them.
    ///
    /// An error where `len` is more than it has, or so little that its window would need pages [`PagePool::evict_window`] has let go.
    pub fn truncate(&mut self, sequence: SeqId, len: usize) -> Result<()> {
        let page_size = self.page_size;
        let (id, sequence) = (sequence, self.get_mut(sequence)?);
        if len > sequence.tokens.len() || len < sequence.floor {
            bail!("len: sequence {id} can be cut to {}..={} tokens, got {len}", sequence.floor, sequence.tokens.len())
        }
        sequence.tokens.truncate(len);
        sequence.committed = sequence.committed.min(len);
        sequence.chain.truncate(len / page_size);
        let dropped = sequence.pages.split_off(len.div_ceil(page_size));
        self.release_all(&dropped);
        Ok(())
    }

    /// Ends a sequence. A second time is an error, as for any sequence that is not there.
    pub fn free(&mut self, sequence: SeqId) -> Result<()> {
        match self.sequences.remove(&sequence) {
            Some(sequence) => {
                self.release_all(&sequence.pages[sequence.evicted..]);
                Ok(())
            }
            None => bail!("sequence: {sequence} is not in the pool"),
        }
    }

    /// A new sequence with the same tokens in the same pages. An error where tokens are not committed: their K and V are still to be
    /// written, so a copy of their page made now would lack them.
    pub fn fork(&mut self, sequence: SeqId) -> Result<SeqId> {
        let id = sequence;
        let sequence = self.get(id)?.clone();
        if sequence.committed != sequence.tokens.len() {
            bail!("sequence: {id} has {} tokens that are not committed and cannot be forked", sequence.tokens.len() - sequence.committed)
        }
        sequence.pages[sequence.evicted..].iter().for_each(|&page| self.retain(page));
        Ok(self.insert(sequence))
    }

    /// Lets go of the pages that a sliding window of `window` tokens has wholly left behind, for every token after the committed ones.
    /// Their table entries become [`NO_PAGE`]. Returns how many. The sequence can no longer be cut below what is committed now.
    pub fn evict_window(&mut self, sequence: SeqId, window: usize) -> Result<usize> {
        if window == 0 {
            bail!("window: at least 1")
        }
        let page_size = self.page_size;
        let sequence = self.get_mut(sequence)?;
        // The next query, at position `committed`, attends positions above `committed - window`.
        let outside = ((sequence.committed + 1).saturating_sub(window) / page_size).max(sequence.evicted);
        let dropped: Vec<u32> = sequence.pages[sequence.evicted..outside].to_vec();
        if !dropped.is_empty() {
            sequence.pages[sequence.evicted..outside].fill(NO_PAGE);
            (sequence.evicted, sequence.floor) = (outside, sequence.committed);
            self.release_all(&dropped);
        }
        Ok(dropped.len())
    }

    fn get(&self, sequence: SeqId) -> Result<&Sequence> {
        match self.sequences.get(&sequence) {
            Some(found) => Ok(found),
            None => bail!("sequence: {sequence} is not in the pool"),
        }
    }

    fn get_mut(&mut self, sequence: SeqId) -> Result<&mut Sequence> {
        match self.sequences.get_mut(&sequence) {
            Some(found) => Ok(found),
            None => bail!("sequence: {sequence} is not in the pool"),
        }
    }

    fn insert(&mut self, sequence: Sequence) -> SeqId {
        let id = self.next_sequence;
        self.next_sequence.number += 1;
        self.sequences.insert(id, sequence);
        id
    }

    fn find_prefix(&self, prompt: &[u32], salt: u64) -> Vec<(NodeId, u32)> {
        let whole = prompt.len().saturating_sub(1) / self.page_size;
        let mut parent = Parent::Root(salt);
        let next = |tokens| {
            let found = self.index.find(parent, tokens)?;
            parent = Parent::Page(found.0);
            Some(found)
        };
        prompt.chunks_exact(self.page_size).take(whole).map_while(next).collect()
    }

    /// Makes page `at` of a sequence findable, or finds one with the same content. `None` where nothing could lead to it.
    fn publish(&mut self, sequence: &Sequence, at: usize) -> Option<NodeId> {
        let parent = sequence.chain.last().map_or(Parent::Root(sequence.salt), |&node| Parent::Page(node));
        let tokens = &sequence.tokens[at * self.page_size..(at + 1) * self.page_size];
        if let Some((node, _)) = self.index.find(parent, tokens) {
            return Some(node);
        }
        let page = sequence.pages[at];
        if page == NO_PAGE {
            return None;
        }
        self.forget(page);
        let node = self.index.insert(parent, tokens, page)?;
        self.pages[page as usize].node = Some(node);
        Some(node)
    }

    /// The last page of a sequence if it is partly filled and not its alone.
    fn shared_tail(&self, sequence: &Sequence) -> Option<u32> {
        let &page = sequence.pages.last()?;
        let partial = !sequence.tokens.len().is_multiple_of(self.page_size);
        (partial && self.pages[page as usize].owners > 1).then_some(page)
    }

    /// Makes a partly filled last page safe to write: a copy where it is shared, no longer findable where it is not.
    fn own_tail(&mut self, id: SeqId) -> Result<Vec<(u32, u32)>> {
        let sequence = self.get(id)?;
        if let Some(shared) = self.shared_tail(sequence) {
            let copy = self.take()?;
            self.release(shared);
            if let Some(last) = self.get_mut(id)?.pages.last_mut() {
                *last = copy;
            }
            return Ok(vec![(shared, copy)]);
        }
        if let (Some(&page), false) = (sequence.pages.last(), sequence.tokens.len().is_multiple_of(self.page_size)) {
            self.forget(page);
        }
        Ok(Vec::new())
    }

    /// A page with one owner: a free one, else the cached one let go longest ago.
    fn take(&mut self) -> Result<u32> {
        let page = match self.free.pop() {
            Some(page) => page,
            None => match self.cached.pop_first() {
                Some((_, page)) => page,
                None => bail!("pages: all {} are owned", self.pages.len()),
            },
        };
        self.forget(page);
        self.pages[page as usize].owners = 1;
        Ok(page)
    }

    /// Takes a page out of the prefix index.
    fn forget(&mut self, page: u32) {
        if let Some(node) = self.pages[page as usize].node.take() {
            self.index.remove(node);
        }
    }

    fn retain(&mut self, page: u32) {
        let entry = &mut self.pages[page as usize];
        if entry.owners == 0 {
            self.cached.remove(&entry.released);
        }
        entry.owners += 1;
    }

    fn release(&mut self, page: u32) {
        let entry = &mut self.pages[page as usize];
        entry.owners -= 1;
        if entry.owners > 0 {
            return;
        }
        if entry.node.is_some() {
            entry.released = self.clock;
            self.cached.insert(self.clock, page);
            self.clock += 1;
        } else {
            self.free.push(page);
        }
    }

    /// Later pages first: a prefix page outlives the pages that are found through it.
    fn release_all(&mut self, pages: &[u32]) {
        pages.iter().rev().for_each(|&page| self.release(page));
    }
}
