//! Which tiles of its context a row needs.

/// KV tokens of a tile, the unit a task's range is counted in, on CPUs and AMD GPUs. [`crate::registry::ArchName::tile_tokens`] has every arch's.
pub const TILE_TOKENS: usize = 256;

/// Tiles `first..end` of a row's context; of `n` tokens, tile `i` holds tokens `n * i .. n * (i + 1)`. Tile numbers are at most 2^31 / `n`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TileRange {
    /// First tile.
    pub first: i32,
    /// The tile after the last.
    pub end: i32,
}

impl TileRange {
    /// Number of tiles, 0 where the row attends nothing.
    pub fn tiles(self) -> u32 {
        u32::try_from(i64::from(self.end) - i64::from(self.first)).unwrap_or(0)
    }
}

/// The tiles of `tile_tokens` tokens that a row of `query_len` new tokens attends, the new tokens being the last of its `context_len` tokens.
///
/// Query i sits at position `context_len - query_len + i` and attends positions up to its own, with a window W those above `position - W`
/// only. So the range ends with the tile of the last token, and starts with the tile of the first token that the first query attends (a
/// query at a negative position attends nothing, and the query at position 0 starts at token 0). A row without context (`context_len <=
/// 0`) or without queries needs no tile.
pub fn tile_range(context_len: i32, query_len: usize, window: Option<usize>, tile_tokens: usize) -> TileRange {
    if context_len <= 0 || query_len == 0 {
        return TileRange::default();
    }
    let context_len = context_len as usize;
    let first = first_token(context_len, query_len, window) / tile_tokens;
    TileRange { first: first as i32, end: context_len.div_ceil(tile_tokens) as i32 }
}

/// The first token that any of a row's `query_len` queries (at least 1) attends: the first query sits at `context_len - query_len`, and a
/// window W (at least 1) reaches the token W - 1 before it. Below `context_len` where there is any context.
pub(crate) fn first_token(context_len: usize, query_len: usize, window: Option<usize>) -> usize {
    let reach = window.map_or(usize::MAX, |window| window.saturating_add(query_len).saturating_sub(1));
    context_len.saturating_sub(reach)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tile_range(context_len: i32, query_len: usize, window: Option<usize>) -> TileRange {
        super::tile_range(context_len, query_len, window, TILE_TOKENS)
    }

    #[test]
    fn ends_with_the_last_token() {
        for (context_len, end) in [(1, 1), (255, 1), (256, 1), (257, 2), (512, 2), (513, 3), (i32::MAX, 1 << 23)] {
            assert_eq!(tile_range(context_len, 1, None), TileRange { first: 0, end }, "context {context_len}");
        }
    }

    #[test]
    fn tiles_of_another_size_count_otherwise() {
        assert_eq!(super::tile_range(257, 1, None, 128), TileRange { first: 0, end: 3 });
        assert_eq!(super::tile_range(1000, 4, Some(300), 128), TileRange { first: 5, end: 8 });
        assert_eq!(super::tile_range(i32::MAX, 1, None, 128).end, 1 << 24);
    }

    #[test]
    fn empty_rows_need_nothing() {
        for context_len in [0, -1, i32::MIN] {
            assert_eq!(tile_range(context_len, 4, Some(1)).tiles(), 0, "context {context_len}");
        }
        assert_eq!(tile_range(1000, 0, None).tiles(), 0);
    }

    #[test]
    fn extreme_sizes_do_not_overflow() {
        let whole = TileRange { first: 0, end: 1 << 23 };
        assert_eq!(tile_range(i32::MAX, usize::MAX, Some(usize::MAX)), whole);
        assert_eq!(tile_range(i32::MAX, 1, Some(usize::MAX)), whole);
        assert_eq!(tile_range(i32::MAX, usize::MAX, Some(1)), whole);
        assert_eq!(tile_range(i32::MAX, 1, Some(1)), TileRange { first: (1 << 23) - 1, end: 1 << 23 });
        assert_eq!(tile_range(1, usize::MAX, Some(1)), TileRange { first: 0, end: 1 });
    }
}
