"""Lazy: a tensor that is not yet computed; LazyKV: K or V of a layer, which a cache hands to the attention function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map


class Lazy(torch.Tensor):
    """Who knows the class takes what it needs out of its attributes. Any other operation computes the values (`dense`)
    and goes on with them, so code that knows nothing of it still computes the right thing."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return func(*tree_map(dense, args), **tree_map(dense, kwargs or {}))

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype, device: Any, **attributes: Any) -> Any:
        """One of that shape that knows the attributes."""
        made = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)
        made.__dict__.update(attributes)
        return made

    def dense(self) -> torch.Tensor:
        """The values."""
        raise NotImplementedError


def dense(x: Any) -> Any:
    """The values of what is lazy; anything else as it is."""
    return x.dense() if isinstance(x, Lazy) else x


class LazyKV(Lazy):
    """What `update()` hands to the attention function: K or V of a layer, [B, H, seen + T, D] (or the slots of its
    window), not yet computed. The kvcompress attention function takes the layer out of it; whatever else uses it stores
    the new tokens and decodes the layer.
    """

    block: Any  # see .layer.Block
    side: int

    @classmethod
    def pair(cls, shape: tuple[int, ...], dims: tuple[int, int], dtype: torch.dtype, device: Any, **block: Any) -> Any:
        """K and V [*shape, dim]."""
        return tuple(cls.of((*shape, dim), dtype, device, side=side, **block) for side, dim in enumerate(dims))

    def attend(self, query: torch.Tensor, mask: torch.Tensor | None, **options: Any) -> torch.Tensor | None:
        """See PagedLayer.attend; of the K that the attention function got."""
        return self.block.layer.attend(self.block, query, mask, **options)

    def dense(self) -> torch.Tensor:
        """The dense values, own tokens exact."""
        return self.block.dense_pair()[self.side]

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"LazyKV({'V' if self.side else 'K'}, shape={list(self.shape)})"


def lazy_pair(block: Any, cls: type[LazyKV] = LazyKV, dims: tuple[int, int] | None = None) -> Any:
    """Lazy K and V of a block of new tokens, with the dims of its k and v, or `dims`."""
    k, slots = block.k, block.base - block.start + block.k.shape[2]
    return cls.pair((*k.shape[:2], slots), dims or (k.shape[3], block.v.shape[3]), k.dtype, k.device, block=block)
