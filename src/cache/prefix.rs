//! Full pages found again by what they hold: a tree whose edges are pages of token ids.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};

/// Where a page hangs in the tree. Ids are never used twice, so a page whose parent is gone can never be reached by mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Parent {
    /// The start of a sequence, apart for each salt.
    Root(u64),
    /// After another page.
    Page(NodeId),
}

/// One full page under one parent: by induction, one exact prefix of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct NodeId(u64);

struct Node {
    hash: u64,
    parent: Parent,
    tokens: Box<[u32]>,
    page: u32,
}

/// Looks pages up by the hash of (parent, tokens), then compares both: a collision costs a comparison, never a wrong page.
pub(super) struct PrefixIndex<S = RandomState> {
    hasher: S,
    by_hash: HashMap<u64, Vec<NodeId>>,
    nodes: HashMap<NodeId, Node>,
    next: u64,
}

impl<S: BuildHasher> PrefixIndex<S> {
    pub fn new(hasher: S) -> Self {
        Self { hasher, by_hash: HashMap::new(), nodes: HashMap::new(), next: 0 }
    }

    /// The page holding `tokens` after `parent`.
    pub fn find(&self, parent: Parent, tokens: &[u32]) -> Option<(NodeId, u32)> {
        let candidates = self.by_hash.get(&self.hasher.hash_one((parent, tokens)))?;
        candidates.iter().find_map(|&id| {
            let node = self.nodes.get(&id)?;
            (node.parent == parent && *node.tokens == *tokens).then_some((id, node.page))
        })
    }

    /// Enters a page that [`PrefixIndex::find`] does not find; `None` where its parent is gone, so that nothing could reach it.
    pub fn insert(&mut self, parent: Parent, tokens: &[u32], page: u32) -> Option<NodeId> {
        if matches!(parent, Parent::Page(id) if !self.nodes.contains_key(&id)) {
            return None;
        }
        let (id, hash) = (NodeId(self.next), self.hasher.hash_one((parent, tokens)));
        self.next += 1;
        self.by_hash.entry(hash).or_default().push(id);
        self.nodes.insert(id, Node { hash, parent, tokens: tokens.into(), page });
        Some(id)
    }

    /// Forgets a page.
    pub fn remove(&mut self, id: NodeId) {
        let Some(node) = self.nodes.remove(&id) else { return };
        if let Some(ids) = self.by_hash.get_mut(&node.hash) {
            ids.retain(|&other| other != id);
            if ids.is_empty() {
                self.by_hash.remove(&node.hash);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::hash::Hasher;

    use super::*;

    /// Every key collides.
    #[derive(Default)]
    struct Constant;

    impl Hasher for Constant {
        fn finish(&self) -> u64 {
            7
        }
        fn write(&mut self, _: &[u8]) {}
    }

    #[test]
    fn collisions_never_share_a_wrong_page() {
        let mut index = PrefixIndex::new(std::hash::BuildHasherDefault::<Constant>::default());
        let root = Parent::Root(0);
        let a = index.insert(root, &[1, 2], 10).unwrap();
        let b = index.insert(root, &[3, 4], 11).unwrap();
        let c = index.insert(Parent::Page(a), &[3, 4], 12).unwrap();
        assert_eq!(index.find(root, &[1, 2]), Some((a, 10)));
        assert_eq!(index.find(root, &[3, 4]), Some((b, 11)));
        assert_eq!(index.find(Parent::Page(a), &[3, 4]), Some((c, 12)));
        assert_eq!(index.find(Parent::Page(b), &[3, 4]), None);
        assert_eq!(index.find(Parent::Root(1), &[1, 2]), None, "another salt");
        assert_eq!(index.find(root, &[1]), None);
        index.remove(a);
        assert_eq!(index.find(root, &[1, 2]), None);
        assert_eq!(index.find(root, &[3, 4]), Some((b, 11)));
        assert_eq!(index.insert(Parent::Page(a), &[5, 6], 13), None, "its parent is gone");
        let again = index.insert(root, &[1, 2], 14).unwrap();
        assert_ne!(again, a);
        assert_eq!(index.find(Parent::Page(again), &[3, 4]), None, "children hang on the page, not on its content");
        index.remove(a);
        [again, b, c].into_iter().for_each(|id| index.remove(id));
        assert!(index.by_hash.is_empty() && index.nodes.is_empty());
    }
}
