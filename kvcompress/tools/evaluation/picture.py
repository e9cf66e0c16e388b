"""Plot of an Evaluation: quality against bytes, time per token, accuracy by task. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

_COLOURS = ("#8a8a8a", "#1f6fb2", "#2a9d8f", "#d1622b", "#7b4fa3", "#b8901f", "#c0396b", "#4d6a2b", "#30323d")


def _pareto(axis: Any, rows: list[tuple[str, dict[str, Any]]]) -> None:
    """KL against bytes per token, both log scale; lower left is better."""
    for colour, row in rows:
        y = max(row["kl"], 1e-9)
        low, high = (y if row[name] is None else row[name] for name in ("kl_low", "kl_high"))
        error = [[max(0.0, y - max(low, 1e-9))], [max(0.0, high - y)]]
        hollow = {"markerfacecolor": "white"} if row["analysis_only"] else {}
        axis.errorbar(row["bytes_per_token"], y, error, fmt="o", color=colour, capsize=3, markersize=7, **hollow)
        axis.annotate(row["strategy"].replace("fake:", ""), (row["bytes_per_token"], y), fontsize=8,
                      textcoords="offset points", xytext=(7, 5))  # fmt: skip
    axis.set(xscale="log", yscale="log", xlabel="bytes per token (all counted)", ylabel="KL, nats")
    fake = any(row["analysis_only"] for _, row in rows)
    axis.set_title("quality against size" + (" (hollow: analysis only)" if fake else ""))
    axis.margins(0.2)


def _times(axis: Any, rows: list[tuple[str, dict[str, Any]]]) -> None:
    """Decode times with 10th and 90th percentile, relative to the uncompressed cache."""
    names = [row["strategy"] for _, row in rows]
    middle = [row["decode_ratio"] for _, row in rows]
    bars = axis.barh(names, middle, color=[colour for colour, _ in rows])
    axis.bar_label(bars, labels=[f"{row['decode']:.2f} ms" for _, row in rows], padding=3, fontsize=8)
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set(xlabel="decode time / uncompressed, side by side", xlim=(0, max(middle) * 1.25))
    axis.invert_yaxis()
    axis.set_title("time per token")


def _accuracies(axis: Any, rows: list[tuple[str, dict[str, Any]]]) -> None:
    """Accuracy by task, with the question outside of the compressed context."""
    names = list(rows[0][1]["tasks"])
    width = 0.8 / len(rows)
    for i, (colour, row) in enumerate(rows):
        at = [x - 0.4 + (i + 0.5) * width for x in range(len(names))]
        axis.bar(at, [row["tasks"][n]["outside"] for n in names], width, color=colour, label=row["strategy"])
    axis.set_xticks(range(len(names)), names, rotation=20)
    axis.set(ylim=(0, 1.05), ylabel="accuracy, question outside")
    axis.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axis.set_title("retrieval")


def draw(rows_of: list[dict[str, Any]], model: str, path: str | Path) -> None:
    """Saves the plot of an Evaluation (PNG, or by suffix of `path`). Panels without data are omitted."""
    rows = [(_COLOURS[i % len(_COLOURS)], row) for i, row in enumerate(rows_of)]
    panels = []
    if any("kl" in row and "bytes" in row for _, row in rows):
        panels.append((_pareto, [(c, r) for c, r in rows if "kl" in r and r["strategy"] != "dynamic"]))
    if any("decode" in row for _, row in rows):
        panels.append((_times, [(c, r) for c, r in rows if "decode" in r]))
    if any("tasks" in row for _, row in rows):
        panels.append((_accuracies, [(c, r) for c, r in rows if "tasks" in r]))
    panels = [(show, some) for show, some in panels if some]
    if not panels:
        return
    figure = Figure(figsize=(5.2 * len(panels), 0.9 + 3.4 + 0.08 * len(rows)), layout="constrained")
    for axis, (show, some) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        show(axis, some)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(model.rstrip("/").rsplit("/", 1)[-1], fontsize=10)
    figure.savefig(path, dpi=130)
