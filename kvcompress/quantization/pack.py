"""Conversion of other engines' quantized blocks to pages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import checks, formats, ops

_FORMATS = {torch.int8: "int8", torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}


def _codes(name: str, blocks: Tensor, format: str | None) -> tuple[Tensor, str]:
    """(uint8 codes [1, H, tokens, D] of a page format, its name)."""
    if not isinstance(blocks, Tensor):
        raise TypeError(f"pack_pages: {name}: expected a torch tensor, got {type(blocks).__name__}")
    own = _FORMATS.get(blocks.dtype)
    format = format or own
    storage = blocks.dtype == torch.uint8 if own is None else own == format
    if format is None or format not in _FORMATS.values() or not storage:
        raise TypeError(
            f"pack_pages: {name}: expected int8, float8_e4m3fn or float8_e5m2 blocks, or uint8 blocks and their "
            f"format, got {blocks.dtype} and {format}"
        )
    if blocks.dim() != 4 or blocks.numel() == 0:
        raise ValueError(
            f"pack_pages: {name}: expected [num_blocks, block_size, H, D], not empty, got {list(blocks.shape)}"
        )
    codes = blocks.view(torch.uint8)
    if format == "int8":
        codes = codes ^ 0x80  # two's complement to code + 128
    return codes.flatten(0, 1).transpose(0, 1).unsqueeze(0), format


def _scales(name: str, scale: Any, blocks: Tensor) -> Tensor:
    """float16 [1, H, tokens] of a scale that broadcasts to [num_blocks, block_size, H]."""
    shape = blocks.shape[:3]
    given = checks.as_tensor(scale, torch.float32)
    try:
        wide = given.expand(shape)
    except RuntimeError:
        raise ValueError(
            f"pack_pages: {name}: expected a number or a tensor that broadcasts to [num_blocks, block_size, H] = "
            f"{list(shape)}, got {list(given.shape)}"
        ) from None
    half = given.half()
    near = (half.float() - given).abs() <= given * 2.0**-11
    if not near.all():
        worst = given[~near].flatten()[0].item()
        raise ValueError(
            f"pack_pages: {name}: expected scales of at least 0 that float16 represents to 2^-11, got {worst:g}; "
            "requantize with scales from 2^-14 to 65504"
        )
    return wide.half().flatten(0, 1).transpose(0, 1).unsqueeze(0).contiguous()


def pack_pages(
    k_blocks: Tensor,
    v_blocks: Tensor,
    k_scale: Any,
    v_scale: Any = None,
    *,
    key: str | None = None,
    value: str | None = None,
    page_size: int | None = None,
) -> Tensor:
    """Packs quantized blocks of another engine (vLLM's layout) into pages, without requantization.

    Args:
        k_blocks, v_blocks: [num_blocks, block_size, H, D], in token order: int8, float8_e4m3fn or float8_e5m2, or uint8
            with `key` and `value`.
        k_scale, v_scale: value = code * scale; a number (per tensor), or a tensor that broadcasts to [num_blocks,
            block_size, H]: [H] per head, [num_blocks, 1, 1] per block, [num_blocks, block_size, 1] per token, or all
            three dims. Codes are copied unchanged; scales are rounded to float16 (relative error up to 2^-11). Without
            v_scale, k_scale is a tuple of both.
        key, value: formats of uint8 blocks: "int8", "fp8_e4m3" or "fp8_e5m2".
        page_size: tokens per page, a multiple of 16 up to 256. Default: block_size, so that each block becomes a page.

    Returns uint8 [1, num_blocks * block_size / page_size, H, page bytes], as `ops.pack` for one sequence. Raises
    ValueError for wrong shapes or scales and for codes that are NaN or Inf; TypeError for unsupported dtypes.
    """
    if v_scale is None:
        if not isinstance(k_scale, tuple) or len(k_scale) != 2:
            raise TypeError(
                f"pack_pages: expected k_scale and v_scale, or a tuple of both, got {type(k_scale).__name__}"
            )
        k_scale, v_scale = k_scale
    k, key = _codes("k_blocks", k_blocks, key)
    v, value = _codes("v_blocks", v_blocks, value)
    scales = _scales("k_scale", k_scale, k_blocks), _scales("v_scale", v_scale, v_blocks)
    size = int(k_blocks.shape[1]) if page_size is None else checks.integer("page_size", page_size, 16, 256)
    return ops.pack_codes(k, v, *scales, formats.CODES[key], formats.CODES[value], size)
