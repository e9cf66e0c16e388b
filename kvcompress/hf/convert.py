"""Conversion between KVCache and transformers' DynamicCache."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from .. import checks
from .forward_pass import LayeredCache
from .layer import PagedLayer


def fill(cache: LayeredCache, source: Cache, attention_mask: torch.Tensor | None) -> None:
    """Stores the contents of `source` in the empty `cache`; see KVCache.from_cache."""
    if not isinstance(source, DynamicCache):
        raise TypeError(f"from_cache: expected a DynamicCache, got {type(source).__name__}")
    if len(source.layers) != len(cache.layers) and source.get_seq_length():
        raise ValueError(
            f"from_cache: expected {len(cache.layers)} layers, as in the config, got {len(source.layers)}; "
            "was the cache made for this model?"
        )
    layers: list[Any] = []
    pairs: Any = zip(cache.layers, source.layers, strict=False)
    for index, (ours, theirs) in enumerate(pairs):
        paged = isinstance(ours, PagedLayer)
        expected = type(ours) if not paged else DynamicSlidingWindowLayer if ours.window else DynamicLayer
        if paged and ours.max_slots:
            expected = DYNAMIC_LAYER_TYPE_MAPPING["indexed_attention"]
        window = getattr(theirs, "sliding_window", 0)
        if type(theirs) is not expected or (paged and window != ours.window):
            of = f" of {ours.window} slots" if paged and ours.window else ""
            got = f"{type(theirs).__name__}{f' of {window} slots' if window else ''}"
            raise TypeError(
                f"from_cache: layer {index}: expected a {expected.__name__}{of}, got {got}; "
                "make the cache with DynamicCache(config=model.config)"
            )
        if not paged:
            ours = copy.deepcopy(theirs)
        elif theirs.keys is not None and theirs.values is not None and theirs.keys.numel():
            _append(ours, theirs, attention_mask)
        layers.append(ours)
    cache.layers[: len(layers)] = layers


def _append(layer: PagedLayer, source: Any, mask: torch.Tensor | None) -> None:
    seen = source.get_seq_length()
    if layer.max_slots and seen > layer.max_slots:
        raise ValueError(
            f"from_cache: expected at most {layer.max_slots} slots, the config's index_topk, got {seen}; "
            "keep using the DynamicCache"
        )
    own = None if mask is None else checks.own_mask(mask[:, :seen], source.keys.shape[0], seen)
    layer.fill(source.keys, source.values, own, seen)


def dense(cache: LayeredCache) -> DynamicCache:
    """A DynamicCache with the decoded contents of `cache`; see KVCache.to_dynamic_cache."""
    if any(isinstance(layer, PagedLayer) and layer.max_slots for layer in cache.layers):
        raise ValueError(
            "to_dynamic_cache: expected a model without an indexer, got one with an indexer, whose keys a KVCache does "
            "not store; run the prompt again with a DynamicCache"
        )
    twin = DynamicCache(config=cache.forward_pass.config)
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, PagedLayer):
            twin.layers[index] = copy.deepcopy(layer)
        elif layer.is_initialized and layer.get_seq_length():
            dynamic: Any = twin.layers[index]
            dynamic.update(layer.keys, layer.values)
            if layer.window:
                dynamic.cumulative_length = layer.get_seq_length()
    return twin
