//! Stream capture, graphs and their replay.

mod support;

use std::ffi::c_void;
use std::ptr::null_mut;

use amdhip64::api::device::*;
use amdhip64::api::event::*;
use amdhip64::api::graph::*;
use amdhip64::api::memory::*;
use amdhip64::api::module::*;
use amdhip64::api::stream::*;
use support::*;

const GLOBAL: u32 = 0;
const THREAD_LOCAL: u32 = 1;
const RELAXED: u32 = 2;

fn end(stream: Handle) -> Result<Handle, Code> {
    let mut graph = null_mut();
    // SAFETY: a place for one handle.
    done(unsafe { hipStreamEndCapture(stream, &mut graph) }).map(|()| graph)
}

fn instantiate(graph: Handle) -> Handle {
    let mut exec = null_mut();
    // SAFETY: a place for one handle.
    ok(unsafe { hipGraphInstantiate(&mut exec, graph, null_mut(), null_mut(), 0) });
    exec
}

fn status(stream: Handle) -> u32 {
    let mut status = 9;
    // SAFETY: a place for one number.
    ok(unsafe { hipStreamIsCapturing(stream, &mut status) });
    status
}

struct Case {
    stream: Handle,
    module: Handle,
    add: Handle,
    buffers: [*mut c_void; 3],
}

impl Case {
    fn new() -> Self {
        let module = module(object("gfx942")).unwrap();
        let buffers = [(); 3].map(|()| malloc(1024).unwrap());
        Self { stream: stream().unwrap(), module, add: function(module, "add").unwrap(), buffers }
    }

    fn add(&self, stream: Handle, a: usize, b: usize, out: usize) -> Code {
        launch(self.add, 1, stream, &add_args(self.buffers[a], self.buffers[b], self.buffers[out], 256))
    }

    fn finish(self) {
        self.buffers.into_iter().for_each(|buffer| ok(hipFree(buffer)));
        ok(hipModuleUnload(self.module));
        ok(hipStreamDestroy(self.stream));
        assert_nothing_alive();
    }
}

#[test]
fn a_graph_replays_with_what_memory_holds_then() {
    require_clang!();
    for queued in ["0", "1"] {
        let _turn = machine(&[("ASYNC", queued)]);
        let case = Case::new();
        let [a, b, out] = case.buffers;
        ok(upload(a, &[1.0; 256], case.stream));
        ok(upload(b, &[2.0; 256], case.stream));
        ok(hipStreamSynchronize(case.stream));
        assert_eq!(status(case.stream), 0);
        ok(hipStreamBeginCapture(case.stream, GLOBAL));
        assert_eq!(status(case.stream), 1);
        ok(hipMemsetAsync(out, 0xff, 1024, case.stream));
        ok(case.add(case.stream, 0, 1, 2));
        // SAFETY: device memory.
        ok(unsafe { hipMemcpyAsync(b, out, 1024, 3, case.stream) });
        let graph = end(case.stream).unwrap();
        assert_eq!((status(case.stream), count("kernels"), count("launches"), count("memsets")), (0, 0, 0, 0));
        let exec = instantiate(graph);
        let mut nodes = 0;
        // SAFETY: a place for one number.
        ok(unsafe { hipGraphGetNodes(graph, null_mut(), &mut nodes) });
        assert_eq!(nodes, 3);
        ok(hipGraphDestroy(graph));
        ok(hipGraphLaunch(exec, case.stream));
        assert_eq!(download(out, 256, case.stream).unwrap(), vec![3.0; 256]);
        ok(upload(a, &[10.0; 256], case.stream));
        ok(hipGraphLaunch(exec, case.stream));
        assert_eq!(download(out, 256, case.stream).unwrap(), vec![13.0; 256]);
        assert_eq!((count("kernels"), count("launches"), count("graph_launches")), (2, 0, 2));
        ok(hipGraphExecDestroy(exec));
        assert_eq!(hipGraphLaunch(exec, case.stream), Code::INVALID_VALUE);
        case.finish();
    }
}

#[test]
fn what_may_not_be_captured_spoils_the_capture() {
    require_clang!();
    let _turn = machine(&[]);
    let case = Case::new();
    let mut host = [0.0f32; 4];
    let to = host.as_mut_ptr().cast::<c_void>();
    let [a, b, _] = case.buffers;
    let (stream, ready) = (case.stream, event().unwrap());
    type Call<'a> = (&'a str, Code, Box<dyn Fn() -> Code + 'a>);
    let calls: Vec<Call> = vec![
        ("malloc", Code::CAPTURE_UNSUPPORTED, Box::new(|| malloc(16).err().unwrap())),
        ("host malloc", Code::CAPTURE_UNSUPPORTED, Box::new(|| host_malloc(16).err().unwrap())),
        ("free", Code::CAPTURE_UNSUPPORTED, Box::new(|| hipFree(a))),
        ("stream synchronize", Code::CAPTURE_UNSUPPORTED, Box::new(|| hipStreamSynchronize(stream))),
        ("stream query", Code::CAPTURE_UNSUPPORTED, Box::new(|| hipStreamQuery(stream))),
        ("device synchronize", Code::CAPTURE_UNSUPPORTED, Box::new(|| hipDeviceSynchronize())),
        // SAFETY: memory that is alive.
        ("blocking copy", Code::CAPTURE_IMPLICIT, Box::new(|| unsafe { hipMemcpy(to, a, 16, 2) })),
        ("blocking fill", Code::CAPTURE_IMPLICIT, Box::new(|| hipMemset(a, 0, 16))),
        (
            "captured event",
            Code::CAPTURED_EVENT,
            Box::new(|| {
                ok(hipEventRecord(ready, stream));
                hipEventSynchronize(ready)
            }),
        ),
    ];
    for (what, code, call) in &calls {
        ok(hipStreamBeginCapture(stream, THREAD_LOCAL));
        ok(case.add(stream, 0, 0, 1));
        assert_eq!(call(), *code, "{what}");
        assert_eq!(status(stream), 2, "{what}");
        assert_eq!(case.add(stream, 0, 0, 1), Code::CAPTURE_INVALIDATED, "{what}");
        assert_eq!(end(stream), Err(Code::CAPTURE_INVALIDATED), "{what}");
        // The stream is usable at once.
        ok(upload(a, &[2.0; 256], stream));
        ok(case.add(stream, 0, 0, 1));
        assert_eq!(download(b, 1, stream).unwrap(), [4.0], "{what}");
    }
    drop(calls);
    // A relaxed capture minds none of those that are not about its own stream.
    ok(hipStreamBeginCapture(stream, RELAXED));
    let extra = malloc(16).unwrap();
    ok(hipFree(extra));
    let graph = end(stream).unwrap();
    ok(hipGraphDestroy(graph));
    ok(hipEventDestroy(ready));
    assert_eq!(host[0], 0.0);
    case.finish();
}

#[test]
fn captures_begin_and_end_where_they_may() {
    require_clang!();
    let _turn = machine(&[]);
    let case = Case::new();
    let stream = case.stream;
    assert_eq!(hipStreamBeginCapture(null_mut(), GLOBAL), Code::CAPTURE_UNSUPPORTED);
    assert_eq!(hipStreamBeginCapture(stream, 3), Code::INVALID_VALUE);
    assert_eq!(end(stream), Err(Code::ILLEGAL_STATE));
    ok(hipStreamBeginCapture(stream, THREAD_LOCAL));
    assert_eq!(hipStreamBeginCapture(stream, GLOBAL), Code::ILLEGAL_STATE);
    let handle = stream as usize;
    std::thread::scope(|scope| {
        scope.spawn(move || {
            // Another thread may allocate, and may not end the capture.
            ok(hipFree(malloc(16).unwrap()));
            assert_eq!(end(handle as Handle), Err(Code::CAPTURE_WRONG_THREAD));
        });
    });
    ok(hipGraphDestroy(end(stream).unwrap()));
    ok(hipStreamBeginCapture(stream, GLOBAL));
    std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!(malloc(16), Err(Code::CAPTURE_UNSUPPORTED)));
    });
    assert_eq!(end(stream), Err(Code::CAPTURE_INVALIDATED));
    case.finish();
}

#[test]
fn streams_join_a_capture_through_events() {
    require_clang!();
    let _turn = machine(&[]);
    let case = Case::new();
    let (origin, side) = (case.stream, stream().unwrap());
    let [forked, joined] = [(); 2].map(|()| event().unwrap());
    ok(upload(case.buffers[0], &[1.0; 256], origin));
    ok(hipStreamBeginCapture(origin, GLOBAL));
    ok(case.add(origin, 0, 0, 1));
    ok(hipEventRecord(forked, origin));
    ok(hipStreamWaitEvent(side, forked, 0));
    assert_eq!(status(side), 1);
    ok(case.add(side, 1, 1, 2));
    assert_eq!(end(side), Err(Code::CAPTURE_UNMATCHED));
    ok(hipEventRecord(joined, side));
    ok(hipStreamWaitEvent(origin, joined, 0));
    let graph = end(origin).unwrap();
    assert_eq!(status(side), 0);
    let exec = instantiate(graph);
    ok(hipGraphLaunch(exec, origin));
    assert_eq!(download(case.buffers[2], 256, origin).unwrap(), vec![4.0; 256]);
    // Work of the side stream that nothing waits for.
    ok(hipStreamBeginCapture(origin, GLOBAL));
    ok(hipEventRecord(forked, origin));
    ok(hipStreamWaitEvent(side, forked, 0));
    ok(case.add(side, 1, 1, 2));
    assert_eq!(end(origin), Err(Code::CAPTURE_UNJOINED));
    ok(hipGraphExecDestroy(exec));
    ok(hipGraphDestroy(graph));
    ok(hipEventDestroy(forked));
    ok(hipEventDestroy(joined));
    ok(hipStreamDestroy(side));
    case.finish();
}

#[test]
fn a_graph_keeps_its_own_memory_and_misses_that_of_others() {
    require_clang!();
    let _turn = machine(&[]);
    let case = Case::new();
    let [a, _, out] = case.buffers;
    ok(upload(a, &[3.0; 256], case.stream));
    ok(hipStreamBeginCapture(case.stream, GLOBAL));
    let mut own = null_mut();
    // SAFETY: a place for one pointer.
    ok(unsafe { hipMallocAsync(&mut own, 1024, case.stream) });
    ok(launch(case.add, 1, case.stream, &add_args(a, a, own, 256)));
    ok(launch(case.add, 1, case.stream, &add_args(own, a, out, 256)));
    ok(hipFreeAsync(own, case.stream));
    let graph = end(case.stream).unwrap();
    let exec = instantiate(graph);
    ok(hipGraphDestroy(graph));
    ok(hipGraphLaunch(exec, case.stream));
    assert_eq!(download(out, 256, case.stream).unwrap(), vec![9.0; 256]);
    assert_eq!(count("allocations"), 4);
    ok(hipGraphExecDestroy(exec));
    assert_eq!(count("allocations"), 3);
    // Memory freed after the capture: the replay is a fault.
    let gone = malloc(1024).unwrap();
    ok(hipStreamBeginCapture(case.stream, GLOBAL));
    // SAFETY: device memory.
    ok(unsafe { hipMemcpyAsync(gone, a, 1024, 3, case.stream) });
    let graph = end(case.stream).unwrap();
    let exec = instantiate(graph);
    ok(hipFree(gone));
    assert_eq!(hipGraphLaunch(exec, case.stream), Code::ILLEGAL_ADDRESS);
    assert_eq!(hipGraphExecDestroy(exec), Code::ILLEGAL_ADDRESS);
    assert_eq!(hipGraphDestroy(graph), Code::ILLEGAL_ADDRESS);
    assert_eq!((count("graphs"), count("graph_execs")), (0, 0));
}

#[test]
fn a_graph_whose_module_is_gone_is_a_fault() {
    require_clang!();
    let _turn = machine(&[]);
    let case = Case::new();
    ok(hipStreamBeginCapture(case.stream, GLOBAL));
    ok(case.add(case.stream, 0, 0, 1));
    let graph = end(case.stream).unwrap();
    let exec = instantiate(graph);
    ok(hipModuleUnload(case.module));
    assert_eq!(hipGraphLaunch(exec, case.stream), Code::LAUNCH_FAILURE);
}
