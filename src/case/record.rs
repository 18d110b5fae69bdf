//! `CANDLE_PAGED_ATTN_RECORD=DIR`: every call leaves a case file in DIR.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use candle::{Result, Tensor, bail};
use once_cell::sync::Lazy;

use super::capture::capture;
use crate::op::Operand;
use crate::options::DecodeOptions;

/// Where to record, read from the environment once.
static RECORDER: Lazy<Option<Recorder>> = Lazy::new(|| {
    let directory = std::env::var_os("CANDLE_PAGED_ATTN_RECORD").filter(|dir| !dir.is_empty())?;
    Some(Recorder::new(PathBuf::from(directory)))
});

/// Writes the call into the directory that `CANDLE_PAGED_ATTN_RECORD` names, if it is set; see [`super::Case::capture`] for what is
/// kept of it.
///
/// Reads the tensors' storages: call it before one of them is locked for writing. Errors name the file that cannot be written.
pub(crate) fn maybe_record(
    q: Operand<'_>,
    key: Operand<'_>,
    value: Operand<'_>,
    block_tables: &Tensor,
    context_lens: &Tensor,
    options: &DecodeOptions,
) -> Result<()> {
    match &*RECORDER {
        None => Ok(()),
        Some(recorder) => capture(q, key, value, block_tables, context_lens, options)?.write(recorder.next_path()?),
    }
}

/// Whether calls are recorded: what has to be read back for that is worth it.
#[cfg(any(feature = "rocm", feature = "cuda"))]
pub(crate) fn is_recording() -> bool {
    RECORDER.is_some()
}

/// Refuses a directory to record into that cannot be made: what [`maybe_record`] would find, before anything changes.
pub(crate) fn check_recorder() -> Result<()> {
    match &*RECORDER {
        None => Ok(()),
        Some(recorder) => create(&recorder.directory),
    }
}

struct Recorder {
    directory: PathBuf,
    /// Tells this process from others that share the directory, earlier ones with the same id among them.
    process: String,
    calls: AtomicU64,
}

impl Recorder {
    fn new(directory: PathBuf) -> Self {
        let started = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis());
        Self { directory, process: format!("{started}-{}", std::process::id()), calls: AtomicU64::new(0) }
    }

    /// A file name that no other call has; names sort by call.
    fn next_path(&self) -> Result<PathBuf> {
        create(&self.directory)?;
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        Ok(self.directory.join(format!("call-{}-{call:06}.safetensors", self.process)))
    }
}

fn create(directory: &Path) -> Result<()> {
    match std::fs::create_dir_all(directory) {
        Ok(()) => Ok(()),
        Err(error) => bail!("CANDLE_PAGED_ATTN_RECORD={}: {error}", directory.display()),
    }
}
