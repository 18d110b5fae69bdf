"""Achieved TB/s against batch and context, as an SVG."""

import math

WIDTH, HEIGHT, LEFT, RIGHT, TOP = 430, 300, 50, 36, 70
COLORS = {"bf16": "#1f6fb4", "fp8": "#d1661a", "token": "#3c8d40"}
NAMES = {"bf16": "BF16", "fp8": "FP8", "token": "FP8 per token"}


class Panel:
    """One diagram: TB/s over a logarithmic axis."""

    def __init__(self, title, axis, ticks, top, read):
        self.title, self.axis, self.ticks, self.top, self.read = title, axis, ticks, top, read

    def x(self, value):
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log2(value / self.ticks[0]) / math.log2(self.ticks[-1] / self.ticks[0])

    def y(self, rate):
        return HEIGHT - 40 - (HEIGHT - 70) * rate / self.top

    def frame(self):
        base = self.y(0)
        out = [f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="18" text-anchor="middle" font-weight="bold">{self.title}</text>']
        for rate in range(int(self.top) + 1):
            out.append(f'<path d="M{LEFT} {self.y(rate):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
            out.append(f'<text x="{LEFT - 8}" y="{self.y(rate) + 4:.1f}" text-anchor="end">{rate}</text>')
        for tick in self.ticks:
            out.append(f'<path d="M{self.x(tick):.1f} {base:.1f}v5" stroke="#444"/>')
            out.append(f'<text x="{self.x(tick):.1f}" y="{base + 18:.1f}" text-anchor="middle">{tick:,}</text>')
        out.append(f'<path d="M{LEFT} {base:.1f}H{WIDTH - RIGHT}" stroke="#444"/>')
        out.append(f'<path d="M{LEFT} {self.y(self.read):.1f}H{WIDTH - RIGHT}" stroke="#444" stroke-dasharray="2 3"/>')
        out.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{base + 34:.1f}" text-anchor="middle">{self.axis}</text>')
        return out

    def line(self, points, color, dashed):
        points = sorted(points)
        path = "L".join(f"{self.x(at):.1f} {self.y(rate):.1f}" for at, rate in points)
        dash = ' stroke-dasharray="6 4"' if dashed else ""
        out = [f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2"{dash}/>']
        if not dashed:
            out += [f'<circle cx="{self.x(at):.1f}" cy="{self.y(rate):.1f}" r="3" fill="{color}"/>' for at, rate in points]
        return out


def series(run, keep, of):
    """(ours, the best peer's) points by kind of cache: `of` the row, TB/s."""
    lines = {}
    for row in run["rows"]:
        kv = {"ours": row["kv"], "ours, per token": "token"}.get(row["kind"])
        if kv is None or row["hot"] or row["family"] not in ("minimax20", "large16") or not keep(row):
            continue
        ours, theirs = lines.setdefault(kv, ([], []))
        ours.append((of(row), row["bytes"] / row["us"]["median"] / 1e6))
        if kv != "token" and row["best"]:
            theirs.append((of(row), row["bytes"] / row["peers"][row["best"]]["us"]["median"] / 1e6))
    return lines


def draw(run):
    read, context = run["read_tb_per_s"], lambda row: row["tokens"] // row["batch"]
    top = math.ceil(read)
    by_batch = lambda query: lambda row: row["query_len"] == query and context(row) == 8192
    by_context = lambda query: lambda row: row["query_len"] == query and row["batch"] in (3, 4)
    panels = []
    for at, (query, what) in enumerate([(1, "Decode"), (4, "Verify, 4 new tokens")]):
        batches, contexts = [1, 4, 8, 32, 64, 128, 256] if query == 1 else [3, 16, 32], [8192, 32768, 225280]
        for column, (title, axis, ticks, keep, of) in enumerate([
            (f"{what}, context 8192", "sequences", batches, by_batch(query), lambda row: row["batch"]),
            (f"{what}, 3 or 4 sequences", "context", contexts, by_context(query), context),
        ]):
            panel = Panel(title, axis, ticks, top, read)
            body = panel.frame()
            for kv, (ours, theirs) in series(run, keep, of).items():
                body += panel.line(theirs, COLORS[kv], True) if theirs else []
                body += panel.line(ours, COLORS[kv], False)
            panels.append(f'<g transform="translate({column * WIDTH} {TOP + at * HEIGHT})">' + "".join(body) + "</g>")
    legend = "".join(
        f'<path d="M{LEFT + i * 130} 44h24" stroke="{COLORS[kv]}" stroke-width="2"/><text x="{LEFT + 30 + i * 130}" y="48">{NAMES[kv]}</text>'
        for i, kv in enumerate(COLORS)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * WIDTH}" height="{TOP + 2 * HEIGHT}" font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="{LEFT}" y="24" font-size="13">TB/s of K and V, {run["card"]}, {run["date"]}. Dashed: the best of FlashInfer {run["flashinfer"]}. '
        f"Dotted: a kernel that only reads.</text>{legend}{''.join(panels)}</svg>\n"
    )
