//! A functional simulator of CDNA3 and CDNA4 code objects (gfx942, gfx950).
//!
//! [`Module::load`] reads an ELF code object, has `llvm-objdump` disassemble it and decodes the text once; [`Module::launch`] runs a kernel
//! on real host memory that a [`Memory`] tracks, wave64, 64 lanes at a time, workgroups on all cores. What hardware would do silently is an
//! [`Error`]: accesses outside live allocations or the group segment, registers used before the wait for their load, LDS races, divergent
//! barriers, runaway loops, and anything the simulator does not know. [`Counters`] tell what was executed.
//!
//! Not modelled: time, caches, register hazards that the hardware leaves to `s_nop`, traps, and races in global memory.

pub mod counters;
mod decode;
pub mod disasm;
pub mod elf;
pub mod error;
mod exec;
pub mod float;
mod launch;
mod lds;
pub mod mfma;
pub mod operand;
mod program;
pub mod trace;
mod waits;
mod wave;

pub use counters::Counters;
pub use elf::{Arch, CodeObject, KernelInfo};
pub use error::{Error, Fault, Result, Site};
pub use launch::{Launch, Module};
pub use program::{Class, Inst, Program};
pub use sim_memory::Memory;
pub use trace::{Event, Touched, Trace};
pub use waits::Counter;
