"""Caches by the names that tutorials use: a KVCache with a policy. See docs/eviction.md."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ..policies import H2O, SlidingWindow, StreamingLLM
from .cache import KVCache


class H2OCache(KVCache):
    """Keeps `budget` tokens a head (or a share of those so far): heavy hitters and the newest; see `policies.H2O`."""

    def __init__(
        self, config: PreTrainedConfig, budget: int | float, recent: int | None = None, sinks: int = 4, *,
        score: str = "mean", heads: str = "each", key_or_format: str | None = "raw", **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(config, key_or_format, policy=H2O(budget, recent, sinks, score=score, heads=heads), **options)


class StreamingLLMCache(KVCache):
    """Keeps the first `sinks` tokens and the newest `window`, at their original positions."""

    def __init__(
        self, config: PreTrainedConfig, sinks: int = 4, window: int = 1020, *, key_or_format: str | None = "raw",
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(config, key_or_format, policy=StreamingLLM(sinks, window), **options)


class SlidingWindowCache(KVCache):
    """Keeps the newest `window` tokens."""

    def __init__(
        self, config: PreTrainedConfig, window: int, *, key_or_format: str | None = "raw", **options: Any
    ) -> None:
        super().__init__(config, key_or_format, policy=SlidingWindow(window), **options)


class CombinedCache(KVCache):
    """Sinks, heavy hitters and the newest tokens: sinks and the `recent` newest raw, the rest in `heavy_format`.

    Args:
        sinks, heavy, recent: tokens of each kind that a head keeps.
        sink_format, recent_format: "raw": what is not sealed.
        heavy_format: format of sealed pages.

    Raises ValueError for raw tokens that pages cannot keep raw.
    """

    def __init__(
        self, config: PreTrainedConfig, sinks: int = 4, heavy: int = 512, recent: int = 512, *,
        sink_format: str = "raw", heavy_format: str = "int8", recent_format: str = "raw", **options: Any,
    ) -> None:  # fmt: skip
        if sink_format != "raw":
            raise ValueError(f"CombinedCache: sink_format: wanted raw (they stay raw), got {sink_format!r}")
        if recent_format not in ("raw", heavy_format):
            raise ValueError(
                f"CombinedCache: recent_format: wanted raw or heavy_format ({heavy_format}), got {recent_format!r}"
            )
        policy = H2O(sinks + heavy + recent, recent, sinks)
        raw = recent if recent_format == "raw" else 0
        super().__init__(config, heavy_format, policy=policy, recent=raw, **options)
