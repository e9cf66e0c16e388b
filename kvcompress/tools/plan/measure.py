"""plan --measure: a short search over per-layer formats and budgets, on your model and text. Needs torch.

Measures the error of each layer alone, applies the steps in order of error per saved byte, and measures whole
strategies on the way, as errors do not add up exactly. All results are measured, not extrapolated. After KVTuner (arXiv
2502.04420), which searches pairs of bits by layer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...files import json_text
from ...policies.registry import make
from ...quantization.mixed_precision import pair
from ..evaluation import evaluate
from ..evaluation.data import Text
from ..evaluation.report import grid, with_interval
from ..strategy import Strategy
from .choices import floor_of
from .models import Model, read
from .size import Recipe, exact

STEPS = ("int8", "int4", "int2")
"""Formats to try for each layer, in descending size."""
CALIBRATED_STEPS = ("int8", "int8/int4_lloyd", "int4_lloyd", "int4_lloyd/int3", "int3", "int3/cal2", "cal2")
"""The same with a calibration, V one step before K."""
_POINTS = 8


@dataclass
class Point:
    """A measured strategy. bytes: of one request at the planned context; kl: nats per token, with 95% interval; best:
    whether it is on the Pareto frontier."""

    strategy: str
    options: dict[str, Any]
    bytes: int
    kl: float
    kl_low: float
    kl_high: float
    top1: float
    best: bool = False


@dataclass
class Search:
    """Result of `search`: all points, smallest first; the chosen one; the error of each layer alone."""

    model: str
    context: int
    floor: float
    points: list[Point]
    chosen: Point | None
    layers: dict[int, dict[str, float]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {
            "model": self.model, "context": self.context, "floor": self.floor, "layers": self.layers,
            "points": [vars(p) for p in self.points], "chosen": self.chosen.strategy if self.chosen else None,
        }  # fmt: skip

    def __str__(self) -> str:
        lines = [
            [("* " if p.best else "  ") + p.strategy, f"{p.bytes:,}", with_interval(p.kl, p.kl_low, p.kl_high),
             f"{p.top1:.3f}"] for p in self.points
        ]  # fmt: skip
        found = (
            self.chosen.strategy if self.chosen else "nothing: every point is above the floor; raise it, or use int8"
        )
        return "\n".join([
            f"{self.model}: bytes of a request of {self.context:,} tokens against KL; * nothing is smaller and closer",
            grid(["strategy", "bytes", "KL (95%)", "top-1"], lines),
            f"chosen for KL <= {self.floor:.0e}: {found}",
        ])  # fmt: skip

    def save(self, path: str | Path) -> None:
        """Writes options for `KVCache.from_dict` to `path`, and all points to *.report.json next to it. Raises
        ValueError if nothing was chosen."""
        if self.chosen is None:
            raise ValueError(
                f"plan: expected a strategy with a KL of at most {self.floor:.0e}, got none; raise --quality"
            )
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.chosen.options, indent=1) + "\n")
        path.with_suffix(".report.json").write_text(json_text(self.to_dict()) + "\n")


def _strategy(
    layers: Sequence[int], formats: Sequence[str], calibration: str | None = None, budget: str = ""
) -> tuple[str, dict[str, Any]]:
    """(strategy string, arguments of KVCache) from a format or pair for each paged layer, and a budget for H2O."""
    most = max(dict.fromkeys(formats), key=list(formats).count)
    own = {layer: name for layer, name in zip(layers, formats, strict=True) if name != most}
    options = dict[str, Any](zip(("key", "value"), pair(most, "plan"), strict=True))
    if calibration:
        options["calibration"] = calibration
    if own:
        options["per_layer"] = {str(layer): name for layer, name in own.items()}
    if budget:
        options["policy"] = make("h2o", budget, 4, 0).to_dict()
    terms = {"calibration": calibration, "per_layer": own or None, "h2o": budget or None}
    return str(Strategy({"head": most, **terms})), options


def _formats_of(options: dict[str, Any], layers: Sequence[int]) -> list[str]:
    """The formats in the options from `_strategy`."""
    most = "/".join(dict.fromkeys((options["key"], options["value"])))
    return [options.get("per_layer", {}).get(str(layer), most) for layer in layers]


def _bytes(shape: Model, context: int, options: dict[str, Any], budget: str) -> int:
    own = {int(i): pair(name, "plan") for i, name in options.get("per_layer", {}).items()}
    kept = context * int(budget.rstrip("%")) // 100 if budget else 0
    recipe = Recipe(
        options["key"], options["value"], per_layer=own, budget=kept, scores=bool(budget), ragged=bool(budget)
    )
    return exact(shape, recipe, context, prompt=context - 1).bytes


def _moves(
    shape: Model, alone: dict[int, dict[str, float]], context: int, steps: Sequence[str]
) -> list[tuple[int, str]]:
    """(layer, format) in order of KL per saved byte, with the steps of each layer in order."""
    size = {name: exact(shape, Recipe(*pair(name, "plan")), context, prompt=context - 1).bytes for name in steps}
    ranked: list[tuple[float, int, str]] = []
    for layer, cost in alone.items():
        before = price = 0.0
        for high, low in pairwise(steps):  # keeps the order of steps
            price = max(price, (cost[low] - before) / max(1, size[high] - size[low]))
            ranked.append((price, layer, low))
            before = cost[low]
    return [(layer, name) for _, layer, name in sorted(ranked, key=lambda r: (r[0], steps.index(r[2]), r[1]))]


def _path(layers: list[int], moves: list[tuple[int, str]], first: str, calibration: str | None) -> list[Any]:
    """Some of the strategies along `moves`, starting with `first`."""
    formats, path = [first] * len(layers), []
    every = max(1, len(moves) // _POINTS)
    for i, (layer, name) in enumerate(moves, 1):
        formats[layers.index(layer)] = name
        if i % every == 0:
            path.append(_strategy(layers, formats, calibration))
    return path


def _points(
    shape: Model, context: int, rows: dict[str, dict[str, Any]], candidates: dict[str, tuple[dict[str, Any], str]]
) -> list[Point]:
    """Points by size; `best` marks the Pareto frontier."""
    points = [
        Point(t, options, _bytes(shape, context, options, budget),
              *(rows[t][x] for x in ("kl", "kl_low", "kl_high", "top1")))
        for t, (options, budget) in candidates.items()
    ]  # fmt: skip
    points.sort(key=lambda p: (p.bytes, p.kl))
    least = float("inf")
    for p in points:
        p.best, least = p.kl < least, min(least, p.kl)
    return points


def search(
    model: Any, text: Text, *, context: int = 4096, quality: str | float = "high", budgets: Sequence[str] = ("50%",),
    tokenizer: Any = None, out: str | Path | None = None, progress: bool = True,
    calibration: str | Path | None = None, steps: Sequence[str] = (), **settings: Any,
) -> Search:  # fmt: skip
    """Searches per-layer formats and budgets with the fewest bytes that meet a quality floor.

    Args:
        model, text, tokenizer, out, progress: as in `evaluate`; with `out` an interrupted run is resumed.
        context: tokens per request, for sizes in bytes.
        quality: maximum KL, see `choices.floor_of`.
        budgets: shares of tokens for H2O to keep, tried with the chosen formats.
        calibration: calibration file of the model, used by all strategies.
        steps: formats or K/V pairs to try for each layer, the largest first. Default: STEPS, or CALIBRATED_STEPS with
            a calibration.
        settings: of `evaluate`: context of a window as `window`, scored, windows, chunk, seed.

    Returns a `Search`. Raises ValueError for a model without full-attention layers, and as `evaluate`.
    """
    from ..evaluation.suite import load_model

    limit, file = floor_of(quality), None if calibration is None else str(calibration)
    steps = tuple(steps) or (CALIBRATED_STEPS if file else STEPS)
    model, tokenizer = load_model(model, tokenizer)
    shape = read(model)
    layers = [i for i, layer in enumerate(shape.layers) if layer.kind == "full_attention"]
    if not layers:
        raise ValueError(f"plan: expected a model with full-attention layers, got {shape.name}")
    how = {"context": settings.pop("window", 1024), "scored": 128, "windows": 2, **settings}
    rows: dict[str, dict[str, Any]] = {}

    def measure(texts: Sequence[str]) -> None:
        todo = [t for t in dict.fromkeys(texts) if t not in rows]
        if todo:
            found = evaluate(model, text, todo, tokenizer=tokenizer, out=out, progress=progress, cost=False, **how)
            rows.update({row["strategy"]: row for row in found.rows})

    uniform = [_strategy(layers, [name] * len(layers), file) for name in steps]
    single = {
        (layer, name): _strategy(layers, [name if x == layer else steps[0] for x in layers], file)
        for layer in layers for name in steps[1:]
    } if len(layers) > 1 else {}  # fmt: skip
    measure([t for t, _ in uniform] + [t for t, _ in single.values()])
    base = rows[uniform[0][0]]["kl"]
    alone = {layer: {name: rows[single[layer, name][0]]["kl"] - base for name in steps[1:]} for layer in layers} \
        if single else {}  # fmt: skip
    candidates: dict[str, tuple[dict[str, Any], str]] = {t: (o, "") for t, o in [*uniform, *single.values()]}
    path = _path(layers, _moves(shape, alone, context, steps), steps[0], file)
    measure([t for t, _ in path])
    candidates |= {t: (o, "") for t, o in path}
    fits = [t for t in candidates if rows[t]["kl"] <= limit]
    for name in sorted(fits, key=lambda t: _bytes(shape, context, *candidates[t]))[:1]:
        of = _formats_of(candidates[name][0], layers)
        evicting = {b: _strategy(layers, of, file, b) for b in budgets}
        measure([t for t, _ in evicting.values()])
        candidates |= {t: (o, b) for b, (t, o) in evicting.items()}
    points = _points(shape, context, rows, candidates)
    chosen = next((p for p in points if p.kl <= limit), None)
    return Search(shape.name, context, limit, points, chosen, alone)
