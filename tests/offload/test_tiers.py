"""Tiers: offloaded pages come back unchanged, or an error is raised."""

from __future__ import annotations

import copy
import gc
import os
import random
import time
from concurrent.futures import Future

import numpy as np
import pytest
import soaked
import torch
from generation import PAGE as P
from generation import feed
from models import ids

from kvcompress import _C, KVCache, Tiers
from kvcompress.offload.tiers import CopyThread
from kvcompress.store.device_memory import scatter
from kvcompress.store.serialize import Damaged


class Now:
    """A copy thread that copies at once, in the caller's thread."""

    def start(self, job):
        done = Future()
        try:
            done.set_result(job())
        except Exception as failed:
            done.set_exception(failed)
        return done


def pool_of(rng, n, size=4096):
    """(pool, pieces, their bytes)."""
    pool = _C.Pool(1 << 26)
    sizes = rng.integers(1, size // 64, n) * 64
    offsets = pool.take(sizes)
    pieces = np.stack([offsets, sizes], 1)
    data = []
    for at, many in pieces:
        pool.arena[at : at + many] = rng.integers(0, 256, many)
        data.append(pool.arena[at : at + many].tobytes())
    return pool, pieces, data


def content(pool, pieces):
    return [pool.arena[at : at + size].tobytes() for at, size in pieces]


# ------------------------------------------------------------------ copies and checksums


def test_gather_and_scatter_against_numpy():
    rng = np.random.default_rng(0)
    for n in (1, 2, 17, 100):
        pool, pieces, data = pool_of(rng, n)
        memory = np.empty(int(pieces[:, 1].sum()), np.uint8)
        checksum = _C.gather(pool, pieces, memory)
        assert memory.tobytes() == b"".join(data) and checksum == _C.checksum(memory)
        for at, size in pieces:
            pool.arena[at : at + size] = 7
        assert _C.scatter(pool, pieces, memory) == checksum and content(pool, pieces) == data
        words = memory.view("<u8").astype(object).reshape(-1, 2)  # the checksums, by definition
        plain, placed = [0, 0], [0, 0]
        for pair in words:
            for k in (0, 1):
                plain[k] = (plain[k] + pair[k]) % 2**64
                placed[k] = (placed[k] + plain[k]) % 2**64
        h = memory.size
        for word in (*plain, *placed):
            h = ((h ^ word) * 0x9E3779B97F4A7C15) % 2**64
            h ^= h >> 32
        assert h == checksum


def test_large_copies_go_past_the_caches():
    pool = _C.Pool(1 << 28)
    size = 40 << 20  # above the limit in transfer.c
    at = pool.alloc(size)
    pool.arena[at : at + size] = np.arange(size, dtype=np.uint8)
    memory = np.empty(size, np.uint8)
    pieces = np.array([[at, size]])
    checksum = _C.gather(pool, pieces, memory)
    assert np.array_equal(memory, pool.arena[at : at + size]) and checksum == _C.checksum(memory)


def test_every_single_change_is_found():
    rng = np.random.default_rng(1)
    memory = rng.integers(0, 256, 64 * 9, dtype=np.uint8)
    good = _C.checksum(memory)
    for at in range(memory.size):
        for bit in (0, 7):
            memory[at] ^= 1 << bit
            assert _C.checksum(memory) != good
            memory[at] ^= 1 << bit
    swapped = memory.reshape(-1, 64)[[1, 0, *range(2, 9)]].reshape(-1).copy()
    assert _C.checksum(swapped) != good and _C.checksum(memory[:-64].copy()) != good
    assert len({_C.checksum(np.zeros(n, np.uint8)) for n in (0, 64, 128)}) == 3


def test_pieces_are_checked():
    pool = _C.Pool(1 << 22)
    at = pool.alloc(1024)
    memory = np.zeros(1024, np.uint8)
    for wrong in ([[at, 960]], [[at, 1024], [at, 64]], [[-64, 1024]], [[at + 1, 1024]], [[pool.extent, 1024]],
                  [[at, -64]], [[1 << 62, 1024]], [[pool.extent - 64, 1024]]):  # fmt: skip
        with pytest.raises(ValueError, match="transfer: expected"):
            _C.gather(pool, np.array(wrong), memory)
    with pytest.raises(ValueError, match="can be written"):
        memory.flags.writeable = False
        _C.gather(pool, np.array([[at, 1024]]), memory)
    with pytest.raises(ValueError, match="slots in use"):
        pool.drop(np.array([at, at + 64]))
    assert pool.refs(at) == 1
    pool.ref(at)
    with pytest.raises(ValueError, match="slots in use"):
        pool.drop(np.array([at, at, at]))  # more often than there are references
    pool.check()
    assert pool.refs(at) == 0 and pool.alloc(1024) == at
    with pytest.raises(MemoryError):
        pool.take(np.array([1024, 1 << 40]))
    assert pool.stats()["slots"] == 1


# ------------------------------------------------------------------ budgets


def test_host_then_files_then_memory_error(tmp_path):
    rng = np.random.default_rng(2)
    tiers = Tiers(host_bytes=40_000, file_bytes=60_000, folder=tmp_path)
    kept = []
    while True:
        pool, pieces, data = pool_of(rng, 6)
        before = tiers.stats()
        try:
            kept.append((tiers.put(pool, pieces), pool, pieces, data))
        except MemoryError as error:
            assert "file_bytes=" in str(error) and tiers.stats()["refused"] == 1
            assert {**tiers.stats(), "refused": 0, "spilled": 0} == {**before, "refused": 0, "spilled": 0}
            break
        assert tiers.stats()["host"] <= 40_000 and tiers.stats()["file"] <= 60_000
    assert len(kept) > 4 and tiers.stats()["spilled"] > 2
    on_disk = sum(p.stat().st_size for p in tmp_path.iterdir())
    assert on_disk == tiers.stats()["file"] == sum(x.size for x, *_ in kept if x.path)
    assert tiers.stats()["host"] == sum(x.size for x, *_ in kept if x.memory is not None)
    for extent, pool, pieces, data in kept:
        for at, size in pieces:
            pool.arena[at : at + size] = 0
        tiers.fetch([(extent, pieces)], pool).result()
        assert content(pool, pieces) == data
        tiers.drop(extent)
        with pytest.raises(ValueError, match="dropped"):
            tiers.load(extent, pool, pieces)
    assert tiers.stats()["host"] == tiers.stats()["file"] == 0 and not list(tmp_path.iterdir())


def test_least_recently_used_goes_to_the_file():
    tiers = Tiers(host_bytes=3 * 64_000, file_bytes=None)
    extents = []
    for _ in range(3):
        pool = _C.Pool(1 << 24)
        at = pool.alloc(64_000)
        pieces = np.array([[at, 64_000]])
        extents.append((tiers.put(pool, pieces), pool, pieces))
    tiers.load(*extents[0])
    tiers.put(*extents[0][1:])
    assert [x.path is None for x, *_ in extents] == [True, False, True]
    assert tiers.stats()["spilled"] == 1


def test_files_go_with_the_tiers():
    pool, pieces, _ = pool_of(np.random.default_rng(4), 5)
    tiers = Tiers(host_bytes=0, file_bytes=None)
    extent = tiers.put(pool, pieces)
    path = extent.path
    assert path.exists()
    del extent, tiers
    gc.collect()
    assert not path.exists()


@pytest.mark.parametrize("how", ["bit", "cut", "gone"])
def test_damaged_tier_is_an_error(tmp_path, how):
    pool, pieces, data = pool_of(np.random.default_rng(5), 5)
    tiers = Tiers(host_bytes=0, file_bytes=None, folder=tmp_path)
    extent = tiers.put(pool, pieces)
    good = extent.path.read_bytes()
    bad = bytearray(good)
    bad[100] ^= 4
    extent.path.write_bytes({"bit": bad, "cut": good[:-64], "gone": b""}[how])
    if how == "gone":
        extent.path.unlink()
    with pytest.raises((Damaged, FileNotFoundError)):
        tiers.fetch([(extent, pieces)], pool).result()
    extent.path.write_bytes(good)
    tiers.fetch([(extent, pieces)], pool).result()
    assert content(pool, pieces) == data


def test_full_disk_keeps_pages_where_they_are(llama, monkeypatch, tmp_path):
    cache = KVCache(llama.config, "int8", page_size=P)
    tiers = Tiers(host_bytes=0, file_bytes=None, folder="/proc")  # not writable
    feed(llama, cache, ids(1, 150))
    with pytest.warns(UserWarning, match="pages were not offloaded"):
        cache.use_tiers(tiers, resident=0, unit=1)
    twin = KVCache(llama.config, "int8", page_size=P)
    feed(llama, twin, ids(1, 150))
    assert torch.equal(feed(llama, cache, ids(1, 5, 2)), feed(llama, twin, ids(1, 5, 2)))
    assert tiers.stats()["host"] == tiers.stats()["file"] == 0


# ------------------------------------------------------------------ a cache whose offloaded pages


@pytest.mark.parametrize("fmt", ["int8", "int4", "kivi2", "raw"])
@pytest.mark.parametrize("where", ["host", "file"])
def test_decode_is_the_same_to_the_bit(llama, fmt, where):
    budget = {"host": {"host_bytes": None}, "file": {"host_bytes": 0, "file_bytes": None}}[where]
    tiers = Tiers(**budget)
    ours, theirs = (KVCache(llama.config, fmt, page_size=P) for _ in range(2))
    ours.use_tiers(tiers, resident=32, unit=1)
    for step, T in enumerate([200, 1, 1, 40, 1, 100, 1, 1]):
        tokens = ids(2, T, step)
        assert torch.equal(feed(llama, ours, tokens), feed(llama, theirs, tokens))
    assert tiers.stats()[where] > 0.7 * theirs.stats()["parts"]["sealed"]
    assert ours.stats()["parts"]["sealed"] < 0.3 * theirs.stats()["parts"]["sealed"]
    for x, y in zip(ours.layers, theirs.layers, strict=True):
        assert torch.equal(x.keys, y.keys) and torch.equal(x.values, y.values)
    ours.use_tiers(None)
    assert tiers.stats()["host"] == tiers.stats()["file"] == 0
    assert ours.stats()["parts"]["sealed"] == theirs.stats()["parts"]["sealed"]
    assert torch.equal(feed(llama, ours, ids(2, 3)), feed(llama, theirs, ids(2, 3)))


def test_operations_that_change_the_cache_load_pages(llama, tmp_path):
    def acts(cache):
        yield lambda: cache.crop(-2)
        yield lambda: cache.reorder_cache(torch.tensor([1, 0]))
        yield lambda: cache.crop(-120)
        yield lambda: cache.batch_repeat_interleave(2)
        yield lambda: cache.batch_select_indices(torch.tensor([0, 3]))
        yield lambda: cache.save(tmp_path / "a.kvc")
        yield lambda: (cache.suspend(), cache.resume())

    tiers = Tiers()
    ours, theirs = (KVCache(llama.config, "int4", page_size=P) for _ in range(2))
    ours.use_tiers(tiers, resident=16, unit=1)
    for cache in (ours, theirs):
        feed(llama, cache, ids(2, 200))
    for step, (a, b) in enumerate(zip(acts(ours), acts(theirs), strict=True)):
        a()
        b()
        tokens = ids(ours.layers[0].store.batch, 30, step)
        assert torch.equal(feed(llama, ours, tokens), feed(llama, theirs, tokens))
        ours.pool.check()
    assert tiers.stats()["host"] > 0
    twin = copy.deepcopy(ours)
    assert torch.equal(feed(llama, twin, ids(2, 5)), feed(llama, theirs, ids(2, 5)))
    ours.reset()
    assert tiers.stats()["host"] == 0
    feed(llama, ours, ids(3, 100))
    del ours, cache, a, b
    gc.collect()
    assert tiers.stats()["host"] == 0  # extents are freed with their cache


def test_speculation_keeps_pages_offloaded(llama):
    tiers = Tiers()
    cache = KVCache(llama.config, "int8", page_size=P)
    cache.use_tiers(tiers, resident=48, unit=1)
    feed(llama, cache, ids(1, 200))
    held = tiers.stats()["host"]
    for _ in range(10):
        feed(llama, cache, ids(1, 5))
        cache.crop(-4)
    assert tiers.stats()["host"] >= held


def test_shared_prefix_stays(llama):
    """Pages with other owners stay in the pool: offloading them would free nothing."""
    from kvcompress import PrefixCache

    tiers, prefix, prompt = Tiers(), PrefixCache(llama.config, "int8", page_size=P), ids(1, 150)
    cache = prefix.open(prompt)
    feed(llama, cache, prompt)
    kept = prefix.commit(cache, prompt)
    cache.use_tiers(tiers, resident=0, unit=1)
    assert tiers.stats()["host"] == 0
    feed(llama, cache, ids(1, 100, 3))
    assert tiers.stats()["host"] > 0
    again = prefix.open(prompt)
    assert again.get_seq_length() == kept
    feed(llama, again, prompt)


def test_bad_inputs(llama):
    with pytest.raises(ValueError, match="host_bytes"):
        Tiers(host_bytes=-1)
    with pytest.raises(ValueError, match="resident"):
        KVCache(llama.config).use_tiers(Tiers(), resident=-1)


# ------------------------------------------------------------------ delays and failures


class Rough(Tiers):
    """Loads and writes that are randomly delayed or fail, some halfway; loaded data may also be damaged."""

    def __init__(self, seed, **options):
        self.rng = random.Random(seed)
        super().__init__(copier=Now() if self.rng.random() < 0.2 else CopyThread(), **options)
        self.on = True

    def trouble(self, most=0.15):
        if not self.on:
            return
        if self.rng.random() < 0.3:
            time.sleep(self.rng.random() * 4e-4)
        if self.rng.random() < most:
            raise self.rng.choice([OSError("injected"), MemoryError("injected")])

    def load(self, extent, pool, pieces, now=None):
        self.trouble()
        if self.on and self.rng.random() < 0.1 and extent.memory is not None and extent.size:
            at = self.rng.randrange(extent.size)
            extent.memory[at] ^= 16  # of this load
            try:
                super().load(extent, pool, pieces, now)
            finally:
                extent.memory[at] ^= 16
            raise AssertionError("a damaged load passed")
        if self.on and self.rng.random() < 0.05 and extent.memory is not None:
            half = pieces[: len(pieces) // 2]
            scatter(pool, half, extent.memory[: int(half[:, 1].sum())], now)
            raise OSError("injected behind half of the bytes")
        super().load(extent, pool, pieces, now)

    def view(self, extent):
        self.trouble()
        return super().view(extent)

    def put(self, pool, pieces):
        self.trouble()
        extent = super().put(pool, pieces)
        if self.on and self.rng.random() < 0.05:
            self.drop(extent)
            raise OSError("injected behind the copy")
        return extent

    def _write(self, extent):
        self.trouble()
        super()._write(extent)


def rough_run(llama, seed, wanted):
    """A conversation over failing tiers; each call gives the right logits, or raises and can be repeated."""
    rng = random.Random(seed)
    tiers = Rough(seed, host_bytes=rng.choice([0, 20_000, None]), file_bytes=rng.choice([0, None]))
    cache = KVCache(llama.config, "int8", page_size=P)
    in_place = rng.random() < 0.3
    cache.use_tiers(tiers, resident=rng.choice([0, 16, 48]), unit=rng.choice([1, 10_000]), in_place=in_place)
    failures = 0
    for step, (tokens, logits) in enumerate(wanted):
        while True:
            try:
                got = feed(llama, cache, tokens)
                break
            except (OSError, MemoryError, Damaged):
                failures += 1
                assert cache.get_seq_length() == sum(t.shape[1] for t, _ in wanted[:step])
        far = float((got - logits).norm() / logits.norm())
        assert far < 1e-2 if in_place else far == 0, f"seed {seed}, step {step}: {far}"
    tiers.on = False
    for layer, (k, v) in zip(cache.layers, wanted.dense, strict=True):
        for now, then in ((layer.keys, k), (layer.values, v)):  # different values would show if these were mixed
            assert float((now - then).norm() / then.norm()) < 1e-2 if in_place else torch.equal(now, then)
    cache.pool.check()
    return failures


class Wanted(list):
    pass


@pytest.fixture(scope="module")
def wanted(llama):
    torch.set_num_threads(1)
    cache, found = KVCache(llama.config, "int8", page_size=P), Wanted()
    for step, T in enumerate([90, 1, 1, 30, 1]):
        tokens = ids(1, T, step)
        found.append((tokens, feed(llama, cache, tokens)))
    found.dense = [(layer.keys, layer.values) for layer in cache.layers]
    return found


@pytest.mark.filterwarnings("ignore:KVCache. pages stay")
def test_random_delays_and_failures(llama, wanted):
    runs = int(os.environ.get("KVCOMPRESS_SOAK", 40))
    failures = sum(rough_run(llama, seed, wanted) for seed in range(runs))
    soaked.steps["copies with random delays and failures"] += runs
    assert failures > runs / 10  # failures did occur


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:KVCache. pages stay")
def test_a_thousand_runs_and_no_wrong_byte(llama, wanted):
    assert sum(rough_run(llama, seed, wanted) for seed in range(1000)) > 100
