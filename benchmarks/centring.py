"""Which mean to subtract from the keys before they are rotated and rounded: KL of four variants, at 4 and at 2 bits.

    python benchmarks/centring.py [--windows N] [--context N]

Only K is rounded (V stays raw), and values only: nothing is compressed. page: the mean key of each page of 64, as in
the formats int4 and int2; head: the mean of a head's first 256 keys, kept from then on; prerope: a mean before RoPE
(k_proj.bias if there is one, otherwise the mean of the first 256), rotated to each token's position; none: no centring.
The formats themselves are measured, too: `page` must equal them."""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path

import torch
from transformers import Cache, PreTrainedModel

from kvcompress.tools.evaluation import inject_outliers, measure
from kvcompress.tools.evaluation.data import as_batch, bos_of, load_ids, window_starts
from kvcompress.tools.evaluation.fake import FakeQuantLayer, rounding_of
from kvcompress.tools.evaluation.suite import load_model
from kvcompress.tools.strategy import Strategy

ROOT = Path(__file__).parents[1]
STEP = {4: 0.33, 2: 1.0}
OVERHEAD = {"none": 0.0, "page": 16 / 64, "head": 0.0, "prerope": 0.0}  # bits per element of K, in addition to the gain
WAYS = tuple(OVERHEAD)


def hadamard(n: int) -> torch.Tensor:
    h = torch.ones(1, 1)
    while len(h) < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h / n**0.5


def rounded(y: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows rotated, rounded to a uniform grid of step c * rms with a least-squares gain, and rotated back."""
    h, half = hadamard(y.shape[-1]), 2 ** (bits - 1)
    z = y @ h
    rms = z.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-20)
    code = (z / (STEP[bits] * rms)).floor().clamp(-half, half - 1) + 0.5
    gain = (z * code).sum(-1, keepdim=True) / code.square().sum(-1, keepdim=True)
    return (gain.half().float() * code) @ h


class Layer(FakeQuantLayer):
    """Rounds the keys of full pages."""

    def __init__(self, model: PreTrainedModel, index: int, way: str, bits: int) -> None:
        super().__init__((rounding_of("int4@token", True),) * 2, 4, 64, None)
        self.model, self.index, self.way, self.bits = model, index, way, bits
        self.mean: torch.Tensor | None = None

    def _turned(self, x: torch.Tensor, first: int, sign: float) -> torch.Tensor:
        """x [B, H, T, D] rotated by RoPE to positions first .. (sign 1) or back (-1)."""
        positions = torch.arange(first, first + x.shape[2])[None]
        cos, sin = self.model.model.rotary_emb(x, positions)
        a, b = x.chunk(2, -1)
        return x * cos + sign * torch.cat([-b, a], -1) * sin

    def _centre(self, page: torch.Tensor, first: int) -> torch.Tensor:
        if self.way == "none":
            return torch.zeros(())
        if self.way == "page":
            return page.mean(2, keepdim=True).half().float()
        if self.mean is None:
            known, bias = self.keys[:, :, :256], None
            if self.way == "prerope":
                bias = self.model.model.layers[self.index].self_attn.k_proj.bias
                known = self._turned(known, 0, -1)
            self.mean = known.mean(2, keepdim=True) if bias is None else bias.view(1, known.shape[1], 1, -1)
        return self.mean if self.way == "head" else self._turned(self.mean.expand_as(page), first, 1)

    def _round_old(self) -> None:
        n = self.keys.shape[2]
        end = self.sinks + max(0, n - self.sinks) // self.page_size * self.page_size
        for first in range(self.rounded, end, self.page_size):
            page = self.keys[:, :, first : first + self.page_size]
            centre = self._centre(page, first)
            page.copy_(centre + rounded(page - centre, self.bits))
        self.rounded = max(self.rounded, end)


def cache_of(model: PreTrainedModel, _: Strategy, way: str, bits: int) -> Cache:
    return Cache(layers=[Layer(model, i, way, bits) for i in range(model.config.num_hidden_layers)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--context", type=int, default=2048)
    args = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    scored = 128
    print(f"KL in nats a token, K alone rounded, {args.windows} windows of WikiText-2 test and a book each")
    print(f"{'model':28s} {'bits':>4s} " + " ".join(f"{w:>9s}" for w in (*WAYS, "format")) + "   (bits + overhead)")
    for name, outliers in (("books-tiny", 0), ("books-tiny-bias", 0), ("books-tiny", 8), ("books-tiny-bias", 8)):
        model, tokenizer = load_model(ROOT / "assets" / name, None)
        if outliers:
            inject_outliers(model, scale=float(outliers))
        for bits in (4, 2):
            sums = dict.fromkeys((*WAYS, "format"), 0.0)
            count = 0
            for file in ("wikitext2-test.txt", "book.txt"):
                ids, bos = load_ids(ROOT / "assets/text" / file, tokenizer, 4096), bos_of(model, tokenizer)
                for start in window_starts(len(ids), args.context + scored, args.windows, 0):
                    window = as_batch(bos + ids[start : start + args.context + scored], model.device)
                    reference = measure.reference_logits(model, window[:, :-1], scored)
                    count += 1
                    for way in sums:
                        if way == "format":
                            found = measure.quality(model, Strategy(f"int{bits}/raw"), window, scored, reference)
                        else:
                            layers = partial(cache_of, way=way, bits=bits)
                            found = measure.quality(
                                model, Strategy("dynamic"), window, scored, reference, open_it=layers
                            )
                        sums[way] += sum(found["kl"]) / len(found["kl"])
            label = name + (f", outliers x{outliers}" if outliers else "")
            print(
                f"{label:28s} {bits:4d} "
                + " ".join(f"{sums[w] / count:9.2e}" for w in sums)
                + "   "
                + " ".join(f"{bits + 0.25 + OVERHEAD[w]:g}" for w in WAYS),
                flush=True,
            )


if __name__ == "__main__":
    main()
