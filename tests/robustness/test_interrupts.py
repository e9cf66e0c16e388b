"""Ctrl-C at every point where Python checks for it: afterwards results are right, or calls are rejected."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from faults import INJECTED
from interrupts import interrupted
from models import ids
from test_faults import cache_state, equal, feed, filled, llama
from transformers import cache_utils
from transformers.models.llama import modeling_llama

import kvcompress
from kvcompress import Batch, KVCache

# Full paths: a clone may be in a folder of that name, and torch must not be interrupted.
FILES = (os.path.join(os.path.dirname(kvcompress.__file__), ""), cache_utils.__file__, modeling_llama.__file__)


def one(cache: KVCache) -> torch.Tensor:
    return feed(cache, 1, 40)


def together(caches: list[KVCache]) -> torch.Tensor:
    """A pass over separate sequences: a token, a token, and enough tokens to fill a page."""
    batch = Batch(caches, [1, 1, 30])
    with torch.no_grad():
        return llama()(ids(1, 32, 7), position_ids=batch.positions, past_key_values=batch).logits


def sequences() -> list[KVCache]:
    caches = [KVCache(llama().config, "int8", page_size=16)]
    caches += [KVCache(llama().config, "int8", page_size=16, pool=caches[0].pool) for _ in range(2)]
    for i, cache in enumerate(caches):
        with torch.no_grad():
            llama()(ids(1, 20 + 15 * i, i), past_key_values=cache)  # the token of the second one seals a page
    return caches


def from_others() -> KVCache:
    """A cache that has had no forward pass."""
    return KVCache.from_cache(filled("plain").to_dynamic_cache(), llama().config, "int8", page_size=16)


ACTS: dict[str, tuple[Callable[[], list[KVCache]], Callable[[list[KVCache]], Any]]] = {
    "a token": (lambda: [filled("plain")], lambda x: one(x[0])),
    "a token, h2o": (lambda: [filled("h2o")], lambda x: one(x[0])),
    "a chunk": (lambda: [filled("plain")], lambda x: feed(x[0], 40, 41)),
    "crop of a filled one": (lambda: [from_others()], lambda x: x[0].crop(-23)),
    "crop": (lambda: [filled("plain")], lambda x: x[0].crop(-23)),
    "reset": (lambda: [filled("plain")], lambda x: x[0].reset()),
    "batch": (sequences, together),
}


FULL = ("a token, h2o", "a chunk", "batch")


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.full) if x in FULL else x for x in ACTS])
def test_interrupt_at_every_place(name: str) -> None:
    """The cache is as before or after the call, or rejects further calls; the source of the copy is unchanged, and all
    memory is freed."""
    make, act = ACTS[name]
    base = make()
    pool, before = base[0].pool, [cache_state(x) for x in base]
    after = copy.deepcopy(base)
    act(after)
    empty = copy.deepcopy(base)
    for cache in empty:
        cache.reset()
    want = [
        {x.get_seq_length(): one(copy.deepcopy(x)) for x in group} for group in zip(base, after, empty, strict=True)
    ]
    del after, empty
    files = FILES[: 1 if name == "batch" else None]
    used = pool.stats()["used"]
    caches = copy.deepcopy(base)
    places, hit = interrupted(act, caches, 0, files)
    assert places > 20 and not hit
    for at in range(1, places + 1):
        caches = copy.deepcopy(base)
        _, hit = interrupted(act, caches, at, files)
        assert hit
        INJECTED["interrupts"] += 1
        pool.check()
        assert all(equal(cache_state(x), y) for x, y in zip(base, before, strict=True))
        for cache, known in zip(caches, want, strict=True):
            lengths = {x.get_seq_length() for x in cache.layers}
            seen = cache.get_seq_length()
            try:
                logits = one(cache)
            except ValueError as error:  # the error says so, and how to continue
                assert "interrupted a forward pass" in str(error) and len(lengths) > 1, (at, error)
                cache.reset()
                logits = one(cache)
                assert torch.equal(logits, known[0])
            else:
                assert len(lengths) == 1 and torch.equal(logits, known[seen]), (at, lengths)
        del cache, caches
        if pool.stats()["used"] != used:
            gc.collect()
        assert pool.stats()["used"] == used, at
