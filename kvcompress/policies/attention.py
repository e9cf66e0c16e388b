"""TOVA and SnapKV: scores from the attention of the last queries."""

from __future__ import annotations

from torch import Tensor

from .. import checks
from .base import Policy, StoredTokens


class TOVA(Policy):
    """Keeps the tokens with the most attention from the newest query, mean over heads (Oren et al., arXiv 2401.06104).

    Evicts `slack` tokens at a time, by the query at that time; the paper evicts one token per step.

    Args:
        budget, sinks, slack: as in `policies.Policy`.
        heads: "shared", as in the paper: all heads keep the same tokens. "each": by the attention of each head.
    """

    window = 1

    def __init__(self, budget: int | float, sinks: int = 0, *, heads: str = "shared", slack: int | None = None) -> None:
        super().__init__(budget, sinks=sinks, slack=slack)
        self.heads = checks.choice("TOVA: heads", heads, ("each", "shared"))

    def score(self, stored: StoredTokens) -> Tensor:
        return stored.window_attention(1)


class SnapKV(Policy):
    """Keeps the tokens with the most attention from the last `window` queries, average-pooled over adjacent tokens,
    and the last `window` tokens (Li et al., arXiv 2404.14469).

    Args:
        budget, sinks, slack: as in `policies.Policy`.
        window: number of last queries; their tokens are kept.
        kernel: size of the pooling kernel in tokens, odd.
    """

    def __init__(
        self, budget: int | float, window: int = 32, kernel: int = 5, sinks: int = 4, *, slack: int | None = None
    ) -> None:
        self.window = checks.integer("SnapKV: window", window, 1)
        self.kernel = checks.integer("SnapKV: kernel", kernel, 1)
        if kernel % 2 == 0:
            raise ValueError(f"SnapKV: kernel: expected an odd number, got {kernel}")
        super().__init__(budget, sinks=sinks, recent=window, slack=slack)

    def score(self, stored: StoredTokens) -> Tensor:
        return stored.smoothed(stored.window_attention(self.window), self.kernel, self.window)
