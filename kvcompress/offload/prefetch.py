"""Offloaded pages of a cache in use: those of each layer are fetched for its attention only, with a prefetch during the
attention of the layer before."""

from __future__ import annotations

import contextlib
import itertools
import threading
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
from ..store.copy_stream import Slot
from ..store.device_memory import memory_of
from ..store.page_store import PageStore
from ..store.serialize import Bytes, page_sizes
from .tiers import UNIT, Extent, Tiers

_VERSIONS = itertools.count(1)
_NONE = np.empty(0, np.int64)


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
        self.cells = np.argwhere(self.offloaded) + np.array([0, 0, start])  # of its pages, in the block table
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
        self._tried = 0  # column up to which pages were last considered
        self._order: tuple[tuple[int, int], NDArray[np.int64], NDArray[np.int64]] | None = None
        self._pages: tuple[int, tuple[Any, NDArray[np.int64], NDArray[np.int64]]] = 0, (None, _NONE, _NONE)
        prefetcher.layers[self] = None

    @property
    def size(self) -> int:
        return sum(run.extent.size for run in self.runs)

    def pages(self) -> tuple[Any, NDArray[np.int64], NDArray[np.int64]]:
        """(index of the block table entries, formats, sizes) of all offloaded pages, run by run."""
        if self._pages[0] != self.version:
            cells, kinds, sizes = (
                np.concatenate([getattr(run, x) for run in self.runs]) for x in ("cells", "formats", "sizes")
            )
            self._pages = self.version, (tuple(cells.T), kinds, sizes)
        return self._pages[1]

    # ------------------------------------------------------------------ out

    def offload_oldest(self) -> None:
        """Offloads the oldest sealed pages, except those of the newest `resident` tokens of each row, once they have at
        least `unit` bytes. Pages stay in the pool if the tiers have no room."""
        store, table = self.store, self.store.table
        full = self._column(int(table.rows[:, :, 0].min()) - self.prefetcher.resident)
        start = self.runs[-1].stop if self.runs else 1
        if full <= start or full == self._tried:
            return
        self._tried = full  # pages that stay, as shared ones do, are looked at once per page that fills
        stop = self._closed(start, full)
        if stop == start:
            return
        entries = table.entries[:, :, start:stop].copy()
        shared = [store.pool.refs(e) > 1 for e in formats.offset_of(entries.reshape(-1)).tolist()]
        entries[np.reshape(shared, entries.shape)] = -1  # offloading shared pages would free nothing
        sizes = page_sizes(store, np.pad(entries, ((0, 0), (0, 0), (1, 0)), constant_values=-1))[:, :, 1:]
        if int(sizes.sum()) < self.prefetcher.unit:
            return
        there = entries >= 0
        offsets = np.ascontiguousarray(formats.offset_of(entries[there]))
        try:
            extent = self.prefetcher.tiers.put(
                memory_of(store), np.ascontiguousarray(np.stack([offsets, sizes[there]], 1))
            )
        except (MemoryError, OSError) as error:
            if not self.prefetcher.warned:
                warnings.warn(f"KVCache: pages were not offloaded, as the tiers have no room: {error}", stacklevel=2)
                self.prefetcher.warned = True
            return
        runs, version = [_Run(start, stop, entries, sizes, extent, store.page_size)], next(_VERSIONS)
        self.runs += runs  # no call from here to the drop: Ctrl-C can come after one
        self.version = version
        table.entries[:, :, start:stop][there] = -1
        store.pool.drop(offsets)

    def _closed(self, start: int, stop: int) -> int:
        """The first column in [start, stop) that must stay, as an append or a crop of the newest tokens may write it;
        or `stop`."""
        store, table = self.store, self.store.table
        if table.slots.size:  # nothing after the last live token of a line can be offloaded
            stop = max(start, min(stop, self._column(int(_ends(store.slots() >= 0).min()) - 1)))
        raw = formats.resolve("raw", store.dtype) * 257
        kinds = formats.pair_of(table.entries[:, :, start:stop])
        for column in (start + np.flatnonzero((kinds == raw).any((0, 1)))).tolist():
            if raw != store.sealed_format(column):
                return column
        return stop

    def _column(self, tokens: int) -> int:
        """The first column that a line of `tokens` tokens does not fill."""
        return 1 + max(0, tokens - self.store.sinks) // self.store.page_size

    # ------------------------------------------------------------------ back

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """Context manager: offloaded pages are fetched and in the block table, which must not change meanwhile."""
        if not self.runs:
            yield
            return
        stage = self.prefetcher.bring(self)
        try:
            self.store.table.entries[self.pages()[0]] = stage.entries
            self.prefetcher.ahead(self, stage)
            yield
        finally:
            self._hide()

    def _hide(self) -> None:
        """Removes the entries of offloaded pages from the block table: the table does not own their copies."""
        self.store.table.entries[self.pages()[0]] = -1

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
            offsets = np.full(len(run.sizes), -1)
            try:
                pool.take(run.sizes, offsets)
                self.prefetcher.tiers.load(
                    run.extent, memory_of(self.store), np.ascontiguousarray(np.stack([offsets, run.sizes], 1))
                )
                entries, version = formats.entry_of(offsets, run.formats), next(_VERSIONS)
            except BaseException:
                pool.drop(offsets[offsets >= 0])
                raise
            self.store.table.entries[:, :, run.start : run.stop][run.offloaded] = entries
            del self.runs[-1]  # no call up to here: Ctrl-C can come after one
            self.version = version
            self.prefetcher.tiers.drop(run.extent)
        self._tried = 0

    def reset(self, batch: int) -> None:
        """Deletes all offloaded pages, and resets the table (see `_C.Table.reset`)."""
        self.prefetcher.forget(self)
        if self.runs:
            self._hide()
        table, runs, version = self.store.table, self.runs, next(_VERSIONS)
        self.runs, self.version, self._tried = [], version, 0  # no call from here to the reset, as above
        try:
            table.reset(batch)
        except Exception:  # no memory for another batch size
            self.runs = runs
            raise
        for run in runs:
            self.prefetcher.tiers.drop(run.extent)

    def __del__(self) -> None:
        if getattr(self, "runs", None):  # else there are none, or __init__ was interrupted
            self._hide()  # a second Ctrl-C may have come in `present`
            for run in self.runs:
                self.prefetcher.tiers.drop(run.extent)


def _ends(live: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Index after the last True of each line [..., N]."""
    return np.where(live.any(-1), live.shape[-1] - live[..., ::-1].argmax(-1), 0)


class _Stage:
    """A buffer in the pool for the offloaded pages of one layer."""

    def __init__(self) -> None:
        self.slot: Slot | None = None  # freed with the stage and the transfers to it
        self.version = 0  # that of the layer whose pages it holds; 0: none
        self.entries = _NONE  # block table entries of these pages
        self.ticket: Future[None] | None = None

    def wait(self) -> Exception | None:
        """Waits for the transfer. If it failed, clears the version and returns its error."""
        ticket, error = self.ticket, None
        if ticket is not None:
            try:
                ticket.result()
            except Exception as failed:
                error, self.version = failed, 0
            self.ticket = None
        return error


class Prefetcher:
    """Fetches the offloaded pages of a cache's layers, in the order of a forward pass. Each pool has two buffers
    (`_Stage`): one for the layer that attends, one for the prefetch of the next.

    resident: number of newest tokens of each row that are never offloaded. unit: minimum size of a transfer in bytes.
    in_place: attend to offloaded pages in place where possible.
    """

    def __init__(self, tiers: Tiers, *, resident: int, unit: int = UNIT, in_place: bool = False) -> None:
        self.layers: weakref.WeakKeyDictionary[LayerOffload, None] = weakref.WeakKeyDictionary()  # in order
        self.stages: dict[Any, tuple[_Stage, _Stage]] = defaultdict(lambda: (_Stage(), _Stage()))  # by pool
        self.readahead: tuple[int, Future[list[Bytes]]] | None = None  # version of a layer, and its files: see `views`
        self.warned = False
        self.tiers, self.resident, self.unit, self.in_place = tiers, resident, unit, in_place

    def __del__(self) -> None:
        if threading.get_ident() != self.tiers.worker:  # which would wait for itself; its jobs hold the buffers
            self.release()

    def release(self) -> None:
        """Frees the buffers; they are allocated again when needed."""
        for stages in self.stages.values():
            for stage in stages:
                stage.wait()
                if stage.slot:
                    stage.slot.free()
        self.stages.clear()

    def _start(self, stage: _Stage, offload: LayerOffload) -> None:
        """Starts to fetch the pages of `offload` to a buffer that is not in use, all runs in one job."""
        stage.wait()
        stage.version = 0
        slot, pool, runs, (_, kinds, sizes) = stage.slot, offload.store.pool, offload.runs, offload.pages()
        if slot is None or slot.size < offload.size:
            size = max(layer.size for layer in self.layers if layer.store.pool is pool) * 5 // 4
            slot = stage.slot = Slot(pool, size)
        ends = slot.offset + np.cumsum(sizes)
        where = np.ascontiguousarray(np.stack([ends - sizes, sizes], 1))
        stage.entries = formats.entry_of(where[:, 0], kinds)
        pieces = np.split(where, np.cumsum([len(run.sizes) for run in runs])[:-1])
        parts = [(run.extent, part) for run, part in zip(runs, pieces, strict=True)]
        stage.ticket = self.tiers.fetch(parts, memory_of(offload.store), slot)
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
