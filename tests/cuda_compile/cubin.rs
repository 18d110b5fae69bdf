//! What ptxas made of a kernel, read off the CUBIN: registers, local memory, instructions that it must not have.

/// Of one thread; of several kernels, the most of each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub registers: u32,
    /// Registers that went to memory, and arrays that never were in registers.
    pub local_bytes: u32,
}

/// Attributes of `.nv.info` whose value is a symbol and a number.
const FRAME_SIZE: u8 = 0x11;
const REGISTERS: u8 = 0x2f;

impl Usage {
    pub fn max(self, other: Self) -> Self {
        Self { registers: self.registers.max(other.registers), local_bytes: self.local_bytes.max(other.local_bytes) }
    }

    /// Reads a code object.
    pub fn of(cubin: &[u8]) -> Self {
        let info = section(cubin, b".nv.info").expect("a .nv.info section");
        let (mut at, mut usage) = (0, Self::default());
        while at + 4 <= info.len() {
            // A format, an attribute, and two bytes: a value, or in format 4 the length of what follows.
            let (format, attribute, value) = (info[at], info[at + 1], word(info, at + 2, 2) as usize);
            let number = || word(info, at + 8, 4) as u32;
            usage = match attribute {
                FRAME_SIZE => usage.max(Self { local_bytes: number(), ..usage }),
                REGISTERS => usage.max(Self { registers: number(), ..usage }),
                _ => usage,
            };
            at += 4 + if format == 4 { value } else { 0 };
        }
        usage
    }
}

/// Whether a kernel for `sm_90a` has an asynchronous copy that the GPU refuses as an illegal instruction: the ptxas of CUDA 13.0 makes one of a copy
/// with an L2 policy where a thread copies many rows at once. No copy of these kernels has the operands that the encoding stands for.
pub fn has_illegal_copy(cubin: &[u8]) -> bool {
    const COPY_OFF_A_UNIFORM_REGISTER: u16 = 0xdae;
    cubin.chunks_exact(16).any(|x| u16::from_le_bytes([x[0], x[1]]) & 0xfff == COPY_OFF_A_UNIFORM_REGISTER && x[8..10] == [0x40, 0x1d])
}

/// Whether each product of a warpgroup waits for the one before: what ptxas makes of products whose registers it cannot keep apart. It says so, but in no
/// log of NVRTC's.
pub fn has_serial_products(cubin: &[u8]) -> bool {
    let opcode = |x: &[u8]| u16::from_le_bytes([x[0], x[1]]) & 0xfff;
    let products = cubin.chunks_exact(16).filter(|x| opcode(x) & 0xbfc == 0x9f0).count();
    let waits = cubin.chunks_exact(16).filter(|x| opcode(x) == 0x9c5 && x[5] == 0x80).count();
    // Otherwise a wait ends all products of a chunk. Some of what is counted is data.
    waits > 4 && 2 * waits >= products
}

/// A little-endian number.
fn word(bytes: &[u8], at: usize, size: usize) -> u64 {
    bytes[at..at + size].iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
}

/// The contents of the section `name` of a 64-bit ELF file.
fn section<'a>(elf: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let (table, size, count, names) = (word(elf, 0x28, 8), word(elf, 0x3a, 2), word(elf, 0x3c, 2), word(elf, 0x3e, 2));
    let header = |i: u64| (table + i * size) as usize;
    let place = |i: u64| [0x18, 0x20].map(|field| word(elf, header(i) + field, 8) as usize);
    let [strings, _] = place(names);
    let name_of = |i: u64| elf[strings + word(elf, header(i), 4) as usize..].split(|&c| c == 0).next();
    let [at, bytes] = place((0..count).find(|&i| name_of(i) == Some(name))?);
    elf.get(at..at + bytes)
}
