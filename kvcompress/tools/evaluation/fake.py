"""Analysis only: caches whose values are rounded as a scheme would round them, and kept in full precision.

For what tutorials tabulate and no page format does (one scale for a whole tensor or head, static scales). Nothing gets
smaller; `would_be_bytes` is a formula. Rows made with it are labelled "fake".
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from ... import schemes
from ...quantization.tensor import QuantizedTensor, quantize

_GRAINS = {"token": "token_head", "group32": "group:32", "static": "tensor"}  # others are called the same


def fake_quantize(
    x: torch.Tensor, scheme: str, granularity: str, like: QuantizedTensor | None = None
) -> tuple[torch.Tensor, QuantizedTensor]:
    """x [B, H, T, D] rounded to `scheme` by `quantize`: (values in x's dtype, what `quantize` gave). like: an earlier
    one whose scales are used (static)."""
    name = scheme if scheme in schemes.CODES else f"{scheme}_sym"
    static: dict[str, Any] = {} if like is None else {"scale": like.scales, "zero": like.zeros}
    made = quantize(x, name, _GRAINS.get(granularity, granularity), **static)
    return made.dequantize(), made


class FakeQuantLayer(DynamicLayer):
    """Rounds pages that have filled, at the start of the next call, as the paged caches do."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, scheme: str, granularity: str, sinks: int, page_size: int) -> None:
        super().__init__()
        self.scheme, self.granularity, self.sinks, self.page_size = scheme, granularity, sinks, page_size
        self.rounded, self.bytes = sinks, 0
        self.static: list[QuantizedTensor | None] = [None, None]

    def _round_old(self) -> None:
        n = self.keys.shape[2]
        end = self.sinks + max(0, n - self.sinks) // self.page_size * self.page_size
        if end <= self.rounded:
            return
        for side, x in enumerate((self.keys, self.values)):
            old = x[:, :, self.rounded : end]
            values, made = fake_quantize(old, self.scheme, self.granularity, self.static[side])
            if self.granularity == "static":
                self.static[side] = self.static[side] or made
            x[:, :, self.rounded : end] = values
            self.bytes += made.nbytes
        self.rounded = end

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.is_initialized and self.keys.numel():
            self._round_old()
        return super().update(key_states, value_states, *args, **kwargs)

    def would_be_bytes(self) -> int:
        """Codes, scales, and what is left in full precision."""
        if not self.is_initialized or not self.keys.numel():
            return 0
        n = self.keys.shape[2]
        sides = self.keys.numel() + self.values.numel()
        rounded = sides // n * (self.rounded - min(self.sinks, self.rounded))
        return self.bytes + (sides - rounded) * self.keys.element_size()


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
