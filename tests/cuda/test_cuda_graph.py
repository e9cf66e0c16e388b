"""Calls that are captured once and replayed, as CUDA graphs do: everything that changes is in tensors."""

import copy
import os

import numpy as np
import pytest
import torch
from cuda_twin import DEVICE, LAUNCHER, Twin
from far import FAR
from far_kernels import a_device, there
from generation import cache_of, logits_of, select
from models import ids, left_pads, model
from test_attend import error
from test_moving import Elsewhere, back, content

from kvcompress import _C, KVCache, PagedKV, ops, policies
from kvcompress.cuda_graph import CUDAGraphLayer, room_of, steps

UNCACHED = "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ  # a sanitizer is running
OPTIONS = {
    "int8": dict(key="int8", value="int4", page_size=32),
    "kivi4": dict(key="kivi4", value="nvfp4", page_size=16),
    "raw": dict(key="raw"),
    "window": dict(key="int8", sinks=0, window=40, page_size=16),
    "dims": dict(key="int4", value="int8", value_dim=24, page_size=16, residual_length=20),
}


def pair_of(**options):
    """(a layer with pages on the device, one on the CPU)."""
    with Elsewhere():
        far = PagedKV(2, 32, batch=2, device=DEVICE, **options)
    return far, PagedKV(2, 32, batch=2, **options)


def recorded(monkeypatch, layer, qkv, how):
    """The captured call `layer.attend(*qkv)`: () -> out. twin: CUDA's kernels with the arguments of the launchers;
    compiled: the CPU's, in a graph of torch.compile. On a GPU (KVCOMPRESS_TEST_DEVICE) a CUDA graph, and a compiled
    one."""
    layer.pin()
    if how == "compiled":
        call = torch.compile(layer.attend, fullgraph=True, backend="aot_eager")
        return lambda: call(*qkv)[0]
    if DEVICE == "cuda":
        if UNCACHED:
            pytest.skip("a capture wants torch's allocator")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer.attend(*qkv)[0]

        def replay():
            graph.replay()
            ops.check(DEVICE)
            return out

        return replay
    twin, kept = Twin(launcher=LAUNCHER(lambda name, *_: LAUNCHED.append(name.decode()) or 0)), []

    def record(*call):
        twin.counters = call[-1]
        kept.append(twin.record(*call[:-1]))
        q, v = call[0], call[2]
        return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]), None, None

    with monkeypatch.context() as patch:
        patch.setattr(ops, "attend_step", record)
        layer.attend(*qkv)

    def run():
        out = kept[0]()[0]
        assert twin.flags == 0
        return layer.store.page_store.cut(out, 1)

    return run


LAUNCHED: list[str] = []
"""Kernels of the twin's recorded calls."""


class Pair:
    def __init__(self, monkeypatch, how, tokens, **options):
        self.far, self.near = pair_of(**options)
        self.patch, self.how, self.tokens = monkeypatch, how, tokens
        self.generator, self.dv = torch.Generator().manual_seed(1), options.get("value_dim", 32)
        self.bound = 2e-2 if how == "twin" or DEVICE == "cuda" else 1e-6
        self.both(lambda kv: kv.attend(*(x.to(kv.device) for x in self.draw(tokens))))  # kernels are there
        self.both(lambda kv: kv.reset())
        self.record()

    def draw(self, n):
        dims = ((4, 32), (2, 32), (2, self.dv))
        return [torch.randn(self.far.batch, h, n, d, generator=self.generator) for h, d in dims]

    def record(self):
        self.graph_layer = CUDAGraphLayer(self.far, 600, self.tokens)
        self.qkv = [x.to(DEVICE) for x in self.draw(self.tokens)]
        self.run = recorded(self.patch, self.graph_layer, self.qkv, self.how)

    def step(self, n):
        for _ in range(n):
            for x, y in zip(self.qkv, self.draw(self.tokens), strict=True):
                x.copy_(y)
            with self.graph_layer.step():
                out = self.run()
            want = self.near.attend(*(x.cpu() for x in self.qkv))[0]
            assert error(out.cpu().transpose(1, 2), want.double()) <= self.bound
        self.same()

    def same(self):
        for a, b in zip(content(self.far), content(self.near), strict=True):
            assert np.array_equal(a, b)

    def both(self, act):
        for kv in (self.far, self.near):
            act(kv)


@pytest.mark.parametrize("how,tokens", [
    ("twin", 1), ("compiled", 3), *(pytest.param(*x, marks=pytest.mark.full) for x in (("twin", 3), ("compiled", 1)))
])  # fmt: skip
@pytest.mark.parametrize("name", OPTIONS)
def test_replay(monkeypatch, name, how, tokens):
    """One captured call, replayed through seals, crops, beams and other appends, starting with an empty layer. Stored
    bytes and results equal those of a layer called normally."""
    if how == "twin" and name == "dims":
        pytest.skip("what fills a dim up is an op of the graph's; the twin records ours alone")
    torch._dynamo.reset()
    pair = Pair(monkeypatch, how, tokens, **OPTIONS[name])
    page = pair.far.page_size
    first = pair.draw(page - 2)
    pair.both(lambda kv: kv.append(*(x.to(kv.device) for x in first[1:])))
    pair.step(page // tokens + 3)  # over a seal
    pair.both(lambda kv: kv.crop(kv.seen - 1))
    pair.step(2)
    pair.both(lambda kv: kv.select([1, 1]))
    pair.step(2)
    more = pair.draw(page + 7)
    pair.both(lambda kv: kv.append(*(x.to(kv.device) for x in more[1:])))
    pair.step(2)
    pair.both(lambda kv: kv.reset())
    pair.step(2)
    assert pair.far.seen == 2 * tokens


@pytest.mark.skipif(DEVICE != "cpu", reason="launches are counted on the twin")
@pytest.mark.parametrize("name", ["int8", "kivi4"])
def test_one_launch_a_step(monkeypatch, name):
    """Also when a page is sealed, which happens before."""
    pair = Pair(monkeypatch, "twin", 1, **OPTIONS[name])
    sealed = []
    real = CUDAGraphLayer._seal
    monkeypatch.setattr(CUDAGraphLayer, "_seal", lambda self: (sealed.append(self), real(self))[1])
    for _ in range(2 * pair.far.page_size + 5):
        LAUNCHED.clear()
        pair.step(1)
        assert len(LAUNCHED) == 1 and LAUNCHED[0].startswith("kvc_attend")
    assert 0 < len(sealed) < 4


def test_made_in_inference_mode(monkeypatch):
    pair = Pair(monkeypatch, "twin", 1, **OPTIONS["int8"])
    with torch.inference_mode():
        pair.graph_layer = CUDAGraphLayer(pair.far, 600, 1)
    pair.run = recorded(monkeypatch, pair.graph_layer, pair.qkv, "twin")
    pair.step(2)


def test_an_eviction_needs_a_new_capture(monkeypatch):
    pair = Pair(monkeypatch, "twin", 1, **OPTIONS["int8"])
    first = pair.draw(150)
    pair.both(lambda kv: kv.append(*(x.to(kv.device) for x in first[1:])))
    pair.step(1)
    keep = torch.rand(2, 151, generator=pair.generator) < 0.5
    keep[:, :4] = True
    pair.both(lambda kv: kv.evict(keep))
    before = content(pair.far)
    with pytest.raises(ValueError, match="capture the graph again"), pair.graph_layer.step():
        raise AssertionError("a step that cannot be")
    assert all(np.array_equal(a, b) for a, b in zip(content(pair.far), before, strict=True))
    pair.record()
    pair.step(3)


def test_invalid_captures_raise():
    far, near = pair_of(key="int8")
    with pytest.raises(ValueError, match="expected a layer with all of its pages on a GPU"):
        CUDAGraphLayer(near, 100)
    with pytest.raises(ValueError, match="without a policy"):
        CUDAGraphLayer(PagedKV(2, 32, policy=policies.KNorm(budget=70)), 100)
    layer = CUDAGraphLayer(far, 100)
    with pytest.raises(ValueError, match="before its first step"):
        layer.attend(*(torch.ones(2, h, 1, 32, device=DEVICE) for h in (4, 2, 2)))
    with pytest.raises(ValueError, match="tokens: expected at least 1"):
        CUDAGraphLayer(far, 100, 0)
    with pytest.raises(ZeroDivisionError), layer.step():
        raise ZeroDivisionError
    assert far.seen == 0 and far.page_store.pool.stats()["used"] == 0
    far.append(*[torch.ones(2, 2, 100, 32, device=DEVICE)] * 2)
    with pytest.raises(ValueError, match="at most 100 slots, got one on .* with 101"), layer.step():
        pass
    back(far)
    far.reset()
    with pytest.raises(ValueError, match="expected the layer where it was recorded"), layer.step():
        pass


def test_captured_memory_does_not_move():
    """A captured call reads the arena at its old address; if that would have to grow, an error is raised, and nothing
    is lost."""
    with Elsewhere():
        pool = _C.Pool()
        first, other = (PagedKV(2, 32, key="int8", page_size=16, pool=pool) for _ in range(2))
    layer, arena = CUDAGraphLayer(first, 300), first.page_store.mirror.arena
    qkv = [torch.ones(1, h, 1, 32) for h in (4, 2, 2)]
    with layer.step():
        layer.attend(*qkv)
    at = arena.bytes.data_ptr()
    for _ in range(290):
        with layer.step():
            layer.attend(*qkv)
        assert arena.bytes.data_ptr() == at
    rows = torch.ones(1, 2, 4000, 32)
    with pytest.raises(MemoryError, match="pool is full"):
        for _ in range(100):
            other.append(rows, rows)
            seen = other.seen
    assert other.seen == seen and first.seen == 291
    dense = other.dense()[0]
    assert torch.allclose(dense, torch.ones_like(dense), atol=1e-2)
    del other
    with pytest.raises(MemoryError, match="pool is full"):
        first.append(rows[:, :, :1].expand(1, 2, 10**6, 32), rows[:, :, :1].expand(1, 2, 10**6, 32))
    with layer.step():
        layer.attend(*qkv)
    assert first.seen == 292 and arena.bytes.data_ptr() == at


def test_layers_step_together():
    layers = [pair_of(key="int8")[0] for _ in range(2)]
    both = [CUDAGraphLayer(kv, 100) for kv in layers]
    qkv = [torch.ones(2, h, 1, 32, device=DEVICE) for h in (4, 2, 2)]
    with steps(both):
        for layer in both:
            layer.attend(*qkv)
    layers[1].append(*[torch.ones(2, 2, 99, 32, device=DEVICE)] * 2)
    with pytest.raises(ValueError, match="with 101"), steps(both):
        pass
    assert [kv.seen for kv in layers] == [1, 100]
    layers[1].crop(1)
    with steps(both):
        for layer in both:
            layer.attend(*qkv)
    assert [kv.seen for kv in layers] == [2, 2]


@pytest.mark.skipif(DEVICE != "cpu", reason="counted on the tests' device")
def test_one_copy_a_step(monkeypatch):
    """For all layers, from pinned memory, without waiting: as pages open and seal, after crops, beams, resets."""
    log, generator, m = [], torch.Generator().manual_seed(1), model("gemma3")
    with a_device() as device, torch.no_grad():
        near = KVCache(m.config, "int4", page_size=16)
        far = KVCache(m.config, "int4", page_size=16, max_length=300)
        m(ids(2, 45), past_key_values=near)
        there(m)(ids(2, 45), past_key_values=far)
        stream = far.layers[0].store.page_store.mirror.arena.copy_stream
        real = stream.room
        monkeypatch.setattr(stream, "room", lambda size: (log.append(real(size)), log[-1])[1], raising=False)

        def step(copied=0):
            qkv = [torch.randn(2, h, 1, m.config.head_dim, generator=generator) for h in (4, 2, 2)]
            own = [x.to(FAR) for x in qkv]
            waits, copies, rooms = device.waits, len(device.copies), len(log)
            with far.step():
                outs = [layer.graph_layer.attend(*own)[0] for layer in far.layers]
            counts = device.waits - waits, len(device.copies) - copies, len(log) - rooms
            assert counts == (0, 1 + copied, 1) and device.copies[-1] == log[-1].ctypes.data
            for layer, out in zip(near.layers, outs, strict=True):
                assert error(out.to("cpu"), layer.store.attend(*qkv)[0].transpose(1, 2).double()) <= 2e-2
            return log[-1].nbytes

        sizes = [step() for _ in range(40)]
        assert sizes[0] == max(sizes) and min(sizes) == 48 * len(far.layers)  # two lengths and a slot, where they go
        beams = torch.tensor([1, 1])  # rows that share an open page, which each layer's next step copies on the device
        acts = (lambda x: x.crop(-3), 0), (lambda x: x.batch_select_indices(beams), 1), (lambda x: x.reset(), 0)
        for act, copied in acts:
            for cache in (far, near):
                act(cache)
            step(copied * len(far.layers))
            step()


@pytest.mark.parametrize("key", ["raw", "int4"])
@pytest.mark.parametrize("page_size,slots", [(16, 40), (64, 4096), (64, 100_000)])
def test_reserved_extent_is_enough(key, page_size, slots):
    with Elsewhere():
        kv = PagedKV(2, 32, key=key, batch=3, page_size=page_size)
    kv.page_store.table.reserve(slots)
    most = room_of(kv, slots)
    for n in (1, slots // 3, slots // 2, slots):
        while kv.seen < n:
            kv.page_store.table.plan(min(page_size, n - kv.seen), None)
            kv.page_store.table.commit()
        assert kv.page_store.pool.extent <= most
    assert most <= 3 * kv.page_store.pool.extent + (8 << 20)


@pytest.mark.parametrize("name", ["gemma3", pytest.param("llama", marks=pytest.mark.full)])
@pytest.mark.parametrize("key", ["int4", pytest.param("raw", marks=pytest.mark.full)])
def test_a_compiled_model(name, key):
    """One graph of a decode step, without ops on the host, serves every step and every cache; with padded rows."""
    torch._dynamo.reset()
    m = select(model(name), "kvcompress")
    seen = []

    def backend(graph, inputs):
        seen.append({str(node.target) for node in graph.graph.nodes if node.op == "call_function"})
        return graph

    fn = torch.compile(m, fullgraph=True, backend=backend)
    tokens, mask = left_pads(ids(2, 80), [0, 9])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    want = torch.cat(logits_of(m, cache_of(m, key), [45, *[1] * 35], tokens, mask)[1:], 1)
    for _ in range(2):
        with Elsewhere():
            cache = cache_of(m, key, max_length=100)
            logits_of(m, cache, [45], tokens[:, :45], mask[:, :45])
        got = []
        for i in range(45, 80):
            with torch.no_grad(), cache.step():
                own = {"position_ids": positions[:, i : i + 1], "past_key_values": cache}
                got.append(fn(tokens[:, i : i + 1], **own).logits)
        assert error(torch.cat(got, 1), want) < 1e-4 and cache.get_seq_length() == 80
    assert len(seen) == 1
    ours = {target for target in seen[0] if "kvcompress" in target}
    assert ours == {"kvcompress.attend_step"} or ours == {"kvcompress.attend_step.default"}
    with pytest.raises(ZeroDivisionError), cache.step():
        raise ZeroDivisionError
    assert cache.get_seq_length() == 80
    cache.batch_select_indices(torch.tensor([1]))  # other shapes: another graph
    for twin in (cache, copy.deepcopy(cache)):
        with torch.no_grad(), twin.step():
            own = {"position_ids": positions[1:, -1:] + 1, "past_key_values": twin}
            got.append(fn(tokens[1:, -1:], **own).logits)
        assert twin.get_seq_length() == 81
    assert torch.equal(*got[-2:]) and len(seen) == 2
    cache.crop(-1)
    back(cache)
    assert cache.layers[0].graph_layer is None
    with torch.no_grad():
        own = {"position_ids": positions[1:, -1:] + 1, "past_key_values": cache}
        assert error(fn(tokens[1:, -1:], **own).logits, got[-1]) < 1e-4
    assert cache.get_seq_length() == 81


@pytest.mark.skipif(DEVICE != "cuda" or UNCACHED, reason="KVCOMPRESS_TEST_DEVICE=cuda, and torch's allocator")
@pytest.mark.parametrize("key", ["raw", "int4"])
def test_a_compiled_model_on_a_gpu(key):
    torch._dynamo.reset()
    m = copy.deepcopy(select(model("llama"), "kvcompress")).to(DEVICE)
    fn, tokens = torch.compile(m, fullgraph=True, mode="reduce-overhead"), ids(2, 80).to(DEVICE)
    want = torch.cat(logits_of(m, cache_of(m, key), [45, *[1] * 35], tokens)[1:], 1)
    cache, got = cache_of(m, key, max_length=100), []
    logits_of(m, cache, [45], tokens[:, :45])
    for i in range(45, 80):
        with torch.no_grad(), cache.step():
            got.append(fn(tokens[:, i : i + 1], past_key_values=cache).logits.clone())
    assert error(torch.cat(got, 1), want) < 1e-3
    ops.check(DEVICE)


def test_invalid_steps_raise():
    m = select(model("llama"), "kvcompress")
    with pytest.raises(ValueError, match="step: expected max_length"), cache_of(m, "int8").step():
        pass
    with cache_of(m, "int8", max_length=9).step():  # on the CPU the graph does everything
        pass
