"""ExpectedAttention: scores by the expected attention of future queries."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks
from .base import Policy, StoredTokens


class ExpectedAttention(Policy):
    """Keeps the tokens with the highest expected attention from future queries, times the norm of the value (Devoto et
    al., arXiv 2510.00636).

    Queries before RoPE are modeled as normal, with the mean and covariance of the last queries, and rotated to the mean
    of the next `future` positions: score = |v| * mean over the query heads of softmax(q.k + k'Cov k / 2). Needs the
    model's RoPE, which a KVCache provides. An eviction costs Hq * Dk^2 multiply-adds per token.

    Args:
        budget, sinks, slack: as in `policies.Policy`.
        queries: number of last queries for mean and covariance (padding counts).
        future: number of future positions.
        epsilon: added to the expected attention before the multiplication by the norm.
    """

    needs_rope = True

    def __init__(
        self, budget: int | float, sinks: int = 4, *, queries: int = 256, future: int = 512, epsilon: float = 0.0,
        slack: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(budget, sinks=sinks, slack=slack)
        self.window = checks.integer("ExpectedAttention: queries", queries, 1)
        self.future, self.epsilon = checks.integer("ExpectedAttention: future", future, 1), epsilon

    def score(self, stored: StoredTokens) -> Tensor:
        q, positions, scale = stored.queries(self.window)
        frequencies, keys = stored.frequencies(), stored.keys()
        H, Hq = keys.shape[1], q.shape[1]
        real = ~q[:, :1, :, :1].isnan() & (positions >= self.sinks)[:, None, :, None]
        q = _turn(q, -positions[..., None].double() * frequencies).nan_to_num(0) * real
        count = real.sum(2, keepdim=True).clamp(min=1)
        mean = q.sum(2, keepdim=True) / count
        centred = (q - mean) * real
        covariance = centred.transpose(2, 3) @ centred / count
        rotation = self._rotation(stored.real.to(q.device), frequencies)[:, None]  # [B, 1, D, D]
        mean, covariance = mean @ rotation.mT, rotation @ covariance @ rotation.mT
        mean, covariance = (x.unflatten(1, (H, Hq // H)) for x in (mean, covariance))
        k = keys[:, :, None]
        logits = scale * (mean * k).sum(-1) + scale**2 / 2 * ((k @ covariance) * k).sum(-1)  # [B, H, G, N]
        p = logits.masked_fill(~stored.live[:, :, None].to(q.device), -torch.inf).softmax(-1).mean(2)
        return (p.cpu() + self.epsilon) * stored.value_norms()

    def _rotation(self, real: Tensor, frequencies: Tensor) -> Tensor:
        """float32 [B, D, D]: RoPE's matrix, mean over the next positions."""
        ahead = real[:, None] + torch.arange(self.future, device=real.device)
        angle = ahead[..., None].double() * frequencies
        cos, sin = (torch.diag_embed(x.mean(1)) for x in (angle.cos(), angle.sin()))
        return torch.cat([torch.cat([cos, -sin], 2), torch.cat([sin, cos], 2)], 1).float()


def _turn(x: Tensor, angle: Tensor) -> Tensor:
    """x [B, Hq, n, D] rotated as RoPE does, halves of the head; angle float64 [B, n, D / 2]."""
    cos, sin = (f(angle).float()[:, None].repeat(1, 1, 1, 2) for f in (torch.cos, torch.sin))
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin
