"""FlashInfer's paged decode, as its users call it."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from unittest.mock import MagicMock

import torch

# FlashInfer imports these for kernels that are not used here.
UNUSED = ("cutlass", "cuda.tile", "nccl", "nccl_ext")
# What it does without where these are absent; over a stand-in it would fail.
ABSENT = ("flashinfer.fused_moe.cute_dsl", "flashinfer.cute_dsl.blockscaled_gemm")


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules without contents for packages that are not installed."""

    def find_spec(self, name, path=None, target=None):
        if name.startswith(ABSENT):
            raise ImportError(name)
        if any(name == package or name.startswith(package + ".") for package in UNUSED):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = MagicMock(name=spec.name)
        module.__name__, module.__spec__, module.__path__ = spec.name, spec, []
        return module

    def exec_module(self, module):
        pass


def _import():
    if importlib.util.find_spec("cutlass") is None:
        sys.meta_path.insert(0, _StandIns())
        find = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *rest: None if name == "cutlass" else find(name, *rest)
    import flashinfer

    return flashinfer


class Peers:
    def __init__(self):
        self.flashinfer = _import()
        self.version = self.flashinfer.__version__
        self.workspace, self.xqa_workspace = (torch.zeros(256 << 20, dtype=torch.uint8, device="cuda") for _ in range(2))

    def of(self, tensors):
        """Name, and what makes a function of the cache that writes `tensors.out`. Plans are made beforehand."""
        if tensors.query_len == 1:
            return [("tensor-core decode", lambda: self._decode(tensors)), ("XQA", lambda: self._xqa(tensors))]
        return [("FA2 prefill", lambda: self._prefill(tensors)), ("XQA", lambda: self._xqa(tensors))]

    def _decode(self, t):
        wrapper = self.flashinfer.BatchDecodeWithPagedKVCacheWrapper(self.workspace, "NHD", use_tensor_cores=True, backend="fa2")
        wrapper.plan(
            t.page_starts, t.page_ids, self._last_page(t), t.q_heads, t.kv_heads, t.head_dim, t.page_size,
            q_data_type=t.q.dtype, kv_data_type=t.dtype, sm_scale=t.softmax_scale,
        )
        return lambda cache: wrapper.run(t.q, cache, out=t.out)

    def _prefill(self, t):
        wrapper = self.flashinfer.BatchPrefillWithPagedKVCacheWrapper(self.workspace, "NHD", backend="fa2")
        rows = torch.arange(t.batch + 1, dtype=torch.int32, device="cuda") * t.query_len
        wrapper.plan(
            rows, t.page_starts, t.page_ids, self._last_page(t), t.q_heads, t.kv_heads, t.head_dim, t.page_size,
            causal=True, q_data_type=t.q.dtype, kv_data_type=t.dtype, sm_scale=t.softmax_scale,
        )
        return lambda cache: wrapper.run(t.q, cache, out=t.out)

    def _xqa(self, t):
        # Its semaphores are at the workspace's start and are zero between calls.
        self.xqa_workspace.zero_()
        width = max(t.page_counts)
        tables = t.block_tables[:, :width].clamp_min(0).contiguous()
        mask = None
        if t.query_len > 1:
            words = [[(2 << row) - 1, 0] for row in range(t.query_len)]
            mask = torch.tensor(words, dtype=torch.int16, device="cuda").view(torch.uint16).expand(t.batch, -1, -1).contiguous()
        return lambda cache: self.flashinfer.decode.trtllm_batch_decode_with_kv_cache(
            t.q, tuple(cache.unbind(1)), self.xqa_workspace, tables, t.context_lens, max(t.lengths), out=t.out,
            bmm1_scale=t.softmax_scale, bmm2_scale=1.0, kv_layout="NHD", backend="xqa", q_len_per_req=t.query_len, mask=mask,
        )

    def _last_page(self, t):
        return (t.context_lens - 1) % t.page_size + 1
