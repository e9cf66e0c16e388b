"""Rounding error of calibrated rows, weighted by the metric of their use, with codes rounded to nearest or with error
feedback, by the scaling of the axes; as a fraction of a rotated row's error without calibration. In torch, as
int4_lloyd and int3 encode rows; prints a table.

    python benchmarks/feedback.py [--model NAME] [--layers 0 2 4] [--pages 6] [--gain keep | fit | step]

Axes are scaled by deviation^-s (`kvcompress.quantization.calibration`); calibrated as in few_bits.py, measured on a
book. --gain: of rows with feedback; "keep" is the stored one, "fit" least squares in the metric, "step" none."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from few_bits import ROOT, STEPS, known_of, levels, row_coded
from torch import Tensor

from kvcompress.hf.calibrate import measured, second_moments
from kvcompress.quantization.calibration import feedback
from kvcompress.tools.evaluation.data import load_ids, vocabulary
from kvcompress.tools.evaluation.published import hadamard, nearest
from kvcompress.tools.evaluation.suite import load_model

SHARES = (0.5, 0.625, 0.75, 1.0)


def fed_back(z: Tensor, costs: Tensor, bits: int, gain: str) -> Tensor:
    """Rotated rows z [H, N, D], as `append` with feedback encodes them."""
    D, rms = z.shape[-1], z.square().mean(-1, keepdim=True).sqrt()
    fits = []
    for step in STEPS["3 steps"]:
        code = nearest(z / (step * rms), levels(bits))
        fits.append((z * code).sum(-1).square() / code.square().sum(-1))
    step = torch.tensor(STEPS["3 steps"])[torch.stack(fits).argmax(0)][..., None] * rms
    weights = feedback(costs, D)
    code, error = torch.zeros_like(z), torch.zeros_like(z)
    for d in range(D - 1, -1, -1):
        target = z[..., d : d + 1] + error @ weights[:, d, :, None]
        code[..., d : d + 1] = nearest(target / step, levels(bits))
        error[..., d] = z[..., d] - (code[..., d : d + 1] * step)[..., 0]
    if gain == "step":
        return code * step
    lower = (weights[:, :D] + torch.eye(D)).mT
    row, own = ((x @ lower) for x in (z, code))
    length, along, squares = ((a * b * weights[:, None, D]).sum(-1, keepdim=True)
                              for a, b in ((row, row), (row, own), (own, own)))  # fmt: skip
    return code * (along / squares if gain == "fit" else torch.minimum(length / along, 1.125 * along / squares))


def costs_of(x: Tensor, known: dict[str, Any], metric: Tensor, bits: int, gain: str) -> dict[str, Tensor]:
    """The error in `metric` of each variant for rows x [H, N, D], [H]."""
    D, found = x.shape[2], {}

    def cost(near: Tensor) -> Tensor:
        return ((near - x) @ metric * (near - x)).sum((1, 2))

    turn = hadamard(D)
    found["no map"] = cost(row_coded(x @ turn, [(D, bits)], STEPS["3 steps"]) @ turn)
    for share in SHARES:
        scale = (known["deviation"] ** (share - 0.5))[:, None]
        z, back = x @ (known["map"] / scale) @ turn, turn @ (scale.mT * known["back"])
        found[f"nearest, {share:g}"] = cost(row_coded(z, [(D, bits)], STEPS["3 steps"]) @ back)
        found[f"fed back, {share:g}"] = cost(fed_back(z, known["deviation"] ** (2 * share), bits, gain) @ back)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="books-tiny")
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 2, 4])
    parser.add_argument("--pages", type=int, default=6)
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 3, 2])
    parser.add_argument("--gain", choices=("keep", "fit", "step"), default="keep")
    args = parser.parse_args()
    model, tokenizer = load_model(ROOT / "assets" / args.model, None)

    def grab(found: dict[str, Any], module: Any, q: Tensor, k: Tensor, v: Tensor) -> None:
        second_moments(found, module, q, k, v)
        found["rows"] = [x[0, :, 4 : 4 + 64 * args.pages].clone() for x in (k, v)]

    ids = load_ids(ROOT / "assets/text/book.txt", tokenizer, vocabulary(model))[:2048]
    seen, known = measured(model, ids, grab, context=2048, tokens=2048), known_of(model, tokenizer)
    for side, bits in ((side, bits) for side in (0, 1) for bits in args.bits):
        shares: dict[str, list[Tensor]] = {}
        for i in args.layers:
            x, metric = seen[i]["rows"][side], seen[i]["o" if side else "q"].float()
            if side == 0:
                pages = x.unflatten(1, (-1, 64))
                x = (pages - pages.mean(2, keepdim=True)).flatten(1, 2)
            found = costs_of(x, known[i][side], metric, bits, args.gain)
            for name, cost in found.items():
                shares.setdefault(name, []).append(cost / found["no map"])
        print("KV"[side], bits, *(f"{name}: {torch.stack(x).mean():.3f};" for name, x in shares.items()), flush=True)


if __name__ == "__main__":
    main()
