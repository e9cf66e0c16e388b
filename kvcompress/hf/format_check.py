"""Does a model's K suit a format? Found out on the first long call, before anything of it is stored."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..layer import PagedKV

LEAST = 64
"""Tokens that a call must bring to be looked at (or two pages, if they are smaller); shorter ones are, together, before
the first of their tokens are sealed."""
LIMIT = 0.25
"""Noise (see `noise`) from which on a format is taken to break a model's K. On the shipped models what is below it
costs a KL of at most 5e-2 (at 2 bits; 3e-2 at 4), what is above it 4e-3 to 3: see docs/formats.md."""
_SAMPLE = 256


def noise(k: torch.Tensor, key: str, page_size: int = 64) -> torch.Tensor:
    """What the format `key` adds to K [B, H, T, D], as a share of how K varies over the tokens: [H], fp32.

    mean |k - decoded k|^2 / mean |k - mean k|^2. What all keys have in common (a bias) is in every score alike and
    changes no attention, yet it stretches the grid of a format that does not take it out.
    """
    full = min(k.shape[2], _SAMPLE) // 16 * 16
    size = min(page_size, full)
    x = k[:4, :, -(full // size * size) :]
    probe = PagedKV(
        x.shape[1], x.shape[3], key=key, value="raw", value_dim=16, batch=x.shape[0], dtype=x.dtype, device=x.device,
        page_size=size, sinks=0,
    )  # fmt: skip
    v = x.new_zeros(*x.shape[:3], 16)
    probe.append(x, v)
    probe.append(x[:, :, :1], v[:, :, :1])  # seals the last page
    error = (probe.dense()[0][:, :, :-1].float() - x.float()).square().sum((0, 2, 3))
    spread = (x.float() - x.float().mean(2, keepdim=True)).square().sum((0, 2, 3))
    return error / spread.clamp_min(1e-30)


def trouble(k: torch.Tensor, keys: Iterable[str], page_size: int = 64) -> str | None:
    """Why one of the formats `keys` would break K [B, H, T, D]; None if none does."""
    for key in keys:
        found = noise(k, key, page_size)
        if not bool((found > LIMIT).any()):
            continue
        head = int(found.argmax())
        x = k[:4, head, -_SAMPLE:].float()
        mean = x.mean(1, keepdim=True)
        offset = float(mean.norm() / (x - mean).square().sum(-1).mean(1).sum().sqrt().clamp_min(1e-30))
        channels = x.abs().amax((0, 1))
        outlier = float(channels.max() / channels.median().clamp_min(1e-30))
        return (
            f"{key} adds noise of {float(found[head]):.2f} of what K varies by (head {head}; limit {LIMIT}): the keys' "
            f"mean is {offset:.1f} times their spread, their largest channel {outlier:.1f} times the median one"
        )
    return None
