//! Scalar loads, LDS and vector memory.

use half::{bf16, f16};

use super::{Env, Group, Step, Stop, fault, lds_fault, stray, unsupported};
use crate::error::Fault;
use crate::exec::lanes::Row;
use crate::lds::{Access, Lds};
use crate::operand::{M0, Regs, VGPR};
use crate::program::{Addressing, AtomicOp, Convert, Ds, DsOp, Kind, Mem, MemOp, Swizzle};
use crate::trace::Touched;
use crate::waits::Counter;
use crate::wave::{Wave, lanes};

const NONE: Regs = Regs { first: 0, count: 0 };

pub fn scalar_load(wave: &mut Wave, group: &mut Group, kind: &Kind) -> Step {
    let Kind::ScalarLoad { dst, base, offset, scalar, buffer } = *kind else { return Ok(()) };
    let extra = scalar.map_or(0, |src| wave.scalar(src, 1));
    let relative = extra.wrapping_add_signed(offset);
    let (address, records) = if buffer {
        let d = descriptor(wave, base)?;
        (d.base.wrapping_add(relative & !3), Some(u64::from(d.records)))
    } else {
        (wave.pair(base).wrapping_add(relative) & !3, None)
    };
    for i in 0..dst.count {
        let at = u64::from(i) * 4;
        let inside = records.is_none_or(|records| (relative & !3) + at + 4 <= records);
        let word = if inside { u32::from_le_bytes(wave.view.load(address.wrapping_add(at)).map_err(|e| stray(e, None))?) } else { 0 };
        wave.s[usize::from(dst.first + i)] = word;
    }
    wave.waits.issue(Counter::Scalar, wave.pc as u32, dst);
    if let Some(recorder) = &mut group.recorder {
        recorder.touch(
            wave.index,
            Touched { bytes: u32::from(dst.count) * 4, ..Touched::default() },
            [(address, u32::from(dst.count) * 4)],
        );
    }
    Ok(())
}

/// A buffer descriptor's fields that count here.
struct Descriptor {
    base: u64,
    stride: u64,
    records: u32,
}

fn descriptor(wave: &Wave, first: u16) -> Result<Descriptor, Stop> {
    let words: [u32; 4] = std::array::from_fn(|i| wave.s[usize::from(first) + i]);
    let swizzle = words[1] >> 31 == 1;
    let add_tid = words[3] >> 23 & 1 == 1;
    if swizzle || add_tid {
        return Err(unsupported(format!("swizzled or thread-indexed buffer descriptor {words:08x?}")));
    }
    if words[3] >> 30 != 0 {
        return Err(unsupported(format!("buffer descriptor type {words:08x?}")));
    }
    let base = u64::from(words[0]) | u64::from(words[1] & 0xffff) << 32;
    Ok(Descriptor { base, stride: u64::from(words[1] >> 16 & 0x3fff), records: words[2] })
}

/// A register's worth of loaded bytes.
fn place(convert: Convert, data: &[u8], old: u32) -> u32 {
    let mut bytes = [0; 4];
    bytes[..data.len()].copy_from_slice(data);
    let zero = u32::from_le_bytes(bytes);
    let sign = if data.len() == 1 { data[0] as i8 as i32 as u32 } else { zero as u16 as i16 as i32 as u32 };
    let half = |value: u32, high: bool| if high { old & 0xffff | value << 16 } else { old & 0xffff_0000 | value & 0xffff };
    match convert {
        Convert::Dwords | Convert::Zero => zero,
        Convert::Sign => sign,
        Convert::HalfZero { high } => half(zero, high),
        Convert::HalfSign { high } => half(sign, high),
    }
}

/// Cycles beyond one a pass that an LDS access of `dwords` dwords a lane takes: a pass serves as many lanes as move a dword of every bank.
fn bank_conflicts(addresses: &Row, offset: u32, mask: u64, dwords: usize, banks: usize) -> u64 {
    let per_pass = (banks / dwords).clamp(1, 64);
    let mut extra = 0;
    for pass in 0..64 / per_pass {
        let lanes = pass * per_pass..(pass + 1) * per_pass;
        // Mostly no two lanes want the same bank at all.
        let mut used = 0u64;
        let clash = lanes.clone().filter(|lane| mask >> lane & 1 == 1).any(|lane| {
            let dword = addresses[lane].wrapping_add(offset) / 4;
            (0..dwords as u32).any(|part| {
                let bank = 1u64 << ((dword + part) as usize % banks);
                let clash = used & bank != 0;
                used |= bank;
                clash
            })
        });
        if clash {
            extra += pass_conflicts(addresses, offset, lanes.filter(|lane| mask >> lane & 1 == 1), dwords as u32, banks);
        }
    }
    extra
}

/// [`bank_conflicts`] of one pass.
fn pass_conflicts(addresses: &Row, offset: u32, lanes: impl Iterator<Item = usize>, dwords: u32, banks: usize) -> u64 {
    let mut rows = [[u32::MAX; 8]; MAX_BANKS];
    let mut used = [0u8; MAX_BANKS];
    let mut worst = 1;
    for lane in lanes {
        for part in 0..dwords {
            let dword = addresses[lane].wrapping_add(offset) / 4 + part;
            let bank = dword as usize % banks;
            let seen = usize::from(used[bank]).min(8);
            if !rows[bank][..seen].contains(&dword) {
                if seen < 8 {
                    rows[bank][seen] = dword;
                }
                used[bank] += 1;
                worst = worst.max(used[bank]);
            }
        }
    }
    u64::from(worst - 1)
}

const MAX_BANKS: usize = 64;

pub fn lds(wave: &mut Wave, env: &Env, group: &mut Group, ds: &Ds) -> Step {
    let exec = wave.exec();
    let addr = wave.v[usize::from(ds.addr)];
    let inst = wave.pc as u32;
    let conflicts = group.counters.lds_bank_conflicts;
    let written = match ds.op {
        DsOp::BPermute | DsOp::Permute | DsOp::Swizzle(_) => {
            let out = cross(&wave.v[usize::from(ds.data[0])], &addr, ds, exec);
            if let Some(dst) = ds.dst {
                wave.write_row(dst, &out, exec);
            }
            1
        }
        DsOp::Read { bytes, parts, convert } => {
            let count = usize::from(bytes).div_ceil(4);
            for part in 0..usize::from(parts) {
                let offset = ds.offsets[part];
                let first = usize::from(ds.dst.unwrap_or(0)) + part * count;
                let by = Access { wave: wave.index, inst, waits: &wave.waits, vector: false, atomic: false };
                if convert == Convert::Dwords {
                    let rows = &mut wave.v[first..first + count];
                    match count {
                        1 => read_dwords::<1>(env, &mut group.lds, by, (&addr, offset), exec, rows)?,
                        2 => read_dwords::<2>(env, &mut group.lds, by, (&addr, offset), exec, rows)?,
                        3 => read_dwords::<3>(env, &mut group.lds, by, (&addr, offset), exec, rows)?,
                        _ => read_dwords::<4>(env, &mut group.lds, by, (&addr, offset), exec, rows)?,
                    }
                }
                for lane in lanes(if convert == Convert::Dwords { 0 } else { exec }) {
                    let at = u64::from(addr[lane].wrapping_add(offset));
                    let data = group.lds.read(by, at, usize::from(bytes)).map_err(|e| lds_fault(env, e, lane))?;
                    for (i, chunk) in data.chunks(4).enumerate() {
                        let slot = &mut wave.v[first + i][lane];
                        *slot = place(convert, chunk, *slot);
                    }
                }
                group.counters.lds_bank_conflicts += bank_conflicts(&addr, offset, exec, count, env.program.arch.lds_banks());
            }
            group.counters.lds_accesses += 1;
            count * usize::from(parts)
        }
        DsOp::Write { bytes, parts, high } => {
            let count = usize::from(bytes).div_ceil(4);
            for part in 0..usize::from(parts) {
                let (offset, first) = (ds.offsets[part], usize::from(ds.data[part]));
                for lane in lanes(exec) {
                    let data = bytes_of(wave, first, lane, usize::from(bytes), high);
                    let by = Access { wave: wave.index, inst, waits: &wave.waits, vector: false, atomic: false };
                    let at = u64::from(addr[lane].wrapping_add(offset));
                    group.lds.write(by, at, &data[..usize::from(bytes)]).map_err(|e| lds_fault(env, e, lane))?;
                }
                group.counters.lds_bank_conflicts += bank_conflicts(&addr, offset, exec, count, env.program.arch.lds_banks());
            }
            group.counters.lds_accesses += 1;
            0
        }
        DsOp::Atomic { op, bytes } => {
            for lane in lanes(exec) {
                let by = Access { wave: wave.index, inst, waits: &wave.waits, vector: false, atomic: true };
                let at = u64::from(addr[lane].wrapping_add(ds.offsets[0]));
                let old = number(group.lds.peek(at, usize::from(bytes)).map_err(|e| lds_fault(env, e, lane))?);
                let operand = number(&bytes_of(wave, usize::from(ds.data[0]), lane, usize::from(bytes), false)[..usize::from(bytes)]);
                let new = modify(op, bytes, old, operand, 0);
                group.lds.write(by, at, &new.to_le_bytes()[..usize::from(bytes)]).map_err(|e| lds_fault(env, e, lane))?;
                if let Some(dst) = ds.dst {
                    set_number(wave, usize::from(dst), lane, bytes, old);
                }
            }
            group.counters.lds_accesses += 1;
            if ds.dst.is_some() { usize::from(bytes) / 4 } else { 0 }
        }
        DsOp::ReadTransposed { bits } => {
            transposed(wave, env, group, ds, bits.into())?;
            group.counters.lds_accesses += 1;
            2
        }
    };
    if let Some(recorder) = &mut group.recorder {
        recorder.conflicts(wave.index, (group.counters.lds_bank_conflicts - conflicts) as u32);
    }
    let regs = ds.dst.map_or(NONE, |dst| Regs::new(VGPR + dst, written as u16));
    wave.waits.issue(Counter::Lds, inst, regs);
    Ok(())
}

/// Reads `N` dwords a lane into `N` registers.
fn read_dwords<const N: usize>(env: &Env, lds: &mut Lds, by: Access, (addr, offset): (&Row, u32), exec: u64, rows: &mut [Row]) -> Step {
    for lane in lanes(exec) {
        let data = lds.read(by, addr[lane].wrapping_add(offset).into(), 4 * N).map_err(|e| lds_fault(env, e, lane))?;
        let (words, _) = data.as_chunks::<4>();
        for (row, &word) in rows.iter_mut().zip(words) {
            row[lane] = u32::from_le_bytes(word);
        }
    }
    Ok(())
}

/// Transposing read. Each group of 16 lanes holds a matrix with rows of 16 elements, a row over as many lanes as 64-bit pieces of it are;
/// lane i of the group gets column i.
fn transposed(wave: &mut Wave, env: &Env, group: &mut Group, ds: &Ds, bits: usize) -> Step {
    if wave.exec() != u64::MAX {
        return Err(unsupported("transposing read with inactive lanes"));
    }
    let mut pieces = [0u64; 64];
    for (lane, piece) in pieces.iter_mut().enumerate() {
        let by = Access { wave: wave.index, inst: wave.pc as u32, waits: &wave.waits, vector: false, atomic: false };
        let at = wave.v[usize::from(ds.addr)][lane].wrapping_add(ds.offsets[0]);
        *piece = number(group.lds.read(by, at.into(), 8).map_err(|e| lds_fault(env, e, lane))?);
    }
    let elements = 64 / bits;
    let lanes_of_row = 16 / elements;
    let dst = usize::from(ds.dst.unwrap_or(0));
    for lane in 0..64 {
        let (first, column) = (lane / 16 * 16, lane % 16);
        let element = |row: usize| {
            let piece = pieces[first + lanes_of_row * row + column / elements];
            piece >> (bits * (column % elements)) & ((1 << bits) - 1)
        };
        let value = (0..elements).fold(0, |value, row| value | element(row) << (bits * row));
        set_number(wave, dst, lane, 8, value);
    }
    Ok(())
}

fn cross(data: &Row, addr: &Row, ds: &Ds, exec: u64) -> Row {
    let source = |from: usize| if exec >> from & 1 == 1 { data[from] } else { 0 };
    match ds.op {
        DsOp::BPermute => std::array::from_fn(|lane| source((addr[lane].wrapping_add(ds.offsets[0]) / 4 % 64) as usize)),
        DsOp::Permute => {
            let mut out = [0; 64];
            // Several lanes may push to one; the highest wins.
            lanes(exec).for_each(|lane| out[(addr[lane].wrapping_add(ds.offsets[0]) / 4 % 64) as usize] = data[lane]);
            out
        }
        DsOp::Swizzle(Swizzle::Quad(perm)) => std::array::from_fn(|lane| source(lane / 4 * 4 + usize::from(perm[lane % 4]))),
        DsOp::Swizzle(Swizzle::Mask { and, or, xor }) => {
            std::array::from_fn(|lane| source(lane & 32 | usize::from((lane as u8 & 31 & and | or) ^ xor)))
        }
        _ => *data,
    }
}

/// Up to 16 bytes of a lane's registers.
#[inline]
fn bytes_of(wave: &Wave, first: usize, lane: usize, bytes: usize, high: bool) -> [u8; 16] {
    let mut data = [0; 16];
    for i in 0..bytes.div_ceil(4) {
        let word = wave.v[first + i][lane] >> if high { 16 } else { 0 };
        data[4 * i..4 * i + 4].copy_from_slice(&word.to_le_bytes());
    }
    data
}

fn number(data: &[u8]) -> u64 {
    let mut bytes = [0; 8];
    bytes[..data.len()].copy_from_slice(data);
    u64::from_le_bytes(bytes)
}

fn set_number(wave: &mut Wave, row: usize, lane: usize, bytes: u16, value: u64) {
    wave.v[row][lane] = value as u32;
    if bytes == 8 {
        wave.v[row + 1][lane] = (value >> 32) as u32;
    }
}

/// The new value of an atomic.
fn modify(op: AtomicOp, bytes: u16, old: u64, operand: u64, compare: u64) -> u64 {
    let wide = bytes == 8;
    let signed = |x: u64| if wide { x as i64 } else { i64::from(x as u32 as i32) };
    let pair = |f: &dyn Fn(u16, u16) -> u16| {
        u64::from(f(old as u16, operand as u16)) | u64::from(f((old >> 16) as u16, (operand >> 16) as u16)) << 16
    };
    let new = match op {
        AtomicOp::Add => old.wrapping_add(operand),
        AtomicOp::Sub => old.wrapping_sub(operand),
        AtomicOp::MinI => {
            if signed(old) <= signed(operand) {
                old
            } else {
                operand
            }
        }
        AtomicOp::MaxI => {
            if signed(old) >= signed(operand) {
                old
            } else {
                operand
            }
        }
        AtomicOp::MinU => old.min(operand),
        AtomicOp::MaxU => old.max(operand),
        AtomicOp::And => old & operand,
        AtomicOp::Or => old | operand,
        AtomicOp::Xor => old ^ operand,
        AtomicOp::Swap => operand,
        AtomicOp::CmpSwap => {
            if old == compare {
                operand
            } else {
                old
            }
        }
        AtomicOp::Inc => {
            if old >= operand {
                0
            } else {
                old + 1
            }
        }
        AtomicOp::Dec => {
            if old == 0 || old > operand {
                operand
            } else {
                old - 1
            }
        }
        AtomicOp::AddF32 => (f32::from_bits(old as u32) + f32::from_bits(operand as u32)).to_bits().into(),
        AtomicOp::AddF64 => (f64::from_bits(old) + f64::from_bits(operand)).to_bits(),
        AtomicOp::AddPkF16 => pair(&|a, b| f16::from_f32(f16::from_bits(a).to_f32() + f16::from_bits(b).to_f32()).to_bits()),
        AtomicOp::AddPkBf16 => pair(&|a, b| bf16::from_f32(bf16::from_bits(a).to_f32() + bf16::from_bits(b).to_f32()).to_bits()),
    };
    if wide { new } else { u64::from(new as u32) }
}

/// Where a lane's access goes: an address, or nowhere (out of a buffer's range) from some dword on.
#[derive(Clone, Copy)]
struct Target {
    address: u64,
    /// Bytes in range, counted from the start.
    valid: usize,
}

fn target(wave: &Wave, mem: &Mem, lane: usize, bytes: usize) -> Result<Target, Stop> {
    let row = |row: u16| wave.v[usize::from(row)][lane];
    let offset = i64::from(mem.offset);
    let all = |address: u64| Target { address, valid: bytes };
    Ok(match mem.addressing {
        Addressing::Lanes { row: first } => all((u64::from(row(first)) | u64::from(row(first + 1)) << 32).wrapping_add_signed(offset)),
        Addressing::Scalar { base, row: index } => {
            let index = index.map_or(0, |index| u64::from(row(index)));
            all(wave.pair(base).wrapping_add(index).wrapping_add_signed(offset))
        }
        Addressing::Scratch { row: index, scalar } => {
            let index = index.map_or(0, row);
            let scalar = scalar.map_or(0, |src| wave.scalar(src, 1) as u32);
            all(u64::from(index.wrapping_add(scalar).wrapping_add(mem.offset as u32)))
        }
        Addressing::Buffer { descriptor: first, scalar, index, offset: offset_row } => {
            let d = descriptor(wave, first)?;
            let scalar = wave.scalar(scalar, 1) as u32;
            let index = index.map_or(0, |r| u64::from(row(r)));
            let within = u64::from(offset_row.map_or(0, row)) + mem.offset as u64 + index * d.stride;
            // Every component is checked on its own.
            let room = u64::from(d.records).saturating_sub(u64::from(scalar)).saturating_sub(within);
            let valid = bytes.min(usize::try_from(room).unwrap_or(usize::MAX));
            let valid = if bytes < 4 { if valid < bytes { 0 } else { valid } } else { valid / 4 * 4 };
            Target { address: d.base.wrapping_add(u64::from(scalar)).wrapping_add(within), valid }
        }
    })
}

pub fn vector(wave: &mut Wave, env: &Env, group: &mut Group, mem: &Mem) -> Step {
    let exec = wave.exec();
    let inst = wave.pc as u32;
    let scratch = matches!(mem.addressing, Addressing::Scratch { .. });
    let mut loaded = NONE;
    let mut moved = 0u64;
    if group.recorder.is_some() && !scratch {
        record(wave, group, mem, exec)?;
    }
    match mem.op {
        MemOp::Load { bytes, convert } => {
            let count = usize::from(bytes).div_ceil(4);
            let whole = convert == Convert::Dwords && matches!(mem.addressing, Addressing::Lanes { .. } | Addressing::Scalar { .. });
            if whole {
                moved = u64::from(bytes) * u64::from(exec.count_ones());
                match count {
                    1 => load_dwords::<1, 4>(wave, mem, exec)?,
                    2 => load_dwords::<2, 8>(wave, mem, exec)?,
                    3 => load_dwords::<3, 12>(wave, mem, exec)?,
                    _ => load_dwords::<4, 16>(wave, mem, exec)?,
                }
            }
            for lane in lanes(if whole { 0 } else { exec }) {
                let t = target(wave, mem, lane, usize::from(bytes))?;
                let data = load(wave, env, scratch, t, usize::from(bytes), lane)?;
                for (i, chunk) in data[..usize::from(bytes)].chunks(4).enumerate() {
                    let slot = &mut wave.v[usize::from(mem.dst) + i][lane];
                    *slot = place(convert, chunk, *slot);
                }
                moved += t.valid as u64;
            }
            loaded = Regs::new(VGPR + mem.dst, count as u16);
        }
        MemOp::LoadToLds { bytes } => {
            // The LDS address is the same for all lanes but for the lane's own slot; the instruction's offset counts on both sides.
            let m0 = wave.s[usize::from(M0)];
            if m0 > 0xffff || mem.offset < 0 {
                return Err(unsupported(format!("load to LDS with M0 = {m0:#x} and offset {}", mem.offset)));
            }
            let base = u64::from(m0) + mem.offset as u64;
            for lane in lanes(exec) {
                let t = target(wave, mem, lane, usize::from(bytes))?;
                let data = load(wave, env, scratch, t, usize::from(bytes), lane)?;
                let by = Access { wave: wave.index, inst, waits: &wave.waits, vector: true, atomic: false };
                let at = base + lane as u64 * u64::from(bytes);
                group.lds.write(by, at, &data[..usize::from(bytes)]).map_err(|e| lds_fault(env, e, lane))?;
                moved += t.valid as u64;
            }
        }
        MemOp::Store { bytes, high } => {
            for lane in lanes(exec) {
                let t = target(wave, mem, lane, usize::from(bytes))?;
                let data = bytes_of(wave, usize::from(mem.data), lane, usize::from(bytes), high);
                store(wave, env, scratch, t, &data[..t.valid], lane)?;
                moved += t.valid as u64;
            }
        }
        MemOp::Atomic { op, bytes, returns } => {
            if scratch {
                return Err(unsupported("atomic in scratch"));
            }
            for lane in lanes(exec) {
                atomic(wave, mem, op, bytes, returns, lane)?;
            }
            if returns {
                loaded = Regs::new(VGPR + mem.dst, bytes / 4);
            }
        }
    }
    count(group, mem, scratch, moved);
    wave.waits.issue(if mem.flat { Counter::Flat } else { Counter::Vector }, inst, loaded);
    Ok(())
}

/// Tells the recorder what a vector memory access touches.
#[cold]
fn record(wave: &Wave, group: &mut Group, mem: &Mem, exec: u64) -> Step {
    let Some(recorder) = &mut group.recorder else { return Ok(()) };
    let (bytes, store) = match mem.op {
        MemOp::Load { bytes, .. } | MemOp::LoadToLds { bytes } => (bytes, false),
        MemOp::Store { bytes, .. } | MemOp::Atomic { bytes, .. } => (bytes, true),
    };
    let targets = lanes(exec).map(|lane| target(wave, mem, lane, usize::from(bytes))).collect::<Result<Vec<_>, _>>()?;
    let ranges: Vec<_> = targets.iter().filter(|t| t.valid > 0).map(|t| (t.address, t.valid as u32)).collect();
    let moved = ranges.iter().map(|&(_, bytes)| bytes).sum();
    recorder.touch(wave.index, Touched { bytes: moved, store, nontemporal: mem.nontemporal, ..Touched::default() }, ranges);
    Ok(())
}

/// Loads `N` dwords, `BYTES` bytes, a lane through 64-bit addresses.
fn load_dwords<const N: usize, const BYTES: usize>(wave: &mut Wave, mem: &Mem, exec: u64) -> Step {
    let offset = i64::from(mem.offset);
    let addresses: [u64; 64] = match mem.addressing {
        Addressing::Lanes { row } => {
            let (low, high) = (&wave.v[usize::from(row)], &wave.v[usize::from(row) + 1]);
            std::array::from_fn(|lane| (u64::from(low[lane]) | u64::from(high[lane]) << 32).wrapping_add_signed(offset))
        }
        Addressing::Scalar { base, row } => {
            let base = wave.pair(base).wrapping_add_signed(offset);
            let index = row.map(|row| &wave.v[usize::from(row)]);
            std::array::from_fn(|lane| base.wrapping_add(index.map_or(0, |index| index[lane].into())))
        }
        _ => return Err(unsupported("load without 64-bit addresses")),
    };
    let Wave { v, view, .. } = wave;
    let rows = &mut v[usize::from(mem.dst)..usize::from(mem.dst) + N];
    for lane in lanes(exec) {
        let data: [u8; BYTES] = view.load(addresses[lane]).map_err(|e| stray(e, Some(lane)))?;
        let (words, _) = data.as_chunks::<4>();
        for (row, &word) in rows.iter_mut().zip(words) {
            row[lane] = u32::from_le_bytes(word);
        }
    }
    Ok(())
}

fn count(group: &mut Group, mem: &Mem, scratch: bool, moved: u64) {
    let counters = &mut group.counters;
    let loads = matches!(mem.op, MemOp::Load { .. } | MemOp::LoadToLds { .. });
    match (scratch, loads) {
        (true, _) => counters.scratch += moved,
        (false, true) => {
            counters.global_loaded += moved;
            counters.global_loaded_nontemporal += if mem.nontemporal { moved } else { 0 };
        }
        (false, false) => {
            counters.global_stored += moved;
            counters.global_stored_nontemporal += if mem.nontemporal { moved } else { 0 };
        }
    }
}

fn scratch_range(env: &Env, address: u64, bytes: usize, lane: usize) -> Result<std::ops::Range<usize>, Stop> {
    let size = env.scratch;
    let start = usize::try_from(address).ok().filter(|&start| start.checked_add(bytes).is_some_and(|end| end <= size));
    match start {
        Some(start) => Ok(lane * size + start..lane * size + start + bytes),
        None => Err((Box::new(Fault::SegmentOutOfBounds { segment: "scratch", offset: address, bytes, size }), Some(lane))),
    }
}

/// Loads up to 16 bytes; what is out of a buffer's range reads 0.
#[inline]
fn load(wave: &mut Wave, env: &Env, scratch: bool, t: Target, bytes: usize, lane: usize) -> Result<[u8; 16], Stop> {
    let mut data = [0; 16];
    if scratch {
        data[..bytes].copy_from_slice(&wave.scratch[scratch_range(env, t.address, bytes, lane)?]);
        return Ok(data);
    }
    let at = |e| stray(e, Some(lane));
    match t.valid {
        16 => data = wave.view.load(t.address).map_err(at)?,
        8 => data[..8].copy_from_slice(&wave.view.load::<8>(t.address).map_err(at)?),
        4 => data[..4].copy_from_slice(&wave.view.load::<4>(t.address).map_err(at)?),
        12 => data[..12].copy_from_slice(&wave.view.load::<12>(t.address).map_err(at)?),
        2 => data[..2].copy_from_slice(&wave.view.load::<2>(t.address).map_err(at)?),
        1 => data[..1].copy_from_slice(&wave.view.load::<1>(t.address).map_err(at)?),
        _ => {}
    }
    Ok(data)
}

#[inline]
fn store(wave: &mut Wave, env: &Env, scratch: bool, t: Target, data: &[u8], lane: usize) -> Step {
    if scratch {
        wave.scratch[scratch_range(env, t.address, data.len(), lane)?].copy_from_slice(data);
        return Ok(());
    }
    if data.is_empty() {
        return Ok(());
    }
    wave.view.store(t.address, data).map_err(|e| stray(e, Some(lane)))
}

fn atomic(wave: &mut Wave, mem: &Mem, op: AtomicOp, bytes: u16, returns: bool, lane: usize) -> Step {
    let t = target(wave, mem, lane, usize::from(bytes))?;
    let mut old = 0;
    if t.valid == usize::from(bytes) {
        let operand = number(&bytes_of(wave, usize::from(mem.data), lane, usize::from(bytes), false)[..usize::from(bytes)]);
        let second = usize::from(mem.data + bytes / 4);
        let compare = if op == AtomicOp::CmpSwap {
            number(&bytes_of(wave, second, lane, usize::from(bytes), false)[..usize::from(bytes)])
        } else {
            0
        };
        if t.address % u64::from(bytes) != 0 {
            return Err(fault(Fault::Unsupported(format!("unaligned atomic at {:#x}", t.address))));
        }
        old = wave.view.update(t.address, bytes, |old| modify(op, bytes, old, operand, compare)).map_err(|e| stray(e, Some(lane)))?;
    }
    if returns {
        set_number(wave, usize::from(mem.dst), lane, bytes, old);
    }
    Ok(())
}
