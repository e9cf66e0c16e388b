"""Analysis only: rounding of K and V by published methods, implemented from papers and authors' code, for comparison
with the formats of this library. Metadata is counted as the authors store it. For all methods, the cache's `sinks` and
newest page stay in full precision.

A `Rounding` takes x [B, H, T, D], K or V of a layer with T a multiple of 32, and returns the dequantized values and
bits per element. It belongs to one layer. Parameters that a method calibrates offline are fitted to the first rows
instead (the prompt itself, which favours the method).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...quantization.calibration import hadamard

Rounding = Callable[[Tensor], tuple[Tensor, float]]
_GROUP = 32
_LLOYD_MAX = {  # levels above 0 for N(0, 1): Max 1960, IRE Transactions on Information Theory, table I
    2: (0.4528, 1.510), 3: (0.2451, 0.7560, 1.344, 2.152),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733),
}  # fmt: skip


def nearest(x: Tensor, levels: Tensor) -> Tensor:
    """The nearest of `levels` (ascending) for each element."""
    return levels[torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)]


def in_range(x: Tensor, bits: int, dim: int) -> Tensor:
    """x rounded to 2^bits equidistant levels from its minimum to its maximum along `dim`, both stored as fp16."""
    low = x.amin(dim, keepdim=True).half().float()
    step = ((x.amax(dim, keepdim=True) - low) / (2**bits - 1)).half().float().clamp_min(1e-7)
    return ((x - low) / step).round().clamp(0, 2**bits - 1) * step + low


def kivi(bits: int, key: bool) -> Rounding:
    """KIVI (arXiv 2402.02750): ranges over 32 tokens per channel (K), over 32 channels per token (V)."""

    def rounding(x: Tensor) -> tuple[Tensor, float]:
        if key:
            groups = x.unflatten(2, (-1, _GROUP))
            return in_range(groups, bits, 3).flatten(2, 3), bits + 32 / _GROUP
        return in_range(x.unflatten(3, (-1, _GROUP)), bits, 4).flatten(3), bits + 32 / _GROUP

    return rounding


def quarot(bits: int, key: bool) -> Rounding:
    """KV cache of QuaRot (arXiv 2404.00456): a Hadamard transform per head, then ranges per row, clipped to 0.95 (as in
    the authors' commands). The same for K and V."""

    def rounding(x: Tensor) -> tuple[Tensor, float]:
        rows = x @ (turn := hadamard(x.shape[3]))
        rows = rows.clamp(0.95 * rows.amin(3, keepdim=True), 0.95 * rows.amax(3, keepdim=True))
        return in_range(rows, bits, 3) @ turn.T, bits + 32 / x.shape[3]

    return rounding


def turboquant(bits: int, key: bool) -> Rounding:
    """MSE quantizer of TurboQuant (arXiv 2504.19874) as in inference engines: random signs and a Hadamard transform,
    Lloyd-Max levels scaled by the row's norm / sqrt(D), then a correction of the norm. The same for K and V."""

    def rounding(x: Tensor) -> tuple[Tensor, float]:
        dim = x.shape[3]
        signs = torch.randint(0, 2, (dim,), generator=torch.Generator().manual_seed(dim)) * 2.0 - 1
        turn = signs[:, None] * hadamard(dim)
        length = x.norm(dim=3, keepdim=True)
        above = torch.tensor(_LLOYD_MAX[bits])
        near = nearest(x @ turn / length.clamp_min(1e-20) * dim**0.5, torch.cat([-above.flip(0), above]))
        near = near / near.norm(dim=3, keepdim=True).clamp_min(1e-20) * length.half().float()
        return near @ turn.T, bits + 16 / dim

    return rounding


def kvarn(bits: int, key: bool) -> Rounding:
    """KVarN (arXiv 2606.03458): a Hadamard transform; deviations of a tile's tokens and channels normalized alternately
    (16 times); then ranges per channel (K) or per token (V). A tile has up to 128 tokens."""

    def rounding(x: Tensor) -> tuple[Tensor, float]:
        tokens = 128 if x.shape[2] % 128 == 0 else 64 if x.shape[2] % 64 == 0 else _GROUP
        turn, rest = hadamard(x.shape[3]), x.unflatten(2, (-1, tokens))
        rest = rest @ turn
        of_token, of_channel = torch.ones_like(rest[..., :1]), torch.ones_like(rest[..., :1, :])
        for _ in range(16):
            # Scales of mean 1: if channels have means, their common scale would grow without bound, that of tokens
            # shrink.
            by = torch.nn.functional.normalize(rest.std(3, keepdim=True), 1, 4) * rest.shape[4]
            rest, of_channel = rest / by.clamp_min(1e-12), of_channel * by.clamp_min(1e-12)
            by = rest.std(4, keepdim=True).clamp_min(1e-12)
            rest, of_token = rest / by, of_token * by
        near = in_range(rest, bits, 3 if key else 4)
        near = near * of_token.clamp(2**-24, 65504).half().float() * of_channel.clamp(2**-24, 65504).half().float()
        ranges, scales = (
            (tokens, x.shape[3]) if key else (x.shape[3], tokens)
        )  # one scale is merged into that of the range
        return (near @ turn.T).flatten(2, 3), bits + 32 / ranges + 16 / scales

    return rounding


def kvquant(bits: int, key: bool) -> Rounding:
    """As KVQuant (arXiv 2401.18079) with 1% outliers: extreme values of a channel (K) or of a token's heads (V) stay
    fp16, the rest is rounded to k-means levels of the layer. K after RoPE, without Fisher weights."""
    fitted: list[Tensor] = []  # limits of K's channels, and levels

    def ends(x: Tensor, dim: int) -> Tensor:
        return x.quantile(torch.tensor([0.005, 0.995]), dim, keepdim=True, interpolation="nearest")

    def rounding(x: Tensor) -> tuple[Tensor, float]:
        if key and not fitted:
            fitted.append(ends(x, 2))
        row = x.shape[1] * x.shape[3]
        low, high = fitted[0] if key else ends(x.transpose(1, 2).flatten(2), 2)[:, :, None]
        outside = (x < low) | (x > high)
        low, step = low.half().float(), ((high - low) / 2).half().float().clamp_min(1e-7)
        y = (x - low) / step - 1
        if len(fitted) == int(key):
            fitted.append(_means(y[~outside], 2**bits))
        near = torch.where(outside, x.half().float(), (nearest(y, fitted[-1]) + 1) * step + low)
        stored = outside.float().mean().item() * 32  # value and index
        return near, bits + stored + (0 if key else 32 / row)

    return rounding


def _means(x: Tensor, count: int) -> Tensor:
    """k-means centers of numbers: fp32, ascending."""
    x = x.sort().values
    x = x[:: max(1, len(x) // 100_000)].double()
    levels = x[((torch.arange(count) + 0.5) / count * len(x)).long()]
    total = torch.cat([x.new_zeros(1), x.cumsum(0)])
    for _ in range(100):
        ends = torch.searchsorted(x, (levels[1:] + levels[:-1]) / 2)
        ends = torch.cat([ends.new_zeros(1), ends, ends.new_full((1,), len(x))])
        sizes = ends.diff()
        levels = torch.where(sizes > 0, total[ends].diff() / sizes.clamp_min(1), levels).sort().values
    return levels.float()


def oscar(bits: int, key: bool) -> Rounding:
    """Quantizer of OSCAR (arXiv 2605.17757): magnitudes above the row's 0.96 quantile (V: 0.92) are clipped, then
    ranges per row. `benchmarks/oscar.py` measures its rotations, which are a calibration."""

    def rounding(x: Tensor) -> tuple[Tensor, float]:
        most = x.abs().quantile(0.96 if key else 0.92, 3, keepdim=True)
        return in_range(x.clamp(-most, most), bits, 3), bits + 32 / x.shape[3]

    return rounding


METHODS: dict[str, Callable[[int, bool], Rounding]] = {
    "kivi": kivi,
    "quarot": quarot,
    "turboquant": turboquant,
    "kvarn": kvarn,
    "kvquant": kvquant,
    "oscar": oscar,
}
