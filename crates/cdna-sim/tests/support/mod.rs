//! Shared by the tests that run AMD's code objects and those that compile their own.
#![allow(dead_code)]

use std::path::{Path, PathBuf};
use std::process::Command;

/// The repository's root.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// AMD's code object called `name`, or why it cannot be had.
pub fn aiter(name: &str) -> Result<Vec<u8>, String> {
    static FOLDER: std::sync::OnceLock<Result<PathBuf, String>> = std::sync::OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let output = Command::new(root().join("scripts/aiter-code-objects")).output().map_err(|e| e.to_string())?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).trim().to_string());
        }
        Ok(PathBuf::from(String::from_utf8_lossy(&output.stdout).trim()))
    });
    std::fs::read(folder.as_ref().map_err(String::clone)?.join(name)).map_err(|e| format!("{name}: {e}"))
}

/// Relative L2 distance.
pub fn relative_l2(got: &[f64], want: &[f64]) -> f64 {
    let square = |x: f64| x * x;
    let error: f64 = got.iter().zip(want).map(|(a, b)| square(a - b)).sum();
    let norm: f64 = want.iter().copied().map(square).sum();
    if got.iter().any(|x| !x.is_finite()) { f64::INFINITY } else { (error / norm).sqrt() }
}
