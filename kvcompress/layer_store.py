"""LayerStore: the pages of a layer and the state that must change with them: eviction, window, offloaded pages. Each
change of rows or slots (crop, select, clone, ...) is one call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from . import _C, checks, ops
from .eviction.eviction import Eviction
from .offload.prefetch import LayerOffload
from .store import pools
from .store.device_memory import sent
from .store.page_store import PageStore
from .store.pools import device_of
from .store.sequence import copies
from .store.window import AttentionWindow

if TYPE_CHECKING:
    from typing_extensions import Self


class LayerStore(checks.ProcessBound, instead="use clone() for a copy, dense() for its tokens"):
    """A PageStore with the state that changes with its block table: a policy's eviction or a sliding window, and
    offloaded pages.

    Attributes: page_store; eviction, sliding, offload: None if the layer has none; held: a list that collects the raw
    pages that appends seal, for a rollback, or None.
    """

    held: list[_C.Held] | None = None

    def __init__(self, page_store: PageStore, eviction: Eviction | None, sliding: AttentionWindow | None) -> None:
        self.page_store, self.eviction, self.sliding = page_store, eviction, sliding
        self.offload: LayerOffload | None = None

    @property
    def seen(self) -> int:
        """Number of slots so far, padding included."""
        return self.page_store.table.seen

    @property
    def batch(self) -> int:
        """Number of rows (sequences)."""
        return self.page_store.table.batch

    @property
    def device(self) -> torch.device:
        """The device of the pages."""
        return self.page_store.device

    def kept(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """(slots, positions) of the stored tokens: for each row int64 [N_row].

        A position is the slot minus the first slot of the row, which is the token's RoPE position unless the row has
        padding other than on the left.
        """
        slots, rows = self.page_store.stored_slots(), self.page_store.table.rows
        if self.sliding:
            return slots, [self.sliding.pads.positions(b, x) for b, x in enumerate(slots)]
        return slots, [x - int(rows[b, 0, 1]) for b, x in enumerate(slots)]

    def real(self) -> torch.Tensor:
        """bool [B, seen]: True at tokens, evicted ones included, False at padding."""
        if listener := self.eviction or self.sliding:
            return listener.pads.real(self.seen)
        real = torch.zeros(self.batch, self.seen, dtype=torch.bool, device="cpu")
        for row, slots in zip(real, self.page_store.stored_slots(), strict=True):
            row[slots] = True
        return real

    def signature(self) -> bytes | None:
        """A value that two layers with the same `seen` share only if they store the same slots; None if unknown."""
        if listener := self.eviction or self.sliding:
            return str(listener.pads.runs).encode()
        return self.page_store.table.rows.tobytes() if self.page_store.table.slots.size == 0 else None

    def present(self) -> contextlib.AbstractContextManager[None]:
        """Context manager for ops that read the pages: offloaded pages are fetched."""
        return self.offload.present() if self.offload else contextlib.nullcontext()

    def attach(self, offload: LayerOffload | None) -> None:
        """Sets what offloads the pages of this layer."""
        self.offload = offload
        if self.eviction:
            self.eviction.offload = offload

    def listeners(self) -> list[Eviction | AttentionWindow]:
        """The objects to notify of changes of the table."""
        return [x for x in (self.eviction, self.sliding) if x]

    def onload(self) -> None:
        """Fetches offloaded pages, and sums accumulated on a device, before the table changes."""
        if self.offload:
            self.offload.onload()
        if self.eviction:
            self.eviction.flush_scores()

    def commit(self, held: _C.Held | None) -> None:
        """Commits the planned append; `held` are the raw pages that it sealed."""
        if (
            held and self.held is not None
        ):  # before, as Ctrl-C may come between; on a table put back it restores nothing
            self.held.append(held)
        self.page_store.table.commit()

    def after_append(
        self, q: torch.Tensor, T: int, mask: torch.Tensor | None, lse: torch.Tensor, received: torch.Tensor,
        **attention: Any,
    ) -> None:  # fmt: skip
        """Notifies the policy of an append of T slots; q: the queries that attended in the same call."""
        evict = self.eviction
        assert evict is not None
        evict.on_appended(T, mask)
        if q.shape[2]:
            if mask is not None:  # queries of padding do not count: see `attend` of the ops
                q = q.masked_fill(~sent(mask, q.device)[:, None, :, None], torch.nan)
            evict.on_attended(q, lse, received, **attention)
        if not evict.deferred:
            evict.evict_or_defer()

    def end_call(self) -> None:
        """Ends a call: frees the pages outside of the window."""
        if self.sliding and not self.sliding.deferred:
            self.sliding.end_call()

    def take_over(
        self, entries: np.ndarray, rows: np.ndarray, slots: np.ndarray | None, scores: np.ndarray | None, seen: int
    ) -> None:
        """Fills an empty layer with pages of its pool, described as by `_C.Table`; takes over their references."""
        self.page_store.table.restore(entries, rows, slots, scores, seen)
        if self.eviction:
            self.eviction.on_restored()

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """(JSON-serializable dict, tensors): the state of a policy or window outside of the table."""
        if self.sliding:
            return self.sliding.state(), {}
        return self.eviction.state() if self.eviction else ({}, {})

    def restore_state(self, plain: dict[str, Any], tensors: dict[str, Any]) -> None:
        """Restores what `state` returned, after the table. Raises ValueError, KeyError or TypeError for other data."""
        if self.sliding:
            self.sliding.restore(plain)
        if self.eviction:
            self.eviction.restore(plain, tensors)

    def crop(self, seen: int) -> None:
        """Keeps the first `seen` slots and removes the rest. Exact back to the last sealed page; tokens that remain in
        a sealed page stay quantized."""
        seen = checks.integer("seen", seen, 0)
        if self.sliding:
            self.sliding.check_crop(seen)
        if self.offload:
            self.offload.before_crop(seen)
        if self.eviction:
            self.eviction.flush_scores()
        self.page_store.table.crop(seen)
        for listener in self.listeners():
            listener.on_cropped(seen)

    def select(self, index: Any) -> None:
        """Row i of the new batch is row index[i] of the old one: int64 [rows], or bool [B]. Repeated rows share pages
        until one is written."""
        select_rows([self], index)

    def repeat(self, n: int) -> None:
        """Repeats each row n times, as torch.repeat_interleave."""
        self.select(copies(self.batch, n))

    def on_selected(self, rows: np.ndarray) -> None:
        """Notifies the listeners of new rows of the table."""
        for listener in self.listeners():
            listener.on_selected(rows)

    def reset(self, batch: int | None = None) -> None:
        """Removes all tokens. batch: new batch size; None keeps it."""
        (self.offload or self.page_store.table).reset(0 if batch is None else checks.integer("batch", batch, 1))
        for listener in self.listeners():
            listener.reset()

    def clone(self) -> Self:
        """An independent copy; both share pages until one of them writes (copy-on-write)."""
        self.onload()
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy.page_store, copy.offload = self.page_store.clone(), None
        if self.eviction:
            copy.eviction = self.eviction.clone(copy.page_store)
        if self.sliding:
            copy.sliding = self.sliding.clone(copy.page_store)
        return copy

    def __copy__(self) -> Self:
        return self.clone()

    def __deepcopy__(self, memo: dict) -> Self:
        return self.clone()

    def to(self, device: torch.device | str, *, pool: Any = None) -> Self:
        """Moves the pages to `device` ("cpu", "cuda", "cuda:1") in place, byte for byte; returns the layer. Later calls
        take tensors of that device.

        pool: the `_C.Pool` to allocate pages from there. Default: a new one with the same limit. Pages shared with
            other layers are copied.
        Raises ValueError for an invalid device and for errors that kernels have recorded (`ops.check`); MemoryError.
        """
        there = device_of(device)
        if pool is not None or there != self.device:
            move([self], there, pools.like(self.page_store.pool, there) if pool is None else pool)
        return self

    def real_tokens(self) -> int:
        """Number of tokens so far, summed over rows: stored and evicted ones, without padding."""
        return int(self.eviction.real().sum()) if self.eviction else self.page_store.kept_tokens


def select_rows(layers: Sequence[LayerStore], index: Any) -> None:
    """`LayerStore.select` of several layers with the same batch: of all of them, or of none (MemoryError)."""
    rows = checks.row_index(index, layers[0].batch)
    for layer in layers:
        layer.onload()
    first, *others = (layer.page_store.table for layer in layers)
    first.select(rows, *others)
    for layer in layers:
        layer.on_selected(rows)


def move(layers: Sequence[LayerStore], device: torch.device, pool: Any) -> None:
    """Moves the pages of layers to `pool` on `device` (a result of `device_of`): of all layers, or of none."""
    for place in {layer.device for layer in layers}:
        ops.check(place)
    moved = []
    for layer in layers:
        layer.onload()
        scores = layer.eviction is not None and layer.eviction.policy.needs_attention
        store = pools.moved(layer.page_store, device, pool, scores)
        evict = layer.eviction and layer.eviction.clone(layer.page_store)
        if evict:
            evict.to(device)
        moved.append((store, evict))
    for layer, (store, evict) in zip(layers, moved, strict=True):
        if layer.eviction and evict:
            layer.eviction.__dict__.update(evict.__dict__)
        layer.page_store.__dict__.update(store.__dict__)


@contextlib.contextmanager
def all_or_nothing(layers: Sequence[LayerStore]) -> Iterator[None]:
    """Context manager that reverts all evictions from `layers` inside it if one fails. Old pages are kept until the
    end, next to the new ones."""
    before = []
    for layer in layers:
        layer.onload()
        evict = layer.eviction and layer.eviction.clone(layer.page_store)
        before.append((layer, layer.page_store.table.clone(), evict))
    try:
        yield
    except BaseException:
        for layer, table, eviction in before:
            layer.page_store.table, layer.eviction = table, eviction
            layer.page_store.forget_views()
        raise
