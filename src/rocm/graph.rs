//! Graphs: the work that a closure enqueues, recorded once and replayed.

use std::ffi::c_char;
use std::fmt;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use candle::Result;
use hip_runtime_sys::{hipGraph_t, hipGraphExec_t};

use super::device::{Inner, RocmDevice};
use super::storage::Block;
use super::stream::destroy_graph;

/// Recorded work of a device, and the memory it uses: kept for as long as the graph, whatever becomes of the tensors.
pub struct RocmGraph {
    device: RocmDevice,
    /// Taken out when dropped.
    executable: Option<Executable>,
    replayed: AtomicBool,
}

/// An instantiated graph with the memory its commands use.
pub(super) struct Executable {
    handle: hipGraphExec_t,
    held: Vec<Arc<Block>>,
}

// SAFETY: HIP's functions take graphs from any thread; it is launched under the stream's lock alone.
unsafe impl Send for Executable {}
// SAFETY: as above.
unsafe impl Sync for Executable {}

impl Executable {
    /// Destroys the graph; it is not running.
    pub fn destroy(self, inner: &Inner) {
        // SAFETY: from hipGraphInstantiate, used no more.
        let _ = unsafe { inner.context.hip().hipGraphExecDestroy(self.handle) };
        drop(self.held);
    }
}

/// Ends a capture that is left by a panic.
struct Capturing<'a>(Option<&'a Inner>);

impl Drop for Capturing<'_> {
    fn drop(&mut self) {
        if let Some(inner) = self.0.take() {
            abandon(inner);
        }
    }
}

/// Ends the capture and forgets what was recorded.
fn abandon(inner: &Inner) {
    let (graph, held) = inner.stream.end_capture(&inner.context);
    if let Ok(graph) = graph {
        destroy_graph(&inner.context, graph);
    }
    drop(held);
    inner.after_capture();
}

impl RocmDevice {
    /// Records what `work` enqueues on this device, without running it.
    ///
    /// Kernels have to be loaded and memory to be in the pool already: make the same calls once before. What a graph cannot hold is refused
    /// with an error and leaves the capture as it was: uploads, downloads, waiting, loading a kernel, replaying a graph. Where `work` fails, the
    /// capture is ended and its error returned. Other threads get errors for what they enqueue on the device meanwhile.
    pub fn capture(&self, work: impl FnOnce() -> Result<()>) -> Result<RocmGraph> {
        let inner = &*self.inner;
        inner.stream.begin_capture(&inner.context)?;
        let mut capturing = Capturing(Some(inner));
        work()?;
        capturing.0 = None;
        let (graph, held) = inner.stream.end_capture(&inner.context);
        let executable = graph.and_then(|graph| instantiate(inner, graph));
        inner.after_capture();
        let executable = Executable { handle: executable?, held };
        Ok(RocmGraph { device: self.clone(), executable: Some(executable), replayed: AtomicBool::new(false) })
    }

    /// Whether a graph is being captured, on whatever thread.
    pub fn is_capturing(&self) -> bool {
        self.inner.stream.is_capturing()
    }
}

fn instantiate(inner: &Inner, graph: hipGraph_t) -> Result<hipGraphExec_t> {
    let mut executable = null_mut();
    let mut log = [0 as c_char; 256];
    let result = inner.context.enter().and_then(|hip| {
        // SAFETY: the graph is alive; writes one handle, and at most the log's bytes.
        let result = unsafe { hip.hipGraphInstantiate(&mut executable, graph, null_mut(), log.as_mut_ptr(), log.len()) };
        inner.context.check(result, "")
    });
    destroy_graph(&inner.context, graph);
    result.map(|()| executable)
}

impl RocmGraph {
    /// Runs the recorded work again: enqueued, after everything enqueued before. It reads what is in its tensors' memory by then.
    pub fn replay(&self) -> Result<()> {
        let inner = &self.device.inner;
        let Some(executable) = &self.executable else { return Ok(()) };
        inner.stream.enqueue_eagerly("replaying a graph", |stream| {
            // SAFETY: executable and stream are alive.
            inner.context.check(unsafe { inner.context.enter()?.hipGraphLaunch(executable.handle, stream) }, "")
        })?;
        self.replayed.store(true, Ordering::Relaxed);
        inner.counts.replays.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// The device whose work it is.
    pub fn device(&self) -> &RocmDevice {
        &self.device
    }
}

impl Drop for RocmGraph {
    fn drop(&mut self) {
        let Some(executable) = self.executable.take() else { return };
        self.device.inner.retire_graph(executable, *self.replayed.get_mut());
    }
}

impl fmt::Debug for RocmGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let blocks = self.executable.as_ref().map_or(0, |executable| executable.held.len());
        write!(f, "RocmGraph({blocks} blocks of memory, {})", self.device.name())
    }
}
