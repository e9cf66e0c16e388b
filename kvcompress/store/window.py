"""AttentionWindow: frees the pages outside of the window of a sliding-window or chunked layer."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import checks
from .padding import Pads
from .page_store import PageStore
from .serialize import runs_of


class AttentionWindow:
    """Tracks the padding of a layer's rows, and frees the pages outside of its window.

    A call of up to page_size tokens may be a draft: the layer can be cropped to its start. After a longer call, it can
    be cropped by a page.

    deferred: pages are freed in `end_call()` instead of after every append.
    recording: pages are freed by `release` only; until then the layer can be cropped to the start of the recording.
    shared: other layers read the pages of the last call; they are freed at the next call.
    sure: `pads` contains all padding (none was stored as tokens). Without it chunks may start later than slots tell, so
        twice as many slots are kept.
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
        """The layer is empty again."""
        self.pads, self.sure = Pads(self.store.batch), True
        self.back = 0  # smallest slot the layer can be cropped to, except 0
        self.last = 0  # slots of the last append
        self.next = 0  # no page can be freed before `release` of this slot

    def clone(self, store: PageStore) -> AttentionWindow:
        """A copy for a copy of the layer."""
        twin = copy.copy(self)
        twin.store, twin.pads = store, copy.deepcopy(self.pads)
        return twin

    def on_appended(self, T: int, own: Tensor | None) -> None:
        """T slots were appended; own: bool [B, T], False at padding."""
        if own is not None:
            self.pads.append(self.store.seen - T, own)
        self.last = T

    def of_call(self, window: int, queries: int, appends: bool) -> int:
        """The op's `window` for a call: the layer's, or a smaller one given; negative for chunks."""
        if window > self.window or (window and self.chunked):
            raise ValueError(f"PagedKV: window: expected 0, or at most the layer's {self.window}, got {window}")
        most = self.store.seen - self.back
        if not appends and queries > most:
            raise ValueError(f"PagedKV: q: expected at most {most} queries whose window is still stored, got {queries}")
        return -self.window if self.chunked else window or self.window

    def first_seen(self, slot: int) -> Tensor:
        """The first slot that a query at `slot` sees: int64 [B]."""
        if not self.chunked:
            return torch.full((self.store.batch,), max(0, slot - self.window + 1), device="cpu")
        first = torch.tensor([self.pads.first(b) for b in range(self.store.batch)], device="cpu")
        return first + (slot - first).clamp(min=0) // self.window * self.window

    def check_crop(self, seen: int) -> None:
        """Raises ValueError if the layer cannot be cropped to `seen` slots."""
        if 0 < seen < self.back:
            raise ValueError(
                f"crop: expected to keep 0 or at least {self.back} slots, got {seen}: earlier slots that a window of "
                f"{self.window} needs were freed; call activate_past_recording() before adding tokens to be cropped"
            )

    def on_cropped(self, seen: int) -> None:
        """Slots from `seen` on were removed."""
        self.pads.crop(seen)
        self.last = 0
        if seen == 0:
            self.reset()

    def on_selected(self, index: np.ndarray) -> None:
        """Row i is now the old row index[i]."""
        self.pads.select(index.tolist())
        self.next = 0

    def end_call(self) -> None:
        """Ends a call: frees the pages that left the window."""
        if not self.recording:
            self.release(self.store.seen - (self.last if self.shared else min(self.last, self.store.page_size)))

    def release(self, back: int) -> None:
        """Frees the pages that only queries at slots below `back` could see."""
        if back < self.next:
            return
        table, window = self.store.table, self.window
        spare = 0 if self.sure or not self.chunked else window - 1
        before = self.first_seen(back - spare).numpy()
        if self.chunked:
            self.next = int(before.min()) + window + spare
        if table.drop(before, window if self.chunked else 0):
            self.back = max(self.back, back)
        if not self.chunked:  # the end of the first page; unknown with evicted tokens
            plain = table.slots.size == 0
            self.next = int(table.rows[:, :, 1].min()) + self.store.page_size + window - 1 if plain else back + 1

    def state(self) -> dict[str, Any]:
        """JSON-serializable state."""
        return {"pads": self.pads.runs, "back": self.back, "last": self.last, "sure": self.sure}

    def restore(self, plain: dict[str, Any]) -> None:
        """Restores what `state` returned, after the table. Raises ValueError, KeyError or TypeError for other data."""
        numbers = int(plain["back"]), int(plain["last"])
        if any(not 0 <= n <= self.store.seen for n in numbers):
            raise ValueError(f"expected slots of a window up to {self.store.seen}, got {numbers}")
        self.pads.runs, self.sure = runs_of(self.store, plain), bool(plain["sure"])
        self.back, self.last = numbers
