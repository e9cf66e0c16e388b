"""A KVCache from transformers' DynamicCache, and back."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from . import checks
from .paged import PagedLayer

if TYPE_CHECKING:
    from .cache import KVCache


def fill(cache: KVCache, source: Cache, attention_mask: torch.Tensor | None) -> None:
    """Stores what `source` holds in `cache`, which is empty; see KVCache.from_cache."""
    if not isinstance(source, DynamicCache):
        raise TypeError(f"from_cache: wanted a DynamicCache, got {type(source).__name__}")
    if len(source.layers) != len(cache.layers) and source.get_seq_length():
        raise ValueError(
            f"from_cache: wanted {len(cache.layers)} layers as the config has, got {len(source.layers)}; "
            "was the cache made for this model?"
        )
    layers: list[Any] = []
    for index, (ours, theirs) in enumerate(zip(cache.layers, source.layers, strict=False)):
        if isinstance(ours, PagedLayer):
            if type(theirs) is not DynamicLayer:
                raise TypeError(
                    f"from_cache: layer {index}: wanted a DynamicLayer, got {type(theirs).__name__}; "
                    "make the cache with DynamicCache(config=model.config)"
                )
            if theirs.keys is not None and theirs.values is not None and theirs.keys.numel():
                _append(ours, theirs.keys, theirs.values, attention_mask)
            layers.append(ours)
        else:
            if type(theirs) is not type(ours):
                raise TypeError(
                    f"from_cache: layer {index}: wanted a {type(ours).__name__}, got {type(theirs).__name__}; "
                    "make the cache with DynamicCache(config=model.config)"
                )
            layers.append(copy.deepcopy(theirs))
    cache.layers[: len(layers)] = layers


def _append(layer: PagedLayer, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None) -> None:
    own = None
    if mask is not None:
        own = checks.own_mask(mask[:, : keys.shape[2]], keys.shape[0], keys.shape[2])
    layer.fill(keys, values, own)


def dense(cache: KVCache) -> DynamicCache:
    """A DynamicCache of what `cache` holds, decoded; see KVCache.to_dynamic_cache."""
    twin = DynamicCache(config=cache._shared.config)
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, PagedLayer):
            twin.layers[index] = copy.deepcopy(layer)
        elif layer.is_initialized and layer.get_seq_length():
            dynamic: Any = twin.layers[index]
            dynamic.update(layer.keys, layer.values)
    return twin
