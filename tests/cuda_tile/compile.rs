//! Kernels as PTX by NVRTC, each compiled and parsed once.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, OnceLock};

use candle::{Error, Result};
use candle_paged_attn::jit::{Compiler, JitSettings, Specialization};
use candle_paged_attn::registry::ArchName;
use ptx_sim::Module;

static COMPILER: LazyLock<Compiler> = LazyLock::new(|| Compiler::new(JitSettings::default()));

/// A module that one thread compiles while others wait; an error as its text.
type Entry = Arc<OnceLock<std::result::Result<Arc<Module>, String>>>;

/// Whether tests can run. Without NVRTC they are skipped, each with a line that says so; in CI they fail.
pub fn has_nvrtc(test: &str) -> bool {
    match COMPILER.compiler_of(ArchName::Sm90) {
        Ok(_) => true,
        Err(error) if std::env::var_os("CI").is_none() => {
            eprintln!("skipped: {test}: {error}");
            false
        }
        Err(error) => panic!("{error}"),
    }
}

/// Skips a test where kernels cannot be compiled.
#[macro_export]
macro_rules! require_nvrtc {
    () => {
        if !$crate::compile::has_nvrtc(module_path!()) {
            return;
        }
    };
}

/// The kernel's module.
pub fn module(spec: &Specialization) -> Result<Arc<Module>> {
    static LOADED: LazyLock<Mutex<HashMap<Specialization, Entry>>> = LazyLock::new(Mutex::default);
    let entry = LOADED.lock().unwrap().entry(spec.clone()).or_default().clone();
    let load = || {
        let ptx = COMPILER.ptx(spec).map_err(|error| error.to_string())?;
        Module::parse(&ptx).map(Arc::new).map_err(|error| format!("{} for {}: {error}", spec.kernel, spec.arch))
    };
    entry.get_or_init(load).clone().map_err(Error::msg)
}

#[test]
fn amd_kernels_have_no_ptx() {
    use candle_paged_attn::jit::Source;
    let spec = Specialization { arch: ArchName::Gfx950, source: Source::Plan, kernel: "plan".into(), defines: vec![], options: vec![] };
    assert!(COMPILER.ptx(&spec).is_err());
}
