"""Pages on a GPU. The block table stays on the host and plans there; the pages are in an arena on the device, at the
same offsets, and kernels read a copy of the table. Not specific to CUDA: tests run this code on the CPU."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch

from .. import _C, formats, ops
from .copy_stream import CopyStream, CudaCopyStream

POISON = "KVCOMPRESS_POISON" in os.environ  # tests: new pages are filled with NaN, as in the pool


def usable(device: torch.device) -> str | None:
    """Why `device` is not supported; None if it is."""
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return "expected cpu or cuda"
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    try:
        found = _kernels(torch.cuda.current_device() if device.index is None else device.index)
    except ValueError as error:  # such as an old driver
        return str(error)
    if not found:
        return "this build has no CUDA kernels; build with KVCOMPRESS_CUDA=all and nvcc"
    return None


@functools.cache
def _kernels(index: int) -> bool:
    """True if there are kernels for this GPU. Cached, since the query clears recorded errors (`ops.check`)."""
    return _C.cuda_found(index) >= 0


def sent(x: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """x copied from the host to the device, in stream order and asynchronously; pageable memory is read before
    return."""
    return (torch.from_numpy(x) if isinstance(x, np.ndarray) else x).to(device, non_blocking=True)


class Arena:
    """The device memory of a pool's pages, shared by all layers of the pool. Grows by half at a time, by copying to a
    new allocation."""

    _of: ClassVar[weakref.WeakValueDictionary[tuple[int, str], Arena]] = weakref.WeakValueDictionary()

    def __init__(self, pool: Any, device: torch.device) -> None:
        self.pool, self.device, self.lock = pool, device, threading.RLock()
        self.bytes = torch.empty(0, dtype=torch.uint8, device=device)
        self.copy_stream = CudaCopyStream(device) if device.type == "cuda" else CopyStream()
        self.expected, self.stays = 0, False  # bytes that captured calls may need; whether the address is fixed

    def expect(self, more: int) -> None:
        """Reserves `more` bytes for a layer, in addition to earlier reservations."""
        self.expected = max(self.expected, self.pool.extent) + more

    def pin(self) -> None:
        """Allocates all reserved bytes and fixes the address."""
        if not self.stays:
            self.pool.limit(len(self.reach(self.expected)))
            self.stays = True

    @classmethod
    def of(cls, pool: Any, device: torch.device) -> Arena:
        key = (id(pool), str(device))
        arena = cls._of.get(key)
        if arena is None:
            arena = cls._of[key] = cls(pool, device)
        return arena

    def reach(self, least: int = 0) -> torch.Tensor:
        """The memory, uint8 [n], with n at least the pool's extent and `least`."""
        with self.lock:  # a copier may be writing
            extent, old = max(self.pool.extent, least), self.bytes
            if extent > old.numel():
                self._wait()
                with torch.inference_mode(False):  # a copier writes it too, outside of inference mode
                    room = max(extent, len(old) * 3 // 2) + 63 & -64
                    self.bytes = torch.empty(room, dtype=torch.uint8, device=self.device)
                    if POISON:
                        self.bytes.fill_(255)
                self.bytes[: len(old)] = old
                self._wait()
            return self.bytes

    def joined(self) -> torch.Tensor:
        """`reach`, ordered after the work of other streams, for what this thread queues next."""
        memory = self.reach()
        self.copy_stream.join(memory)
        return memory

    def mark(self) -> Any:
        """An event after the work on this memory so far."""
        self.joined()
        return self.copy_stream.mark()

    def _wait(self) -> None:
        """Waits until no stream reads or writes the memory."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _units(self, pieces: np.ndarray) -> torch.Tensor:
        """Indices of the 64-byte units of pieces (offset, bytes), in order."""
        starts, counts = pieces[:, 0] // formats.ALIGN, pieces[:, 1] // formats.ALIGN
        before = np.cumsum(counts) - counts
        return torch.from_numpy(np.repeat(starts - before, counts) + np.arange(int(counts.sum()))).to(self.device)

    def gather(self, pieces: np.ndarray, to: np.ndarray) -> int:
        """`_C.gather` for pages on the device: gathered there, then sent in one copy."""
        with self.copy_stream.after(self.mark()):
            data = self.reach().view(-1, 64)[self._units(pieces)]
            torch.from_numpy(to).copy_(data.view(-1), non_blocking=True)
        return _C.checksum(to)

    def scatter(self, pieces: np.ndarray, data: np.ndarray, mark: Any = None) -> int:
        """`_C.scatter` to pages on the device: sent in one copy, then scattered there. mark: event to wait for, instead
        of everything this thread has queued."""
        with self.copy_stream.after(mark or self.mark()):
            units = self._units(pieces)
            there = torch.from_numpy(data).to(self.device, non_blocking=True).view(-1, 64)
            with self.lock:
                self.reach().view(-1, 64)[units] = there
            checksum = _C.checksum(data)  # while it crosses
        return checksum


def memory_of(store: Any) -> Any:
    """The memory of a layer's pages: its pool, or an Arena."""
    return store.mirror.arena if store.mirror else store.pool


def gather(memory: Any, pieces: np.ndarray, to: np.ndarray) -> int:
    """Copies pieces (offset, bytes) of `memory` (of `memory_of`) to `to`, one after another. Returns their checksum."""
    return memory.gather(pieces, to) if isinstance(memory, Arena) else _C.gather(memory, pieces, to)


def scatter(memory: Any, pieces: np.ndarray, data: np.ndarray, mark: Any = None) -> int:
    """The inverse of `gather`, after the event `mark`. Returns the checksum of `data`."""
    return memory.scatter(pieces, data, mark) if isinstance(memory, Arena) else _C.scatter(memory, pieces, data)


def mark(memory: Any) -> Any:
    """An event after the work of this thread on `memory` so far."""
    return memory.mark() if isinstance(memory, Arena) else None


def room(memory: Any, size: int, host: Callable[[int], np.ndarray]) -> np.ndarray:
    """Host memory for pages of `memory`: pinned for a GPU, else from `host`. Raises MemoryError."""
    return memory.copy_stream.room(size) if isinstance(memory, Arena) else host(size)


_AHEAD = np.zeros((64, 1, 1, 2), np.int64)
_AHEAD[:, 0, 0, 0] = np.arange(64)
_AHEAD_BYTES = 32 << 10  # maximum size of an unpinned copy: for larger ones drivers may synchronize


class Mirror:
    """A copy of a layer's block table on a device. Only changes are sent: entries change when a page is opened or
    sealed; rows are sent with their values for the next steps ahead of time."""

    def __init__(self, pool: Any, device: torch.device) -> None:
        self.arena, self.device = Arena.of(pool, device), device
        self.no_slots = torch.empty(0, dtype=torch.int32, device=device)
        self.entries, self.entries_sent = self.no_slots, np.empty((0, 0, 0, 0), np.int64)
        self.rows: tuple[torch.Tensor, ...] = (self.no_slots,)
        self.rows_sent, self.last = np.empty((0, 0, 0, 2), np.int64), 0  # rows of the next steps; the last one used
        self.stream = 0  # stream of the last use

    def views(self, table: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(arena, entries, rows, slots) on the device, up to date with the table."""
        memory = self.arena.reach()
        stream = self.arena.copy_stream.join(memory)
        if stream != self.stream:
            for x in (self.entries, self.rows[0]):
                self.arena.copy_stream.used(x)
            self.stream = stream
        entries, rows, slots = table.entries, table.rows, table.slots
        if _C.find(self.entries_sent, entries) < 0:
            self.entries_sent = entries[None].copy()
            self.entries = sent(self.entries_sent[0], self.device)
        at = _C.find(self.rows_sent, rows)
        if at < 0:
            grown = _C.find(self.rows_sent[self.last : self.last + 1] + _AHEAD[1], rows) == 0
            self.rows_sent = rows + _AHEAD[: max(1, _AHEAD_BYTES // rows.nbytes) if grown else 1]
            self.rows, at = sent(self.rows_sent, self.device).unbind(), 0
        self.last = at
        return memory, self.entries, self.rows[at], sent(slots.copy(), self.device) if slots.size else self.no_slots

    def copy_shared(
        self, before: np.ndarray, table: Any, seals: np.ndarray, geometry: tuple[int, int, int, int, int]
    ) -> None:
        """Repeats on the device the copies of shared raw pages (copy-on-write) that a plan made in the pool: where an
        entry was replaced by another of the same formats, or where the copy itself is sealed. before: entries before
        the plan; geometry: H, Dk, Dv, page size, sinks."""
        now = table.entries[:, :, : before.shape[2]]
        copied = (before != now) & (before >= 0) & (formats.pair_of(before) == formats.pair_of(now))
        columns = np.nonzero(copied)[2]
        sealed = [(before[now == to][0], own) for own, to in seals[~np.isin(seals[:, 0], before)] if (now == to).any()]
        if not len(columns) + len(sealed):
            return
        heads, key_dim, value_dim, page_size, sinks = geometry
        moves = np.full((len(columns) + len(sealed), 6), -1, np.int64)
        moves[:, 0] = np.arange(len(moves))
        pairs = np.array([*zip(before[copied], now[copied], strict=True), *sealed], np.int64)
        moves[:, 1], moves[:, 3], moves[:, 5] = pairs[:, 0], pairs[:, 1], page_size
        moves[: len(columns)][columns == 0, 5] = -(-sinks // 16) * 16
        ops.compact(
            self.arena.joined(), sent(moves, self.device), heads, before.shape[1], key_dim, value_dim,
            page_size, sinks,
        )  # fmt: skip


def mirror_of(pool: Any, device: torch.device) -> Mirror | None:
    """The Mirror of an empty layer; None on the CPU, where pages are in the pool."""
    return None if device.type == "cpu" else Mirror(pool, device)
