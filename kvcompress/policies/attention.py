"""TOVA and SnapKV: by the attention of the last queries."""

from __future__ import annotations

from torch import Tensor

from .. import checks
from .base import Policy, StoredTokens


class TOVA(Policy):
    """Keeps what the newest query attends to, mean over the heads (Oren et al., 2401.06104).

    Evictions come in batches of `slack`: the query at the time of the eviction decides for all of them.
    heads: "shared", the paper's, or "each".
    """

    window = 1

    def __init__(self, budget: int | float, sinks: int = 0, *, heads: str = "shared", slack: int | None = None) -> None:
        super().__init__(budget, sinks=sinks, slack=slack)
        self.heads = checks.choice("TOVA: heads", heads, ("each", "shared"))

    def score(self, stored: StoredTokens) -> Tensor:
        return stored.window_attention(1)


class SnapKV(Policy):
    """Keeps what the last `window` queries attend to, smoothed over neighbours, and these tokens (2404.14469).

    Args:
        window: last queries, whose tokens are kept too.
        kernel: odd; tokens that the mean of the smoothing is over.
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
