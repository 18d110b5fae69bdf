//! The tile unit of Intel's processors from Sapphire Rapids on (AMX-TILE, AMX-BF16), under Linux.

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count};

use once_cell::sync::Lazy;

use super::{Shapes, TileUnit};

#[derive(Clone, Copy)]
pub(in crate::cpu) struct Amx;

impl Amx {
    /// Whether the processor has AMX-BF16, the system saves its state, and this process may use it (asked for once).
    pub fn available() -> bool {
        static AVAILABLE: Lazy<bool> = Lazy::new(|| processor_has_it() && system_saves_it() && request_permission());
        *AVAILABLE
    }
}

fn processor_has_it() -> bool {
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    let wanted = AMX_BF16 | AMX_TILE;
    __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & wanted == wanted
}

/// XCR0 enables the tile configuration (bit 17) and data (bit 18).
fn system_saves_it() -> bool {
    const OSXSAVE: u32 = 1 << 27;
    const TILES: u32 = 0b11 << 17;
    if __cpuid(1).ecx & OSXSAVE == 0 {
        return false;
    }
    let low: u32;
    // SAFETY: OSXSAVE says that the instruction is enabled; it only reads XCR0.
    unsafe { asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") _, options(nomem, nostack, preserves_flags)) }
    low & TILES == TILES
}

/// `arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)`: Linux then gives every thread of the process room for tiles when first used.
/// Kernels without the call refuse it.
fn request_permission() -> bool {
    const ARCH_PRCTL: isize = 158;
    const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
    const XFEATURE_XTILEDATA: usize = 18;
    let result: isize;
    // SAFETY: a system call that touches no memory of the program; it clobbers rcx and r11.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_XTILEDATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result == 0
}

// Tiles stay what they are from one block of assembly to the next: the compiler keeps nothing in tile registers but the operands of AMX
// intrinsics, which the crate does not use, and an item stays on its thread from `configure` to `release`.
impl TileUnit for Amx {
    #[inline(always)]
    unsafe fn configure(shapes: &Shapes) {
        unsafe { asm!("ldtilecfg [{0}]", in(reg) shapes, options(readonly, nostack, preserves_flags)) }
    }
    #[inline(always)]
    unsafe fn zero<const TILE: u8>() {
        unsafe { asm!("tilezero tmm{0}", const TILE, options(nomem, nostack, preserves_flags)) }
    }
    #[inline(always)]
    unsafe fn load<const TILE: u8>(from: *const u8, stride: usize) {
        unsafe {
            asm!("tileloadd tmm{0}, [{1} + {2}*1]", const TILE, in(reg) from, in(reg) stride, options(readonly, nostack, preserves_flags));
        }
    }
    #[inline(always)]
    unsafe fn store<const TILE: u8>(to: *mut u8, stride: usize) {
        unsafe { asm!("tilestored [{1} + {2}*1], tmm{0}", const TILE, in(reg) to, in(reg) stride, options(nostack, preserves_flags)) }
    }
    #[inline(always)]
    unsafe fn dot<const C: u8, const A: u8, const B: u8>() {
        unsafe { asm!("tdpbf16ps tmm{0}, tmm{1}, tmm{2}", const C, const A, const B, options(nomem, nostack, preserves_flags)) }
    }
    #[inline(always)]
    unsafe fn release() {
        unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) }
    }
}
