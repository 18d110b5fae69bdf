"""Puts the bench beside another implementation timed on the same shapes.

  beside.py problems WORKLOADS.json OUT     writes what `bench file` reads; lengths are drawn as the workloads say (needs torch)
  beside.py join BENCH_OUTPUT PEERS.json    PEERS.json: {"rows": [{"family", "name", "peer", "us"}]}; prints both and geometric means
"""
import json
import math
import re
import sys

FAMILIES = ("minimax20", "large16", "random24")


def lengths(w):
    if "context" in w:
        return [w["context"]] * w["batch"]
    import torch

    low, high = w["context_uniform"]
    generator = torch.Generator().manual_seed(w["seed"])
    return torch.randint(low, high + 1, (w["batch"],), generator=generator).tolist()


def problems(workloads, out):
    with open(workloads) as f:
        families = json.load(f)
    with open(out, "w") as f:
        for family in FAMILIES:
            for w in families[family]:
                if w["kv"] != "mxfp4":
                    print(w["name"], int(w["kv"] == "fp8"), w["query_len"], 0, *lengths(w), file=f)


def mean(ratios):
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def join(bench, peers):
    best, family = {}, {}
    with open(peers) as f:
        for row in json.load(f)["rows"]:
            family[row["name"]] = row["family"]
            if row["name"] not in best or row["us"] < best[row["name"]][1]:
                best[row["name"]] = (row["peer"], row["us"])
    groups = {}
    with open(bench) as f:
        for line in f:
            m = re.match(r"(\S+)\s+(.*?)\s+c1\s+t\s*\d+\s+([\d.]+) us (\(\S+\))\s+([\d.]+) TB/s\s+([\d.]+)%", line)
            if not m or m[1] not in best:
                continue
            peer, peer_us = best[m[1]]
            ratio = peer_us / float(m[3])
            print(f"{m[1]:34} {m[2]:26} {m[3]:>8} us {m[4]} {m[5]} TB/s {m[6]}% | {peer} {peer_us} {ratio:.2f}x")
            kind = "fp8 per token" if "token" in m[2] else "fp8" if "fp8" in m[1] else "bf16"
            pool = "minimax20" if family[m[1]] == "minimax20" else "large16 + random24"
            work = "verify" if "-q4-" in m[1] else "decode"
            for key in ((pool, kind, work), (pool, kind, "all")):
                groups.setdefault(key, []).append(ratio)
    for key, ratios in sorted(groups.items()):
        print(*key, f"geometric mean {mean(ratios):.3f} least {min(ratios):.3f} of {len(ratios)}")


if __name__ == "__main__":
    {"problems": problems, "join": join}[sys.argv[1]](*sys.argv[2:])
