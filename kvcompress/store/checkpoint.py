"""What puts a layer back as it was before a forward pass that failed: the raw pages that it sealed."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from .. import formats
from .page_store import PageStore


class Held:
    """Raw pages of a table that its next append seals: cells (rows, columns) of its entries. The pages live as
    long as this object; `restore` puts them into their cells again and cannot fail."""

    entries = np.empty(0, np.int64)  # of one that was never begun, too

    def __init__(self, pool: Any, table: Any, lines: np.ndarray, columns: np.ndarray) -> None:
        heads = table.entries.shape[1]
        self.pool, self.table, self.cells = pool, table, (lines // heads, lines % heads, columns)
        entries = table.entries[self.cells]
        for entry in entries.tolist():
            pool.ref(formats.offset_of(entry))
        self.entries = entries

    def restore(self) -> None:
        table = self.table.entries
        now = table[self.cells]
        table[self.cells], self.entries = self.entries, now  # the references go with the entries

    def __del__(self) -> None:
        for entry in self.entries.tolist():
            self.pool.unref(formats.offset_of(entry))


def hold(store: PageStore, T: int, pads: bool) -> tuple[Held | None, int]:
    """(the raw pages that an append of T tokens to `store` seals, None if there are none; the slot up to which
    appends after it seal none). With pads among the tokens it may seal fewer.

    Most decode steps end before that slot and do nothing here. An append that seals nothing is taken back by a
    crop, to the byte; so is every append to raw or direct layers.
    """
    if store.seen == 0:
        store.place_spans(T)
    table, raw, size, newest = store.table, formats.resolve("raw", store.dtype), store.page_size, store.residual_length
    # Formats that pages are sealed in: of the spans, by the end of their tokens, then of all behind them.
    sealed = [(end, key << 8 | value) for end, key, value in table.spans]
    key, value = store.codes
    sealed.append((sys.maxsize, key << 8 | value))
    if store.direct or all(codes == raw << 8 | raw for _, codes in sealed):
        return None, sys.maxsize
    entries, stored = table.entries.reshape(-1, table.entries.shape[2]), table.rows[:, :, 0].reshape(-1)
    is_raw = formats.pair_of(entries) == (raw << 8 | raw)
    is_raw[:, 0] = False  # sinks are never sealed
    ends = store.sinks + size * np.arange(entries.shape[1])
    if len(sealed) > 1:
        spans = np.searchsorted([end for end, _ in sealed], ends - size, "right")
        is_raw &= np.array([codes for _, codes in sealed])[spans] != (raw << 8 | raw)
    # The core's rule: a page is sealed if it was full and left `newest` behind before the call, or if a call longer
    # than a page leaves it `newest`, and a page, behind.
    sealed_to = stored - newest
    if size < T:
        sealed_to = np.maximum(sealed_to, stored + T - max(size, newest))
    seals = is_raw & (ends <= sealed_to[:, None])
    # After the call: the oldest raw page of a row, or the one that its next token opens.
    upcoming = 1 + np.maximum(stored - store.sinks, 0) // size
    oldest = np.where(is_raw.any(1), is_raw.argmax(1), upcoming) + (0 if pads else seals.sum(1))
    room = int((store.sinks + size * oldest - stored).min()) + newest - (newest >= size)
    rows, columns = seals.nonzero()
    return Held(store.pool, table, rows, columns) if len(rows) else None, store.seen + room
