"""Checks of arguments that the ops cannot check, or only too late, with their error messages (expected, got, hint)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad

from . import _C

_LARGEST, _LONGEST = 1e38, 2**62
_DEVICES = ("cpu", "cuda")  # whose tensors hold data


class ProcessBound:
    """Mixin for objects that cannot leave this process (pages, files, threads): pickling raises a TypeError that
    suggests `instead`, and so does copying, unless the class defines it."""

    def __init_subclass__(cls, instead: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._instead = instead or cls._instead

    _instead = ""

    def __reduce_ex__(self, protocol: Any) -> Any:
        acts = "pickled" if hasattr(self, "__deepcopy__") else "copied or pickled"
        raise TypeError(f"{type(self).__name__}: cannot be {acts} (torch.save pickles too); {self._instead}")


class InstanceProperty(property):
    """A property with a clear error if it is read from the class instead of an object."""

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None and owner is not None:
            name = owner.__name__
            raise AttributeError(f"expected a cache, such as {name}(model.config), got the class {name}")
        return super().__get__(instance, owner)


def integer(name: str, value: Any, least: int, most: int = _LONGEST) -> int:
    """`value` as an int, checked to be from `least` to `most`."""
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, (int, np.integer))):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if not least <= value <= most:
        bound = f"at least {least}" if value < least else f"at most {most}"
        raise ValueError(f"{name}: expected {bound}, got {value}")
    return int(value)


def path(who: str, value: Any) -> Path:
    """`value`, the path of a file."""
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str):
        raise TypeError(f"{who}: path: expected the path of a file (str or pathlib.Path), got {type(value).__name__}")
    if not Path(value).name:
        raise ValueError(f"{who}: path: expected the path of a file, got {os.fspath(value)!r}, which has no file name")
    return Path(value)


def cropped(tokens_to_remove: Any) -> int:
    """The argument of `crop` (or a tensor of one element): 0, or -n to remove the last n slots."""
    one = isinstance(tokens_to_remove, torch.Tensor) and tokens_to_remove.numel() == 1
    removed = integer("crop: tokens_to_remove", tokens_to_remove.item() if one else tokens_to_remove, -_LONGEST)
    if removed > 0:
        raise ValueError(f"crop: expected 0 or a negative number, got {removed}; -n removes the last n slots")
    return removed


def flag(name: str, value: Any) -> bool:
    """`value`, a bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: expected True or False, got {value!r}")
    return bool(value)


def number(name: str, value: Any, least: float = -_LARGEST, most: float = _LARGEST) -> float:
    """`value` (or a tensor of one element) as a float, checked to be from `least` to `most`."""
    if type(value) is not float and (
        isinstance(value, bool) or not isinstance(value, (int, float, np.floating, torch.Tensor))
    ):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise ValueError(f"{name}: expected a number, got a tensor {list(value.shape)}")
    if not least <= value <= most:  # False for NaN
        raise ValueError(f"{name}: expected a number from {least:g} to {most:g}, got {value}")
    return float(value)


def listed(name: str, value: Any, what: str) -> list[Any]:
    """`value`, a sequence of `what` but not a str, as a list."""
    if isinstance(value, (str, bytes)) or not hasattr(value, "__iter__"):
        raise TypeError(
            f"{name}: expected a list of {what}, got {value if isinstance(value, str) else type(value).__name__}"
        )
    return list(value)


def choice(name: str, value: Any, known: tuple[str, ...]) -> str:
    """`value`, checked to be one of `known`."""
    if value not in known:
        raise ValueError(f"{name}: expected one of {', '.join(known)}, got {value!r}")
    return value


def pool(given: Any) -> Any:
    """A `_C.Pool`, or None."""
    if given is not None and not isinstance(given, _C.Pool):
        raise TypeError(f"pool: expected a kvcompress._C.Pool, got {type(given).__name__}")
    return given


def policy(given: Any) -> None:
    """A policy, or None."""
    if isinstance(given, type):
        raise TypeError(
            f"policy: expected a policy, such as kvcompress.H2O(budget=512), got the class {given.__name__}"
        )
    if given is not None and not hasattr(given, "needs_attention"):
        got = repr(given) if isinstance(given, str) else type(given).__name__
        raise TypeError(f"policy: expected one of kvcompress.policies, such as kvcompress.H2O(budget=512), got {got}")


def row_index(index: Any, batch: int) -> np.ndarray:
    """Row numbers as contiguous int64, from a tensor, array or list; a bool mask selects its true rows."""
    array = index.detach().cpu().numpy() if isinstance(index, torch.Tensor) else np.asarray(index)
    if array.ndim != 1:
        raise ValueError(f"select: expected a 1-D index of rows, got {array.ndim} dimensions")
    if array.dtype == bool:
        if len(array) != batch:
            raise ValueError(f"select: expected a mask of {batch} rows, got {len(array)}")
        array = np.flatnonzero(array)
    elif array.size and array.dtype.kind not in "iu":
        raise TypeError(f"select: expected integers, got {array.dtype}")
    return np.ascontiguousarray(array, dtype=np.int64)


def attention(
    q: torch.Tensor, dim: int, device: torch.device, scale: float, window: int, softcap: float
) -> tuple[float, int, float]:
    """(scale, window, softcap); q is a `tensor` [B, Hq, T, dim]."""
    usual = (
        not transforms() and isinstance(q, torch.Tensor) and q.dim() == 4 and q.shape[3] == dim and q.device == device
        and q.numel() and not q.requires_grad and type(scale) is float and type(window) is int
        and type(softcap) is float
    )  # fmt: skip
    if usual and -_LARGEST <= scale <= _LARGEST and 0 <= window <= _LONGEST and 0 <= softcap <= _LARGEST:
        return scale, window, softcap  # fast path, once per layer and step
    tensor("q", q, "[B, Hq, T, Dk]", device)
    if q.shape[3] != dim:
        raise ValueError(f"PagedKV: q: expected the last dim of k (latents: of k and v), {dim}, got {list(q.shape)}")
    return number("scale", scale), integer("window", window, 0), number("softcap", softcap, 0)


def transforms() -> bool:
    """True inside torch.func transforms (vmap, jvp, grad) or forward-mode AD."""
    if torch.compiler.is_dynamo_compiling():  # it has its own stacks
        return False
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def tensor(name: str, x: Any, shape: str, device: torch.device) -> None:
    """Checks that x is a dense, non-empty 4-D tensor on the device that does not require grad."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"PagedKV: {name}: expected a tensor {shape}, got {type(x).__name__}")
    if transforms():
        mapped = torch._C._functorch.is_functorch_wrapped_tensor(x)
        if mapped or (forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None):
            what = "of torch.func (vmap, jvp, grad)" if mapped else "with a tangent (forward-mode AD)"
            raise ValueError(
                f"PagedKV: {name}: expected a plain tensor, got one {what}, which pages do not support; run the model "
                "without a KVCache there, and pass a batch instead of using vmap"
            )
    if x.dim() != 4:
        raise ValueError(f"PagedKV: {name}: expected {shape}, got {x.dim()} dimensions {list(x.shape)}")
    if x.device != device and (x.device.type != device.type or device.index is not None):
        raise ValueError(f"PagedKV: {name}: expected a tensor on {device}, got one on {x.device}")
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"PagedKV: {name}: expected a tensor outside autograd, got one that requires grad; "
            "run the model under torch.no_grad() or torch.inference_mode()"
        )
    if x.shape[0] == 0 or x.shape[2] == 0:
        raise ValueError(f"PagedKV: {name}: expected at least 1 row and 1 token, got {list(x.shape)}")


def side(
    name: str, x: torch.Tensor, letters: str, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    """Checks that x is K or V: as `tensor`, with the given shape and dtype, and a contiguous last dim."""
    usual = isinstance(x, torch.Tensor) and x.shape == shape and x.dtype == dtype and x.stride(3) == 1
    if usual and not transforms() and x.device == device and not x.requires_grad and x.numel():
        return  # fast path, twice per layer and step
    tensor(name, x, letters, device)
    if x.shape != shape:
        raise ValueError(f"PagedKV: {name}: expected {list(shape)}, got {list(x.shape)}")
    if x.dtype != dtype:
        raise TypeError(f"PagedKV: {name}: expected {dtype}, got {x.dtype}; convert it or make a new cache")
    if x.stride(3) != 1 and shape[3] > 1:
        raise ValueError(
            f"PagedKV: {name}: expected a contiguous last dim, got stride {x.stride(3)}; use .contiguous()"
        )


def own_mask(mask: Any, batch: int, T: int) -> torch.Tensor | None:
    """mask as contiguous bool [B, T]; None if it has no padding."""
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"PagedKV: mask: expected a bool tensor [B, T], got {type(mask).__name__}")
    if mask.shape != (batch, T):
        raise ValueError(f"PagedKV: mask: expected [B, T] = {[batch, T]}, got {list(mask.shape)}")
    if mask.device.type not in _DEVICES:
        raise ValueError(f"PagedKV: mask: expected a tensor on cpu, got one on {mask.device}")
    mask = mask.to("cpu", torch.bool)
    return None if bool(mask.all()) else mask.contiguous()


def aux(s_aux: Any, heads: int) -> torch.Tensor:
    """s_aux as contiguous fp32 [Hq]."""
    if not isinstance(s_aux, torch.Tensor) or s_aux.shape != (heads,):
        got = list(s_aux.shape) if isinstance(s_aux, torch.Tensor) else type(s_aux).__name__
        raise ValueError(f"PagedKV: s_aux: expected a tensor [Hq] = [{heads}], got {got}")
    return s_aux.detach().float().contiguous()


def as_tensor(x: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """x as a tensor: a tensor stays on its device, other data goes to the CPU, regardless of the default device."""
    return torch.as_tensor(x, dtype=dtype, device=x.device if isinstance(x, torch.Tensor) else "cpu")
