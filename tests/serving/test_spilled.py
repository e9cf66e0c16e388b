"""Offloaded prefixes: they come back unchanged, or are a miss."""

from __future__ import annotations

import gc
import random

import pytest
import torch
from cuda_twin import Twin
from generation import PAGE as P
from generation import feed
from models import ids
from test_cuda_layer import on
from test_prefix import pages
from test_tiers import Rough

from kvcompress import _C, KVCache, PagedKV, PrefixCache, Tiers
from kvcompress.store.device_memory import Mirror

KNOWN = 4 + 4 * P  # of 90 tokens, the newest page raw
PROMPTS = [ids(1, 90, seed) for seed in range(6)]
FILE = {"host_bytes": 0, "file_bytes": None}


def fed(llama, prefix, prompt, **options):
    """A cache with the committed prompt."""
    cache = prefix.open(prompt)
    feed(llama, cache, prompt[:, cache.get_seq_length() :])
    assert prefix.commit(cache, prompt, **options) >= KNOWN
    return cache


def room_for(llama, n):
    """Bytes of n prompts."""
    prefix = PrefixCache(llama.config, "int8", page_size=P)
    fed(llama, prefix, PROMPTS[0])
    return n * prefix.stats()["bytes"]


@pytest.mark.parametrize("where", ["host", "file"])
def test_offloaded_prefixes_are_restored_exactly(llama, where):
    tiers = Tiers(**(FILE if where == "file" else {}))
    most = room_for(llama, 2)
    prefix = PrefixCache(llama.config, "int8", page_size=P, max_bytes=most, tiers=tiers)
    wanted = []
    for prompt in PROMPTS:
        wanted.append(pages(fed(llama, prefix, prompt), KNOWN))
        assert prefix.stats()["bytes"] <= most
        prefix._prefix.check()
    stats = prefix.stats()
    assert stats["offloaded"] == 16 and stats["entries"] == 24 and stats["evicted"] == 0 and stats[where] > 0
    assert tiers.stats()[where] == stats[where] and prefix.pool.stats()["used"] == stats["bytes"]
    for prompt, bytes_ in zip(PROMPTS, wanted, strict=True):
        hit = prefix.open(prompt)
        assert hit.get_seq_length() == KNOWN and pages(hit, KNOWN) == bytes_
        fresh = KVCache(llama.config, "int8", page_size=P)
        feed(llama, fresh, prompt[:, :KNOWN])
        assert torch.equal(feed(llama, hit, prompt[:, KNOWN:]), feed(llama, fresh, prompt[:, KNOWN:]))
        del hit, fresh
        assert prefix.stats()["bytes"] <= most
        prefix._prefix.check()
    stats = prefix.stats()
    assert stats[f"from_{where}"] == 6 and stats["failed"] == 0 and stats["saved_tokens"] == 6 * KNOWN
    prefix.trim()
    assert prefix.pool.stats()["used"] == 0 and prefix.stats()["offloaded"] == 24
    assert prefix.open(PROMPTS[3]).get_seq_length() == KNOWN
    del prefix
    gc.collect()
    assert tiers.stats()["host"] == tiers.stats()["file"] == 0


def test_entries_are_offloaded_in_extents(llama):
    """In extents of at most a unit plus a link; each of a single chain, and what is still needed stays."""
    tiers = Tiers()
    prefix = PrefixCache(llama.config, "int8", page_size=P, tiers=tiers)
    trunk = ids(1, 200, 3)
    branches = [torch.cat([trunk, ids(1, 90, seed)], 1) for seed in range(2)]
    wanted = [pages(fed(llama, prefix, x), 4 + 16 * P) for x in branches]
    one = prefix.stats()["bytes"] // prefix.stats()["entries"]
    prefix._spill.unit = 3 * one
    prefix.trim(prefix.stats()["bytes"] - 1)
    assert tiers.stats()["puts"] == 1 and 3 <= prefix.stats()["offloaded"] <= 4
    prefix.trim()
    sizes = [extent.size for extent in tiers.host.values()]
    assert len(sizes) == 5 and min(sizes) >= 3 * one and sorted(sizes)[-2] < 4 * one  # the first page has the sinks
    for branch, bytes_ in zip(branches, wanted, strict=True):
        hit = prefix.open(branch)
        assert hit.get_seq_length() == 4 + 16 * P and pages(hit, 4 + 16 * P) == bytes_
    assert prefix.stats()["from_host"] == len(sizes) and prefix.stats()["offloaded"] == tiers.stats()["host"] == 0
    # With a limit, up to a quarter of it is offloaded at once.
    prefix._limits[0] = prefix.stats()["bytes"] - 1
    prefix._spill.unit = 1 << 20
    prefix._shrink()
    assert 0 < prefix.stats()["offloaded"] <= prefix.stats()["entries"] // 4 + 1


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("harm", ["bit", "gone"])
def test_failed_fetches_are_misses(llama, harm, together, tmp_path):
    tiers = Tiers(**FILE, folder=tmp_path)
    prefix = PrefixCache(llama.config, "int8", page_size=P, tiers=tiers)
    wanted = pages(fed(llama, prefix, PROMPTS[0]), KNOWN)
    if not together:
        prefix._spill.unit = 1
    prefix.trim()
    third = sorted(prefix._spill.waiting)[2]
    path = prefix._spill.waiting[third].parts[0][2].path
    if harm == "gone":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[77] ^= 1
        path.write_bytes(data)
    hit = prefix.open(PROMPTS[0])
    came = 0 if together else 4 + 2 * P
    assert hit.get_seq_length() == came
    assert together or pages(hit, came) == [x for layer in (wanted[:4], wanted[4:]) for x in layer[:2]]
    assert prefix.stats()["failed"] == 1 and prefix.stats()["offloaded"] == (4 if together else 2)
    feed(llama, hit, PROMPTS[0][:, came:])
    assert prefix.commit(hit, PROMPTS[0]) == KNOWN and prefix.stats()["offloaded"] == 0  # it was recomputed
    assert tiers.stats()["file"] == 0 and not list(tmp_path.iterdir())
    assert prefix.open(PROMPTS[0]).get_seq_length() == KNOWN
    prefix._prefix.check()


def test_full_tiers_drop_the_oldest_entries(llama):
    one = room_for(llama, 1)
    tiers = Tiers(host_bytes=2 * one)
    prefix = PrefixCache(llama.config, "int8", page_size=P, max_bytes=one, tiers=tiers, max_entries=11)
    for prompt in PROMPTS:
        fed(llama, prefix, prompt)
        assert tiers.stats()["host"] == prefix.stats()["host"] <= 2 * one and prefix.stats()["entries"] <= 11
        prefix._prefix.check()
    assert [prefix.open(x).get_seq_length() > 0 for x in PROMPTS] == [False] * 3 + [True] * 3
    assert prefix.stats()["evicted"] == 24 - prefix.stats()["entries"]
    none = PrefixCache(llama.config, "int8", page_size=P, max_bytes=one, tiers=Tiers(host_bytes=0))
    for prompt in PROMPTS[:2]:
        fed(llama, none, prompt)
    assert none.stats()["offloaded"] == 0 and none.stats()["evicted"] == 4  # as without tiers
    assert none.open(PROMPTS[1]).get_seq_length() == KNOWN


def test_a_full_pool_drops_entries_that_are_not_offloaded(llama):
    """Of a chain whose end is offloaded, the rest can be evicted, too; committing it again makes the end usable."""
    prefix = PrefixCache(llama.config, "raw", page_size=P, tiers=Tiers(), pool=_C.Pool(2 << 20))
    fed(llama, prefix, PROMPTS[0])
    prefix.trim(prefix.stats()["bytes"] // 2)
    assert 0 < prefix.stats()["offloaded"] < prefix.stats()["entries"]
    other = KVCache(llama.config, "raw", page_size=P, pool=prefix.pool)
    with pytest.raises(MemoryError, match="pool is full"):
        feed(llama, other, ids(1, 3000))
    stats = prefix.stats()
    assert stats["bytes"] == 0 and stats["offloaded"] == stats["entries"] > 0 and stats["host"] > 0
    prefix._prefix.check()
    assert prefix.open(PROMPTS[0]).get_seq_length() == 0
    del other
    fed(llama, prefix, PROMPTS[0])
    assert prefix.open(PROMPTS[0]).get_seq_length() >= KNOWN and prefix.stats()["offloaded"] == 0
    assert prefix.stats()["host"] == 0


def test_pinned_ones_stay(llama):
    prefix = PrefixCache(llama.config, "int8", page_size=P, max_bytes=1, tiers=Tiers())
    fed(llama, prefix, PROMPTS[0], pin=True)
    fed(llama, prefix, PROMPTS[1])
    assert prefix.stats()["offloaded"] == 4 and prefix.stats()["pinned"] == 4
    prefix.unpin(PROMPTS[0])
    prefix.trim()
    assert prefix.stats()["offloaded"] == 8 and prefix.pool.stats()["used"] == 0


def test_collisions_are_misses_there_too(llama):
    """Digests of one byte: tokens are compared for offloaded links, too, along the whole chain."""
    prefix = PrefixCache(llama.config, "int8", page_size=P, max_bytes=1, tiers=Tiers())
    prefix._prefix.weaken(1)
    stored = {}
    for seed in range(40):
        prompt = ids(1, 60, seed)
        cache = KVCache(llama.config, "int8", page_size=P, pool=prefix.pool)
        feed(llama, cache, prompt)
        if prefix.commit(cache, prompt):
            stored[seed] = pages(cache, 36)
    assert prefix.stats()["collisions"] > 0
    for seed in range(40):
        hit = prefix.open(ids(1, 60, seed))
        n = hit.get_seq_length()
        assert n == 0 or pages(hit, n)[:1] == stored[seed][:1]


def test_no_memory_for_it_is_a_shorter_prefix(llama, fail_at):
    prefix = PrefixCache(llama.config, "int8", page_size=P, tiers=Tiers())
    fed(llama, prefix, PROMPTS[0])
    for n in range(1, 30):
        prefix.trim()
        assert prefix.stats()["offloaded"] == 4
        fail_at(n)
        try:
            assert prefix.open(PROMPTS[0]).get_seq_length() <= KNOWN
        except MemoryError:
            pass
        finally:
            fail_at(0)
        gc.collect()
        prefix._prefix.check()
        prefix.pool.check()
        assert prefix.pool.stats()["used"] == prefix.stats()["bytes"]
    assert prefix.open(PROMPTS[0]).get_seq_length() == KNOWN


@pytest.mark.parametrize("seed", range(8))
def test_delays_and_failures(llama, seed):
    """Transfers fail or are damaged at random: a prompt gets the pages stored for it, or fewer."""
    rng = random.Random(seed)
    host, file = rng.choice([(0, None), (30_000, None), (None, 0)])
    tiers = Rough(seed, host_bytes=host, file_bytes=file)
    prefix = PrefixCache(llama.config, "int8", page_size=P, max_bytes=rng.choice([1, 20_000]), tiers=tiers)
    trunk, stored = ids(1, 200, 3), {}

    def links(cache, prompt, n):
        """(all tokens up to the link, layer) and the bytes of each page."""
        many = (n - 4) // P
        found = pages(cache, n) if n else []
        for i, page in enumerate(found):
            yield (i // many, tuple(prompt[0, : 4 + (i % many + 1) * P].tolist())), page

    for _ in range(25):
        cut, tail = rng.choice([20, 52, 90, 130]), rng.randrange(4)
        prompt = torch.cat([trunk[:, :cut], ids(1, 60, tail)], 1)
        cache = prefix.open(prompt)
        n = cache.get_seq_length()
        for key, page in links(cache, prompt, n):
            assert page in stored[key]
        feed(llama, cache, prompt[:, n:])
        kept = prefix.commit(cache, prompt)
        sealed = 4 + P * min(layer.store.page_store.sealed_columns(0) for layer in cache.layers)
        assert kept <= sealed  # links after a lost one may be found again
        for key, page in links(cache, prompt, sealed):
            stored.setdefault(key, set()).add(page)
        prefix._prefix.check()
        here = prefix.stats()
        assert here["host"] + here["file"] == sum(tiers.bytes.values())
    del cache
    gc.collect()
    assert prefix.pool.stats()["used"] == prefix.stats()["bytes"] and prefix.stats()["hits"]


@pytest.mark.parametrize("tiers", [None, Tiers()], ids=["pool", "tiers"])
def test_pages_on_a_device_stay_with_their_prefix(llama, monkeypatch, tiers):
    """As on a GPU: in a separate arena that outlives the caches; offloaded pages come back there."""
    init = PagedKV.__init__

    def far(self, *args, **options):
        init(self, *args, **options)
        self.page_store.mirror = Mirror(self.page_store.pool, torch.device("cpu"))

    monkeypatch.setattr(PagedKV, "__init__", far)
    with on(Twin()):
        prefix = PrefixCache(llama.config, "int8", page_size=P, tiers=tiers)
        cache = fed(llama, prefix, PROMPTS[0])
        wanted = pages(cache, KNOWN)
        del cache
        gc.collect()
        if tiers:
            prefix.trim()
            assert prefix.stats()["offloaded"] == 4
        hit = prefix.open(PROMPTS[0])
        assert hit.get_seq_length() == KNOWN and pages(hit, KNOWN) == wanted
