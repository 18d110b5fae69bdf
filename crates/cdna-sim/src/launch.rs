//! Launches: argument segments, the state that waves start in, workgroups on all cores.

use std::sync::Arc;

use rayon::prelude::*;
use sim_memory::{Map, Memory, View};

use crate::counters::Counters;
use crate::disasm::disassemble;
use crate::elf::{CodeObject, KernelInfo};
use crate::error::{Error, Fault, Result, Site};
use crate::exec::{Env, Group, Stop, run};
use crate::lds::Lds;
use crate::operand::{AGPR, EXEC, Regs, VGPR};
use crate::program::{Inst, Program};
use crate::trace::{Recorder, Trace};
use crate::wave::{Mode, State, Wave};

/// A code object ready to run: its program, and its image in memory.
pub struct Module {
    /// What the file says.
    pub object: CodeObject,
    /// Its instructions.
    pub program: Arc<Program>,
    /// Holds the image, so that constants are accessible at their addresses.
    image: Vec<u8>,
    lowest: u64,
}

/// A launch's shape and limits.
#[derive(Debug, Clone)]
pub struct Launch {
    /// Workgroups.
    pub grid: [u32; 3],
    /// Work items a workgroup.
    pub block: [u32; 3],
    /// LDS in addition to the kernel's own.
    pub dynamic_lds: usize,
    /// Whether the machine preloads kernel arguments where the kernel asks for it; without, waves start in the compatibility prologue.
    pub preload: bool,
    /// Whether waves that wait at different `s_barrier` instructions are an error. Hardware counts arrivals and does not care, compiled code
    /// never means it; hand-written kernels that give waves their own code do.
    pub same_barrier: bool,
    /// Whether use of a register before the wait for its load is an error, or only counted ([`Counters::unproven`]) for code that bets on time.
    pub proven_loads: bool,
    /// Most instructions of one wave.
    pub instruction_limit: u64,
}

impl Launch {
    /// A launch with the default limits.
    pub fn new(grid: [u32; 3], block: [u32; 3]) -> Self {
        Self { grid, block, dynamic_lds: 0, preload: true, same_barrier: true, proven_loads: true, instruction_limit: 100_000_000 }
    }
}

/// Instructions after which another wave of the workgroup gets its turn.
const QUANTUM: u64 = 1 << 20;

impl Module {
    /// Reads, disassembles and decodes a code object.
    pub fn load(bytes: &[u8]) -> Result<Self> {
        let object = CodeObject::parse(bytes)?;
        let program = Arc::new(Program::new(&disassemble(bytes, object.arch)?, object.arch)?);
        Ok(Self::new(object, program))
    }

    /// The same code object loaded once more: its own image, the same program.
    pub fn reloaded(&self) -> Self {
        Self::new(self.object.clone(), self.program.clone())
    }

    fn new(object: CodeObject, program: Arc<Program>) -> Self {
        let lowest = object.segments.iter().map(|segment| segment.address).min().unwrap_or(0);
        let end = object.segments.iter().map(|segment| segment.address + segment.data.len() as u64).max().unwrap_or(0);
        let mut image = vec![0; (end - lowest) as usize];
        for segment in &object.segments {
            let start = (segment.address - lowest) as usize;
            image[start..start + segment.data.len()].copy_from_slice(&segment.data);
        }
        Self { object, program, image, lowest }
    }

    /// The kernel called `name`.
    pub fn kernel(&self, name: &str) -> Result<&KernelInfo> {
        self.object.kernel_named(name).ok_or_else(|| Error::Launch { kernel: name.to_string(), reason: "no such kernel".into() })
    }

    /// Where a symbol address of the code object is in host memory (for device variables).
    pub fn host_address(&self, address: u64) -> u64 {
        (self.image.as_ptr() as u64).wrapping_add(address.wrapping_sub(self.lowest))
    }

    /// The kernarg segment: explicit arguments as given, hidden ones as the launch's shape says.
    pub fn kernarg(&self, kernel: &KernelInfo, explicit: &[u8], launch: &Launch) -> Vec<u8> {
        let mut segment = explicit.to_vec();
        segment.resize(kernel.kernarg_size.max(explicit.len()), 0);
        for arg in kernel.args.iter().filter(|arg| arg.value_kind.starts_with("hidden_")) {
            let axis = match arg.value_kind.as_bytes().last() {
                Some(b'y') => 1,
                Some(b'z') => 2,
                _ => 0,
            };
            let value = match arg.value_kind.as_str() {
                "hidden_block_count_x" | "hidden_block_count_y" | "hidden_block_count_z" => u64::from(launch.grid[axis]),
                "hidden_group_size_x" | "hidden_group_size_y" | "hidden_group_size_z" => u64::from(launch.block[axis]),
                "hidden_grid_dims" => 3,
                "hidden_dynamic_lds_size" => launch.dynamic_lds as u64,
                _ => 0,
            };
            if let Some(slot) = segment.get_mut(arg.offset..arg.offset + arg.size.min(8)) {
                slot.copy_from_slice(&value.to_le_bytes()[..slot.len()]);
            }
        }
        segment
    }

    /// Runs a kernel on `memory` with the explicit argument bytes.
    pub fn launch(&self, memory: &Memory, kernel: &KernelInfo, explicit: &[u8], launch: &Launch) -> Result<Counters> {
        let [x, y, z] = launch.grid.map(u64::from);
        self.start(memory, kernel, explicit, launch, |start| {
            (0..x * y * z)
                .into_par_iter()
                .map(|i| start.workgroup([(i % x) as u32, (i / x % y) as u32, (i / x / y) as u32], None).map(|(counters, _)| counters))
                .try_reduce(Counters::default, |a, b| Ok(a.merge(&b)))
        })
    }

    /// Runs one workgroup of a launch, `id` in its grid, and records what its waves execute.
    pub fn trace(&self, memory: &Memory, kernel: &KernelInfo, explicit: &[u8], launch: &Launch, id: [u32; 3]) -> Result<(Counters, Trace)> {
        self.start(memory, kernel, explicit, launch, |start| {
            let (counters, recorder) = start.workgroup(id, Some(Recorder::new(start.waves)))?;
            Ok((counters, Trace { waves: recorder.unwrap_or_default().waves }))
        })
    }

    /// Prepares a launch and gives it to `run`.
    fn start<R>(
        &self,
        memory: &Memory,
        kernel: &KernelInfo,
        explicit: &[u8],
        launch: &Launch,
        run: impl FnOnce(&Start) -> Result<R>,
    ) -> Result<R> {
        let refuse = |reason: String| Error::Launch { kernel: kernel.name.clone(), reason };
        let threads = launch.block.iter().map(|&n| u64::from(n)).product::<u64>();
        if threads == 0 || threads > 1024 || threads > kernel.max_workgroup_size.max(1) as u64 {
            return Err(refuse(format!("workgroup {:?} where at most {} work items fit", launch.block, kernel.max_workgroup_size)));
        }
        let lds = kernel.group_segment_size + launch.dynamic_lds;
        if lds > self.object.arch.lds_bytes() {
            return Err(refuse(format!("{lds} bytes of LDS where {} has {}", self.object.arch.name(), self.object.arch.lds_bytes())));
        }
        self.check_registers(kernel)?;
        let mode = Mode(kernel.rsrc[0] >> 12 & 0xff | (kernel.rsrc[0] >> 26 & 1) << 23);
        if mode.unsupported() {
            return Err(refuse(format!("rounding or denormal mode {:#x}", mode.0)));
        }
        let segment = self.kernarg(kernel, explicit, launch);
        // At least the 64-byte alignment that the packet processor gives; whole cache lines make traces alike.
        let mut words = vec![0u128; segment.len() / 16 + 20];
        let kernarg = (words.as_mut_ptr() as u64).next_multiple_of(256);
        // SAFETY: `words` has at least 256 bytes more than the segment.
        unsafe { std::ptr::copy_nonoverlapping(segment.as_ptr(), kernarg as *mut u8, segment.len()) };
        let packet = Packet::new(launch, threads);
        let start = Start {
            module: self,
            kernel,
            launch,
            lds,
            mode,
            kernarg,
            packet: packet.0.as_ptr() as u64,
            segment: &segment,
            waves: threads.div_ceil(64) as usize,
            threads: threads as usize,
            map: self.map(memory, kernarg, segment.len(), &packet),
        };
        run(&start)
    }

    /// Allocations, the code object's image, the kernarg segment and the dispatch packet.
    fn map(&self, memory: &Memory, kernarg: u64, kernarg_len: usize, packet: &Packet) -> Map {
        let mut map = memory.map().to_vec();
        let image = self.image.as_ptr() as u64;
        map.push((image, image + self.image.len() as u64));
        map.push((kernarg, kernarg + kernarg_len as u64));
        let packet = packet.0.as_ptr() as u64;
        map.push((packet, packet + 64));
        map.sort_unstable();
        map.into()
    }

    /// Every instruction of the kernel must stay inside the allocated registers.
    ///
    /// AGPRs are the file's upper part; VGPR numbers past the split reach into it, which code without AGPRs uses and code with AGPRs must not.
    fn check_registers(&self, kernel: &KernelInfo) -> Result<()> {
        let (total, split) = kernel.register_file();
        let next = self.object.kernels.iter().map(|other| other.entry).filter(|&entry| entry > kernel.entry).min().unwrap_or(u64::MAX);
        let insts = || self.program.insts.iter().filter(|inst| (kernel.entry..next).contains(&inst.address));
        let all = |inst: &Inst| inst.reads.iter().chain(&*inst.writes).copied().collect::<Vec<Regs>>();
        let uses_agprs = insts().flat_map(all).any(|regs| regs.first >= AGPR);
        let outside = |regs: &Regs| {
            let (base, limit) = if regs.first >= AGPR { (AGPR, total - split) } else { (VGPR, if uses_agprs { split } else { total }) };
            regs.first >= VGPR && usize::from(regs.first + regs.count - base) > limit
        };
        for inst in insts() {
            if let Some(regs) = all(inst).iter().find(|regs| outside(regs)) {
                let register = crate::operand::register_name(regs.first + regs.count - 1);
                let site = Site { text: inst.text.to_string(), address: inst.address, workgroup: [0; 3], wave: 0, lane: None };
                return Err(Error::Execution { fault: Box::new(Fault::RegisterOutOfRange(register)), site: Box::new(site) });
            }
        }
        Ok(())
    }
}

/// The part of an HSA kernel dispatch packet that kernels read.
struct Packet(Box<[u32; 16]>);

impl Packet {
    fn new(launch: &Launch, _threads: u64) -> Self {
        let [bx, by, bz] = launch.block;
        let mut words = [0; 16];
        words[0] = 3 << 16;
        words[1] = bx & 0xffff | by << 16;
        words[2] = bz;
        (0..3).for_each(|i| words[3 + i] = launch.grid[i].wrapping_mul(launch.block[i]));
        Self(Box::new(words))
    }
}

/// Everything that workgroups start from.
struct Start<'a> {
    module: &'a Module,
    kernel: &'a KernelInfo,
    launch: &'a Launch,
    lds: usize,
    mode: Mode,
    kernarg: u64,
    packet: u64,
    segment: &'a [u8],
    waves: usize,
    threads: usize,
    map: Map,
}

impl Start<'_> {
    fn workgroup(&self, id: [u32; 3], recorder: Option<Recorder>) -> Result<(Counters, Option<Recorder>)> {
        let program = &self.module.program;
        let env = Env {
            program,
            image: self.module.host_address(0),
            limit: self.launch.instruction_limit,
            proven_loads: self.launch.proven_loads,
            scratch: self.kernel.private_segment_size,
        };
        let mut group = Group {
            lds: Lds::new(self.lds, self.waves, program.lds_shift),
            counters: Counters { workgroups: 1, ..Counters::default() },
            executions: vec![0; program.insts.len()],
            recorder,
        };
        let mut waves = (0..self.waves).map(|index| self.wave(index, id)).collect::<Result<Vec<_>>>()?;
        while waves.iter().any(|wave| wave.state == State::Running) {
            for wave in waves.iter_mut().filter(|wave| wave.state == State::Running) {
                run(wave, &env, &mut group, QUANTUM).map_err(|stop| site(program, wave, id, stop))?;
            }
            self.barrier(&mut waves, &mut group, id)?;
        }
        group.counters.longest_wave = waves.iter().map(|wave| wave.executed).max().unwrap_or(0);
        group.counters.add_executions(program, &group.executions);
        Ok((group.counters, group.recorder))
    }

    /// Lets the waves pass a barrier that all of them have reached.
    fn barrier(&self, waves: &mut [Wave], group: &mut Group, id: [u32; 3]) -> Result<()> {
        let count = |state| waves.iter().filter(|wave| wave.state == state).count();
        let (waiting, ended) = (count(State::AtBarrier), count(State::Ended));
        if waiting == 0 || waiting + ended < waves.len() {
            return Ok(());
        }
        let program = &self.module.program;
        // The instruction before the one that a waiting wave resumes at is its barrier.
        let barriers: Vec<usize> = waves.iter().filter(|wave| wave.state == State::AtBarrier).map(|wave| wave.pc - 1).collect();
        let mixed = self.launch.same_barrier && barriers.iter().any(|&pc| pc != barriers[0]);
        if ended > 0 || mixed {
            let blamed = waves.iter().position(|wave| wave.state == State::AtBarrier).unwrap_or(0);
            let text = if mixed {
                let at: Vec<String> = barriers.iter().map(|&pc| format!("{:#x}", program.insts[pc].address)).collect();
                format!("waves wait at different barriers: {}", at.join(", "))
            } else {
                let ended: Vec<usize> = waves.iter().filter(|wave| wave.state == State::Ended).map(|wave| wave.index).collect();
                format!("waves {ended:?} have ended and never reach it")
            };
            waves[blamed].pc -= 1;
            return Err(site(program, &waves[blamed], id, (Box::new(Fault::BarrierDivergence(text)), None)));
        }
        for wave in waves.iter_mut() {
            group.lds.release(wave.index, (wave.waits.vector_done, wave.waits.lds_done));
            wave.state = State::Running;
        }
        Ok(())
    }

    /// A wave as the packet processor starts it.
    fn wave(&self, index: usize, id: [u32; 3]) -> Result<Wave> {
        let kernel = self.kernel;
        let refuse = |reason: String| Error::Launch { kernel: kernel.name.clone(), reason };
        let mut wave =
            Wave::new(index, View::new(self.map.clone()), self.mode, kernel.private_segment_size * 64, self.module.program.vector_rows);
        let mut next = 0u16;
        let properties = kernel.properties;
        for (bit, size) in [(0, 4), (1, 2), (2, 2), (3, 2), (4, 2), (5, 2), (6, 1)] {
            if properties >> bit & 1 == 0 {
                continue;
            }
            match bit {
                1 => wave.set_pair(next, self.packet),
                3 => wave.set_pair(next, self.kernarg),
                4 => wave.set_pair(next, 1),
                6 => wave.s[usize::from(next)] = kernel.private_segment_size as u32,
                _ => return Err(refuse(format!("user SGPR kind {bit} of the kernel code properties is not supported"))),
            }
            next += size;
        }
        let preload = self.launch.preload && kernel.preload_length > 0;
        for i in 0..kernel.preload_length {
            let at = 4 * (kernel.preload_offset + i);
            if preload {
                let word = self.segment.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
                let word = word.ok_or_else(|| refuse("preloaded arguments outside the kernarg segment".into()))?;
                wave.s[usize::from(next)] = u32::from_le_bytes(word);
            }
            next += 1;
        }
        if usize::from(next) != kernel.user_sgprs() {
            return Err(refuse(format!("{next} user SGPRs where the descriptor counts {}", kernel.user_sgprs())));
        }
        for (axis, coordinate) in id.into_iter().enumerate() {
            if kernel.rsrc[1] >> (7 + axis) & 1 == 1 {
                wave.s[usize::from(next)] = coordinate;
                next += 1;
            }
        }
        if kernel.rsrc[1] >> 10 & 1 == 1 {
            return Err(refuse("workgroup info in an SGPR is not supported".into()));
        }
        // With preloading, entry is past the 256 bytes of the prologue that loads the same registers on older firmware.
        let entry = kernel.entry + if preload { 256 } else { 0 };
        wave.pc = self.module.program.at(entry).ok_or_else(|| refuse(format!("no instruction at the entry {entry:#x}")))?;
        let [bx, by, _] = self.launch.block.map(|n| n as usize);
        let first = index * 64;
        wave.v[0] = std::array::from_fn(|lane| {
            let item = first + lane;
            ((item % bx) | ((item / bx % by) << 10) | ((item / bx / by) << 20)) as u32
        });
        let live = self.threads.saturating_sub(first).min(64);
        wave.set_pair(EXEC, if live == 64 { u64::MAX } else { (1 << live) - 1 });
        Ok(wave)
    }
}

fn site(program: &Program, wave: &Wave, workgroup: [u32; 3], (fault, lane): Stop) -> Error {
    let inst = &program.insts[wave.pc];
    let site = Site { text: inst.text.to_string(), address: inst.address, workgroup, wave: wave.index, lane };
    Error::Execution { fault, site: Box::new(site) }
}
