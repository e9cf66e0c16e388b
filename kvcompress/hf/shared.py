"""Layers that attend to K and V of an earlier one (Gemma 3n and 4)."""

from __future__ import annotations

from typing import Any

import torch


def attend_stored(
    layer: Any, block: Any, query: torch.Tensor, mask: torch.Tensor | None, **options: Any
) -> torch.Tensor | None:
    """Attention [B, T, Hq, Dv] over the pages of `layer`, which has stored `block` already. Returns None and does
    nothing as PagedLayer.attend, and if tokens of the block are already quantized, or tokens were evicted."""
    store = layer.store
    raw = not store.page_store.direct and block.k.shape[2] <= store.page_size
    if store.eviction or not raw or query.shape[2] > block.k.shape[2] or query.requires_grad:
        return None
    if mask is not None and not layer.forward_pass.split_mask(mask, store, 0)[1]:
        return None
    return store.attend_checked(query, None, None, None, **options)[0]
