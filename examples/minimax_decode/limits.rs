//! What a run would need, held against the model and the machine before anything is made.

use anyhow::{Result, ensure};

use super::args::Args;
use super::config::Config;
use super::kv::KvKind;

/// Taken for granted where the machine does not say what memory it has.
const UNKNOWN_MEMORY: u128 = 64 << 30;

/// Bytes that a request's bookkeeping takes besides its tokens, and copies of each token that are about.
const REQUEST_BYTES: u128 = 512;
const TOKEN_COPIES: u128 = 6;

/// Refuses sizes that the model or the machine's memory has no room for.
pub fn check(args: &Args, config: &Config) -> Result<()> {
    let (tokens, most) = (args.context.saturating_add(args.steps), config.max_positions);
    ensure!(tokens <= most, "--context, --steps: {tokens} tokens, but max_position_embeddings is {most}");
    let (page_size, block) = (args.page_size.unwrap_or(config.indexer.block_size), config.indexer.block_size);
    ensure!(page_size > 0, "--page-size: must be at least 1");
    ensure!(
        !config.has_sparse_layers() || page_size == block,
        "--page-size: {page_size}, but the sparse layers select blocks of {block} keys, which must be the pages"
    );
    let bytes = cache_bytes(args, config, page_size) + request_bytes(args);
    let what = format!("--batch {}, --context {}, --steps {}, {} requests", args.batch, args.context, args.steps, args.request_count());
    check_memory(&what, bytes)
}

/// Refuses `what`, which takes `bytes`, where less is free.
pub fn check_memory(what: &str, bytes: u128) -> Result<()> {
    let free = available_bytes().unwrap_or(UNKNOWN_MEMORY);
    let gb = |bytes: u128| bytes as f64 / 1e9;
    ensure!(bytes <= free, "{what}: takes {:.1} GB, but {:.1} GB of memory are available", gb(bytes), gb(free));
    Ok(())
}

/// K, V and index keys of the sequences that run at a time.
fn cache_bytes(args: &Args, config: &Config, page_size: usize) -> u128 {
    let sequences = args.batch.min(args.request_count()) as u128;
    let tokens = (args.context + args.steps).div_ceil(page_size) as u128 * page_size as u128;
    let kv = kv_token_bytes(args.kv(), config) * config.layers.len() as u128;
    let sparse = config.layers.iter().filter(|layer| layer.sparse).count();
    let index_keys = (sparse * config.indexer.head_dim * args.dtype().size_in_bytes()) as u128;
    sequences * tokens * (kv + index_keys)
}

fn kv_token_bytes(kind: KvKind, config: &Config) -> u128 {
    config.kv_heads as u128 * kind.token_bytes(config.head_dim) as u128
}

/// Prompts and completions.
fn request_bytes(args: &Args) -> u128 {
    let tokens = (args.context + args.steps) as u128 * size_of::<u32>() as u128;
    args.request_count() as u128 * (TOKEN_COPIES * tokens + REQUEST_BYTES)
}

/// What this process may still take: the machine's free memory, or less where a control group says so. `None`: not a Linux machine.
fn available_bytes() -> Option<u128> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let free = line.trim().strip_suffix("kB")?.trim().parse::<u128>().ok()? * 1024;
    let number = |file: &str| std::fs::read_to_string(format!("/sys/fs/cgroup/{file}")).ok()?.trim().parse::<u128>().ok();
    let group = number("memory.max").zip(number("memory.current")).map(|(most, used)| most.saturating_sub(used));
    Some(group.map_or(free, |group| group.min(free)))
}
