//! Scripts that stand in for clang, and what the tests ask of a compiler.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use candle_paged_attn::jit::{Compiler, JitEvent, JitSettings, Source, Specialization};
use candle_paged_attn::registry::ArchName;
use tempfile::TempDir;

pub const DEBIAN_22: &str = "Debian clang version 22.1.8 (1~deb12u1)";
pub const ROCM_20: &str = "AMD clang version 20.0.0git (https://github.com/RadeonOpenCompute/llvm-project roc-7.0.0 25314 0000)";

/// A folder with a fake clang, a log of its calls and a cache.
pub struct Bench {
    pub folder: TempDir,
    pub events: Arc<Mutex<Vec<JitEvent>>>,
}

impl Bench {
    pub fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap(), events: Arc::default() }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn cache(&self) -> PathBuf {
        self.path("cache")
    }

    /// A script that prints `version`, and compiles by writing its arguments into the output after `seconds`.
    pub fn clang(&self, name: &str, version: &str, seconds: &str) -> PathBuf {
        let log = self.path("log");
        let body = format!(
            r#"if [ "$1" = --version ]; then echo '{version}'; exit; fi
sleep {seconds}
echo "$*" >> '{}'
for argument; do output=$argument; done
echo "$*" | sed 's/ -o .*//' > "$output"
"#,
            log.display()
        );
        self.script(name, &body)
    }

    pub fn script(&self, name: &str, body: &str) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        // By another process: a thread that forks meanwhile would hold the file open for writing, and it could not be run.
        let mut writer = Command::new("sh");
        writer.args(["-c", "cat > \"$0\" && chmod 755 \"$0\""]).arg(&path).stdin(Stdio::piped());
        let mut writer = writer.spawn().unwrap();
        writer.stdin.take().unwrap().write_all(format!("#!/bin/sh\n{body}").as_bytes()).unwrap();
        assert!(writer.wait().unwrap().success());
        path
    }

    /// How often a script compiled.
    pub fn compilations(&self) -> usize {
        fs::read_to_string(self.path("log")).map_or(0, |log| log.lines().count())
    }

    pub fn compiler(&self, clang: impl Into<PathBuf>) -> Compiler {
        self.compiler_with(clang, &self.cache())
    }

    pub fn compiler_with(&self, clang: impl Into<PathBuf>, cache: &Path) -> Compiler {
        let events = self.events.clone();
        Compiler::new(JitSettings {
            clang: Some(clang.into()),
            cache_dir: Some(cache.into()),
            progress: Some(Arc::new(move |event| events.lock().unwrap().push(event.clone()))),
            ..JitSettings::default()
        })
    }

    /// The events since the last call, by name.
    pub fn events(&self) -> Vec<&'static str> {
        std::mem::take(&mut *self.events.lock().unwrap()).iter().map(name).collect()
    }

    /// The cache's only entry.
    pub fn entry(&self) -> PathBuf {
        let entries = files(&self.cache());
        assert_eq!(entries.len(), 1, "{entries:?}");
        entries[0].clone()
    }
}

fn name(event: &JitEvent) -> &'static str {
    match event {
        JitEvent::CacheHit { .. } => "hit",
        JitEvent::Compiling { .. } => "compiling",
        JitEvent::Compiled { .. } => "compiled",
        JitEvent::CacheCorrupt { .. } => "corrupt",
        JitEvent::CacheWriteFailed { .. } => "not kept",
        _ => "unknown",
    }
}

/// Every file below `folder`.
pub fn files(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return vec![] };
    let mut found: Vec<_> = entries
        .flat_map(|entry| {
            let path = entry.unwrap().path();
            if path.is_dir() { files(&path) } else { vec![path] }
        })
        .collect();
    found.sort();
    found
}

pub fn spec(kernel: &str) -> Specialization {
    Specialization {
        arch: ArchName::Gfx950,
        source: Source::Plan,
        kernel: kernel.to_string(),
        defines: [("PA_BUCKET", "16"), ("PA_TILE", "256"), ("PA_MIN_MAX", "1"), ("PA_RAGGED", "0")]
            .map(|(name, value)| (name.into(), value.into()))
            .into(),
        options: vec![],
    }
}
