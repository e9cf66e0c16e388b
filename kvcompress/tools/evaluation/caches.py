"""Creating the cache of a strategy (KVCache or one of transformers'), its attention, and its size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from ...hf.backend import enable, select
from ...hf.cache import KVCache
from ...hf.configs import text_config
from ..strategy import Strategy
from .fake import FakeQuantCache


def open_cache(model: PreTrainedModel, strategy: Strategy) -> Any:
    """An empty cache for `strategy`. Raises ImportError if a backend is not installed."""
    options = strategy.arguments()
    if strategy.kind == "dynamic":
        return DynamicCache(config=model.config)
    if strategy.kind == "fake":
        return FakeQuantCache(text_config(model.config), strategy.head.removeprefix("fake:"), **options)
    if strategy.kind.startswith("hf"):
        from transformers import QuantizedCache

        if strategy.kind == "hf-fp8":
            return QuantizedCache("fp8", model.config)
        backend, bits = strategy.head.split(":")
        for name in ("axis_key", "axis_value"):
            if options[name] is None:  # as transformers recommends for each
                options[name] = 1 if backend == "hqq" else 0
        return QuantizedCache(backend, model.config, nbits=int(bits), **options)
    if policy := options.get("policy"):
        policy.bind(model)
    key, _, value = strategy.head.partition("/")
    return KVCache(model.config, key=key, value=value or key, **options)


@contextmanager
def attention_for(model: PreTrainedModel, strategy: Strategy) -> Iterator[None]:
    """Context manager: the model uses the attention of `strategy`."""
    text = text_config(model.config)
    before = text._attn_implementation
    if strategy.kind == "kvcompress":
        enable(model, verbose=False)
    elif before == "kvcompress":
        select(model, text, "sdpa")
    try:
        yield
    finally:
        if text._attn_implementation != before:
            select(model, text, before)


def _storages(x: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """The plain tensors in nested lists, dicts, tensor subclasses and objects."""
    if isinstance(x, torch.Tensor):
        if hasattr(x, "__tensor_flatten__"):
            for name in x.__tensor_flatten__()[0]:
                yield from _storages(getattr(x, name), depth)
        else:
            yield x
    elif isinstance(x, dict):
        for y in x.values():
            yield from _storages(y, depth)
    elif isinstance(x, (list, tuple)):
        for y in x:
            yield from _storages(y, depth)
    elif hasattr(x, "__dict__") and depth < 2:
        yield from _storages(vars(x), depth + 1)


def held_bytes(cache: Any) -> int:
    """Size of a cache between calls, in bytes; for analysis-only caches the size that the scheme would have."""
    if isinstance(cache, KVCache):
        return cache.stats()["bytes"]
    if isinstance(cache, FakeQuantCache):
        return cache.would_be_bytes()
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _storages(cache.layers)}
    return sum(found.values())
