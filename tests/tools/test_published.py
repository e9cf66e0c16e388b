"""Published methods as `fake:` strategies, compared with NumPy loops in float64 and with the tables of the papers."""

import models
import numpy as np
import pytest
import torch

from kvcompress.hf import calibrate
from kvcompress.quantization.calibration import Calibration
from kvcompress.tools import strategy
from kvcompress.tools.evaluation import caches, published

X = torch.randn(2, 3, 256, 64, generator=torch.Generator().manual_seed(5)) * torch.linspace(0.5, 3, 64)


def relative(x, y):
    return float((x - y).square().sum() / x.square().sum())


def on_range(x, bits):
    """A float64 vector on 2^bits levels between its extremes."""
    low, step = x.min(), (x.max() - x.min()) / (2**bits - 1)
    return np.rint((x - low) / step) * step + low


def close(got, want, x):
    """Up to fp16 scales and near-ties."""
    off, span = np.abs(got.numpy() - want), np.abs(x.numpy()).max()
    assert np.mean(off > 2e-3 * span) < 1e-2 and np.abs(want - x.numpy()).max() > 0.01


@pytest.mark.parametrize("bits", [2, 4])
def test_kivi(bits):
    want_k, want_v, x = np.zeros((2, 3, 256, 64)), np.zeros((2, 3, 256, 64)), X.double().numpy()
    for b in range(2):
        for h in range(3):
            for d in range(64):
                for t in range(0, 256, 32):
                    want_k[b, h, t : t + 32, d] = on_range(x[b, h, t : t + 32, d], bits)
            for t in range(256):
                for d in (0, 32):
                    want_v[b, h, t, d : d + 32] = on_range(x[b, h, t, d : d + 32], bits)
    for key, want in ((True, want_k), (False, want_v)):
        got, counted = published.kivi(bits, key)(X)
        close(got, want, X)
        assert counted == bits + 1


@pytest.mark.parametrize("bits", [2, 3])
def test_quarot(bits):
    turn, want = published.hadamard(64), np.zeros((2, 3, 256, 64))
    for index in np.ndindex(2, 3, 256):
        row = (X[index].double() @ turn.double()).numpy()
        want[index] = on_range(row.clip(0.95 * row.min(), 0.95 * row.max()), bits)
    for key in (True, False):
        got, counted = published.quarot(bits, key)(X)
        close(got @ turn, want, X @ turn)
        assert counted == bits + 0.5


def test_turboquant():
    """Rows close to Gaussian have the error of Max's table for his levels, a little less if the norm is kept."""
    for bits, distortion in ((2, 0.1175), (3, 0.03454), (4, 0.009497)):
        got, counted = published.turboquant(bits, True)(X)
        assert relative(X, got) == pytest.approx(distortion, rel=0.15), bits
        assert counted == bits + 0.25
        torch.testing.assert_close(got.norm(dim=3), X.norm(dim=3), rtol=1e-3, atol=0)
        far, _ = published.turboquant(bits, False)(1000 * X)
        torch.testing.assert_close(far, 1000 * got, rtol=1e-3, atol=10)


@pytest.mark.parametrize("key", [True, False])
def test_kvarn(key):
    """Tokens and channels (after the transform) of any magnitude: relative errors are those without it."""
    turn = published.hadamard(64)
    torch.testing.assert_close(turn @ turn.T, torch.eye(64))
    even = torch.randn(1, 2, 256, 64, generator=torch.Generator().manual_seed(6))
    tokens, channels = torch.logspace(-1, 1, 256)[:, None], torch.logspace(1, -1, 64)[torch.randperm(64)]
    got, counted = published.kvarn(2, key)(even @ turn.T)
    far, _ = published.kvarn(2, key)((even * tokens * channels) @ turn.T)
    torch.testing.assert_close(far @ turn / tokens / channels, got @ turn, rtol=0.02, atol=0.3)
    assert 0.05 < relative(even, got @ turn) < 0.3
    plain, _ = published.kivi(2, key)((even * tokens * channels) @ turn.T)
    assert relative(even, plain @ turn / tokens / channels) > 2 * relative(even, far @ turn / tokens / channels)
    assert counted == (2 + 32 / 128 + 16 / 64 if key else 2 + 32 / 64 + 16 / 128)
    biased, _ = published.kvarn(2, key)((even + 30 * torch.arange(64).cos()) @ turn.T)  # each rotation undoes the other
    assert bool(biased.isfinite().all())


@pytest.mark.parametrize("key", [True, False])
def test_kvquant(key):
    """The extremes of each channel, or of each token over all heads, are kept; values in between have 8 levels."""
    rounding = published.kvquant(3, key)
    got, counted = rounding(X)
    lines = X.movedim(2, 3).flatten(0, 2) if key else X.transpose(1, 2).flatten(2).flatten(0, 1)
    near = got.movedim(2, 3).flatten(0, 2) if key else got.transpose(1, 2).flatten(2).flatten(0, 1)
    for find in (torch.argmax, torch.argmin):
        at = find(lines, 1, keepdim=True)
        assert torch.equal(near.gather(1, at), lines.gather(1, at).half().float())
    assert max(len(line.unique()) for line in near) <= 8 + 4 and relative(X, got) < 0.04
    assert counted == pytest.approx(3 + (2 / 256 * 32 if key else 2 / 192 * 32 + 32 / 192), abs=0.1)
    again, _ = rounding(X[:, :, :64])  # with the same extremes of K, and levels
    torch.testing.assert_close(again, got[:, :, :64])


def test_oscar():
    x, want = X.double().numpy(), {}
    for key, clip in ((True, 0.96), (False, 0.92)):
        want[key] = np.zeros((2, 3, 256, 64))
        for at in np.ndindex(2, 3, 256):
            most = np.quantile(np.abs(x[at]), clip)
            want[key][at] = on_range(np.clip(x[at], -most, most), 2)
        got, counted = published.oscar(2, key)(X)
        close(got, want[key], X)
        assert counted == 2.5


@pytest.mark.parametrize("name", strategy.PUBLISHED)
def test_every_method_through_a_cache(name):
    """Full pages are rounded, sinks and the newest page are not; bits are counted over the rounded pages."""
    model, ids = models.model("llama"), models.ids(1, 140)
    cache, plain = (caches.open_cache(model, strategy.Strategy(x)) for x in (f"fake:{name}", "dynamic"))
    for c in (cache, plain):
        model(ids[:, :139], past_key_values=c)
        model(ids[:, 139:], past_key_values=c)
    for side in ("keys", "values"):
        ours, exact = getattr(cache.layers[0], side), getattr(plain.layers[0], side)
        assert torch.equal(ours[:, :, :4], exact[:, :, :4]) and torch.equal(ours[:, :, 132:], exact[:, :, 132:])
        error = relative(exact[:, :, 4:132], ours[:, :, 4:132])
        assert 1e-4 < error < {"2": 0.5, "3": 0.2, "4": 0.06}[name[-1]]
    bits = int(name[-1])
    assert bits < cache.sealed_bits() < bits + 1.3
    assert caches.held_bytes(cache) == pytest.approx(2 * 2 * 2 * 32 * (128 * cache.sealed_bits() / 8 + 12 * 4), abs=8)
    assert {f"{method}{bits}" for method in published.METHODS for bits in (2, 3, 4)} == set(strategy.PUBLISHED)


def test_in_calibrated_coordinates(tmp_path):
    """A matrix before and its inverse after the rounding."""
    model, ids = models.model("llama"), models.ids(1, 600)
    made = calibrate.calibrate(model, ids[0], context=512)
    made.save(tmp_path / "a.kvcal")
    cache = caches.open_cache(model, strategy.Strategy(f"fake:oscar2+calibration:{tmp_path / 'a.kvcal'}"))
    plain = caches.open_cache(model, strategy.Strategy("dynamic"))
    for c in (cache, plain):
        model(ids[:, :139], past_key_values=c)
        model(ids[:, 139:140], past_key_values=c)
    basis, exact = Calibration.of(tmp_path / "a.kvcal").basis(0), plain.layers[0].keys[:, :, 4:132]
    want = published.oscar(2, True)(exact @ basis.key)[0] @ basis.key_back
    torch.testing.assert_close(cache.layers[0].keys[:, :, 4:132], want, rtol=1e-4, atol=1e-5)
