"""Analysis only: caches whose values are rounded as a scheme would round them, and kept in full precision.

For what tutorials tabulate and no page format does (one scale for a whole tensor or head, static scales). Nothing gets
smaller; `would_be_bytes` is a formula. Rows made with it are labelled "fake".
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

_FLOATS = {"fp8_e4m3": (torch.float8_e4m3fn, 448.0), "fp8_e5m2": (torch.float8_e5m2, 57344.0)}
_SCALED_OVER = {  # dims of [B, H, T, groups, D / groups] that share a scale
    "tensor": (0, 1, 2, 3, 4),
    "static": (0, 1, 2, 3, 4),
    "head": (0, 2, 3, 4),
    "channel": (0, 2),
    "token": (3, 4),
    "group32": (4,),
}


def bits_of(scheme: str) -> int:
    """Bits of a code."""
    return 8 if scheme.startswith("fp8") else int(scheme[3])


def fake_quantize(
    x: torch.Tensor, scheme: str, granularity: str, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """x [B, H, T, D] rounded to `scheme`: (values in x's dtype, scale, number of scales and zero points).

    Integers are symmetric (scale absmax / (2^(bits-1) - 1)) or, with "_asym", scale and zero point from minimum and
    maximum; FP8 is scaled to its largest value and saturates. `scale` keeps a scale found before (static).
    Formulas: integer quantization arXiv 1712.05877; FP8 formats arXiv 2209.05433.
    """
    groups = x.shape[3] // 32 if granularity == "group32" else 1
    if granularity == "group32" and x.shape[3] % 32:
        raise ValueError(f"fake_quantize: group32: expected a head dim that is a multiple of 32, got {x.shape[3]}")
    y = x.float().unflatten(3, (groups, -1))
    dims, zero = _SCALED_OVER[granularity], 0.0
    top = 2.0 ** bits_of(scheme) - 1
    if scheme.endswith("_asym"):
        zero = y.amin(dims, keepdim=True)
        found = (y.amax(dims, keepdim=True) - zero) / top
    else:
        largest = _FLOATS[scheme][1] if scheme in _FLOATS else (top - 1) / 2
        found = y.abs().amax(dims, keepdim=True) / largest
    scale = found.clamp_min(2.0**-24) if scale is None else scale
    codes = (y - zero) / scale
    if scheme in _FLOATS:
        dtype, largest = _FLOATS[scheme]
        codes = codes.clamp(-largest, largest).to(dtype).float()
    elif scheme.endswith("_asym"):
        codes = codes.round().clamp(0, top)
    else:
        codes = codes.round().clamp(-(top - 1) / 2, (top - 1) / 2)
    values = (codes * scale + zero).flatten(3).to(x.dtype)
    return values, scale, scale.numel() * (2 if scheme.endswith("_asym") else 1)


class FakeQuantLayer(DynamicLayer):
    """Rounds pages that have filled, at the start of the next call, as the paged caches do."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, scheme: str, granularity: str, sinks: int, page_size: int) -> None:
        super().__init__()
        self.scheme, self.granularity, self.sinks, self.page_size = scheme, granularity, sinks, page_size
        self.rounded, self.scales = sinks, 0
        self.static: list[torch.Tensor | None] = [None, None]

    def _round_old(self) -> None:
        n = self.keys.shape[2]
        end = self.sinks + max(0, n - self.sinks) // self.page_size * self.page_size
        if end <= self.rounded:
            return
        for side, x in enumerate((self.keys, self.values)):
            old = x[:, :, self.rounded : end]
            values, scale, count = fake_quantize(old, self.scheme, self.granularity, self.static[side])
            if self.granularity == "static":
                self.static[side] = scale
            x[:, :, self.rounded : end] = values
            self.scales += count
        self.rounded = end

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.is_initialized and self.keys.numel():
            self._round_old()
        return super().update(key_states, value_states, *args, **kwargs)

    def would_be_bytes(self) -> int:
        """Codes, 16-bit scales, and what is left in full precision."""
        if not self.is_initialized or not self.keys.numel():
            return 0
        n = self.keys.shape[2]
        sides = self.keys.numel() + self.values.numel()
        rounded = sides // n * (self.rounded - min(self.sinks, self.rounded))
        raw = (sides - rounded) * self.keys.element_size()
        return rounded * bits_of(self.scheme) // 8 + 2 * self.scales + raw


class FakeQuantCache(Cache):
    """A DynamicCache whose values are rounded by `fake_quantize`. For models with full attention in every layer."""

    def __init__(self, config: PreTrainedConfig, scheme: str, granularity: str, sinks: int, page_size: int) -> None:
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise ValueError(f"FakeQuantCache: expected a model with full attention alone, got layers {sorted(kinds)}")
        args = (scheme, granularity, sinks, page_size)
        self.fakes = [FakeQuantLayer(*args) for _ in range(config.num_hidden_layers)]
        super().__init__(layers=list(self.fakes))

    def would_be_bytes(self) -> int:
        """Bytes that the scheme would take, over all layers."""
        return sum(layer.would_be_bytes() for layer in self.fakes)
