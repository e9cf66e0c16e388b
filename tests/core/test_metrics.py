"""Error metrics compared with closed forms, and edge cases."""

import math

import numpy as np
import pytest
import torch

from kvcompress import quantize
from kvcompress.quantization import metrics


def test_error_equals_the_formulas():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 3, 50)), rng.standard_normal((2, 3, 50))
    got = metrics.error(torch.from_numpy(x), torch.from_numpy(y))
    norm, d = np.sqrt((x**2).sum()), y - x
    want = ((d**2).mean(), np.abs(d).max(), np.sqrt((d**2).sum()) / norm, (x * y).sum() / norm / np.sqrt((y**2).sum()),
            10 * np.log10((x**2).sum() / (d**2).sum()))  # fmt: skip
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_edges_are_defined():
    x, zero = torch.randn(4, 8), torch.zeros(4, 8)
    assert metrics.error(x, x) == (0, 0, 0, 1, math.inf) == metrics.error(zero, zero)
    mse = (x.double() ** 2).mean().item()
    got = metrics.error(zero, x)
    assert got.mse == pytest.approx(mse) and got[2:] == (math.inf, 0, -math.inf)
    got = metrics.error(x, zero)
    assert (got.relative, got.cosine, got.snr_db) == (1, 0, 0)
    assert metrics.error(x, -x).cosine == -1
    for bad in (math.nan, math.inf):
        assert all(map(math.isnan, metrics.error(x, torch.full_like(x, bad))))
    with pytest.raises(ValueError, match="one shape"):
        metrics.error(x, x[:2])
    with pytest.raises(ValueError, match="not empty"):
        metrics.error(x[:0], x[:0])


def test_cosine_is_never_above_one():
    for seed in range(200):
        x = torch.randn(3, generator=torch.Generator().manual_seed(seed)) * 1e-20
        assert metrics.error(x, x * 1.0000001).cosine <= 1 and metrics.error(x, -x * 1.0000001).cosine >= -1


def test_float32_extremes_neither_overflow_nor_vanish():
    for size in (3e38, 1e-40):
        x = torch.full((100,), size)
        assert metrics.error(x, x * 0.5).snr_db == pytest.approx(20 * math.log10(2), abs=1e-4)


def softmax(s):
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("causal", (False, True))
def test_attention_error_equals_the_formulas(causal):
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal(s) for s in ((2, 4, 3, 8), (2, 2, 10, 8), (2, 2, 10, 6)))
    k2, v2 = k + 0.1 * rng.standard_normal(k.shape), v + 0.1 * rng.standard_normal(v.shape)
    got = metrics.attention_error(*map(torch.from_numpy, (q, k, v, k2, v2)), causal=causal)
    kl, outs = [], []
    for key, value in ((k, v), (k2, v2)):
        s = np.einsum("bhqd,bhkd->bhqk", q, key.repeat(2, 1)) / np.sqrt(8)
        if causal:
            s = np.where(np.arange(10) <= np.arange(7, 10)[:, None], s, -np.inf)
        kl.append(softmax(s))
        outs.append(softmax(s) @ value.repeat(2, 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        divergence = np.nansum(np.where(kl[0] > 0, kl[0] * np.log(kl[0] / kl[1]), 0), -1)
    assert got.kl == pytest.approx(divergence.mean()) and got.kl_max == pytest.approx(divergence.max())
    np.testing.assert_allclose(got.output, metrics.error(*map(torch.from_numpy, outs)), rtol=1e-9)
    same = metrics.attention_error(*map(torch.from_numpy, (q, k, v, k, v)), causal=causal)
    assert same == (0, 0, (0, 0, 0, 1, math.inf))


def test_attention_error_follows_quality():
    q, k, v = torch.randn(1, 8, 4, 64), torch.randn(1, 2, 300, 64), torch.randn(1, 2, 300, 64)
    kl = [
        metrics.attention_error(q, k, v, quantize(k, f).dequantize(), quantize(v, f).dequantize()).kl
        for f in ("int8", "fp8_e4m3", "int4", "int3_sym", "int2_sym")
    ]
    assert kl == sorted(kl) and kl[0] < 1e-4
    for args in ((q[:, :3], k, v, k, v), (q, k, v[:, :, :9], k, v[:, :, :9]), (q, k, v, k[:, :, 1:], v)):
        with pytest.raises(ValueError, match="attention_error"):
            metrics.attention_error(*args)
    with pytest.raises(ValueError, match="attention_error"):
        metrics.attention_error(q, k[:, :, :2], v[:, :, :2], k[:, :, :2], v[:, :, :2], causal=True)


def test_histograms_count_everything():
    x = torch.randn(4, 1000)
    y = quantize(x, "int4_sym").dequantize()
    counts, edges = metrics.error_histogram(x, y, bins=10)
    want, _ = np.histogram((y.double() - x.double()).numpy(), edges.numpy())
    assert counts.tolist() == want.tolist() and counts.sum() == 4000 and edges[0] == -edges[-1]
    assert metrics.error_histogram(x, x).counts.sum() == 4000
    with pytest.raises(ValueError, match="NaN or Inf"):
        metrics.error_histogram(x, x * math.nan)
    for scheme in ("int8", "int3_asym", "int2_sym", "nvfp4", "int4"):
        q = quantize(torch.randn(4, 64), scheme)
        counts, edges = metrics.code_histogram(q)
        assert len(counts) == 1 << q.grain.bits == len(edges) - 1 and counts.sum() == 256
        assert counts.tolist() == np.bincount(q.unpacked().numpy().ravel(), minlength=len(counts)).tolist()
    assert metrics.code_histogram(quantize(torch.zeros(2, 8), "int2_sym")).counts.tolist() == [0, 0, 16, 0]
