"""Tiers: host memory and files for offloaded pages."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import secrets
import shutil
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
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
"""Minimum size of a transfer in bytes: for smaller ones latency dominates on a device's copy engine."""


class Copier(Protocol):
    """Runs copies in the background, by default in a thread (`CopyThread`). On a GPU a job queues copies on a separate
    stream, after an event of the caller, and waits for them (`copy_stream`)."""

    def start(self, job: Callable[[], T]) -> Future[T]: ...


class CopyThread:
    """One worker thread; jobs run in order."""

    def __init__(self) -> None:
        self._begin()
        _copy_threads.add(self)

    def _begin(self) -> None:
        self.process, self.worker = os.getpid(), ThreadPoolExecutor(1, "kvcompress copier")
        self.used = False

    def start(self, job: Callable[[], T]) -> Future[T]:
        if self.process != os.getpid():
            self._begin()  # threads do not survive a fork
        self.used = True
        return self.worker.submit(job)

    def finish(self) -> None:
        """Waits for all jobs."""
        if self.used and self.process == os.getpid():
            with contextlib.suppress(RuntimeError):  # the interpreter shuts down
                self.worker.submit(int).result()


_copy_threads: weakref.WeakSet[CopyThread] = weakref.WeakSet()


def _before_fork() -> None:
    """A child has no thread to finish a job, or to release a lock that the job holds."""
    for thread in list(_copy_threads):
        thread.finish()


os.register_at_fork(before=_before_fork)


def _remove(path: Path, process: int) -> None:
    """Deletes a file or folder of `process`. In a forked child it does nothing: the parent still needs it."""
    if process == os.getpid():
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


class Extent:
    """A block of bytes in a Tiers: in `memory`, or in the file `path`."""

    __slots__ = ("__weakref__", "checksum", "mapped", "memory", "path", "remove", "size")

    def __init__(self, memory: Bytes, checksum: int) -> None:
        self.memory: Bytes | None = memory
        self.path: Path | None = None
        self.remove: Callable[[], Any] = int  # deletes the file, in the process that wrote it
        self.mapped: mmap.mmap | None = None  # the file, if mapped
        self.size, self.checksum = memory.size, checksum


class Tiers(
    checks.ProcessBound,
    instead="caches can share one; create another in another process, and use KVCache.save(path) to keep a cache",
):
    """Storage for offloaded pages: host memory, then files. When host memory is full, the least recently used pages
    move to files.

    Args:
        host_bytes: budget of host memory in bytes. None: no limit.
        file_bytes: budget of files in bytes. None: no limit.
        folder: existing folder for the files, which are deleted with the Tiers. Default: a temporary folder.
        copier: runs copies in the background. Default: a thread.
        keep_bytes: bytes of host memory to keep for reuse after pages were fetched.

    Thread-safe. A checksum of each block is taken when it leaves the pool and verified when it is read; a failed read
    raises OSError or Damaged (a ValueError). Raises NotADirectoryError if `folder` does not exist.
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
        self.worker = 0  # thread that runs the jobs
        self.room = HostRoom(checks.integer("keep_bytes", keep_bytes, 0))
        self.lock = threading.RLock()
        self.host: OrderedDict[int, Extent] = OrderedDict()  # by id, least recently used first
        self.bytes = {"host": 0, "file": 0}
        self.counts = dict.fromkeys(("puts", "fetches", "viewed", "spilled", "refused", "failed"), 0)
        if folder is not None and not os.path.isdir(folder):
            raise NotADirectoryError(f"Tiers: folder: expected an existing folder, got {folder}; create it first")
        self._folder, self._names = folder, itertools.count()

    # ------------------------------------------------------------------ in and out

    def put(self, pool: Any, pieces: NDArray[np.int64]) -> Extent:
        """Stores a copy of `pieces` (int64 [n, 2]: offset, bytes) of a pool, or of a `device_memory.Arena`. Raises
        MemoryError if the budgets have no room, OSError if a file cannot be written; nothing is stored or lost then."""
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
                self._room_in_files(size)  # again: another thread may have used it
                self._write(extent)
            else:
                self.host[id(extent)] = extent
            self.counts["puts"] += 1
        return extent

    def fetch(self, parts: Sequence[tuple[Extent, NDArray[np.int64]]], pool: Any, to: Any = None) -> Future[None]:
        """Starts to copy extents to pieces of a pool's arena, in one job. The pieces must not be freed before the job
        is done; it holds `to`. The result raises OSError or Damaged if the bytes differ from those stored."""
        now = mark(pool)  # kernels of this thread may still read the target

        def job(_: Any = to) -> None:
            self.worker = threading.get_ident()
            for extent, pieces in parts:
                self.load(extent, pool, pieces, now)

        return self.copier.start(job)

    def load(self, extent: Extent, pool: Any, pieces: NDArray[np.int64], now: Any = None) -> None:
        """As `fetch` of one extent, in this thread, after the event `now` (of `mark`)."""
        memory, path = self._touch(extent, "fetches")
        if memory is None and extent.mapped is None:
            memory = room(pool, extent.size, self.room)
            try:
                with open(path, "rb") as file:
                    if (n := file.readinto(memory)) < extent.size:  # type: ignore[arg-type]
                        raise Damaged(f"Tiers: expected {extent.size} bytes, got {n} from {path}")
            except FileNotFoundError:
                if extent.mapped is None:  # else another thread has mapped it meanwhile; see `_map`
                    raise
                memory = None
        if memory is None:
            memory = np.frombuffer(extent.mapped, np.uint8)  # type: ignore[arg-type]
        self._compare(extent, scatter(pool, pieces, memory, now))

    def view(self, extent: Extent) -> Bytes:
        """The bytes of an extent without a copy: host memory, or the mapped file. A file is verified at each call,
        since its pages may be read from disk again at any time. Raises OSError or Damaged."""
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
        """Maps and deletes a file. Without a name it cannot be truncated, which would crash the process (SIGBUS)."""
        with open(path, "rb") as file:
            if (size := os.fstat(file.fileno()).st_size) != of.size:
                raise Damaged(f"Tiers: expected {of.size} bytes, got {size} in {path}; was the file changed?")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._compare(of, _C.checksum(np.frombuffer(mapped, np.uint8)))
        of.mapped = mapped
        of.remove()
        return mapped

    def _touch(self, extent: Extent, count: str) -> tuple[Bytes | None, Any]:
        """(memory, path) of an extent; marks it as recently used."""
        with self.lock:
            self.counts[count] += 1
            if id(extent) in self.host:
                self.host.move_to_end(id(extent))
            if extent.memory is None and extent.path is None:
                raise ValueError("Tiers: expected a stored extent, got one that was dropped")
            return extent.memory, extent.path

    def _compare(self, extent: Extent, checksum: int) -> None:
        if checksum != extent.checksum:
            with self.lock:
                self.counts["failed"] += 1
            raise Damaged(
                f"Tiers: expected the {extent.size} bytes that were stored, got others (wrong checksum) from "
                f"{extent.path or 'memory'}"
            )

    def drop(self, extent: Extent) -> None:
        """Deletes an extent."""
        with self.lock:
            if self.host.pop(id(extent), None) is not None:
                self.bytes["host"] -= extent.size
            extent.memory = extent.mapped = None
            if extent.path is not None:
                self.bytes["file"] -= extent.size
                extent.remove()
                extent.path = None

    def stats(self) -> dict[str, int]:
        """host, file: bytes stored now. Counts of extents: puts: stored; fetches: read back; viewed: read in place;
        spilled: moved from host memory to a file; refused: no room; failed: wrong checksum."""
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
            f"Tiers: expected room for {size} bytes, got {self.bytes['host']} of {self.budgets['host_bytes']} used on "
            f"the host and {self.bytes['file']} of {self.budgets['file_bytes']} in files; raise host_bytes= or "
            "file_bytes="
        )

    def _write(self, extent: Extent) -> None:
        """Moves an extent from memory to a new file; frees the memory once the file is written. Does nothing if the
        garbage collector, which may run in any of these lines, drops the extent."""
        memory = extent.memory
        if self._folder is None:
            self._folder = tempfile.mkdtemp(prefix="kvcompress-")
            weakref.finalize(self, _remove, Path(self._folder), os.getpid())
        path = Path(self._folder) / f"{secrets.token_hex(8)}-{next(self._names)}.pages"
        try:
            with open(path, "xb") as file:  # O_EXCL: never overwrites a file or follows a link
                file.write(b"" if memory is None else memory)  # type: ignore[arg-type]
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        if extent.memory is None:
            path.unlink()
            return
        if self.host.pop(id(extent), None) is not None:
            self.bytes["host"] -= extent.size
        extent.memory, extent.path = None, path
        self.bytes["file"] += extent.size
        extent.remove = weakref.finalize(extent, _remove, path, os.getpid())
