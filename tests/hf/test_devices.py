"""A model distributed over several devices (one is that of tests/support/far.py): its cache has a pool per device."""

import copy

import pytest
import torch
from families import family
from far import FAR
from far_kernels import FarCopyThread, a_device, spread
from generation import cache_of, check_same, error, logits_of, select
from models import ids, model
from test_cuda_generate import run_of
from test_product import FORMATS

from kvcompress import _C, KVCache, Tiers, policies
from kvcompress.store.pools import Pools

HOST = torch.device("cpu")
CACHES = {"int4": {}, "int8": {}, "int8 h2o": dict(policy=policies.H2O(40))}
FULL = pytest.mark.full


def pair(**options):
    """A model on one device and its cache, and the same distributed over two."""
    m = select(model("llama"), "kvcompress")
    return (m, cache_of(m, **options)), (far := spread(m), cache_of(far, **options))


def used(cache):
    """Used bytes of each pool of the cache's layers."""
    pools = {layer.store.page_store.pool for layer in cache.layers}
    for pool in pools:
        pool.check()
    return sorted(pool.stats()["used"] for pool in pools)


def alike(got, want, bound):
    return all(error(x, y) <= bound for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("name", ["int4", *(pytest.param(name, marks=FULL) for name in list(CACHES)[1:])])
def test_each_device_holds_its_layers_only(name):
    tokens, key = ids(1, 300), name.split()[0]
    with a_device():
        (m, one), (far, two) = pair(key=key, **CACHES[name])
        calls = [280, *[1] * 20]
        want, got = logits_of(m, one, calls, tokens), logits_of(far, two, calls, tokens)
        assert alike(got, want, 4 * FORMATS[key])
        here, there = (layer.store for layer in two.layers)
        assert (here.device, there.device) == (
            HOST,
            FAR,
        ) and two.pool is here.page_store.pool is not there.page_store.pool
        assert used(two) == [used(one)[0] // 2] * 2
        assert two.stats()["parts"] | {"slack": 0} == one.stats()["parts"] | {"slack": 0}
        slack = [
            pool.stats()["resident"] - pool.stats()["used"] for pool in (here.page_store.pool, there.page_store.pool)
        ]
        assert two.stats()["parts"]["slack"] == sum(slack)
        pools = here.page_store.pool, there.page_store.pool
        del here, there, two
        assert [pool.stats()["used"] for pool in pools] == [0, 0]


def test_an_arena_is_as_long_as_its_own_layers():
    config, k = copy.deepcopy(model("llama").config), torch.randn(1, 8, 1024, 64)
    config.num_hidden_layers = config.num_key_value_heads = 8
    lengths = []
    with a_device():
        for options in ({}, dict(pool=_C.Pool())):
            cache = KVCache(config, "raw", **options)
            for i in range(8):
                where = FAR if i % 4 == 3 else HOST
                cache.update(k.to(where), k.to(where), i)
            cache.to_dynamic_cache()
            lengths.append(len(cache.layers[3].store.page_store.mirror.arena.bytes))
    assert lengths[0] <= 1.6 * 2 * 2 * k.nbytes < 1.6 * 8 * 2 * k.nbytes / 2 < lengths[1], lengths


RUNS = [
    pytest.param("llama", "beams", marks=FULL),
    ("linear", "greedy"),
    pytest.param("gemma3", "greedy", marks=FULL),
    pytest.param("mistral", "assisted", marks=FULL),
    pytest.param("moe", "left_padding", marks=FULL),
]


@pytest.mark.parametrize("name,mode", RUNS)
def test_generates_as_on_one_device(name, mode):
    with torch.no_grad(), a_device():
        want, got = (run_of(m, mode, "raw") for m in (copy.deepcopy(family(name)), spread(family(name))))
    check_same(got.outputs, want.outputs)


@pytest.mark.full
def test_copies_share_the_pools_and_moves_end_them():
    tokens = ids(1, 260)
    with a_device():
        (m, one), (far, two) = pair(key="int8")
        empty = copy.deepcopy(two)
        for c, model_ in ((one, m), (two, far), (empty, far)):
            logits_of(model_, c, [200], tokens[:, :200])
        twin = copy.deepcopy(two)
        assert [x.store.page_store.pool for x in empty.layers] == [x.store.page_store.pool for x in two.layers]
        want = logits_of(m, one, [1] * 20, tokens[:, 200:220])
        for c in (two, twin, empty):
            assert alike(logits_of(far, c, [1] * 20, tokens[:, 200:220]), want, 4 * FORMATS["int8"])
        before = {layer.store.page_store.pool for layer in two.layers}
        del c, twin, empty
        two.to("cpu")
        assert {layer.store.page_store.pool for layer in two.layers} == {two.pool} and used(two) == used(one)
        assert all(pool.stats()["used"] == 0 for pool in before)
        got, want = (logits_of(m, c, [1] * 20, tokens[:, 220:240]) for c in (two, one))
        assert alike(got, want, 4 * FORMATS["int8"])
        two.reset()  # and distributed again
        logits_of(far, two, [200], tokens[:, :200])
        assert len(used(two)) == 2 and two.layers[0].store.page_store.pool is two.pool


@pytest.mark.full
def test_tiers_have_stages_on_each_device():
    tokens = ids(1, 400)
    tiers = Tiers()
    tiers.copier = FarCopyThread()
    with a_device():
        (m, one), (far, two) = pair(key="int8")
        two.use_tiers(tiers, resident=64, unit=1)
        calls = [300, *[1] * 40, 30, *[1] * 20]
        want, got = logits_of(m, one, calls, tokens[:, :390]), logits_of(far, two, calls, tokens[:, :390])
        assert alike(got, want, 4 * FORMATS["int8"])
        ring = two.forward_pass.prefetcher
        assert all(layer.store.offload.size for layer in two.layers)
        assert set(ring.stages) == {layer.store.page_store.pool for layer in two.layers}
        assert sum(stage.slot is not None for pair in ring.stages.values() for stage in pair) == 2  # a layer each
        two.suspend()
        assert used(two) == [0, 0] and not ring.stages
        two.resume()
        want, got = logits_of(m, one, [1] * 5, tokens[:, 390:395]), logits_of(far, two, [1] * 5, tokens[:, 390:395])
        assert alike(got, want, 4 * FORMATS["int8"])
        del ring
        two.use_tiers(None)
        assert sum(used(two)) == used(one)[0]


def test_a_file_of_it(tmp_path):
    tokens = ids(1, 300)
    with a_device():
        (m, one), (far, two) = pair(key="int4")
        for c, model_ in ((one, m), (two, far)):
            logits_of(model_, c, [250], tokens[:, :250])
        two.save(tmp_path / "x.kvc")
        loaded = KVCache.load(tmp_path / "x.kvc", m.config)
        assert len(used(loaded)) == 1 and used(loaded) == used(one)
        got, want = (logits_of(m, c, [1] * 20, tokens[:, 250:270]) for c in (loaded, one))
        assert alike(got, want, 4 * FORMATS["int4"])


@pytest.mark.parametrize("options", [dict(max_bytes=6 << 20), dict(pool=_C.Pool(6 << 20))], ids=["max_bytes", "pool"])
def test_one_limit_is_one_pool(options):
    """Memory for one of the two layers."""
    k = torch.randn(1, 2, 4096, 64)
    with a_device():
        cache = cache_of(select(model("llama"), "kvcompress"), "raw", **options)
        cache.update(k, k, 0)
        cache.layers[0].commit()
        with pytest.raises(MemoryError, match="max_bytes"):
            cache.update(k.to(FAR), k.to(FAR), 1)
            cache.layers[1].commit()
        assert {layer.store.page_store.pool for layer in cache.layers} == {cache.pool}
        assert cache.get_seq_length() == 0 and used(cache) == [0]


def test_pools_by_device():
    first = _C.Pool(8 << 20)
    one, each = Pools(first), Pools(first, True)
    with pytest.raises(ValueError, match="expected cpu"):
        each.on(torch.device("xpu"))
    with a_device():
        assert [one.on(device) for device in (FAR, HOST)] == [first, first]
        assert each.on(FAR) is first and each.on(FAR) is first
        other = each.on(HOST)
        assert other is not first and other is each.on(HOST)
        assert other.stats()["reserved"] == first.stats()["reserved"]
        assert Pools(first, True, HOST).on(FAR) is not first


def test_staging_areas_are_freed():
    tokens, tiers = ids(1, 300), Tiers()
    tiers.copier = FarCopyThread()
    with a_device():
        _, (far, cache) = pair(key="int8")
        cache.use_tiers(tiers, resident=64, unit=1)
        logits_of(far, cache, [280, 1, 1], tokens[:, :282])
        assert sum(used(cache))
        cache.reset()
        assert used(cache) == [0, 0]
