"""The system's view of a pool's memory: it decreases when pages are freed."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from kvcompress import _C

PAGE = resource.getpagesize()


def test_memory_goes_back_to_the_system() -> None:
    """RSS, not our own count, must decrease when pages are freed."""

    def rss() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE

    pool = _C.Pool(1 << 30)
    size, count = 64 * PAGE, 192
    start = rss()
    offsets = [pool.alloc(size) for _ in range(count)]
    for offset in offsets:
        pool.arena[offset : offset + size] = 1
    grown = rss() - start
    assert grown >= 0.9 * size * count and pool.stats()["resident"] == size * count
    for offset in offsets[:-1]:
        pool.unref(offset)
    assert pool.stats()["resident"] <= 9 * size  # one in use, eight kept hot
    assert rss() - start <= grown / 4
    assert (pool.arena[offsets[-1] : offsets[-1] + size] == 1).all()
    pool.unref(offsets[-1])
    assert pool.stats()["resident"] == 0


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux")
@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="its shadow memory has page tables")
@pytest.mark.parametrize("own", [0, 256 << 20])
def test_page_tables_go_back_too(own: int) -> None:
    """If page tables of small pages remained, the next cache could not use huge pages."""

    def tables() -> int:
        return int(Path("/proc/self/status").read_text().split("VmPTE:")[1].split()[0]) << 10

    size = 9 * PAGE  # an int2 page: slabs are half a huge page
    start = tables()
    for _ in range(2):
        pool = _C.Pool(own) if own else _C.Pool(shared=True)
        offsets = [pool.alloc(size) for _ in range((128 << 20) // size)]
        for offset in offsets:
            pool.arena[offset : offset + size] = 1
        assert tables() - start >= 128 << 10
        for offset in offsets:
            pool.unref(offset)
        assert tables() - start <= 32 << 10
