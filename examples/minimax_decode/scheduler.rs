//! Continuous batching: sequences join when a place and pages are free, prefill by chunks beside the decoding ones, and leave when done.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use candle_paged_attn::cache::{Append, PagePool, SeqId};

use super::batch::SequenceRows;
use super::kv::{KvKind, Memory};
use super::meter::{Meter, Recorder};
use super::model::Model;
use super::mtp::draft;
use super::sampling::Sampling;

/// A prompt to continue.
#[derive(Clone, Debug)]
pub struct Request {
    pub prompt: Vec<u32>,
    pub max_new_tokens: usize,
    /// Tokens that end the sequence.
    pub stop_tokens: Vec<u32>,
}

impl Request {
    /// Most tokens that are ever cached: all but the last new one.
    fn most_cached(&self) -> usize {
        self.prompt.len() + self.max_new_tokens - 1
    }
}

/// What a request came to.
#[derive(Clone, Debug, Default)]
pub struct Completion {
    pub tokens: Vec<u32>,
    /// The row of logits behind each token, where asked for.
    pub logits: Vec<Vec<f32>>,
}

#[derive(Clone, Debug)]
pub struct ServeOptions {
    pub kv: KvKind,
    /// Sequences that run at a time.
    pub max_batch: usize,
    /// Rows of a step: decoding sequences first, prefill chunks in what is left.
    pub max_rows: usize,
    /// Rows of a verify step: the last token and its drafts. 1 decodes token by token.
    pub mtp_rows: usize,
    pub page_size: usize,
    /// Pages of the cache. `None`: enough for `max_batch` of the longest requests.
    pub pages: Option<usize>,
    pub sampling: Sampling,
    pub keep_logits: bool,
    /// Make the attention calls of one decode step again, each by itself.
    pub compare_attention: bool,
}

/// Steps of one kind.
#[derive(Clone, Copy, Debug, Default)]
pub struct Phase {
    pub steps: usize,
    /// Rows that went through the model.
    pub rows: usize,
    /// New tokens that came out.
    pub tokens: usize,
    pub time: Duration,
    pub attention: Meter,
}

#[derive(Clone, Debug, Default)]
pub struct Stats {
    /// Steps that carried a chunk of a prompt (and perhaps decodes beside it).
    pub prefill: Phase,
    /// Steps of decodes alone.
    pub decode: Phase,
    pub drafted: usize,
    pub accepted: usize,
    /// Kernels that were compiled or loaded before the first request, and the time that took.
    pub warm_up: Option<(usize, Duration)>,
    /// The kernel of each layer's attention in a step of decodes alone.
    pub kernels: Vec<String>,
    /// The attention calls of one such step, each made by itself, where that was asked for.
    pub alone: Meter,
}

pub struct Scheduler<'a> {
    model: &'a Model,
    options: ServeOptions,
    memory: Memory,
    pool: PagePool,
    waiting: VecDeque<(usize, Request)>,
    running: Vec<Running>,
    pub stats: Stats,
}

struct Running {
    id: usize,
    request: Request,
    sequence: SeqId,
    /// Prompt and new tokens.
    tokens: Vec<u32>,
    /// How many of `tokens` are cached.
    cached: usize,
    logits: Vec<Vec<f32>>,
}

/// One running sequence's part of a step: its next tokens, then drafts.
struct Turn {
    running: usize,
    rows: usize,
    drafts: Vec<u32>,
}

/// Serves all `requests`; completions in their order. `on_step` gets the prompt and new tokens that each step got done.
pub fn serve(
    model: &Model,
    requests: &[Request],
    options: ServeOptions,
    mut on_step: impl FnMut(usize),
) -> Result<(Vec<Completion>, Stats)> {
    let mut scheduler = Scheduler::new(model, requests, options)?;
    let mut completions = vec![Completion::default(); requests.len()];
    while !scheduler.is_idle() {
        let step = scheduler.step()?;
        on_step(step.progress);
        for (id, completion) in step.done {
            completions[id] = completion;
        }
    }
    Ok((completions, scheduler.stats))
}

/// What a step got done.
pub struct StepOutcome {
    /// Prompt tokens cached plus new tokens.
    pub progress: usize,
    pub done: Vec<(usize, Completion)>,
}

impl<'a> Scheduler<'a> {
    pub fn new(model: &'a Model, requests: &[Request], options: ServeOptions) -> Result<Self> {
        ensure!(options.max_batch > 0, "batch: 0");
        ensure!(options.page_size > 0, "page_size: 0");
        ensure!((1..=options.max_rows).contains(&options.mtp_rows), "mtp: {} is not from 1 to {}", options.mtp_rows, options.max_rows);
        options.sampling.check()?;
        for (id, request) in requests.iter().enumerate() {
            check_request(id, request, model)?;
        }
        let mut needs: Vec<usize> = requests.iter().map(|request| request.most_cached().div_ceil(options.page_size)).collect();
        needs.sort_unstable();
        let pages = options.pages.unwrap_or_else(|| needs.iter().rev().take(options.max_batch).sum());
        let most = needs.last().copied().unwrap_or(0);
        ensure!(most <= pages, "pages: the longest request needs {most}, the cache has {pages}");
        let memory = Memory::new(&model.config, options.kv, pages, options.page_size, model.dtype, &model.devices)?;
        let start = Instant::now();
        let kernels = memory.warm_up(&model.config, model.dtype, options.max_batch, options.max_rows, most)?;
        let stats = Stats { warm_up: (kernels > 0).then(|| (kernels, start.elapsed())), ..Stats::default() };
        let pool = PagePool::new(pages, options.page_size)?;
        let waiting = requests.iter().cloned().enumerate().collect();
        Ok(Self { model, options, memory, pool, waiting, running: vec![], stats })
    }

    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// Admits who can be admitted, runs the model once, and lets the finished go.
    pub fn step(&mut self) -> Result<StepOutcome> {
        let start = Instant::now();
        self.admit();
        let turns = self.turns();
        let prefills = turns.iter().any(|turn| self.running[turn.running].uncached() > 1);
        let sequences = turns.iter().map(|turn| self.append(turn)).collect::<Result<Vec<_>>>()?;
        let explains = !prefills && self.stats.kernels.is_empty();
        let mut recorder = Recorder::new(explains, explains && self.options.compare_attention);
        let logits = self.model.forward(&sequences, &self.memory, &mut recorder)?.to_vec2::<f32>()?;
        let mut logits = logits.into_iter();
        let (mut tokens, mut progress) = (0, 0);
        for (turn, sequence) in turns.iter().zip(&sequences) {
            let logits: Vec<Vec<f32>> = logits.by_ref().take(sequence.logits).collect();
            let new = self.settle(turn, logits)?;
            tokens += new;
            progress += new + self.running[turn.running].prompt_part(sequence);
        }
        let is_compared = recorder.repeats;
        self.stats.kernels.append(&mut recorder.kernels);
        self.stats.alone.add(&recorder.alone);
        let meter = recorder.finish()?;
        // A step whose calls were made again says nothing of speed.
        if is_compared {
            return Ok(StepOutcome { progress, done: self.release()? });
        }
        let phase = if prefills { &mut self.stats.prefill } else { &mut self.stats.decode };
        phase.steps += 1;
        phase.rows += sequences.iter().map(|sequence| sequence.tokens.len()).sum::<usize>();
        phase.tokens += tokens;
        phase.time += start.elapsed();
        phase.attention.add(&meter);
        Ok(StepOutcome { progress, done: self.release()? })
    }

    /// A request joins once the pages that it may come to need are not spoken for, so a running sequence never lacks one.
    fn admit(&mut self) {
        let need = |request: &Request| request.most_cached().div_ceil(self.options.page_size);
        let mut spoken_for: usize = self.running.iter().map(|running| need(&running.request)).sum();
        while self.running.len() < self.options.max_batch {
            let Some((_, request)) = self.waiting.front() else { return };
            spoken_for += need(request);
            if spoken_for > self.pool.total_pages() {
                return;
            }
            if let Some((id, request)) = self.waiting.pop_front() {
                let (sequence, cached) = self.pool.allocate_with_prefix(&request.prompt, 0);
                self.running.push(Running { id, tokens: request.prompt.clone(), request, sequence, cached, logits: vec![] });
            }
        }
    }

    /// Who runs in this step and how far: decodes first, then prompts in their order until the rows are spent.
    fn turns(&self) -> Vec<Turn> {
        let mut rows_left = self.options.max_rows;
        let mut order: Vec<usize> = (0..self.running.len()).collect();
        order.sort_by_key(|&index| self.running[index].uncached() > 1);
        let mut turns = vec![];
        for index in order {
            let running = &self.running[index];
            let rows = running.uncached().min(rows_left);
            if rows == 0 {
                break;
            }
            let drafts = match rows == running.uncached() {
                true => draft(&running.tokens, (self.options.mtp_rows - 1).min(running.new_tokens_left() - 1).min(rows_left - rows)),
                false => vec![],
            };
            rows_left -= rows + drafts.len();
            turns.push(Turn { running: index, rows, drafts });
        }
        turns
    }

    /// Takes cache slots for a turn's tokens.
    fn append(&mut self, turn: &Turn) -> Result<SequenceRows> {
        let running = &self.running[turn.running];
        let start = running.cached;
        let mut tokens = running.tokens[start..start + turn.rows].to_vec();
        tokens.extend(&turn.drafts);
        let Append { slots, copies } = self.pool.append(running.sequence, &tokens)?;
        ensure!(copies.is_empty(), "sequences share whole pages only, yet page {:?} needs a copy", copies);
        let pages = self.pool.block_table(running.sequence)?.to_vec();
        let logits = if turn.rows == running.uncached() { 1 + turn.drafts.len() } else { 0 };
        Ok(SequenceRows { tokens, start, pages, slots, logits })
    }

    /// Takes new tokens from a turn's logits for as long as the drafts prove right, and rolls the cache back past the wrong ones.
    fn settle(&mut self, turn: &Turn, logits: Vec<Vec<f32>>) -> Result<usize> {
        let running = &mut self.running[turn.running];
        running.cached += turn.rows;
        let (mut new, mut accepted) = (0, 0);
        for (row, logits) in logits.into_iter().enumerate() {
            let token = self.options.sampling.token(&logits, running.id, running.tokens.len());
            running.tokens.push(token);
            if self.options.keep_logits {
                running.logits.push(logits);
            }
            new += 1;
            if running.is_done() || turn.drafts.get(row) != Some(&token) {
                break;
            }
            accepted += 1;
        }
        running.cached += accepted;
        self.stats.drafted += turn.drafts.len();
        self.stats.accepted += accepted;
        self.pool.truncate(running.sequence, running.cached)?;
        self.pool.commit(running.sequence)?;
        Ok(new)
    }

    fn release(&mut self) -> Result<Vec<(usize, Completion)>> {
        let mut done = vec![];
        for running in self.running.extract_if(.., |running| running.is_done()) {
            self.pool.free(running.sequence)?;
            let tokens = running.tokens[running.request.prompt.len()..].to_vec();
            done.push((running.id, Completion { tokens, logits: running.logits }));
        }
        Ok(done)
    }
}

impl Running {
    /// Tokens that the model has yet to see; 1 for a decoding sequence.
    fn uncached(&self) -> usize {
        self.tokens.len() - self.cached
    }

    fn new_tokens(&self) -> &[u32] {
        &self.tokens[self.request.prompt.len()..]
    }

    fn new_tokens_left(&self) -> usize {
        self.request.max_new_tokens - self.new_tokens().len()
    }

    fn is_done(&self) -> bool {
        self.new_tokens_left() == 0 || self.new_tokens().last().is_some_and(|token| self.request.stop_tokens.contains(token))
    }

    /// How many of a step's tokens were the prompt's.
    fn prompt_part(&self, sequence: &SequenceRows) -> usize {
        self.request.prompt.len().saturating_sub(sequence.start).min(sequence.tokens.len())
    }
}

fn check_request(id: usize, request: &Request, model: &Model) -> Result<()> {
    ensure!(!request.prompt.is_empty(), "request {id}: empty prompt");
    ensure!(request.max_new_tokens > 0, "request {id}: no new tokens asked for");
    let vocab = model.config.vocab_size;
    if let Some((at, token)) = request.prompt.iter().enumerate().find(|(_, token)| **token as usize >= vocab) {
        anyhow::bail!("request {id}: token {token} at {at} of the prompt, but the vocabulary has {vocab}");
    }
    let (tokens, most) = (request.prompt.len().saturating_add(request.max_new_tokens), model.config.max_positions);
    ensure!(tokens <= most, "request {id}: {tokens} tokens, but max_position_embeddings is {most}");
    Ok(())
}
