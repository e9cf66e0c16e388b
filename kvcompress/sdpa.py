"""Attention for long calls on a GPU with torch's kernels (cuDNN or FlashAttention), which are several times as fast as
ours but do not read pages. Stored tokens are decoded for them in pieces, and the results merged by lse."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from .merge_states import join

# Query tokens of a long call: with fewer it takes longer to decode all pages than these kernels save (by arithmetic, at
# 32 heads over 32,768 tokens: .4 of .6 ms at 128 tokens, for dense K and V written and read in about .1).
LEAST = 128
PIECE = 32768  # stored tokens, over all rows, to decode at a time: 128 MiB of bf16 at 8 heads of 128 dims
QUERIES = 2048  # query tokens to merge at a time, in float32
# Minimum number of scores of a call for cuDNN: it compiles a plan for each new shape, in each thread, which took 0.68 s
# on an H200, where FlashAttention has one kernel for all lengths. It is twice as fast there, which is worth it in 32
# layers of 2^35 scores; repeated shapes compile once. A prompt of 33,000 tokens with 32 heads has 2^34 scores.
CUDNN_LEAST = 1 << 34

Part = tuple[Tensor, Tensor]  # out [B, Hq, T, D] and lse float32 [B, Hq, T], the natural log
Kernel = Callable[[Tensor, Tensor, Tensor, bool, float], Part | None]

_refused: set[tuple[Kernel, torch.device, int]] = set()  # head dims that a kernel does not support on a device


def suits(q: Tensor, k: Tensor, v: Tensor, scale: float) -> bool:
    """True if the kernels support these tensors and are faster: fp16 or bf16, contiguous heads of 8 to 256 dims."""
    return (
        q.dtype == k.dtype and q.dtype in (torch.float16, torch.bfloat16) and scale > 0
        and q.shape[0] == k.shape[0] and q.shape[1] % k.shape[1] == 0 and q.stride(3) == 1
        and q.shape[3] == k.shape[3] == v.shape[3] <= 256 and q.shape[3] % 8 == 0
    )  # fmt: skip


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy with rows aligned to 16 bytes, which FlashAttention assumes and does not check."""
    dense = x.data_ptr() % 16 == 0 and not any(x.stride(i) % 8 for i in range(3))
    return x if dense else x.clone(memory_format=torch.contiguous_format)


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Part | None:
    scores = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] // (1 + causal)
    if scores < CUDNN_LEAST or not torch.backends.cuda.cudnn_sdp_enabled():
        return None
    # Only if torch itself prefers it: older versions err unless 128 divides the tokens (pytorch issue 169849).
    if torch.cuda.get_device_capability(q.device) not in ((9, 0), (10, 0), (10, 3)) or (
        (torch.backends.cudnn.version() or 0) <= 91500
    ):
        return None
    q, k, v = (x.contiguous() for x in (q, k, v))  # one plan for all strides
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return out, lse.squeeze(-1)


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Part | None:
    if not torch.backends.cuda.flash_sdp_enabled():
        return None
    q, k, v = map(_aligned, (q, k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return out, lse


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Part | None:
    """Attention of q [B, Hq, T, D] to all of k, v [B, H, S, D], or causal with S = T, by torch's fastest kernel that
    supports it and is enabled in `torch.backends.cuda`. None if there is none."""
    if not q.is_cuda or torch.cuda.is_current_stream_capturing():
        return None
    for kernel in (_cudnn, _flash):
        what = kernel, q.device, q.shape[3]
        if what in _refused:
            continue
        try:
            part = kernel(q, k, v, causal, scale)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # not supported by this GPU or build
            _refused.add(what)
            continue
        if part is not None:
            return part
    return None


def attend_parts(
    kernel: Kernel, stored: Iterable[tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor, scale: float
) -> Part | None:
    """out [B, T, Hq, D] and lse [B, Hq, T] of a call with new k and v: q attends to all of `stored`, pairs of K and V
    [B, H, n, D], and to k and v causally. None if `kernel` returns None, or out of memory: the op needs less."""
    try:
        parts = [kernel(q, k, v, True, scale)]
        for keys, values in stored if parts[0] is not None else ():
            parts.append(None if parts[-1] is None else kernel(q, keys, values, False, scale))
            del keys, values  # before the next ones are allocated
        return None if None in parts else _joined([part for part in parts if part is not None], q)
    except torch.OutOfMemoryError:
        return None


def _joined(parts: list[Part], q: Tensor) -> Part:
    out, lse = parts[0]
    if len(parts) > 1:
        cuts = [slice(t, t + QUERIES) for t in range(0, q.shape[2], QUERIES)]
        some = [join([(o[:, :, cut], s[:, :, cut]) for o, s in parts], q.dtype) for cut in cuts]
        out, lse = (torch.cat(x, 2) for x in zip(*some, strict=True))
    # NaN as from the op: FlashAttention returns inf for a NaN sum, or 0 and inf if all scores are -inf.
    none = 0 * torch.linalg.vector_norm(q, torch.inf, -1).float() + 0 * lse
    out = out.transpose(1, 2).contiguous()
    return out.add_(none.transpose(1, 2).unsqueeze(-1).to(out.dtype)), lse + none
