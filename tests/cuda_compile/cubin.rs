//! What ptxas left in a CUBIN of a kernel's registers and local memory.

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
