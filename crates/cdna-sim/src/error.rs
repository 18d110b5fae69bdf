//! Everything that stops a run, each with the place where it happened.

use std::fmt;

use sim_memory::OutOfBounds;

/// Where in a launch an execution error happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Site {
    /// The instruction as the disassembler prints it.
    pub text: String,
    /// Its address in the code object.
    pub address: u64,
    /// Workgroup coordinates.
    pub workgroup: [u32; 3],
    /// Wave within the workgroup.
    pub wave: usize,
    /// Lane, where one lane is to blame.
    pub lane: Option<usize>,
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [x, y, z] = self.workgroup;
        write!(f, "`{}` at {:#x}, workgroup ({x}, {y}, {z}), wave {}", self.text, self.address, self.wave)?;
        match self.lane {
            Some(lane) => write!(f, ", lane {lane}"),
            None => Ok(()),
        }
    }
}

/// What an instruction did wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// An instruction, operand or modifier that the simulator does not know.
    #[error("not supported: {0}")]
    Unsupported(String),
    /// A register was used while a load into it may still be in flight.
    #[error("{register} is used before the wait for `{load}` at {load_address:#x}")]
    UnfinishedLoad {
        /// The register as the disassembler names it.
        register: String,
        /// The load's text.
        load: String,
        /// The load's address in the code object.
        load_address: u64,
    },
    /// A global access that no live allocation contains.
    #[error(transparent)]
    GlobalOutOfBounds(#[from] OutOfBounds),
    /// A constant or scratch access outside its segment.
    #[error("{segment} access of {bytes} bytes at offset {offset:#x} is outside the segment's {size} bytes")]
    SegmentOutOfBounds {
        /// `LDS` or `scratch`.
        segment: &'static str,
        /// Offset in the segment.
        offset: u64,
        /// Bytes accessed.
        bytes: usize,
        /// The segment's size.
        size: usize,
    },
    /// Two waves touched the same LDS bytes with no barrier (or no wait before it) in between.
    #[error(
        "LDS race at offset {offset:#x}: {access} conflicts with wave {other_wave}'s {other_access} by `{other}` at {other_address:#x}{hint}"
    )]
    LdsRace {
        /// Offset in LDS.
        offset: u64,
        /// `read` or `write`.
        access: &'static str,
        /// The wave of the earlier access.
        other_wave: usize,
        /// What the earlier access was.
        other_access: &'static str,
        /// The earlier instruction's text.
        other: String,
        /// The earlier instruction's address.
        other_address: u64,
        /// What would have ordered the two.
        hint: &'static str,
    },
    /// Some waves wait at a barrier that others never reach.
    #[error("barrier divergence: {0}")]
    BarrierDivergence(String),
    /// A wave executed more instructions than the launch allows.
    #[error("runaway: more than {0} instructions in one wave")]
    Runaway(u64),
    /// Control left the program.
    #[error("control reaches {0:#x}, which is no instruction")]
    BadTarget(u64),
    /// A register outside the kernel's allocation.
    #[error("{0} is outside the registers that the kernel descriptor allocates")]
    RegisterOutOfRange(String),
}

/// Errors of loading or running a code object.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An instruction failed.
    #[error("{fault}: {site}")]
    Execution {
        /// What went wrong.
        fault: Box<Fault>,
        /// Where.
        site: Box<Site>,
    },
    /// The file is no code object the simulator can read.
    #[error("code object: {0}")]
    CodeObject(String),
    /// The disassembler could not be run.
    #[error("llvm-objdump: {0}")]
    Disassembler(String),
    /// A launch whose parameters do not fit the kernel.
    #[error("launch of {kernel}: {reason}")]
    Launch {
        /// The kernel's name.
        kernel: String,
        /// What does not fit.
        reason: String,
    },
}

/// The crate's result.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// The fault of an execution error.
    pub fn fault(&self) -> Option<&Fault> {
        match self {
            Error::Execution { fault, .. } => Some(fault),
            _ => None,
        }
    }

    /// The place of an execution error.
    pub fn site(&self) -> Option<&Site> {
        match self {
            Error::Execution { site, .. } => Some(site),
            _ => None,
        }
    }
}
