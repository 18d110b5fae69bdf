//! Graphs.

use std::ffi::{c_char, c_ulonglong};

use std::sync::Arc;

use crate::capture::{Graph, GraphExec};
use crate::error::{Code, Result};
use crate::guard::{call, put, release, wanted};
use crate::handles::Handle;
use crate::runtime::Runtime;

fn graph_of(runtime: &Runtime, graph: Handle) -> Result<Arc<Graph>> {
    runtime.graphs.get(graph).ok_or(Code::INVALID_VALUE)
}

fn instantiate(runtime: &Runtime, exec: *mut Handle, graph: Handle) -> Result {
    wanted(exec)?;
    let graph = graph_of(runtime, graph)?;
    runtime.devices[graph.device].counts.graph_execs.add(1);
    let made = |_| GraphExec { device: graph.device, nodes: graph.nodes.clone(), owned: graph.owned.clone() };
    // SAFETY: the caller's pointer.
    unsafe { put(exec, runtime.graph_execs.insert(made)) }
}

/// Makes a graph executable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipGraphInstantiate(exec: *mut Handle, graph: Handle, node: *mut Handle, _log: *mut c_char, _size: usize) -> Code {
    call("hipGraphInstantiate", |runtime| {
        if !node.is_null() {
            // SAFETY: the caller's pointer.
            unsafe { put(node, std::ptr::null_mut()) }?;
        }
        instantiate(runtime, exec, graph)
    })
}

/// Makes a graph executable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipGraphInstantiateWithFlags(exec: *mut Handle, graph: Handle, flags: c_ulonglong) -> Code {
    /// Free on launch, node priorities.
    const KNOWN: [c_ulonglong; 3] = [0, 1, 8];
    call("hipGraphInstantiateWithFlags", |runtime| {
        if !KNOWN.contains(&flags) {
            return Err(Code::INVALID_VALUE);
        }
        instantiate(runtime, exec, graph)
    })
}

/// Executes a graph in a stream's order; while the stream captures, the graph becomes part of the capture.
#[unsafe(no_mangle)]
pub extern "C" fn hipGraphLaunch(exec: Handle, stream: Handle) -> Code {
    call("hipGraphLaunch", |runtime| {
        let exec = runtime.graph_execs.get(exec).ok_or(Code::INVALID_VALUE)?;
        let stream = runtime.stream(stream)?;
        if stream.session().is_some() {
            return Err(Code::CAPTURE_UNSUPPORTED);
        }
        runtime.devices[stream.device].counts.graph_launches.add(1);
        exec.nodes.iter().try_for_each(|work| runtime.enqueue(&stream, work.clone(), true).map(|_| ()))
    })
}

/// Nodes of a graph: their number where `nodes` is null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipGraphGetNodes(graph: Handle, nodes: *mut Handle, count: *mut usize) -> Code {
    call("hipGraphGetNodes", |runtime| {
        wanted(count)?;
        let graph = graph_of(runtime, graph)?;
        if nodes.is_null() {
            // SAFETY: the caller's pointer.
            return unsafe { put(count, graph.nodes.len()) };
        }
        Err(Code::NOT_SUPPORTED)
    })
}

/// Destroys a graph.
#[unsafe(no_mangle)]
pub extern "C" fn hipGraphDestroy(graph: Handle) -> Code {
    release("hipGraphDestroy", |runtime| {
        let graph = runtime.graphs.remove(graph).ok_or(Code::INVALID_VALUE)?;
        runtime.devices[graph.device].counts.graphs.add(-1);
        if let Some(graph) = Arc::into_inner(graph) {
            runtime.release_owned(graph.owned);
        }
        Ok(())
    })
}

/// Destroys an executable graph once what was launched of it is done.
#[unsafe(no_mangle)]
pub extern "C" fn hipGraphExecDestroy(exec: Handle) -> Code {
    release("hipGraphExecDestroy", |runtime| {
        let exec = runtime.graph_execs.remove(exec).ok_or(Code::INVALID_VALUE)?;
        let device = &runtime.devices[exec.device];
        device.counts.graph_execs.add(-1);
        let finished = if exec.owned.is_empty() { Ok(()) } else { runtime.finish_device(device) };
        if let Some(exec) = Arc::into_inner(exec) {
            runtime.release_owned(exec.owned);
        }
        finished
    })
}
