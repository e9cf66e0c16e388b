"""torch.ops.kvcompress.*, registered from C, with fake implementations for tracing and typed errors.

docs/ops.md has the schemas. Each function takes plain tensors and calls the op of the same name. The ops themselves can
only raise RuntimeError; these functions raise ValueError, TypeError or MemoryError with the same message.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcompress import _C, formats, schemes
from kvcompress.files import cuda_library
from kvcompress.merge_states import join

_C.bind_torch(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))

TENSORS = _C.bind_tensors(torch.Tensor)
"""True if C can read tensors without torch's dispatcher (DLPack's C exchange API)."""

_CUDA = torch.version.cuda and cuda_library()
if _CUDA:
    _C.bind_cuda(str(Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"), str(_CUDA))

_FOUND = (
    "a table entry, seal or move with a page outside of the arena, or overlapping pages",
    "a length beyond the table or the slots",
    "NaN or Inf in k or v (stored as 0)",
    "a page that cannot hold the tokens assigned to it",
    "NaN in scores to select by",
    "a page in a format that is not in the call's formats",
)


def check(device: torch.device | str) -> None:
    """Synchronizes a CUDA device and raises ValueError for errors that kernels have recorded since the last check, in
    any call on the device. Kernels cannot raise themselves: they skip accesses out of bounds and record an error. No-op
    on the CPU."""
    device = torch.device(device)
    if device.type != "cuda":
        return
    found = _C.cuda_found(torch.cuda.current_device() if device.index is None else device.index)
    if found < 0:
        raise ValueError(f"check: expected a device that kvcompress has CUDA kernels for, got {device}")
    raise_found(device, found)


def raise_found(device: torch.device, found: int) -> None:
    """ValueError for the bits of kvc_cuda_flag in `found`."""
    if found:
        said = "; ".join(text for i, text in enumerate(_FOUND) if found >> i & 1)
        raise ValueError(f"{device}: {said}: in a call of this or another cache on the device since the last check")


_TYPES = {"ValueError": ValueError, "TypeError": TypeError, "MemoryError": MemoryError}
_TYPED = re.compile(r"kvcompress\.(ValueError|TypeError|MemoryError): (.*)", re.DOTALL)


def typed(error: RuntimeError) -> Exception:
    """The typed exception for the RuntimeError of an op; `error` itself if it is not from kvcompress."""
    match = _TYPED.search(str(error))
    if not match:
        return error
    return _TYPES[match[1]](match[2].split("\nException raised from")[0].strip())


def _wrap(op: Callable, doc: str | None = None) -> Callable:
    def call(*args):
        try:
            return op(*args)
        except RuntimeError as error:
            raise typed(error) from None

    call.__doc__ = doc
    return call


_ops = torch.ops.kvcompress
attend = _wrap(
    _ops.attend.default,
    """attend(q, k, v, arena, table, rows, slots, mask, s_aux, seals, seen, page_size, sinks, window,
scale, softcap, attention_width=0, formats=0) -> (out [B, Tq, Hq, Dv], lse [B, Hq, Tq], attention [B, H,
attention_width]): seals pages, attends, and appends k and v; see docs/ops.md.""",
)
attend_step = _wrap(
    _ops.attend_step.default,
    """attend_step(q, .., seals, seen, page_size, .., counters): `attend` for CUDA graphs and compilers:
everything that changes between steps is in tensors. seen: int64 [1]; seals: padded with pairs of -1; counters: int32
zeros, not shared with other calls. See docs/ops.md.""",
)
accumulate_attention = _wrap(
    _ops.accumulate_attention.default,
    """accumulate_attention(q, k, v, arena, table, rows, slots, mask, lse, seals, seen,
page_size, sinks, window, scale, softcap, attention_width) -> attention [B, H, attention_width] of the same call of
`attend`, relative to a given lse [B, Hq, Tq] that may cover more tokens; see docs/ops.md.""",
)
attend_feedback = _wrap(
    _ops.attend_feedback.default,
    """attend_feedback(q, .., softcap, attention_width, formats, key_feedback, value_feedback): `attend` with error
feedback, float32 [H, D + 1, D]: in full pages of rotated formats, each code compensates for the errors of the previous
ones; see docs/ops.md.""",
)
attend_varlen = _wrap(
    _ops.attend_varlen.default,
    """attend_varlen(q [tokens, Hq, D], k, v, cache [blocks, bytes], block_table, residual,
residual_table, query_start_loc, seq_lens, sealed_lens, draft_lens, s_aux, out, lse, flags, formats, block_size,
residual_size, page_size, window, scale, softcap, max_query_len=0): appends and attends for engines that own the memory:
sequences of different lengths in one call, pages in the engine's blocks, results in `out`; see docs/ops.md.""",
)
store_tokens = _wrap(
    _ops.store_tokens.default,
    """store_tokens(k [tokens, H, D], v, cache, slot_mapping, flag, formats, block_size, page_size):
writes tokens to slots in an engine's blocks, without attention; see docs/ops.md.""",
)
read = _wrap(
    _ops.read.default,
    """read(like, arena, table, rows, slots, heads, key_dim, value_dim, width, page_size, sinks)
-> (k [B, H, width, Dk], v [B, H, width, Dv]): dequantized tokens by slot; see docs/ops.md.""",
)
pack = _wrap(
    _ops.pack.default,
    """pack(k [B, H, T, Dk], v [B, H, T, Dv], key, value, page_size) -> uint8 [B, T / page_size, H, bytes]:
quantizes k and v to pages of formats key and value (codes).""",
)
map_heads = _wrap(
    _ops.map_heads.default,
    """map_heads(x [B, Hq, T, D], by float32 [H, D, D], like) -> [B, Hq, T, D] in like's dtype: multiplies the rows of
head h by matrix h // (Hq // H), in float32, with a fixed order of summation; CPU only.""",
)
_select = _wrap(_ops.select.default)
compact = _wrap(
    _ops.compact.default,
    """compact(arena, moves [n, 6], heads, table_heads, key_dim, value_dim, page_size, sinks): copies
tokens as planned by `Table.plan_evict`; see docs/ops.md.""",
)
score_tokens = _wrap(
    _ops.score_tokens.default,
    """score_tokens(arena, table, rows, slots, heads, key_dim, value_dim, width, page_size, sinks,
kind) -> float32 [B, H, width] by index. kind: 0: norm of K, 1: norm of V, 2: cosine of K and the head's mean key; see
docs/ops.md.""",
)
quantize_by = _wrap(
    _ops.quantize_by.default,
    """quantize_by(x [B, H, T, D], scale, zero, tensor_scale, scheme, granularity, group, packing)
-> (codes, scales, zeros): quantizes with any scheme and granularity; see docs/ops.md and `kvcompress.quantize`.""",
)
dequantize_by = _wrap(
    _ops.dequantize_by.default,
    """dequantize_by(codes, scales, zeros, tensor_scale, scheme, granularity, group, packing)
-> float32 [B, H, T, D]: the inverse of `quantize_by`.""",
)
pack_codes = _wrap(
    _ops.pack_codes.default,
    """pack_codes(k, v uint8 [B, H, T, D], k_scales, v_scales float16 [B, H, T], key, value, page_size)
-> uint8 [B, T / page_size, H, bytes]: pages from existing codes; see `quantization.pack`.""",
)
_share = _wrap(_ops.share.default)
_quantize = _wrap(_ops.quantize.default)
_dequantize = _wrap(_ops.dequantize.default)


def select(scores: Tensor, slots: Tensor, protect: Tensor | None, budget: Tensor) -> Tensor:
    """Selects the `budget` tokens with the highest scores of each row and head; of equal scores the newer token.

    scores: float32 [B, H, N]; slots: int32 [B, H, N], -1: no token; protect: bool [B, H, N], always selected, or None;
    budget: int64 [B, H]. Returns bool [B, H, N]. Raises ValueError for NaN in scores.
    """
    return _select(scores, slots, scores.new_empty(0, dtype=torch.bool) if protect is None else protect, budget)


def share(scores: Tensor, slots: Tensor, protect: Tensor | None, total: Tensor, floor: Tensor) -> Tensor:
    """Number of tokens that each head keeps, int64 [B, H], if the heads of a row share a budget (AdaKV, arXiv
    2407.11550): the protected tokens and the `floor` best of each head, then the best of all heads, `total` in all.

    scores, slots, protect: as in `select`; total, floor: int64 [B]. Raises ValueError for NaN in scores.
    """
    if scores.is_cuda:
        return _share_by_selects(scores, slots, protect, total, floor)
    return _share(scores, slots, scores.new_empty(0, dtype=torch.bool) if protect is None else protect, total, floor)


def _share_by_selects(scores: Tensor, slots: Tensor, protect: Tensor | None, total: Tensor, floor: Tensor) -> Tensor:
    """`share` in terms of `select`: first the tokens that each head keeps in any case, then the best of all heads
    together. Of equal scores the newer token and then the earlier head wins, so slots are combined with the head."""
    B, H, N = scores.shape
    order = torch.arange(H - 1, -1, -1, dtype=torch.int32, device=slots.device)[:, None]
    own = select(scores, slots, protect, floor[:, None].expand(B, H).contiguous())
    ages = torch.where(slots >= 0, slots * H + order, -1)
    every, young, sure = (x.reshape(B, 1, H * N) for x in (scores, ages, own))
    return select(every, young, sure, total[:, None]).view(B, H, N).sum(-1)


def quantize(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """Quantizes each row (last dim) of x to a page format, with separate scales.

    x: [..., D] float32, float16 or bfloat16. Returns (codes, scales). codes: uint8 [..., D * bits / 8]; below 8 bits
    byte j holds dims j, D * bits / 8 + j, .., lowest bits first (3 bits: the low 2 bits in this order, then the high
    bits). scales: float16 [...], or [..., n] if a row has more metadata (scale and zero point of each group); uint8
    with the bits of e4m3 or e8m0 for `nvfp4` and `mxfp4`. Rows of `int4`, `int3` and `int2` are Hadamard-rotated, but
    not centered; `kivi4` and `kivi2` treat rows as V.

    Raises ValueError for an unknown or raw format, an unsupported head dim, NaN or Inf; TypeError for an unsupported
    dtype.
    """
    return _quantize(x.contiguous(), formats.resolve(format, x.dtype))


def dequantize(codes: Tensor, scales: Tensor, format: str) -> Tensor:
    """The inverse of `quantize`: float32 [..., D]. Raises ValueError if codes and scales are inconsistent."""
    return _dequantize(codes.contiguous(), scales.contiguous(), formats.resolve(format, torch.float32))


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merges the attention over two disjoint sets of keys.

    out: [..., Dv]; lse: [...], natural log, -inf for queries without keys; both without attention-sink logits. Returns
    (out, lse). Associative and commutative up to rounding. Source: the combine step of FlashAttention (split-KV).
    """
    return join([(out_a, lse_a), (out_b, lse_b)], out_a.dtype)


def _fake(*names: str) -> Callable:
    """Registers a fake implementation (shapes for tracing). torch also calls it if only some tensors are on the meta
    device; that is an error, since the results of real tensors would be uninitialized memory."""

    def register(shapes: Callable) -> Callable:
        def checked(*args: Any, **options: Any) -> Any:
            found = {x.device.type for x in (*args, *options.values()) if isinstance(x, Tensor)}
            if "meta" in found and len(found) > 1:
                raise ValueError(f"{names[0]}: expected all tensors on one device, got {sorted(found)}; move them")
            return shapes(*args, **options)

        for name in names:
            torch.library.register_fake(f"kvcompress::{name}")(checked)
        return shapes

    return register


@_fake("quantize")
def _(x: Tensor, format: int):
    bits = formats.TABLE[format]["bits"]
    codes = x.new_empty((*x.shape[:-1], x.shape[-1] * bits // 8), dtype=torch.uint8)
    planes, dtype = formats.metadata(format, int(x.shape[-1]))
    shape = x.shape[:-1] if planes == 1 else (*x.shape[:-1], planes)
    return codes, x.new_empty(shape, dtype=getattr(torch, dtype))


@_fake("dequantize")
def _(codes: Tensor, scales: Tensor, format: int):
    bits = formats.TABLE[format]["bits"]
    return codes.new_empty((*codes.shape[:-1], codes.shape[-1] * 8 // bits), dtype=torch.float32)


def _grain(scheme: int, granularity: int, group: int) -> schemes.Grain:
    return schemes.Grain(schemes.TABLE[scheme]["name"], schemes.GRANULARITIES[granularity], group, "planes")


@_fake("quantize_by")
def _(x, scale, zero, tensor_scale, scheme, granularity, group, packing):
    B, H, T, D = x.shape
    g = _grain(scheme, granularity, group)
    shape = g.scale_shape(B, H, T, D)
    codes = x.new_empty((B, H, T, D * g.bits // 8), dtype=torch.uint8)
    scales = x.new_empty(shape, dtype=torch.uint8 if g.block_scale else torch.float16)
    return codes, scales, x.new_empty(shape if g.zero_point else (0,), dtype=torch.float16)


@_fake("dequantize_by")
def _(codes, scales, zeros, tensor_scale, scheme, granularity, group, packing):
    bits = schemes.TABLE[scheme]["bits"]
    return codes.new_empty((*codes.shape[:3], codes.shape[3] * 8 // bits), dtype=torch.float32)


@_fake("pack_codes", "pack")
def _(k, v, *rest):  # scales, of codes
    *_, key, value, page_size = rest
    size = _C.page_bytes(key, value, int(k.shape[3]), int(v.shape[3]), page_size)
    return k.new_empty((k.shape[0], k.shape[2] // page_size, k.shape[1], size), dtype=torch.uint8)


@_fake("map_heads")
def _(x, by, like):
    return like.new_empty(x.shape)


@_fake("read")
def _(like, arena, table, rows, slots, heads, key_dim, value_dim, width, page_size, sinks):
    shape = (table.shape[0], heads, width)
    return like.new_empty((*shape, key_dim)), like.new_empty((*shape, value_dim))


@_fake("select")
def _(scores, slots, protect, budget):
    return scores.new_empty(scores.shape, dtype=torch.bool)


@_fake("share")
def _(scores, slots, protect, total, floor):
    return scores.new_empty(scores.shape[:2], dtype=torch.int64)


@_fake("score_tokens")
def _(arena, table, rows, slots, heads, key_dim, value_dim, width, page_size, sinks, kind):
    return arena.new_empty((table.shape[0], heads, width), dtype=torch.float32)


@_fake("compact", "attend_varlen", "store_tokens")
def _(*_args):
    return None


@_fake("attend_step", "attend_feedback", "attend")
def _(q, k, v, arena, table, rows, slots, mask, s_aux, seals, seen, page_size, sinks, window, scale, softcap,
      attention_width=0, formats=0, *_feedback):  # fmt: skip
    B, Hq, Tq, D = q.shape
    dim = v.shape[3] if k.shape[3] == D else D - v.shape[3]  # of latents: Dk
    return q.new_empty((B, Tq, Hq, dim)), q.new_empty((B, Hq, Tq), dtype=torch.float32), q.new_empty(
        (B, k.shape[1], attention_width), dtype=torch.float32)  # fmt: skip


@_fake("accumulate_attention")
def _(q, k, *rest):
    return q.new_empty((q.shape[0], k.shape[1], rest[-1]), dtype=torch.float32)
