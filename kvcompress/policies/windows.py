"""StreamingLLM and SlidingWindow: eviction by position only."""

from __future__ import annotations

from torch import Tensor

from .. import checks
from .base import Policy, StoredTokens


class StreamingLLM(Policy):
    """Keeps the first `sinks` and the newest `window` tokens (Xiao et al., arXiv 2309.17453).

    Args:
        sinks: number of first tokens of each row.
        window: number of newest tokens.
        positions: "original": keys keep the positions that they were written with. "cache": positions in the cache, as
            in the paper, for sequences longer than the model was trained for: sinks are rotated next to the window when
            they are read; distances between queries and the window do not change. Needs the model's RoPE, which a
            KVCache provides.
        slack: number of additional tokens before a row is evicted. Default: page_size.

    Evicts sinks + window + slack tokens down to sinks + window.
    """

    heads = "shared"

    def __init__(
        self, sinks: int = 4, window: int = 1020, *, positions: str = "original", slack: int | None = None
    ) -> None:
        self.positions = checks.choice(f"{type(self).__name__}: positions", positions, ("original", "cache"))
        window = checks.integer(f"{type(self).__name__}: window", window, 1)
        super().__init__(checks.integer(f"{type(self).__name__}: sinks", sinks, 0) + window, sinks=sinks, slack=slack)

    def score(self, stored: StoredTokens) -> Tensor:
        return stored.line_positions.float()


class SlidingWindow(StreamingLLM):
    """Keeps the newest `window` tokens: StreamingLLM without sinks. Frees whole pages.

    window, slack: as in `policies.StreamingLLM`.
    """

    def __init__(self, window: int, *, slack: int | None = None) -> None:
        super().__init__(0, window, slack=slack)
