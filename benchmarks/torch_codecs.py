"""The stored formats in plain torch ops, as a careful user would write them, and quantizers of other libraries with
the same number of bits: the comparison for benchmarks/codecs.py. Each is a pair: quantize(x [B, H, T, D]) ->
object, dequantize(object) -> x."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Codec = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
EDGES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])


def pack(codes: Tensor, bits: int) -> Tensor:
    """Packs uint8 codes, 8 / bits per byte."""
    if bits == 8:
        return codes
    parts = codes.chunk(8 // bits, dim=-1)
    packed = parts[0]
    for p, part in enumerate(parts[1:], 1):
        packed = packed | part << bits * p
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return packed
    return torch.cat([packed >> bits * p & (1 << bits) - 1 for p in range(8 // bits)], dim=-1)


def symmetric(bits: int, dtype: torch.dtype) -> Codec:
    top, zero = 2 ** (bits - 1) - 1, 2 ** (bits - 1)

    def quantize(x: Tensor):
        scale = x.abs().amax(-1, keepdim=True).float().div_(top).clamp_(min=2**-24).half()
        codes = (x / scale.float()).round_().clamp_(-top, top).add_(zero).to(torch.uint8)
        return pack(codes, bits), scale

    def dequantize(stored):
        return (unpack(stored[0], bits).float().sub_(zero) * stored[1].float()).to(dtype)

    return quantize, dequantize


def asymmetric(bits: int, dtype: torch.dtype, group: int = 0, pages: bool = False) -> Codec:
    """A scale and zero point per row, per `group` dims, or per channel of 64 tokens (a page)."""
    top = 2**bits - 1

    def quantize(x: Tensor):
        shape = x.shape
        y = x.unflatten(-1, (-1, group)) if group else x.unflatten(2, (-1, 64)) if pages else x
        low, high = y.amin(-2 if pages else -1, True).float(), y.amax(-2 if pages else -1, True).float()
        scale = (high - low).div_(top).clamp_(min=2**-24).half()
        codes = (y - low).div_(scale.float()).round_().clamp_(0, top).to(torch.uint8)
        return pack(codes.view(shape), bits), scale, low.half(), y.shape

    def dequantize(stored):
        packed, scale, low, shape = stored
        codes = unpack(packed, bits)
        y = codes.view(shape).float().mul_(scale.float()).add_(low.float())
        return y.view(codes.shape).to(dtype)

    return quantize, dequantize


def small_float(type: torch.dtype, dtype: torch.dtype) -> Codec:
    most = torch.finfo(type).max

    def quantize(x: Tensor):
        scale = x.abs().amax(-1, keepdim=True).float().div_(most).clamp_(min=2**-24).half()
        return (x / scale.float()).clamp_(-most, most).to(type), scale

    def dequantize(stored):
        return (stored[0].float() * stored[1].float()).to(dtype)

    return quantize, dequantize


def hadamard(D: int) -> Tensor:
    h = torch.ones(1, 1)
    while len(h) < D:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h / D**0.5


def rotated(bits: int, dtype: torch.dtype, D: int) -> Codec:
    """Hadamard transform by matmul, uniform grid of c * rms, least-squares gain."""
    h, half, step = hadamard(D).to(dtype), 2 ** (bits - 1), 0.33 if bits == 4 else 1.0

    def quantize(x: Tensor):
        y = (x @ h).float()
        rms = y.square().mean(-1, keepdim=True).sqrt_()
        q = (y / (step * rms)).floor_().clamp_(-half, half - 1)
        level = q + 0.5
        gain = (y * level).sum(-1, keepdim=True) / level.square().sum(-1, keepdim=True)
        return pack(q.add_(half).to(torch.uint8), bits), gain.half()

    def dequantize(stored):
        y = unpack(stored[0], bits).float().sub_(half - 0.5).mul_(stored[1].float())
        return y.to(dtype) @ h

    return quantize, dequantize


def e2m1(group: int, dtype: torch.dtype) -> Codec:
    """nvfp4 (16 dims, e4m3 scale) and mxfp4 (32 dims, power of two)."""

    def quantize(x: Tensor):
        y = x.unflatten(-1, (-1, group)).float()
        a = y.abs().amax(-1, keepdim=True)
        if group == 16:
            stored = (a / 6).clamp_(2**-9, 448).to(torch.float8_e4m3fn)
            scale = stored.float()
        else:
            stored = a.clamp_(min=2**-100).log2_().floor_().sub_(2)
            scale = stored.exp2()
        y = y / scale
        codes = torch.bucketize(y.abs(), EDGES, out_int32=True).to(torch.uint8) | (y < 0).to(torch.uint8) << 3
        return pack(codes.flatten(-2), 4), stored

    def dequantize(packed):
        codes = unpack(packed[0], 4).unflatten(-1, (-1, group))
        scale = packed[1].float() if group == 16 else packed[1].exp2()
        y = torch.cat((LEVELS, -LEVELS))[codes.int()].mul_(scale)
        return y.flatten(-2).to(dtype)

    return quantize, dequantize


def torch_codec(name: str, D: int, dtype: torch.dtype) -> Codec | None:
    """None for raw."""
    table: dict[str, Callable[[], Codec]] = {
        "int8": lambda: symmetric(8, dtype),
        "int4_token": lambda: symmetric(4, dtype),
        "int8_asym": lambda: asymmetric(8, dtype),
        "int4_asym": lambda: asymmetric(4, dtype),
        "int2_asym": lambda: asymmetric(2, dtype),
        "int4_g32": lambda: asymmetric(4, dtype, group=32),
        "kivi4": lambda: asymmetric(4, dtype, pages=True),
        "kivi2": lambda: asymmetric(2, dtype, pages=True),
        "fp8_e4m3": lambda: small_float(torch.float8_e4m3fn, dtype),
        "fp8_e5m2": lambda: small_float(torch.float8_e5m2, dtype),
        "int4": lambda: rotated(4, dtype, D),
        "int2": lambda: rotated(2, dtype, D),
        "nvfp4": lambda: e2m1(16, dtype),
        "mxfp4": lambda: e2m1(32, dtype),
    }
    return table[name]() if name in table else None


# ------------------------------------------------------------------ peers


def quanto(bits: int, dtype: torch.dtype) -> Codec:
    """As transformers' QuantoQuantizedLayer calls it: groups of 64, asymmetric, axis 0."""
    q = importlib.import_module("optimum.quanto")
    qtype, optimizer = getattr(q, f"qint{bits}"), q.MaxOptimizer()

    def quantize(x: Tensor):
        scale, zero = optimizer(x, qtype, 0, 64)
        return q.quantize_weight(x, qtype, 0, scale, zero, 64)

    return quantize, lambda stored: stored.dequantize()


def hqq(bits: int, dtype: torch.dtype) -> Codec:
    """As transformers' HQQQuantizedLayer calls it: groups of 64, asymmetric, axis 1."""
    quantizer = importlib.import_module("hqq.core.quantize").Quantizer

    def quantize(x: Tensor):
        return quantizer.quantize(x, axis=1, device="cpu", compute_dtype=dtype, nbits=bits, group_size=64)

    return quantize, lambda stored: quantizer.dequantize(*stored)


def torchao_int8(dtype: torch.dtype) -> Codec:
    """A scale per row, as of torchao's int8 primitives."""
    q = importlib.import_module("torchao.quantization.quant_primitives")
    arguments = {"block_size": [1, 1, 1, 128]}

    def quantize(x: Tensor):
        scale, zero = q.choose_qparams_affine(x, q.MappingType.SYMMETRIC, target_dtype=torch.int8, **arguments)
        return q.quantize_affine(x, arguments["block_size"], scale, zero, torch.int8), scale, zero

    def dequantize(stored):
        return q.dequantize_affine(stored[0], arguments["block_size"], *stored[1:], torch.int8, output_dtype=dtype)

    return quantize, dequantize


def peers(dtype: torch.dtype) -> dict[str, tuple[str, Callable[[], Codec]]]:
    """Name of the quantizer -> (the closest format with as many bits, how to create it); creating it may raise."""
    return {
        "torchao int8 per row": ("int8", lambda: torchao_int8(dtype)),
        "quanto 4 bit, groups of 64": ("int4_g32", lambda: quanto(4, dtype)),
        "quanto 2 bit, groups of 64": ("int2_asym", lambda: quanto(2, dtype)),
        "hqq 8 bit, groups of 64": ("int8_asym", lambda: hqq(8, dtype)),
        "hqq 4 bit, groups of 64": ("int4_g32", lambda: hqq(4, dtype)),
        "hqq 2 bit, groups of 64": ("int2_asym", lambda: hqq(2, dtype)),
    }
