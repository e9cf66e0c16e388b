"""Checks whether a model's keys suit their format, in the first long call, before it is stored."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..layer import PagedKV

LEAST = 64
"""Minimum number of tokens of a call for the check (or two pages, if that is less); shorter calls are checked together,
before their first tokens are sealed."""
LIMIT = 0.25
"""Noise (see `noise`) above which a format is considered unsuitable for a model's keys. On the shipped models, noise
below it costs a KL of at most 5e-2 (at 2 bits; 3e-2 at 4), noise above it 4e-3 to 3: see docs/formats.md."""
_SAMPLE = 256


def noise(k: torch.Tensor, key: str, page_size: int = 64) -> torch.Tensor:
    """Noise that the format `key` adds to K [B, H, T, D], relative to the variance of K over tokens: fp32 [H].

    mean |k - decoded k|^2 / mean |k - mean k|^2. A component common to all keys (a bias) adds the same to every score
    and does not change attention, but widens the range of formats that do not subtract it.
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
    """Why one of the formats `keys` does not suit K [B, H, T, D]; None if all do."""
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
            f"{key} adds noise of {float(found[head]):.2f} times the variance of K (head {head}; limit {LIMIT}): the "
            f"mean of K is {offset:.1f} times its spread, its largest channel {outlier:.1f} times the median channel"
        )
    return None
