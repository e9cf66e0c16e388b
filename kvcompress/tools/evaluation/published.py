"""Analysis only: how published methods round K and V, written from their papers and their authors' code, to be
measured as our formats are. All metadata is counted as its authors store it; what a method keeps in full precision is
the cache's `sinks` and newest page, for all of them alike.

A `Rounding` takes x [B, H, T, D] of one side of a layer, T a multiple of 32, and gives what would be read back and its
bits an element. It lives as long as its layer: what a method calibrates offline and has no file for is fitted to the
first rows that it sees (the prompt itself, which flatters it).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

Rounding = Callable[[Tensor], tuple[Tensor, float]]
_GROUP = 32
_LLOYD_MAX = {  # levels above 0 for N(0, 1): Max 1960, IRE Transactions on Information Theory, table I
    2: (0.4528, 1.510), 3: (0.2451, 0.7560, 1.344, 2.152),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733),
}  # fmt: skip


@cache
def hadamard(dim: int) -> Tensor:
    """Orthonormal, blocks of the largest power of two that divides `dim`."""
    block = torch.ones(1, 1)
    while len(block) < dim & -dim:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    return torch.block_diag(*[block / len(block) ** 0.5] * (dim // len(block)))


def nearest(x: Tensor, levels: Tensor) -> Tensor:
    """Each element's nearest of `levels` (ascending)."""
    return levels[torch.bucketize(x, (levels[1:] + levels[:-1]) / 2)]


def in_range(x: Tensor, bits: int, dim: int) -> Tensor:
    """x on 2^bits equidistant levels from its least to its largest along `dim`, both fp16."""
    low = x.amin(dim, keepdim=True).half().float()
    step = ((x.amax(dim, keepdim=True) - low) / (2**bits - 1)).half().float().clamp_min(1e-7)
    return ((x - low) / step).round().clamp(0, 2**bits - 1) * step + low


def kivi(bits: int, key: bool) -> Rounding:
    """KIVI (arXiv 2402.02750): ranges of 32 tokens a channel (K), of 32 channels a token (V)."""

    def rounding(x: Tensor) -> tuple[Tensor, float]:
        if key:
            groups = x.unflatten(2, (-1, _GROUP))
            return in_range(groups, bits, 3).flatten(2, 3), bits + 32 / _GROUP
        return in_range(x.unflatten(3, (-1, _GROUP)), bits, 4).flatten(3), bits + 32 / _GROUP

    return rounding


def quarot(bits: int, key: bool) -> Rounding:
    """QuaRot's cache (arXiv 2404.00456): a Hadamard transform of each head, then a row's range, clipped to 0.95 of it
    (as its authors' commands have it). K and V alike: the plain rotated format of its bits."""

    def rounding(x: Tensor) -> tuple[Tensor, float]:
        rows = x @ (turn := hadamard(x.shape[3]))
        rows = rows.clamp(0.95 * rows.amin(3, keepdim=True), 0.95 * rows.amax(3, keepdim=True))
        return in_range(rows, bits, 3) @ turn.T, bits + 32 / x.shape[3]

    return rounding


def turboquant(bits: int, key: bool) -> Rounding:
    """TurboQuant's MSE quantizer (arXiv 2504.19874) as engines run it: random signs and a Hadamard transform, the
    levels of Lloyd and Max at the row's length over sqrt(D), the length corrected after it. K and V alike."""

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
    """KVarN (arXiv 2606.03458): a Hadamard transform, deviations of a tile's tokens and channels brought to one by
    turns (16 times), then ranges a channel (K) or a token (V). A tile has up to 128 tokens, as many as come."""

    def rounding(x: Tensor) -> tuple[Tensor, float]:
        tokens = 128 if x.shape[2] % 128 == 0 else 64 if x.shape[2] % 64 == 0 else _GROUP
        turn, rest = hadamard(x.shape[3]), x.unflatten(2, (-1, tokens))
        rest = rest @ turn
        of_token, of_channel = torch.ones_like(rest[..., :1]), torch.ones_like(rest[..., :1, :])
        for _ in range(16):
            # Of mean 1: where channels have means, one size for all of them grows without end, and tokens' shrinks.
            by = torch.nn.functional.normalize(rest.std(3, keepdim=True), 1, 4) * rest.shape[4]
            rest, of_channel = rest / by.clamp_min(1e-12), of_channel * by.clamp_min(1e-12)
            by = rest.std(4, keepdim=True).clamp_min(1e-12)
            rest, of_token = rest / by, of_token * by
        near = in_range(rest, bits, 3 if key else 4)
        near = near * of_token.clamp(2**-24, 65504).half().float() * of_channel.clamp(2**-24, 65504).half().float()
        ranges, scales = (tokens, x.shape[3]) if key else (x.shape[3], tokens)  # one side's scale goes into its range's
        return (near @ turn.T).flatten(2, 3), bits + 32 / ranges + 16 / scales

    return rounding


def kvquant(bits: int, key: bool) -> Rounding:
    """Like KVQuant (arXiv 2401.18079) with 1% of outliers: the ends of a channel (K) or a token's heads (V) stay fp16,
    the rest of its range is put on levels of the layer by k-means. K after RoPE, and no Fisher weights."""
    fitted: list[Tensor] = []  # ends of K's channels, and levels

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
        stored = outside.float().mean().item() * 32  # value and place
        return near, bits + stored + (0 if key else 32 / row)

    return rounding


def _means(x: Tensor, count: int) -> Tensor:
    """k-means of numbers: fp32, ascending."""
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
    """OSCAR's quantizer (arXiv 2605.17757): magnitudes of a row above its 0.96 quantile (V: 0.92) are clipped, then it
    is put on its range. Its rotations are a calibration: `benchmarks/oscar.py` measures them."""

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
