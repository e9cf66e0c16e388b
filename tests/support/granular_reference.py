"""Quantization with any granularity, reimplemented as NumPy reductions over named axes. Stored values only, no
packing."""

import numpy as np
from codec_reference import E2M1, E5M2, TABLE, F, nearest, ref_e4m3, ref_scale

# name: (bits, coding, group it is made of)
SCHEMES = {
    "int8": (8, "int", 0),
    "int8_asym": (8, "uint", 0),
    "int4_sym": (4, "int", 0),
    "int4_asym": (4, "uint", 0),
    "int3_sym": (3, "int", 0),
    "int3_asym": (3, "uint", 0),
    "int2_sym": (2, "int", 0),
    "int2_asym": (2, "uint", 0),
    "fp8_e4m3": (8, "e4m3", 0),
    "fp8_e5m2": (8, "e5m2", 0),
    "nvfp4": (4, "e2m1", 16),
    "mxfp4": (4, "e2m1", 32),
}
# axes of [B, H, T, groups, dims] that share a scale
AXES = {
    "tensor": (0, 1, 2, 3, 4),
    "head": (0, 2, 3, 4),
    "token": (1, 3, 4),
    "token_head": (3, 4),
    "channel": (0, 2, 4),
    "group": (4,),
}


def dims_of(granularity: str, D: int) -> int:
    """Number of dims of the last axis."""
    kind, _, number = granularity.partition(":")
    return {"channel": 1, "group": int(number or 1)}.get(kind, D)


def pairs() -> list[tuple[str, str]]:
    """Every scheme with every granularity that it supports."""
    every = ("tensor", "head", "token", "token_head", "channel", "group:8", "group:32")
    return [(s, g) for s, (_, _, own) in SCHEMES.items() for g in ((f"group:{own}",) if own else every)]


def ref_quantize_by(
    x: np.ndarray, scheme: str, granularity: str, factor: float = 1.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray]:
    """fp32 x [B, H, T, D] -> codes uint8 [B, H, T, D], stored scales and zero points, float64 values. Scales have the
    shape [B or 1, H or 1, T or 1, groups]. Every rounding step is fp32 or fp16, as specified."""
    bits, coding, group = SCHEMES[scheme]
    n, axes = dims_of(granularity, x.shape[3]), AXES[granularity.partition(":")[0]]
    y = x.reshape(*x.shape[:3], -1, n)
    zeros = None
    if coding == "uint":
        low = np.clip(y.min(axes, keepdims=True), -65504, 65504).astype(np.float16)
        span = y.max(axes, keepdims=True) - low.astype(F)
        some, a = span > 0, span / F(2**bits - 1)
        zeros = low[..., 0]
        y = y - low.astype(F)
    else:
        a = np.abs(y).max(axes, keepdims=True)
        some = a > 0
        top = {"int": 2 ** (bits - 1) - 1, "e4m3": 448, "e5m2": 57344, "e2m1": 6}[coding]
        exponent = np.frexp(a.astype(np.float64))[1] - 3  # floor(log2) - 2
        a = a / F(top) / F(factor)
    if coding == "e2m1" and group == 16:
        stored = np.where(some, np.maximum(ref_e4m3(a), 1), 0).astype(np.uint8)
        value = TABLE[stored].astype(F) * F(factor)
    elif coding == "e2m1":
        stored = np.where(some, np.clip(exponent + 127, 1, 254), 1).astype(np.uint8)
        value = (2.0 ** (stored - 127.0)).astype(F)
    else:
        stored = np.where(some, ref_scale(a), np.float16(0))
        value = stored.astype(F)
    inverse = np.where(value > 0, F(1) / np.where(value > 0, value, F(1)), F(0))
    scaled = (y * inverse).reshape(x.shape)
    if coding == "int":
        half = 2 ** (bits - 1)
        codes = (np.clip(np.rint(scaled), -(half - 1), half - 1) + half).astype(np.uint8)
        level = codes.astype(np.float64) - half
    elif coding == "uint":
        codes = np.clip(np.rint(scaled), 0, 2**bits - 1).astype(np.uint8)
        level = codes.astype(np.float64)
    else:
        grid = {"e4m3": TABLE[:0x7F], "e5m2": E5M2, "e2m1": E2M1}[coding]
        sign = 8 if coding == "e2m1" else 128
        codes = nearest(scaled, grid, sign)
        if coding == "e4m3":  # zero groups have no sign
            codes = np.where(np.broadcast_to(some, y.shape).reshape(x.shape), codes, np.uint8(0))
        level = grid[codes & (sign - 1)] * np.where(codes & sign, -1.0, 1.0)
    values = level.reshape(y.shape) * value.astype(np.float64)
    if zeros is not None:
        values = values + zeros[..., None].astype(np.float64)
    return codes, stored[..., 0], zeros, values.reshape(x.shape)


def ref_pack(codes: np.ndarray, bits: int, packing: str) -> np.ndarray:
    """Codes, one per byte [..., D], to the stored bytes, bit by bit from the definition."""
    if bits == 8:
        return codes
    D = codes.shape[-1]
    out = np.zeros((*codes.shape[:-1], D * bits // 8), np.uint8)
    n = 8 // bits
    for d in range(D):
        code = codes[..., d]
        if bits == 3:  # the low two bits in planes of D / 4 bytes, then the third in planes of D / 8
            out[..., d % (D // 4)] |= (code & 3) << 2 * (d // (D // 4))
            out[..., D // 4 + d % (D // 8)] |= (code >> 2) << d // (D // 8)
        elif packing == "planes":
            out[..., d % (D // n)] |= code << bits * (d // (D // n))
        else:
            slot = d % n if packing == "low_first" else n - 1 - d % n
            out[..., d // n] |= code << bits * slot
    return out
