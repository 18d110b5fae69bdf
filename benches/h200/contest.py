"""Contestants over the same tensors, timed in turn."""

import math
import statistics

import torch

LEAST_CALLS, MOST_CALLS = 10, 64
# Bytes that the caches of a graph span, where MOST_CALLS of them do: several times the L2.
SPAN = 300_000_000
WARM_UP = 2


class Graph:
    """Calls of a function over each cache in turn."""

    def __init__(self, call, caches, calls):
        self.call = call  # whose tensors the graph reads
        for turn in range(min(3, len(caches))):
            call(caches[turn])
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for turn in range(calls):
                call(caches[turn % len(caches)])

    def launch(self):
        self.graph.replay()


class Contest:
    def __init__(self, bridge, path, tensors, hot=False):
        self.bridge, self.path, self.tensors = bridge, path, tensors
        count = 1 if hot else max(2, min(MOST_CALLS, math.ceil(SPAN / tensors.kv_bytes)))
        self.calls, self.caches = max(LEAST_CALLS, count), tensors.caches(count)
        self.is_swept = count * tensors.kv_bytes < SPAN and not hot
        tensors.expect(self.caches[(self.calls - 1) % count])
        self.graphs, self.errors, self.failed = {}, {}, {}

    def _add(self, name, graph, scales=None):
        self.tensors.out.fill_(math.nan)
        graph.launch()
        self.graphs[name], self.errors[name] = graph, self.tensors.error(scales)

    def add_ours(self, name, layout="nhd", plan_in_call=False, scales=None):
        """This crate; `scales`: factors of K's and V's tokens."""
        caches = [self.tensors.relaid(cache, layout) for cache in self.caches]
        torch.cuda.synchronize()
        self._add(name, self.bridge.capture(self.path, layout, plan_in_call, self.calls, self.tensors, caches, scales), scales)

    def add_peer(self, name, make):
        """What `make` gives is called with a cache. A peer may refuse a shape in any way."""
        try:
            self._add(name, Graph(make(), self.caches, self.calls))
        except Exception as error:
            self.failed[name] = str(error).replace("\n", " ")[:200]


def race(contests, rounds):
    """Microseconds a call of each contestant, by round. A round replays every graph once, forwards and backwards in turn."""
    runs = [(name, graph, contest) for contest in contests for name, graph in contest.graphs.items()]
    scratch = torch.zeros(SPAN // 4, device="cuda")
    events = {name: [] for name, _, _ in runs}
    for turn in range(WARM_UP + rounds):
        for name, graph, contest in runs[:: 1 if turn % 2 == 0 else -1]:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if contest.is_swept:
                scratch.sum()
            start.record()
            graph.launch()
            end.record()
            events[name].append((start, end, contest.calls))
    torch.cuda.synchronize()
    return {name: [start.elapsed_time(end) * 1e3 / calls for start, end, calls in runs[WARM_UP:]] for name, runs in events.items()}


def spread(values):
    """Median, and the quartiles beside it."""
    low, median, high = statistics.quantiles(values, n=4)
    return {"median": round(median, 4), "quartiles": [round(low, 4), round(high, 4)]}


def ratio(of, to):
    """Of the rounds' own ratios."""
    return spread([a / b for a, b in zip(of, to)])
