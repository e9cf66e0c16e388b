"""Pages on a GPU. The table stays on the host and plans as ever; what it plans for lies in an arena on the device, at
the same offsets, and kernels read copies of its arrays there. Nothing here is only for CUDA: tests run it on
the CPU."""

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
from .copy_stream import copy_stream_of

POISON = "KVCOMPRESS_POISON" in os.environ  # tests: new pages are NaN, as the pool's own are there


def usable(device: torch.device) -> str | None:
    """Why pages cannot lie on `device`; None if they can."""
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return "expected cpu or cuda"
    if not torch.cuda.is_available():
        return "this torch finds no GPU"
    try:
        found = _kernels(torch.cuda.current_device() if device.index is None else device.index)
    except ValueError as error:  # an old driver, say
        return str(error)
    if not found:
        return "this build has no CUDA kernels; build it with KVCOMPRESS_CUDA=all where nvcc is"
    return None


@functools.cache
def _kernels(index: int) -> bool:
    """Are there kernels for this GPU? Asked once: to ask clears what they have found wrong (`ops.check`)."""
    return _C.cuda_found(index) >= 0


def sent(x: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """x of the host on the device, in stream order, without a wait: what is not pinned is read before this returns."""
    return (torch.from_numpy(x) if isinstance(x, np.ndarray) else x).to(device, non_blocking=True)


class Arena:
    """The memory of a pool's pages on a device; layers that share the pool share it. Grows by half at a time, into new
    memory, and takes along what is there."""

    _of: ClassVar[weakref.WeakValueDictionary[tuple[int, str], Arena]] = weakref.WeakValueDictionary()

    def __init__(self, pool: Any, device: torch.device) -> None:
        self.pool, self.device, self.lock = pool, device, threading.RLock()
        self.bytes = torch.empty(0, dtype=torch.uint8, device=device)
        self.copy_stream = copy_stream_of(device)
        self.expected, self.stays = 0, False  # bytes that recorded calls may need; one of them was recorded

    def expect(self, more: int) -> None:
        """A layer will need so many bytes, on top of what is there and others have said."""
        self.expected = max(self.expected, self.pool.extent) + more

    def pin(self) -> None:
        """From now on the memory stays where it is, long enough for all that is expected."""
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
        """uint8 [n], n at least the pool's extent, and `least`."""
        with self.lock:  # a copier may be writing
            extent, old = max(self.pool.extent, least), self.bytes
            if extent > old.numel():
                self._wait()
                with torch.inference_mode(False):  # a copier writes it too, whatever mode its layers were fed in
                    room = max(extent, len(old) * 3 // 2) + 63 & -64
                    self.bytes = torch.empty(room, dtype=torch.uint8, device=self.device)
                    if POISON:
                        self.bytes.fill_(255)
                self.bytes[: len(old)] = old
                self._wait()
            return self.bytes

    def joined(self) -> torch.Tensor:
        """`reach`, for what this thread queues next: behind the work of other streams."""
        memory = self.reach()
        self.copy_stream.join(memory)
        return memory

    def mark(self) -> Any:
        """Where the work on this memory is now."""
        self.joined()
        return self.copy_stream.mark()

    def _wait(self) -> None:
        """Until nobody reads or writes the memory."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _units(self, pieces: np.ndarray) -> torch.Tensor:
        """Numbers of the 64 bytes that pieces (offset, bytes) consist of, in order."""
        starts, counts = pieces[:, 0] // formats.ALIGN, pieces[:, 1] // formats.ALIGN
        before = np.cumsum(counts) - counts
        return torch.from_numpy(np.repeat(starts - before, counts) + np.arange(int(counts.sum()))).to(self.device)

    def gather(self, pieces: np.ndarray, to: np.ndarray) -> int:
        """`_C.gather` of pages on the device: they are put together there, and come in one copy."""
        with self.copy_stream.after(self.mark()):
            data = self.reach().view(-1, 64)[self._units(pieces)]
            torch.from_numpy(to).copy_(data.view(-1), non_blocking=True)
        return _C.checksum(to)

    def scatter(self, pieces: np.ndarray, data: np.ndarray, mark: Any = None) -> int:
        """`_C.scatter` to pages on the device: in one copy, then each to its place. mark: behind what, in place of all
        that this thread has queued."""
        with self.copy_stream.after(mark or self.mark()):
            units = self._units(pieces)
            there = torch.from_numpy(data).to(self.device, non_blocking=True).view(-1, 64)
            with self.lock:
                self.reach().view(-1, 64)[units] = there
            checksum = _C.checksum(data)  # while it crosses
        return checksum


def memory_of(store: Any) -> Any:
    """Where pages of a layer are: its pool, or an Arena."""
    return store.mirror.arena if store.mirror else store.pool


def gather(memory: Any, pieces: np.ndarray, to: np.ndarray) -> int:
    """Copies pieces (offset, bytes) of `memory_of` a layer side by side; their checksum."""
    return memory.gather(pieces, to) if isinstance(memory, Arena) else _C.gather(memory, pieces, to)


def scatter(memory: Any, pieces: np.ndarray, data: np.ndarray, mark: Any = None) -> int:
    """The way back, behind `mark`; the checksum of `data`."""
    return memory.scatter(pieces, data, mark) if isinstance(memory, Arena) else _C.scatter(memory, pieces, data)


def mark(memory: Any) -> Any:
    """Where the work on `memory` of this thread is now."""
    return memory.mark() if isinstance(memory, Arena) else None


def room(memory: Any, size: int, host: Callable[[int], np.ndarray]) -> np.ndarray:
    """Host memory for pages of `memory`: pinned for a GPU's, of `host` for others. MemoryError."""
    return memory.copy_stream.room(size) if isinstance(memory, Arena) else host(size)


_AHEAD = np.zeros((64, 1, 1, 2), np.int64)
_AHEAD[:, 0, 0, 0] = np.arange(64)
_AHEAD_BYTES = 32 << 10  # of a copy that is not pinned: of more, a driver may wait for its stream


class Mirror:
    """A layer's table on a device. What is there already is not sent again: entries change when a page begins or is
    sealed; rows that have grown by a token go as they are and as the next steps will have them."""

    def __init__(self, pool: Any, device: torch.device) -> None:
        self.arena, self.device = Arena.of(pool, device), device
        self.no_slots = torch.empty(0, dtype=torch.int32, device=device)
        self.entries, self.entries_sent = self.no_slots, np.empty((0, 0, 0, 0), np.int64)
        self.rows: tuple[torch.Tensor, ...] = (self.no_slots,)
        self.rows_sent, self.last = np.empty((0, 0, 0, 2), np.int64), 0  # and which of them was used last
        self.stream = 0  # that they were last used on

    def views(self, table: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(arena, entries, rows, slots) on the device, as the table is now."""
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
        """A plan took private copies of shared raw pages: where an entry became another of the same formats, or where
        the copy itself is sealed. Does on the device what the plan did in the pool. before: entries before the plan;
        geometry: H, Dk, Dv, page size, sinks."""
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
    """The mirror of an empty layer; None on the CPU, where pages lie in the pool."""
    return None if device.type == "cpu" else Mirror(pool, device)
