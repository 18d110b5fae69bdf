//! Where a compiler and the cache are looked for.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Oldest clang that knows every arch and builtin the kernels use.
pub(super) const OLDEST: u32 = 20;
/// Newest clang that is looked for by its numbered name.
const NEWEST: u32 = 24;

/// A variable that is set to something.
fn variable(name: &str) -> Option<OsString> {
    env::var_os(name).filter(|value| !value.is_empty())
}

/// The one compiler asked for, or else the programs to try, in order.
pub(super) fn clangs(given: Option<&Path>) -> Vec<PathBuf> {
    if let Some(clang) = given.map(PathBuf::from).or_else(|| variable("CANDLE_PAGED_ATTN_CLANG").map(PathBuf::from)) {
        return vec![clang];
    }
    let roots = variable("ROCM_PATH").map(PathBuf::from).into_iter().chain([PathBuf::from("/opt/rocm")]);
    let mut programs: Vec<_> = roots.map(|root| root.join("llvm/bin/clang")).collect();
    programs.dedup();
    programs.push("clang".into());
    programs.extend((OLDEST..=NEWEST).rev().map(|version| PathBuf::from(format!("clang-{version}"))));
    programs
}

/// The folder of the cache; `None` where there is neither a setting nor a home.
pub(super) fn cache_folder(given: Option<&Path>) -> Option<PathBuf> {
    let set = given.map(PathBuf::from).or_else(|| variable("CANDLE_PAGED_ATTN_CACHE").map(PathBuf::from));
    let folder = set.or_else(|| {
        // The XDG specification has relative paths ignored.
        let caches = variable("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
        let home = || env::home_dir().filter(|path| path.is_absolute()).map(|home| home.join(".cache"));
        Some(caches.or_else(home)?.join("candle-paged-attn"))
    });
    // Wherever the process goes later.
    folder.and_then(|folder| std::path::absolute(folder).ok())
}
