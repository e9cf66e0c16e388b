"""LayerStore: the pages of a layer, and what must change with them. Changes of rows and slots are one call here."""

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
from .store.window import SlidingWindow

if TYPE_CHECKING:
    from typing_extensions import Self


class LayerStore(checks.ProcessBound, instead="use clone() for a copy, dense() for its tokens"):
    """A PageStore, and what changes with its table: the eviction of a policy or a sliding window, and the pages in
    other tiers.

    page_store: its pages. eviction, sliding, offload: None where the layer has none. held: a list that collects the raw
    pages which appends have sealed, for a rollback; None to collect none.
    """

    page_store: PageStore
    eviction: Eviction | None
    sliding: SlidingWindow | None
    offload: LayerOffload | None
    held: list[_C.Held] | None = None

    def __init__(self, page_store: PageStore, eviction: Eviction | None, sliding: SlidingWindow | None) -> None:
        self.page_store, self.eviction, self.sliding, self.offload = page_store, eviction, sliding, None

    @property
    def seen(self) -> int:
        """Slots so far, pads included."""
        return self.page_store.table.seen

    @property
    def batch(self) -> int:
        """Rows of the block table, one for each sequence."""
        return self.page_store.table.batch

    @property
    def device(self) -> torch.device:
        """Where the pages lie."""
        return self.page_store.device

    def kept(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """(slots, positions): for each row the slots of the stored tokens and their positions, int64 [N_row].

        A position is the slot minus the row's first slot: the RoPE position of the token, for rows without
        pads or with pads on the left.
        """
        slots, rows = self.page_store.stored_slots(), self.page_store.table.rows
        if self.sliding:
            return slots, [self.sliding.pads.positions(b, x) for b, x in enumerate(slots)]
        return slots, [x - int(rows[b, 0, 1]) for b, x in enumerate(slots)]

    def real(self) -> torch.Tensor:
        """bool [B, seen]: True at slots of tokens, evicted ones included, False at pads."""
        if listener := self.eviction or self.sliding:
            return listener.pads.real(self.seen)
        real = torch.zeros(self.batch, self.seen, dtype=torch.bool, device="cpu")
        for row, slots in zip(real, self.page_store.stored_slots(), strict=True):
            row[slots] = True
        return real

    def signature(self) -> bytes | None:
        """Equal for two layers with the same `seen` only if they store the same slots; None if it cannot
        tell."""
        if listener := self.eviction or self.sliding:
            return str(listener.pads.runs).encode()
        return self.page_store.table.rows.tobytes() if self.page_store.table.slots.size == 0 else None

    def present(self) -> contextlib.AbstractContextManager[None]:
        """While an op reads the pages: those of another tier are there."""
        return self.offload.present() if self.offload else contextlib.nullcontext()

    def attach(self, offload: LayerOffload | None) -> None:
        """From now on pages are offloaded by `offload`."""
        self.offload = offload
        if self.eviction:
            self.eviction.offload = offload

    def listeners(self) -> list[Eviction | SlidingWindow]:
        """What is told of changes of the table."""
        return [x for x in (self.eviction, self.sliding) if x]

    def onload(self) -> None:
        """Before the table changes: pages of another tier, and what a device has summed, are back."""
        if self.offload:
            self.offload.onload()
        if self.eviction:
            self.eviction.flush_scores()

    def commit(self, held: _C.Held | None) -> None:
        """What was planned is stored; the pages that it has sealed are `held`."""
        if (
            held and self.held is not None
        ):  # before, as Ctrl-C may come between; on a table put back it restores nothing
            self.held.append(held)
        self.page_store.table.commit()

    def after_append(
        self, q: torch.Tensor, T: int, mask: torch.Tensor | None, lse: torch.Tensor, received: torch.Tensor,
        **attention: Any,
    ) -> None:  # fmt: skip
        """Tells the policy of an append of T slots; q are the queries that attended in the same call."""
        evict = self.eviction
        assert evict is not None
        evict.on_appended(T, mask)
        if q.shape[2]:
            if mask is not None:  # pads ask nothing: see `attend` of the ops
                q = q.masked_fill(~sent(mask, q.device)[:, None, :, None], torch.nan)
            evict.on_attended(q, lse, received, **attention)
        if not evict.deferred:
            evict.evict_or_defer()

    def end_call(self) -> None:
        """A call is over: pages that are behind the window go."""
        if self.sliding and not self.sliding.deferred:
            self.sliding.end_call()

    def take_over(
        self, entries: np.ndarray, rows: np.ndarray, slots: np.ndarray | None, scores: np.ndarray | None, seen: int
    ) -> None:
        """An empty layer takes over pages of its pool, as `_C.Table` has them; their references pass to it."""
        self.page_store.table.restore(entries, rows, slots, scores, seen)
        if self.eviction:
            self.eviction.on_restored()

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """(as JSON takes it, tensors): what a policy at work, or a window, knows next to the table."""
        if self.sliding:
            return self.sliding.state(), {}
        return self.eviction.state() if self.eviction else ({}, {})

    def restore_state(self, plain: dict[str, Any], tensors: dict[str, Any]) -> None:
        """The way back, after the table's. Raises ValueError, KeyError, TypeError for what no layer has written."""
        if self.sliding:
            self.sliding.restore(plain)
        if self.eviction:
            self.eviction.restore(plain, tensors)

    def crop(self, seen: int) -> None:
        """Keeps the first `seen` slots and forgets the rest. Exact back to the last seal; tokens that stay in
        a sealed page keep the codes that they have."""
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
        """New batch: row i is old row index[i] (repeats and reorders rows; pages are shared until
        written)."""
        select_rows([self], index)

    def repeat(self, n: int) -> None:
        """Every row n times, copies side by side."""
        self.select(copies(self.batch, n))

    def on_selected(self, rows: np.ndarray) -> None:
        """Tells the listeners that the table has new rows."""
        for listener in self.listeners():
            listener.on_selected(rows)

    def reset(self, batch: int | None = None) -> None:
        """Forgets all tokens; a new batch size if `batch` is given."""
        if self.offload:
            self.offload.lose()
        self.page_store.table.reset(0 if batch is None else checks.integer("batch", batch, 1))
        for listener in self.listeners():
            listener.reset()

    def clone(self) -> Self:
        """An independent copy that shares this one's pages until one of them writes."""
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
        """Moves the pages to `device` ("cpu", "cuda", "cuda:1"), in place; returns the layer. They are the same bytes
        there, and calls go on with tensors of that device.

        pool: the `_C.Pool` to take pages from there; if None a new one with the same limit. Pages that others share
            stay for them where they are.
        Raises ValueError for what is no device, and for what kernels have found wrong there (`ops.check`); MemoryError.
        """
        there = device_of(device)
        if pool is not None or there != self.device:
            move([self], there, pools.like(self.page_store.pool, there) if pool is None else pool)
        return self

    def real_tokens(self) -> int:
        """Tokens that came, over all rows: stored ones and those that a policy has dropped."""
        return int(self.eviction.real().sum()) if self.eviction else self.page_store.kept_tokens


def select_rows(layers: Sequence[LayerStore], index: Any) -> None:
    """`LayerStore.select` of layers that have one batch: of all, or of none where memory ends."""
    rows = checks.row_index(index, layers[0].batch)
    for layer in layers:
        layer.onload()
    first, *others = (layer.page_store.table for layer in layers)
    first.select(rows, *others)
    for layer in layers:
        layer.on_selected(rows)


def move(layers: Sequence[LayerStore], device: torch.device, pool: Any) -> None:
    """The pages of layers to `pool`, on a device (of `device_of`): those of all, or of none where it fails."""
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
    """All that is evicted from `layers` inside goes, or, if something fails, nothing: their old pages live until the
    end, next to what is made of them."""
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
