"""Prefixes in a full pool: what is evicted, and effects on other threads."""

from __future__ import annotations

import contextlib
import sys
import threading

import numpy as np
import pytest
import torch
from models import ids
from test_prefix import OPTIONS, P, feed, pages

from kvcompress import _C, KVCache, PrefixCache, Tiers


def test_a_full_pool_forgets_prefixes_before_it_fails(llama):
    """Least recently used first, but neither pinned prefixes nor those in use."""
    pool, prompts = _C.Pool(2 << 20), [ids(1, 300, seed) for seed in range(12)]
    prefix = PrefixCache(llama.config, "raw", pool=pool, **OPTIONS)

    def put(prompt, **options):
        cache = prefix.open(prompt)
        out = feed(llama, cache, prompt)
        assert prefix.commit(cache, prompt, **options) == 4 + 18 * P
        return cache, out

    used, _ = put(prompts[0])
    before = pages(used, 4 + 18 * P)
    put(prompts[1], pin=True)
    for prompt in prompts[2:]:
        last, out = put(prompt)
        assert torch.equal(out, feed(llama, KVCache(llama.config, "raw", **OPTIONS), prompt))
        prefix._prefix.check()
    stats = prefix.stats()
    assert stats["evicted"] > 18 and stats["entries"] + stats["evicted"] == 12 * 18
    lengths = [prefix.open(prompt).get_seq_length() for prompt in prompts]
    assert lengths[:2] == [4 + 18 * P] * 2 and lengths[2] == 0 and lengths[-1] == 4 + 18 * P
    assert pages(used, 4 + 18 * P) == before
    del last
    with pytest.raises(MemoryError, match="pool is full"):
        feed(llama, KVCache(llama.config, "raw", pool=pool, **OPTIONS), ids(1, 3000))
    prefix._prefix.check()
    assert prefix.stats()["entries"] == 36  # what must stay


class Between:
    """An index; `act` is called once, right after the method `name`, as another thread might."""

    def __init__(self, index, name, act):
        self.index, self.name, self.act = index, name, act

    def __getattr__(self, name):
        method = getattr(self.index, name)
        if name != self.name or self.act is None:
            return method

        def call(*args):
            result, act, self.act = method(*args), self.act, None
            act()
            return result

        return call


@pytest.mark.parametrize(
    "name,more", [("find", {}), ("find", {"tiers": Tiers()}), ("put", {"tiers": Tiers()}), ("put", {})]
)
def test_the_pool_is_full_between_two_calls(llama, name, more):
    """What was found may be evicted before it is taken, or before it is pinned."""
    pool, prompt = _C.Pool(2 << 20), ids(1, 90)
    prefix = PrefixCache(llama.config, "raw", pool=pool, **OPTIONS, **more)

    def fill():
        held = []
        with pytest.raises(MemoryError):
            while True:
                held.append(pool.alloc(4096))
        pool.drop(np.array(held))

    cache = prefix.open(prompt)
    wanted = feed(llama, cache, prompt)
    kept = prefix.commit(cache, prompt)
    cache = None if name == "find" else cache
    if name == "put":  # its own pages for the same tokens
        cache = KVCache(llama.config, "raw", pool=pool, **OPTIONS)
        feed(llama, cache, prompt)
    prefix._prefix = Between(prefix._prefix, name, fill)
    if name == "find":
        hit = prefix.open(prompt)
        assert hit.get_seq_length() == 0 and torch.equal(feed(llama, hit, prompt), wanted)
    else:
        assert prefix.commit(cache, prompt, pin=True) == kept
        assert prefix.stats()["pinned"] == prefix.stats()["entries"] == 5
    assert prefix._prefix.act is None
    prefix._prefix.check()
    pool.check()


@pytest.mark.parametrize("more", [{}, {"tiers": Tiers(), "max_bytes": 1}], ids=["pool", "tiers"])
def test_another_thread_fills_the_pool(llama, more):
    """Whatever it finds, the cache has the prompt's own tokens; or memory is exhausted, and nothing is lost."""
    pool, prompts, ended = _C.Pool(2 << 20), [ids(1, 90, seed) for seed in range(3)], threading.Event()
    prefix = PrefixCache(llama.config, "raw", pool=pool, **OPTIONS, **more)
    wanted = [feed(llama, KVCache(llama.config, "raw", **OPTIONS), x)[:, -1] for x in prompts]
    interval = sys.getswitchinterval()

    def fill():
        while not ended.is_set():
            held = []
            with contextlib.suppress(MemoryError):
                while not ended.is_set():
                    held.append(pool.alloc(8192))
            pool.drop(np.array(held, np.int64))
            ended.wait(0.02)

    other = threading.Thread(target=fill, daemon=True)
    sys.setswitchinterval(1e-5)
    other.start()
    try:
        for i in range(60):
            prompt, logits = prompts[i // 20], wanted[i // 20]
            with contextlib.suppress(MemoryError):
                cache = prefix.open(prompt)
                got = feed(llama, cache, prompt)[:, -1]
                assert torch.allclose(got, logits, atol=1e-3)
                prefix.commit(cache, prompt)
            cache = None
    finally:
        alive = other.is_alive()
        ended.set()
        other.join(60)
        sys.setswitchinterval(interval)
    assert alive
    prefix._prefix.check()
    pool.check()
    assert pool.stats()["used"] == prefix.stats()["bytes"]
