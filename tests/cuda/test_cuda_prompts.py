"""Long calls of a layer on a device use torch's attention (kvcompress/sdpa.py), with stored tokens decoded in parts:
compared with float64 over the stored values, and with the bytes of the op. On a GPU with torch's kernels, elsewhere
with float64."""

import copy

import far_kernels
import pytest
import torch
from cuda_twin import DEVICE
from far import FAR
from far_kernels import a_device, far_op
from generation import select
from models import ids, model
from stored import same, state
from test_attend import error

from kvcompress import KVCache, PagedKV, ops, policies, sdpa

GPU = DEVICE == "cuda"
B, H, G, D, PAGE = 2, 2, 2, 64, 16
BOUND = {torch.float16: 1e-3, torch.bfloat16: 5e-3}
BF16 = torch.bfloat16


def attention(q, k, v, causal, scale):
    """The result of torch's kernels in float64; lse is inf if a sum is invalid, as in flash attention."""
    K, V = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q.double() @ K.transpose(2, 3) * scale
    if causal:
        slot = torch.arange(K.shape[2], device=q.device)
        scores = scores.masked_fill(slot > slot[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ V
    return out.to(q.dtype), lse.float().nan_to_num(nan=torch.inf)


class Spy:
    """Replaces `PagedKV.dense_op`. calls: (tokens attended to, causal). fail: exception or result of the call of that
    number."""

    def __init__(self):
        self.calls, self.fail = [], {}

    def __call__(self, q, k, v, causal, scale):
        self.calls.append((k.shape[2], causal))
        failure = self.fail.get(len(self.calls) - 1, self)
        if isinstance(failure, BaseException):
            raise failure
        if failure is None:
            return None
        part = sdpa.attend(q, k, v, causal, scale) if GPU else far_op(attention)(q, k, v, causal, scale)
        assert part is not None, "none of torch's kernels takes it"
        return part

    def taken(self):
        calls, self.calls = self.calls, []
        return calls


@pytest.fixture
def spy(monkeypatch):
    made = Spy()
    monkeypatch.setattr(PagedKV, "dense_op", staticmethod(made))
    monkeypatch.setattr(sdpa, "PIECE", 100)
    monkeypatch.setattr(sdpa, "QUERIES", 48)
    return made


def draw(T, seed, dtype=BF16, batch=B, dim=D):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, h, T, dim, generator=generator).to(dtype) for h in (H * G, H, H)]


def layer(**options):
    options = {"key": "int8", "batch": B, "page_size": PAGE, "dtype": BF16, "device": FAR, **options}
    return PagedKV(H, options.pop("dim", D), **options)


def there(*tensors):
    return [x.to(FAR) for x in tensors]


def by_op(kv):
    """The same layer with everything done by the op."""
    kv = kv.clone()
    kv.dense_op = lambda *_: None
    return kv


def wanted(before, q, k, v, scale=D**-0.5):
    """out [B, Hq, T, D], lse of float64 over K and V before the call, own tokens unrounded."""
    K, V = (torch.cat([x.cpu(), y], 2).double().repeat_interleave(G, 1) for x, y in zip(before, (k, v), strict=True))
    slot = torch.arange(K.shape[2])
    scores = q.double() @ K.transpose(2, 3) * scale
    scores = scores.masked_fill(slot > slot[-q.shape[2] :, None], -torch.inf)
    return scores.softmax(-1) @ V, scores.logsumexp(-1)


def check(out, lse, want, dtype=BF16):
    assert out.dtype == dtype and error(out.cpu(), want[0]) <= BOUND[dtype]
    assert lse.dtype == torch.float32 and (lse.cpu() - want[1]).abs().max() <= 1e-3


@pytest.mark.parametrize("key,value,dtype", [
    ("int4", "int4", torch.float16),
    *(pytest.param(*x, marks=pytest.mark.full) for x in (("int8", "int8", BF16),
        ("raw", "raw", torch.float16), ("raw", "raw", BF16), ("int8", "int8", torch.float16), ("int4", "int4", BF16),
        ("int8", "int2", torch.float16), ("int8", "int2", BF16))),
])  # fmt: skip
def test_long_calls(spy, key, value, dtype):
    """Empty layers; an open page; some parts, the last ones shorter. The same pages as the op's."""
    with a_device():
        kv = layer(key=key, value=value, dtype=dtype)
        for i, (T, parts) in enumerate([(150, [150]), (1, []), (1, []), (130, [130, 52, 64, 36]),
                                        (140, [140, 52, 64, 64, 64, 38])]):  # fmt: skip
            q, k, v = draw(T, i, dtype)
            twin, before = by_op(kv), kv.dense()
            out, lse = kv.attend(*there(q, k, v))
            assert spy.taken() == [(n, j == 0) for j, n in enumerate(parts)]
            assert out.shape == q.shape and out.transpose(1, 2).is_contiguous()
            theirs, _ = twin.attend(*there(q, k, v))
            assert same(state(kv), state(twin))
            if key == "raw" or parts == [150]:  # the op seals first, and attends to the result
                assert error(theirs.cpu(), out.cpu().double()) <= 2 * BOUND[dtype]
            if parts:
                check(out, lse, wanted(before, q, k, v), dtype)
        kv.page_store.pool.check()
        ops.check(FAR)


@pytest.mark.parametrize("sinks,page_size,batch", [(0, 16, 1), (20, 16, 1), (4, 64, 3)])
def test_page_sizes_and_sinks(spy, sinks, page_size, batch):
    with a_device():
        kv = layer(sinks=sinks, page_size=page_size, batch=batch)
        for i, T in enumerate((3, 200, 1, 129)):
            q, k, v = draw(T, i, batch=batch)
            before = kv.dense()
            out, lse = kv.attend(*there(q, k, v), scale=0.2)
            assert bool(spy.taken()) == (T > 100)
            check(out, lse, wanted(before, q, k, v, 0.2)) if T > 100 else None


REFUSED = {
    "127 tokens": dict(T=127),
    "pads of the call": dict(mask=True),
    "pads before": dict(pads=True),
    "window": dict(window=299),
    "window of the layer": dict(layer=dict(window=96)),
    "chunks": dict(layer=dict(window=96, chunked=True)),
    "softcap": dict(softcap=3.0),
    "s_aux": dict(s_aux=torch.ones(H * G)),
    "attention": dict(return_attention=True),
    "scale": dict(scale=-0.1),
    "float32": dict(layer=dict(dtype=torch.float32)),
    "half of another kind": dict(query=torch.float16),
    "a policy that wants attention": dict(layer=dict(policy=policies.H2O(400))),
    "evicted": dict(evict=True),
    "filled dims": dict(layer=dict(dim=72)),
    "V of other dims": dict(layer=dict(value_dim=32)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_op_attends(spy, name):
    """Calls for which torch's kernels would give another result, or none."""
    case = dict(REFUSED[name])
    options = case.pop("layer", {})
    T, pads, evict, query = (case.pop(x, None) for x in ("T", "pads", "evict", "query"))
    mask = torch.arange(T or 150)[None] >= 9 if case.pop("mask", False) else None
    with a_device():
        kv = layer(batch=1, **options)
        dtype, dim = kv.dtype, kv.head_dim
        q, k, v = draw(150, 1, dtype, batch=1, dim=dim)
        k, v = there(k, v[..., : kv.value_dim])
        kv.append(k, v, mask=torch.arange(150)[None] >= 9 if pads else None)
        if evict:
            keep = torch.ones(1, 150, dtype=torch.bool)
            keep[:, 60:90] = False
            kv.evict(keep)
        q, k, v = there(*(x[:, :, : T or 150] for x in (q.to(query or dtype), k.cpu(), v.cpu())))
        if "s_aux" in case:
            case["s_aux"] = case["s_aux"].to(FAR)
        kv.attend(q, k, v, mask=mask, **case)
        assert spy.taken() == []
    here = PagedKV(H, D, dtype=BF16)
    here.attend(*draw(150, 1, batch=1))
    assert spy.taken() == []  # nor on the CPU
    assert sdpa.attend(*draw(150, 1), True, 0.1) is None


@pytest.mark.parametrize("options,call", [
    ({"window": 300}, {}),
    ({"window": 320, "chunked": True}, {}),
    pytest.param({}, {"window": 300}, marks=pytest.mark.full),
    pytest.param({"policy": policies.StreamingLLM(4, 200)}, {}, marks=pytest.mark.full),
    ({"policy": policies.SnapKV(200, 16)}, {}),
    ({"policy": policies.KNorm(1000)}, {}),
])  # fmt: skip
def test_calls_in_which_every_query_sees_the_past(spy, options, call):
    """Windows as long as the past; policies that need no attention of the call, before they evict."""
    with a_device():
        kv, least = layer(**options), []
        for i, T in enumerate((140, 160)):
            q, k, v = draw(T, i)
            twin, before = by_op(kv), kv.dense()
            out, lse = kv.attend(*there(q, k, v), **call)
            least.append(len(spy.taken()))
            check(out, lse, wanted(before, q, k, v))
            twin.attend(*there(q, k, v), **call)
            if not isinstance(options.get("policy"), policies.SnapKV):  # whose scores differ by rounding
                assert same(state(kv), state(twin))
        assert least[0] == 1 and least[1] > 1
        if "policy" in options and options["policy"].budget < 300:
            kv.attend(*there(*draw(150, 5)))
            assert kv.eviction.count and spy.taken() == []


@pytest.mark.parametrize("error,where", [(KeyError("x"), 0), (KeyError("x"), 2), (KeyboardInterrupt(), 1)])
def test_a_failure_changes_nothing(spy, error, where):
    with a_device():
        kv = layer()
        kv.append(*there(*draw(150, 1)[1:]))
        before, qkv = state(kv), draw(140, 2)
        dense = kv.dense()
        spy.fail = {where: error}
        with pytest.raises(type(error)):
            kv.attend(*there(*qkv))
        assert same(state(kv), before)
        spy.fail = {}
        kv.op = lambda *_: exec("raise KeyError('op')")
        with pytest.raises(KeyError, match="op"):
            kv.attend(*there(*qkv))
        assert same(state(kv), before)
        del kv.op
        check(*kv.attend(*there(*qkv)), wanted(dense, *qkv))
        kv.page_store.pool.check()


@pytest.mark.parametrize("where,answer", [
    (0, None), (2, torch.OutOfMemoryError("none left")), pytest.param(2, None, marks=pytest.mark.full),
    pytest.param(0, torch.OutOfMemoryError("none left"), marks=pytest.mark.full),
])  # fmt: skip
def test_fallback_to_the_op(spy, where, answer):
    """If no kernel supports a part, or memory is exhausted."""
    with a_device():
        kv = layer()
        kv.append(*there(*draw(150, 1)[1:]))
        twin, qkv = by_op(kv), draw(140, 2)
        spy.fail = {where: answer}
        for got, want in zip(kv.attend(*there(*qkv)), twin.attend(*there(*qkv)), strict=True):
            assert error(got.cpu(), want.cpu().double()) <= (1e-3 if GPU else 0)
        assert len(spy.taken()) == where + 1 and same(state(kv), state(twin))


@pytest.mark.parametrize("stored", [0, 150])
def test_nan_and_inf(spy, stored):
    """NaN or Inf in a query is NaN in its row only; in K it is flagged."""
    with a_device():
        kv = layer()
        if stored:
            kv.append(*there(*draw(stored, 1)[1:]))
        q, k, v = draw(140, 2)
        q[0, 1, 70, 3], q[1, 2, 0, 0] = torch.nan, torch.inf
        before = kv.dense()
        out, lse = (x.cpu() for x in kv.attend(*there(q, k, v)))
        assert spy.taken()
        none = torch.zeros(lse.shape, dtype=torch.bool)
        none[0, 1, 70] = none[1, 2, 0] = True
        assert torch.equal(lse.isnan(), none) and torch.equal(out.isnan(), none[..., None].expand(out.shape))
        assert lse[~none].isfinite().all()
        want = wanted(before, q.masked_fill(none[..., None], 0), k, v)
        assert error(out[~none], want[0][~none]) <= BOUND[BF16]
        ops.check(FAR)
        k[0, 0, 5, 5] = torch.nan
        kv.attend(*there(q, k, v))
        with pytest.raises(ValueError, match="NaN or Inf in k or v"):
            ops.check(FAR)


def test_generate(spy):
    """A model in bf16: its prompt, and a second one."""
    results = []
    with a_device(), torch.no_grad():
        m = far_kernels.there(select(copy.deepcopy(model("llama")).to(BF16), "kvcompress"))
        for long in (True, False):
            cache, prompt, logits = KVCache(m.config, "int8", page_size=PAGE), ids(2, 300), []
            spy.fail = {} if long else dict.fromkeys(range(100))
            for part in (prompt[:, :150], prompt[:, 150:], prompt[:, :1]):
                logits.append(m(part, past_key_values=cache).logits.float())
                assert bool(spy.taken()) == (part.shape[1] > 1)
            results.append(torch.cat(logits, 1))
    assert error(results[0], results[1].double()) <= 5e-2


@pytest.fixture(params=["cudnn", "flash"])
def backend(request, monkeypatch):
    """A single one of torch's kernels."""
    old = not GPU or torch.cuda.get_device_capability() not in ((9, 0), (10, 0), (10, 3))
    if request.param == "cudnn" and (old or torch.backends.cudnn.version() <= 91500):
        pytest.skip("a Hopper or a Blackwell, with cuDNN 9.15.1")
    switches = torch.backends.cuda
    before = switches.cudnn_sdp_enabled(), switches.flash_sdp_enabled()
    monkeypatch.setattr(sdpa, "CUDNN_LEAST", 0)
    switches.enable_cudnn_sdp(request.param == "cudnn")
    switches.enable_flash_sdp(request.param == "flash")
    yield request.param
    switches.enable_cudnn_sdp(before[0])
    switches.enable_flash_sdp(before[1])


@pytest.mark.skipif(not GPU, reason="KVCOMPRESS_TEST_DEVICE=cuda")
@pytest.mark.parametrize("dtype", [torch.float16, BF16])
@pytest.mark.parametrize("T", [2048, 300])
def test_kernels_of_torch(backend, monkeypatch, dtype, T):
    """Each kernel at realistic sizes, compared with the op and float64; K and V are expanded to every head of a
    group."""
    monkeypatch.setattr(sdpa, "PIECE", 2048)
    generator = torch.Generator("cuda").manual_seed(1)

    def draw_there(n):
        return [torch.randn(1, h, n, 128, generator=generator, dtype=dtype, device=FAR) for h in (32, 8, 8)]

    kv = PagedKV(8, 128, key="int8", dtype=dtype, device=FAR)
    kv.append(*draw_there(4999)[1:])
    q, k, v = draw_there(T)
    twin, (K, V) = by_op(kv), kv.dense()
    parts = []

    def spying(*args):
        parts.append(sdpa.attend(*args))
        assert parts[-1] is not None, f"{backend} takes no {args[0].shape}, {args[1].shape}"
        return parts[-1]

    kv.dense_op = spying
    out, lse = kv.attend(q, k, v)
    assert len(parts) == 4
    theirs, their_lse = twin.attend(q, k, v)
    K, V = (torch.cat(x, 2).double() for x in ((K, k), (V, v)))
    slot = torch.arange(K.shape[2], device=FAR)
    hidden = slot > slot[-T:, None]
    for h in range(32):
        scores = (q[0, h].double() @ K[0, h // 4].T / 128**0.5).masked_fill(hidden, -torch.inf)
        want, want_lse = scores.softmax(-1) @ V[0, h // 4], scores.logsumexp(-1)
        assert error(out[0, h], want) <= BOUND[dtype], h
        assert (lse[0, h] - want_lse).abs().max() <= 1e-3, h
        assert error(theirs[0, h], want) <= BOUND[dtype] + 5e-3, h
    assert (lse - their_lse).abs().max() <= 2e-2
    assert same(state(kv), state(twin))
    ops.check(FAR)
