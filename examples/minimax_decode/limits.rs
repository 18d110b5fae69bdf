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
    let bytes = cache_bytes(args, config, page_size).saturating_add(request_bytes(args));
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
    let tokens = most_tokens(args).div_ceil(page_size as u128) * page_size as u128;
    let kv = kv_token_bytes(args.kv(), config) * config.layers.len() as u128;
    let sparse = config.layers.iter().filter(|layer| layer.sparse).count();
    let index_keys = (sparse * config.indexer.head_dim * args.dtype().size_in_bytes()) as u128;
    sequences.saturating_mul(tokens).saturating_mul(kv + index_keys)
}

fn kv_token_bytes(kind: KvKind, config: &Config) -> u128 {
    config.kv_heads as u128 * kind.token_bytes(config.head_dim) as u128
}

/// Prompts and completions.
fn request_bytes(args: &Args) -> u128 {
    let bytes = TOKEN_COPIES * most_tokens(args) * size_of::<u32>() as u128 + REQUEST_BYTES;
    (args.request_count() as u128).saturating_mul(bytes)
}

/// Tokens of a sequence at its end.
fn most_tokens(args: &Args) -> u128 {
    args.context as u128 + args.steps as u128
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

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::synthetic;
    use super::*;

    #[test]
    fn no_size_overflows() {
        let most = usize::MAX.to_string();
        let args = Args::parse_from(["minimax_decode", "--batch", &most, "--context", &most, "--steps", &most, "--requests", &most]);
        let config = Config { max_positions: usize::MAX, ..synthetic::config() };
        assert!(check(&args, &config).unwrap_err().to_string().contains("memory"));
    }

    #[test]
    fn the_cache_counts_whole_pages_of_every_layer() {
        let args = Args::parse_from("minimax_decode --batch 2 --context 100 --steps 29".split(' '));
        // 2 sequences of 2 pages of 128; 5 layers of 2 heads of 64 channels, K and V; 3 layers of 64 index channels; all F32.
        assert_eq!(cache_bytes(&args, &synthetic::config(), 128), 2 * 256 * (5 * 2 * 64 * 2 + 3 * 64) * 4);
        assert!(check(&args, &synthetic::config()).is_ok());
    }
}
