"""KVCaches with a policy, under the names that tutorials use. See docs/eviction.md."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ..policies import H2O, StreamingLLM
from .cache import KVCache


class H2OCache(KVCache):
    """A KVCache with the policy H2O: keeps `budget` tokens per head, those with the most attention and the newest.

    Args:
        config: `model.config`.
        budget, recent, sinks, score, heads: as in `policies.H2O`. budget: int, or float: share of all tokens so far.
        key_or_format, options: as in KVCache. The default format is "raw".

    Raises TypeError and ValueError as KVCache and H2O do.
    """

    def __init__(
        self, config: PreTrainedConfig, budget: int | float, recent: int | None = None, sinks: int = 4, *,
        score: str = "mean", heads: str = "each", key_or_format: str | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            config, key_or_format, policy=H2O(budget, recent, sinks, score=score, heads=heads),
            **(options if key_or_format else {"key": "raw", **options}),
        )  # fmt: skip


class StreamingLLMCache(KVCache):
    """A KVCache with the policy StreamingLLM: keeps the first `sinks` and the newest `window` tokens, at their original
    positions.

    Args:
        config: `model.config`.
        sinks, window: as in `policies.StreamingLLM`.
        key_or_format, options: as in KVCache. The default format is "raw".

    Raises TypeError and ValueError as KVCache and StreamingLLM do.
    """

    def __init__(
        self, config: PreTrainedConfig, sinks: int = 4, window: int = 1020, *, key_or_format: str | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            config, key_or_format, policy=StreamingLLM(sinks, window),
            **(options if key_or_format else {"key": "raw", **options}),
        )  # fmt: skip
