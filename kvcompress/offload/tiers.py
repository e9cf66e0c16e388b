"""Tiers: where pages wait that no attention needs now. Host memory, then files."""

from __future__ import annotations

import itertools
import mmap
import os
import secrets
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from .. import _C, checks
from ..store.copy_stream import HostRoom
from ..store.device_memory import gather, mark, room, scatter
from ..store.serialize import Bytes, Damaged

T = TypeVar("T")
UNIT = 512 << 10
"""Bytes that are worth a transfer of their own: below, a device's copy engine waits more than it copies."""


class Copier(Protocol):
    """Who carries bytes while attention works: a thread. On a GPU it queues copies on a stream of their own, behind an
    event of the caller's, and waits for theirs (`copy_stream`)."""

    def start(self, job: Callable[[], T]) -> Future[T]: ...


class CopyThread:
    """One worker, jobs in order. At most the transfers that the caller has room for wait: each has its own."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.process, self.worker = os.getpid(), ThreadPoolExecutor(1, "kvcompress copier")

    def start(self, job: Callable[[], T]) -> Future[T]:
        if self.process != os.getpid():
            self._begin()  # a fork takes no thread along
        return self.worker.submit(job)


class Extent:
    """Bytes that a Tiers keeps: in memory, or in the file `path`."""

    __slots__ = ("__weakref__", "checksum", "mapped", "memory", "path", "size")

    def __init__(self, memory: Bytes, checksum: int) -> None:
        self.memory: Bytes | None = memory
        self.path: Path | None = None
        self.mapped: mmap.mmap | None = None  # its file
        self.size, self.checksum = memory.size, checksum


class Tiers(
    checks.ProcessBound,
    instead="caches share one; another process makes its own, KVCache.save(path) is for what outlives this one",
):
    """Memory behind the pools, with budgets: what does not fit the host goes to files, least recently used first.

    Args:
        host_bytes: of host memory (0: none; None: any).
        file_bytes: of files (0: none; None: any).
        folder: of the files; a temporary one if None. Files are deleted with the Tiers.
        copier: who carries bytes next to the work; a thread if None.
        keep_bytes: of host memory that stay with it when pages are onloaded, for those that go next.

    Threads may share it. Every extent has a checksum, taken when it leaves the pool and compared when it comes back: a
    load that fails raises (OSError, Damaged), nothing is ever made up.
    """

    def __init__(
        self,
        host_bytes: int | None = None,
        file_bytes: int | None = 0,
        folder: str | os.PathLike[str] | None = None,
        copier: Copier | None = None,
        keep_bytes: int = 64 << 20,
    ) -> None:
        self.budgets = {
            name: 1 << 62 if n is None else checks.integer(name, n, 0)
            for name, n in (("host_bytes", host_bytes), ("file_bytes", file_bytes))
        }
        self.copier = copier or CopyThread()
        self.room = HostRoom(checks.integer("keep_bytes", keep_bytes, 0))
        self.lock = threading.RLock()
        self.host: OrderedDict[int, Extent] = OrderedDict()  # by id, least recently used first
        self.bytes = {"host": 0, "file": 0}
        self.counts = dict.fromkeys(("puts", "fetches", "viewed", "spilled", "refused", "failed"), 0)
        if folder is not None and not os.path.isdir(folder):
            raise NotADirectoryError(f"Tiers: folder: expected a folder that is there, got {folder}")
        self._folder, self._names = folder, itertools.count()
        self._made: Any = None  # the temporary folder

    # ------------------------------------------------------------------ in and out

    def put(self, pool: Any, pieces: NDArray[np.int64]) -> Extent:
        """Copies pieces (offset, bytes) of a pool, or of a remote.Arena. Raises MemoryError if the budgets leave no
        room, OSError if a file cannot be written; nothing is kept then, and nothing that was is lost."""
        size = int(pieces[:, 1].sum())
        with self.lock:
            direct = size > self.budgets["host_bytes"]  # too large for the host: straight to a file
            if direct:
                self._room_in_files(size)
            else:
                self._room_on_host(size)
                self.bytes["host"] += size
        try:
            memory = room(pool, size, self.room)
            extent = Extent(memory, gather(pool, pieces, memory))
        except BaseException:
            with self.lock:
                self.bytes["host"] -= 0 if direct else size
            raise
        with self.lock:
            if direct:
                self._room_in_files(size)  # others may have taken it meanwhile
                self._write(extent)
            else:
                self.host[id(extent)] = extent
            self.counts["puts"] += 1
        return extent

    def fetch(self, extent: Extent, pool: Any, pieces: NDArray[np.int64]) -> Future[None]:
        """Starts to copy an extent's bytes to pieces of a pool's arena, which must stay until its result is asked for.
        Then it raises OSError or Damaged if the bytes are not those that were put."""
        now = mark(pool)  # kernels of this thread may still read what is there
        return self.copier.start(lambda: self.load(extent, pool, pieces, now))

    def load(self, extent: Extent, pool: Any, pieces: NDArray[np.int64], now: Any = None) -> None:
        """`fetch`, here: behind the mark `now`."""
        memory, path = self._touch(extent, "fetches")
        if memory is None and extent.mapped is not None:
            memory = np.frombuffer(extent.mapped, np.uint8)
        if memory is None:
            memory = self._read(path, room(pool, extent.size, self.room))
        self._compare(extent, scatter(pool, pieces, memory, now))

    def view(self, extent: Extent) -> Bytes:
        """an extent's bytes where they are, to read: the host's, or a file's, mapped, and compared with what was put at
        each call, for a disk may be read again at any time. Raises OSError or Damaged."""
        memory, path = self._touch(extent, "viewed")
        if memory is not None:
            return memory
        with self.lock:
            mapped = extent.mapped
            if mapped is None:
                mapped = self._map(path, extent)
        memory = np.frombuffer(mapped, np.uint8)
        if mapped.size() != memory.size:
            raise Damaged(f"Tiers: expected {memory.size} bytes, got {mapped.size()} in {path}")
        self._compare(extent, _C.checksum(memory))
        return memory

    def _map(self, path: Path, of: Extent) -> mmap.mmap:
        """A file's bytes, whole; it has no name any more: to cut short what is attended would end the process."""
        with open(path, "rb") as file:
            if (size := os.fstat(file.fileno()).st_size) != of.size:
                raise Damaged(f"Tiers: expected {of.size} bytes, got {size} in {path}; was the file changed?")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._compare(of, _C.checksum(np.frombuffer(mapped, np.uint8)))
        of.mapped = mapped
        path.unlink(missing_ok=True)
        return mapped

    def _touch(self, extent: Extent, count: str) -> tuple[Bytes | None, Any]:
        """Where an extent is, which is used now."""
        with self.lock:
            self.counts[count] += 1
            if id(extent) in self.host:
                self.host.move_to_end(id(extent))
            if extent.memory is None and extent.path is None:
                raise ValueError("Tiers: expected an extent that it keeps, got one that was dropped")
            return extent.memory, extent.path

    def _compare(self, extent: Extent, checksum: int) -> None:
        if checksum != extent.checksum:
            with self.lock:
                self.counts["failed"] += 1
            raise Damaged(
                f"Tiers: expected the {extent.size} bytes that were put, got others (checksum) from "
                f"{extent.path or 'memory'}"
            )

    def drop(self, extent: Extent) -> None:
        """Forgets an extent."""
        with self.lock:
            if self.host.pop(id(extent), None) is not None:
                self.bytes["host"] -= extent.size
            extent.memory = extent.mapped = None
            if extent.path is not None:
                self.bytes["file"] -= extent.size
                extent.path.unlink(missing_ok=True)
                extent.path = None

    def stats(self) -> dict[str, int]:
        """host, file: bytes there now; extents: puts; fetches; viewed: read where they are; spilled: from host to file;
        refused: puts without room; failed: wrong checksums."""
        with self.lock:
            return {**self.bytes, **self.counts}

    # ------------------------------------------------------------------ budgets

    def _room_on_host(self, size: int) -> None:
        while self.bytes["host"] + size > self.budgets["host_bytes"]:
            oldest = next(iter(self.host.values()), None)
            if oldest is None:
                self._refuse(size)
            self._room_in_files(oldest.size)  # type: ignore[union-attr]
            self._write(oldest)  # type: ignore[arg-type]
            self.counts["spilled"] += 1

    def _room_in_files(self, size: int) -> None:
        if self.bytes["file"] + size > self.budgets["file_bytes"]:
            self._refuse(size)

    def _refuse(self, size: int) -> None:
        self.counts["refused"] += 1
        raise MemoryError(
            f"Tiers: expected room for {size} bytes, got {self.bytes['host']} of {self.budgets['host_bytes']} on the "
            f"host and {self.bytes['file']} of {self.budgets['file_bytes']} in files; give it more "
            "(host_bytes=, file_bytes=)"
        )

    def _write(self, extent: Extent) -> None:
        """From memory to a file of its own; the memory goes when the file is whole."""
        if self._folder is None:
            self._made = tempfile.TemporaryDirectory(prefix="kvcompress-")
            self._folder = self._made.name
        path = Path(self._folder) / f"{secrets.token_hex(8)}-{next(self._names)}.pages"
        try:
            with open(path, "xb") as file:  # O_EXCL: no file that is there, and no link, is written
                file.write(extent.memory)  # type: ignore[arg-type]
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        if self.host.pop(id(extent), None) is not None:
            self.bytes["host"] -= extent.size
        extent.memory, extent.path = None, path
        self.bytes["file"] += extent.size
        weakref.finalize(extent, path.unlink, missing_ok=True)

    @staticmethod
    def _read(path: Path, memory: Bytes) -> Bytes:
        size = memory.size
        with open(path, "rb", buffering=0) as file:
            at = 0
            while at < size and (n := file.readinto(memory[at:])):  # type: ignore[arg-type]
                at += n
        if at < size:
            raise Damaged(f"Tiers: expected {size} bytes, got {at} from {path}")
        return memory
