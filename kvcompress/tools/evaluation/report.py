"""Results of an evaluation: means, bootstrap intervals, CSV, JSON, plot."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...files import json_text
from .measure import BLOCK

_RESAMPLES = 1000


def bootstrap(
    values: Sequence[Any],
    statistic: Callable[[np.ndarray], np.ndarray] = np.asarray,
    weights: Sequence[float] | None = None,
) -> tuple[float, float]:
    """95% bootstrap interval of `statistic` of the mean of `values` (Efron 1979), numbers or several rows of numbers,
    resampled together. weights: of the mean; default: equal. NaN for fewer than two values."""
    x = np.asarray(values, dtype=np.float64)
    n = x.shape[-1]
    if n < 2:
        return math.nan, math.nan
    picks = np.random.default_rng(0).integers(0, n, (_RESAMPLES, n))
    w = np.ones(n) if weights is None else np.asarray(weights, dtype=np.float64)
    means = (x * w)[..., picks].sum(-1) / w[picks].sum(-1)
    low, high = np.quantile(statistic(means), (0.025, 0.975))
    return float(low), float(high)


def _number(x: Any, form: str = ".3g") -> str:
    missing = x is None or (isinstance(x, float) and math.isnan(x))
    return "-" if missing else format(x, form)


def with_interval(x: float | None, low: float | None, high: float | None) -> str:
    """A number with its interval, if there is one."""
    missing = low is None or math.isnan(low)
    return _number(x, ".1e") + ("" if missing else f" ({low:.0e}-{high:.0e})")


def grid(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A text table: the first column left-aligned, the others right-aligned."""
    rows = [list(head), *map(list, lines)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines_out = []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(others, widths[1:], strict=True))]
        lines_out.append("  ".join(cells).rstrip())
    return "\n".join(lines_out)


@dataclass
class Evaluation:
    """Result of `evaluate`. `rows`: one dict per strategy; `print` shows the table.

    Fields of a row, if measured: strategy; analysis_only: values rounded, but not compressed; kl, kl_low, kl_high: mean
    over tokens in nats with 95% interval (NaN, in JSON null, for a single block of tokens or sample); top1: share of
    equal most likely tokens; ppl; ppl_reference: without a cache; dppl_low, dppl_high: 95% interval of their
    difference; accept: acceptance rate of drafts, 0 to 1; accuracy_outside, accuracy_inside, tasks: {name: {outside,
    inside, low, high}}; bytes, bytes_per_token; ratio: bytes of the uncompressed cache / bytes; steady, peak: growth of
    the process in bytes; prefill, decode: in ms; decode_ratio: decode time / that of the uncompressed cache, measured
    together; tokens_per_second.
    """

    about: dict[str, Any]
    rows: list[dict[str, Any]]
    skipped: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_cells(
        cls,
        about: dict[str, Any],
        strategies: list[str],
        cells: Iterable[tuple[dict[str, Any], Any]],
        skipped: dict[str, str],
    ) -> Evaluation:
        by: dict[str, dict[str, list]] = {s: defaultdict(list) for s in strategies}
        for what, result in cells:
            by[what["strategy"]][what["kind"]].append((what, result))
        rows: list[dict[str, Any]] = []
        for strategy in strategies:
            row: dict[str, Any] = {"strategy": strategy, "analysis_only": strategy.startswith("fake:")}
            if by[strategy]["quality"]:
                row |= _quality(by[strategy]["quality"])
            if by[strategy]["task"]:
                row |= _tasks(by[strategy]["task"])
            for _, cost in by[strategy]["cost"]:
                row |= {name: cost[name] for name in ("steady", "peak", "prefill", "decode", "spread", "decode_ratio")}
                if strategy == "dynamic":  # the baseline, timed against itself
                    row["decode_ratio"] = 1.0
                row["bytes"] = cost["held"]
                row["bytes_per_token"] = cost["held"] / about["context"]
                row["tokens_per_second"] = 1e3 / cost["decode"]
                row["ratio"] = rows[0]["bytes"] / row["bytes"] if rows else 1.0
            rows.append(row)
        return cls(about, rows, skipped)

    def table(self) -> str:
        """The rows as a text table; columns without data are omitted."""
        columns = [
            ("strategy", lambda r: r["strategy"] + ("  (analysis only)" if r["analysis_only"] else "")),
            ("B/token", lambda r: _number(r.get("bytes_per_token"), ",.0f")),
            ("ratio", lambda r: _number(r.get("ratio"), ".2f")),
            ("KL (95%)", lambda r: with_interval(r["kl"], r["kl_low"], r["kl_high"]) if "kl" in r else "-"),
            ("top-1", lambda r: _number(r.get("top1"), ".3f")),
            ("PPL", lambda r: _number(r.get("ppl"), ".3f")),
            ("dPPL", lambda r: _number(r["ppl"] - r["ppl_reference"], "+.3f") if "ppl" in r else "-"),
            ("accept", lambda r: _number(r.get("accept"), ".4f")),
            ("tasks", lambda r: _number(r.get("accuracy_outside"), ".2f")),
            ("q. inside", lambda r: _number(r.get("accuracy_inside"), ".2f")),
            ("ms/token (80%)", lambda r: f"{r['decode']:.2f} ({r['spread'][0]:.2f}-{r['spread'][1]:.2f})"
                                         if "decode" in r else "-"),
            ("x time", lambda r: _number(r.get("decode_ratio"), ".2f")),
            ("prefill ms", lambda r: _number(r.get("prefill"), ".0f")),
            ("peak MB", lambda r: _number(r["peak"] / 1e6, ".1f") if r.get("peak") is not None else "-"),
        ]  # fmt: skip
        cells = [[show(row) for _, show in columns] for row in self.rows]
        used = [i for i in range(len(columns)) if any(line[i] != "-" for line in cells)]
        text = grid([columns[i][0] for i in used], [[line[i] for i in used] for line in cells])
        return "\n".join([text, *(f"left out: {name}: {why}" for name, why in self.skipped.items())])

    def task_table(self) -> str:
        """Accuracy by task, with the question outside / inside of the compressed context; "" without tasks."""
        rows = [row for row in self.rows if "tasks" in row]
        if not rows:
            return ""
        names = list(rows[0]["tasks"])
        lines = []
        for row in rows:
            found = row["tasks"]
            lines.append([row["strategy"], *(f"{found[n]['outside']:.2f} / {found[n]['inside']:.2f}" for n in names)])
        return grid(["accuracy (outside / inside)", *names], lines)

    def __str__(self) -> str:
        a = self.about
        head = (f"{a['model']}: {a['windows']} windows of {a['context']} tokens compressed + {a['scored']} scored "
                f"through the cache, {a['chunk']} a call")  # fmt: skip
        return "\n".join(x for x in (head, self.table(), self.task_table()) if x)

    def save(self, folder: str | Path) -> None:
        """Writes results.json, results.csv and, if matplotlib is installed, results.png to `folder`."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        whole = {"about": self.about, "rows": self.rows, "skipped": self.skipped}
        (folder / "results.json").write_text(json_text(whole))
        names = list(dict.fromkeys(k for row in self.rows for k, v in row.items() if not isinstance(v, (dict, list))))
        with (folder / "results.csv").open("w", newline="") as f:
            writer = csv.DictWriter(f, names, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(self.rows)
        try:
            from .picture import draw
        except ImportError:
            return
        draw(self.rows, str(self.about["model"]), folder / "results.png")


def _quality(cells: list[tuple[dict[str, Any], Any]]) -> dict[str, Any]:
    pooled = {name: [x for _, result in cells for x in result[name]] for name in cells[0][1]}
    tokens = [min(BLOCK, what["scored"] - at) for what, _ in cells for at in range(0, what["scored"], BLOCK)]
    mean = {name: float(np.average(x, weights=tokens)) for name, x in pooled.items()}
    low, high = bootstrap(pooled["kl"], weights=tokens)
    dppl_low, dppl_high = bootstrap(
        [pooled["nll"], pooled["nll_reference"]],
        statistic=lambda nll: np.exp(nll[0]) - np.exp(nll[1]),
        weights=tokens,
    )
    return {
        "kl": max(mean["kl"], 0.0),
        "kl_low": max(low, 0.0),
        "kl_high": max(high, 0.0),
        "top1": mean["agree"],
        "ppl": math.exp(mean["nll"]),
        "ppl_reference": math.exp(mean["nll_reference"]),
        "dppl_low": dppl_low,
        "dppl_high": dppl_high,
        "accept": mean["accept"],
    }


def _tasks(cells: list[tuple[dict[str, Any], Any]]) -> dict[str, Any]:
    right: dict[str, dict[str, list[float]]] = {}
    for what, result in cells:
        task = right.setdefault(what["task"], {"outside": [], "inside": []})
        for where in ("outside", "inside"):
            task[where].append(float(np.mean(result[where])))
    found = {}
    for name, x in right.items():
        low, high = bootstrap(x["outside"])
        found[name] = {"outside": float(np.mean(x["outside"])), "inside": float(np.mean(x["inside"])),
                       "low": low, "high": high}  # fmt: skip
    return {
        "tasks": found,
        "accuracy_outside": float(np.mean([x["outside"] for x in found.values()])),
        "accuracy_inside": float(np.mean([x["inside"] for x in found.values()])),
    }
