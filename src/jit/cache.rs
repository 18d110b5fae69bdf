//! The on-disk cache: compiled code by what it was compiled from, and by what compiler.
//!
//! An entry is one file, `ARCH/KERNEL-RECIPE-COMPILER.co`: the code object, then a trailer with both hashes in full, a checksum and
//! the length, so that tools for ELF files read it as it is. Files appear whole (written under another name, then renamed), so processes need no lock;
//! what a crash or a full disk left behind fails its checksum.

use std::fs;
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use sha2::{Digest, Sha256};

use super::recipe::{Hash, Recipe};

const MAGIC: &[u8; 16] = b"candle-paged-at1";
/// Recipe, compiler, checksum, length, magic.
const TRAILER: usize = 32 + 32 + 32 + 8 + MAGIC.len();
const EXTENSION: &str = "co";

/// A folder of entries.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Cache {
    folder: PathBuf,
}

/// What was found for a key.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Lookup {
    Hit(Vec<u8>),
    Absent,
    /// There is a file which is not, or is no longer, an entry for the key.
    Corrupt {
        path: PathBuf,
        reason: String,
    },
}

impl Cache {
    pub(super) fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// The entry that `compiler` made.
    pub(super) fn find(&self, recipe: &Recipe<'_>, compiler: &Hash) -> Lookup {
        read(&self.path(recipe, compiler), &recipe.hash, Some(compiler))
    }

    /// The newest sound entry of any compiler, and the files that are not sound.
    pub(super) fn find_any(&self, recipe: &Recipe<'_>) -> (Option<Vec<u8>>, Vec<Lookup>) {
        let mut corrupt = vec![];
        for path in self.paths_of(recipe) {
            match read(&path, &recipe.hash, None) {
                Lookup::Hit(code) => return (Some(code), corrupt),
                Lookup::Absent => {}
                bad => corrupt.push(bad),
            }
        }
        (None, corrupt)
    }

    /// Keeps `code`; readers see all of it or nothing. The error comes with the file's path.
    pub(super) fn keep(&self, recipe: &Recipe<'_>, compiler: &Hash, code: &[u8]) -> Result<(), (PathBuf, io::Error)> {
        let path = self.path(recipe, compiler);
        write_whole(&path, &[code, &trailer(&recipe.hash, compiler, code)]).map_err(|error| (path, error))
    }

    fn path(&self, recipe: &Recipe<'_>, compiler: &Hash) -> PathBuf {
        self.folder.join(recipe.arch).join(format!("{}{}.{EXTENSION}", prefix(recipe), hex(&compiler[..8])))
    }

    /// Files that may be an entry for the recipe, newest first.
    fn paths_of(&self, recipe: &Recipe<'_>) -> Vec<PathBuf> {
        let prefix = prefix(recipe);
        let Ok(entries) = fs::read_dir(self.folder.join(recipe.arch)) else { return vec![] };
        let entries = entries.flatten().filter(|entry| entry.file_name().to_str().is_some_and(|name| name.starts_with(&prefix)));
        let time = |entry: &fs::DirEntry| entry.metadata().and_then(|meta| meta.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
        let mut found: Vec<_> = entries.map(|entry| (time(&entry), entry.path())).collect();
        found.sort_by(|a, b| b.cmp(a));
        found.into_iter().map(|(_, path)| path).collect()
    }
}

/// How the names of all entries for a recipe begin.
fn prefix(recipe: &Recipe<'_>) -> String {
    format!("{}-{}-", recipe.kernel, hex(&recipe.hash[..16]))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn trailer(recipe: &Hash, compiler: &Hash, code: &[u8]) -> Vec<u8> {
    let length = (code.len() as u64).to_le_bytes();
    [&recipe[..], compiler, &checksum(recipe, compiler, code), &length, MAGIC].concat()
}

fn checksum(recipe: &Hash, compiler: &Hash, code: &[u8]) -> Hash {
    Sha256::new().chain_update(recipe).chain_update(compiler).chain_update(code).finalize().into()
}

/// Reads and checks the entry at `path`; `compiler` is `None` where any will do.
fn read(path: &Path, recipe: &Hash, compiler: Option<&Hash>) -> Lookup {
    let corrupt = |reason: String| Lookup::Corrupt { path: path.to_path_buf(), reason };
    match fs::read(path) {
        Ok(bytes) => match open(bytes, recipe, compiler) {
            Ok(code) => Lookup::Hit(code),
            Err(reason) => corrupt(reason.to_string()),
        },
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Lookup::Absent,
        Err(error) => corrupt(error.to_string()),
    }
}

/// The code object of an entry's bytes, or what is wrong with them.
fn open(mut bytes: Vec<u8>, recipe: &Hash, compiler: Option<&Hash>) -> Result<Vec<u8>, &'static str> {
    let Some(length) = bytes.len().checked_sub(TRAILER) else { return Err("shorter than an entry's trailer") };
    let (code, trailer) = bytes.split_at(length);
    let (hashes, rest) = trailer.split_at(96);
    let (of_recipe, of_rest) = hashes.split_at(32);
    let (of_compiler, of_code) = of_rest.split_at(32);
    let mismatch = [
        (rest[8..] != MAGIC[..], "no entry's trailer at its end: cut short, or of another format"),
        (rest[..8] != (length as u64).to_le_bytes(), "another length than the trailer says"),
        (of_recipe != recipe || compiler.is_some_and(|hash| of_compiler != hash), "an entry for another key"),
        (Sha256::new().chain_update(of_recipe).chain_update(of_compiler).chain_update(code).finalize()[..] != *of_code, "a wrong checksum"),
    ];
    if let Some((_, reason)) = mismatch.iter().find(|(wrong, _)| *wrong) {
        return Err(reason);
    }
    bytes.truncate(length);
    Ok(bytes)
}

/// Writes a file that appears whole, readable to all that the process's umask lets.
fn write_whole(path: &Path, parts: &[&[u8]]) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let mut options = tempfile::Builder::new();
    options.prefix(".writing-");
    #[cfg(unix)]
    options.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let mut file = options.tempfile_in(folder)?;
    parts.iter().try_for_each(|part| file.write_all(part))?;
    file.persist(path)?;
    Ok(())
}
