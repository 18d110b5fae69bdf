"""Writes the workloads as the lines that `bench file` and `bench compare` read; lengths are drawn as the workloads say (needs torch).

problems.py WORKLOADS.json OUT
"""

import json
import sys

FAMILIES = ("minimax20", "large16", "random24")


def lengths(w):
    if "context" in w:
        return [w["context"]] * w["batch"]
    import torch

    low, high = w["context_uniform"]
    generator = torch.Generator().manual_seed(w["seed"])
    return torch.randint(low, high + 1, (w["batch"],), generator=generator).tolist()


def main(workloads, out):
    with open(workloads) as f:
        families = json.load(f)
    with open(out, "w") as f:
        for family in FAMILIES:
            for w in families[family]:
                if w["kv"] != "mxfp4":
                    print(w["name"], int(w["kv"] == "fp8"), w["query_len"], 0, *lengths(w), file=f)


if __name__ == "__main__":
    main(*sys.argv[1:])
