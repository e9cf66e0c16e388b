"""Layers of a KVCache that are transformers' own classes: their size, rows and states."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers.cache_utils import LinearAttentionCacheLayerMixin


def tensors(layer: Any) -> list[torch.Tensor]:
    """All tensors of a layer, in nested dicts and lists too."""
    return [x for x in tree_leaves(layer.__dict__) if isinstance(x, torch.Tensor)]


def held(layer: Any) -> tuple[int, int]:
    """(bytes of memory, bytes of the elements) of a layer."""
    found = [t for t in tensors(layer) if t.dim() > 1]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}
    return sum(storages.values()), sum(t.nbytes for t in found)


def has_states(layer: Any) -> bool:
    """True if the layer has states of linear attention or convolutions."""
    known = isinstance(layer, LinearAttentionCacheLayerMixin)
    return known and any([*layer.is_conv_states_initialized.values(), *layer.is_recurrent_states_initialized.values()])


def forget_states(layer: LinearAttentionCacheLayerMixin) -> None:
    """Removes all states of a layer; the next call may have another batch size."""
    layer.reset()
    for known in (layer.is_conv_states_initialized, layer.is_recurrent_states_initialized):
        known.update(dict.fromkeys(known, False))


def move(layer: Any, device: torch.device) -> None:
    """Moves the tensors of a layer to a device."""
    layer.__dict__.update(tree_map_only(torch.Tensor, lambda x: x.to(device), layer.__dict__))
    if getattr(layer, "device", None) is not None:
        layer.device = device


def put_back(layer: Any, before: dict[str, Any]) -> None:
    """Restores exactly the attributes `before` of a layer."""
    layer.__dict__.clear()
    layer.__dict__.update(before)


@contextlib.contextmanager
def whole(layers: Sequence[Any]) -> Iterator[None]:
    """Context manager: restores the tensors of the layers after an error."""
    before = [{name: dict(x) if isinstance(x, dict) else x for name, x in y.__dict__.items()} for y in layers]
    try:
        yield
    except BaseException:
        for layer, old in zip(layers, before, strict=True):
            put_back(layer, old)
        raise


def crop(layers: Sequence[Any], tokens_to_remove: int) -> None:
    """Calls `crop` of all layers, or raises an error and changes none of them."""
    if tokens_to_remove and any(True in getattr(x, "is_recurrent_states_initialized", {}).values() for x in layers):
        raise ValueError(
            "KVCache: crop: expected layers without recurrent states, got linear-attention layers, whose states cannot "
            "be restored; use a copy of the cache made before"
        )
    with whole(layers):
        for layer in layers:
            layer.crop(tokens_to_remove)


def change_rows(layer: Any, method: str, argument: Any) -> None:
    """Calls `method`: reorder_cache, batch_select_indices or batch_repeat_interleave. Layers with states have only the
    first."""
    if hasattr(layer, method):
        getattr(layer, method)(argument)
    elif isinstance(layer, LinearAttentionCacheLayerMixin) and layer.device is not None:
        rows = tensors(layer)[0].shape[0]
        pick = (
            argument
            if isinstance(argument, torch.Tensor)
            else torch.arange(rows, device="cpu").repeat_interleave(argument)
        )
        layer.reorder_cache(pick.nonzero()[:, 0] if pick.dtype == torch.bool else pick)
