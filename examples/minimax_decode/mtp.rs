//! Drafts for multi-token verify: prompt look-up, which bets that a sequence repeats itself.

/// Longest tail of the sequence that is looked up.
const LONGEST_TAIL: usize = 3;

/// Up to `count` tokens that followed the latest earlier occurrence of the sequence's last tokens; the longest tail found wins. A
/// continuation that runs into the tail itself goes on from there, so a loop is foreseen however short it is.
pub fn draft(tokens: &[u32], count: usize) -> Vec<u32> {
    let after = (1..=LONGEST_TAIL.min(tokens.len())).rev().find_map(|length| continuation(tokens, length));
    let Some(after) = after else { return vec![] };
    let mut drafts: Vec<u32> = vec![];
    for index in after..after + count {
        let token = tokens.get(index).or_else(|| drafts.get(index - tokens.len())).copied();
        drafts.extend(token);
    }
    drafts
}

/// Where the latest earlier occurrence of the last `length` tokens ends.
fn continuation(tokens: &[u32], length: usize) -> Option<usize> {
    let start = tokens.len() - length;
    let (tail, earlier) = (&tokens[start..], &tokens[..tokens.len() - 1]);
    earlier.windows(length).rposition(|window| window == tail).map(|at| at + length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drafts_follow_the_longest_and_latest_match() {
        assert_eq!(draft(&[1, 2, 3, 9, 4, 2, 3, 8, 1, 2, 3], 2), [9, 4]);
        assert_eq!(draft(&[5, 6, 5, 7, 5], 3), [7, 5, 7]);
        assert_eq!(draft(&[4, 4], 3), [4, 4, 4]);
        assert!([&[1, 2, 3][..], &[7], &[]].iter().all(|tokens| draft(tokens, 4).is_empty()));
    }
}
