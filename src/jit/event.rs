//! What the just-in-time compiler tells about its work.

use std::path::PathBuf;
use std::sync::Arc;

use crate::registry::ArchName;

/// A step of getting a code object. Each call that gives one ends in [`JitEvent::CacheHit`] or [`JitEvent::Compiled`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum JitEvent {
    /// The code object was there: in the cache, or just compiled by another thread.
    CacheHit {
        /// Entry point.
        kernel: String,
        /// What it runs on.
        arch: ArchName,
    },
    /// The compiler starts: NVRTC takes up to two seconds, clang several.
    Compiling {
        /// Entry point.
        kernel: String,
        /// What it is compiled for.
        arch: ArchName,
    },
    /// The compiler is done.
    Compiled {
        /// Entry point.
        kernel: String,
        /// What it was compiled for.
        arch: ArchName,
        /// Wall time of the compiler.
        seconds: f64,
    },
    /// An entry of the cache cannot be used; it is compiled anew and replaced.
    CacheCorrupt {
        /// The entry's file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// What was compiled could not be kept, in a read-only folder say. The code object is good all the same.
    CacheWriteFailed {
        /// Where it was to be kept.
        path: PathBuf,
        /// Why it was not.
        error: String,
    },
}

/// Is called with every [`JitEvent`], on the thread that asks for the code object, by several threads at once where a program loads many. The code object
/// is being got meanwhile: a callback that asks for a kernel itself, or makes a call that needs one, may wait for itself forever.
pub type Progress = Arc<dyn Fn(&JitEvent) + Send + Sync>;
