"""CopyStream: copies to and from a device next to its work, on a stream of their own, ordered by events."""

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
    """Memory as attention reads it where it is: on 64 bytes."""
    memory = np.empty(size + 63, np.uint8)
    at = -memory.ctypes.data % 64
    return memory[at : at + size]


class _Slot:
    """A slot of a pool, for as long as an array looks at it."""

    def __init__(self, pool: Any, offset: int, size: int) -> None:
        self.pool, self.offset = pool, offset
        at = pool.arena.ctypes.data + offset
        self.__array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (at, False), "version": 3}

    def __del__(self) -> None:
        self.pool.unref(self.offset)


class HostRoom:
    """Host memory on 64 bytes that goes back when no array looks at it any more; `keep` bytes of it stay for what comes
    next: new memory takes the system five times as long as the copy into it."""

    def __init__(self, keep: int) -> None:
        self.pool = _C.Pool(keep_bytes=keep)

    def __call__(self, size: int) -> np.ndarray:
        grain = 1 << max(12, size.bit_length() - 3)  # of slots: few kinds; what is not written is no memory
        try:
            offset = self.pool.alloc(-(-size // grain) * grain)
        except MemoryError:  # no address space that is large enough is left in one piece
            return aligned(size)
        return np.asarray(_Slot(self.pool, offset, size))


class CopyStream:
    """Where nothing runs next to the caller, on the host: copies are done in their order."""

    def mark(self) -> Any:
        """Where the work of the caller's thread is now: copies behind this mark come after it."""

    def join(self, memory: torch.Tensor) -> int:
        """What this thread queues from now on comes after all that others have queued on `memory`: a page that one
        stream's calls have given back may be another's next. Returns a number of the stream that the thread is on."""
        return 0

    def used(self, x: torch.Tensor) -> None:
        """The caller's thread uses x from here on: its memory is not given on before that is done."""

    def after(self, mark: Any) -> AbstractContextManager[None]:
        """Copies inside are queued behind `mark`, and done when it is left; the caller's later work need not wait."""
        return contextlib.nullcontext()

    def room(self, size: int) -> np.ndarray:
        """Host memory, on 64 bytes, that copies of this stream cross quickly. MemoryError."""
        return aligned(size)


class _Use:
    """What is known of a stream that has used the memory."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream, self.count, self.thread = stream, 0, 0  # how often it came, from which thread last
        self.waited: dict[int, int] = {}  # for which of the other streams' uses
        self.memory: Callable[[], torch.Tensor | None] = lambda: None  # whose allocator knows of the stream


class CudaCopyStream(CopyStream):
    """A stream next to the one that computes. A page is copied out when the kernels before have written it, and written
    when those before have read it; who waits for a copy waits for nothing else."""

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
                "kvcompress: expected calls in a CUDA graph to go through CUDAGraphLayer (of a KVCache: `with "
                "cache.step():`), got an ordinary one during capture, which could not be replayed"
            )
        now, thread = torch._C._cuda_getCurrentRawStream(self.device.index), threading.get_ident()  # and no object
        with self.lock:
            use = self.uses.get(now) or self.uses.setdefault(now, _Use(torch.cuda.current_stream(self.device)))
            others = [(n, x) for n, x in self.uses.items() if n != now and use.waited.get(n, 0) < x.count]
            for n, other in others:  # another thread may still be queueing its last
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
                done.synchronize()  # of the copier's thread, as a rule; the host's memory is in use until then

    def room(self, size: int) -> np.ndarray:
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True, device="cpu").numpy()
        except RuntimeError as error:
            raise MemoryError(
                f"kvcompress: expected {size} bytes of pinned host memory, got none: {error}; end other processes that "
                "pin memory, or offload less"
            ) from None


def copy_stream_of(device: torch.device) -> CopyStream:
    return CudaCopyStream(device) if device.type == "cuda" else CopyStream()
