"""A cache's memory is freed with its last reference: there are no reference cycles."""

import gc

import pytest
import torch
from models import ids, model

import kvcompress
from kvcompress import _C, H2O, KVCache, PagedKV, SnapKV, StreamingLLM
from kvcompress.policies import Demote, Watch


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


OPTIONS = [
    {}, {"policy": H2O(40)}, {"policy": SnapKV(40, 8)}, {"policy": StreamingLLM(4, 36)}, {"window": 40},
    {"policy": Watch(Demote(H2O(40), ["int8", "int4"]))},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_layers(no_collector, options):
    pool = _C.Pool()
    kv = PagedKV(2, 32, page_size=16, pool=pool, **options)
    for T in (70, 30, 1):
        kv.attend(*(torch.randn(1, h, T, 32) for h in (4, 2, 2)))
    twin = kv.clone()
    twin.attend(*(torch.randn(1, h, 1, 32) for h in (4, 2, 2)))
    del kv
    assert pool.stats()["used"] > 0
    del twin
    assert pool.stats()["used"] == 0


@pytest.mark.parametrize("options", [x for x in OPTIONS if "window" not in x], ids=str)
def test_caches(no_collector, options):
    net = model("llama")
    kvcompress.enable(net, verbose=False)
    cache = KVCache(net.config, "int8", page_size=16, **options)
    net.generate(ids(2, 70), past_key_values=cache, max_new_tokens=4, do_sample=False)
    pool = cache.layers[0].store.page_store.pool
    assert pool.stats()["used"] > 0
    del cache
    assert pool.stats()["used"] == 0
