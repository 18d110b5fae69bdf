//! The way to a code object: cache, else compiler, once a process.

use candle::Error;
use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use super::cache::{Cache, Lookup};
use super::clang::Clang;
use super::event::{JitEvent, Progress};
use super::recipe::{Hash, Recipe, hash_of};
use super::search;
use super::sources::AMD;
use super::specialization::Specialization;

/// Where the compiler and the cache are, and who hears of the work. `Default` takes the environment's (see [the module](super)).
#[derive(Clone, Default)]
pub struct JitSettings {
    /// The clang to use, alone.
    pub clang: Option<PathBuf>,
    /// The cache's folder; it is made when first written.
    pub cache_dir: Option<PathBuf>,
    /// Is told of every step.
    pub progress: Option<Progress>,
}

impl fmt::Debug for JitSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let progress = self.progress.as_ref().map(|_| "a callback");
        f.debug_struct("JitSettings").field("clang", &self.clang).field("cache_dir", &self.cache_dir).field("progress", &progress).finish()
    }
}

/// Gives code objects for specializations.
#[derive(Debug)]
pub struct Compiler {
    settings: JitSettings,
    cache: Option<Cache>,
    /// Looked for when first needed; a search that failed is made again, as a compiler may have been installed.
    clang: OnceLock<Clang>,
}

/// A code object that one thread gets while others wait; an error as its text.
type Flight = Arc<OnceLock<Result<Vec<u8>, String>>>;
/// What is being got: the recipe, where it is kept, and by which compiler.
type FlightKey = (Hash, Option<Cache>, Option<PathBuf>);

/// Over all compilers of the process: eight devices compile a kernel once.
static IN_FLIGHT: LazyLock<Mutex<HashMap<FlightKey, Flight>>> = LazyLock::new(Mutex::default);

impl Compiler {
    /// Looks for nothing yet; neither a compiler nor the cache's folder need be there.
    pub fn new(settings: JitSettings) -> Self {
        let cache = search::cache_folder(settings.cache_dir.as_deref()).map(Cache::new);
        Self { settings, cache, clang: OnceLock::new() }
    }

    /// The cache's folder; `None` where there is neither a setting nor a home.
    pub fn cache_dir(&self) -> Option<&Path> {
        self.cache.as_ref().map(Cache::folder)
    }

    /// The code object of `spec`: an ELF file for the HIP runtime's `hipModuleLoadData`.
    ///
    /// From the cache where it has an entry made by the compiler that is found, or, where none is found, by any. Else compiled, and kept. Threads
    /// that ask for the same wait for the first. Errors: no entry and no compiler, naming what was looked at; a kernel that does not
    /// compile, with the compiler's messages. A cache that cannot be read or written is no error.
    pub fn code_object(&self, spec: &Specialization) -> candle::Result<Vec<u8>> {
        spec.check()?;
        let options = spec.arguments();
        let arch = spec.arch.to_string();
        let recipe = Recipe::new(&arch, &spec.kernel, spec.source.path(), AMD, &options);
        let key = (recipe.hash, self.cache.clone(), self.settings.clang.clone());
        let flight = lock().entry(key.clone()).or_default().clone();
        let mut first = false;
        let result = flight.get_or_init(|| {
            first = true;
            self.get(spec, &recipe)
        });
        if first {
            lock().remove(&key);
        } else if result.is_ok() {
            self.report(|| hit(spec));
        }
        result.clone().map_err(Error::msg)
    }

    /// What [`Compiler::code_object`] gives, on the one thread that gets it.
    fn get(&self, spec: &Specialization, recipe: &Recipe<'_>) -> Result<Vec<u8>, String> {
        let clang = self.clang();
        if let Some(code) = self.cached(recipe, clang.as_ref().ok().copied()) {
            self.report(|| hit(spec));
            return Ok(code);
        }
        let clang = clang.map_err(|why| format!("jit: {}, and {why}", self.absent(spec)))?;
        self.report(|| JitEvent::Compiling { kernel: spec.kernel.clone(), arch: spec.arch });
        let start = Instant::now();
        let code = clang.compile(spec)?;
        self.report(|| JitEvent::Compiled { kernel: spec.kernel.clone(), arch: spec.arch, seconds: start.elapsed().as_secs_f64() });
        if let Some(Err((path, error))) = self.cache.as_ref().map(|cache| cache.keep(recipe, &hash_of(&clang.version), &code)) {
            self.report(|| JitEvent::CacheWriteFailed { path, error: error.to_string() });
        }
        Ok(code)
    }

    /// The cache's entry: of `clang`, or, without one, of any compiler.
    fn cached(&self, recipe: &Recipe<'_>, clang: Option<&Clang>) -> Option<Vec<u8>> {
        let cache = self.cache.as_ref()?;
        let (code, corrupt) = match clang {
            Some(clang) => match cache.find(recipe, &hash_of(&clang.version)) {
                Lookup::Hit(code) => (Some(code), vec![]),
                other => (None, vec![other]),
            },
            None => cache.find_any(recipe),
        };
        for entry in corrupt {
            if let Lookup::Corrupt { path, reason } = entry {
                self.report(|| JitEvent::CacheCorrupt { path, reason });
            }
        }
        code
    }

    /// That there is no entry, and where it would be. Kernels of one name differ in macros: those that are not 0 are told.
    fn absent(&self, spec: &Specialization) -> String {
        let macros: Vec<_> = spec.defines.iter().filter(|(_, value)| value != "0").map(|(name, value)| format!("{name}={value}")).collect();
        let kernel = format!("{} for {} ({})", spec.kernel, spec.arch, macros.join(" "));
        match self.cache_dir() {
            Some(folder) => format!("{kernel} is not in the cache {}", folder.display()),
            None => format!("{kernel} has no cache to be in (CANDLE_PAGED_ATTN_CACHE and HOME are not set)"),
        }
    }

    fn clang(&self) -> Result<&Clang, String> {
        if let Some(clang) = self.clang.get() {
            return Ok(clang);
        }
        let clang = Clang::find(self.settings.clang.as_deref())?;
        Ok(self.clang.get_or_init(|| clang))
    }

    fn report(&self, event: impl FnOnce() -> JitEvent) {
        if let Some(progress) = &self.settings.progress {
            progress(&event());
        }
    }
}

fn hit(spec: &Specialization) -> JitEvent {
    JitEvent::CacheHit { kernel: spec.kernel.clone(), arch: spec.arch }
}

fn lock() -> std::sync::MutexGuard<'static, HashMap<FlightKey, Flight>> {
    IN_FLIGHT.lock().unwrap_or_else(PoisonError::into_inner)
}
