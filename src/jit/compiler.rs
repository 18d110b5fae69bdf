//! The way to a code object: cache, else compiler, once a process.

use candle::{Error, bail};
use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use super::cache::{Cache, Lookup};
use super::event::{JitEvent, Progress};
use super::recipe::{Hash, Recipe, hash_of};
use super::search;
use super::sources::files;
use super::specialization::Specialization;
use super::toolchain::Toolchain;
use crate::registry::ArchName;

/// Where the compiler and the cache are, and who hears of the work. `Default` takes the environment's (see [the module](super)).
#[derive(Clone, Default)]
pub struct JitSettings {
    /// The clang to use, alone.
    pub clang: Option<PathBuf>,
    /// The NVRTC library to use, alone.
    pub nvrtc: Option<PathBuf>,
    /// The cache's folder; it is made when first written.
    pub cache_dir: Option<PathBuf>,
    /// Is told of every step.
    pub progress: Option<Progress>,
}

impl fmt::Debug for JitSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let progress = self.progress.as_ref().map(|_| "a callback");
        f.debug_struct("JitSettings")
            .field("clang", &self.clang)
            .field("nvrtc", &self.nvrtc)
            .field("cache_dir", &self.cache_dir)
            .field("progress", &progress)
            .finish()
    }
}

/// Gives code objects for specializations.
#[derive(Debug)]
pub struct Compiler {
    settings: JitSettings,
    cache: Option<Cache>,
    /// Looked for when first needed; a search that failed is made again, as a compiler may have been installed.
    clang: OnceLock<Toolchain>,
    nvrtc: OnceLock<Toolchain>,
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
        Self { settings, cache, clang: OnceLock::new(), nvrtc: OnceLock::new() }
    }

    /// The cache's folder; `None` where there is neither a setting nor a home.
    pub fn cache_dir(&self) -> Option<&Path> {
        self.cache.as_ref().map(Cache::folder)
    }

    /// The code object of `spec`: an ELF file for the HIP runtime's `hipModuleLoadData`, or CUDA's `cuModuleLoadData`.
    ///
    /// From the cache where it has an entry made by the compiler that is found, or, where none is found, by any. Else compiled, and kept. Threads
    /// that ask for the same wait for the first. Errors: no entry and no compiler, naming what was looked at; a kernel that does not
    /// compile, with the compiler's messages. A cache that cannot be read or written is no error.
    pub fn code_object(&self, spec: &Specialization) -> candle::Result<Vec<u8>> {
        let root = spec.check()?;
        let options = spec.arguments();
        let arch = spec.arch.to_string();
        let recipe = Recipe::new(&arch, &spec.kernel, root, files(spec.arch), &options);
        let given = if spec.arch.is_cuda() { &self.settings.nvrtc } else { &self.settings.clang };
        let key = (recipe.hash, self.cache.clone(), given.clone());
        let flight = lock().entry(key.clone()).or_default().clone();
        let mut first = false;
        let result = flight.get_or_init(|| {
            first = true;
            self.get(spec, root, &recipe)
        });
        if first {
            lock().remove(&key);
        } else if result.is_ok() {
            self.report(|| hit(spec));
        }
        result.clone().map_err(Error::msg)
    }

    /// What [`Compiler::code_object`] gives, on the one thread that gets it.
    fn get(&self, spec: &Specialization, root: &str, recipe: &Recipe<'_>) -> Result<Vec<u8>, String> {
        let compiler = self.toolchain(spec.arch);
        if let Some(code) = self.cached(recipe, compiler.as_ref().ok().copied()) {
            self.report(|| hit(spec));
            return Ok(code);
        }
        let compiler = compiler.map_err(|why| format!("jit: {}, and {why}", self.absent(spec)))?;
        self.report(|| JitEvent::Compiling { kernel: spec.kernel.clone(), arch: spec.arch });
        let start = Instant::now();
        let code = compiler.compile(spec, root)?;
        self.report(|| JitEvent::Compiled { kernel: spec.kernel.clone(), arch: spec.arch, seconds: start.elapsed().as_secs_f64() });
        if let Some(Err((path, error))) = self.cache.as_ref().map(|cache| cache.keep(recipe, &hash_of(compiler.version()), &code)) {
            self.report(|| JitEvent::CacheWriteFailed { path, error: error.to_string() });
        }
        Ok(code)
    }

    /// The cache's entry: of `compiler`, or, without one, of any.
    fn cached(&self, recipe: &Recipe<'_>, compiler: Option<&Toolchain>) -> Option<Vec<u8>> {
        let cache = self.cache.as_ref()?;
        let (code, corrupt) = match compiler {
            Some(compiler) => match cache.find(recipe, &hash_of(compiler.version())) {
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

    /// The PTX of `spec`, the virtual instructions that NVIDIA's code is assembled from, for tools that read or execute them. Compiled anew by every call;
    /// the cache holds code objects alone.
    ///
    /// # Errors
    /// An AMD arch, no NVRTC, or a kernel that does not compile, with the compiler's messages.
    pub fn ptx(&self, spec: &Specialization) -> candle::Result<String> {
        let root = spec.check()?;
        match self.toolchain(spec.arch).map_err(Error::msg)? {
            Toolchain::Nvrtc(nvrtc) => nvrtc.ptx(spec, root).map_err(Error::msg),
            Toolchain::Clang(_) => bail!("jit: {} is for {}, whose kernels are never PTX", spec.kernel, spec.arch),
        }
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

    /// The compiler of kernels for `arch` and its version, such as `NVRTC 13.0`. Errors: none is found, naming what was looked at.
    pub fn compiler_of(&self, arch: ArchName) -> candle::Result<&str> {
        self.toolchain(arch).map(Toolchain::version).map_err(Error::msg)
    }

    fn toolchain(&self, arch: ArchName) -> Result<&Toolchain, String> {
        let (known, given) = match arch.is_cuda() {
            true => (&self.nvrtc, &self.settings.nvrtc),
            false => (&self.clang, &self.settings.clang),
        };
        if let Some(toolchain) = known.get() {
            return Ok(toolchain);
        }
        let found = Toolchain::find(arch, given.as_deref())?;
        Ok(known.get_or_init(|| found))
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
