"""How pages are transferred: one layer ahead of attention, in extents, through reused memory."""

from __future__ import annotations

import gc
import secrets
import threading

import numpy as np
import pytest
import torch
from generation import PAGE as P
from generation import feed
from models import ids

from kvcompress import _C, KVCache, PagedKV, PrefixCache, Tiers
from kvcompress.offload.prefetch import LayerOffload, Prefetcher
from kvcompress.offload.tiers import UNIT


class Late:
    """A copy thread that copies only when somebody waits for it."""

    def __init__(self):
        self.started = self.carried = 0

    def start(self, job):
        self.started += 1
        copier = self

        class Ticket:
            done = False

            def result(self):
                if not self.done:
                    self.done = True
                    copier.carried += 1
                    self.found = job()
                return self.found

        return Ticket()


def away(stores, tiers, **options):
    prefetcher = Prefetcher(tiers, resident=0, **options)
    for store in stores:
        store.attach(LayerOffload(store.page_store, prefetcher))
        store.offload.offload_oldest()
    return prefetcher


def test_the_next_layer_is_on_its_way_while_one_attends():
    pool, copier = _C.Pool(), Late()
    stores = [PagedKV(2, 32, key="int8", page_size=16, pool=pool) for _ in range(3)]
    for store in stores:
        k = torch.randn(1, 2, 200, 32)
        store.append(k, k)
    q = torch.randn(1, 2, 1, 32)
    want = [store.attend(q)[0] for store in stores]
    prefetcher = away(stores, Tiers(copier=copier), unit=1)
    runs = [len(store.offload.runs) for store in stores]
    assert all(runs) and copier.started == 0
    for i, store in enumerate(stores):
        before = copier.started
        assert torch.equal(store.attend(q)[0], want[i])
        following = (i + 1) % 3
        assert prefetcher._stage_of(stores[following].offload) is not None
        # Its own pages were requested before, except for the first layer; the next layer's are requested now, and
        # nothing waited.
        assert copier.started - before == runs[following] + (runs[0] if i == 0 else 0)
        assert copier.carried == copier.started - runs[following]


def test_no_transfer_is_smaller_than_the_unit():
    store, tiers = PagedKV(8, 128, key="int8", dtype=torch.bfloat16), Tiers()
    away([store], tiers)
    for _ in range(30):
        k = torch.randn(1, 8, 64, 128).bfloat16()
        store.append(k, k)
        store.offload.offload_oldest()
    sizes = [extent.size for extent in tiers.host.values()]
    assert len(sizes) > 3 and min(sizes) >= UNIT and max(sizes) < 2 * UNIT
    assert UNIT == 512 << 10


def full(pool, fill, size=1 << 20):
    at = pool.alloc(size)
    pool.arena[at : at + size] = fill
    return np.array([[at, size]])


def test_bytes_stay_as_long_as_somebody_looks():
    pool, tiers = _C.Pool(), Tiers()
    extent = tiers.put(pool, full(pool, 7))
    part = torch.from_numpy(tiers.view(extent)[100:])
    assert tiers.view(extent).ctypes.data % 64 == 0
    tiers.drop(extent)
    others = [tiers.put(pool, full(pool, 9)) for _ in range(3)]
    assert bool((part == 7).all())
    del part
    gc.collect()
    assert tiers.room.pool.stats()["slots"] == 3
    del others
    gc.collect()
    assert tiers.room.pool.stats()["slots"] == 3  # the tiers keep them


def test_memory_goes_back_but_for_what_was_asked_to_stay():
    pool = _C.Pool()
    pieces = full(pool, 1)
    for keep, least, most in ((0, 0, 0), (4 << 20, 3 << 20, 4 << 20)):
        tiers = Tiers(keep_bytes=keep)
        extents = [tiers.put(pool, pieces) for _ in range(16)]
        assert tiers.room.pool.stats()["resident"] >= 16 << 20
        for extent in extents:
            tiers.drop(extent)
        assert tiers.stats()["host"] == 0
        assert least <= tiers.room.pool.stats()["resident"] <= most


def test_wrong_arguments_change_nothing(llama):
    cache = KVCache(llama.config, "int8", page_size=P)
    feed(llama, cache, ids(1, 200))
    cache.use_tiers(Tiers(), 32, 1)
    prefetcher, out = cache.forward_pass.prefetcher, cache.stats()["bytes"]
    for wrong in ((), {}, "x", Tiers):
        with pytest.raises(TypeError, match="use_tiers: expected kvcompress.Tiers or None"):
            cache.use_tiers(wrong)
        with pytest.raises(TypeError, match="tiers: expected kvcompress.Tiers or None"):
            PrefixCache(llama.config, tiers=wrong)
    with pytest.raises(ValueError, match="unit"):
        cache.use_tiers(Tiers(), unit=0)
    assert (
        cache.forward_pass.prefetcher is prefetcher
        and cache.stats()["bytes"] == out
        and prefetcher.tiers.stats()["host"] > 0
    )


def test_one_job_fetches_all_runs_of_a_layer():
    store, copier = PagedKV(2, 32, key="int8", page_size=16), Late()
    away([store], Tiers(copier=copier), unit=1)
    for _ in range(20):
        k = torch.randn(1, 2, 16, 32)
        store.append(k, k)
        store.offload.offload_oldest()
    before = copier.started
    store.attend(torch.randn(1, 2, 1, 32))
    assert copier.started == before + 1 and len(store.offload.runs) > 10


def test_pages_that_stay_are_looked_at_once_per_page(monkeypatch):
    store = PagedKV(2, 32, key="int8", page_size=16)
    k = torch.randn(1, 2, 400, 32)
    store.append(k, k)
    looked = []
    monkeypatch.setattr(LayerOffload, "_closed", lambda self, start, stop: looked.append(stop) or stop)
    away([store], Tiers(), unit=1 << 30)  # they stay, as shared pages do
    for _ in range(64):
        store.append(k[:, :, :1], k[:, :, :1])
        store.offload.offload_oldest()
    assert len(looked) == 1 + 64 // 16


def test_a_cache_that_dies_in_the_copy_thread_waits_for_nothing():
    """As when the garbage collector runs there: a job queued behind it never starts."""
    pool, tiers, gate = _C.Pool(), Tiers(), threading.Event()
    stores = [PagedKV(2, 32, key="int8", page_size=16, pool=pool) for _ in range(2)]
    for store in stores:
        k = torch.randn(1, 2, 200, 32)
        store.append(k, k)
    prefetcher = away(stores, tiers, unit=1)
    with stores[0].present():
        pass
    prefetcher.release()
    holder = [prefetcher]
    job = tiers.copier.start(lambda: (gate.wait(20), holder.clear()))
    stage = prefetcher.stages[pool][0]
    prefetcher._start(stage, stores[0].offload)
    last = stage.ticket
    del store, prefetcher, stage
    stores.clear()
    gc.collect()
    gate.set()
    job.result(20)
    assert last.exception(20)  # the pages of a layer that is gone
    del last
    tiers.copier.finish()
    gc.collect()
    assert pool.stats()["used"] == 0


@pytest.mark.parametrize("where", ["_room_in_files", "token_hex"])
def test_an_extent_dropped_while_it_is_spilled(where, tmp_path, monkeypatch):
    """As by the garbage collector, which may free another cache in the middle of a put."""
    pool, tiers = _C.Pool(), Tiers(host_bytes=4096, file_bytes=None, folder=tmp_path)
    pieces = np.array([[pool.alloc(4096), 4096]])
    old, of = tiers.put(pool, pieces), tiers if where == "_room_in_files" else secrets
    plain = getattr(of, where)
    monkeypatch.setattr(of, where, lambda size: (tiers.drop(old), plain(size))[1])
    new = tiers.put(pool, pieces)
    assert tiers.stats()["host"] == 4096 and tiers.stats()["file"] == 0
    assert not list(tmp_path.iterdir()) and old.path is None
    tiers.load(new, pool, pieces)
