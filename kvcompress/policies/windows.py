"""StreamingLLM and SlidingWindow: what is kept depends on the position alone."""

from __future__ import annotations

from torch import Tensor

from .. import checks
from .base import Policy, StoredTokens


class StreamingLLM(Policy):
    """Keeps the first `sinks` tokens and the newest `window` (Xiao et al., 2309.17453).

    Args:
        sinks: first tokens of each row.
        window: newest tokens.
        positions: "original": keys keep the positions that they were written with. "cache": positions inside the cache,
            as in the paper, for sequences longer than the model was trained for: the sinks are moved up to the window
            when they are read (the distance between query and window is the same anyway). Needs the model's RoPE: see
            `KVCache`.
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
    """Keeps the newest `window` tokens, freeing whole pages."""

    def __init__(self, window: int, *, slack: int | None = None) -> None:
        super().__init__(0, window, slack=slack)
