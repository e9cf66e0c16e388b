"""Error metrics of quantized tensors, and of attention over them. Computed in float64."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .tensor import QuantizedTensor


class Error(NamedTuple):
    """Result of `error`."""

    mse: float
    max: float
    relative: float
    cosine: float
    snr_db: float


class AttentionError(NamedTuple):
    """Result of `attention_error`."""

    kl: float
    kl_max: float
    output: Error


class Histogram(NamedTuple):
    """counts: int64 [n]; edges: float64 [n + 1]."""

    counts: Tensor
    edges: Tensor


def _pair(name: str, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    if x.shape != y.shape or x.numel() == 0:
        raise ValueError(
            f"{name}: expected two tensors of one shape, not empty, got {list(x.shape)} and {list(y.shape)}"
        )
    return x.detach().double(), y.detach().double()


def error(x: Tensor, y: Tensor) -> Error:
    """Error of y against the reference x, over all elements.

    x, y: tensors of the same shape, any float dtypes. Returns an `Error`:
        mse: mean of (y - x)^2.
        max: maximum of |y - x|.
        relative: |y - x| / |x|, L2 norms; 0 if equal, inf if only x is zero.
        cosine: cosine similarity, -1 to 1; 1 if equal (both zero included), 0 if one is zero.
        snr_db: signal-to-noise ratio 20 log10(|x| / |y - x|) in decibels; inf if equal, -inf if only x is zero.
    All five are NaN if x or y has NaN or Inf. Raises ValueError for different shapes.
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
    """Error of attention with approximate keys and values.

    Args:
        q: [B, Hq, Tq, Dk], Hq a multiple of H.
        k, v: exact keys [B, H, N, Dk] and values [B, H, N, Dv].
        k_near, v_near: approximate keys and values, such as those read from a cache.
        scale: softmax scale. Default: 1 / sqrt(Dk).
        causal: query i sees keys up to N - Tq + i.

    Returns an `AttentionError`: kl, the mean over queries of KL(exact softmax || approximate softmax) in nats; kl_max,
    its maximum; output, the `Error` of softmax @ v. Raises ValueError for inconsistent shapes.
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
    kl = torch.where(p > 0, p * (logs - near), 0.0).sum(-1).clamp_min(0)  # negative only by rounding
    return AttentionError(kl.mean().item(), kl.max().item(), error(out, out_near))


def error_histogram(x: Tensor, y: Tensor, bins: int = 64) -> Histogram:
    """Histogram of y - x with `bins` equal bins, symmetric about 0.

    Raises ValueError for different shapes, NaN or Inf.
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
    """Histogram of the stored codes: counts int64 [2^bits], edges at code - 1/2 and code + 1/2.

    Codes of symmetric integers are offset by 2^(bits-1); codes of asymmetric integers start at 0; FP8 and FP4 codes are
    their bit patterns.
    """
    n = 1 << tensor.grain.bits
    counts = torch.bincount(tensor.unpacked().flatten().long(), minlength=n)
    return Histogram(counts, torch.arange(n + 1, dtype=torch.float64, device="cpu") - 0.5)
