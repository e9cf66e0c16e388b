"""Merging attention over disjoint sets of keys by lse, as weighted sums: over splits, ranks, or devices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def safe_top(top: Tensor) -> Tensor:
    """The largest lse of all parts; 0 where all are -inf."""
    return torch.where(top.isinf(), torch.zeros_like(top), top)


def weighted_part(out: Tensor, lse: Tensor, safe: Tensor) -> Tensor:
    """The summand of a part, fp32 [..., Dv + 1]: out [..., Dv] times its weight, then the weight. lse, safe: [...]."""
    weight = torch.exp(lse - safe).unsqueeze(-1)
    return torch.cat([out * weight, weight], -1)  # NaN in one part is NaN in the end


def normalized(both: Tensor, safe: Tensor, dtype: torch.dtype, s_aux: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """out and lse from a sum of `weighted_part`. s_aux: attention-sink logits [Hq], if the last dim of lse is Hq."""
    out, total = both[..., :-1], both[..., -1]
    lse = safe + total.log()
    if s_aux is not None and s_aux.numel():
        total = total + torch.exp(s_aux - safe)
    seen = (total > 0) | total.isnan()
    return torch.where(seen.unsqueeze(-1), out / total.unsqueeze(-1), 0).to(dtype), lse


def join(
    parts: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype, s_aux: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Merged out [..., Dv] and lse [...] of (out, lse) of each part."""
    safe = safe_top(torch.stack([lse for _, lse in parts]).amax(0))
    both = weighted_part(*parts[0], safe)
    for out, lse in parts[1:]:
        both += weighted_part(out, lse, safe)
    return normalized(both, safe, dtype, s_aux)
