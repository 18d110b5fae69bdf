//! The runtime's state, and the way work takes into it.

use std::cell::Cell;
use std::sync::atomic::Ordering;
use std::sync::{Arc, LazyLock, Mutex, RwLock};

use crate::capture::{Graph, GraphExec, Mode, Session};
use crate::config::Config;
use crate::device::Device;
use crate::error::{Code, Result};
use crate::handles::{Handle, Table, lock};
use crate::memory::{Allocations, read, write};
use crate::module::{Function, Module};
use crate::stream::{Event, Stream};
use crate::work::Work;

/// Everything that is alive.
pub struct Runtime {
    /// The machine.
    pub config: Config,
    /// Its GPUs.
    pub devices: Vec<Device>,
    /// Memory.
    pub allocations: Allocations,
    /// Each device's null stream.
    pub null_streams: Vec<Arc<Stream>>,
    /// Streams.
    pub streams: Table<Stream>,
    /// Events.
    pub events: Table<Event>,
    /// Modules.
    pub modules: Table<Module>,
    /// Kernels that were asked for.
    pub functions: Table<Function>,
    /// Graphs.
    pub graphs: Table<Graph>,
    /// Instantiated graphs.
    pub graph_execs: Table<GraphExec>,
    /// Captures under way.
    pub sessions: Mutex<Vec<Arc<Session>>>,
}

static RUNTIME: LazyLock<RwLock<Arc<Runtime>>> = LazyLock::new(|| RwLock::new(Arc::new(Runtime::new())));

thread_local! {
    static CURRENT: Cell<usize> = const { Cell::new(0) };
    static MODE: Cell<Mode> = const { Cell::new(Mode::Global) };
}

/// The runtime of this process.
pub fn runtime() -> Arc<Runtime> {
    read(&RUNTIME).clone()
}

/// Starts over with what the environment says now; all handles and addresses become invalid.
pub fn reset() {
    *write(&RUNTIME) = Arc::new(Runtime::new());
    CURRENT.set(0);
}

/// The capture mode of this thread's unsafe calls, replaced.
pub fn exchange_mode(mode: Mode) -> Mode {
    MODE.replace(mode)
}

impl Runtime {
    fn new() -> Self {
        let config = Config::from_env();
        let devices: Vec<Device> = (0..config.devices.max(0) as usize).map(Device::new).collect();
        Self {
            null_streams: (0..devices.len()).map(|ordinal| Arc::new(Stream::new(0, ordinal, 0))).collect(),
            devices,
            config,
            allocations: Allocations::default(),
            streams: Table::default(),
            events: Table::default(),
            modules: Table::default(),
            functions: Table::default(),
            graphs: Table::default(),
            graph_execs: Table::default(),
            sessions: Mutex::default(),
        }
    }

    /// The thread's device.
    pub fn current(&self) -> Result<&Device> {
        self.devices.get(CURRENT.get()).or(self.devices.first()).ok_or(Code::NO_DEVICE)
    }

    /// Changes the thread's device.
    pub fn set_current(&self, ordinal: i32) -> Result {
        self.device(ordinal)?;
        CURRENT.set(ordinal as usize);
        Ok(())
    }

    /// A device by its number.
    pub fn device(&self, ordinal: i32) -> Result<&Device> {
        usize::try_from(ordinal).ok().and_then(|ordinal| self.devices.get(ordinal)).ok_or(Code::INVALID_DEVICE)
    }

    /// The stream of a handle. Null, `hipStreamLegacy` and `hipStreamPerThread` are the device's null stream.
    pub fn stream(&self, handle: Handle) -> Result<Arc<Stream>> {
        if handle as usize <= 2 {
            return Ok(self.null_streams[self.current()?.ordinal].clone());
        }
        self.streams.get(handle).ok_or(Code::CONTEXT_IS_DESTROYED)
    }

    /// Gives work to a stream: records it where the stream captures, queues or executes it otherwise. Whether it was recorded.
    pub fn submit(&self, stream: &Arc<Stream>, work: Work) -> Result<bool> {
        if let Some(session) = stream.session() {
            session.record(stream, work)?;
            return Ok(true);
        }
        self.forbid_null_stream_in_capture(stream)?;
        self.enqueue(stream, Arc::new(work), false)?;
        Ok(false)
    }

    /// Queues or executes work that is not to be recorded; the number of queued work.
    pub fn enqueue(&self, stream: &Arc<Stream>, work: Arc<Work>, in_graph: bool) -> Result<u64> {
        let device = &self.devices[stream.device];
        device.check()?;
        if self.config.queued {
            return Ok(device.queues.push(stream.id, &self.before(stream), work, in_graph));
        }
        let _order = lock(&stream.order);
        work.execute(device, &self.devices, &self.allocations, in_graph)?;
        Ok(0)
    }

    /// Streams whose work goes before a stream's next: the null stream and blocking streams wait for each other.
    fn before(&self, stream: &Stream) -> Vec<u64> {
        match stream.id {
            0 => self.blocking_streams(stream.device),
            _ if stream.is_blocking() => vec![0],
            _ => Vec::new(),
        }
    }

    fn blocking_streams(&self, device: usize) -> Vec<u64> {
        self.streams.all().iter().filter(|stream| stream.device == device && stream.is_blocking()).map(|stream| stream.id).collect()
    }

    /// Waits for a stream's work, up to `last` where given.
    pub fn finish(&self, stream: &Stream, last: Option<u64>) -> Result {
        let device = &self.devices[stream.device];
        device.check()?;
        drop(lock(&stream.order));
        if stream.id == 0 {
            for id in self.blocking_streams(stream.device) {
                device.queues.drain(&self.devices, device, &self.allocations, id, None)?;
            }
        }
        device.queues.drain(&self.devices, device, &self.allocations, stream.id, last)
    }

    /// Waits for all work of a device.
    pub fn finish_device(&self, device: &Device) -> Result {
        device.check()?;
        drop(write(&device.busy));
        device.queues.drain_all(&self.devices, device, &self.allocations)
    }

    /// Refuses a call that may not be made while this thread (or, in global mode, any) captures.
    pub fn forbid_in_capture(&self) -> Result {
        let sessions = lock(&self.sessions);
        let mode = MODE.get();
        let me = std::thread::current().id();
        let spoils = |session: &&Arc<Session>| match (mode, session.mode) {
            (Mode::Relaxed, _) | (_, Mode::Relaxed) => false,
            (Mode::Global, Mode::Global) => true,
            _ => session.thread == me,
        };
        let spoilt: Vec<_> = sessions.iter().filter(spoils).collect();
        spoilt.iter().for_each(|session| session.invalidate());
        if spoilt.is_empty() { Ok(()) } else { Err(Code::CAPTURE_UNSUPPORTED) }
    }

    /// Refuses a call that may not be made while anything captures, whatever the mode.
    pub fn forbid_in_any_capture(&self, code: Code) -> Result {
        let sessions = lock(&self.sessions);
        sessions.iter().for_each(|session| session.invalidate());
        if sessions.is_empty() { Ok(()) } else { Err(code) }
    }

    /// The null stream cannot be used while a stream that it waits for captures.
    fn forbid_null_stream_in_capture(&self, stream: &Stream) -> Result {
        if stream.id != 0 {
            return Ok(());
        }
        let sessions = lock(&self.sessions);
        let blocking = |session: &&Arc<Session>| lock(&session.streams).iter().any(|s| s.device == stream.device && s.is_blocking());
        let spoilt: Vec<_> = sessions.iter().filter(blocking).collect();
        spoilt.iter().for_each(|session| session.invalidate());
        if spoilt.is_empty() { Ok(()) } else { Err(Code::CAPTURE_IMPLICIT) }
    }

    /// Refuses a wait for a stream that captures, or that may not be made while another does.
    pub fn forbid_wait_in_capture(&self, stream: &Stream) -> Result {
        match stream.session() {
            Some(session) => {
                session.invalidate();
                Err(Code::CAPTURE_UNSUPPORTED)
            }
            None if stream.id == 0 => Ok(()),
            None => self.forbid_in_capture(),
        }
    }

    /// Forgets a capture; its streams are usual ones again.
    pub fn end_session(&self, session: &Arc<Session>) {
        lock(&self.sessions).retain(|other| !Arc::ptr_eq(other, session));
        for stream in lock(&session.streams).drain(..) {
            *lock(&stream.capture) = None;
        }
    }

    /// Frees the memory of graphs that nothing refers to any more.
    pub fn release_owned(&self, owned: crate::capture::Owned) {
        let Some(addresses) = Arc::into_inner(owned) else { return };
        for address in addresses {
            let _ = self.allocations.free(&self.devices, address, |_| true);
        }
    }

    /// Takes a module away.
    pub fn unload(&self, module: &Arc<Module>) {
        module.loaded.store(false, Ordering::Release);
        self.functions.retain(|function| !Arc::ptr_eq(&function.module, module));
    }
}
