"""The H200's part of docs/benchmarks.md and its plot, from what bench.py wrote.

    python3 benches/h200/report.py docs/h200.json docs/benchmarks.md docs/h200.svg

With --check before them nothing is written: it fails where they are not what it would write.
"""

import itertools
import json
import math
import re
import sys

import plot

BEGIN, END = "<!-- benches/h200/report.py writes this part -->\n", "<!-- to here -->\n"
KINDS = {"bf16": "BF16", "fp8": "FP8", "token": "FP8 per token"}
MINIMAX, LARGE = ["minimax20"], ["large16", "random24"]


class Run:
    def __init__(self, run):
        self.facts, self.rows = run, run["rows"]
        self._by_key = {(row["family"], row["name"], row["kind"], row["hot"]): row for row in self.rows}

    def shapes(self, family):
        return [row for row in self.rows if row["family"] == family and row["kind"] == "ours" and not row["hot"]]

    def as_kind(self, row, kind):
        """The same shape's row of another kind."""
        return self._by_key.get((row["family"], row["name"], kind, row["hot"]))

    def of(self, families, kv, query=""):
        """Rows of a kind of cache in families; `query`: only "decode" or "verify"."""
        found = [row for family in families for row in self.shapes(family) if row["kv"] == ("bf16" if kv == "bf16" else "fp8")]
        found = [self.as_kind(row, "ours, per token" if kv == "token" else "ours") for row in found]
        return [row for row in found if row and query in ("", "verify" if row["query_len"] > 1 else "decode")]

    def one(self, family, name, kv):
        return next((row for row in self.of([family], kv) if re.sub("-(bf16|fp8)$", "", row["name"]) == name), None)

    def of_read(self, row):
        return rate(row) / self.facts["read_tb_per_s"]


def rate(row):
    """TB/s."""
    return row["bytes"] / row["us"]["median"] / 1e6


def mean(values):
    return math.exp(sum(map(math.log, values)) / len(values))


def us(timing):
    low, high = timing["quartiles"]
    return f"{timing['median']:.2f} ({low:.2f}-{high:.2f})"


def peers(row):
    """The best peer's time, then the others'."""
    others = sorted((name for name in row["peers"] if name != row["best"]), key=lambda name: row["peers"][name]["us"]["median"])
    named = [f"{row['best']} {us(row['peers'][row['best']]['us'])}"] if row["best"] else []
    return ", ".join([*named, *(f"{name} {row['peers'][name]['us']['median']:.2f}" for name in others)])


def family_table(run, family):
    lines = [
        "| shape | FlashInfer, us | us | TB/s | of read | ratio | per token, us | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in run.shapes(family):
        token = run.as_kind(row, "ours, per token")
        of_token = f"{us(token['us'])} | {token['ratio']['median']:.2f}" if token else "|"
        ours = f"{us(row['us'])} | {rate(row):.3f} | {run.of_read(row):.1%} | {row['ratio']['median']:.2f}"
        lines.append(f"| {row['name']} | {peers(row)} | {ours} | {of_token} |")
    return lines


def goals(run):
    """(what, the goals of BF16 and FP8, the value of a kind of cache or None, how it is shown, whether it is to be more or less)."""

    def ratios(families, query="", of=mean, peer=None):
        """One number of the shapes' ratios, to the best peer or to one."""

        def value(kv):
            to = [row["peers"][peer] if peer else row for row in run.of(families, kv, query) if not peer or peer in row["peers"]]
            found = [ratio["ratio"]["median"] for ratio in to if ratio["ratio"]]
            return of(found) if found else None

        return value

    def one(name, value, family="minimax20"):
        """A number of one shape."""

        def of(kv):
            row = run.one(family, name, kv)
            return value(row) if row else None

        return of

    def median(row):
        return row["us"]["median"]

    def speedup(row):
        return row["ratio"]["median"] if row["ratio"] else None

    return [
        ("minimax20, least ratio", (1, 1), ratios(MINIMAX, of=min), "{:.2f}", "more"),
        ("minimax20, geometric mean", (1.3, 1.8), ratios(MINIMAX), "{:.2f}", "more"),
        ("3 x 225,280, of read", (0.92, 0.85), one("decode-b3-q1-ctx225280", run.of_read), "{:.1%}", "more"),
        ("32 x 8192, of read", (0.85, None), one("decode-b32-q1-ctx8192", run.of_read), "{:.1%}", "more"),
        ("verify 8 x 32,768, of read", (0.80, 0.60), one("verify-b8-q4-ctx32768", run.of_read), "{:.1%}", "more"),
        ("1 x 8192, us", (6, 6), one("decode-b1-q1-ctx8192", median), "{:.2f}", "less"),
        ("verify 3 x 8192, us", (10, 10), one("verify-b3-q4-ctx8192", median), "{:.2f}", "less"),
        ("large16 and random24, decode, geometric mean", (1.08, 1.7), ratios(LARGE, "decode"), "{:.2f}", "more"),
        ("large16 and random24, verify, geometric mean", (1.4, 2.2), ratios(LARGE, "verify"), "{:.2f}", "more"),
        ("the same against FA2 prefill alone", (1.4, 2.2), ratios(LARGE, "verify", peer="FA2 prefill"), "{:.2f}", "more"),
        ("large16 and random24, least ratio", (0.97, 0.97), ratios(LARGE, of=min), "{:.2f}", "more"),
        *((f"review {name}", (1.3, 1.3), one(name, speedup, "review"), "{:.2f}", "more") for name in ("W6", "W5", "R1", "R2", "P1", "P2")),
    ]


def goal_table(run):
    lines = ["| | goal BF16 | reached | goal FP8 | per tensor | per token |", "|---|---|---|---|---|---|"]
    for what, goal, value, form, wanted in goals(run):
        cells = []
        for kv in KINDS:
            reached, least = value(kv), goal[kv != "bf16"]
            if reached is None:
                cells.append("")
            else:
                missed = least is not None and (reached < least if wanted == "more" else reached > least)
                cells.append(form.format(reached) + (" (missed)" if missed else ""))
        shown = [form.format(least) if least is not None and has else "" for least, has in zip(goal, (cells[0], cells[1]))]
        lines.append(f"| {what} | {shown[0]} | {cells[0]} | {shown[1]} | {cells[1]} | {cells[2]} |")
    return lines


def planned_in_call(run):
    """What it costs to plan on the device in every call."""
    pairs = [(row, run.as_kind(row, "ours, planned in the call")) for row in run.shapes("minimax20")]
    more = [planned["us"]["median"] - row["us"]["median"] for row, planned in pairs if planned]
    if not more:
        return []
    return [
        "As FlashInfer's (XQA needs none), the plan is made before the graph: an engine makes one a step, for all layers. Made on the device in "
        f"every call it adds {min(more):.1f} to {max(more):.1f} us on minimax20. Nothing in a graph writes tables, lengths or plan, and calls say so "
        "(`tables_settled`), but for those that plan on the device.",
        "",
    ]


def small_pages(run):
    if not run.facts["pages"]:
        return []
    shown = [f"{page['name']} {page['ratio']['median'] - 1:+.1%}" for page in run.facts["pages"]]
    return [f"Page 16 against page 128, time of a call: {', '.join(shown)}.", ""]


def hot(run):
    found = [row for row in run.rows if row["hot"]]
    if not found:
        return []
    lines = ["### One cache, which stays in the L2 as far as it fits", "", "| shape | | FlashInfer, us | us | ratio |", "|---|---|---|---|---|"]
    lines += [f"| {row['name']} | {row['kind']} | {peers(row)} | {us(row['us'])} | {row['ratio']['median']:.2f} |" for row in found]
    return [*lines, ""]


def about(run):
    facts = run.facts

    def worst(name, kv):
        """The largest error of a peer."""
        return max((row["peers"][name]["error"] for row in run.rows if row["kv"] == kv and name in row["peers"]), default=0)

    fa2 = max(worst(name, kv) for name in ("tensor-core decode", "FA2 prefill") for kv in ("bf16", "fp8"))
    preferred, layout = facts["preferred_fp8_layout"].capitalize(), facts["per_token_layout"].capitalize()
    chosen = "the layout that the registry prefers" if preferred == layout else f"not the layout that the registry prefers, {preferred}"
    return [
        f"Measured at revision {facts['revision']} on one {facts['card']}, driver {facts['driver']}, CUDA {facts['cuda']}, beside FlashInfer {facts['flashinfer']} (torch "
        f"{facts['torch']}), in one process and in turns, by `benches/h200/bench.py`, which says how. Calls read caches that are not in the L2. "
        f"Medians of {facts['rounds']} rounds, quartiles in parentheses; a ratio is the median of the rounds' ratios to the best peer, above 1 "
        "where this crate is faster. Kernels and plans are those that the registry and the planner choose. In this run a kernel that only reads "
        f"read {facts['read_tb_per_s']:.2f} TB/s: \"of read\" is of that.",
        "",
        "Caches are Nhd, in pages of 128 tokens but for the review's shapes. FP8 has one factor for the cache, as FlashInfer has it (`explain --shape` wants "
        "`--scales scalar` for these); in \"per token\" a factor a token, in "
        f"{layout} ({chosen}), against the same peer. Off the float64 answer (relative L2, worst of the rows looked at) this crate is at most "
        f"{max(row['error'] for row in run.rows):.1e}, FlashInfer's FA2 kernels {fa2:.1e}, its XQA {worst('XQA', 'bf16'):.1e} in BF16 and "
        f"{worst('XQA', 'fp8'):.1e} in FP8, where it quantizes the query and the probabilities too. Every figure: [h200.json](h200.json).",
        "",
    ]


def section(run):
    lines = [
        f"## NVIDIA H200, {run.facts['date']}",
        "",
        *about(run),
        "![Achieved TB/s against batch and context](h200.svg)",
        "",
        *planned_in_call(run),
        *small_pages(run),
        "### Against the goals",
        "",
        *goal_table(run),
        "",
    ]
    for family in ("minimax20", "large16", "random24", "review"):
        lines += [f"### {family}", "", *family_table(run, family), ""] if run.shapes(family) else []
    return "\n".join([*lines, *hot(run)])


def read(path):
    with open(path) as file:
        return file.read()


def put(path, text, check):
    if not check:
        with open(path, "w") as file:
            file.write(text)
    elif read(path) != text:
        pairs = itertools.zip_longest(read(path).splitlines(), text.splitlines())
        line = next((number for number, (has, made) in enumerate(pairs, 1) if has != made), "the last")
        sys.exit(f"{path}: not what benches/h200/report.py makes of the run, from line {line} on")


def main(run_path, document_path, plot_path, check=False):
    run, document = json.loads(read(run_path)), read(document_path)
    part = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.S)
    if not part.search(document):
        sys.exit(f"{document_path}: no part to write between {BEGIN.strip()} and {END.strip()}")
    put(document_path, part.sub(lambda _: BEGIN + "\n" + section(Run(run)) + END, document), check)
    put(plot_path, plot.draw(run), check)


if __name__ == "__main__":
    paths = [argument for argument in sys.argv[1:] if argument != "--check"]
    main(*paths, check="--check" in sys.argv)
