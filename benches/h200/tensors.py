"""A workload's tensors, and what a call over them must give."""

import math

import torch


class Tensors:
    """Pages of every sequence lie in random order in each of several caches `[pages, 2, page_size, kv_heads, head_dim]`."""

    def __init__(self, workload, lengths):
        self.batch, self.query_len, self.q_heads, self.kv_heads, self.head_dim, self.page_size = (
            workload[key] for key in ("batch", "query_len", "num_q_heads", "num_kv_heads", "head_dim", "page_size")
        )
        self.lengths = lengths
        self.dtype = torch.bfloat16 if workload["kv"] == "bf16" else torch.float8_e4m3fn
        self.softmax_scale = 1 / math.sqrt(self.head_dim)
        self.page_counts = [-(-length // self.page_size) for length in lengths]
        self.pages = sum(self.page_counts)
        self.kv_bytes = sum(lengths) * self.kv_heads * self.head_dim * 2 * self.dtype.itemsize
        self.scale_bytes = sum(lengths) * self.kv_heads * 2 * 4

        self.page_ids = torch.randperm(self.pages, device="cuda").int()
        starts = [0]
        for count in self.page_counts:
            starts.append(starts[-1] + count)
        self.page_starts = torch.tensor(starts, dtype=torch.int32, device="cuda")
        self.block_tables = torch.full((self.batch, -(-workload["table_tokens"] // self.page_size)), -1, dtype=torch.int32, device="cuda")
        for row, (start, count) in enumerate(zip(starts, self.page_counts)):
            self.block_tables[row, :count] = self.page_ids[start : start + count]
        self.context_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        self.q = torch.randn(self.batch * self.query_len, self.q_heads, self.head_dim, device="cuda").bfloat16()
        self.out = torch.empty_like(self.q)

    def caches(self, count):
        shape = (self.pages, 2, self.page_size, self.kv_heads, self.head_dim)
        return [torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(self.dtype) for _ in range(count)]

    def scales(self):
        """Factors of K's and V's tokens."""
        shape = (self.pages, self.kv_heads, self.page_size)
        return [torch.empty(shape, device="cuda").uniform_(0.8, 1.25) for _ in range(2)]

    def relaid(self, cache, layout):
        """The cache's values in another layout: K, then V, in one piece."""
        if layout == "nhd":
            return cache
        k, v = (half.view(torch.uint8) if self.dtype.itemsize == 1 else half.view(torch.int16) for half in cache.unbind(1))
        pages, page_size, heads, head_dim = k.shape
        x = 16 // self.dtype.itemsize
        blocked_k = lambda: k.view(pages, page_size, heads, head_dim // x, x).permute(0, 2, 3, 1, 4)
        k, v = {
            "hnd": lambda: (k.transpose(1, 2), v.transpose(1, 2)),
            "vllm": lambda: (blocked_k(), v.permute(0, 2, 3, 1)),
            "shuffled": lambda: (blocked_k(), v.view(pages, page_size // x, x, heads, head_dim).permute(0, 3, 1, 4, 2)),
        }[layout]()
        return torch.cat([k.reshape(-1), v.reshape(-1)])

    def expect(self, cache):
        """Takes `cache` as the one whose results are compared."""
        self._cache, self._answers = cache, {}

    def _sequences(self):
        """The first sequence, the longest and the last."""
        longest = max(range(self.batch), key=self.lengths.__getitem__)
        return sorted({0, longest, self.batch - 1})

    def _answer(self, sequence, scales):
        """Float64 attention of one sequence: `[query_len, q_heads, head_dim]`."""
        length, start = self.lengths[sequence], int(self.page_starts[sequence])
        ids = self.page_ids[start : start + self.page_counts[sequence]].long()
        # Bytes: not every version of torch indexes FP8.
        kv = self._cache.view(torch.uint8)[ids].view(self.dtype).float()
        if scales:
            kv = kv * torch.stack([scale[ids].transpose(1, 2) for scale in scales], 1)[..., None]
        k, v = (half.flatten(0, 1)[:length].transpose(0, 1).double() for half in kv.unbind(1))
        rows = self.q[sequence * self.query_len : (sequence + 1) * self.query_len].double()
        q = rows.view(self.query_len, self.kv_heads, -1, self.head_dim).permute(1, 2, 0, 3)
        scores = q @ k.transpose(1, 2).unsqueeze(1) * self.softmax_scale
        tokens, last = torch.arange(length, device="cuda"), torch.arange(self.query_len, device="cuda") + length - self.query_len
        scores = scores.masked_fill(tokens > last[:, None], -math.inf)
        return (scores.softmax(-1) @ v.unsqueeze(1)).permute(2, 0, 1, 3).reshape(rows.shape)

    def error(self, scales=None):
        """Relative L2 of `out` from float64: the worst query row and head of a few sequences. NaN anywhere in `out` counts as infinite."""
        torch.cuda.synchronize()
        if not self.out.isfinite().all():
            return math.inf
        worst = 0.0
        for sequence in self._sequences():
            key = (sequence, scales is None)
            if key not in self._answers:
                self._answers[key] = self._answer(sequence, scales)
            answer = self._answers[key]
            out = self.out[sequence * self.query_len : (sequence + 1) * self.query_len].double()
            worst = max(worst, ((out - answer).norm(dim=-1) / answer.norm(dim=-1)).max().item())
        return float(f"{worst:.3g}")
