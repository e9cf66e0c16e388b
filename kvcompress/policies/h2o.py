"""H2O: keeps heavy hitters (by accumulated attention) and the newest tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import checks
from .base import Policy, StoredTokens

SCORES = ("sum", "mean", "ema")


class H2O(Policy):
    """Keeps the tokens with the most accumulated attention, and the newest tokens (Zhang et al., arXiv 2306.14048).

    Args:
        budget: tokens that a head keeps: int, or float: share of all tokens so far.
        recent: number of newest tokens, part of the budget. Default: half of it, as in the paper.
        sinks: number of first tokens that are never evicted. The paper has none; its sums favor early tokens anyway.
        score: "sum", as in the paper: attention summed over all queries, which favors early tokens, since more queries
            have seen them. "mean": the sum divided by the number of queries that could see the token. "ema": an
            exponential moving average; each new token multiplies older attention by `decay` (all tokens of a call
            weigh the same).
        heads: "each", or "shared": all heads keep the same tokens, by the mean score.
        decay: decay factor of "ema", in (0, 1].
        slack: as in `policies.Policy`.
    """

    needs_attention = True

    def __init__(
        self, budget: int | float, recent: int | None = None, sinks: int = 4, *, score: str = "mean",
        heads: str = "each", decay: float = 0.99, slack: int | None = None,
    ) -> None:  # fmt: skip
        self.kind = checks.choice("H2O: score", score, SCORES)
        self.heads = checks.choice("H2O: heads", heads, ("each", "shared"))
        if not 0 < decay <= 1:
            raise ValueError(f"H2O: decay: expected a number in (0, 1], got {decay}")
        self._half = recent is None and isinstance(budget, float)
        if recent is None:
            recent = min(budget // 2, max(0, budget - sinks)) if isinstance(budget, int) else 0
        super().__init__(budget, sinks=sinks, recent=recent, slack=slack)
        self.decay = decay

    def score(self, stored: StoredTokens) -> Tensor:
        assert stored.scores is not None
        return stored.mean_scores() if self.kind == "mean" else stored.scores

    def protected(self, stored: StoredTokens) -> Tensor | None:
        if not self._half:
            return None
        limits = [self.limit(real, stored.layer, stored.layers) for real in stored.real.tolist()]  # half of a share
        return stored.positions >= (stored.real - torch.tensor(limits, device="cpu") // 2)[:, None, None]

    def decay_of(self, queries: int) -> float:
        return self.decay**queries if self.kind == "ema" else 1.0


class ScoreOnly(H2O):
    """H2O without recent tokens: keeps the tokens with the most accumulated attention only.

    Arguments as in `policies.H2O`, without `recent`.
    """

    def __init__(self, budget: int | float, sinks: int = 0, **options: Any) -> None:
        super().__init__(budget, 0, sinks, **options)
