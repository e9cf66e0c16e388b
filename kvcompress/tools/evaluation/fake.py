"""Analysis only: fake quantization. Caches with values rounded as by a scheme, but stored in full precision.

For schemes in tutorials that no page format implements (one scale for a whole tensor or head, static scales), and for
published methods (`published`). These caches are not smaller; `would_be_bytes` computes the size. Their rows are
labelled "fake".
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from ... import schemes
from ...quantization.calibration import Basis, Calibration, mapped
from ...quantization.tensor import QuantizedTensor, quantize
from .published import METHODS, Rounding

_GRAINS = {"token": "token_head", "group32": "group:32", "static": "tensor"}  # other names are equal


def fake_quantize(
    x: torch.Tensor, scheme: str, granularity: str, like: QuantizedTensor | None = None
) -> tuple[torch.Tensor, QuantizedTensor]:
    """x [B, H, T, D] rounded to `scheme` by `quantize`: (values in the dtype of x, the QuantizedTensor). like: use the
    scales of an earlier QuantizedTensor (static quantization)."""
    name = scheme if scheme in schemes.CODES else f"{scheme}_sym"
    static: dict[str, Any] = {} if like is None else {"scale": like.scales, "zero": like.zeros}
    made = quantize(x, name, _GRAINS.get(granularity, granularity), **static)
    return made.dequantize(), made


def rounding_of(what: str, key: bool) -> Rounding:
    """The rounding for K or V of a layer, by its name in strategies: SCHEME@GRANULARITY, or a method and its bits."""
    scheme, by, granularity = what.partition("@")
    if not by:
        return METHODS[what[:-1]](int(what[-1]), key)
    static: list[QuantizedTensor] = []

    def rounding(x: torch.Tensor) -> tuple[torch.Tensor, float]:
        values, made = fake_quantize(x, scheme, granularity, static[0] if static else None)
        if granularity == "static" and not static:
            static.append(made)
        return values, 8 * made.nbytes / x.numel()

    return rounding


class FakeQuantLayer(DynamicLayer):
    """Rounds full pages at the start of the next call, as paged caches do; in `basis`, if given."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, roundings: tuple[Rounding, Rounding], sinks: int, page_size: int, basis: Basis | None) -> None:
        super().__init__()
        self.roundings, self.sinks, self.page_size, self.basis = roundings, sinks, page_size, basis
        self.rounded, self.bytes = sinks, 0.0

    def _round_old(self) -> None:
        n = self.keys.shape[2]
        end = self.sinks + max(0, n - self.sinks) // self.page_size * self.page_size
        if end <= self.rounded:
            return
        for side, x in enumerate((self.keys, self.values)):
            old = x[:, :, self.rounded : end]
            if self.basis is None:
                near, bits = self.roundings[side](old.float())
            else:
                near, bits = self.roundings[side](mapped(old, self.basis[2 * side]))
                near = mapped(near, self.basis[2 * side + 1])
            x[:, :, self.rounded : end] = near
            self.bytes += old.numel() * bits / 8
        self.rounded = end

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.is_initialized and self.keys.numel():
            self._round_old()
        return super().update(key_states, value_states, *args, **kwargs)

    def would_be_bytes(self) -> int:
        """Size in bytes of codes, scales, and values in full precision."""
        if not self.is_initialized or not self.keys.numel():
            return 0
        n = self.keys.shape[2]
        sides = self.keys.numel() + self.values.numel()
        rounded = sides // n * (self.rounded - min(self.sinks, self.rounded))
        return round(self.bytes) + (sides - rounded) * self.keys.element_size()


class FakeQuantCache(Cache):
    """A DynamicCache with rounded values, for models with full-attention layers only."""

    def __init__(
        self, config: PreTrainedConfig, what: str, sinks: int, page_size: int, calibration: Any = None
    ) -> None:
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise ValueError(f"FakeQuantCache: expected a model with full attention only, got layers {sorted(kinds)}")
        measured = None if calibration is None else Calibration.of(calibration)
        self.fakes = [
            FakeQuantLayer((rounding_of(what, True), rounding_of(what, False)), sinks, page_size,
                           None if measured is None else measured.basis(i))
            for i in range(config.num_hidden_layers)
        ]  # fmt: skip
        super().__init__(layers=list(self.fakes))

    def would_be_bytes(self) -> int:
        """Size in bytes that the scheme would have, over all layers."""
        return sum(layer.would_be_bytes() for layer in self.fakes)

    def sealed_bits(self) -> float:
        """Bits per element of rounded values, metadata included."""
        rounded = [layer for layer in self.fakes if layer.rounded > layer.sinks]
        elements = sum((x.keys[:, :, x.sinks : x.rounded].numel() + x.values[:, :, x.sinks : x.rounded].numel())
                       for x in rounded)  # fmt: skip
        return 8 * sum(layer.bytes for layer in rounded) / elements if elements else 0.0
