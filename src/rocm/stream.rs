//! A device's one stream: everything is enqueued on it, in order, and a capture takes it for one thread.

use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use candle::{Result, bail};
use hip_runtime_sys::{hipGraph_t, hipStream_t, hipStreamCaptureMode, hipStreamNonBlocking};

use super::context::Context;
use super::pool;
use super::storage::Block;

pub(super) struct Stream {
    handle: hipStream_t,
    capture: Mutex<Option<Capture>>,
    /// Whether `capture` is there, to be asked without the lock.
    capturing: AtomicBool,
}

// SAFETY: HIP's functions take a stream from any thread; the handle is destroyed by `destroy` alone.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

/// What a capture in progress keeps.
struct Capture {
    thread: ThreadId,
    /// Memory whose address was asked for: the graph's commands use it as long as the graph lives.
    held: Vec<Arc<Block>>,
    /// Memory freed since the capture began. What follows in the same graph may use it, nobody else.
    idle: Vec<Arc<Block>>,
}

impl Capture {
    fn hold(&mut self, block: &Arc<Block>) {
        if !self.held.iter().any(|held| Arc::ptr_eq(held, block)) {
            self.held.push(block.clone());
        }
    }
}

impl Stream {
    pub fn new(context: &Context) -> Result<Self> {
        let mut handle = null_mut();
        // SAFETY: writes one handle.
        context.check(unsafe { context.enter()?.hipStreamCreateWithFlags(&mut handle, hipStreamNonBlocking) }, "")?;
        Ok(Self { handle, capture: Mutex::new(None), capturing: AtomicBool::new(false) })
    }

    fn lock(&self) -> MutexGuard<'_, Option<Capture>> {
        self.capture.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a capture is going on, on any thread.
    pub fn is_capturing(&self) -> bool {
        self.capturing.load(Ordering::Acquire)
    }

    /// Calls `enqueue`, which puts work on the stream. While another thread captures, its work would end up in that graph: refused.
    pub fn enqueue<T>(&self, what: &str, enqueue: impl FnOnce(hipStream_t) -> Result<T>) -> Result<T> {
        let capture = self.lock();
        match capture.as_ref() {
            Some(capture) if capture.thread != thread::current().id() => {
                bail!("rocm: {what}: another thread is capturing the device's stream")
            }
            _ => enqueue(self.handle),
        }
    }

    /// As [`Stream::enqueue`] for what a graph cannot hold.
    pub fn enqueue_eagerly<T>(&self, what: &str, enqueue: impl FnOnce(hipStream_t) -> Result<T>) -> Result<T> {
        self.refuse_capture(what)?;
        self.enqueue(what, enqueue)
    }

    /// Refuses what a graph cannot hold, or must not happen while one is captured.
    pub fn refuse_capture(&self, what: &str) -> Result<()> {
        if self.is_capturing() {
            bail!("rocm: {what} while a graph is being captured: do it before the capture")
        }
        Ok(())
    }

    /// Waits for everything enqueued.
    pub fn synchronize(&self, context: &Context) -> Result<()> {
        self.refuse_capture("synchronizing")?;
        // SAFETY: the stream is alive.
        context.check(unsafe { context.enter()?.hipStreamSynchronize(self.handle) }, "")
    }

    /// Keeps `block` as long as the graph being captured, if this thread captures one.
    pub fn hold(&self, block: &Arc<Block>) {
        if self.is_capturing()
            && let Some(capture) = self.lock().as_mut().filter(|capture| capture.thread == thread::current().id())
        {
            capture.hold(block);
        }
    }

    /// Takes a block freed while capturing back, for what follows in the capture. Its last user may have enqueued work on it.
    pub fn retire(&self, block: &Arc<Block>) {
        if self.is_capturing()
            && let Some(capture) = self.lock().as_mut()
        {
            capture.idle.push(block.clone());
        }
    }

    /// A retired block for a request of `bytes`, for the capturing thread.
    pub fn reuse(&self, bytes: usize) -> Option<Arc<Block>> {
        if !self.is_capturing() {
            return None;
        }
        let mut guard = self.lock();
        let capture = guard.as_mut().filter(|capture| capture.thread == thread::current().id())?;
        let at = capture.idle.iter().position(|block| pool::serves(block.bytes(), bytes))?;
        Some(capture.idle.swap_remove(at))
    }

    pub fn begin_capture(&self, context: &Context) -> Result<()> {
        let mut capture = self.lock();
        if capture.is_some() {
            bail!("rocm: capture: the device's stream is being captured already")
        }
        let mode = hipStreamCaptureMode::hipStreamCaptureModeThreadLocal;
        // SAFETY: the stream is alive.
        context.check(unsafe { context.enter()?.hipStreamBeginCapture(self.handle, mode) }, "")?;
        *capture = Some(Capture { thread: thread::current().id(), held: Vec::new(), idle: Vec::new() });
        self.capturing.store(true, Ordering::Release);
        Ok(())
    }

    /// Ends the capture: the graph, and the memory that it uses.
    pub fn end_capture(&self, context: &Context) -> (Result<hipGraph_t>, Vec<Arc<Block>>) {
        let mut guard = self.lock();
        let graph = end(context, self.handle);
        let capture = guard.take();
        self.capturing.store(false, Ordering::Release);
        drop(guard);
        let (held, idle) = capture.map(|capture| (capture.held, capture.idle)).unwrap_or_default();
        // Without the lock: blocks that the graph does not use go back to the pool here.
        drop(idle);
        (graph, held)
    }

    /// Waits for what is enqueued and destroys the stream.
    pub fn destroy(&mut self, context: &Context) {
        self.settle(context);
        // SAFETY: the stream is alive, and nothing uses it afterwards.
        let _ = unsafe { context.hip().hipStreamDestroy(self.handle) };
    }

    /// Waits for everything enqueued, for a destructor.
    pub fn settle(&self, context: &Context) {
        // SAFETY: the stream is alive.
        let _ = unsafe { context.hip().hipStreamSynchronize(self.handle) };
    }
}

/// The graph captured on a stream; not null.
fn end(context: &Context, stream: hipStream_t) -> Result<hipGraph_t> {
    let mut graph = null_mut();
    // SAFETY: the stream is alive; writes one handle.
    let result = context.check(unsafe { context.hip().hipStreamEndCapture(stream, &mut graph) }, "");
    if graph.is_null() {
        return result.and_then(|()| bail!("hipStreamEndCapture: gave no graph on {}", context.name));
    }
    if result.is_err() {
        destroy_graph(context, graph);
    }
    result.map(|()| graph)
}

/// Destroys a graph that nobody uses any more.
pub(super) fn destroy_graph(context: &Context, graph: hipGraph_t) {
    // SAFETY: from hipStreamEndCapture, used no more.
    let _ = unsafe { context.hip().hipGraphDestroy(graph) };
}
