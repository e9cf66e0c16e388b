"""Caches on several streams of a device. If two share a pool, pages that one frees while its kernels still read them
may be reused by the other. Without a GPU, delayed streams are emulated by threads."""

import contextlib
import threading
import time

import numpy as np
import pytest
import torch
from cuda_twin import DEVICE
from far import FAR
from far_kernels import a_device
from test_attend import error

from kvcompress import _C, PagedKV, policies
from kvcompress.offload.tiers import CopyThread
from kvcompress.store import device_memory
from kvcompress.store.copy_stream import CudaCopyStream
from kvcompress.store.device_memory import Arena

SIZE = 64 << 10


class Stream:
    """Kernels in order, in a separate thread."""

    def __init__(self, device=None):
        self.queue, self.last, self.cuda_stream = CopyThread(), None, id(self)

    def launch(self, act):
        self.last = self.queue.start(act)

    def wait_stream(self, other):
        done = other.queue.start(lambda: None)
        self.launch(done.result)


class Streams:
    """The part of torch.cuda that copy streams use; each thread is on a stream of its choice."""

    def __init__(self, monkeypatch):
        self.on, self.recorded = threading.local(), []
        patch = monkeypatch.setattr
        patch(torch.cuda, "Stream", Stream)
        patch(torch.cuda, "current_stream", lambda device=None: self.on.stream)
        raw = lambda index: self.on.stream.cuda_stream  # noqa: E731
        patch(torch._C, "_cuda_getCurrentRawStream", raw, raising=False)  # of builds with CUDA
        patch(torch.cuda, "device", lambda device: contextlib.nullcontext())
        patch(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch(torch.Tensor, "record_stream", lambda memory, stream: self.recorded.append((memory, stream)))

    @contextlib.contextmanager
    def stream(self, stream):
        self.on.stream = stream
        yield


@pytest.fixture
def streams(monkeypatch):
    return Streams(monkeypatch)


def arena_of(pool):
    arena = Arena(pool, torch.device("cpu"))
    arena.copy_stream = CudaCopyStream(torch.device("cpu"))
    return arena


def read_late(arena, at, found, gate):
    """Queues a kernel that reads a page when the gate opens."""
    memory = arena.joined()
    torch.cuda.current_stream().launch(lambda: (gate.wait(), found.append(memory[at : at + SIZE].clone())))


def write(arena, at, byte):
    memory = arena.joined()
    torch.cuda.current_stream().launch(lambda: memory[at : at + SIZE].fill_(byte))


@pytest.mark.parametrize("joins", [True, False])
def test_a_page_that_another_stream_still_reads(joins, streams, monkeypatch):
    if not joins:  # the error that the test would find
        monkeypatch.setattr(CudaCopyStream, "join", lambda lane, memory: None)
    pool, found, gate = _C.Pool(1 << 24), [], threading.Event()
    (at,) = pool.take(np.array([SIZE]))
    arena, a, b = arena_of(pool), Stream(), Stream()
    with streams.stream(a):
        write(arena, at, 1)
        a.last.result()
        read_late(arena, at, found, gate)
    pool.unref(at)
    assert pool.take(np.array([SIZE])) == [at]  # the same page, for a layer on b
    with streams.stream(b):
        write(arena, at, 2)
    if joins:
        time.sleep(0.2)  # b could have written by now
    else:
        b.last.result()
    gate.set()
    for stream in (a, b):
        stream.last.result()
    assert bool((found[0] == (1 if joins else 2)).all())


def test_every_stream_waits_for_every_other(streams):
    """Not only for the last one: any stream may have freed a page. Memory is kept until all are done."""
    pool, found, gate = _C.Pool(1 << 24), [], threading.Event()
    pages = pool.take(np.full(3, SIZE))
    arena, those = arena_of(pool), [Stream() for _ in range(4)]
    for stream, at in zip(those, pages, strict=False):
        with streams.stream(stream):
            write(arena, at, 1)
            read_late(arena, at, found, gate)
    with streams.stream(those[3]):
        for at in pages:
            write(arena, at, 2)
    time.sleep(0.2)
    gate.set()
    those[3].last.result()
    assert len(found) == 3 and all(bool((x == 1).all()) for x in found)
    assert {id(stream) for memory, stream in streams.recorded if memory is arena.bytes} == set(map(id, those))


def test_a_stream_of_its_own_pool_waits_for_nobody(streams):
    arenas, (a, b) = [arena_of(_C.Pool(1 << 24)) for _ in range(2)], (Stream(), Stream())
    found, gate = [], threading.Event()
    places = [arena.pool.take(np.array([SIZE]))[0] for arena in arenas]
    with streams.stream(a):
        read_late(arenas[0], places[0], found, gate)
    with streams.stream(b):
        write(arenas[1], places[1], 2)
        b.last.result()
    assert not found
    gate.set()
    a.last.result()


def test_copies_come_after_all_streams(streams, monkeypatch):
    """Copies out are ordered after the work of every stream that has used the memory."""
    joined = []
    monkeypatch.setattr(CudaCopyStream, "join", lambda lane, memory: joined.append(memory))
    monkeypatch.setattr(CudaCopyStream, "mark", lambda lane: len(joined))
    arena = arena_of(_C.Pool(1 << 24))
    assert device_memory.mark(arena) == 1 and joined[0] is arena.bytes


def test_idle_streams_are_waited_for_once(streams):
    arena, a, b, waits = arena_of(_C.Pool(1 << 24)), Stream(), Stream(), []
    b.wait_stream = waits.append
    for stream, n in ((a, 1), (b, 5), (a, 1), (b, 5)):
        with streams.stream(stream):
            for _ in range(n):
                arena.joined()
    assert waits == [a, a]
    late = threading.Thread(target=lambda: (streams.stream(a).__enter__() and None) or arena.joined())
    late.start()
    late.join()
    with streams.stream(b):  # another thread's last work may come after its call: wait for it again
        arena.joined()
        arena.joined()
    assert waits == [a] * 4


def test_what_a_layer_keeps_on_the_device(monkeypatch):
    """Entries and sums written by another stream's calls are used after that stream, and kept until this one is
    done."""
    log, generator = [], torch.Generator().manual_seed(1)
    with a_device():
        kv = PagedKV(2, 32, key="int8", page_size=16, device=FAR, policy=policies.H2O(40, slack=8))
        lane = kv.page_store.mirror.arena.copy_stream
        on = [7]
        monkeypatch.setattr(lane, "join", lambda memory: log.append("join") or on[0], raising=False)
        monkeypatch.setattr(lane, "used", lambda x: log.append(x), raising=False)
        real = device_memory.sent
        monkeypatch.setattr(device_memory, "sent", lambda x, device: (log.append("sent"), real(x, device))[1])
        kv.attend(*(x.to(FAR) for x in draw(generator, 30)))
        mirror = kv.page_store.mirror
        assert log.index("join") < log.index("sent")
        for stream, found in ((8, 2), (8, 0), (7, 2)):  # written by another stream, or by this one
            before, on[0] = (mirror.entries, mirror.rows[0]), stream
            del log[:]
            mirror.views(kv.page_store.table)
            assert sum(x is y for x in log for y in before) == found
        kv.attend(*(x.to(FAR) for x in draw(generator, 1)))
        kept = kv.eviction.accumulated.sum
        assert kept is not None
        del log[:]
        kv.eviction.accumulated.flush_scores()
        assert log[0] == "join" and log[1] is kept


def test_ordinary_calls_are_not_captured(streams, monkeypatch):
    """They would write the same token in every run."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with streams.stream(Stream()), pytest.raises(ValueError, match="got an ordinary one during capture"):
        arena_of(_C.Pool(1 << 24)).joined()


def test_a_step_copies_what_is_not_there_yet():
    """Decode: entries when a page begins or is sealed, rows of 64 steps at once. The device's copy equals the table."""
    generator = torch.Generator().manual_seed(1)
    with a_device() as device:
        kv = PagedKV(2, 32, key="int8", page_size=16, batch=2, device=FAR)
        store = kv.page_store

        def call(T):
            k, v = (torch.randn(kv.batch, 2, T, 32, generator=generator).to(FAR) for _ in range(2))
            before = len(device.copies)
            kv.append(k, v)
            views = [x.cpu() for x in store.views()[1:3]]
            assert all(np.array_equal(*x) for x in zip(views, (store.table.entries, store.table.rows), strict=True))
            return len(device.copies) - before

        call(100)
        fills = 128 // 16  # each sends seals and entries; rows are sent two or three times
        assert sum(call(1) for _ in range(128)) <= 2 * fills + 3
        for _ in range(3):  # the rows are already there
            call(1)
        kv.crop(kv.seen - 2)
        assert call(1) == 0
        call(30)
        call(1)
        kv.select([1])
        call(1)


def draw(generator, T):
    return [torch.randn(1, h, T, 32, generator=generator) for h in (4, 2, 2)]


@pytest.mark.parametrize("shared", [True, pytest.param(False, marks=pytest.mark.full)])
def test_two_layers_on_two_streams(shared):
    """Appends, attention and resets alternating on separate streams, with short kernels queued after long ones:
    contents and results are those of a CPU layer. On a GPU with KVCOMPRESS_TEST_DEVICE=cuda; otherwise only the
    calls."""
    gpu, generator = FAR.type == "cuda", torch.Generator().manual_seed(1)
    pools = [_C.Pool()] * 2 if shared else [_C.Pool(), _C.Pool()]
    options = {"key": "int8", "value": "int4", "page_size": 16}
    near = [PagedKV(2, 32, **options) for _ in pools]
    with a_device():
        far = [PagedKV(2, 32, device=FAR, pool=pool, **options) for pool in pools]
        those = [torch.cuda.Stream() if gpu else None for _ in far]
        outs = []
        for turn in range(6 if gpu else 2):
            for i, (kv, twin) in enumerate(zip(far, near, strict=True)):
                with torch.cuda.stream(those[i]) if gpu else contextlib.nullcontext():
                    if gpu:
                        torch.cuda._sleep(20_000_000)
                    for T in (150, 1, 1):
                        qkv = draw(generator, T)
                        outs.append((kv.attend(*(x.to(FAR) for x in qkv))[0], twin.attend(*qkv)[0]))
                    if (turn + i) % 2:  # its pages go to the other, whose calls are queued at once
                        kv.reset()
                        twin.reset()
        if gpu:
            torch.cuda.synchronize()
        for got, want in outs:
            assert error(got.cpu(), want.double()) <= 2e-2
        for kv, twin in zip(far, near, strict=True):
            assert kv.seen == twin.seen
            for x, y in zip(kv.dense(), twin.dense(), strict=True):
                assert torch.equal(x.cpu(), y)


@pytest.mark.skipif(DEVICE != "cuda", reason="KVCOMPRESS_TEST_DEVICE=cuda")
def test_memory_outlives_its_layer():
    """A layer is freed while its kernels are queued: its memory is not reused before they are done."""
    generator, stream = torch.Generator().manual_seed(1), torch.cuda.Stream()
    kv = PagedKV(2, 32, device=FAR)
    kv.attend(*(x.to(FAR) for x in draw(generator, 500)))  # memory of the default stream
    kv.reset()
    size = len(kv.page_store.mirror.arena.bytes)
    torch.cuda.synchronize()
    qkv = [x.to(FAR) for x in draw(generator, 500)]
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        kv.attend(*qkv)
    del kv
    next_one = torch.full((size,), 7, dtype=torch.uint8, device=FAR)
    torch.cuda.synchronize()
    assert bool((next_one == 7).all())
