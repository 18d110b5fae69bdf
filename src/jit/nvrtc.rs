//! NVRTC: NVIDIA's compiler as a library, opened when first needed.

use std::ffi::{CString, c_char, c_int, c_void};
use std::fmt;
use std::path::Path;
use std::ptr::null_mut;

use libloading::Library;

use super::search;
use super::sources::NVIDIA;
use super::specialization::Specialization;

/// The oldest that knows every arch and instruction the kernels use.
const OLDEST: c_int = 12;
/// Characters of the compiler's messages that an error shows.
const SHOWN: usize = 4000;

type Program = *mut c_void;

/// The functions of the library that are called.
#[derive(Clone, Copy)]
struct Functions {
    create: unsafe extern "C" fn(*mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char) -> c_int,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int,
    destroy: unsafe extern "C" fn(*mut Program) -> c_int,
    log_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    log: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    code_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    code: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    ptx_size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    ptx: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
}

/// A library that was opened and is new enough.
pub(super) struct Nvrtc {
    /// `NVRTC 13.0`.
    pub version: String,
    functions: Functions,
    /// Keep the functions mapped, and what NVRTC opens by name when it first compiles.
    _libraries: [Option<Library>; 2],
}

impl fmt::Debug for Nvrtc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Nvrtc").field(&self.version).finish()
    }
}

impl Nvrtc {
    /// The first that serves: `given`, or the environment's (see the module's table).
    pub fn find(given: Option<&Path>) -> Result<Self, String> {
        let mut tried = vec![];
        for library in search::nvrtcs(given) {
            match Self::open(&library) {
                Ok(nvrtc) => return Ok(nvrtc),
                Err(why) => tried.push(format!("\n  {}: {why}", library.display())),
            }
        }
        Err(format!(
            "jit: no NVRTC of CUDA {OLDEST} or newer to compile kernels with (install CUDA's, or the Python package nvidia-cuda-nvrtc and set \
            CANDLE_PAGED_ATTN_NVRTC to its libnvrtc; or fill the cache of compiled kernels beforehand). Looked at:{}",
            tried.concat()
        ))
    }

    fn open(path: &Path) -> Result<Self, String> {
        // SAFETY: NVRTC's library has no initializers that ask anything of the program.
        let library = unsafe { Library::new(path) }.map_err(|error| error.to_string())?;
        let builtins = builtins_beside(path);
        // SAFETY: the functions have these signatures since CUDA 11.1 (nvrtc.h); the library is kept open as long as they are.
        let (version, functions) = unsafe {
            let version = symbol::<unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int>(&library, "nvrtcVersion")?;
            let functions = Functions {
                create: symbol(&library, "nvrtcCreateProgram")?,
                compile: symbol(&library, "nvrtcCompileProgram")?,
                destroy: symbol(&library, "nvrtcDestroyProgram")?,
                log_size: symbol(&library, "nvrtcGetProgramLogSize")?,
                log: symbol(&library, "nvrtcGetProgramLog")?,
                code_size: symbol(&library, "nvrtcGetCUBINSize")?,
                code: symbol(&library, "nvrtcGetCUBIN")?,
                ptx_size: symbol(&library, "nvrtcGetPTXSize")?,
                ptx: symbol(&library, "nvrtcGetPTX")?,
            };
            (version, functions)
        };
        let (mut major, mut minor) = (0, 0);
        // SAFETY: two integers to write.
        match unsafe { version(&mut major, &mut minor) } {
            0 if major >= OLDEST => {
                Ok(Self { version: format!("NVRTC {major}.{minor}"), functions, _libraries: [Some(library), builtins] })
            }
            0 => Err(format!("version {major}.{minor} is older than {OLDEST}")),
            code => Err(format!("nvrtcVersion: error {code}")),
        }
    }

    /// Compiles to a CUBIN.
    pub fn compile(&self, spec: &Specialization, root: &str) -> Result<Vec<u8>, String> {
        let program = self.program(spec, root, &spec.arguments())?;
        program.code().ok_or_else(|| format!("jit: {} gave no code for {}", self.version, spec.kernel))
    }

    /// Compiles to PTX.
    pub fn ptx(&self, spec: &Specialization, root: &str) -> Result<String, String> {
        let program = self.program(spec, root, &spec.ptx_arguments())?;
        program.ptx().ok_or_else(|| format!("jit: {} gave no PTX for {}", self.version, spec.kernel))
    }

    /// The program of `spec`, compiled with `options`.
    fn program(&self, spec: &Specialization, root: &str, options: &[String]) -> Result<Handle, String> {
        let c_string = |text: &str| CString::new(text).map_err(|_| format!("jit: a zero byte in {text:?}"));
        let (mut names, mut texts) = (vec![], vec![]);
        for (name, text) in headers() {
            names.push(c_string(&name)?);
            texts.push(c_string(text)?);
        }
        let source =
            NVIDIA.iter().find(|(path, _)| *path == root).map(|(_, text)| *text).ok_or_else(|| format!("jit: no source {root}"))?;
        let (source, name) = (c_string(source)?, c_string(&format!("kernels/{root}"))?);
        let options = options.iter().map(|option| c_string(option)).collect::<Result<Vec<_>, _>>()?;
        let pointers = |strings: &[CString]| strings.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
        let (names, texts, flags) = (pointers(&names), pointers(&texts), pointers(&options));
        let mut program = Handle { functions: self.functions, program: null_mut() };
        let Functions { create, compile, .. } = self.functions;
        // SAFETY: as many names as texts, all of them alive until the call returns; NVRTC copies them.
        let made =
            unsafe { create(&mut program.program, source.as_ptr(), name.as_ptr(), names.len() as c_int, texts.as_ptr(), names.as_ptr()) };
        if made != 0 {
            return Err(format!("jit: nvrtcCreateProgram: error {made}"));
        }
        // SAFETY: a program that was made; as many options as counted, alive until the call returns.
        let compiled = unsafe { compile(program.program, flags.len() as c_int, flags.as_ptr()) };
        if compiled != 0 {
            let said = program.log();
            let shown: String = said.trim().chars().take(SHOWN).collect();
            return Err(format!("jit: {} cannot compile {} for {}: error {compiled}\n{shown}", self.version, spec.kernel, spec.arch));
        }
        Ok(program)
    }
}

/// NVRTC opens a second library by its name alone, which the loader would not find beside the first: it is opened beforehand, for the name to be known.
fn builtins_beside(path: &Path) -> Option<Library> {
    let entries = std::fs::read_dir(path.parent().filter(|folder| !folder.as_os_str().is_empty())?).ok()?;
    let is_builtins = |name: &str| name.starts_with("libnvrtc-builtins.so");
    let file = entries.flatten().find(|entry| entry.file_name().to_str().is_some_and(is_builtins))?;
    // SAFETY: as NVRTC's own, a library without initializers that ask anything of the program.
    unsafe { Library::new(file.path()) }.ok()
}

/// A function of the library.
///
/// # Safety
/// `F` is its signature.
unsafe fn symbol<F: Copy>(library: &Library, name: &str) -> Result<F, String> {
    // SAFETY: the caller's word.
    unsafe { library.get::<F>(name.as_bytes()) }.map(|symbol| *symbol).map_err(|error| error.to_string())
}

/// The headers by the names that includes use: NVRTC knows no folders, a file is found under the very text of the include. A common header goes by
/// its plain name too, as the other common ones include it, but where a file of kernels/nvidia has that name: nvidia/args.h includes the common one.
fn headers() -> Vec<(String, &'static str)> {
    let is_nvidia = |name: &str| NVIDIA.iter().any(|(path, _)| path.strip_prefix("nvidia/") == Some(name));
    let mut headers = vec![];
    for (path, text) in NVIDIA {
        match path.split_once('/') {
            Some(("common", name)) => {
                headers.push((format!("../common/{name}"), *text));
                if !is_nvidia(name) {
                    headers.push((name.to_string(), *text));
                }
            }
            Some((_, name)) if !name.ends_with(".cu") => headers.push((name.to_string(), *text)),
            _ => {}
        }
    }
    headers
}

/// A program, destroyed on drop.
struct Handle {
    functions: Functions,
    program: Program,
}

impl Handle {
    fn log(&self) -> String {
        // SAFETY: the functions are a pair of size and contents.
        let log = unsafe { self.read(self.functions.log_size, self.functions.log) };
        log.map(|bytes| text(&bytes)).unwrap_or_default()
    }

    fn code(&self) -> Option<Vec<u8>> {
        // SAFETY: the functions are a pair of size and contents.
        unsafe { self.read(self.functions.code_size, self.functions.code) }.filter(|code| !code.is_empty())
    }

    fn ptx(&self) -> Option<String> {
        // SAFETY: the functions are a pair of size and contents.
        let ptx = unsafe { self.read(self.functions.ptx_size, self.functions.ptx) };
        ptx.map(|bytes| text(&bytes)).filter(|ptx| !ptx.is_empty())
    }

    /// # Safety
    /// `contents` writes as many bytes as `size` says.
    unsafe fn read(
        &self,
        size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
        contents: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
    ) -> Option<Vec<u8>> {
        let mut bytes = 0;
        // SAFETY: a program that was made, and room for what the caller's pair of functions writes.
        unsafe {
            if size(self.program, &mut bytes) != 0 {
                return None;
            }
            let mut text = vec![0u8; bytes];
            (contents(self.program, text.as_mut_ptr().cast()) == 0).then_some(text)
        }
    }
}

/// What NVRTC writes with a zero behind.
fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_end_matches('\0').to_string()
}

impl Drop for Handle {
    fn drop(&mut self) {
        if !self.program.is_null() {
            // SAFETY: made, and not destroyed before. What it says of it is of no use.
            let _ = unsafe { (self.functions.destroy)(&mut self.program) };
        }
    }
}
