"""Lazy: a tensor that is not yet computed."""

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
