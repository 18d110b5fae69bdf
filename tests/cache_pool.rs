//! The page pool against a naive model that keeps each sequence's tokens in a `Vec` and each slot's token in another.

use std::collections::{BTreeMap, HashMap};

use candle::{DType, Device};
use candle_paged_attn::cache::{Append, NO_PAGE, PagePool, SeqId};
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng, rngs::StdRng};

/// What a cache would hold: the token whose K and V each slot has.
struct Slots {
    page_size: usize,
    tokens: Vec<Option<u32>>,
}

impl Slots {
    fn new(pool: &PagePool) -> Self {
        Self { page_size: pool.page_size(), tokens: vec![None; pool.total_pages() * pool.page_size()] }
    }

    fn copy(&mut self, copies: &[(u32, u32)]) {
        for &(src, dst) in copies {
            let (src, dst) = (src as usize * self.page_size, dst as usize * self.page_size);
            self.tokens.copy_within(src..src + self.page_size, dst);
        }
    }

    fn write(&mut self, slots: &[i64], tokens: &[u32]) {
        assert_eq!(slots.len(), tokens.len());
        slots.iter().zip(tokens).for_each(|(&slot, &token)| self.tokens[slot as usize] = Some(token));
    }
}

/// Free and cached pages, and each sequence's tokens and pages.
type Snapshot = (usize, usize, Vec<(SeqId, Vec<u32>, Vec<u32>)>);

struct Live {
    tokens: Vec<u32>,
    /// First token that must still be readable.
    readable_from: usize,
    floor: usize,
}

struct Model {
    pool: PagePool,
    slots: Slots,
    live: BTreeMap<SeqId, Live>,
    rng: StdRng,
    ended: Vec<SeqId>,
}

impl Model {
    fn new(pages: usize, page_size: usize, seed: u64) -> Self {
        let pool = PagePool::new(pages, page_size).unwrap();
        let slots = Slots::new(&pool);
        Self { pool, slots, live: BTreeMap::new(), rng: StdRng::seed_from_u64(seed), ended: Vec::new() }
    }

    fn pick(&mut self) -> Option<SeqId> {
        self.live.keys().copied().collect::<Vec<_>>().choose(&mut self.rng).copied()
    }

    /// Few distinct tokens, so that prefixes repeat.
    fn draw_tokens(&mut self, most: usize) -> Vec<u32> {
        let n = self.rng.random_range(0..=most);
        (0..n).map(|_| self.rng.random_range(0..2)).collect()
    }

    /// The state that no failed call may change.
    fn snapshot(&self) -> Snapshot {
        let sequences = self.live.keys().map(|&s| (s, self.pool.tokens(s).unwrap().to_vec(), self.pool.block_table(s).unwrap().to_vec()));
        (self.pool.free_pages(), self.pool.cached_pages(), sequences.collect())
    }

    fn join(&mut self) {
        let prompt = self.draw_tokens(40);
        let salt = self.rng.random_range(0..2);
        let expected = self.pool.prefix_len(&prompt, salt);
        let (id, len) = self.pool.allocate_with_prefix(&prompt, salt);
        assert_eq!(len, expected);
        assert!(len < prompt.len().max(1) && len.is_multiple_of(self.slots.page_size));
        self.live.insert(id, Live { tokens: prompt[..len].to_vec(), readable_from: 0, floor: 0 });
    }

    /// One engine step over some sequences: appends, copies, writes, roll-backs, commits.
    fn step(&mut self) {
        let mut batch: Vec<SeqId> = self.live.keys().copied().collect();
        batch.retain(|_| self.rng.random_bool(0.5));
        let mut appended: Vec<(SeqId, Vec<u32>, Append)> = Vec::new();
        for id in batch {
            let tokens = self.draw_tokens(12);
            let needed = self.pool.pages_needed(id, tokens.len()).unwrap();
            let (available, before) = (self.pool.available_pages(), self.snapshot());
            match self.pool.append(id, &tokens) {
                Ok(append) => {
                    assert!(needed <= available);
                    assert_eq!(self.pool.available_pages(), available - needed);
                    appended.push((id, tokens, append));
                }
                Err(error) => {
                    assert!(needed > available, "{error}");
                    assert!(error.to_string().contains(&format!("sequence {id} take {needed} pages, {available} of")), "{error}");
                    assert_eq!(self.snapshot(), before);
                }
            }
        }
        appended.iter().for_each(|(_, _, append)| self.slots.copy(&append.copies));
        for (id, tokens, append) in &appended {
            self.slots.write(&append.slots, tokens);
            self.live.get_mut(id).unwrap().tokens.extend_from_slice(tokens);
        }
        for (id, tokens, _) in &appended {
            let rejected = self.rng.random_range(0..=tokens.len());
            self.cut(*id, rejected);
            if !tokens.is_empty() && self.pool.context_len(*id).unwrap() > 0 && rejected < tokens.len() {
                assert!(self.pool.fork(*id).unwrap_err().to_string().contains("not committed"));
            }
            self.pool.commit(*id).unwrap();
        }
    }

    fn cut(&mut self, id: SeqId, rejected: usize) {
        let live = self.live.get_mut(&id).unwrap();
        let len = live.tokens.len() - rejected.min(live.tokens.len());
        let result = self.pool.truncate(id, len);
        assert_eq!(result.is_ok(), len >= live.floor, "{len} {}", live.floor);
        if result.is_ok() {
            live.tokens.truncate(len);
        }
    }

    fn roll_back(&mut self) {
        if let Some(id) = self.pick() {
            let rejected = self.rng.random_range(0..30);
            self.cut(id, rejected);
            let live = &self.live[&id];
            assert!(self.pool.truncate(id, live.tokens.len() + 1).is_err());
        }
    }

    fn fork(&mut self) {
        if let Some(id) = self.pick() {
            let forked = self.pool.fork(id).unwrap();
            let Live { tokens, readable_from, floor } = &self.live[&id];
            let live = Live { tokens: tokens.clone(), readable_from: *readable_from, floor: *floor };
            assert!(self.live.insert(forked, live).is_none());
        }
    }

    fn end(&mut self) {
        if let Some(id) = self.pick() {
            self.pool.free(id).unwrap();
            self.live.remove(&id);
            self.ended.push(id);
        }
        if let Some(&id) = self.ended.choose(&mut self.rng) {
            let before = self.snapshot();
            assert!(self.pool.free(id).unwrap_err().to_string().contains("is not in the pool"));
            assert!(self.pool.append(id, &[1]).is_err() && self.pool.truncate(id, 0).is_err() && self.pool.commit(id).is_err());
            assert!(self.pool.fork(id).is_err() && self.pool.evict_window(id, 3).is_err() && self.pool.block_table(id).is_err());
            assert_eq!(self.snapshot(), before);
        }
    }

    fn slide(&mut self) {
        if let Some(id) = self.pick() {
            let window = self.rng.random_range(1..20);
            let dropped = self.pool.evict_window(id, window).unwrap();
            let live = self.live.get_mut(&id).unwrap();
            if dropped > 0 {
                live.floor = live.tokens.len();
                live.readable_from = live.readable_from.max((live.tokens.len() + 1).saturating_sub(window));
            }
        }
    }

    fn check(&self) {
        let (pool, page_size) = (&self.pool, self.pool.page_size());
        let mut owners: HashMap<u32, usize> = HashMap::new();
        for (&id, live) in &self.live {
            let table = pool.block_table(id).unwrap();
            assert_eq!(pool.tokens(id).unwrap(), live.tokens);
            assert_eq!(pool.context_len(id).unwrap(), live.tokens.len());
            assert_eq!(table.len(), live.tokens.len().div_ceil(page_size));
            for (at, &token) in live.tokens.iter().enumerate() {
                let page = table[at / page_size];
                if at >= live.readable_from {
                    assert_ne!(page, NO_PAGE, "token {at} of {id} is in the window");
                }
                if page != NO_PAGE {
                    assert_eq!(self.slots.tokens[page as usize * page_size + at % page_size], Some(token), "token {at} of sequence {id}");
                }
            }
            table.iter().filter(|&&p| p != NO_PAGE).for_each(|&p| *owners.entry(p).or_default() += 1);
        }
        for page in 0..pool.total_pages() as u32 {
            assert_eq!(pool.owners(page), owners.get(&page).copied().unwrap_or(0), "page {page}");
        }
        assert_eq!(pool.free_pages() + pool.cached_pages() + owners.len(), pool.total_pages());
    }
}

#[test]
fn thousands_of_random_operations_agree_with_the_model() {
    let (mut shared, mut exhausted) = (0, 0);
    for seed in 0..60 {
        let page_size = [1, 2, 3, 4, 8][seed as usize % 5];
        let mut model = Model::new(8 + (seed as usize * 7) % 60, page_size, seed);
        for _ in 0..300 {
            match model.rng.random_range(0..10) {
                0 | 1 => model.join(),
                2..=5 => model.step(),
                6 => model.roll_back(),
                7 => model.fork(),
                8 => model.end(),
                _ => model.slide(),
            }
            if model.live.len() > 12 {
                model.end();
            }
            model.check();
            shared += (0..model.pool.total_pages() as u32).filter(|&p| model.pool.owners(p) > 1).count();
            exhausted += usize::from(model.pool.available_pages() == 0);
        }
        while !model.live.is_empty() {
            model.end();
            model.check();
        }
        assert_eq!(model.pool.available_pages(), model.pool.total_pages(), "a leak");
    }
    assert!(shared > 1000 && exhausted > 100, "the walk must share pages ({shared}) and run out of them ({exhausted})");
}

fn fill(pool: &mut PagePool, prompt: &[u32]) -> (SeqId, usize) {
    let (id, cached) = pool.allocate_with_prefix(prompt, 0);
    pool.append(id, &prompt[cached..]).unwrap();
    pool.commit(id).unwrap();
    (id, cached)
}

#[test]
fn prefixes_are_found_by_page() {
    let mut pool = PagePool::new(16, 4).unwrap();
    let prompt: Vec<u32> = (0..10).collect();
    let (a, cached) = fill(&mut pool, &prompt);
    assert_eq!(cached, 0);
    let (b, cached) = fill(&mut pool, &prompt);
    assert_eq!(cached, 8, "two full pages");
    assert_eq!(pool.block_table(a).unwrap()[..2], pool.block_table(b).unwrap()[..2]);
    assert_ne!(pool.block_table(a).unwrap()[2], pool.block_table(b).unwrap()[2]);
    assert_eq!(pool.prefix_len(&prompt[..8], 0), 4, "one token is left to compute");
    assert_eq!(pool.prefix_len(&prompt, 1), 0, "another salt");
    assert_eq!(pool.prefix_len(&[9, 1, 2, 3, 4, 5, 6, 7, 8], 0), 0, "the first page differs");
    assert_eq!(pool.prefix_len(&[0, 1, 2, 3, 9, 5, 6, 7, 8], 0), 4, "the second page differs");
    assert_eq!(pool.prefix_len(&[4, 5, 6, 7, 8], 0), 0, "the second page's tokens alone are another prefix");
    let table = pool.block_table(a).unwrap().to_vec();
    pool.free(a).unwrap();
    pool.free(b).unwrap();
    assert_eq!((pool.free_pages(), pool.cached_pages()), (14, 2));
    let (c, cached) = fill(&mut pool, &prompt);
    assert_eq!((cached, &pool.block_table(c).unwrap()[..2]), (8, &table[..2]), "still findable after its owners ended");
}

#[test]
fn nothing_uncommitted_is_found() {
    let mut pool = PagePool::new(4, 2).unwrap();
    let a = pool.allocate();
    pool.append(a, &[1, 2, 3, 4, 5]).unwrap();
    assert_eq!(pool.prefix_len(&[1, 2, 3, 4, 5], 0), 0);
    pool.truncate(a, 3).unwrap();
    pool.commit(a).unwrap();
    assert_eq!(pool.prefix_len(&[1, 2, 3, 4, 5], 0), 2, "the rejected half of the second page was never committed");
}

#[test]
fn the_page_let_go_longest_ago_is_reused_first_and_tails_before_heads() {
    let mut pool = PagePool::new(4, 2).unwrap();
    let (a, _) = fill(&mut pool, &[1, 1, 1, 2]);
    pool.free(a).unwrap();
    let (b, _) = fill(&mut pool, &[2, 2, 2, 3]);
    pool.free(b).unwrap();
    let c = pool.allocate();
    pool.append(c, &[9]).unwrap();
    assert_eq!((pool.prefix_len(&[1, 1, 1, 2, 0], 0), pool.prefix_len(&[2, 2, 2, 3, 0], 0)), (2, 4));
    pool.append(c, &[9, 9]).unwrap();
    assert_eq!((pool.prefix_len(&[1, 1, 1, 2, 0], 0), pool.prefix_len(&[2, 2, 2, 3, 0], 0)), (0, 4));
}

#[test]
fn forks_copy_their_last_page_before_writing() {
    let mut pool = PagePool::new(8, 4).unwrap();
    let (a, _) = fill(&mut pool, &[1, 2, 3, 4, 5]);
    let b = pool.fork(a).unwrap();
    let shared = pool.block_table(a).unwrap().to_vec();
    assert_eq!(pool.owners(shared[1]), 2);
    let append = pool.append(b, &[6]).unwrap();
    let copy = pool.block_table(b).unwrap()[1];
    assert_eq!(append, Append { slots: vec![i64::from(copy) * 4 + 1], copies: vec![(shared[1], copy)] });
    let append = pool.append(a, &[7]).unwrap();
    assert_eq!(append, Append { slots: vec![i64::from(shared[1]) * 4 + 1], copies: vec![] }, "the last owner writes in place");
    let (c, _) = fill(&mut pool, &[1, 2, 3, 4]);
    let full = pool.fork(c).unwrap();
    assert!(pool.append(full, &[5]).unwrap().copies.is_empty(), "full pages are never written again");
}

#[test]
fn exhaustion_changes_nothing_and_freed_pages_serve_again() {
    let mut pool = PagePool::new(3, 4).unwrap();
    let a = pool.allocate();
    pool.append(a, &[1; 6]).unwrap();
    pool.commit(a).unwrap();
    let b = pool.fork(a).unwrap();
    // One page is left: the copy of the shared tail takes it, a further page is not to be had.
    let error = pool.append(b, &[2; 3]).unwrap_err().to_string();
    assert!(error.contains("3 more tokens of sequence 1 take 2 pages, 1 of 3 are available"), "{error}");
    assert_eq!(pool.tokens(b).unwrap(), [1; 6]);
    assert_eq!(pool.owners(pool.block_table(a).unwrap()[1]), 2);
    assert_eq!(pool.append(b, &[2; 2]).unwrap().copies.len(), 1);
    assert_eq!(pool.available_pages(), 0);
    pool.free(b).unwrap();
    assert_eq!(pool.append(a, &[3; 6]).unwrap().slots.len(), 6);
}

#[test]
fn windows_let_pages_go_and_keep_the_roll_back_honest() {
    let mut pool = PagePool::new(8, 4).unwrap();
    let (a, _) = fill(&mut pool, &(0..18).collect::<Vec<_>>());
    pool.append(a, &[50, 51]).unwrap();
    // The next query after the committed 18 tokens is at position 18 and attends positions 13 to 18.
    assert_eq!(pool.evict_window(a, 6).unwrap(), 3);
    let table = pool.block_table(a).unwrap();
    assert_eq!((&table[..3], table.len()), (&[NO_PAGE; 3][..], 5));
    assert_eq!(pool.evict_window(a, 6).unwrap(), 0);
    assert!(pool.truncate(a, 17).unwrap_err().to_string().contains("18..=20"));
    pool.truncate(a, 18).unwrap();
    pool.commit(a).unwrap();
    assert_eq!(pool.available_pages(), 6);
    assert!(pool.evict_window(a, 0).is_err());
    pool.free(a).unwrap();
    assert_eq!(pool.available_pages(), 8);
}

/// An append of another sequence, or of other tokens than the last ones, would have rows written and attended where they are not.
#[test]
fn a_step_takes_appends_of_its_own_sequences_alone() {
    let mut pool = PagePool::new(8, 4).unwrap();
    let (a, b) = (pool.allocate(), pool.allocate());
    let (five, two) = (pool.append(a, &[1; 5]).unwrap(), pool.append(b, &[2; 2]).unwrap());
    let refused = |pool: &PagePool, step: &[(SeqId, &Append)], fragment: &str| {
        let error = pool.batch(step, &Device::Cpu).unwrap_err().to_string();
        assert!(error.contains(fragment), "{error}");
    };
    refused(&pool, &[(a, &two), (b, &five)], "not the append of its last tokens");
    refused(&pool, &[(b, &five)], "an append of 5 tokens beside sequence 1, which has 2");
    refused(&pool, &[(a, &five), (b, &two), (a, &five)], "sequence 0 comes twice");
    refused(&pool, &[(b, &Append { slots: vec![i64::MAX, -1], copies: vec![] })], "slot 9223372036854775807 for token 0 of sequence 1");
    let more = pool.append(a, &[3; 2]).unwrap();
    refused(&pool, &[(a, &five)], "slot");
    // One step of two appends has the slots of both.
    let both = Append { slots: [five.slots, more.slots.clone()].concat(), copies: vec![] };
    assert_eq!(pool.batch(&[(a, &both)], &Device::Cpu).unwrap().max_query_len, 7);
    assert_eq!(pool.batch(&[(a, &more), (b, &two)], &Device::Cpu).unwrap().max_query_len, 2);
    pool.truncate(a, 1).unwrap();
    refused(&pool, &[(a, &more)], "an append of 2 tokens beside sequence 0, which has 1");
}

#[test]
fn a_step_becomes_tensors() {
    let mut pool = PagePool::new(8, 4).unwrap();
    let (a, b) = (pool.allocate(), pool.allocate());
    let (six, three) = (pool.append(a, &[1; 6]).unwrap(), pool.append(b, &[2; 3]).unwrap());
    let batch = pool.batch(&[(b, &three), (a, &six)], &Device::Cpu).unwrap();
    assert_eq!(batch.context_lens.to_vec1::<u32>().unwrap(), [3, 6]);
    assert_eq!(batch.query_start.to_vec1::<u32>().unwrap(), [0, 3, 9]);
    let (page_a, page_b) = (pool.block_table(a).unwrap(), pool.block_table(b).unwrap());
    assert_eq!(batch.block_tables.to_vec2::<u32>().unwrap(), [[page_b[0], NO_PAGE], [page_a[0], page_a[1]]]);
    assert_eq!((batch.slot_mapping.dtype(), batch.slot_mapping.dims()), (DType::I64, &[9][..]));
    let slots = batch.slot_mapping.to_vec1::<i64>().unwrap();
    assert_eq!((slots[0], slots[3]), (i64::from(page_b[0]) * 4, i64::from(page_a[0]) * 4));
    let empty = pool.allocate();
    let nothing = Append::default();
    let batch = pool.batch(&[(empty, &nothing)], &Device::Cpu).unwrap();
    assert_eq!(batch.block_tables.to_vec2::<u32>().unwrap(), [[NO_PAGE]]);
    assert_eq!(pool.batch(&[], &Device::Cpu).unwrap().block_tables.dims(), [0, 1]);
    pool.free(empty).unwrap();
    assert!(pool.batch(&[(empty, &nothing)], &Device::Cpu).is_err());
}

#[test]
fn impossible_pools_are_refused() {
    for (pages, page_size) in [(0, 1), (1, 0), (1 << 31, 1), (1 << 30, usize::MAX / 4)] {
        assert!(PagePool::new(pages, page_size).is_err(), "{pages} {page_size}");
    }
}
