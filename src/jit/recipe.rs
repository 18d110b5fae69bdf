//! What a code object is made of, the compiler apart.

use sha2::{Digest, Sha256};

/// SHA-256.
pub(super) type Hash = [u8; 32];

/// Sources and options: with one compiler they give one code object. Knows of no particular compiler.
#[derive(Clone, Copy, Debug)]
pub(super) struct Recipe<'a> {
    /// Names the cache's folder: entries of one arch lie together.
    pub arch: &'a str,
    /// Names the entry's file, for people.
    pub kernel: &'a str,
    /// Of everything.
    pub hash: Hash,
}

impl<'a> Recipe<'a> {
    /// `root`: the file that is compiled, one of `files` (path and text); `options`: those to the compiler, macros included.
    pub(super) fn new(arch: &'a str, kernel: &'a str, root: &str, files: &[(&str, &str)], options: &[String]) -> Self {
        let counts = [files.len(), options.len()];
        let files = files.iter().flat_map(|(path, text)| [*path, *text]);
        let mut hash = Sha256::new();
        counts.iter().for_each(|n| hash.update((*n as u64).to_le_bytes()));
        // Each text with its length, so that no two lists read alike.
        for text in [arch, kernel, root].into_iter().chain(files).chain(options.iter().map(String::as_str)) {
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text);
        }
        Self { arch, kernel, hash: hash.finalize().into() }
    }
}

/// The hash of a compiler's identity, such as its version line.
pub(super) fn hash_of(text: &str) -> Hash {
    Sha256::digest(text).into()
}
