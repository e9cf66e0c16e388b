"""CopyStream: copies to and from a device, concurrent with its kernels, on a separate stream ordered by events."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from .. import _C


def aligned(size: int) -> np.ndarray:
    """Host memory aligned to 64 bytes, as attention requires."""
    memory = np.empty(size + 63, np.uint8)
    at = -memory.ctypes.data % 64
    return memory[at : at + size]


class Slot:
    """A slot of a pool, freed with the object, or with the last array over it. Raises MemoryError."""

    _at = np.empty(0, np.int64)  # its offset; empty: none

    def __init__(self, pool: Any, size: int) -> None:
        self.pool, self.size = pool, size
        self._at = np.full(1, -1)
        pool.take(np.array([size]), self._at)
        self.offset = int(self._at[0])
        at = pool.arena.ctypes.data + self.offset
        self.__array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (at, False), "version": 3}

    def free(self) -> None:
        """Frees the slot now."""
        at, self._at = self._at[self._at >= 0], self._at[:0]
        if len(at):
            self.pool.drop(at)

    __del__ = free


class HostRoom:
    """Allocates host memory, aligned to 64 bytes, which is freed with the last array over it. Keeps `keep` bytes for
    reuse: allocating new memory from the system takes five times as long as the copy into it."""

    def __init__(self, keep: int) -> None:
        self.pool = _C.Pool(keep_bytes=keep)

    def __call__(self, size: int) -> np.ndarray:
        grain = 1 << max(12, size.bit_length() - 3)  # few slot sizes; unwritten memory is not resident
        try:
            return np.asarray(Slot(self.pool, -(-size // grain) * grain))[:size]
        except MemoryError:  # no contiguous address space of this size is left
            return aligned(size)


class CopyStream:
    """The CPU's: nothing runs concurrently, copies run in order."""

    def mark(self) -> Any:
        """An event after the work queued by the caller's thread so far."""

    def join(self, memory: torch.Tensor) -> int:
        """Orders what this thread queues from now on after all work of other streams on `memory`, since a page that one
        stream has freed may be reused by another. Returns the number of the thread's current stream."""
        return 0

    def used(self, x: torch.Tensor) -> None:
        """The caller's stream uses x: its memory is not reused before that is done (Tensor.record_stream)."""

    def after(self, mark: Any) -> AbstractContextManager[None]:
        """Context manager: copies inside are queued after the event `mark` and are done on exit; later work of the
        caller does not wait for them."""
        return contextlib.nullcontext()

    def room(self, size: int) -> np.ndarray:
        """Host memory for copies of this stream, aligned to 64 bytes (pinned for a GPU). Raises MemoryError."""
        return aligned(size)


class _Use:
    """A stream that has used the memory."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream, self.count, self.thread = stream, 0, 0  # count of its uses, thread of the last one
        self.waited: dict[int, int] = {}  # uses of other streams that it has waited for
        self.memory: Callable[[], torch.Tensor | None] = lambda: None  # tensor that was told of the stream


class CudaCopyStream(CopyStream):
    """A separate CUDA stream. A page is copied out after earlier kernels have written it, and overwritten after earlier
    kernels have read it; waiting for a copy waits for nothing else."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.lock = threading.Lock()
        self.uses: dict[int, _Use] = {}

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def join(self, memory: torch.Tensor) -> int:
        if torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "kvcompress: expected calls in a CUDA graph to go through CUDAGraphLayer (for a KVCache: `with "
                "cache.step():`), got an ordinary one during capture, which could not be replayed"
            )
        now, thread = torch._C._cuda_getCurrentRawStream(self.device.index), threading.get_ident()  # and no object
        with self.lock:
            use = self.uses.get(now) or self.uses.setdefault(now, _Use(torch.cuda.current_stream(self.device)))
            others = [(n, x) for n, x in self.uses.items() if n != now and use.waited.get(n, 0) < x.count]
            for n, other in others:  # another thread may still be queueing work
                use.waited[n] = other.count - (other.thread != thread)
            use.count, use.thread = use.count + 1, thread
        for _, other in others:
            use.stream.wait_stream(other.stream)
        if use.memory() is not memory:
            memory.record_stream(use.stream)
            use.memory = weakref.ref(memory)
        return now

    def used(self, x: torch.Tensor) -> None:
        x.record_stream(torch.cuda.current_stream(self.device))

    @contextlib.contextmanager
    def after(self, mark: torch.cuda.Event) -> Iterator[None]:
        done = torch.cuda.Event()
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            self.stream.wait_event(mark)
            try:
                yield
            finally:
                done.record(self.stream)
                done.synchronize()  # usually in the copier's thread; host memory is in use until then

    def room(self, size: int) -> np.ndarray:
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True, device="cpu").numpy()
        except RuntimeError as error:
            raise MemoryError(
                f"kvcompress: expected {size} bytes of pinned host memory, got none: {error}; stop other processes "
                "that pin memory, or offload less"
            ) from None
