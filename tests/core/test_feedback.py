"""Error feedback between codes: what `append` writes with feedback, compared with float64, and when it is used."""

import hashlib

import levels
import numpy as np
import pytest
import torch
from test_ops import NO_SEALS, NONE, paged

from kvcompress import PagedKV, ops
from kvcompress.quantization.calibration import Basis, feedback

H, D, FORMATS = 2, 64, ("int4_lloyd", "int3", "int4", "int2")
LLOYD = np.array([6, 18, 31, 44, 58, 75, 96, 127.0])
LEVELS = {"int4_lloyd": np.r_[-LLOYD[::-1], LLOYD], **{f"int{b}": np.arange(2**b) - (2**b - 1) / 2 for b in (4, 3, 2)}}
STEP = {"int4_lloyd": 1 / 47, "int4": 0.33, "int3": 0.58, "int2": 1.0}


def basis(fed=True, heads=H, dim=D):
    """Orthonormal maps, and the cost of noise in each dim; different for each head."""
    g = torch.Generator().manual_seed(1)
    maps = torch.linalg.qr(torch.randn(2, heads, dim, dim, generator=g).double())[0]
    costs = [torch.logspace(1, -2 + i, dim).expand(heads, -1) * torch.arange(1, 1 + heads)[:, None] for i in (0, 1)]
    costs[0] = torch.stack([x.roll(7 * h) for h, x in enumerate(costs[0])])
    return Basis(*(x.float() for m in maps for x in (m, m.mT.contiguous())), *(costs if fed else ()))


def data(T, seed, heads=H, dim=D):
    return torch.randn(1, heads, T, dim, generator=torch.Generator().manual_seed(seed))


def stored(kv, x, side):
    """Sealed tokens: x and the stored values, in the layer's coordinates; float64 [H, N, D]."""
    to, got = kv.page_store.basis[2 * side].double(), kv.dense()[side]
    n = 4 + (x.shape[2] - 4 - 64) // 64 * 64  # the newest 64 are raw
    return x[0, :, 4:n].double() @ to, got[0, :, 4:n].double() @ to


def hadamard(n):
    m = np.ones((1, 1))
    while len(m) < n:
        m = np.block([[m, m], [m, -m]])
    return m / n**0.5


def test_the_factor_is_the_metrics():
    """L D L^T of the rotated costs; padding dims cost almost nothing."""
    costs = basis().key_costs
    for dim in (64, 96):
        found = feedback(costs, dim).double().numpy()
        turn = np.kron(np.eye(dim // (dim & -dim)), hadamard(dim & -dim))
        for h in range(H):
            weights, cost = found[h, :dim], found[h, dim]
            assert not np.tril(weights).any()
            lower = (weights + np.eye(dim)).T
            diagonal = np.r_[costs[h].double().numpy(), np.zeros(dim - D)]
            want = turn.T @ np.diag(diagonal / diagonal.mean() + 0.02) @ turn
            assert np.abs(lower * cost @ lower.T - want).max() < 1e-5 * np.abs(want).max()


def by_formula(z, costs, key):
    """Babai's nearest plane for rotated rows z [N, D], float64: levels times steps, and the gain in the metric."""
    levels, metric = LEVELS[key], hadamard(D).T @ np.diag(costs / costs.mean() + 0.02) @ hadamard(D)
    lower = np.linalg.cholesky(metric)
    rms = np.sqrt((z**2).mean(1, keepdims=True))
    near = lambda y: levels[np.abs(y[..., None] - levels).argmin(-1)]  # noqa: E731
    best, step = np.full((len(z), 1), -1.0), STEP[key] * rms
    for factor in (1, 0.875, 1.125) if key in ("int4_lloyd", "int3") else (1,):
        c = near(z / (factor * STEP[key] * rms))
        score = (z * c).sum(1, keepdims=True) ** 2 / (c**2).sum(1, keepdims=True)
        step, best = np.where(score > best, factor * STEP[key] * rms, step), np.maximum(best, score)
    code, error = np.zeros_like(z), np.zeros_like(z)
    for d in range(D - 1, -1, -1):
        target = z[:, d] + error[:, d + 1 :] @ lower[d + 1 :, d] / lower[d, d]
        code[:, d] = near(target / step[:, 0])
        error[:, d] = z[:, d] - step[:, 0] * code[:, d]
    row, own, cross = (((a @ metric) * b).sum(1) for a, b in ((z, z), (code, code), (z, code)))
    return code * np.minimum(row / cross, 1.125 * cross / own)[:, None]


@pytest.mark.parametrize("key", FORMATS)
def test_codes_are_the_formulas(key):
    kv, k, v = PagedKV(H, D, key=key, basis=basis()), data(210, 1), data(210, 2)
    kv.append(k, v)
    for side, x in enumerate((k, v)):
        rows, got = (y.numpy() for y in stored(kv, x, side))
        for h in range(H):
            mean = np.zeros((128, D))
            if side == 0:
                mean = np.repeat(np.float16(rows[h].reshape(2, 64, D).mean(1)).astype(float), 64, 0)
            costs = kv.page_store.basis[4 + side][h].double().numpy()
            want = by_formula((rows[h] - mean) @ hadamard(D), costs, key) @ hadamard(D) + mean
            close = np.abs(got[h] - want).max(1) < 4e-3 * np.abs(want).max()
            assert close.mean() > 0.95  # a target next to a boundary may be rounded differently, which changes the rest


@pytest.mark.parametrize("key", FORMATS)
def test_rows_cost_less(key):
    """In the metric; by single dims the error is larger."""
    kept, k, v = [], data(270, 1), data(270, 2)
    for fed in (False, True):
        kv = PagedKV(H, D, key=key, basis=basis(fed))
        kv.append(k, v)
        kept.append([stored(kv, x, side) for side, x in enumerate((k, v))])
    for side, costs in enumerate(basis()[4:]):
        (rows, plain), (_, fed) = kept[0][side], kept[1][side]
        cost = [((x - rows).square() * costs[:, None]).sum() for x in (plain, fed)]
        error = [(x - rows).square().sum() for x in (plain, fed)]
        assert cost[1] < 0.75 * cost[0] and error[1] > error[0]
        along = ((fed * rows * costs[:, None]).sum() / (rows.square() * costs[:, None]).sum()).item()
        assert abs(along - 1) < (2e-2 if side else 5e-2)  # products are unbiased


@pytest.mark.parametrize("key", ("int4_lloyd", "int3"))
def test_pages_are_alike_however_tokens_come(key):
    """In one call, in pieces, token by token, also in bfloat16, and in a layer with one of the heads; heads that keep
    different tokens have separate pages."""
    for dtype in (torch.float32, torch.bfloat16):
        k, v = data(200, 1).to(dtype), data(200, 2).to(dtype)
        found = []
        for parts in ((200,), (70, 1, 63, 66), (1,) * 200):
            kv = PagedKV(H, D, key=key, basis=basis(), dtype=dtype)
            for a, b in zip(k.split(parts, 2), v.split(parts, 2), strict=True):
                kv.append(a, b)
            found.append([x[:, :, :132] for x in kv.dense()])  # sealed in all cases
        assert all(torch.equal(x, y) for more in found[1:] for x, y in zip(found[0], more, strict=True))
    one = [PagedKV(1, D, key=key, basis=Basis(*(x[h : h + 1] for x in basis()))) for h in range(H)]
    both, k, v = PagedKV(H, D, key=key, basis=basis()), data(300, 1), data(300, 2)
    keep = torch.rand(H, 150, generator=torch.Generator().manual_seed(3)) < 0.7
    keep[:, :4] = True
    both.append(k[:, :, :150], v[:, :, :150])
    both.evict(keep[None])
    both.append(k[:, :, 150:], v[:, :, 150:])
    for h, kv in enumerate(one):
        kv.append(k[:, h : h + 1, :150], v[:, h : h + 1, :150])
        kv.evict(keep[None, h])
        kv.append(k[:, h : h + 1, 150:], v[:, h : h + 1, 150:])
        assert all(torch.equal(x[:, h : h + 1], y) for x, y in zip(both.dense(), kv.dense(), strict=True))


def digest() -> str:
    total = hashlib.sha256()
    for dim in (16, 64, 96, 128):
        for key in FORMATS:
            kv = PagedKV(H, dim, key=key, basis=basis(dim=dim))
            k, v = data(150, 5, dim=dim), data(150, 6, dim=dim)
            k[:, :, 9], v[:, :, 11] = 0, 1e-35
            for a, b in zip(k.split((140, 10), 2), v.split((140, 10), 2), strict=True):
                kv.append(a, b)
            for x in kv.dense():
                assert bool(x.isfinite().all())
                total.update(x.numpy().tobytes())
    return total.hexdigest()


def test_levels_give_the_same_bytes():
    said = levels.on_each(digest)
    assert len(set(said.values())) == 1, said


def test_without_feedback_it_is_attend():
    arena, *rest = paged()
    twin, q, k, v = arena.clone(), *(torch.randn(1, 2, 3, 32) for _ in range(3))
    rest += [NONE.int(), NONE.bool(), NONE, NO_SEALS, 128, 64, 0, 0, 0.1, 0.0, 140, 0]
    found = ops.attend(q, k, v, arena, *rest)
    same = ops.attend_feedback(q, k, v, twin, *rest, NONE, NONE)
    assert torch.equal(arena, twin) and all(map(torch.equal, found, same))


@pytest.mark.parametrize("key", FORMATS)
@pytest.mark.parametrize("accumulated", [False, True])
def test_a_call_attends_to_the_codes_that_it_seals(key, accumulated):
    """A page that was full before the call is read like in all later calls: a rejected draft has no effect."""
    kv, k, v, q = PagedKV(H, D, key=key, basis=basis()), data(140, 1), data(140, 2), data(140, 3)
    kv.append(k[:, :, :132], v[:, :, :132])
    first, drafts = kv.clone(), kv.clone()
    before = kv.stats()["parts"]["sealed"]
    for t in range(132, 140):
        now = [x[:, :, t : t + 1] for x in (q, k, v)]
        out, *_ = kv.attend(*now, return_attention=accumulated)
        again, _ = kv.attend(now[0])
        assert torch.allclose(out, again, atol=1e-5), t
    assert kv.stats()["parts"]["sealed"] > before
    drafts.attend(*(x[:, :, 132:137] for x in (q, k, v)))  # five drafts, all rejected
    drafts.crop(132)
    now = [x[:, :, 132:133] for x in (q, k, v)]
    assert torch.equal(drafts.attend(*now)[0], first.attend(*now)[0])


@pytest.mark.parametrize("error,match,change", [
    (ValueError, r"key_feedback: expected 33 in dimension 1", {18: torch.zeros(2, 32, 32)}),
    (ValueError, r"key_feedback: expected 2 in dimension 0", {18: torch.zeros(3, 33, 32)}),
    (ValueError, r"value_feedback: expected 32 in dimension 2", {19: torch.zeros(2, 33, 31)}),
    (TypeError, "value_feedback: expected float32, got float16", {19: torch.zeros(2, 33, 32).half()}),
    (ValueError, "key_feedback: expected a contiguous tensor", {18: torch.zeros(2, 32, 33).mT}),
    (ValueError, "v: expected 3 in dimension 2 .as k has", {2: torch.zeros(1, 2, 4, 32)}),
    (ValueError, "k: expected 1 in dimension 0", dict.fromkeys(range(3), torch.zeros(2, 2, 3, 32))),
    (ValueError, "seals: expected 2 in dimension 1", {9: torch.zeros(0, 3, dtype=torch.int64)}),
    (ValueError, "mask: expected 3 in dimension 1", {7: torch.zeros(1, 2, dtype=torch.bool)}),
    (ValueError, "k: expected finite numbers", {1: torch.full((1, 2, 3, 32), torch.nan)}),
])  # fmt: skip
def test_bad_inputs(error, match, change):
    arena, *rest = paged()
    args = [torch.zeros(1, 2, 3, 32), torch.zeros(1, 2, 3, 32), torch.zeros(1, 2, 3, 32), arena, *rest, NONE.int(),
            NONE.bool(), NONE, NO_SEALS, 128, 64, 0, 0, 0.1, 0.0, 0, 0, NONE, NONE]  # fmt: skip
    for i, x in change.items():
        args[i] = x
    with pytest.raises(error, match=match):
        ops.attend_feedback(*args)
