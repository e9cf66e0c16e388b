"""Layers and caches that move to another device and continue there; the device is emulated on the host."""

import copy

import numpy as np
import pytest
import torch
from cuda_twin import Twin
from families import family
from generation import cache_of, check_same, generate, logits_of, select
from models import ids, left_pads, model
from test_attend import error
from test_cuda_layer import on

from kvcompress import _C, KVCache, PagedKV, PrefixCache, Tiers, ops, policies
from kvcompress.store import device_memory, page_store, pools, serialize


class Elsewhere:
    """While active, pages that move are stored in a separate arena, as on a GPU."""

    def __enter__(self):
        self.before = page_store.mirror_of, pools.for_pages
        page_store.mirror_of, pools.for_pages = device_memory.Mirror, lambda *_, **limit: _C.Pool(**limit)
        return _C.Pool()

    def __exit__(self, *error):
        page_store.mirror_of, pools.for_pages = self.before


def there(x):
    with Elsewhere() as pool:
        return x.to("cpu", pool=pool)


def back(x):
    return x.to("cpu", pool=_C.Pool())


def content(kv):
    """Contents of a layer on any device: lengths, slots, scores, formats, and decoded values."""
    kv.onload()
    arrays = serialize.survey(kv.page_store)[0]
    held = [x for x in arrays[1:] if x is not None]
    return [*held, np.where(arrays.entries < 0, -1, arrays.entries & 0xFFFF), *(x.cpu().numpy() for x in kv.dense())]


def pages(kv):
    """The bytes of each cell's page."""
    kv.onload()
    arrays, pieces = serialize.survey(kv.page_store)
    memory, ends = serialize.gather(kv.page_store, pieces)[0], np.cumsum(pieces[:, 1])
    numbers = (entry >> 16 for entry in arrays.entries.reshape(-1).tolist())
    return [b"" if i < 0 else memory[ends[i] - pieces[i, 1] : ends[i]].tobytes() for i in numbers]


def same(a, b):
    left, right = content(a), content(b)
    return len(left) == len(right) and all(np.array_equal(x, y) for x, y in zip(left, right, strict=True))


LAYERS = {
    "int8": dict(key="int8", value="int4", page_size=16),
    "int4": dict(key="int4", value="int2"),
    "pages": dict(key="kivi4", value="nvfp4", page_size=16, residual_length=20),
    "window": dict(key="int8", sinks=0, window=40, page_size=16),
    "spans": dict(key="int8", spans=[(0, 36, "int4"), (36, None, "int8")], page_size=16),
    "dims": dict(key="int8", value="int4", value_dim=48, page_size=16),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_life_on_two_devices(name):
    """Appends, beams, crops, a copy that stays behind: bytes and attention equal those of a layer that never moved."""
    options = LAYERS[name]
    layers = [PagedKV(2, 32, batch=2, **options) for _ in range(2)]
    far, near = layers
    dv, generator, moves = options.get("value_dim", 32), torch.Generator().manual_seed(1), [there, back] * 3
    kept = []
    for i, T in enumerate((50, 1, 20, 1, 16, 1)):
        dims = ((4, 32), (2, 32), (2, dv))
        q, k, v = (torch.randn(2, h, T, d, generator=generator) for h, d in dims)
        mask = torch.rand(2, T, generator=generator) < 0.9 if i == 2 and name not in ("window", "spans") else None
        assert torch.equal(*(kv.attend(q, k, v, mask=mask)[0] for kv in layers))
        if i == 3:
            for kv in layers:
                kv.crop(kv.seen - 1)
        if i == 1:
            for kv in layers:
                kv.select([1, 1])
        kept.append((far.clone(), far.dense()))
        before, there_before = far.page_store.pool, pages(far)
        assert moves[i](far) is far and far.page_store.pool is not before and pages(far) == there_before
        assert (far.page_store.mirror is None) == (moves[i] is back)
        assert same(far, near), i
        assert (
            far.page_store.pool.stats()["slots"] == near.page_store.pool.stats()["slots"]
        )  # pages shared between beams are still shared
    for kv, dense in kept:
        assert all(torch.equal(a, b) for a, b in zip(kv.dense(), dense, strict=True))
    kept.clear()
    del kv
    assert before.stats()["used"] == 0


def test_heads_that_keep_different_tokens():
    layers = [PagedKV(2, 32, key="int8", page_size=16, policy=policies.H2O(budget=40)) for _ in range(2)]
    generator = torch.Generator().manual_seed(1)
    for i in range(40):
        q, k, v = (torch.randn(1, h, 30 if i == 0 else 3, 32, generator=generator) for h in (4, 2, 2))
        assert torch.equal(*(kv.attend(q, k, v)[0] for kv in layers))
        if i % 7 == 3:
            back(layers[0])
        assert same(*layers)
    assert layers[0].page_store.kept_tokens < layers[0].seen * 2


@pytest.mark.parametrize("first", ["cpu", "gpu"])
def test_half_by_the_kernels_of_each(first):
    layers = [PagedKV(2, 32, key="int8", value="int4", batch=2) for _ in range(2)]
    far, near = layers
    generator = torch.Generator().manual_seed(1)
    if first == "gpu":
        there(far)
    for T in (70, 1, 1, 65, 1, 1, 64, 1):
        q, k, v = (torch.randn(2, h, T, 32, generator=generator) for h in (4, 2, 2))
        if T > 63:
            (back if far.page_store.mirror else there)(far)
        if far.page_store.mirror:
            with on(Twin()):
                got = far.attend(q, k, v)[0]
        else:
            got = far.attend(q, k, v)[0]
        assert error(got, near.attend(q, k, v)[0].double()) <= 2e-2
        assert same(far, near)


@pytest.mark.parametrize("name", ["gpu", "cuda:first", "meta", "cuda:99", 1.5, None])
def test_invalid_devices(name):
    kv, cache = PagedKV(1, 32), KVCache(model("llama").config)
    for x in (kv, cache):
        with pytest.raises(ValueError, match="device: expected cpu"):
            x.to(name)
        assert x.to("cpu") is x
    with pytest.raises(ValueError, match="device: expected cpu"):
        PagedKV(1, 32, device=name)


def test_from_a_device_to_the_cpu(monkeypatch):
    """By device name only: a new pool with the limit of the old one."""
    with Elsewhere():
        kv = PagedKV(2, 32, key="int8", pool=_C.Pool(64 << 20))
    kv.append(torch.ones(1, 2, 90, 32), torch.ones(1, 2, 90, 32))
    kv.page_store.device = torch.device("cuda", 0)  # the layer reports a GPU, but its tensors are on the host
    monkeypatch.setattr(ops, "check", lambda device: None)  # would query the GPU
    before = content(kv)
    assert kv.to("cpu") is kv and kv.device.type == "cpu" and kv.page_store.mirror is None
    assert kv.page_store.pool.stats()["reserved"] == 64 << 20
    assert all(np.array_equal(a, b) for a, b in zip(content(kv), before, strict=True))


@pytest.mark.parametrize("way", ["pool", "memory", "bytes"])
def test_a_move_that_fails(way, fail_at, monkeypatch):
    m = select(model("llama"), "kvcompress")
    cache, other, tokens = cache_of(m, "int8"), cache_of(m, "int8"), ids(1, 150)
    for c in (cache, other):
        logits_of(m, c, [100], tokens[:, :100])
    pools = cache.pool, [layer.store.page_store.pool for layer in cache.layers]
    if way == "pool":
        used = cache.pool.stats()["used"]
        with pytest.raises(MemoryError):
            cache.to("cpu", pool=_C.Pool(max(1, used // 2)))
    elif way == "bytes":
        gather = serialize.gather
        monkeypatch.setattr(serialize, "gather", lambda *a: (gather(*a)[0], 1))
        with pytest.raises(serialize.Damaged):
            there(cache)
    else:
        for n in range(1, 200):
            pool = _C.Pool()
            fail_at(n)
            try:
                cache.to("cpu", pool=pool)
                break
            except MemoryError:
                pass
            finally:
                fail_at(0)
            assert pool.stats()["used"] == 0
        assert 10 < n < 199
        pools = cache.pool, [layer.store.page_store.pool for layer in cache.layers]
    assert pools == (cache.pool, [layer.store.page_store.pool for layer in cache.layers])
    for a, b in zip(cache.layers, other.layers, strict=True):
        assert same(a.store, b.store)
    got, want = (logits_of(m, c, [1] * 50, tokens[:, 100:]) for c in (cache, other))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("name", ["llama", "gemma3", "linear"])
@pytest.mark.parametrize("key", ["int8", "int4"])
def test_generate_goes_on(name, key):
    """Some tokens here, some on the other device, then here again, with padded rows: the logits equal those of a cache
    that never moved."""
    m = select(family(name), "kvcompress")
    tokens, mask = left_pads(ids(2, 90), [0, 7])
    cache, other = cache_of(m, key), cache_of(m, key)
    for start, end, move in ((0, 40, there), (40, 70, back), (70, 90, there)):
        lengths = [end - start - 3, 1, 1, 1]
        got, want = (
            logits_of(
                m,
                c,
                lengths,
                tokens[:, start:end],
                mask[:, :end],
            )
            for c in (cache, other)
        )
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        move(cache)
    assert cache.get_seq_length() == 90 and cache.stats()["kept"] == other.stats()["kept"]


def test_beams_and_forks():
    m = select(model("llama"), "kvcompress")
    tokens = ids(1, 80)
    cache, other = cache_of(m, "int8"), cache_of(m, "int8")
    for c in (cache, other):
        logits_of(m, c, [70], tokens[:, :70])
    fork = copy.deepcopy(cache)
    there(cache)
    for c in (cache, other, fork):
        c.batch_repeat_interleave(3)
        c.reorder_cache(torch.tensor([2, 0, 0]))
    three = ids(3, 10)
    got = [logits_of(m, c, [1] * 10, three) for c in (cache, other, fork)]
    for x in got:
        assert all(torch.equal(a, b) for a, b in zip(x, got[1], strict=True))
    assert fork.pool is not cache.pool


def test_a_prefix_stays_where_it_is():
    m = select(model("llama"), "kvcompress")
    prefix, tokens = PrefixCache(m.config, "int8"), ids(1, 200)
    first = prefix.new()
    logits_of(m, first, [200], tokens)
    n = prefix.commit(first, tokens)
    assert n >= 128
    del first
    held = prefix.pool.stats()["slots"]
    cache, other = prefix.open(tokens), prefix.open(tokens)
    there(cache)
    del other
    assert prefix.pool.stats()["slots"] == held
    want = logits_of(m, prefix.open(tokens), [200 - n], tokens[:, n:])
    got = logits_of(m, cache, [200 - n], tokens[:, n:])
    assert torch.equal(got[0], want[0])
    with pytest.raises(ValueError, match="one of another pool"):
        prefix.commit(cache, tokens)
    cache.to("cpu", pool=prefix.pool)
    assert prefix.commit(cache, tokens) == n


def test_a_prefix_outlives_the_layers_of_its_device():
    m = select(model("llama"), "kvcompress")
    prefix, tokens = PrefixCache(m.config, "int8"), ids(1, 200)
    with Elsewhere():
        first = prefix.new()
        logits_of(m, first, [200], tokens)
        n = prefix.commit(first, tokens)
        del first
        got = logits_of(m, prefix.open(tokens), [200 - n], tokens[:, n:])
    other = PrefixCache(m.config, "int8")
    cache = other.new()
    logits_of(m, cache, [200], tokens)
    other.commit(cache, tokens)
    want = logits_of(m, other.open(tokens), [200 - n], tokens[:, n:])
    assert n >= 128 and torch.equal(got[0], want[0])


def test_tiers_and_suspension():
    m = select(model("llama"), "kvcompress")
    tokens = ids(1, 400)
    cache, other, tiers = cache_of(m, "int8"), cache_of(m, "int8"), Tiers()
    cache.use_tiers(tiers, resident=64, unit=1)
    for c in (cache, other):
        logits_of(m, c, [300], tokens[:, :300])
    assert cache.layers[0].store.offload.size
    there(cache)
    assert cache.layers[0].store.offload.size and cache.layers[0].store.page_store.pool is cache.pool
    got, want = (logits_of(m, c, [1] * 20, tokens[:, 300:320]) for c in (cache, other))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert set(cache.forward_pass.prefetcher.stages) == {cache.pool}
    cache.suspend()
    with pytest.raises(ValueError, match="suspended"):
        cache.to("cpu", pool=_C.Pool())
    cache.resume()
    back(cache)
    got, want = (logits_of(m, c, [1] * 20, tokens[:, 320:340]) for c in (cache, other))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_an_empty_cache_moves():
    m = select(model("llama"), "kvcompress")
    cache = there(cache_of(m, "int8"))
    tokens = ids(1, 60)
    check_same([generate(m, tokens, cache)], [generate(m, tokens, cache_of(m, "int8"))])
    assert cache.layers[0].store.page_store.pool is cache.pool
    cache.reset()
    back(cache)
    check_same([generate(m, tokens, cache)], [generate(m, tokens, cache_of(m, "int8"))])
