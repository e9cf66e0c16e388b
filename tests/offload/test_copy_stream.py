"""Copies concurrent with a device's work: a page is copied out after earlier kernels have written it, and overwritten
after they have read it. The device here is the host: its kernels run late, in order, in a separate thread."""

from __future__ import annotations

import contextlib
import threading
import time

import numpy as np
import pytest
import torch

from kvcompress import _C, Tiers
from kvcompress.offload.tiers import CopyThread
from kvcompress.store.copy_stream import CopyStream, CudaCopyStream
from kvcompress.store.device_memory import Arena

SIZE = 64 << 10
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


class Queued(CopyStream):
    """A copy stream of a device with delayed kernels."""

    def __init__(self):
        self.compute = CopyThread()

    def kernel(self, act, seconds=0.02):
        return self.compute.start(lambda: (time.sleep(seconds), act()))

    def mark(self):
        return self.compute.start(lambda: None)

    @contextlib.contextmanager
    def after(self, mark):
        mark.result()
        yield


def arena_of(pages=4):
    pool = _C.Pool(1 << 24)
    offsets = pool.take(np.full(pages, SIZE))
    arena = Arena(pool, torch.device("cpu"))
    arena.copy_stream = Queued()
    arena.reach()[:] = 1
    return arena, np.ascontiguousarray(np.stack([offsets, np.full(pages, SIZE)], 1))


def whole(arena, pieces):
    return np.concatenate([arena.bytes[at : at + n].numpy() for at, n in pieces.tolist()])


def test_an_arena_grows_by_whole_units():
    arena = Arena(_C.Pool(1 << 24), torch.device("cpu"))
    for least in (64 * 33, 64 * 34, 64 * 77):
        assert len(arena.reach(least)) >= least and len(arena.bytes) % 64 == 0
    memory = np.zeros(64, np.uint8)
    arena.bytes[64:128] = 7
    arena.gather(np.array([[64, 64]]), memory)
    assert (memory == 7).all()


@pytest.mark.parametrize("where", [{}, {"host_bytes": 0, "file_bytes": None}])
def test_offload_waits_for_writes(where):
    arena, pieces = arena_of()
    tiers = Tiers(**where)
    for value in range(2, 12):
        arena.copy_stream.kernel(lambda: arena.bytes.fill_(value))  # noqa: B023
        extent = tiers.put(arena, pieces)
        memory = tiers.view(extent)
        assert (memory == value).all() and len(memory) == 4 * SIZE
        tiers.drop(extent)


def test_onload_waits_for_reads():
    arena, pieces = arena_of()
    tiers = Tiers()
    for value in range(2, 12):
        arena.copy_stream.kernel(lambda: arena.bytes.fill_(value), 0)  # noqa: B023
        extent = tiers.put(arena, pieces)
        arena.copy_stream.kernel(lambda: arena.bytes.fill_(100), 0)
        read = []
        arena.copy_stream.kernel(lambda: read.append(whole(arena, pieces)))  # noqa: B023
        tiers.fetch([(extent, pieces)], arena).result()
        assert (read[0] == 100).all() and (whole(arena, pieces) == value).all()
        tiers.drop(extent)


def test_who_waits_for_a_copy_waits_for_nothing_else():
    """The event is recorded when the fetch is requested: later kernels do not delay it."""
    arena, pieces = arena_of()
    tiers, gate = Tiers(), threading.Event()
    extent = tiers.put(arena, pieces)
    arena.bytes[:] = 0
    busy = threading.Event()
    tiers.copier.start(lambda: busy.wait(5))  # the copy thread reaches it after the kernel was queued
    ticket = tiers.fetch([(extent, pieces)], arena)
    held = arena.copy_stream.compute.start(lambda: gate.wait(5))
    busy.set()
    ticket.result()
    assert not gate.is_set() and (whole(arena, pieces) == 1).all()
    gate.set()
    held.result()


def test_cuda_calls_in_their_order(monkeypatch):
    """The calls that a CudaCopyStream makes to torch, since there may be no GPU."""
    said = []

    class Stream:
        def __init__(self, device=None):
            self.name = f"copies on {device}"

        def wait_event(self, event):
            said.append(("wait", self.name, event.name))

    class Event:
        made = 0

        def __init__(self):
            Event.made += 1
            self.name = f"event {Event.made}"

        def record(self, stream):
            said.append(("record", self.name, stream.name))

        def synchronize(self):
            said.append(("host waits", self.name))

    now = Stream("none")
    now.name = "compute"
    for name, what in (("Stream", Stream), ("Event", Event), ("current_stream", lambda device: now),
                       ("stream", lambda s: contextlib.nullcontext()),
                       ("device", lambda d: contextlib.nullcontext())):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, what)
    lane = CudaCopyStream(torch.device("cuda:1"))
    mark = lane.mark()
    with lane.after(mark):
        said.append("copy")
    with contextlib.suppress(OSError), lane.after(mark):
        raise OSError
    copies = "copies on cuda:1"
    assert said == [
        ("record", "event 1", "compute"), ("wait", copies, "event 1"), "copy", ("record", "event 2", copies),
        ("host waits", "event 2"),
        ("wait", copies, "event 1"), ("record", "event 3", copies), ("host waits", "event 3"),
    ]  # fmt: skip


def test_no_pinned_memory_is_a_memory_error(monkeypatch):
    def full(*args, **options):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(MemoryError, match="pinned"):
        CudaCopyStream(torch.device("cuda")).room(64)


@GPU
def test_on_a_gpu():
    device = torch.device("cuda", 0)
    pool = _C.Pool(1 << 26)
    pieces = np.stack([pool.take(np.full(64, SIZE)), np.full(64, SIZE)], 1)
    arena, tiers = Arena(pool, device), Tiers()
    for value in range(2, 12):
        arena.reach()
        torch.cuda._sleep(50_000_000)
        arena.bytes.fill_(value)
        extent = tiers.put(arena, pieces)
        assert torch.from_numpy(extent.memory).is_pinned() and (extent.memory == value).all()
        arena.bytes.fill_(100)
        torch.cuda._sleep(50_000_000)
        read = arena.bytes.clone()
        tiers.fetch([(extent, pieces)], arena).result()
        assert bool((read == 100).all()) and (whole_gpu(arena, pieces) == value).all()


def whole_gpu(arena, pieces):
    return torch.cat([arena.bytes[at : at + n] for at, n in pieces.tolist()]).cpu().numpy()
