//! Everything that stops a run, each with the place where it happened.

use sim_memory::OutOfBounds;

/// What an instruction, or a whole cluster, did wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// A global access that no live allocation contains.
    #[error(transparent)]
    Global(#[from] OutOfBounds),
    /// A global access ahead of `griddepcontrol.wait`, to what is not settled.
    #[error("{access} of {bytes} bytes at {address:#x} ahead of griddepcontrol.wait: the kernel before may not be through with them")]
    Early {
        /// `load` or `store`.
        access: &'static str,
        /// The address.
        address: u64,
        /// Bytes accessed.
        bytes: usize,
    },
    /// An access outside the CTA's shared memory.
    #[error("shared {access} of {bytes} bytes at {address:#x}, the CTA has {size:#x} from {start:#x} on")]
    Shared {
        /// `load`, `store`, ...
        access: &'static str,
        /// The address.
        address: u32,
        /// Bytes accessed.
        bytes: usize,
        /// Where shared memory starts.
        start: u32,
        /// Its bytes.
        size: usize,
    },
    /// An address that is no multiple of the access.
    #[error("{bytes} bytes at {address:#x}, which is no multiple of that")]
    Misaligned {
        /// The address.
        address: u64,
        /// Bytes accessed.
        bytes: usize,
    },
    /// Two accesses to the same shared memory that nothing orders, one of them a write.
    #[error("race at shared address {address:#x}: this {access} is not ordered after {other}")]
    Race {
        /// What was attempted.
        access: &'static str,
        /// The first address that conflicts.
        address: u32,
        /// The access before, in words.
        other: String,
    },
    /// Lanes that had to execute an instruction together cannot.
    #[error("lanes {lanes:#010x} wait here for {missing:#010x} of their warp, which do not come")]
    Divergence {
        /// Lanes that are here.
        lanes: u32,
        /// Lanes that are not.
        missing: u32,
    },
    /// No warp of a cluster can go on.
    #[error("deadlock: {0}")]
    Deadlock(String),
    /// A synchronization used against its rules.
    #[error("{0}")]
    Misuse(String),
    /// A warp has executed more instructions than any kernel should.
    #[error("more than {0} instructions of one warp")]
    Runaway(u64),
}

/// Errors of reading or running PTX.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Text that the simulator does not understand.
    #[error("PTX, line {line}: {reason}: `{text}`")]
    Syntax {
        /// Line of the text, from 1.
        line: u32,
        /// The statement.
        text: String,
        /// What is not understood.
        reason: String,
    },
    /// A launch that does not fit the kernel.
    #[error("launch of {kernel}: {reason}")]
    Launch {
        /// The kernel's name.
        kernel: String,
        /// What does not fit.
        reason: String,
    },
    /// An instruction failed.
    #[error("{fault}, by `{text}` (line {line}), CTA {cta:?}, warp {warp}")]
    Execution {
        /// What went wrong.
        fault: Fault,
        /// The statement.
        text: String,
        /// Its line.
        line: u32,
        /// The CTA in its grid.
        cta: [u32; 3],
        /// The warp in its CTA.
        warp: usize,
    },
}

impl Error {
    /// The fault of an execution error.
    pub fn fault(&self) -> Option<&Fault> {
        match self {
            Error::Execution { fault, .. } => Some(fault),
            _ => None,
        }
    }
}

/// The crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;
