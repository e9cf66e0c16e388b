"""Offloaded pages of a cache in use: those of each layer are fetched for its attention only, with a prefetch during the
attention of the layer before."""

from __future__ import annotations

import contextlib
import itertools
import warnings
import weakref
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from .. import formats
from ..store.device_memory import memory_of
from ..store.page_store import PageStore
from ..store.serialize import Bytes, page_sizes
from .tiers import UNIT, Extent, Tiers

_VERSIONS = itertools.count(1)


class _ResidentTable(NamedTuple):
    """Arrays of a block table without offloaded pages."""

    entries: NDArray[np.int64]
    rows: NDArray[np.int64]
    slots: NDArray[np.int32]


class _Run:
    """Columns [start, stop) of all lines of a block table, offloaded in one extent; and a block table over the extent,
    with the pages of each line in adjacent columns."""

    def __init__(
        self, start: int, stop: int, entries: NDArray[np.int64], sizes: NDArray[np.int64], extent: Extent,
        page_size: int,
    ) -> None:  # fmt: skip
        self.start, self.stop, self.extent = start, stop, extent
        self.offloaded = entries >= 0  # [B, 1 or H, stop - start]
        self.formats, self.sizes = formats.pair_of(entries[self.offloaded]), sizes[self.offloaded]
        many = self.offloaded.sum(2, keepdims=True)
        own = np.full((*many.shape[:2], 1 + stop - start), -1, np.int64)
        at = np.cumsum(self.sizes) - self.sizes
        own[:, :, 1:][np.arange(stop - start) < many] = formats.entry_of(at, self.formats)
        self.entries = torch.from_numpy(own)
        self.rows = torch.from_numpy(np.concatenate([many * page_size, 0 * many], 2))


class LayerOffload:
    """The offloaded pages of one layer. Their block table entries are -1 except in `present()`."""

    def __init__(self, store: PageStore, prefetcher: Prefetcher) -> None:
        self.store, self.prefetcher = store, prefetcher
        self.runs: list[_Run] = []
        self.version = next(_VERSIONS)  # of `runs`; no other layer has the same
        self._order: tuple[tuple[int, int], NDArray[np.int64], NDArray[np.int64]] | None = None
        prefetcher.layers[self] = None

    @property
    def size(self) -> int:
        return sum(run.extent.size for run in self.runs)

    # ------------------------------------------------------------------ out

    def offload_oldest(self) -> None:
        """Offloads the oldest sealed pages, except those of the newest `resident` tokens of each row, once they have at
        least `unit` bytes. Pages stay in the pool if the tiers have no room."""
        store, table = self.store, self.store.table
        start = self.runs[-1].stop if self.runs else 1
        stop = self._closed(start)
        if stop <= start:
            return
        entries = table.entries[:, :, start:stop].copy()
        shared = [store.pool.refs(e) > 1 for e in formats.offset_of(entries.reshape(-1)).tolist()]
        entries[np.reshape(shared, entries.shape)] = -1  # offloading shared pages would free nothing
        sizes = page_sizes(store, np.pad(entries, ((0, 0), (0, 0), (1, 0)), constant_values=-1))[:, :, 1:]
        if int(sizes.sum()) < self.prefetcher.unit:
            return
        there = entries >= 0
        offsets = formats.offset_of(entries[there])
        try:
            extent = self.prefetcher.tiers.put(
                memory_of(store), np.ascontiguousarray(np.stack([offsets, sizes[there]], 1))
            )
        except (MemoryError, OSError) as error:
            if not self.prefetcher.warned:
                warnings.warn(f"KVCache: pages were not offloaded, as the tiers have no room: {error}", stacklevel=2)
                self.prefetcher.warned = True
            return
        self.runs.append(_Run(start, stop, entries, sizes, extent, store.page_size))
        self.version = next(_VERSIONS)
        table.entries[:, :, start:stop][there] = -1
        store.pool.drop(np.ascontiguousarray(offsets))

    def _closed(self, start: int) -> int:
        """The first column from `start` on that must stay, as an append or a crop of the newest tokens may write it."""
        store, table = self.store, self.store.table
        stop = self._column(int(table.rows[:, :, 0].min()) - self.prefetcher.resident)
        if start < stop and table.slots.size:  # nothing after the last live token of a line can be offloaded
            stop = min(stop, self._column(int(_ends(store.slots() >= 0).min()) - 1))
        kinds = formats.pair_of(table.entries[:, :, start:stop])
        raw = formats.resolve("raw", store.dtype) * 257
        for column in range(start, stop):
            if raw != store.sealed_format(column) and (kinds[:, :, column - start] == raw).any():
                return column
        return stop

    def _column(self, tokens: int) -> int:
        """The first column that a line of `tokens` tokens does not fill."""
        return 1 + max(0, tokens - self.store.sinks) // self.store.page_size

    # ------------------------------------------------------------------ back

    def _set_entries(self, fetched: list[Any]) -> None:
        """Sets the block table entries of offloaded pages: for each run those of its fetched copies, or -1."""
        entries = self.store.table.entries
        for run, own in zip(self.runs, fetched, strict=True):
            entries[:, :, run.start : run.stop][run.offloaded] = own

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """Context manager: offloaded pages are fetched and in the block table, which must not change meanwhile."""
        if not self.runs:
            yield
            return
        stage = self.prefetcher.bring(self)
        self._set_entries(stage.entries)
        try:
            self.prefetcher.ahead(self, stage)
            yield
        finally:
            self._set_entries([-1] * len(self.runs))

    # ------------------------------------------------------------------ in place

    def can_attend_in_place(self, queries: int, own: int, window: int, width: int) -> bool:
        """True if a call can attend to offloaded pages in place: its queries see all of them, and the attention they
        receive is not needed."""
        return (
            self.prefetcher.in_place and bool(self.runs) and queries in (0, 1, own) and not window and not width
            and self.store.table.slots.size == 0 and self.store.table.rows.shape[1] == 1
        )  # fmt: skip

    def resident_table(self) -> _ResidentTable:
        """The block table without offloaded pages, whose tokens then count as padding before the others."""
        table, key = self.store.table, (self.version, self.store.table.entries.shape[2])
        if self._order is None or self._order[0] != key:
            offloaded = np.zeros((table.entries.shape[0], 1, key[1]), bool)
            for run in self.runs:
                offloaded[:, :, run.start : run.stop] = run.offloaded
            self._order = key, np.argsort(offloaded, 2, "stable"), offloaded.sum(2) * self.store.page_size
        _, order, less = self._order
        rows = table.rows.copy()
        rows[:, :, 0] -= less
        return _ResidentTable(np.take_along_axis(table.entries, order, 2), rows, table.slots)

    def before_crop(self, seen: int) -> None:
        """Fetches pages that a crop to `seen` slots would change. Crops of the few newest tokens, as in speculative
        decoding, never need it."""
        if not self.runs:
            return
        store, table = self.store, self.store.table
        end = store.sinks + (self.runs[-1].stop - 1) * store.page_size
        if table.slots.size:
            slots = store.slots()
            stays = (slots >= 0) & (slots < seen)
            cut = int(_ends(stays).min()) < end or bool((slots[:, :, :end] >= seen).any())
        else:
            cut = int(table.rows[:, :, 0].min()) - (store.seen - seen) < end
        if cut:
            self.onload()

    def onload(self) -> None:
        """Moves all offloaded pages back to the pool, run by run. Raises MemoryError, OSError or Damaged; runs that
        were moved before stay in the pool."""
        self.prefetcher.forget(self)
        while self.runs:
            run, pool = self.runs[-1], self.store.pool
            offsets = pool.take(run.sizes)
            try:
                self.prefetcher.tiers.load(
                    run.extent, memory_of(self.store), np.ascontiguousarray(np.stack([offsets, run.sizes], 1))
                )
            except BaseException:
                pool.drop(offsets)
                raise
            cells = self.store.table.entries[:, :, run.start : run.stop]
            cells[run.offloaded] = formats.entry_of(offsets, run.formats)
            self._drop_run()

    def drop(self) -> None:
        """Deletes all offloaded pages."""
        self.prefetcher.forget(self)
        while self.runs:
            self._drop_run()

    def __del__(self) -> None:
        for run in self.runs:
            self.prefetcher.tiers.drop(run.extent)

    def _drop_run(self) -> None:
        self.prefetcher.tiers.drop(self.runs.pop().extent)
        self.version = next(_VERSIONS)


def _ends(live: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Index after the last True of each line [..., N]."""
    return np.where(live.any(-1), live.shape[-1] - live[..., ::-1].argmax(-1), 0)


class _Stage:
    """A buffer in the pool for the offloaded pages of one layer."""

    def __init__(self) -> None:
        self.offset, self.size = -1, 0
        self.version = 0  # that of the layer whose pages it holds; 0: none
        self.entries: list[NDArray[np.int64]] = []  # block table entries of these pages, by run
        self.tickets: list[Future[None]] = []

    def wait(self) -> Exception | None:
        """Waits for all transfers. If one failed, clears the version and returns its error."""
        error = None
        for ticket in self.tickets:
            try:
                ticket.result()
            except Exception as failed:
                error = failed
        self.tickets = []
        if error is not None:
            self.version = 0
        return error


class Prefetcher:
    """Fetches the offloaded pages of a cache's layers, in the order of a forward pass. Each pool has two buffers
    (`_Stage`): one for the layer that attends, one for the prefetch of the next.

    resident: number of newest tokens of each row that are never offloaded. unit: minimum size of a transfer in bytes.
    in_place: attend to offloaded pages in place where possible.
    """

    def __init__(self, tiers: Tiers, *, resident: int, unit: int = UNIT, in_place: bool = False) -> None:
        self.tiers, self.resident, self.unit, self.in_place = tiers, resident, unit, in_place
        self.layers: weakref.WeakKeyDictionary[LayerOffload, None] = weakref.WeakKeyDictionary()  # in order
        self.stages: dict[Any, tuple[_Stage, _Stage]] = defaultdict(lambda: (_Stage(), _Stage()))  # by pool
        self.readahead: tuple[int, Future[list[Bytes]]] | None = None  # version of a layer, and its files: see `views`
        self.warned = False

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        """Frees the buffers; they are allocated again when needed."""
        for pool, stages in self.stages.items():
            for stage in stages:
                stage.wait()
                if stage.offset >= 0:
                    pool.unref(stage.offset)
        self.stages.clear()

    def _start(self, stage: _Stage, offload: LayerOffload) -> None:
        """Starts to fetch the pages of `offload` to a buffer that is not in use."""
        stage.wait()
        stage.version = 0
        if stage.size < offload.size:
            pool = offload.store.pool
            room = max(layer.size for layer in self.layers if layer.store.pool is pool) * 5 // 4
            fresh = pool.alloc(room)
            if stage.offset >= 0:
                pool.unref(stage.offset)
            stage.offset, stage.size = fresh, room
        stage.entries, end = [], stage.offset
        for run in offload.runs:
            ends = end + np.cumsum(run.sizes)
            offsets, end = ends - run.sizes, int(ends[-1])
            stage.entries.append(formats.entry_of(offsets, run.formats))
            where = np.ascontiguousarray(np.stack([offsets, run.sizes], 1))
            stage.tickets.append(self.tiers.fetch(run.extent, memory_of(offload.store), where))
        stage.version = offload.version

    def _stage_of(self, offload: LayerOffload) -> _Stage | None:
        return next((s for s in self.stages[offload.store.pool] if s.version == offload.version), None)

    def bring(self, offload: LayerOffload) -> _Stage:
        """The buffer with the pages of `offload`, fetched if needed. A failed prefetch is retried."""
        stage = self._stage_of(offload)
        if stage is not None:
            stage.wait()
        if stage is None or not stage.version:
            pair, others = self.stages[offload.store.pool], {x.version for x in self.layers if x is not offload}
            stage = stage or next((s for s in pair if s.version not in others), pair[0])
            self._start(stage, offload)
            if error := stage.wait():
                raise error
        return stage

    def ahead(self, offload: LayerOffload, stage: _Stage) -> None:
        """Starts the prefetch for the next layer with offloaded pages, during the attention of this one."""
        later = self._next(offload)
        if later is None or self._stage_of(later) is not None:
            return
        pair = self.stages[later.store.pool]
        other = pair[stage is pair[0]]
        with contextlib.suppress(MemoryError):  # no room for a prefetch
            self._start(other, later)

    def _next(self, offload: LayerOffload) -> LayerOffload | None:
        layers = [x for ref in self.layers.keyrefs() if (x := ref()) is not None]
        at = layers.index(offload)
        return next((x for x in layers[at + 1 :] + layers[:at] if x.runs), None)

    def views(self, offload: LayerOffload) -> list[Bytes]:
        """The bytes of its runs, in place. Starts to read the files of the next layer in the background."""
        ready, self.readahead, memories, view = self.readahead, None, None, self.tiers.view
        if ready is not None and ready[0] == offload.version:
            with contextlib.suppress(Exception):  # a failed readahead is retried below
                memories = ready[1].result()
        if memories is None:
            memories = [view(run.extent) for run in offload.runs]
        later = self._next(offload)
        if later is not None and any(run.extent.path for run in later.runs):
            extents = [run.extent for run in later.runs]
            self.readahead = later.version, self.tiers.copier.start(lambda: list(map(view, extents)))
        return memories

    def forget(self, offload: LayerOffload) -> None:
        """Waits for transfers of its pages, also of those that it had when they were started."""
        others = {x.version for x in self.layers if x is not offload}
        for stage in self.stages.get(offload.store.pool, ()):
            if stage.version and stage.version not in others:
                stage.wait()
                stage.version = 0
