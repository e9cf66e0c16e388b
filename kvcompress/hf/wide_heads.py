"""Heads wider than a page takes are stored as narrower ones, side by side."""

from __future__ import annotations

from typing import Any

import torch

WIDEST = 256
"""The head dim that pages take."""


def fold_of(dim: int, value_dim: int) -> int:
    """In how many narrower heads heads of (Dk, Dv) are stored; 1 if they fit a page, or nothing divides both."""
    return next((f for f in range(1, 9) if dim % f == value_dim % f == 0 and max(dim, value_dim) <= WIDEST * f), 1)


def narrow(x: Any, fold: int) -> Any:
    """[B, H, T, D] -> [B, H * fold, T, D / fold]."""
    if fold == 1 or not isinstance(x, torch.Tensor) or x.dim() != 4:
        return x
    return x.unflatten(3, (fold, -1)).transpose(2, 3).flatten(1, 2)


def widen(x: torch.Tensor, fold: int) -> torch.Tensor:
    """[B, H * fold, T, D / fold] -> [B, H, T, D]."""
    return x if fold == 1 else x.unflatten(1, (-1, fold)).transpose(2, 3).flatten(3)


def suited(v: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """v in k's dtype under torch.autocast: RoPE leaves K in float32, V is half."""
    halves = getattr(v, "dtype", None) in (torch.float16, torch.bfloat16) and getattr(k, "dtype", None) is torch.float32
    return v.to(torch.float32) if halves else v
