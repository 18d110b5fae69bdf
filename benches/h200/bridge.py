"""The crate, through benches/h200/bridge.rs."""

import ctypes
import json
import os
import pathlib

import torch


def _load_cuda():
    """Loads the libraries that the bridge is linked to: torch has copies of them where the loader does not look."""
    copies = pathlib.Path(torch.__file__).parent.parent / "nvidia"
    for name in ("libcublasLt.so.13", "libcublas.so.13", "libcurand.so.10", "libnvrtc.so.13"):
        try:
            ctypes.CDLL(name)
        except OSError:
            for copy in copies.rglob(name):
                ctypes.CDLL(str(copy))


class _Buffers(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("q", "out", "block_tables", "context_lens", "k_scale", "v_scale")] + [
        ("caches", ctypes.POINTER(ctypes.c_uint64)),
        ("cache_count", ctypes.c_size_t),
        ("pages", ctypes.c_size_t),
        ("page_size", ctypes.c_size_t),
    ]


class Captured:
    """A graph of calls. What it reads lives as long as it."""

    def __init__(self, library, handle, layout, kept):
        self._library, self._handle, self.layout, self._kept = library, handle, layout, kept
        self.choice = json.loads(library.pa_bench_choice(handle))

    def launch(self):
        code = self._library.pa_bench_launch(self._handle, torch.cuda.current_stream().cuda_stream)
        if code != 0:
            raise RuntimeError(f"cuGraphLaunch: error {code}")

    def __del__(self):
        torch.cuda.synchronize()
        self._library.pa_bench_free(self._handle)


class Bridge:
    def __init__(self, path):
        torch.cuda.init()
        _load_cuda()
        library = ctypes.CDLL(os.path.abspath(path))
        text, handle = ctypes.c_char_p, ctypes.c_void_p
        for name, result, arguments in (
            ("error", text, []),
            ("contexts", ctypes.c_int, [text, ctypes.POINTER(ctypes.c_int32), ctypes.c_size_t]),
            ("fp8_layout", text, []),
            ("capture", handle, [text, text, ctypes.c_bool, ctypes.c_size_t, ctypes.POINTER(_Buffers)]),
            ("choice", text, [handle]),
            ("launch", ctypes.c_int, [handle, handle]),
            ("free", None, [handle]),
            ("read_rate", ctypes.c_double, []),
        ):
            function = getattr(library, "pa_bench_" + name)
            function.restype, function.argtypes = result, arguments
        self._library = library

    def _checked(self, result, failed):
        if failed:
            raise RuntimeError(self._library.pa_bench_error().decode())
        return result

    def contexts(self, path, batch):
        """Tokens of each sequence of FAMILY/NAME."""
        lengths = (ctypes.c_int32 * batch)()
        count = self._library.pa_bench_contexts(path.encode(), lengths, batch)
        self._checked(count, count < 0)
        assert count == batch
        return list(lengths)

    def fp8_layout(self):
        """The layout that the registry prefers for FP8 caches."""
        layout = self._library.pa_bench_fp8_layout()
        return self._checked(layout, layout is None).decode()

    def read_rate(self):
        """TB/s that a kernel reads which does nothing else."""
        rate = self._library.pa_bench_read_rate()
        return self._checked(rate, rate < 0) / 1e12

    def capture(self, path, layout, plan_in_call, calls, tensors, caches, scales):
        """Runs FAMILY/NAME over the first cache, then captures `calls` calls."""
        addresses = (ctypes.c_uint64 * len(caches))(*(cache.data_ptr() for cache in caches))
        k_scale, v_scale = (scale.data_ptr() for scale in scales) if scales else (0, 0)
        buffers = _Buffers(
            tensors.q.data_ptr(), tensors.out.data_ptr(), tensors.block_tables.data_ptr(), tensors.context_lens.data_ptr(),
            k_scale, v_scale, addresses, len(caches), tensors.pages, tensors.page_size,
        )
        handle = self._library.pa_bench_capture(path.encode(), layout.encode(), plan_in_call, calls, ctypes.byref(buffers))
        return Captured(self._library, self._checked(handle, handle is None), layout, (tensors, caches, scales))
