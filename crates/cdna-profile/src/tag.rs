//! What device memory holds.

use serde::Serialize;

/// What a range of device memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Tag {
    Key,
    Value,
    PageIds,
    KeyScales,
    ValueScales,
    Query,
    /// Task records, context lengths, query starts.
    Records,
    /// Output, log-sum-exp, partial results and their statistics.
    Output,
    /// Anything else: kernel arguments, constants.
    Other,
}

/// Address ranges by what they hold.
#[derive(Debug, Clone, Default)]
pub struct Tags {
    /// Start, end, tag; disjoint.
    ranges: Vec<(u64, u64, Tag)>,
}

impl Tags {
    /// Names `bytes` bytes at `address`.
    pub fn name(&mut self, address: u64, bytes: usize, tag: Tag) {
        self.ranges.push((address, address + bytes as u64, tag));
        self.ranges.sort_unstable();
    }

    /// What `address` holds.
    pub fn of(&self, address: u64) -> Tag {
        let after = self.ranges.partition_point(|&(start, _, _)| start <= address);
        match after.checked_sub(1).map(|i| self.ranges[i]) {
            Some((_, end, tag)) if address < end => tag,
            _ => Tag::Other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_the_tag_of_their_range() {
        let mut tags = Tags::default();
        tags.name(200, 50, Tag::Value);
        tags.name(100, 50, Tag::Key);
        let of = [99, 100, 149, 150, 200, 249, 250].map(|address| tags.of(address));
        assert_eq!(of, [Tag::Other, Tag::Key, Tag::Key, Tag::Other, Tag::Value, Tag::Value, Tag::Other]);
    }
}
