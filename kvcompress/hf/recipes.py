"""KVCaches with a policy, under the names that tutorials use. See docs/eviction.md."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ..policies import H2O, StreamingLLM
from .cache import KVCache


class H2OCache(KVCache):
    """Keeps `budget` tokens per head (int, or float: share of all tokens so far): those with the most attention, and
    the newest. See `policies.H2O`."""

    def __init__(
        self, config: PreTrainedConfig, budget: int | float, recent: int | None = None, sinks: int = 4, *,
        score: str = "mean", heads: str = "each", key_or_format: str | None = "raw", **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(config, key_or_format, policy=H2O(budget, recent, sinks, score=score, heads=heads), **options)


class StreamingLLMCache(KVCache):
    """Keeps the first `sinks` and the newest `window` tokens, with their original positions. See
    `policies.StreamingLLM`."""

    def __init__(
        self, config: PreTrainedConfig, sinks: int = 4, window: int = 1020, *, key_or_format: str | None = "raw",
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(config, key_or_format, policy=StreamingLLM(sinks, window), **options)
