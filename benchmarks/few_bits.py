"""Alternatives for 3 and 4 bits of K and V, compared with the formats: KL on texts that were not used for calibration.
Values are rounded only, nothing is compressed. Writes benchmarks/results/few_bits.json, where rows that were run
replace earlier ones; then: make docs

    python benchmarks/few_bits.py [--windows N] [--bits 4 3] [--ways WAY ..] [--models NAME ..] [--outliers 0 8]

Rows as int4_lloyd and int3 encode them ("3 steps"), and with: the best of nine steps; V minus its page's mean, or minus
a mean of the head from a calibration, which is added once to the output; in calibrated coordinates; and there with bit
widths per group of 16 axes from 0, 2, 4, 8, per group of 8 axes from the same, and of any number of bits, chosen for
the lowest error in the metric of their use."""

from __future__ import annotations

import argparse
import itertools
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel, logging

from kvcompress import formats
from kvcompress.hf.calibrate import calibrate, measured
from kvcompress.quantization.calibration import Calibration
from kvcompress.tools.evaluation import inject_outliers, measure
from kvcompress.tools.evaluation.data import as_batch, bos_of, load_ids, vocabulary, window_starts
from kvcompress.tools.evaluation.fake import FakeQuantLayer
from kvcompress.tools.evaluation.published import Rounding, hadamard, nearest
from kvcompress.tools.evaluation.suite import load_model
from kvcompress.tools.strategy import Strategy

ROOT = Path(__file__).parents[1]
MODELS, OUTLIERS = ("books-tiny", "books-tiny-bias"), (0, 8)
TEXTS = {"wikitext2": "wikitext2-test.txt", "book": "book.txt"}
CALIBRATION = ("wikitext2-valid.txt", "story.txt")
CONTEXT, SCORED, PAGE = 2048, 128, 64
LLOYD = torch.tensor([6, 18, 31, 44, 58, 75, 96, 127]) / 47.0
# Max 1960, table II: the optimum for a Gaussian
STEP = (0, 1.596, 0.9957, 0.586, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308)
ERROR = (1, 0.3634, 0.1188, 0.0374, 0.01154, 0.00349, 0.00104, 0.000304, 0.000088)
STEPS = {"3 steps": (1, 0.875, 1.125), "9 steps": tuple(0.8 + 0.05 * i for i in range(9))}
GROUPS = {"16 axes of 0, 2, 4, 8": (16, (0, 2, 4, 8)), "8 axes of 0, 2, 4, 8": (8, (0, 2, 4, 8)),
          "16 axes of single bits": (16, range(9))}  # fmt: skip
WAYS = ("int4", "format", *STEPS, "V less its page's mean", "V less the head's mean", "calibrated", *GROUPS)


def levels(bits: int) -> Tensor:
    """Levels for a row of rms 1."""
    if bits == 4:
        return torch.cat([-LLOYD.flip(0), LLOYD])
    return (torch.arange(2**bits) - (2**bits - 1) / 2) * STEP[bits]


def row_coded(z: Tensor, widths: list[tuple[int, int]], steps: tuple[float, ...]) -> Tensor:
    """Rows z rounded to levels of different widths [(axes, bits)], in units of their rms times the best of `steps`.
    The gain, fp16, preserves a row's projection onto itself, or with several widths is the least-squares fit, since
    one factor cannot suit all."""
    rms = z.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-20)
    found, best = torch.zeros_like(z), torch.full_like(rms, -1.0)
    for step in steps:
        parts = z.split([n for n, _ in widths], -1)
        code = torch.cat([nearest(x / (step * rms), levels(b)) if b else torch.zeros_like(x)
                          for x, (_, b) in zip(parts, widths, strict=True)], -1)  # fmt: skip
        score = (z * code).sum(-1, keepdim=True).square() / code.square().sum(-1, keepdim=True).clamp_min(1e-20)
        found, best = torch.where(score > best, code, found), torch.maximum(best, score)
    along, squares = (z * found).sum(-1, keepdim=True), found.square().sum(-1, keepdim=True).clamp_min(1e-20)
    gain = along / squares
    if len(widths) == 1:
        gain = torch.minimum(z.square().sum(-1, keepdim=True) / along.clamp_min(1e-20), 1.125 * gain)
    return found * gain.half().float()


def chosen(cost: Tensor, bits: int, allowed: Any) -> list[int]:
    """The widths of groups of equal size, `bits` on average, with the lowest error; cost: of each group, descending."""
    best = min((sum(float(c) * ERROR[b] for c, b in zip(cost, x, strict=True)), x)
               for x in itertools.combinations_with_replacement(sorted(allowed, reverse=True), len(cost))
               if sum(x) == bits * len(cost))  # fmt: skip
    return list(best[1])


def rounding(bits: int, way: str, key: bool, known: dict[str, Any]) -> Rounding:
    """One side of a layer. known: its calibration matrix, deviations and mean, [H, ..]."""
    steps = STEPS.get(way, STEPS["3 steps"])

    def centre_of(x: Tensor) -> Tensor:
        if key or way == "V less its page's mean":
            return (
                x.unflatten(2, (-1, PAGE))
                .mean(3, keepdim=True)
                .half()
                .float()
                .expand(-1, -1, -1, PAGE, -1)
                .flatten(2, 3)
            )
        return known["mean"][None, :, None] if way == "V less the head's mean" else torch.zeros(())

    def rounded(x: Tensor) -> tuple[Tensor, float]:
        D, mean = x.shape[3], 16 / PAGE if key or way == "V less its page's mean" else 0
        if way == "calibrated":
            x = x @ known["map"]
        centre = centre_of(x)
        if way not in GROUPS:
            near = row_coded((x - centre) @ hadamard(D), [(D, bits)], steps) @ hadamard(D) + centre
            return (near @ known["back"] if way == "calibrated" else near), bits + 16 / D + mean
        size, allowed = GROUPS[way]
        turn, out = torch.block_diag(*[hadamard(size)] * (D // size)), []
        for h in range(x.shape[1]):
            d = known["deviation"][h]
            to = known["map"][h] / d.sqrt() @ turn
            widths = [(size, b) for b in chosen(d.square().view(-1, size).mean(1), bits, allowed)]
            z = x[:, h] @ to - (centre[:, h] @ to if key else 0)
            out.append(row_coded(z, widths, steps) @ torch.linalg.inv(to) + (centre[:, h] if key else 0))
        return torch.stack(out, 1), bits + 16 / D + mean

    return rounded


def known_of(model: PreTrainedModel, tokenizer: Any) -> list[list[dict[str, Any]]]:
    """For each layer, what a calibration on other texts gives for K and V."""
    ids = [load_ids(ROOT / "assets/text" / file, tokenizer, vocabulary(model)) for file in CALIBRATION]
    maps: Calibration = calibrate(model, ids, tokens=sum(map(len, ids)))

    def mean(found: dict[str, Any], module: Any, q: Tensor, k: Tensor, v: Tensor) -> None:
        found["v"] = found.get("v", 0) + v.sum((0, 2)).double()
        found["n"] = found.get("n", 0) + v.shape[0] * v.shape[2]

    means = measured(model, ids, mean, tokens=sum(map(len, ids)))
    return [[{"map": maps.layers[i][side], "back": torch.linalg.inv(maps.layers[i][side]),
              "deviation": maps.deviations[i][side], "mean": (means[i]["v"] / means[i]["n"]).float()}
             for side in (0, 1)] for i in sorted(maps.layers)]  # fmt: skip


def windows_of(model: PreTrainedModel, tokenizer: Any, count: int) -> list[tuple[str, Tensor, Any]]:
    """(text, tokens, logits without rounding)."""
    found = []
    for label, file in TEXTS.items():
        ids, bos = load_ids(ROOT / "assets/text" / file, tokenizer, vocabulary(model)), bos_of(model, tokenizer)
        for start in window_starts(len(ids), CONTEXT + SCORED, count, 0):
            window = as_batch(bos + ids[start : start + CONTEXT + SCORED], model.device)
            found.append((label, window, measure.reference_logits(model, window[:, :-1], SCORED)))
    return found


def one_model(name: str, outliers: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    model, tokenizer = load_model(ROOT / "assets" / name, None)
    if outliers:
        inject_outliers(model, scale=float(outliers))
    known, windows, made = known_of(model, tokenizer), windows_of(model, tokenizer, args.windows), []

    def cache_of(model: PreTrainedModel, _: Strategy, way: str, bits: int) -> Cache:
        layers = [(rounding(bits, way, True, k), rounding(bits, way, False, v)) for k, v in known]
        return Cache(layers=[FakeQuantLayer(pair, 4, PAGE, None) for pair in layers])

    for bits, way in itertools.product(args.bits, args.ways):
        kl: dict[str, list[float]] = {label: [] for label in TEXTS}
        what = {4: "int4_lloyd", 3: "int3"}[bits] if way == "format" else way if way in formats.CODES else "dynamic"
        how = {} if what != "dynamic" else {"open_it": partial(cache_of, way=way, bits=bits)}
        for label, window, logits in windows:
            kl[label] += measure.quality(model, Strategy(what), window, SCORED, logits, **how)["kl"]
        row = {"model": name, "outliers": outliers, "bits": bits, "way": way, "windows": args.windows}
        made.append(row | {label: sum(x) / len(x) for label, x in kl.items()})
        print(json.dumps(made[-1]), flush=True)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 3])
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--outliers", type=int, nargs="+", default=OUTLIERS)
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    target, keys = ROOT / "benchmarks" / "results" / "few_bits.json", ("model", "outliers", "bits", "way")
    for name, n in itertools.product(args.models, args.outliers):
        new = one_model(name, n, args)
        old = json.loads(target.read_text())["rows"] if target.exists() else []
        kept = [row for row in old if all(any(row[k] != x[k] for k in keys) for x in new)]
        rows = sorted(kept + new, key=lambda x: (x["model"], x["outliers"], -x["bits"], WAYS.index(x["way"])))
        target.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
