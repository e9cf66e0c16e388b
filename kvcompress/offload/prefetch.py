"""Pages of a cache in use that wait in another tier: each layer's are brought just before its attention, one layer
ahead, and never stay."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator
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


class _Near(NamedTuple):
    """Arrays of a table without offloaded pages."""

    entries: NDArray[np.int64]
    rows: NDArray[np.int64]
    slots: NDArray[np.int32]


class _Run:
    """Columns [start, stop) of all lines of a table, in one extent; and a table over it, with each line's pages side by
    side."""

    def __init__(
        self, start: int, stop: int, entries: NDArray[np.int64], sizes: NDArray[np.int64], extent: Extent,
        page_size: int,
    ) -> None:  # fmt: skip
        self.start, self.stop, self.extent = start, stop, extent
        self.there = entries >= 0  # [B, 1 or H, stop - start]
        self.formats, self.sizes = formats.pair_of(entries[self.there]), sizes[self.there]
        many = self.there.sum(2, keepdims=True)
        own = np.full((*many.shape[:2], 1 + stop - start), -1, np.int64)
        at = np.cumsum(self.sizes) - self.sizes
        own[:, :, 1:][np.arange(stop - start) < many] = formats.entry_of(at, self.formats)
        self.entries = torch.from_numpy(own)
        self.rows = torch.from_numpy(np.concatenate([many * page_size, 0 * many], 2))


class LayerOffload:
    """The offloaded pages of one layer. Their cells name no page (-1) except while `present`."""

    def __init__(self, store: PageStore, prefetcher: Prefetcher) -> None:
        self.store, self.prefetcher = store, prefetcher
        self.runs: list[_Run] = []
        self.version = 0  # counts changes of `runs`
        self._order: tuple[tuple[int, int], NDArray[np.int64], NDArray[np.int64]] | None = None
        prefetcher.all.append(weakref.ref(self))

    @property
    def size(self) -> int:
        return sum(run.extent.size for run in self.runs)

    # ------------------------------------------------------------------ out

    def offload_oldest(self) -> None:
        """Offloads the oldest sealed pages, but for `resident` tokens of each row, in pieces of a unit at least. What
        finds no room stays."""
        store, table = self.store, self.store.table
        start = self.runs[-1].stop if self.runs else 1
        stop = self._closed(start)
        if stop <= start:
            return
        entries = table.entries[:, :, start:stop].copy()
        shared = [store.pool.refs(e) > 1 for e in formats.offset_of(entries.reshape(-1)).tolist()]
        entries[np.reshape(shared, entries.shape)] = -1  # others keep them here anyway
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
            self.prefetcher.warn(error)
            return
        self.runs.append(_Run(start, stop, entries, sizes, extent, store.page_size))
        self.version += 1
        table.entries[:, :, start:stop][there] = -1
        store.pool.drop(np.ascontiguousarray(offsets))

    def _closed(self, start: int) -> int:
        """The first column, from `start` on, that stays: an append may write it, or a crop of the newest tokens."""
        store, table = self.store, self.store.table
        stop = self._column(int(table.rows[:, :, 0].min()) - self.prefetcher.resident)
        if start < stop and table.slots.size:  # behind the last live token of a line all may be dead
            stop = min(stop, self._column(int(_ends(store.slots() >= 0).min()) - 1))
        kinds = formats.pair_of(table.entries[:, :, start:stop])
        raw = formats.resolve("raw", store.dtype) * 257
        for column in range(start, stop):
            if raw != store.sealed_format(column) and (kinds[:, :, column - start] == raw).any():
                return column
        return stop

    def _column(self, tokens: int) -> int:
        """The first column that a line of so many tokens does not fill."""
        return 1 + max(0, tokens - self.store.sinks) // self.store.page_size

    # ------------------------------------------------------------------ back

    def pieces(self, offset: int) -> list[NDArray[np.int64]]:
        """Where the pages of each run lie when they are side by side from `offset` on."""
        found = []
        for run in self.runs:
            ends = offset + np.cumsum(run.sizes)
            found.append(np.ascontiguousarray(np.stack([ends - run.sizes, run.sizes], 1)))
            offset = int(ends[-1])
        return found

    def name(self, pieces: list[NDArray[np.int64]]) -> None:
        """The cells name the pages at `pieces`."""
        entries = self.store.table.entries
        for run, where in zip(self.runs, pieces, strict=True):
            entries[:, :, run.start : run.stop][run.there] = formats.entry_of(where[:, 0], run.formats)

    def unname(self) -> None:
        entries = self.store.table.entries
        for run in self.runs:
            entries[:, :, run.start : run.stop][run.there] = -1

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """All pages of the layer are there, while nobody changes the table."""
        if not self.runs:
            yield
            return
        stage = self.prefetcher.bring(self)
        self.name(stage.pieces)
        try:
            self.prefetcher.ahead(self, stage)
            yield
        finally:
            self.unname()

    # ------------------------------------------------------------------ not back

    def stays(self, queries: int, own: int, window: int, width: int) -> bool:
        """Can a call attend to the pages where they are? Its queries must see all of them, and no one may ask how much
        attention they received."""
        return (
            self.prefetcher.in_place and bool(self.runs) and queries in (0, 1, own) and not window and not width
            and self.store.table.slots.size == 0 and self.store.table.rows.shape[1] == 1
        )  # fmt: skip

    def near(self) -> _Near:
        """The table of the pages that are here: with the slots of other tokens, all of the past."""
        table, key = self.store.table, (self.version, self.store.table.entries.shape[2])
        if self._order is None or self._order[0] != key:
            offloaded = np.zeros((table.entries.shape[0], 1, key[1]), bool)
            for run in self.runs:
                offloaded[:, :, run.start : run.stop] = run.there
            self._order = key, np.argsort(offloaded, 2, "stable"), offloaded.sum(2) * self.store.page_size
        _, order, less = self._order
        rows = table.rows.copy()
        rows[:, :, 0] -= less
        return _Near(np.take_along_axis(table.entries, order, 2), rows, table.slots)

    def before_crop(self, seen: int) -> None:
        """Pages that a crop to `seen` slots cuts or drops are onloaded; the few newest tokens that are taken back in
        speculation never left."""
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
        """Brings all pages back for good, run by run. Raises MemoryError, OSError, Damaged; what has come stays."""
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
            cells[run.there] = formats.entry_of(offsets, run.formats)
            self._lose()

    def lose(self) -> None:
        """Forgets all offloaded pages."""
        self.prefetcher.forget(self)
        while self.runs:
            self._lose()

    def __del__(self) -> None:
        for run in self.runs:
            self.prefetcher.tiers.drop(run.extent)

    def _lose(self) -> None:
        self.prefetcher.tiers.drop(self.runs.pop().extent)
        self.version += 1


def _ends(live: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Behind the last True of each line [..., N]."""
    return np.where(live.any(-1), live.shape[-1] - live[..., ::-1].argmax(-1), 0)


def _nobody() -> None:
    return None


class _Stage:
    """Room in the pool for the pages of one layer, and whose they are."""

    def __init__(self) -> None:
        self.offset, self.size = -1, 0
        self._owner: Callable[[], LayerOffload | None] = _nobody
        self.version = -1
        self.pieces: list[NDArray[np.int64]] = []
        self.tickets: list[Future[None]] = []

    @property
    def owner(self) -> LayerOffload | None:
        return self._owner()

    @owner.setter
    def owner(self, offload: LayerOffload | None) -> None:
        self._owner = _nobody if offload is None else weakref.ref(offload)

    def free(self, offload: LayerOffload) -> bool:
        """Does it hold nothing that any other layer than `offload` will ask for?"""
        return self.owner is None or self.owner is offload or self.owner.version != self.version

    def wait(self) -> None:
        """Raises what the transfers raised; the stage is then nobody's."""
        error = None
        for ticket in self.tickets:
            try:
                ticket.result()
            except Exception as failed:
                error = failed
        self.tickets = []
        if error is not None:
            self.owner = None
            raise error


class _Look:
    """A layer's files, mapped, read and compared by the copier."""

    def __init__(self, offload: LayerOffload) -> None:
        self.offload, self.version = weakref.ref(offload), offload.version
        tiers, extents = offload.prefetcher.tiers, [run.extent for run in offload.runs]
        self.memories: Future[list[Bytes]] = tiers.copier.start(lambda: list(map(tiers.view, extents)))


class Prefetcher:
    """The layers of one cache, in the order of a forward pass, and two stages in each of their pools for the pages.

    resident: newest tokens of each row that never leave the pool. unit: bytes of a transfer at least. in_place: pages
    are attended where they lie, if they can be.
    """

    def __init__(self, tiers: Tiers, *, resident: int, unit: int = UNIT, in_place: bool = False) -> None:
        self.tiers, self.resident, self.unit, self.in_place = tiers, resident, unit, in_place
        self.all: list[weakref.ref[LayerOffload]] = []
        self.stages: dict[Any, tuple[_Stage, _Stage]] = {}  # by pool
        self.look: _Look | None = None
        self.warned = False

    @property
    def layers(self) -> list[LayerOffload]:
        """Those whose stores are still there."""
        found = [offload for ref in self.all if (offload := ref()) is not None]
        if len(found) < len(self.all):
            self.all = [weakref.ref(offload) for offload in found]
        return found

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        """The stages go back to their pools, until a layer needs them."""
        for pool, stages in self.stages.items():
            for stage in stages:
                with contextlib.suppress(Exception):
                    stage.wait()
                if stage.offset >= 0:
                    pool.unref(stage.offset)
        self.stages = {}

    def warn(self, error: Exception) -> None:
        if not self.warned:
            warnings.warn(f"KVCache: pages stay where they are, for no other tier takes them: {error}", stacklevel=3)
            self.warned = True

    def _start(self, stage: _Stage, offload: LayerOffload) -> None:
        """Begins to bring the pages of `offload` to a stage that nobody reads."""
        with contextlib.suppress(Exception):
            stage.wait()
        stage.owner = None
        if stage.size < offload.size:
            pool = offload.store.pool
            room = max(layer.size for layer in self.layers if layer.store.pool is pool) * 5 // 4
            fresh = pool.alloc(room)
            if stage.offset >= 0:
                pool.unref(stage.offset)
            stage.offset, stage.size = fresh, room
        stage.pieces = offload.pieces(stage.offset)
        stage.owner, stage.version = offload, offload.version
        for run, where in zip(offload.runs, stage.pieces, strict=True):
            stage.tickets.append(self.tiers.fetch(run.extent, memory_of(offload.store), where))

    def _pair(self, offload: LayerOffload) -> tuple[_Stage, _Stage]:
        """The stages for pages of `offload`."""
        return self.stages.setdefault(offload.store.pool, (_Stage(), _Stage()))

    def _stage_of(self, offload: LayerOffload) -> _Stage | None:
        return next((s for s in self._pair(offload) if s.owner is offload and s.version == offload.version), None)

    def bring(self, offload: LayerOffload) -> _Stage:
        """The stage where the pages of `offload` are now. What failed ahead of time is tried once more."""
        stage = self._stage_of(offload)
        if stage is not None:
            with contextlib.suppress(Exception):
                stage.wait()
        if stage is None or stage.owner is None:
            pair = self._pair(offload)
            stage = stage or next((s for s in pair if s.free(offload)), pair[0])
            self._start(stage, offload)
            stage.wait()
        return stage

    def ahead(self, offload: LayerOffload, stage: _Stage) -> None:
        """Begins with the next layer that has offloaded pages, during the attention of this one."""
        later = self._next(offload)
        if later is None or self._stage_of(later) is not None:
            return
        pair = self._pair(later)
        other = pair[stage is pair[0]]
        with contextlib.suppress(MemoryError):  # no room to be early
            self._start(other, later)

    def _next(self, offload: LayerOffload) -> LayerOffload | None:
        layers = self.layers
        at = layers.index(offload)
        return next((x for x in layers[at + 1 :] + layers[:at] if x.runs), None)

    def views(self, offload: LayerOffload) -> list[Bytes]:
        """The bytes of its runs where they are. Files of the next layer are read meanwhile, for whoever asks next."""
        look, self.look, memories = self.look, None, None
        if look is not None and look.offload() is offload and look.version == offload.version:
            with contextlib.suppress(Exception):  # what failed ahead of time is tried once more
                memories = look.memories.result()
        if memories is None:
            memories = [self.tiers.view(run.extent) for run in offload.runs]
        later = self._next(offload)
        if later is not None and any(run.extent.path for run in later.runs):
            self.look = _Look(later)
        return memories

    def forget(self, offload: LayerOffload) -> None:
        for stage in self.stages.get(offload.store.pool, ()):
            if stage.owner is offload:
                with contextlib.suppress(Exception):
                    stage.wait()
                stage.owner = None
