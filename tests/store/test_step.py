"""`_C.Table.step`, which bypasses torch's dispatcher: its results are identical to the op's, and calls it does not
support use the op."""

import contextlib
import functools
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from generation import cache_of, logits_of, select
from models import ids, model
from stored import same, state
from test_attend import error
from torch.utils._python_dispatch import TorchDispatchMode

from kvcompress import PagedKV, formats, ops, policies
from kvcompress.hf import lazy

H, G, D = 2, 2, 32
BF16 = torch.bfloat16
pytestmark = pytest.mark.skipif(not ops.TENSORS, reason="this torch has no DLPack exchange API")


def draw(T, seed=0, dtype=torch.float32, batch=1, heads=H, group=G, dim=D):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, T, h, dim, generator=generator).to(dtype).transpose(1, 2)
            for h in (heads * group, heads, heads)]  # fmt: skip


class Counted(PagedKV):
    """Counts its calls of the op."""

    calls = 0

    def _step_by_op(self, *args):
        self.calls += 1
        return super()._step_by_op(*args)


def by_op(kv):
    """The same layer with all calls through the op."""
    kv = kv.clone()
    kv.op = functools.partial(ops.attend)
    return kv


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize(
    "key,value", [(f, f) for f in formats.NAMES if f not in formats.CALIBRATED] + [("int8", "int2")]
)
def test_steps_equal_the_op(key, value):
    """Steps and short chunks over several seals, compared with the same layer through the op."""
    for dtype, batch in ((torch.float32, 1), (BF16, 3), (torch.float16, 2)):
        kv = Counted(H, D, key=key, value=value, batch=batch, dtype=dtype, page_size=16)
        twin, calls = by_op(kv), 0
        for i, T in enumerate((5, 1, 1, 9, 3, *[1] * 40, 20, 1)):
            q, k, v = draw(T, i, dtype, batch)
            before = kv.calls
            got, want = kv.attend(q, k, v, softcap=2.0 * (i % 2)), twin.attend(q, k, v, softcap=2.0 * (i % 2))
            assert all(torch.equal(x, y) and x.dtype == y.dtype and x.stride() == y.stride()
                       for x, y in zip(got, want, strict=True))  # fmt: skip
            calls += kv.calls - before
        assert same(state(kv), state(twin))
        assert (calls <= 3) if key == "raw" else 2 <= calls <= 12  # calls that seal, or for which the pool grows
        kv.page_store.pool.check()


@pytest.mark.parametrize("options", [
    dict(window=40), dict(window=32, chunked=True), dict(policy=policies.StreamingLLM(4, 30)),
    dict(policy=policies.KNorm(30)), dict(policy=policies.SnapKV(30, 8)), dict(policy=policies.H2O(30)),
    dict(spans=[(0, 0.25, "int8"), (0.25, 1.0, "int4")]), dict(residual_length=0, key="int8"),
    dict(sinks=0), dict(value_dim=64),
    dict(policy=policies.AdaKV(policies.KNorm(30))),
], ids=str)  # fmt: skip
def test_steps_with_windows_evictions_and_spans(options):
    """Windows, evictions, spans, heads with different tokens."""
    kv = Counted(H, D, **{"key": "int4", "page_size": 16, **options})
    twin = by_op(kv)
    for i, T in enumerate((50, *[1] * 40, 3, 1)):
        q, k, v = draw(T, i)
        v = torch.cat([v, v], 3)[..., : kv.value_dim]
        got, want = kv.attend(q, k, v), twin.attend(q, k, v)
        assert all(map(torch.equal, got, want))
    assert same(state(kv), state(twin))
    assert (kv.calls < 30) == ("H2O" not in str(options))  # which needs the attention of each call


@pytest.mark.parametrize("options", [dict(head_dim=48, value_dim=64, key="int4_g32"), dict(head_dim=24, key="int4")])
def test_rows_of_padded_width_are_refused(options):
    """If pages hold padded rows, rows of the padded width are rejected, and nothing is written."""
    kv = PagedKV(H, **options, page_size=16)
    shapes = (kv.head_dim, kv.value_dim)
    kv.append(*(torch.randn(1, H, 10, dim) for dim in shapes))
    before = state(kv)
    assert kv.page_store.page_dims != shapes
    with pytest.raises(ValueError, match=rf"expected \[1, ?{H}, ?1, ?{shapes[0]}\]"):
        kv.append(*(torch.randn(1, H, 1, dim) for dim in kv.page_store.page_dims))
    assert same(state(kv), before) and kv.seen == 10


def test_float64():
    """Compared with float64 over the stored values."""
    kv = Counted(H, D, key="int8", dtype=BF16, page_size=16)
    kv.append(*draw(40, 1, BF16)[1:])
    kv.append(*draw(1, 1, BF16)[1:])  # seals
    for i in range(8):
        q, k, v = draw(1, 2 + i, BF16)
        K, V = (torch.cat([x, y], 2).double().repeat_interleave(G, 1)
                for x, y in zip(kv.dense(), (k, v), strict=True))  # fmt: skip
        calls = kv.calls
        out, lse = kv.attend(q, k, v)
        scores = q.double() @ K.transpose(2, 3) * D**-0.5
        assert kv.calls == calls
        assert error(out, scores.softmax(-1) @ V) < 5e-3 and (lse - scores.logsumexp(-1)).abs().max() < 1e-3


class Sub(torch.Tensor):
    pass


REFUSED = {
    "subclass": lambda q, k, v: (q, k.as_subclass(Sub), v),
    "parameter": lambda q, k, v: (torch.nn.Parameter(q), k, v),
    "dtype of k": lambda q, k, v: (q, k.half(), v),
    "dtype of v": lambda q, k, v: (q, k, v.half()),
    "float64": lambda q, k, v: (q.double(), k, v),
    "integers": lambda q, k, v: (q.int(), k, v),
    "heads": lambda q, k, v: (q, k[:, :1], v),
    "dim": lambda q, k, v: (q, k, v[..., :16]),
    "tokens of q": lambda q, k, v: (q[:, :, :0], k, v),
    "tokens of v": lambda q, k, v: (q, k, torch.cat([v, v], 2)),
    "rows": lambda q, k, v: (q.expand(2, -1, -1, -1), k, v),
    "dimensions": lambda q, k, v: (q[0], k, v),
    "strides": lambda q, k, v: (q, k, torch.stack([v, v], -1)[..., 0]),
    "meta": lambda q, k, v: (q.to("meta"), k, v),
    "sparse": lambda q, k, v: (q, k.to_sparse(), v),
    "no tensor": lambda q, k, v: (q, None, v),
    "an array": lambda q, k, v: (q, k.numpy(), v),
}


OF_QUERY = ("parameter", "float64", "integers", "tokens of q", "rows", "dimensions", "meta")


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_tensors_use_the_op(name):
    kv = PagedKV(H, D, key="int8")
    kv.append(*draw(5)[1:])
    before, table = state(kv), kv.page_store.table
    q, k, v = REFUSED[name](*draw(1, 1))
    assert table.step(q, k, v, 0.1, 0, 0.0, None) is None and same(state(kv), before)
    assert table.takes(k, v) == (name in OF_QUERY) and not table.takes(k, v, 0)  # on a GPU


@pytest.mark.parametrize("numbers", [
    (1, 0, 0.0), (0.1, True, 0.0), (0.1, 0.0, 0.0), (0.1, 0, 0), (np.float64(0.1), 0, 0.0), (float("nan"), 0, 0.0),
    (2e38, 0, 0.0), (0.1, 0, 2e38), (0.1, 2**31, 0.0), (0.1, 2**70, 0.0), (0.1, 0, -1.0), (0.1, 0, float("inf")),
    (None, 0, 0.0),
], ids=str)  # fmt: skip
def test_unsupported_numbers_use_the_op(numbers):
    kv = PagedKV(H, D, key="int8")
    kv.append(*draw(5)[1:])
    q, k, v = draw(1, 1)
    assert kv.page_store.table.step(q, k, v, *numbers, None) is None and kv.seen == 5
    with pytest.raises(ValueError, match="window: expected"):
        kv.attend(q, k, v, window=-1)
    assert kv.seen == 5


def test_wrong_numbers_of_arguments():
    table = PagedKV(H, D).page_store.table
    for method in (table.takes, table.step):
        with pytest.raises(TypeError, match="expected"):
            method(1)


def test_memory_of_the_arena_is_refused():
    """k inside the pages that the call writes."""
    kv = PagedKV(H, D, key="int8")
    q, k, v = draw(1)
    kv.append(*draw(5)[1:])
    arena = kv.page_store.views()[0]
    inside = arena[: H * D * 4].view(torch.float32).view(1, H, 1, D)
    assert kv.page_store.table.step(q, inside, v, 0.1, 0, 0.0, None) is None
    with pytest.raises(ValueError, match="shares memory"):
        kv.attend(q, inside, v)
    kv.attend(q, k, v)


@pytest.mark.parametrize("what,message", [("k", "NaN or Inf"), ("v", "NaN or Inf"), ("q", "")])
def test_nan_and_inf(what, message):
    kv = Counted(H, D, key="int8")
    kv.append(*draw(5)[1:])
    before, calls = state(kv), kv.calls
    given = dict(zip("qkv", draw(1, 1), strict=True))
    given[what][0, 0, 0, 3] = torch.inf
    if what == "q":
        out, lse = kv.attend(*given.values())
        assert out[0, 0].isnan().all() and lse[0, 0].isnan() and out[0, 1:].isfinite().all()
        assert kv.calls == calls
        return
    with pytest.raises(ValueError, match=message):
        kv.attend(*given.values())
    assert same(state(kv), before)
    kv.attend(*draw(1, 1))


def test_gradients_use_the_op():
    """Gradients are not dropped silently."""
    kv = Counted(H, D)
    kv.append(*draw(5)[1:])
    q, k, v = draw(1, 1)
    q.requires_grad_(), k.requires_grad_()
    kv.attend(q, k, v)
    calls = kv.calls
    with torch.enable_grad():
        for given in ((q, k.detach(), v), (q.detach(), k, v)):
            with pytest.raises(ValueError, match="autograd"):
                kv.attend(*given)
        kv.attend(q.detach(), k.detach(), v)
    assert kv.calls == calls + 1 and kv.seen == 7


def test_torch_func_tensors_use_the_op():
    """Inside vmap, a tensor's memory must not be read directly."""
    kv = PagedKV(H, D)
    kv.append(*draw(5)[1:])
    found = []
    q, k, v = (x[None].expand(2, -1, -1, -1, -1) for x in draw(1, 1))

    def inside(q, k, v):
        found.append((kv.page_store.table.takes(k, v), kv.page_store.table.step(q, k, v, 0.1, 0, 0.0, None)))
        return q

    torch.vmap(inside)(q, k, v)
    torch.func.functionalize(inside)(*(x[0] for x in (q, k, v)))
    assert found == [(False, None)] * 2 and kv.seen == 5


class Elsewhere(TorchDispatchMode):
    """New tensors whose memory cannot be written directly."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten.empty.memory_format:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


@pytest.mark.parametrize("way", ["functionalize", "jvp", "grad", "mode"])
def test_results_inside_of_transforms_are_the_ops(way):
    """For tensors that no transform has wrapped, in a transform that wraps new ones."""
    kv = Counted(H, D)
    kv.append(*draw(5)[1:])
    calls, given, x = kv.calls, draw(1, 1), torch.ones(1)

    def inside(x):
        with torch.no_grad(), Elsewhere() if way == "mode" else contextlib.nullcontext():
            try:
                kv.attend(*given)
            except RuntimeError:  # the op does not support it either
                assert way == "functionalize"
        return (x * 2).sum()

    run = {"functionalize": lambda: torch.func.functionalize(inside)(x), "grad": lambda: torch.func.grad(inside)(x),
           "jvp": lambda: torch.func.jvp(inside, (x,), (x,)), "mode": lambda: inside(x)}  # fmt: skip
    run[way]()
    assert kv.calls == calls + 1 and kv.seen == (5 if way == "functionalize" else 6)
    kv.attend(*given)


def test_no_memory_for_pythons_objects():
    """torch cannot return a result: nothing is freed twice."""
    pytest.importorskip("_testcapi")
    code = """if True:
        import _testcapi, torch, test_step as t
        from kvcompress import PagedKV
        kv, failures = PagedKV(t.H, t.D, key="int8"), 0
        with torch.no_grad():
            kv.append(*t.draw(5)[1:])
            given = *t.draw(1, 1), 0.1, 0, 0.0, None
            step, seen = kv.page_store.table.step, kv.seen
            for n in range(12):
                _testcapi.set_nomemory(n, n + 1)
                try:
                    found = step(*given)
                except MemoryError:
                    failures, found = failures + 1, None
                finally:
                    _testcapi.remove_mem_hooks()
                seen += found is not None
                assert kv.seen == seen and (found is None or found[0].isfinite().all())
            kv.attend(*given[:3])
        print(failures)"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert int(done.stdout) >= 1


def test_an_invalid_call_does_not_evict():
    kv = PagedKV(H, D, key="int8", page_size=16, policy=policies.KNorm(30))
    kv.eviction.deferred = True
    kv.attend(*draw(50))
    kv.eviction.overdue = True
    kept = kv.page_store.kept_tokens
    with pytest.raises(ValueError, match="as in k"):
        kv.attend(draw(2)[0], *draw(1)[1:])
    assert kv.page_store.kept_tokens == kept > 30


def test_results_outlive_their_layer():
    kv = PagedKV(H, D, key="int8")
    kv.append(*draw(5)[1:])
    out, lse = kv.attend(*draw(1, 1))
    copies = out.clone(), lse.clone()
    del kv
    more = [torch.randn(1000) for _ in range(50)]
    assert torch.equal(out, copies[0]) and torch.equal(lse, copies[1]) and len(more) == 50
    out += 1
    assert torch.equal(out, copies[0] + 1) and not out.requires_grad


def test_many_threads():
    """Layers of one pool concurrently; then two callers of one layer, one of which may find an append in progress."""
    from kvcompress import _C

    pool = _C.Pool()
    kvs = [PagedKV(H, D, key="int8", pool=pool, page_size=16) for _ in range(4)]
    twins, failed = [by_op(kv) for kv in kvs], []

    def life(kv):
        try:
            with torch.no_grad():
                for i in range(150):
                    kv.attend(*draw(1, i))
        except BaseException as failure:
            failed.append(failure)

    threads = [threading.Thread(target=life, args=(kv,)) for kv in kvs]
    [t.start() for t in threads]
    [t.join() for t in threads]
    for twin in twins:
        life(twin)
    assert not failed and all(same(state(kv), state(twins[0])) for kv in [*kvs, *twins])
    seen = kvs[0].seen
    threads = [threading.Thread(target=life, args=(kvs[0],)) for _ in range(2)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert all(isinstance(x, ValueError) and "under way" in str(x) for x in failed) and kvs[0].seen > seen + 100
    pool.check()


def test_a_model_steps_without_the_op(monkeypatch):
    """In every layer and step, except those that seal a page."""
    m = select(model("llama"), "kvcompress")
    calls = []
    long = PagedKV._step_by_op
    with monkeypatch.context() as other:
        other.setattr(ops, "TENSORS", False)
        want = logits_of(m, cache_of(m, "int8"), [20, *[1] * 10], ids(1, 30))
    monkeypatch.setattr(PagedKV, "_step_by_op", lambda self, *a: calls.append(a[1].shape[2]) or long(self, *a))
    got = logits_of(m, cache_of(m, "int8"), [20, *[1] * 10], ids(1, 30))
    assert all(map(torch.equal, got, want))
    assert len(calls) <= 8  # of 22: the prompt of two layers, its last page filled, pages sealed


def test_lazy_pairs_are_of_their_pass():
    """Prepared for several layers at once; those of a failed pass are dropped."""
    m = select(model("llama"), "kvcompress")
    cache = cache_of(m, "raw")
    logits_of(m, cache, [20])
    k, v = draw(3)[1:]
    with torch.inference_mode():
        first = cache.update(k, v, 0)
    assert sum(map(len, cache.forward_pass.lazy_pairs.values())) == 1
    for got, want in zip(first, lazy.lazy_pair(first[0].block), strict=True):
        assert (got.shape, got.dtype, got.device, got.side) == (want.shape, want.dtype, want.device, want.side)
        assert got.block is want.block and got.shape == (1, 2, 23, 32)
    cache.forward_pass.rollback(20)
    assert not cache.forward_pass.lazy_pairs and cache.get_seq_length() == 20
    second, third = (cache.update(k, v, i) for i in range(2))
    assert not second[0].is_inference() and second[0].block is not third[0].block is third[1].block
    assert not any(cache.forward_pass.lazy_pairs.values())
