"""External faults: disks, Ctrl-C, a full pool, fork, threads, subinterpreters."""

from __future__ import annotations

import copy
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import INJECTED
from models import ids
from test_faults import cache_goes_on, cache_state, equal, feed, filled, llama

from kvcompress import _C, KVCache, PagedKV, Tiers

ROOT = Path(__file__).resolve().parents[2]
# so that programs can import the tests' helpers
PATHS = {**os.environ, "PYTHONPATH": os.pathsep.join(x for x in sys.path if x)}


def python(code: str, *args: str, timeout: float = 120, **options: Any) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code, *args], cwd=ROOT / "tests", capture_output=True, text=True, timeout=timeout,
        check=False, **{"env": PATHS, **options},
    )  # fmt: skip


# ---------------------------------------------------------------- disks

FULL_DISK = """
import resource, sys, torch
from test_faults import cache_goes_on, equal, filled, llama
from kvcompress import KVCache
path = sys.argv[1]
cache, twin = filled("plain"), filled("plain")
cache.save(path)
old = open(path, "rb").read()
cache_of_more = filled("plain")
torch.set_num_threads(1)
places = [*range(0, len(old), max(1, len(old) // 12))]
for what, limit in [(what, limit) for what in ("save", "suspend") for limit in places]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        getattr(cache, what)(path)
        raise SystemExit(f"{what} of {len(old)} bytes on a disk of {limit}")
    except OSError as error:
        assert error.errno, error
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert open(path, "rb").read() == old, "the old file is another"
    assert cache.forward_pass.suspended is None
    print(limit)
again = KVCache.load(path, llama().config)
want = cache_goes_on(twin)
assert equal(cache_goes_on(cache), want) and equal(cache_goes_on(again), want)
import os
assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)], os.listdir(os.path.dirname(path))
"""


def test_full_disk(tmp_path: Path) -> None:
    """A limit on file sizes, at a dozen points: the old file and the cache are unchanged, and no partial file
    remains."""
    done = python(FULL_DISK, str(tmp_path / "a.kvc"))
    assert done.returncode == 0, done.stderr[-2000:]
    INJECTED["full disks"] += len(done.stdout.split())


def test_a_tier_on_a_full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Pages that cannot be written stay in the pool, with one warning; the generated tokens are the same."""
    cache, twin = filled("plain"), filled("plain")
    write = os.write

    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    import builtins

    real = builtins.open
    monkeypatch.setattr(builtins, "open", lambda p, mode="r", **k: full() if "x" in mode else real(p, mode, **k))
    with pytest.warns(UserWarning):
        cache.use_tiers(Tiers(host_bytes=0, file_bytes=None, folder=tmp_path), resident=0, unit=1)
        got = cache_goes_on(cache)
    monkeypatch.undo()
    INJECTED["full disks"] += 1
    assert equal(got, cache_goes_on(twin)) and not list(tmp_path.iterdir()) and write is os.write


def test_tier_files_missing_or_damaged() -> None:
    """A file that is missing, truncated or changed: the call raises and the cache is unchanged; with the file restored
    it continues."""
    want = cache_goes_on(filled("plain"))[0]
    for damage in (
        lambda path, data: path.unlink(),
        lambda path, data: path.write_bytes(data[:-64]),
        lambda path, data: path.write_bytes(bytes([data[0] ^ 1]) + data[1:]),
    ):
        for which in (0, -1):
            cache, tiers = filled("plain"), Tiers(host_bytes=0, file_bytes=None)
            cache.use_tiers(tiers, resident=0, unit=1)
            path = sorted(Path(tiers._folder).iterdir())[which]
            good = path.read_bytes()
            damage(path, good)
            with pytest.raises((OSError, ValueError)):
                feed(cache, 1, 70)
            INJECTED["files of a tier"] += 1
            assert cache.get_seq_length() == 79
            path.write_bytes(good)
            assert equal(cache_goes_on(cache)[0], want)


def test_paths_that_cannot_be_written(tmp_path: Path) -> None:
    cache, twin = filled("plain"), filled("plain")
    places = [Path("/proc/kvcompress.kvc"), tmp_path / "none" / "a.kvc", tmp_path]
    if os.geteuid():
        (tmp_path / "ro").mkdir(0o500)
        places.append(tmp_path / "ro" / "a.kvc")
    for place in places:
        for act in (cache.save, cache.suspend):
            with pytest.raises(OSError):
                act(place)
            INJECTED["read-only disks"] += 1
    assert cache.forward_pass.suspended is None
    assert equal(cache_goes_on(cache), cache_goes_on(twin))


READ_ONLY = """
import errno, os, subprocess, sys, warnings
from test_faults import cache_goes_on, equal, filled, llama
from kvcompress import KVCache, Tiers
folder = sys.argv[1]
path = folder + "/a.kvc"
cache, twin = filled("plain"), filled("plain")
cache.save(path)
old = open(path, "rb").read()
subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
for act in (cache.save, cache.suspend):
    for place in (path, folder + "/b.kvc"):
        try:
            act(place)
            raise SystemExit("written")
        except OSError as error:
            assert error.errno == errno.EROFS, error
assert cache.forward_pass.suspended is None and os.listdir(folder) == ["a.kvc"]
assert open(path, "rb").read() == old
again = KVCache.load(path, llama().config)
want = cache_goes_on(twin)
with warnings.catch_warnings(record=True) as said:  # pages stay where they are
    warnings.simplefilter("always")
    cache.use_tiers(Tiers(host_bytes=0, file_bytes=None, folder=folder), resident=0, unit=1)
assert any("Read-only" in str(w.message) for w in said), [str(w.message) for w in said]
assert equal(cache_goes_on(cache), want) and equal(cache_goes_on(again), want)
"""


def test_a_read_only_file_system(tmp_path: Path) -> None:
    """Writing raises OSError, the cache continues, and existing files can still be read."""
    inside = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs none "$1" && exec "$2" -c "$3" "$1"', "sh", str(tmp_path)]
    tried = [*inside[:4], 'mount -t tmpfs none "$1" && mount -o remount,ro "$1"', "sh", str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run(tried, capture_output=True).returncode:
        pytest.skip("wants a mount of its own (unshare)")
    done = subprocess.run(
        [*inside, sys.executable, READ_ONLY], cwd=ROOT / "tests", env=PATHS, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    INJECTED["read-only disks"] += 5


# ---------------------------------------------------------------- Ctrl-C

INTERRUPT = """
import copy, random, signal, sys, time, torch
from test_faults import cache_goes_on, cache_state, equal, feed, filled, llama
from models import ids
torch.set_num_threads(1)
m = llama()
prompt = ids(2, 40, 3)
def answer(cache):
    n = cache.get_seq_length()
    whole = torch.cat([ids(2, n, 9), prompt], 1)
    return m.generate(whole, past_key_values=cache, max_new_tokens=12, do_sample=False, pad_token_id=0)
base = {name: filled(name) for name in ("plain", "h2o")}
want, took = {}, {}
for name, cache in base.items():
    answer(copy.deepcopy(cache))
    start = time.perf_counter()
    want[name] = answer(copy.deepcopy(cache))
    took[name] = time.perf_counter() - start
signal.signal(signal.SIGALRM, signal.default_int_handler)  # what Ctrl-C does, when the timer says
chance, hit, broken = random.Random(4), 0, 0
for turn in range(int(sys.argv[1])):
    name = ("plain", "h2o")[turn % 2]
    cache = copy.deepcopy(base[name])
    before = cache_state(base[name])
    got = None
    try:
        signal.setitimer(signal.ITIMER_REAL, took[name] * chance.uniform(0.01, 0.9))
        got = answer(cache)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        hit += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    cache.pool.check()
    assert equal(cache_state(base[name]), before), "the one it was copied from changed"
    if got is not None:
        assert torch.equal(got, want[name])
        continue
    lengths = {x.get_seq_length() for x in cache.layers}  # what was handed over and not stored yet counts
    try:
        seen = cache.get_seq_length()
        with torch.no_grad():
            logits = m(ids(2, 1, 1), past_key_values=cache).logits
        assert len(lengths) == 1 and logits.isfinite().all()
        assert {x.store.seen for x in cache.layers} == {seen + 1}
    except ValueError as error:  # broken off between layers: it says so, and how to go on
        assert "interrupted a forward pass" in str(error) and len(lengths) > 1, error
        broken += 1
    cache.reset()
    twin = copy.deepcopy(base[name])
    twin.reset()
    outs = []
    for x in (cache, twin):
        with torch.no_grad():
            outs.append([m(ids(2, T, T), past_key_values=x).logits for T in (70, 1, 1)])
    assert equal(*outs)
print(hit, broken)
"""


@pytest.mark.full
def test_ctrl_c_while_it_generates() -> None:
    """At random times: the pool is consistent, the source of the copy is unchanged; the cache continues, or reports an
    interrupted pass; after reset() it works. (test_interrupts.py: at every point of a step.)"""
    done = python(INTERRUPT, "400", timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    hit, _ = map(int, done.stdout.split())
    INJECTED["interrupts"] += hit
    assert hit >= 200


# ---------------------------------------------------------------- pools


def test_the_pool_fills_up_in_the_middle_of_a_batch() -> None:
    """Two caches on one pool: one call fails at some page; after the other cache is freed, it continues."""
    config, rows = llama().config, 3
    for room in range(0, 600_000, 60_000):
        pool = _C.Pool(3 << 20)
        cache, twin = (KVCache(config, "raw", page_size=16, pool=p) for p in (pool, _C.Pool()))
        for c in (cache, twin):
            with torch.no_grad():
                llama()(ids(rows, 50, 1), past_key_values=c)
        hog = PagedKV(1, 64, key="raw", pool=pool, page_size=16)
        piece = torch.zeros(1, 1, 16, 64)
        while pool.stats()["used"] < (3 << 20) - 700_000 + room:
            try:
                hog.append(piece, piece)
            except MemoryError:
                break
        before, failed = cache_state(cache), False
        try:
            with torch.no_grad():
                llama()(ids(rows, 400, 2), past_key_values=cache)
        except MemoryError as error:
            failed = True
            assert "pool is full" in str(error) and "max_bytes" in str(error)
            INJECTED["full pools"] += 1
            assert equal(cache_state(cache), before)
        del hog
        if failed:
            with torch.no_grad():
                llama()(ids(rows, 400, 2), past_key_values=cache)
        with torch.no_grad():
            llama()(ids(rows, 400, 2), past_key_values=twin)
        assert equal(cache_state(cache), cache_state(twin))
    assert INJECTED["full pools"] >= 3


# ---------------------------------------------------------------- processes and threads

FORK = """
import os, sys, time, traceback, torch
from test_faults import cache_goes_on, equal, filled
from kvcompress import Tiers
torch.set_num_threads(1)
act = sys.argv[1]
tiers = Tiers(host_bytes=0, file_bytes=None)
cache = filled("plain")
cache.use_tiers(tiers, resident=0, unit=1, in_place=act == "in place")
twin = filled("plain")
want = cache_goes_on(twin)[0]
job = tiers.copier.start(lambda: time.sleep(0.5 if act == "prefetch" else 0))  # under way at the fork
child = os.fork()
if child == 0:  # a copy of everything but the threads
    ok = False
    try:
        if act == "drop":
            cache.use_tiers(None)
        if act != "exit":
            ok = job.done() and (equal(cache_goes_on(cache)[0], want) or act == "in place")
        cache.pool.check()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        if act == "exit":
            sys.exit(0)  # with finalizers
        os._exit(0 if ok else 1)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert equal(cache_goes_on(cache)[0], want) or act == "in place"
print("both")
"""


@pytest.mark.parametrize("act", ["go on", "in place", "drop", "exit", "prefetch"])
def test_fork_after_use(act: str) -> None:
    """Parent and child continue with the cache's contents, including a tier. Its thread does not exist in the child;
    its files are the parent's, whatever the child does."""
    done = python(FORK, act, timeout=100)
    assert done.returncode == 0 and done.stdout == "both\n", done.stderr[-2000:]
    INJECTED["forks"] += 1


def test_threads_on_caches_of_one_pool() -> None:
    """Threads with separate caches on one pool: results are those without threads."""
    pool = _C.Pool()
    want: dict[int, Any] = {}
    got: dict[int, Any] = {}

    def work(seed: int, shared: Any, out: dict) -> None:
        kv = PagedKV(2, 32, key=("int8", "int4", "kivi2")[seed % 3], page_size=16, pool=shared)
        g, results = torch.Generator().manual_seed(seed), []
        for i in range(60):
            T = 1 + (seed * 7 + i * 5) % 23
            q, k, v = (torch.randn(1, h, T, 32, generator=g) for h in (4, 2, 2))
            results.append(kv.attend(q, k, v)[0])
            if i % 9 == 8:
                kv.crop(kv.seen - T // 2)
            if i % 20 == 19:
                kv = copy.deepcopy(kv)
        out[seed] = results, kv.dense()

    for seed in range(6):
        work(seed, None, want)
    threads = [threading.Thread(target=work, args=(seed, pool, got)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pool.check()
    assert sorted(got) == sorted(want) and all(equal(got[seed], want[seed]) for seed in want)
    assert signal.getsignal(signal.SIGINT) is not None


INTERPRETERS = """
import sys, warnings
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
from kvcompress import _C
other = interpreters.create()
code = "import sys; sys.path.insert(0, sys.argv0); from kvcompress import _C; _C.Pool()"
said = ""
try:
    result = interpreters.run_string(other, code.replace("sys.argv0", repr(sys.argv[1])))
    said = str(result or "")
except Exception as error:
    said = str(error)
interpreters.destroy(other)
pool = _C.Pool(1 << 20)
_C.Prefix(pool)
pool.check()
print(said or "both")
"""


def test_two_interpreters() -> None:
    """A subinterpreter gets an ImportError (from NumPy, which supports one interpreter per process); the main one
    continues."""
    done = python(INTERPRETERS, str(ROOT))
    assert done.returncode == 0, done.stderr[-2000:]
    assert "ImportError" in done.stdout or done.stdout == "both\n", done.stdout
