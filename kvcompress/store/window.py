"""SlidingWindow: what a layer with a window keeps. Pages that no query can see any more go."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import checks
from .padding import Pads
from .page_store import PageStore
from .serialize import runs_of


class SlidingWindow:
    """Counts the pads of a layer's rows, and lets the pages go that are behind its window.

    A call of up to a page may be a draft: after it the layer can still be cropped to where it began, and after a longer
    one by a page.

    deferred: pages go when `end_call()` is called; else after every append.
    recording: they go at `release` alone; until then the layer can be cropped to where recording began.
    shared: other layers read what the last call saw; it stays until the next one.
    sure: `pads` are all the pads there are (nobody stored one like a token). Without it chunks may begin later than
        slots tell, so that twice as many are kept.
    """

    def __init__(self, store: PageStore, window: int, chunked: bool) -> None:
        checks.integer("window", window, 1)
        for name, x in (("sinks", store.sinks), ("spans", store.spans)):
            if x:
                raise ValueError(f"PagedKV: expected no {name} with a window, got {x!r}")
        if chunked and window % store.page_size:
            raise ValueError(
                f"PagedKV: chunked: expected a window that is a multiple of page_size={store.page_size}, got {window}"
            )
        self.store, self.window, self.chunked = store, window, chunked
        self.deferred = self.recording = self.shared = False
        self.reset()

    def reset(self) -> None:
        """The layer is empty."""
        self.pads, self.sure = Pads(self.store.batch), True
        self.back = 0  # the layer can be cropped to this slot, or to nothing
        self.last = 0  # slots of the last append
        self.next = 0  # no page can go before `release` of this slot

    def clone(self, store: PageStore) -> SlidingWindow:
        """The same for a copy of the layer."""
        twin = object.__new__(SlidingWindow)
        twin.__dict__.update(self.__dict__)
        twin.store, twin.pads = store, self.pads.clone()
        return twin

    def on_appended(self, T: int, own: Tensor | None) -> None:
        """T slots have been appended; own: bool [B, T], False at pads."""
        if own is not None:
            self.pads.append(self.store.seen - T, own)
        self.last = T

    def of_call(self, window: int, queries: int, appends: bool) -> int:
        """What the op gets for the window of a call: the layer's, or a smaller one; -chunk for chunks."""
        if window > self.window or (window and self.chunked):
            raise ValueError(f"PagedKV: window: expected 0, or at most the layer's {self.window}, got {window}")
        most = self.store.seen - self.back
        if not appends and queries > most:
            raise ValueError(f"PagedKV: q: expected at most {most} slots whose window is still there, got {queries}")
        return -self.window if self.chunked else window or self.window

    def first_seen(self, slot: int) -> Tensor:
        """int64 [B]: the first slot that a query at `slot` sees."""
        if not self.chunked:
            return torch.full((self.store.batch,), max(0, slot - self.window + 1), device="cpu")
        first = torch.tensor([self.pads.first(b) for b in range(self.store.batch)], device="cpu")
        return first + (slot - first).clamp(min=0) // self.window * self.window

    def check_crop(self, seen: int) -> None:
        """ValueError if the layer cannot be cropped to `seen` slots."""
        if 0 < seen < self.back:
            raise ValueError(
                f"crop: expected at least {self.back} slots to stay, or none, got {seen}: the window of {self.window} "
                "before it is freed; activate_past_recording() keeps it from then on"
            )

    def on_cropped(self, seen: int) -> None:
        """Slots from `seen` on are forgotten."""
        self.pads.crop(seen)
        self.last = 0
        if seen == 0:
            self.reset()

    def on_selected(self, index: np.ndarray) -> None:
        """Row i is old row index[i]."""
        self.pads.select(index.tolist())
        self.next = 0

    def end_call(self) -> None:
        """What the last call has left behind goes."""
        if not self.recording:
            self.release(self.store.seen - (self.last if self.shared else min(self.last, self.store.page_size)))

    def release(self, back: int) -> None:
        """No query at a slot below `back` will come: what it alone could see goes, page by page."""
        if back < self.next:
            return
        table, window = self.store.table, self.window
        spare = 0 if self.sure or not self.chunked else window - 1
        before = self.first_seen(back - spare).numpy()
        if self.chunked:
            self.next = int(before.min()) + window + spare
        if table.drop(before, window if self.chunked else 0):
            self.back = max(self.back, back)
        if not self.chunked:  # the end of the first page; dead tokens hide it
            plain = table.slots.size == 0
            self.next = int(table.rows[:, :, 1].min()) + self.store.page_size + window - 1 if plain else back + 1

    def state(self) -> dict[str, Any]:
        """What a file keeps of it, as JSON takes it."""
        return {"pads": self.pads.runs, "back": self.back, "last": self.last, "sure": self.sure}

    def restore(self, plain: dict[str, Any]) -> None:
        """The way back, after the table's. Raises ValueError, KeyError, TypeError for what no layer has written."""
        numbers = int(plain["back"]), int(plain["last"])
        if any(not 0 <= n <= self.store.seen for n in numbers):
            raise ValueError(f"expected slots of a window up to {self.store.seen}, got {numbers}")
        self.pads.runs, self.sure = runs_of(self.store, plain), bool(plain["sure"])
        self.back, self.last = numbers
