"""What puts a layer back as it was before a forward pass that failed: the raw pages that it sealed."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import formats


class Held:
    """Raw pages that a plan of `table` seals, and their cells (rows, heads, columns). They live as long as this object;
    `restore` puts them back and cannot fail. before: entries before a plan that may have sealed copies of its own."""

    entries = np.empty(0, np.int64)  # of one that was never begun, too

    def __init__(self, pool: Any, table: Any, seals: np.ndarray, before: np.ndarray | None) -> None:
        self.pool, self.table, raw_of = pool, table, dict(seals[:, ::-1].tolist())
        self.cells = np.isin(table.entries, seals[:, 1]).nonzero()
        sealed = table.entries[self.cells].tolist()
        entries = np.array([raw_of[x] for x in sealed]) if before is None else before[self.cells]
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
