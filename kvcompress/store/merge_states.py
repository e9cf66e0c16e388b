"""Partial attention of disjoint sets of keys joined by lse, as sums: over ranks, or over places of one machine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def safe_top(top: Tensor) -> Tensor:
    """The largest lse of all parts, [B, Hq, T]; 0 where none sees anything."""
    return torch.where(top.isinf(), torch.zeros_like(top), top)


def weighed(out: Tensor, lse: Tensor, safe: Tensor) -> Tensor:
    """What parts add up: out [B, T, Hq, Dv] times its weight, and behind it the weight: fp32 [B, T, Hq, Dv + 1]."""
    weight = torch.exp(lse - safe).transpose(1, 2).unsqueeze(-1)
    return torch.cat([out * weight, weight], -1)  # NaN in one part is NaN in the end


def finished(both: Tensor, safe: Tensor, s_aux: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """out and lse of a sum of `weighed`. s_aux: logits [Hq] that take probability, or empty."""
    out, total = both[..., :-1], both[..., -1]
    lse = safe + total.transpose(1, 2).log()
    if s_aux.numel():
        total = total + torch.exp(s_aux - safe.transpose(1, 2))
    seen = (total > 0) | total.isnan()
    return torch.where(seen.unsqueeze(-1), out / total.unsqueeze(-1), 0).to(dtype), lse


def join(parts: Sequence[tuple[Tensor, Tensor]], s_aux: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """out [B, T, Hq, Dv], lse [B, Hq, T] of (out, lse) of each part."""
    safe = safe_top(torch.stack([lse for _, lse in parts]).amax(0))
    both = weighed(*parts[0], safe)
    for out, lse in parts[1:]:
        both += weighed(out, lse, safe)
    return finished(both, safe, s_aux, dtype)
