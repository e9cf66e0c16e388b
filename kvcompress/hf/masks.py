"""Masks of sliding windows and chunks, as parameters instead of [B, 1, q, kv] tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import causal_mask_function

from .lazy import Lazy


class WindowMask(Lazy):
    """A mask [B, 1, q, kv] of a sliding window or of chunks, or causal (window 0), not computed yet.

    The kvcompress attention function reads padding (bool [B, slots], or None), window and chunked from it. make:
    computes the mask.
    """

    padding: torch.Tensor | None
    window: int
    chunked: bool
    make: Callable[[], torch.Tensor]

    def dense(self) -> torch.Tensor:
        return self.make()

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"WindowMask({'chunks of ' if self.chunked else ''}{self.window}, shape={list(self.shape)})"


def of_chosen(mask: torch.Tensor | None, indices: torch.Tensor, slots: int) -> torch.Tensor:
    """The mask [B, 1, q, slots] (bool or additive; None: all visible) restricted to the slots `indices` [B, q, n] that
    an indexer has selected (negative: none). Returns the mask's dtype."""
    at = torch.where(indices < 0, slots, indices).long()
    chosen = at.new_zeros(*at.shape[:2], slots + 1, dtype=torch.bool).scatter_(-1, at, True)[:, None, :, :slots]
    if mask is None:
        return chosen
    return chosen & mask if mask.dtype == torch.bool else mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)


def _closure(function: Callable, name: str) -> dict[str, Any] | None:
    """The arguments of `name` of transformers.masking_utils that created a function; None if it did not."""
    made = getattr(function, "__qualname__", "").startswith(f"{name}.<locals>.")
    if not made or function.__module__ != causal_mask_function.__module__:
        return None
    cells = getattr(function, "__closure__", None) or ()
    return dict(zip(function.__code__.co_freevars, (c.cell_contents for c in cells), strict=True))


def window_of(mask_function: Callable) -> tuple[int, bool] | None:
    """(window, chunked) of a mask function of transformers that is a causal sliding window or causal chunks and nothing
    else; None for any other."""
    parts = (_closure(mask_function, "and_masks") or {}).get("mask_functions", ())
    if len(parts) != 2 or parts[1] is not causal_mask_function:
        return None
    for maker, size, chunked in (("sliding_window_overlay", "sliding_window", False),
                                 ("chunked_overlay", "chunk_size", True)):  # fmt: skip
        given = _closure(parts[0], maker)
        if given and isinstance(given.get(size), int):
            return given[size], chunked
    return None
