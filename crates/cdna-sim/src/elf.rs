//! Reads an AMDGPU code object: loadable image, kernel descriptors and the metadata note.
//!
//! Layouts: LLVM's "User Guide for AMDGPU Backend", sections "Kernel Descriptor" and "Code Object Metadata".

use object::elf;
use object::read::elf::{ElfFile64, FileHeader, ProgramHeader};
use object::{Object, ObjectSection, ObjectSymbol};
use rmpv::Value;

use crate::error::{Error, Result};
use crate::float::Fp8Encoding;

/// Architectures that the simulator knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Arch {
    /// CDNA3: MI300.
    Gfx942,
    /// CDNA4: MI350.
    Gfx950,
}

impl Arch {
    /// The name that compilers use.
    pub fn name(self) -> &'static str {
        match self {
            Arch::Gfx942 => "gfx942",
            Arch::Gfx950 => "gfx950",
        }
    }

    /// Bytes of LDS of one compute unit.
    pub fn lds_bytes(self) -> usize {
        match self {
            Arch::Gfx942 => 64 << 10,
            Arch::Gfx950 => 160 << 10,
        }
    }

    /// LDS banks, each a dword wide.
    pub fn lds_banks(self) -> usize {
        match self {
            Arch::Gfx942 => 32,
            Arch::Gfx950 => 64,
        }
    }

    /// What its FP8 and BF8 instructions compute with.
    pub fn fp8(self) -> Fp8Encoding {
        match self {
            Arch::Gfx942 => Fp8Encoding::Fnuz,
            Arch::Gfx950 => Fp8Encoding::Ocp,
        }
    }

    /// From the ELF header's flags.
    fn from_flags(flags: u32) -> Result<Self> {
        match flags & 0xff {
            0x4c => Ok(Arch::Gfx942),
            0x4f => Ok(Arch::Gfx950),
            // gfx940's number, which early MI300 objects carry.
            0x40 => Ok(Arch::Gfx942),
            other => Err(Error::CodeObject(format!("machine {other:#x} is neither gfx942 nor gfx950"))),
        }
    }
}

/// One argument in the metadata.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arg {
    /// Name, where the metadata has one.
    pub name: String,
    /// Byte offset in the kernarg segment.
    pub offset: usize,
    /// Bytes.
    pub size: usize,
    /// `by_value`, `global_buffer`, `hidden_...`.
    pub value_kind: String,
}

/// A kernel: descriptor and metadata.
#[derive(Debug, Clone)]
pub struct KernelInfo {
    /// Name as launched.
    pub name: String,
    /// Address of the first instruction (compatibility prologue included).
    pub entry: u64,
    /// Bytes of LDS that the kernel itself asks for.
    pub group_segment_size: usize,
    /// Bytes of scratch a lane.
    pub private_segment_size: usize,
    /// Bytes of kernel arguments.
    pub kernarg_size: usize,
    /// COMPUTE_PGM_RSRC1..3.
    pub rsrc: [u32; 3],
    /// Kernel code properties.
    pub properties: u16,
    /// Kernarg dwords preloaded into SGPRs, and the first of them.
    pub preload_length: usize,
    /// First preloaded dword.
    pub preload_offset: usize,
    /// Arguments by the metadata.
    pub args: Vec<Arg>,
    /// Largest workgroup.
    pub max_workgroup_size: usize,
    /// VGPRs, AGPRs and spills by the metadata (0 where absent).
    pub vgpr_count: u64,
    /// AGPRs by the metadata.
    pub agpr_count: u64,
    /// Spilled VGPRs by the metadata.
    pub vgpr_spill_count: u64,
}

impl KernelInfo {
    /// Vector registers allocated, and the first of them that is an AGPR.
    pub fn register_file(&self) -> (usize, usize) {
        let total = ((self.rsrc[0] & 0x3f) as usize + 1) * 8;
        let split = ((self.rsrc[2] & 0x3f) as usize + 1) * 4;
        (total, split.min(total))
    }

    /// User SGPRs, preloaded ones included.
    pub fn user_sgprs(&self) -> usize {
        ((self.rsrc[1] >> 1) & 0x1f) as usize
    }
}

/// A part of the image to load.
#[derive(Debug, Clone)]
pub struct Segment {
    /// Address in the code object.
    pub address: u64,
    /// Contents, zero-filled to the memory size.
    pub data: Vec<u8>,
}

/// A code object, as far as it is needed to run it.
#[derive(Debug, Clone)]
pub struct CodeObject {
    /// Target.
    pub arch: Arch,
    /// Loadable segments.
    pub segments: Vec<Segment>,
    /// Address range of the text.
    pub text: std::ops::Range<u64>,
    /// Kernels by metadata order.
    pub kernels: Vec<KernelInfo>,
}

impl CodeObject {
    /// Reads a code object from its bytes.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let bad = |what: &str| Error::CodeObject(what.to_string());
        let file = ElfFile64::<object::Endianness>::parse(bytes).map_err(|e| Error::CodeObject(e.to_string()))?;
        let endian = file.endian();
        let header = file.elf_header();
        if header.e_machine(endian) != elf::EM_AMDGPU {
            return Err(bad("not an AMDGPU ELF file"));
        }
        let arch = Arch::from_flags(header.e_flags(endian))?;
        let mut segments = Vec::new();
        for program in file.elf_program_headers().iter().filter(|program| program.p_type(endian) == elf::PT_LOAD) {
            let mut data = program.data(endian, bytes).map_err(|()| bad("a segment lies outside the file"))?.to_vec();
            let memory = usize::try_from(program.p_memsz(endian)).map_err(|_| bad("a segment is too large"))?;
            if memory > 1 << 30 {
                return Err(bad("a segment is larger than 1 GiB"));
            }
            data.resize(memory.max(data.len()), 0);
            segments.push(Segment { address: program.p_vaddr(endian), data });
        }
        if file.dynamic_relocations().is_some_and(|mut relocations| relocations.next().is_some()) {
            return Err(bad("dynamic relocations are not supported"));
        }
        let section = file.section_by_name(".text").ok_or_else(|| bad("no .text section"))?;
        let text = section.address()..section.address() + section.size();
        let metadata = metadata(&file, bytes)?;
        let mut object = Self { arch, segments, text, kernels: Vec::new() };
        for kernel in list(&metadata, "amdhsa.kernels") {
            let symbol_name = string(kernel, ".symbol");
            let symbol = file
                .symbols()
                .chain(file.dynamic_symbols())
                .find(|symbol| symbol.name() == Ok(symbol_name.as_str()))
                .ok_or_else(|| Error::CodeObject(format!("no symbol {symbol_name}")))?;
            let info = object.kernel(kernel, symbol.address())?;
            object.kernels.push(info);
        }
        Ok(object)
    }

    /// The kernel called `name`.
    pub fn kernel_named(&self, name: &str) -> Option<&KernelInfo> {
        self.kernels.iter().find(|kernel| kernel.name == name)
    }

    /// `N` bytes of the image at `address`.
    fn image<const N: usize>(&self, address: u64) -> Result<[u8; N]> {
        self.segments
            .iter()
            .find_map(|segment| {
                let start = usize::try_from(address.checked_sub(segment.address)?).ok()?;
                segment.data.get(start..start.checked_add(N)?)?.try_into().ok()
            })
            .ok_or_else(|| Error::CodeObject(format!("nothing is loaded at {address:#x}")))
    }

    fn kernel(&self, metadata: &Value, descriptor: u64) -> Result<KernelInfo> {
        let d: [u8; 64] = self.image(descriptor)?;
        let word = |at: usize| u32::from_le_bytes([d[at], d[at + 1], d[at + 2], d[at + 3]]);
        let entry_offset = u64::from(word(16)) | u64::from(word(20)) << 32;
        let preload = u16::from_le_bytes([d[58], d[59]]) as usize;
        if number(metadata, ".wavefront_size") != 64 {
            return Err(Error::CodeObject(format!("{}: only wave64 is supported", string(metadata, ".name"))));
        }
        Ok(KernelInfo {
            name: string(metadata, ".name"),
            entry: descriptor.wrapping_add(entry_offset),
            group_segment_size: word(0) as usize,
            private_segment_size: word(4) as usize,
            kernarg_size: number(metadata, ".kernarg_segment_size") as usize,
            rsrc: [word(48), word(52), word(44)],
            properties: u16::from_le_bytes([d[56], d[57]]),
            preload_length: preload & 0x7f,
            preload_offset: preload >> 7,
            args: list(metadata, ".args")
                .iter()
                .map(|arg| Arg {
                    name: string(arg, ".name"),
                    offset: number(arg, ".offset") as usize,
                    size: number(arg, ".size") as usize,
                    value_kind: string(arg, ".value_kind"),
                })
                .collect(),
            max_workgroup_size: number(metadata, ".max_flat_workgroup_size") as usize,
            vgpr_count: number(metadata, ".vgpr_count"),
            agpr_count: number(metadata, ".agpr_count"),
            vgpr_spill_count: number(metadata, ".vgpr_spill_count"),
        })
    }
}

/// What a kernel takes of a compute unit, by the metadata (0 where absent).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resources {
    /// Name as launched.
    pub kernel: String,
    /// Vector registers of a lane; AGPRs are among them on targets that have both.
    pub vgprs: u64,
    /// AGPRs.
    pub agprs: u64,
    /// Scalar registers of a wave.
    pub sgprs: u64,
    /// Vector registers spilled to scratch.
    pub vgpr_spills: u64,
    /// Scalar registers spilled to vector registers or scratch.
    pub sgpr_spills: u64,
    /// Bytes of LDS of a workgroup that are known when compiling.
    pub lds_bytes: u64,
    /// Bytes of scratch of a lane.
    pub scratch_bytes: u64,
}

/// What each kernel of a code object takes. Of any AMD GPU, also those that are not simulated.
pub fn resources(bytes: &[u8]) -> Result<Vec<Resources>> {
    let file = ElfFile64::<object::Endianness>::parse(bytes).map_err(|e| Error::CodeObject(e.to_string()))?;
    let metadata = metadata(&file, bytes)?;
    let of = |kernel: &Value| Resources {
        kernel: string(kernel, ".name"),
        vgprs: number(kernel, ".vgpr_count"),
        agprs: number(kernel, ".agpr_count"),
        sgprs: number(kernel, ".sgpr_count"),
        vgpr_spills: number(kernel, ".vgpr_spill_count"),
        sgpr_spills: number(kernel, ".sgpr_spill_count"),
        lds_bytes: number(kernel, ".group_segment_fixed_size"),
        scratch_bytes: number(kernel, ".private_segment_fixed_size"),
    };
    Ok(list(&metadata, "amdhsa.kernels").iter().map(of).collect())
}

/// The contents of the AMDGPU metadata note.
fn metadata(file: &ElfFile64<'_>, bytes: &[u8]) -> Result<Value> {
    let bad = |what: &str| Error::CodeObject(what.to_string());
    let endian = file.endian();
    for program in file.elf_program_headers().iter().filter(|program| program.p_type(endian) == elf::PT_NOTE) {
        let notes = program.notes(endian, bytes).map_err(|e| Error::CodeObject(e.to_string()))?;
        let mut notes = notes.ok_or_else(|| bad("unreadable notes"))?;
        while let Some(note) = notes.next().map_err(|e| Error::CodeObject(e.to_string()))? {
            if note.name() == b"AMDGPU" && note.n_type(endian) == 32 {
                return rmpv::decode::read_value(&mut note.desc()).map_err(|e| Error::CodeObject(format!("metadata: {e}")));
            }
        }
    }
    Err(bad("no AMDGPU metadata note"))
}

fn field<'a>(map: &'a Value, key: &str) -> Option<&'a Value> {
    map.as_map()?.iter().find(|(k, _)| k.as_str() == Some(key)).map(|(_, value)| value)
}

fn list<'a>(map: &'a Value, key: &str) -> &'a [Value] {
    field(map, key).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

fn string(map: &Value, key: &str) -> String {
    field(map, key).and_then(Value::as_str).unwrap_or_default().to_string()
}

fn number(map: &Value, key: &str) -> u64 {
    field(map, key).and_then(Value::as_u64).unwrap_or(0)
}
