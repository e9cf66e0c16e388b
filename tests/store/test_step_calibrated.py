"""Table.step of calibrated layers, whose rows it transforms, and its behaviour without memory."""

import pytest
import torch
from stored import same, state
from test_attend import error
from test_step import BF16, Counted, D, G, H, _no_grad, by_op, draw  # noqa: F401

from kvcompress import PagedKV
from kvcompress.quantization.calibration import Basis


def basis(heads=H, dim=D):
    """Matrices of K and of V for each head, far from orthogonal."""
    generator = torch.Generator().manual_seed(5)
    maps = [torch.eye(dim) + 0.3 * torch.randn(heads, dim, dim, generator=generator) / dim**0.5 for _ in "kv"]
    return Basis(*(x for m in maps for x in (m, torch.linalg.inv(m))))


@pytest.mark.parametrize("key", ["raw", "int4_lloyd", "cal2"])
def test_a_calibrated_life(key):
    """Steps of one token are transformed by the call; chunks, whose rounding is compensated, use the op."""
    for dtype, batch, dim in ((torch.float32, 1, 64), (BF16, 3, 64), (torch.float16, 2, 128)):
        kv = Counted(H, dim, key=key, batch=batch, dtype=dtype, page_size=16, basis=basis(dim=dim))
        twin, calls = by_op(kv), 0
        for i, T in enumerate((5, 1, 1, 9, *[1] * 40, 20, 1)):
            q, k, v = draw(T, i, dtype, batch, group=1 + i % 3, dim=dim)
            before = kv.calls
            got, want = kv.attend(q, k, v), twin.attend(q, k, v)
            assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(got, want, strict=True))
            calls += kv.calls - before
        assert same(state(kv), state(twin))
        assert 3 <= calls <= 12  # chunks, and steps that seal or for which the pool grows
        kv.page_store.pool.check()


def test_calibrated_float64():
    """Attention to the untransformed rows, whatever a layer of raw pages transforms them to."""
    kv, rows = Counted(H, D, key="raw", basis=basis()), draw(30, 1)
    kv.append(*rows[1:])
    kv.append(*draw(1, 2)[1:])
    rows = [torch.cat([x, y], 2) for x, y in zip(rows, draw(1, 2), strict=True)]
    q, k, v = draw(1, 3)
    K, V = (torch.cat([x, y], 2).double().repeat_interleave(G, 1) for x, y in zip(rows[1:], (k, v), strict=True))
    calls = kv.calls
    out, lse = kv.attend(q, k, v)
    scores = q.double() @ K.transpose(2, 3) * D**-0.5
    assert kv.calls == calls
    assert error(out, scores.softmax(-1) @ V) < 1e-5 and (lse - scores.logsumexp(-1)).abs().max() < 1e-5


@pytest.mark.parametrize("change", [
    lambda maps: maps[:3], lambda maps: list(maps), lambda maps: (None, *maps[1:]),
    lambda maps: (*maps[:3], maps[0][:1]),
    lambda maps: (maps[0].double(), *maps[1:]), lambda maps: (maps[0].mT, *maps[1:]),
    lambda maps: (maps[0].to("meta"), *maps[1:]), lambda maps: (maps[0][0], *maps[1:]),
])  # fmt: skip
def test_maps_that_it_does_not_take(change):
    kv = PagedKV(H, D, key="int8", basis=basis())
    kv.append(*draw(5)[1:])
    before, store = state(kv), kv.page_store
    q, k, v = draw(1, 1)
    assert store.table.step(q, k, v, 0.1, 0, 0.0, change(store.maps)) is None and same(state(kv), before)


@pytest.mark.parametrize("calibrated", [False, True])
def test_no_memory(fail_at, calibrated):
    """Every allocation failure of ours is a MemoryError, and leaves the layer unchanged."""
    kv = Counted(H, D, key="int8", page_size=16, basis=basis() if calibrated else None)
    kv.append(*draw(20)[1:])
    kv.append(*draw(1)[1:])
    before, calls, failures = state(kv), kv.calls, 0
    q, k, v = draw(1, 1)
    for n in range(1, 100):
        fail_at(n)
        try:
            kv.attend(q, k, v)
        except MemoryError:
            failures += 1
            assert kv.calls == calls and same(state(kv), before)
            continue
        finally:
            fail_at(0)
        break
    assert failures >= 1 and kv.seen == 22 and kv.calls == calls
