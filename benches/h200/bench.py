"""This crate beside FlashInfer on one NVIDIA GPU, in one process, on the shapes of ../workloads.json.

    cargo build --release --features cuda --example h200
    python3 benches/h200/bench.py --bridge target/release/examples/libh200.so --revision $(git rev-parse --short HEAD) --out docs/h200.json

Every figure is the median over rounds of a CUDA graph of at least ten calls, over KV caches in turn that together are far larger than the
L2 (which is swept before each replay where a graph's caches are not). In a round every contestant replays its graph once; rounds go through
the contestants forwards and backwards in turn. A ratio is the median of the rounds' own ratios. All contestants attend over the same values,
and what each one's graph leaves is compared with a float64 answer; a peer that is off by more than FP8 allows does not count.

Needs torch and FlashInfer (0.6.13 is what it was written against). Rows are printed as they come, and the file is rewritten after every row.
"""

import argparse
import datetime
import json
import pathlib
import statistics
import subprocess

import torch

import peers
from bridge import Bridge
from contest import Contest, race, ratio, spread
from tensors import Tensors

SHAPES = pathlib.Path(__file__).parent.parent / "workloads.json"
# Relative L2 from float64 that a peer's output may have: some quantize the query and the probabilities to E4M3.
MOST_ERROR = 0.08
# Shapes that are timed with small pages beside their own, alone.
SMALL_PAGE, PAGED = 16, ("decode-b4-q1-ctx32768", "decode-b3-q1-ctx225280", "decode-b32-q1-ctx8192")


def workloads(texts):
    """(family, workload, FAMILY/NAME) of the shapes that both sides have kernels for and whose path has one of `texts` in it."""
    with open(SHAPES) as file:
        families = json.load(file)
    for family, shapes in families.items():
        for w in shapes:
            path = f"{family}/{w['name']}"
            if w["kv"] != "mxfp4" and w["head_dim"] == 128 and any(text in path for text in texts):
                yield family, w, path


class Bench:
    def __init__(self, args):
        self.args, self.bridge, self.peers = args, Bridge(args.bridge), peers.Peers()
        self.rows, self.pages = [], []
        driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True)
        preferred = self.bridge.fp8_layout()
        self.facts = {
            "card": torch.cuda.get_device_name(),
            "driver": driver.stdout.split()[0] if driver.stdout else "unknown",
            "cuda": torch.version.cuda,
            "torch": torch.__version__,
            "flashinfer": self.peers.version,
            "date": datetime.date.today().isoformat(),
            "revision": args.revision,
            "rounds": args.rounds,
            "preferred_fp8_layout": preferred,
            "per_token_layout": args.per_token_layout or preferred,
            "read_tb_per_s": round(self.bridge.read_rate(), 4),
        }
        print(json.dumps(self.facts), flush=True)

    def run(self):
        for family, workload, path in workloads(self.args.only or [""]):
            self.shape(family, workload, path)
        for family, workload, path in workloads(self.args.hot):
            self.shape(family, workload, path, hot=True)
        if not self.args.only:
            for _, workload, path in workloads(PAGED):
                self.small_pages(workload, path)
        self.facts["read_tb_per_s"] = round(max(self.facts["read_tb_per_s"], self.bridge.read_rate()), 4)
        self.save()

    def shape(self, family, workload, path, hot=False):
        contest = Contest(self.bridge, path, self.tensors(workload, path), hot)
        contest.add_ours("ours")
        if family == "minimax20" and not hot:
            contest.add_ours("ours, planned in the call", plan_in_call=True)
        if workload["kv"] == "fp8":
            contest.add_ours("ours, per token", self.facts["per_token_layout"], scales=contest.tensors.scales())
        ours = list(contest.graphs)
        for name, make in self.peers.of(contest.tensors):
            contest.add_peer(name, make)
        us = race([contest], self.args.rounds)
        for name in ours:
            self.rows.append({"family": family, "name": workload["name"], "kind": name, "hot": hot, **row(workload, contest, ours, name, us)})
            self.print(self.rows[-1])
        self.save()

    def small_pages(self, workload, path):
        """The shape with its own page size and with small pages."""
        contests = []
        for page_size in (workload["page_size"], SMALL_PAGE):
            contests.append(Contest(self.bridge, path, self.tensors({**workload, "page_size": page_size}, path)))
            contests[-1].add_ours(page_size)
        us = race(contests, self.args.rounds)
        own, small = us
        times = {str(page_size): spread(times) for page_size, times in us.items()}
        self.pages.append({"name": workload["name"], "us": times, "ratio": ratio(us[small], us[own])})
        print(json.dumps(self.pages[-1]), flush=True)
        self.save()

    def tensors(self, workload, path):
        return Tensors(workload, self.bridge.contexts(path, workload["batch"]))

    def print(self, row):
        us, error = row["us"]["median"], row["error"]
        rate, kind = row["bytes"] / us / 1e6, row["kind"] + (", hot" if row["hot"] else "")
        best = f"{row['best']} {row['peers'][row['best']]['us']['median']:.2f} us {row['ratio']['median']:.3f}x" if row["best"] else "no peer"
        failed = "".join(f" FAILED {name}: {why}" for name, why in row["failed"].items())
        print(
            f"{row['name']:34} {kind:26} {us:8.2f} us {rate:6.3f} TB/s {rate / self.facts['read_tb_per_s']:6.1%} | {best} | "
            f"error {error:.1e} {row['kernel']} {row['tasks']} tasks{failed}",
            flush=True,
        )

    def save(self):
        facts = json.dumps(self.facts, indent=1).rstrip("\n}")
        named = {"pages": self.pages, "rows": self.rows}
        lists = [f' "{name}": [\n' + ",\n".join(json.dumps(row) for row in rows) + "\n]" for name, rows in named.items()]
        with open(self.args.out, "w") as file:
            file.write(",\n".join([facts, *lists]) + "\n}\n")


def row(workload, contest, ours, name, us):
    """What is kept of one of `ours`."""
    tensors, scales = contest.tensors, "per token" if name == "ours, per token" else "scalar" if workload["kv"] == "fp8" else "none"
    others = [other for other in contest.graphs if other not in ours]
    counted = [other for other in others if contest.errors[other] <= MOST_ERROR]
    best = min(counted, key=lambda other: statistics.median(us[other]), default=None)
    return {
        **{key: workload[key] for key in ("kv", "batch", "query_len", "page_size")},
        "scales": scales,
        "tokens": sum(tensors.lengths),
        "bytes": tensors.kv_bytes + (tensors.scale_bytes if scales == "per token" else 0),
        "calls": contest.calls,
        "caches": len(contest.caches),
        "layout": contest.graphs[name].layout,
        **contest.graphs[name].choice,
        "us": spread(us[name]),
        "error": contest.errors[name],
        "best": best,
        "ratio": best and ratio(us[best], us[name]),
        "peers": {other: {"us": spread(us[other]), "error": contest.errors[other], "ratio": ratio(us[other], us[name])} for other in others},
        "failed": contest.failed,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bridge", required=True, help="libh200.so")
    parser.add_argument("--out", required=True, help="the JSON file")
    parser.add_argument("--only", nargs="+", help="parts of FAMILY/NAME; default: all")
    parser.add_argument("--hot", nargs="*", default=[], help="parts of FAMILY/NAME to time on one cache as well")
    parser.add_argument("--per-token-layout", help="of FP8 caches with a factor a token; default: the one that the registry prefers")
    parser.add_argument("--revision", required=True, help="of this repository, for the record")
    parser.add_argument("--rounds", type=int, default=40)
    with torch.cuda.stream(torch.cuda.Stream()):
        Bench(parser.parse_args()).run()


if __name__ == "__main__":
    main()
