"""Plots: quality against bytes, budgets, latency, savings, roofline, the pages of a cache. Needs matplotlib (the extra
`plots`). Each function returns a matplotlib Figure, and saves it to `path` if given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

try:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch, Rectangle
except ImportError as error:  # the message says what to install
    raise ImportError("plot: expected matplotlib, which is not installed: pip install matplotlib") from error

from .. import formats
from ..store.display import COLOURS, PARTS, bits_of, colour_of, pages
from .plan import evidence
from .plan.models import read
from .plan.size import exact, shared_prefix
from .plan.units import read_tokens

_STYLE = {
    "H2O": "#d1622b",
    "sinks and window": "#2f7fc1",
    "random": "#8a8f98",
    "SnapKV": "#7b4fa3",
    "H2O on int8": "#c0396b",
}
_FORMATS = {"raw bf16": "#55595f", "raw": "#55595f", "int8": "#2f7fc1", "fp8_e4m3": "#7b4fa3", "int4": "#2a9d8f",
            "int2": "#e0902f", "sdpa bf16 folded": "#c0396b"}  # fmt: skip


def _figure(width: float, height: float, columns: int = 1) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, which="major")
        axis.set_axisbelow(True)
    return figure, axes


def _done(figure: Figure, path: str | Path | None) -> Figure:
    if path is not None:
        figure.savefig(path, dpi=130)
    return figure


_PLACES = [(7, -3), (7, 6), (7, -12), (-7, 6), (-7, -3), (-7, -12), (0, 10), (0, -17), (12, 17), (12, -23), (-12, 17),
           (-12, -23), (14, 28), (14, -34), (-14, 28), (-14, -34)]  # fmt: skip


def _label(figure: Figure, axis: Any, points: Sequence[tuple[str, float, float]]) -> None:
    """Names next to points, each where it covers neither a point nor another name."""
    figure.draw_without_rendering()
    scale = 72 / figure.dpi
    spots = [tuple(v * scale for v in axis.transData.transform((x, y))) for _, x, y in points]
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in spots]
    for (name, x, y), (px, py) in sorted(zip(points, spots, strict=True), key=lambda p: p[1]):
        width = 4.4 * len(name)

        def box(place: tuple[int, int], px: float = px, py: float = py, width: float = width) -> tuple[float, ...]:
            left = px + place[0] - (width if place[0] < 0 else 0 if place[0] else width / 2)
            return left, py + place[1], left + width, py + place[1] + 8

        def clash(place: tuple[int, int]) -> int:
            l, b, r, t = box(place)
            return sum(l < r2 and l2 < r and b < t2 and b2 < t for l2, b2, r2, t2 in taken)

        place = min(_PLACES, key=clash)
        taken.append(box(place))  # type: ignore[arg-type]
        side = "right" if place[0] < 0 else "left" if place[0] else "center"
        far = {"arrowprops": {"arrowstyle": "-", "linewidth": 0.5, "color": "#8a8f98"}} if abs(place[1]) > 13 else {}
        axis.annotate(name, (x, y), xytext=place, textcoords="offset points", fontsize=7.5, ha=side, va="bottom", **far)


def pareto(rows: Sequence[dict[str, Any]] | None = None, path: str | Path | None = None) -> Figure:
    """KL (nats per token) against bytes per context token, both log scale; the line is the Pareto frontier.

    rows: rows of an `Evaluation`, or points of `plan --measure`: dicts with strategy, kl and bytes_per_token or bytes.
    Default: results shipped with the package, for both models. Raises ValueError for rows without these values.
    """
    if rows is not None:
        found = [
            (r.get("strategy", ""), r.get("bytes_per_token") or r.get("bytes") or 0, r.get("kl") or 0)
            for r in rows
            if isinstance(r, dict)
        ]
        sets = {"": [p for p in found if p[0] != "dynamic" and p[1] and p[2]]}
        if not sets[""]:
            raise ValueError(
                "plot: pareto: expected rows with strategy, kl and bytes (run `eval` without --no-cost), got none"
            )
    else:
        sets = {"plain keys": [], "biased keys, as Qwen2's": []}
        for name, by_model in evidence.measured()["formats"].items():
            key, _, value = name.partition("/")
            codes = [formats.resolve(x, "bfloat16") for x in (key, value or key)]
            size = formats.page_bytes(codes[0], codes[1], 128) / 64
            for title, model in zip(sets, ("plain", "biased"), strict=True):
                sets[title].append((name, size, by_model[model]["kl"]))
    figure, axes = _figure(6.8 * len(sets), 5.2, len(sets))
    for axis, (title, points) in zip(axes, sets.items(), strict=True):
        points = sorted(points, key=lambda p: (p[1], p[2]))
        short = [name.split("+per_layer")[0] + ("+layers" if "+per_layer" in name else "") for name, _, _ in points]
        axis.set(xscale="log", yscale="log", title=title, ylabel="KL, nats a token",
                 xlabel="bytes a context token" + ("" if rows is not None else " and KV head of 128 dims"))  # fmt: skip
        best, line = float("inf"), list[tuple[float, float]]()
        for name, x, y in points:
            colour = COLOURS.get(int(bits_of(name)), "#7b4fa3") if _is_format(name) else "#2f7fc1"
            axis.plot(x, max(y, 1e-9), "o", color=colour, markersize=6)
            if y < best:
                best, line = y, [*line, (x, max(y, 1e-9))]
        axis.plot(*zip(*line, strict=True), color="#30323d", linewidth=1, alpha=0.6, zorder=1)
        axis.margins(0.15, 0.12)
        ticks = [t for t in (64, 80, 96, 128, 160, 192, 256) if points[0][1] * 0.9 <= t <= points[-1][1] * 1.1]
        if ticks:
            axis.set_xticks(ticks, [str(t) for t in ticks])
            axis.set_xticks([], minor=True)
        _label(figure, axis, [(name, x, max(y, 1e-9)) for name, (_, x, y) in zip(short, points, strict=True)])
    return _done(figure, path)


def _is_format(name: str) -> bool:
    return all(part in formats.NAMES for part in name.split("/"))


def budget(path: str | Path | None = None) -> Figure:
    """KL, and retrieval accuracy with questions asked after compression, against the share of tokens kept."""
    rows = [r for r in evidence.measured()["budgets"] if r["model"] == "books-tiny"]
    figure, (left, right) = _figure(11, 4.2, 2)
    for policy, colour in _STYLE.items():
        some = sorted((r for r in rows if r["policy"] == policy), key=lambda r: r["share"])
        if not some:
            continue
        x = [r["share"] for r in some]
        error = [[r["kl"] - r["kl_low"] for r in some], [r["kl_high"] - r["kl"] for r in some]]
        dash = {"linestyle": "--" if policy == "H2O on int8" else "-", "marker": "o"}
        if policy == "H2O on int8":
            dash["markerfacecolor"] = "white"
        left.errorbar(x, [r["kl"] for r in some], error, color=colour, markersize=5, capsize=2, label=policy, **dash)
        right.plot(x, [r["accuracy_outside"] for r in some], color=colour, markersize=5, label=policy, **dash)
    for axis in (left, right):
        axis.set(xlabel="% of the tokens kept", xlim=(0, 105))
    for name, colour in (("int8", COLOURS[8]), ("int4", COLOURS[4])):
        row = next(r for r in rows if r["strategy"] == name)
        left.plot(100, row["kl"], "s", color=colour, markersize=7, label=f"all tokens, {name}")
        right.plot(100, row["accuracy_outside"], "s", color=colour, markersize=7)
    left.set(yscale="log", ylabel="KL, nats a token (95%)", title="what the next tokens lose")
    right.set(ylim=(-0.02, 1.05), ylabel="accuracy", title="needles and recall, asked afterwards")
    left.legend(fontsize=8, frameon=False, loc="lower left")
    return _done(figure, path)


def latency(results: dict[str, Any] | None = None, path: str | Path | None = None) -> Figure:
    """Time of a decode step (ms) against context length, with fitted lines, and the length from which each format is
    faster than raw. results: from `kvcompress.tools.cli.bench`. Default: results shipped with the package. Raises
    ValueError for results of a single length."""
    from .regression import break_even, fit

    if results is None:
        cells = [c for c in evidence.measured()["decode"] if (c["G"], c["threads"], c["isa"]) == (4, 2, "avx512bf16")]
        cells = [c for c in {c["S"]: c for c in cells}.values() if c["S"] <= 32_768]
        series = {name: sorted((c["S"], c["ms"][name]) for c in cells if name in c["ms"]) for name in _FORMATS}
        title = "one layer, 32 query and 8 KV heads of 128; AVX-512, 2 threads, cold"
    else:
        names = dict.fromkeys(r["format"] for r in results["rows"])
        series = {n: sorted((r["tokens"], r["ms"]) for r in results["rows"] if r["format"] == n) for n in names}
        s, m = results["shape"], results["machine"]
        title = f"one layer, {s['query_heads']} query and {s['kv_heads']} KV heads of {s['dim']}"
        title += f"; {m['isa']}, {m['threads']} threads"
    series = {name: points for name, points in series.items() if len(points) > 1}
    if not series:
        raise ValueError("plot: latency: expected times at two lengths or more, got one; bench --lengths 1024 4096")
    figure, (axis,) = _figure(7.6, 4.6)
    base = next((name for name in series if name.startswith("raw")), next(iter(series)))
    for name, points in series.items():
        line, colour = fit(points), _FORMATS.get(name, "#2f7fc1")
        even = break_even(fit(series[base]), line)
        since = "" if even is None else f" from {'the start' if even < 64 else f'{even:,.0f}'}"
        said = f": {'' if since else 'never '}faster than {base}{since}" if name != base and "sdpa" not in name else ""
        axis.plot(*zip(*points, strict=True), "o", color=colour, markersize=5,
                  label=f"{name}, {1e6 * line[1]:.0f} ns a token{said}")  # fmt: skip
        ends = [points[0][0], points[-1][0]]
        axis.plot(ends, [max(line[0] + line[1] * x, 0) for x in ends], color=colour, linewidth=1.2)
    longest = max(points[-1][0] for points in series.values())
    step = next(s for s in (256, 1024, 4096, 8192, 32768) if longest / s <= 8 or s == 32768)
    ticks = range(0, longest + 1, step)
    axis.set_xticks(list(ticks), [f"{t // 1024}K" if t >= 1024 else str(t) for t in ticks])
    axis.set(xlabel="tokens in the cache", ylabel="ms a decode step", title=title, ylim=(0, None))
    axis.title.set_fontsize(10)
    axis.legend(fontsize=8, frameon=False)
    return _done(figure, path)


def savings(config: Any = "llama-3-70b", path: str | Path | None = None, context: str | int = "32k") -> Figure:
    """Bytes of one request by part, for each format, and with a shared prefix. config: a Plan, or the config for
    `plan`."""
    model, tokens = (config.model, config.context) if hasattr(config, "cells") else (read(config), read_tokens(context))
    names = ("raw", "int8", "int8/int4", "int4", "int2")
    found = {name: exact(model, name, tokens, prompt=max(1, tokens - 1)).parts for name in names}
    figure, (left, right) = _figure(12.5, 4.4, 2)
    raw = sum(found["raw"].values())
    unit, word = (1e9, "GB") if raw >= 1e9 else (1e6, "MB")

    def stack(axis: Any, at: int, parts: dict[str, int], scale: float) -> float:
        bottom = 0.0
        for part, colour in PARTS.items():
            axis.bar(at, parts[part] / scale, 0.64, bottom, color=colour)
            bottom += parts[part] / scale
        return bottom

    for i, name in enumerate(names):
        top = stack(left, i, found[name], unit)
        left.text(i, top, f"{top:.2f} {word}\n{raw / unit / top:.2f}x", ha="center", va="bottom", fontsize=8.5)
    once = shared_prefix(model, "int4", tokens, tokens // 2, 16)[0] / 16 / unit
    left.bar(len(names), once, 0.64, color=COLOURS[4])
    left.text(len(names), once, f"{once:.2f} {word}\n{raw / unit / once:.2f}x", ha="center", va="bottom", fontsize=8.5)
    left.set_xticks(range(len(names) + 1), [*names, "int4, half of it\na shared prefix"], fontsize=8.5)
    left.set(ylabel=f"{word} a request", title=f"{model.name}, {tokens:,} tokens (the last: one of 16 requests)",
             ylim=(0, 1.14 * raw / unit))  # fmt: skip
    lengths = [256, 1024, 4096, 16_384]
    for j, name in enumerate(("int8", "int4", "int2")):
        for i, n in enumerate(lengths):
            parts = exact(model, name, n, prompt=n - 1).parts
            at, whole = j * (len(lengths) + 1) + i, sum(exact(model, "raw", n, prompt=n - 1).parts.values())
            top = stack(right, at, parts, whole)
            right.text(at, top, f"{1 / top:.1f}x", ha="center", va="bottom", fontsize=8)
    ticks = [j * (len(lengths) + 1) + i for j in range(3) for i in range(len(lengths))]
    right.set_xticks(ticks, [f"{n:,}" for n in lengths] * 3, fontsize=7.5, rotation=40)
    for j, name in enumerate(("int8", "int4", "int2")):
        right.text(j * (len(lengths) + 1) + 1.5, 0.92, name, ha="center")
    right.set(ylim=(0, 1), ylabel="share of raw", xlabel="tokens", title="what short contexts pay: raw pages and sinks")
    every = [part for part in PARTS if part != "other" or any(parts["other"] for parts in found.values())]
    right.legend(handles=[Patch(color=PARTS[part], label=part) for part in every], fontsize=8, frameon=False,
                 loc="center right")  # fmt: skip
    return _done(figure, path)


def roofline(path: str | Path | None = None) -> Figure:
    """Roofline of the measured decode steps: arithmetic (GFLOP/s) against FLOP per byte, with the memory bandwidth
    measured at the same time."""
    measured = evidence.measured()
    cells = [c for c in measured["decode"] if c["S"] == 32_768 and c["threads"] == 2 and c["isa"] == "avx512bf16"]
    figure, (axis,) = _figure(7.6, 4.8)
    chunk = 4 * 32 * 128 * 512 * (4096 + 256) / min(measured["chunk"].values()) / 1e6
    read_ = max(c["read"] for c in cells)
    low, high = 2.0, 80.0
    knee = chunk / read_
    axis.plot([low, knee], [low * read_, chunk], color="#30323d", linewidth=1.4)
    axis.plot([knee, high], [chunk, chunk], color="#30323d", linewidth=1.4)
    axis.text(low * 1.05, low * read_ * 1.25, f"read: {read_:.0f} GB/s", rotation=30, fontsize=8.5)
    axis.text(high * 0.97, chunk * 1.04, f"best chunk of 512: {chunk:.0f} GFLOP/s", fontsize=8.5, ha="right")
    for cell, marker in zip(sorted(cells, key=lambda c: c["G"]), "os^", strict=False):
        for name in ("raw bf16", "int8", "fp8_e4m3", "int4", "int2"):
            flops = 4 * 8 * cell["G"] * 128 * cell["S"]
            x, y = flops / cell["MB"][name] / 1e6, flops / cell["ms"][name] / 1e6
            axis.plot(x, y, marker, color=_FORMATS[name], markersize=7)
    axis.set(xscale="log", yscale="log", xlim=(low, high), xlabel="FLOP a byte of the cache", ylabel="GFLOP/s",
             title="decode at 32K tokens: smaller pages move right, and up")  # fmt: skip
    for ax, ticks in ((axis.xaxis, (2, 4, 8, 16, 32, 64)), (axis.yaxis, (100, 200, 400, 800))):
        ax.set_ticks(ticks, [str(t) for t in ticks])
        ax.set_ticks([], minor=True)
    names = [
        Line2D([], [], marker="o", linestyle="", color=_FORMATS[n], label=n)
        for n in ("raw bf16", "int8", "fp8_e4m3", "int4", "int2")
    ]
    groups = [Line2D([], [], marker=m, linestyle="", color="#55595f", label=f"{c['G']} query heads a KV head")
              for c, m in zip(sorted(cells, key=lambda c: c["G"]), "os^", strict=False)]  # fmt: skip
    axis.legend(handles=[*names, *groups], fontsize=8, frameon=False, loc="lower right")
    return _done(figure, path)


def page_map(cache: Any, path: str | Path | None = None) -> Figure:
    """The pages of a KVCache or PagedKV: one row per layer (and sequence, and head if heads keep different tokens), one
    cell per page, coloured by format and filled by the number of tokens; red edges mark shared pages."""
    found = pages(cache)
    lines = list(dict.fromkeys((p["layer"], p["row"], p["head"]) for p in found))
    at = {line: i for i, line in enumerate(lines)}
    columns = max((p["column"] for p in found), default=0) + 1
    figure, (axis,) = _figure(min(14.0, 2.5 + 0.22 * columns), 1.4 + 0.2 * max(4, len(lines)))
    size = max((p["tokens"] for p in found), default=1)
    for p in found:
        y, edge = at[p["layer"], p["row"], p["head"]], "#c0396b" if p["shared"] else "none"
        full = 1.0 if p["kind"] == "sink" else min(1.0, p["tokens"] / size)
        axis.add_patch(
            Rectangle((p["column"] + 0.05, y + 0.1), 0.9, 0.8, facecolor="#eef0f2", edgecolor=edge, linewidth=1)
        )
        axis.add_patch(Rectangle((p["column"] + 0.05, y + 0.1), 0.9 * full, 0.8, facecolor=colour_of(p)))
    step = max(1, len(lines) // 24)
    batch = any(row for _, row, _ in lines)
    named = [
        f"layer {layer}" + (f", row {row}" if batch else "") + ("" if head is None else f", head {head}")
        for layer, row, head in lines[::step]
    ]
    axis.set_yticks([i + 0.5 for i in range(0, len(lines), step)], named, fontsize=8)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set(xlim=(0, columns), ylim=(max(1, len(lines)), 0), xlabel="page (the first column: sinks)")
    axis.grid(False)
    kinds = dict.fromkeys((p["kind"] if p["kind"] != "sealed" else p["format"], colour_of(p)) for p in found)
    handles = [Patch(color=colour, label=name) for name, colour in kinds]
    if any(p["shared"] for p in found):
        handles.append(Patch(facecolor="#eef0f2", edgecolor="#c0396b", label="shared"))
    if handles:
        figure.legend(handles=handles, fontsize=8, frameon=False, ncols=len(handles), loc="outside upper center")
    return _done(figure, path)


KINDS: dict[str, Callable[..., Figure]] = {
    "pareto": pareto, "budget": budget, "latency": latency, "savings": savings, "roofline": roofline,
}  # fmt: skip
"""Plots that need no cache, by name."""


def draw(
    kind: str, path: str | Path, *, results: Any = None, config: Any = "llama-3-70b", context: Any = "32k"
) -> Figure:
    """Draws the plot `kind` of `KINDS`. results: parsed JSON of `eval` (pareto) or `bench` (latency), or None.

    Raises ValueError for an unknown kind, or results of another command.
    """
    if kind not in KINDS:
        raise ValueError(f"plot: expected one of {', '.join(KINDS)}, got {kind!r}")
    if kind == "pareto":
        rows = results.get("rows") or results.get("points") if isinstance(results, dict) else results
        if results is not None and not isinstance(rows, list):
            raise ValueError("plot: pareto: expected results.json of `eval`, or *.report.json of `plan --measure`")
        return pareto(rows, path)
    if kind == "latency":
        if results is not None and not {"rows", "shape", "machine"} <= set(results):
            raise ValueError("plot: latency: expected the JSON of `kvcompress bench --out FILE`")
        return latency(results, path)
    if kind == "savings":
        return savings(config, path, context)
    return KINDS[kind](path)
