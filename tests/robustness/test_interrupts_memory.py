"""Ctrl-C while the pages of a cache are elsewhere: suspended, or offloaded to tiers."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from faults import INJECTED
from interrupts import interrupted
from test_faults import feed, filled
from test_interrupts import FILES, one

from kvcompress import KVCache, Tiers


def offloaded(folder: Path | None = None) -> KVCache:
    cache = filled("plain")
    cache.use_tiers(Tiers(0 if folder else None, None, folder), resident=16, unit=1)
    assert all(layer.store.offload.runs for layer in cache.layers)
    return cache


def suspended() -> KVCache:
    cache = filled("plain")
    cache.suspend()
    return cache


@functools.cache
def known(tokens: int) -> torch.Tensor:
    """Logits of the pass `one` of a cache that has `tokens` slots."""
    cache = filled("plain")
    if tokens == 0:
        cache.reset()
    elif tokens > cache.get_seq_length():
        one(cache)
    assert cache.get_seq_length() == tokens
    return one(cache)


ACTS: dict[str, tuple[Callable[..., KVCache], Callable[[KVCache], object]]] = {
    "suspend": (lambda _: filled("plain"), lambda x: x.suspend()),
    "suspend to a file": (lambda folder: filled("plain"), lambda x: x.suspend(x.path)),
    "resume": (lambda _: suspended(), lambda x: x.resume()),
    "suspend of an offloaded one": (lambda _: offloaded(), lambda x: x.suspend()),
    "a token": (lambda _: offloaded(), one),
    "a token, files": (offloaded, one),
    "a chunk": (lambda _: offloaded(), lambda x: feed(x, 40, 41)),
    "reset": (lambda _: offloaded(), lambda x: x.reset()),
    "use_tiers": (lambda _: filled("plain"), lambda x: x.use_tiers(Tiers(), resident=16, unit=1)),
    "end of use_tiers": (lambda _: offloaded(), lambda x: x.use_tiers(None)),
}


FULL = ("a token", "a token, files", "a chunk", "use_tiers", "suspend of an offloaded one")


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.full) if x in FULL else x for x in ACTS])
def test_interrupt_at_every_place(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache goes on as if the call was made, or was not; or it rejects further calls until it is reset. No page is
    lost or freed twice."""
    make, act = ACTS[name]
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # of an interrupted __del__; pytest's keeps the object
    at = places = 0
    while at <= places:
        cache = make(tmp_path)
        cache.path = tmp_path / "a.kvc"
        pool = cache.pool
        count, _ = interrupted(act, cache, at, FILES)
        places = places or count
        pool.check()
        if cache.forward_pass.suspended:
            cache.resume()
        try:
            seen, logits = cache.get_seq_length(), one(cache)
        except ValueError as error:
            assert "interrupted a forward pass" in str(error), (at, error)
            cache.reset()
            seen, logits = 0, one(cache)
        if name != "a chunk" or seen in (0, 79):
            assert torch.equal(logits, known(seen)), (at, seen)
        pool.check()
        del cache
        if pool.stats()["used"]:
            gc.collect()
        assert pool.stats()["used"] == 0, at
        at += 1
        INJECTED["interrupts"] += 1
    assert places > 20
