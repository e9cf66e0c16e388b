"""The slab pool, from Python and C: slots, reference counts, returned memory, failures."""

from __future__ import annotations

import itertools
import os
import random
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcompress import _C

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
PAGE = resource.getpagesize()
CC = os.environ.get("CC", "cc")
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-g", "-O1", "-Wall", "-Wextra", "-Werror", "-Wconversion", "-Wshadow"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
CORE = [
    ROOT / "csrc" / "core" / f"{name}.c"
    for name in (
        "base/alloc",
        "base/status",
        "codec/format",
        "memory/pool_check",
        "memory/reclaim",
        "memory/space",
        "memory/units",
        "table/table",
        "table/table_slots",
        "table/table_plan",
        "table/table_restore",
        "table/table_evict",
        "table/table_evict_plan",
    )
]
NAMES = ("main_memory", "test_pool", "test_space", "test_table", "test_restore", "test_evict", "test_moves")
HARNESS = [ROOT / "tests" / "c" / f"{name}.c" for name in NAMES]

needs_cc = pytest.mark.skipif(shutil.which(CC) is None, reason="no C compiler")


# ------------------------------------------------------------------ the C harness


def build(to: Path, *options: str) -> Path:
    """The harness as a program; test_pool.c includes pool.c."""
    command = [CC, *FLAGS, *options, "-iquote", ROOT / "csrc" / "core", *HARNESS, *CORE, "-o", to]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return to


def run(*command: str) -> None:
    # The suite itself may run with a sanitizer.
    env = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=300)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


@needs_cc
def test_core_under_sanitizers(tmp_path: Path) -> None:
    (tmp_path / "probe.c").write_text("int main(void) { return 0; }\n")
    probe = [CC, *SANITIZE, str(tmp_path / "probe.c"), "-o", str(tmp_path / "probe")]
    sanitize = SANITIZE if subprocess.run(probe, capture_output=True, check=False).returncode == 0 else []
    run(str(build(tmp_path / "harness", *sanitize)))


@needs_cc
@pytest.mark.full
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="no valgrind")
def test_core_under_valgrind(tmp_path: Path) -> None:
    run("valgrind", "-q", "--error-exitcode=3", "--leak-check=full", str(build(tmp_path / "harness")))


# ------------------------------------------------------------------ from Python


@pytest.mark.parametrize("keep", [0, 5 * MIB, 1000 * MIB])
def test_slots_against_a_dict(keep: int) -> None:
    """Random alloc, ref, unref, some failing: slots never overlap, and counts and sums match a dict."""
    rng = random.Random(3)
    pool = _C.Pool(192 * MIB, keep)
    live: dict[int, tuple[int, int]] = {}  # offset -> (bytes, references)
    try:
        for step in range(3000):
            do = rng.random()
            if do < 0.45 or not live:
                size = rng.choice([1, 64, 100, 4096, 3 * PAGE, 70_000, MIB + 1])
                before = pool.stats()
                _C.alloc_fail_at(rng.choice([0, 0, 1, 2, 3, 4]))
                try:
                    offset = pool.alloc(size)
                except MemoryError as error:
                    assert "expected" in str(error) or "out of memory" in str(error)
                    assert keep or pool.stats() == before  # kept memory may have been returned
                else:
                    assert offset % 64 == 0 and offset not in live and offset + size <= pool.extent
                    live[offset] = (-(-size // 64) * 64, 1)
                finally:
                    _C.alloc_fail_at(0)
            else:
                offset = rng.choice(list(live))
                size, refs = live[offset]
                if do < 0.6:
                    pool.ref(offset)
                    live[offset] = (size, refs + 1)
                else:
                    pool.unref(offset)
                    live[offset] = (size, refs - 1)
                    if refs == 1:
                        del live[offset]
            if step % 25 == 0:
                pool.check()
                ends = 0
                for offset, (size, refs) in sorted(live.items()):
                    assert offset >= ends and pool.refs(offset) == refs
                    ends = offset + size
                stats = pool.stats()
                assert stats["slots"] == len(live)
                assert stats["used"] == sum(size for size, _ in live.values()) <= stats["resident"]
                assert stats["resident"] <= pool.extent <= stats["reserved"] == 192 * MIB
    finally:
        _C.alloc_fail_at(0)
    for offset, (_, refs) in live.items():
        for _ in range(refs):
            pool.unref(offset)
    pool.check()
    stats = pool.stats()
    assert stats["used"] == stats["slots"] == 0 and stats["resident"] <= keep and (stats["slabs"] > 0) == (keep > 0)


def test_kept_memory_serves_again() -> None:
    """No page faults for kept memory, none kept beyond the limit, and none that blocks other sizes."""
    pool, slot = _C.Pool(64 * MIB, keep_bytes=32 * MIB), 64 * PAGE

    def faults(n: int) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        offsets = [pool.alloc(slot) for _ in range(n)]
        for offset in offsets:
            pool.arena[offset : offset + slot] = 1
        found = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        for offset in offsets:
            pool.unref(offset)
        pool.check()
        return found

    n = 24 * MIB // slot
    first, again = faults(n), faults(n)
    assert first >= n and again < first / 10
    assert 24 * MIB <= pool.stats()["resident"] <= 25 * MIB
    faults(56 * MIB // slot)
    assert pool.stats()["resident"] <= 32 * MIB
    offset = pool.alloc(60 * MIB)  # kept memory is released for it
    assert pool.stats()["slots"] == pool.stats()["slabs"] == 1
    pool.unref(offset)
    assert pool.stats()["resident"] == 0  # more than 32 MiB in one piece
    for wrong in ("1GB", None, 1.5, True):
        for call in (_C.Pool, lambda x: _C.Pool(keep_bytes=x), _C.Pool().limit, _C.Pool().alloc):
            with pytest.raises(TypeError, match=r"Pool: \w+: expected a number of bytes as an int, .*, got "):
                call(wrong)
    with pytest.raises(ValueError, match="keep: expected at least 0 bytes, got -1"):
        _C.Pool(MIB, keep_bytes=-1)


def test_full_pool_says_so_and_goes_on() -> None:
    pool = _C.Pool(2 * MIB)
    offsets = []
    text = r"pool is full: needed 65536 bytes, 2097152 of 2097152 in use \(.*max_bytes="
    with pytest.raises(MemoryError, match=text):
        while True:
            offsets.append(pool.alloc(1 << 16))
    assert len(offsets) == 32
    stats = pool.stats()
    with pytest.raises(MemoryError, match="full"):
        pool.alloc(64)
    assert pool.stats() == stats
    small = _C.Pool(MIB)
    small.alloc(8192)
    with pytest.raises(MemoryError, match=r"8192 of 1048576 in use \(pages of one size share pieces of 1048576\)"):
        small.alloc(16384)
    pool.unref(offsets[5])
    assert pool.alloc(1 << 16) == offsets[5]


def test_small_pool_serves_many_sizes() -> None:
    pool = _C.Pool(8 * MIB)
    for size in (64, 5000, 100_000, 300_000, 500_000, 700_000, 900_000, MIB):
        pool.alloc(size)  # one unit each: large slabs are for large pools
    pool.check()
    assert pool.stats()["slabs"] == 8


def test_arena_keeps_its_place_and_bytes() -> None:
    pool = _C.Pool(1 << 30)
    first = pool.alloc(1000)
    pool.arena[first : first + 1000] = 7
    view, address = pool.arena, pool.arena.ctypes.data
    for _ in range(20):
        pool.alloc(3 * MIB)
    assert pool.arena.ctypes.data == address and len(pool.arena) == pool.extent >= 60 * MIB
    assert (view[first : first + 1000] == 7).all() and (pool.arena[first : first + 1000] == 7).all()


def limited(limit: str, code: str) -> Any:
    """Output of code in a process whose `limit` is 256 MiB above its current use."""
    setup = f"""
import resource
from kvcompress import _C
field = {{"RLIMIT_AS": "VmSize", "RLIMIT_DATA": "VmData"}}["{limit}"]
used = next(int(x.split()[1]) << 10 for x in open("/proc/self/status") if x.startswith(field))
resource.setrlimit(resource.{limit}, (used + (256 << 20), resource.RLIM_INFINITY))
"""
    done = subprocess.run([sys.executable, "-c", setup + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


no_limits = pytest.mark.skipif(
    "KVCOMPRESS_SANITIZE" in os.environ or "asan" in os.environ.get("LD_PRELOAD", ""),
    reason="a sanitizer needs the whole address space",
)


@no_limits
def test_limit_on_address_space_makes_a_smaller_pool() -> None:
    reserved = int(limited("RLIMIT_AS", 'print(_C.Pool().stats()["reserved"])'))
    assert 64 * MIB <= reserved <= 256 * MIB


@no_limits
def test_system_that_refuses_memory_is_a_memory_error() -> None:
    code = """
pool, offsets = _C.Pool(1 << 32), []
try:
    while len(offsets) < 1000:
        offsets.append(pool.alloc(1 << 20))
except MemoryError as error:
    assert "the system refused" in str(error), error
pool.check()
stats = pool.stats()
assert stats["slots"] == len(offsets) and stats["used"] == len(offsets) << 20, stats
resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY,) * 2)
pool.alloc(1 << 26)
print(len(offsets))
"""
    assert 100 < int(limited("RLIMIT_DATA", code)) <= 256


MANY = """
import ctypes, gc, resource, sys, torch, kvcompress
resource.setrlimit(resource.RLIMIT_AS, (16 << 30,) * 2)
count = int(sys.argv[1])

def mappings():
    return sum(1 for _ in open("/proc/self/maps"))

def held():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the C library keeps of what was freed is not ours
    lines = [x.split() for x in open("/proc/self/status") if x.startswith(("VmSize", "VmRSS"))]
    return {x[0]: int(x[1]) >> 10 for x in lines}

x = torch.randn(1, 1, 8, 64)
def life():
    caches = []
    for i in range(count):
        caches.append(kvcompress.PagedKV(1, 64, key="int8"))
        caches[-1].append(x + i, x - i)
    assert mappings() < before + 100
    for i in (0, count // 2, count - 1):
        k, v = caches[i].dense()
        assert torch.equal(k, x + i) and torch.equal(v, x - i)

kvcompress.PagedKV(1, 64).append(x, x)
before = mappings()
life()
life()  # the heap has taken its shape
first = held()
life()
after = held()
assert mappings() < before + 100
assert after["VmSize:"] <= first["VmSize:"] + 32 and after["VmRSS:"] <= first["VmRSS:"] + 16, (first, after)
print("ok")
"""


@no_limits
@pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.full)])
def test_many_live_caches(count: int) -> None:
    """Within 16 GiB of address space and a few mappings; released space is reused."""
    done = subprocess.run([sys.executable, "-c", MANY, str(count)], capture_output=True, text=True, check=False)
    assert done.stdout == "ok\n", done.stderr


def test_shared_pools_against_a_dict() -> None:
    """Random slots of pools that come and go in one address space: no overlaps, offsets of other pools are rejected,
    and all memory is returned."""
    rng = random.Random(5)
    pools: list[tuple[Any, dict[int, tuple[int, int]]]] = []
    for step in range(4000):
        if len(pools) < 3 or (rng.random() < 0.02 and len(pools) < 12):
            pools.append((_C.Pool(shared=True), {}))
        pool, live = rng.choice(pools)
        if rng.random() < 0.6:
            size = rng.choice([1, 100, 4096, 20_000, 70_000, MIB + 1, 3 * MIB])
            offset = pool.alloc(size)
            assert all(other.refs(offset) == 0 for other, _ in pools if other is not pool)
            mark = rng.randrange(256)
            pool.arena[offset] = pool.arena[offset + size - 1] = mark
            live[offset] = (size, mark)
        elif live:
            offset = rng.choice(list(live))
            size, mark = live.pop(offset)
            assert pool.arena[offset] == pool.arena[offset + size - 1] == mark
            pool.unref(offset)
        if rng.random() < 0.01:
            pools.remove(next(x for x in pools if x[0] is pool))
        if step % 50 == 0:
            spans = sorted((at, at + size) for _, live in pools for at, (size, _) in live.items())
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
            for pool, live in pools:
                pool.check()
                stats = pool.stats()
                assert stats["slots"] == len(live) and stats["used"] == sum(-(-n // 64) * 64 for n, _ in live.values())
    for pool, live in pools:
        for offset in live:
            pool.unref(offset)
        pool.check()
        assert pool.stats()["resident"] == 0 and pool.shared
    with pytest.raises(ValueError, match="expected max_bytes or shared, got both"):
        _C.Pool(MIB, shared=True)
    pool.limit(MIB)
    offsets = [pool.alloc(MIB // 4) for _ in range(3)]
    with pytest.raises(MemoryError, match="pool is full: needed 786432 bytes"):
        pool.alloc(3 * MIB // 4)
    with pytest.raises(ValueError, match="limit: expected at least"):
        pool.limit(MIB // 4)
    assert len(set(offsets)) == 3


@no_limits
def test_limit_on_address_space_is_shared() -> None:
    """Pools share half of the process's limit."""
    code = """
pools = [_C.Pool(shared=True) for _ in range(3)]
reserved = pools[0].stats()["reserved"]
offsets = []
try:
    while True:
        offsets.append(pools[len(offsets) % 3].alloc(1 << 20))
except MemoryError as error:
    assert "pool is full: needed 1048576 bytes" in str(error), error
for pool in pools:
    pool.check()
assert 0.9 * reserved <= len(offsets) << 20 <= reserved, (len(offsets), reserved)
for offset in offsets[::3]:
    pools[0].unref(offset)
for _ in offsets[::3]:
    pools[1].alloc(1 << 20)
print(reserved)
"""
    assert 64 * MIB <= int(limited("RLIMIT_AS", code)) <= 256 * MIB


def test_offsets_are_checked() -> None:
    pool = _C.Pool(MIB)
    offset = pool.alloc(128)
    for wrong in (-1, offset + 64, offset + 128, MIB, 1 << 62):
        assert pool.refs(wrong) == 0
        with pytest.raises(ValueError, match="slot in use"):
            pool.unref(wrong)
    with pytest.raises(ValueError, match="max_bytes"):
        _C.Pool((1 << 63) - 1)
    with pytest.raises(MemoryError, match="no address space"):
        _C.Pool(1 << 61)
    assert np.asarray(pool.arena).dtype == np.uint8
