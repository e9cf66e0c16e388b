"""Quantized tensors without pages, for analysis and for use in other engines."""

from __future__ import annotations

import hashlib
import json
import math
import os
from typing import Any

import torch
from torch import Tensor

from .. import checks, files, ops, schemes

_NONE = torch.empty(0, dtype=torch.float32, device="cpu")
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_KIND, _VERSION = "kvcompress.QuantizedTensor", "1"


def _canonical(shape: torch.Size | tuple[int, ...]) -> tuple[int, int, int, int]:
    """[..., D] as [B, H, T, D]: with leading ones, or with the leading dimensions flattened."""
    full = (1, 1, 1, *shape) if len(shape) < 4 else tuple(shape)
    return math.prod(full[:-3]), full[-3], full[-2], full[-1]


def _given(name: str, value: Any, shape: tuple[int, ...]) -> Tensor:
    """`value` as float32 of `shape`; an empty tensor for None."""
    if value is None:
        return _NONE
    given = checks.as_tensor(value, torch.float32)
    try:
        return given.expand(shape).contiguous()
    except RuntimeError:
        raise ValueError(
            f"quantize: {name}: expected a number or a tensor that broadcasts to {list(shape)}, got {list(given.shape)}"
        ) from None


def quantize(
    x: Tensor,
    format: str,
    granularity: str | None = None,
    *,
    packing: str = "planes",
    scale: Any = None,
    zero: Any = None,
    tensor_scale: Any = None,
) -> QuantizedTensor:
    """Quantizes x to a `QuantizedTensor`; its `dequantize()` returns the values.

    Args:
        x: [..., D] float32, float16 or bfloat16, read as [B, H, T, D]: missing dimensions are 1, and of more than four
            the leading ones are flattened into B.
        format: a scheme (`int8`, `int8_asym`, `int4_sym`, `int4_asym`, `int3_sym`, `int3_asym`, `int2_sym`,
            `int2_asym`, `fp8_e4m3`, `fp8_e5m2`, `nvfp4`, `mxfp4`), or a page format (`int4`, `int2`, `int4_token`,
            `int4_g32`, `kivi4`, `kivi2`) at the granularity of its rows. A value is level * scale (+ zero).
        granularity: the elements that share a scale: `tensor`; `head` (over all sequences); `token` (over its heads);
            `token_head` (one row; the default); `channel` (one dim of a head, over sequences and tokens); `group:N` (N
            dims of a row); `block` (`group:16` for nvfp4, else `group:32`).
        packing: order of 4- and 2-bit codes in a byte: `planes` (byte j holds dims j, D/n + j, .., lowest bits first),
            or n adjacent dims, the first in the lowest bits (`low_first`) or the highest (`high_first`).
        scale, zero: given scales and zero points (static quantization) instead of those computed from x: numbers, or
            tensors that broadcast to [B or 1, H or 1, T or 1, scales per row]. Rounded to the dtype they are stored in.
            `zero` is the value of code 0.
        tensor_scale: second-level fp32 scale of nvfp4, 2^-100 to 2^117; True: absmax / (6 * 448). Without one, nvfp4
            represents 2^-11 to 2688: smaller values become 0, larger ones saturate.

    Raises ValueError for NaN or Inf in x, an unknown name, an unsupported D; TypeError for an unsupported dtype.
    Sources: integers arXiv 1712.05877, FP8 2209.05433, KIVI 2402.02750, OCP MX 1.0; docs/ops.md for the arithmetic.
    """
    grain = schemes.grain(format, granularity, packing)
    if not isinstance(x, Tensor) or x.dtype not in _DTYPES.values():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"quantize: x: expected a float32, float16 or bfloat16 tensor, got {got}")
    if x.dim() == 0 or x.numel() == 0:
        raise ValueError(f"quantize: x: expected [..., D] with at least one element, got shape {list(x.shape)}")
    x4 = x.detach().reshape(_canonical(x.shape))
    if x4.stride(3) != 1:
        x4 = x4.contiguous()
    if grain.scheme in schemes.ROTATED:
        if not (scale is None and zero is None and tensor_scale is None):
            raise ValueError(
                f"quantize: {format}: expected no scale, zero or tensor_scale, which this format fits itself, got one"
            )
        codes, scales = ops.quantize(x4, grain.scheme)
        return QuantizedTensor(grain, x.shape, x.dtype, codes, scales.unsqueeze(3))
    shape = grain.scale_shape(*x4.shape)
    if tensor_scale is not None and grain.scheme != "nvfp4":
        raise ValueError(f"quantize: {format}: tensor_scale: expected None, got one; only nvfp4 has a tensor scale")
    if tensor_scale is True:  # the op reports NaN and Inf
        tensor_scale = (x4.abs().amax().float() / (6 * 448)).nan_to_num(1.0, 1.0).clamp_min(2.0**-100)
    factor = _given("tensor_scale", tensor_scale, (1,))
    given = _given("scale", scale, shape), _given("zero", zero, shape)
    codes, scales, zeros = ops.quantize_by(x4, *given, factor, *grain.codes)
    return QuantizedTensor(
        grain, x.shape, x.dtype, codes, scales, zeros if grain.zero_point else None, factor if factor.numel() else None
    )


def _planes(codes: Tensor, bits: int) -> Tensor:
    return torch.cat([codes >> shift & ((1 << bits) - 1) for shift in range(0, 8, bits)], -1)


class QuantizedTensor:
    """Codes and scales of one tensor, created by `kvcompress.quantize`. Immutable.

    Attributes:
        grain: scheme, granularity, group, packing (`kvcompress.schemes.Grain`).
        shape: shape of the original tensor, [..., D].
        dtype: default dtype of `dequantize`.
        codes: uint8 [B, H, T, D * bits / 8].
        scales: float16 [B or 1, H or 1, T or 1, scales per row], or uint8 with the bits of e4m3 (nvfp4) or e8m0
            (mxfp4).
        zeros: float16 of the same shape, the value of code 0; None for a symmetric scheme.
        tensor_scale: float32 [1], the second-level scale of nvfp4; None for others.
    """

    def __init__(
        self,
        grain: schemes.Grain,
        shape: torch.Size | tuple[int, ...],
        dtype: torch.dtype,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None = None,
        tensor_scale: Tensor | None = None,
    ) -> None:
        self.grain, self.shape, self.dtype = grain, torch.Size(shape), dtype
        self.codes, self.scales, self.zeros, self.tensor_scale = codes, scales, zeros, tensor_scale

    def _tensors(self) -> dict[str, Tensor]:
        named = {"codes": self.codes, "scales": self.scales, "zeros": self.zeros, "tensor_scale": self.tensor_scale}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    # ------------------------------------------------------------------ size

    @property
    def parts(self) -> dict[str, int]:
        """Size in bytes of codes and scales, and of zeros and tensor_scale if present."""
        return {name: tensor.numel() * tensor.element_size() for name, tensor in self._tensors().items()}

    @property
    def nbytes(self) -> int:
        """Total size in bytes."""
        return sum(self.parts.values())

    @property
    def effective_bits(self) -> float:
        """Bits per element, scales and zero points included."""
        return 8 * self.nbytes / self.shape.numel()

    # ------------------------------------------------------------------ values

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values, a tensor of `shape` and `dtype` (default: self.dtype), clamped to the range of the dtype.

        Raises ValueError unless the tensors are on the CPU; TypeError for a dtype other than float32, float16 and
        bfloat16.
        """
        dtype = self._dtype(self.dtype if dtype is None else dtype)
        if self.grain.scheme in schemes.ROTATED:
            values = ops.dequantize(self.codes, self.scales.squeeze(3), self.grain.scheme)
        else:
            parts = (self.codes, self.scales, self.zeros, self.tensor_scale)
            values = ops.dequantize_by(*(_NONE if x is None else x.contiguous() for x in parts), *self.grain.codes)
        most = torch.finfo(dtype).max
        return values.clamp(-most, most).to(dtype).reshape(self.shape)

    def unpacked(self) -> Tensor:
        """Unpacked codes, one per byte: uint8 [B, H, T, D]. Symmetric integers are offset by 2^(bits-1)."""
        bits, codes = self.grain.bits, self.codes
        if bits == 8:
            return codes
        if bits == 3:
            low, high = codes.tensor_split([codes.shape[3] * 2 // 3], 3)
            return _planes(low, 2) | _planes(high, 1) << 2
        if self.grain.packing == "planes":
            return _planes(codes, bits)
        shifts = range(0, 8, bits) if self.grain.packing == "low_first" else range(8 - bits, -1, -bits)
        return torch.stack([codes >> shift & ((1 << bits) - 1) for shift in shifts], -1).flatten(3)

    @staticmethod
    def _dtype(dtype: torch.dtype) -> torch.dtype:
        if dtype not in _DTYPES.values():
            raise TypeError(f"dtype: expected float32, float16 or bfloat16, got {dtype}")
        return dtype

    def _with(self, **changes: Any) -> QuantizedTensor:
        fields = {"grain": self.grain, "shape": self.shape, "dtype": self.dtype, **self._tensors()}
        return QuantizedTensor(**{**fields, **changes})

    def to(
        self, dtype: torch.dtype | torch.device | str | None = None, device: torch.device | str | None = None
    ) -> QuantizedTensor:
        """A copy with another dtype to dequantize to, or on another device; arguments as of `Tensor.to`. Raises
        TypeError for a dtype other than float32, float16, bfloat16."""
        if isinstance(dtype, (torch.device, str)):
            dtype, device = None, dtype
        moved = self._tensors() if device is None else {name: x.to(device) for name, x in self._tensors().items()}
        return self._with(dtype=self.dtype if dtype is None else self._dtype(dtype), **moved)

    def tokens(self, start: int, stop: int) -> QuantizedTensor:
        """Tokens [start, stop) of the second to last dimension, as views of codes and of scales (if each token has its
        own). `effective_bits` of the slice includes all shared scales.

        Raises ValueError unless 0 <= start < stop <= T and the original tensor had a token dimension.
        """
        T = self.codes.shape[2]
        if len(self.shape) < 2 or not 0 <= start < stop <= T:
            raise ValueError(f"tokens: expected 0 <= start < stop <= {T} of a [.., T, D], got {start}, {stop}")
        by_token = {name: x for name, x in self._tensors().items() if x.dim() == 4 and x.shape[2] == T}
        cut = {name: x[:, :, start:stop] for name, x in by_token.items()}
        return self._with(shape=(*self.shape[:-2], stop - start, self.shape[-1]), **cut)

    # ------------------------------------------------------------------ files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a safetensors file for `QuantizedTensor.load`, atomically. Raises OSError."""
        from safetensors.torch import save

        about = {"kind": _KIND, "version": _VERSION, "dtype": str(self.dtype).removeprefix("torch."),
                 "shape": json.dumps(list(self.shape)), "scheme": self.grain.scheme, "granularity": self.grain.label,
                 "packing": self.grain.packing, "checksum": _checksum(self._tensors())}  # fmt: skip
        with files.replacing(checks.path("QuantizedTensor: save", path)) as file:
            file.write(save({name: x.contiguous() for name, x in self._tensors().items()}, about))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> QuantizedTensor:
        """Loads a file that `save` wrote. Raises OSError if it cannot be read, ValueError if it is invalid."""

        def refuse(got: str) -> ValueError:
            return ValueError(f"QuantizedTensor.load: {path}: expected a file that save() wrote, got {got}")

        with files.safetensors(checks.path("QuantizedTensor: load", path), refuse) as file:
            about = file.metadata() or {}
            if len(file.keys()) > 4:
                raise refuse(f"{len(file.keys())} tensors")
            # Copies: the file may be changed or truncated after these checks.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        if about.get("kind") != _KIND:
            raise refuse("a safetensors file without a quantized tensor")
        if about.get("version") != _VERSION:
            raise refuse(f"version {about.get('version')}; this kvcompress reads version {_VERSION}")
        try:
            dtype = _DTYPES[about["dtype"]]
            shape = tuple(json.loads(about["shape"]))
            grain = schemes.grain(about["scheme"], about["granularity"], about["packing"])
            if not shape or not all(type(n) is int and n > 0 for n in shape):
                raise ValueError(f"shape {shape}")
        except (KeyError, ValueError, TypeError) as error:
            raise refuse(f"damaged metadata ({error})") from None
        if about.get("checksum", known := _checksum(tensors)) != known:  # optional: other writers may omit it
            raise refuse("a damaged file (wrong checksum)")
        return cls(grain, shape, dtype, **_checked(grain, shape, tensors, refuse))

    def __repr__(self) -> str:
        g = self.grain
        packing = f", packing={g.packing!r}" if g.packing != "planes" else ""
        return (
            f"QuantizedTensor({list(self.shape)}, {g.scheme!r}, {g.label!r}{packing}, {str(self.dtype)[6:]}, "
            f"{self.nbytes} bytes, {self.effective_bits:.4g} bits/element)"
        )


def _checksum(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].cpu().contiguous().reshape(-1).numpy().data)
    return digest.hexdigest()


def _checked(
    grain: schemes.Grain, shape: tuple[int, ...], tensors: dict[str, Tensor], refuse: Any
) -> dict[str, Tensor]:
    """The tensors, checked against shapes and dtypes that the metadata implies."""
    B, H, T, D = _canonical(shape)
    scales = grain.scale_shape(B, H, T, D), torch.uint8 if grain.block_scale else torch.float16
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "codes": ((B, H, T, D * grain.bits // 8), torch.uint8),
        "scales": scales,
    }
    if grain.zero_point:
        expected["zeros"] = scales
    if grain.scheme == "nvfp4" and "tensor_scale" in tensors:
        expected["tensor_scale"] = (1,), torch.float32
    got = {name: (tuple(x.shape), x.dtype) for name, x in tensors.items()}
    if got != expected:
        raise refuse(f"tensors {got} where its metadata says {expected}")
    if not all(x.isfinite().all() for x in tensors.values() if x.dtype != torch.uint8):
        raise refuse("scales that are not finite")
    return tensors
