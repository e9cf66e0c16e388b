"""Lazy: a tensor that is not computed yet. LazyKV: K or V of a layer, returned by `update` for the attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map


class Lazy(torch.Tensor):
    """A tensor that is not computed yet. Code that knows the class reads its attributes; any other operation computes
    the values (`dense`) first, so that other code gets correct results."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return func(*tree_map(dense, args), **tree_map(dense, kwargs or {}))

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype, device: Any, **attributes: Any) -> Any:
        """A lazy tensor of this shape with the given attributes."""
        made = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)
        made.__dict__.update(attributes)
        return made

    def dense(self) -> torch.Tensor:
        """The values."""
        raise NotImplementedError


def dense(x: Any) -> Any:
    """The values of a lazy tensor; anything else unchanged."""
    return x.dense() if isinstance(x, Lazy) else x


class LazyKV(Lazy):
    """The result of `update()`: K or V of a layer, [B, H, seen + T, D] (or the slots of its window), not computed yet.
    The kvcompress attention function reads the layer from it; any other use stores the new tokens and decodes the
    layer.
    """

    block: Any  # see .layer.Block
    side: int

    @classmethod
    def pair(cls, shape: tuple[int, ...], dims: tuple[int, int], dtype: torch.dtype, device: Any, **block: Any) -> Any:
        """K and V [*shape, dim]."""
        return tuple(cls.of((*shape, dim), dtype, device, side=side, **block) for side, dim in enumerate(dims))

    def attend(self, query: torch.Tensor, mask: torch.Tensor | None, **options: Any) -> torch.Tensor | None:
        """`PagedLayer.attend` of the block; called on the K that the attention function receives."""
        return self.block.layer.attend(self.block, query, mask, **options)

    def dense(self) -> torch.Tensor:
        """The dense values; the new tokens are exact."""
        return self.block.dense_pair()[self.side]

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"LazyKV({'V' if self.side else 'K'}, shape={list(self.shape)})"


def lazy_pair(block: Any, cls: type[LazyKV] = LazyKV, dims: tuple[int, int] | None = None) -> Any:
    """Lazy K and V of a block of new tokens. dims: Dk and Dv, if other than those of its k and v."""
    k, slots = block.k, block.base - block.start + block.k.shape[2]
    return cls.pair((*k.shape[:2], slots), dims or (k.shape[3], block.v.shape[3]), k.dtype, k.device, block=block)
