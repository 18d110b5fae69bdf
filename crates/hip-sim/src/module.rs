//! Modules: code objects, read once a process however often they are loaded.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use cdna_sim::Arch;

use crate::error::{Code, Result};
use crate::handles::lock;

/// A loaded module.
pub struct Module {
    /// The device it was loaded on.
    pub device: usize,
    /// Its code and image.
    pub code: cdna_sim::Module,
    /// False once it is unloaded.
    pub loaded: AtomicBool,
}

/// A kernel of a module.
pub struct Function {
    /// Where it is from.
    pub module: Arc<Module>,
    /// Its index in the code object.
    pub kernel: usize,
}

impl Function {
    /// What the code object says about it.
    pub fn info(&self) -> &cdna_sim::KernelInfo {
        &self.module.code.object.kernels[self.kernel]
    }

    /// Bytes of explicit arguments: up to the end of the last one that the runtime does not fill in itself.
    pub fn explicit_bytes(&self) -> usize {
        let info = self.info();
        let explicit = info.args.iter().filter(|arg| !arg.value_kind.starts_with("hidden_"));
        explicit.map(|arg| arg.offset + arg.size).max().unwrap_or(0)
    }

    /// False where its module was unloaded.
    pub fn is_loaded(&self) -> bool {
        self.module.loaded.load(Ordering::Acquire)
    }
}

const BUNDLE: &[u8] = b"__CLANG_OFFLOAD_BUNDLE__";
const EM_AMDGPU: u16 = 224;

/// Bytes at `address`, which the caller of the runtime vouches for.
///
/// # Safety
/// `address..address + len` must be readable.
unsafe fn bytes<'a>(address: *const u8, len: usize) -> &'a [u8] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(address, len) }
}

/// The code object for `arch` in the image at `image`, whose size nobody tells: an ELF file, or clang's bundle of several.
///
/// # Safety
/// `image` must point to such an image, whole.
pub unsafe fn image<'a>(image: *const u8, arch: Arch) -> Result<&'a [u8]> {
    if image.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: each read stays inside what the fields read before say is there.
    unsafe {
        if bytes(image, 4) == b"\x7fELF" {
            return elf(image, arch);
        }
        if bytes(image, BUNDLE.len()) != BUNDLE {
            return Err(Code::INVALID_IMAGE);
        }
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| *image.add(at + i))) as usize;
        let mut at = BUNDLE.len() + 8;
        for _ in 0..word(BUNDLE.len()) {
            let (offset, length) = (word(at), word(at + 16));
            let target = bytes(image.add(at + 24), length);
            let is_ours = String::from_utf8_lossy(target).split(&['-', ':'][..]).any(|part| part == arch.name());
            if is_ours {
                return elf(image.add(offset), arch);
            }
            at += 24 + length;
        }
    }
    Err(Code::NO_BINARY_FOR_GPU)
}

/// The ELF file at `start`.
///
/// # Safety
/// As [`image`]'s.
unsafe fn elf<'a>(start: *const u8, arch: Arch) -> Result<&'a [u8]> {
    // SAFETY: an ELF file has a header of 64 bytes, and at its end a table of sections whose place the header tells.
    let header = unsafe { bytes(start, 64) };
    let half = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
    let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| header[at + i]));
    let is_64_bit_little_endian = header[4] == 2 && header[5] == 1;
    if !header.starts_with(b"\x7fELF") || !is_64_bit_little_endian || half(18) != EM_AMDGPU {
        return Err(Code::INVALID_IMAGE);
    }
    let machine = u32::from_le_bytes([header[48], header[49], header[50], header[51]]) & 0xff;
    let wanted: &[u32] = match arch {
        // gfx942, and gfx940, which early objects for it carry.
        Arch::Gfx942 => &[0x4c, 0x40],
        Arch::Gfx950 => &[0x4f],
    };
    if !wanted.contains(&machine) {
        return Err(Code::NO_BINARY_FOR_GPU);
    }
    let len = (word(40) as usize).checked_add(usize::from(half(58)) * usize::from(half(60))).ok_or(Code::INVALID_IMAGE)?;
    // SAFETY: as above.
    Ok(unsafe { bytes(start, len.max(64)) })
}

/// Reads a code object, or finds it among those read before.
pub fn load(bytes: &[u8]) -> Result<cdna_sim::Module> {
    type Read = Mutex<HashMap<Vec<u8>, Arc<cdna_sim::Module>>>;
    static READ: std::sync::LazyLock<Read> = std::sync::LazyLock::new(Mutex::default);
    if let Some(found) = lock(&READ).get(bytes) {
        return Ok(found.reloaded());
    }
    // Not under the lock: two threads may read two modules at once, or one twice.
    let module = cdna_sim::Module::load(bytes).map_err(|e| {
        eprintln!("hip-sim: {e}");
        match e {
            cdna_sim::Error::CodeObject(_) => Code::INVALID_IMAGE,
            _ => Code::SHARED_OBJECT_INIT_FAILED,
        }
    })?;
    let module = Arc::new(module);
    lock(&READ).insert(bytes.to_vec(), module.clone());
    Ok(module.reloaded())
}
