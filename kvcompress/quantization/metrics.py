"""How far a quantized tensor is from the true one: of the numbers, and of attention over them. float64 inside."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .tensor import QuantizedTensor


class Error(NamedTuple):
    """y against the true x; see `error`."""

    mse: float
    max: float
    relative: float
    cosine: float
    snr_db: float


class AttentionError(NamedTuple):
    """Attention over quantized keys and values against the true one; see `attention_error`."""

    kl: float
    kl_max: float
    output: Error


class Histogram(NamedTuple):
    """counts int64 [n] between edges float64 [n + 1]."""

    counts: Tensor
    edges: Tensor


def _pair(name: str, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    if x.shape != y.shape or x.numel() == 0:
        raise ValueError(
            f"{name}: expected two tensors of one shape, not empty, got {list(x.shape)} and {list(y.shape)}"
        )
    return x.detach().double(), y.detach().double()


def error(x: Tensor, y: Tensor) -> Error:
    """How far y is from the true x.

    x, y: one shape, any float dtypes. Returns, over all elements:
        mse: mean of (y - x)^2.
        max: of |y - x|.
        relative: |y - x| / |x|, euclidean norms; 0 where they are equal, inf where only x is zero.
        cosine: of the angle between them, -1 to 1; 1 where they are equal (also both zero), 0 where one is zero.
        snr_db: 20 log10(|x| / |y - x|), decibels; inf where they are equal, -inf where only x is zero.
    NaN or Inf in either gives NaN in all five. Raises ValueError for shapes that differ.
    """
    a, b = _pair("error", x, y)
    a_norm, b_norm, norm = a.norm().item(), b.norm().item(), (b - a).norm().item()
    if not math.isfinite(a_norm + b_norm):
        return Error(*[math.nan] * 5)
    if norm == 0:
        return Error(0.0, 0.0, 0.0, 1.0, math.inf)
    mse, largest = norm**2 / a.numel(), (b - a).abs().max().item()
    if a_norm == 0:
        return Error(mse, largest, math.inf, 0.0, -math.inf)
    cosine = (a.flatten() @ b.flatten()).item() / (a_norm * b_norm) if b_norm else 0.0
    return Error(mse, largest, norm / a_norm, max(-1.0, min(1.0, cosine)), 20 * math.log10(a_norm / norm))


def attention_error(
    q: Tensor, k: Tensor, v: Tensor, k_near: Tensor, v_near: Tensor, *, scale: float | None = None, causal: bool = False
) -> AttentionError:
    """What attention makes of the errors of keys and values.

    Args:
        q: [B, Hq, Tq, Dk], Hq a multiple of H.
        k, v: the true keys [B, H, N, Dk] and values [B, H, N, Dv]; k_near, v_near: what a cache gives back.
        scale: of the scores; 1 / sqrt(Dk) if None.
        causal: query i sees keys up to N - Tq + i.

    Returns kl, the mean over queries of KL(softmax of true scores || softmax of near ones) in nats, kl_max, its
    largest, and output, the `Error` of softmax @ v. Raises ValueError for shapes that do not fit.
    """
    k, k_near = _pair("attention_error: k", k, k_near)
    v, v_near = _pair("attention_error: v", v, v_near)
    fits = q.dim() == k.dim() == v.dim() == 4 and q.shape[3] == k.shape[3] and q.shape[0] == k.shape[0]
    if not fits or q.shape[1] % k.shape[1] or k.shape[:3] != v.shape[:3] or (causal and q.shape[2] > k.shape[2]):
        raise ValueError(
            "attention_error: expected q [B, Hq, Tq, Dk], k [B, H, N, Dk], v [B, H, N, Dv], Hq a multiple of H, got "
            f"{list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    group, N, Tq = q.shape[1] // k.shape[1], k.shape[2], q.shape[2]
    factor = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    hidden = (
        torch.ones(Tq, N, dtype=torch.bool, device="cpu").triu(N - Tq + 1)
        if causal
        else torch.zeros(Tq, N, dtype=torch.bool, device="cpu")
    )

    def attend(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        scores = q.detach().double() @ k.repeat_interleave(group, 1).transpose(2, 3) * factor
        logs = scores.masked_fill(hidden.to(q.device), -math.inf).log_softmax(-1)
        return logs, logs.exp() @ v.repeat_interleave(group, 1)

    logs, out = attend(k, v)
    near, out_near = attend(k_near, v_near)
    p = logs.exp()
    kl = torch.where(p > 0, p * (logs - near), 0.0).sum(-1).clamp_min(0)  # rounding alone can make it negative
    return AttentionError(kl.mean().item(), kl.max().item(), error(out, out_near))


def error_histogram(x: Tensor, y: Tensor, bins: int = 64) -> Histogram:
    """Distribution of y - x over `bins` equal bins, symmetric about 0.

    Raises ValueError for shapes that differ, NaN or Inf.
    """
    a, b = _pair("error_histogram", x, y)
    difference = (b - a).flatten()
    most = difference.abs().max().item()
    if not math.isfinite(most):
        raise ValueError("error_histogram: expected finite numbers, got NaN or Inf")
    edges = torch.linspace(-1, 1, bins + 1, dtype=torch.float64, device="cpu") * (most or 1.0)
    at = torch.bucketize(difference.cpu(), edges, right=True).clamp(1, bins) - 1
    return Histogram(torch.bincount(at, minlength=bins), edges)


def code_histogram(tensor: QuantizedTensor) -> Histogram:
    """How often each code is used: counts int64 [2^bits] by stored code, edges at code - 1/2 and code + 1/2.

    Codes of symmetric integers are stored plus 2^(bits-1), of asymmetric ones from 0; FP8 and FP4 as their bits.
    """
    n = 1 << tensor.grain.bits
    counts = torch.bincount(tensor.unpacked().flatten().long(), minlength=n)
    return Histogram(counts, torch.arange(n + 1, dtype=torch.float64, device="cpu") - 0.5)
