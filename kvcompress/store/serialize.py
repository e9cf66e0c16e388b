"""Serialization of pages to one block of memory and back, for files, suspended caches and tiers."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from .. import _C, formats
from . import device_memory
from .device_memory import memory_of, scatter
from .page_store import PageStore

Bytes = NDArray[np.uint8]


class Arrays(NamedTuple):
    """A table without its pool: entries [B, Ht, P] contain page numbers (number << 16 | formats; -1: none)."""

    entries: NDArray[np.int64]
    rows: NDArray[np.int64]
    slots: NDArray[np.int32] | None
    scores: NDArray[np.float32] | None
    seen: int


class Damaged(ValueError):
    """Stored bytes have changed: wrong checksum or size."""


LOST = (MemoryError, torch.OutOfMemoryError, OSError, Damaged)
"""Errors of fetching pages."""


def page_size(store: PageStore, pair: int, column: int, table_heads: int) -> int:
    """Bytes of a page at `column` in formats `pair`. Raises ValueError for unknown formats."""
    tokens = -(-store.sinks // 16) * 16 if column == 0 else store.page_size
    one = _C.page_bytes(pair >> 8, pair & 255, *store.page_dims, tokens)
    return one * (store.num_kv_heads if table_heads == 1 else 1)


def page_sizes(store: PageStore, entries: NDArray[np.int64]) -> NDArray[np.int64]:
    """Bytes of the page of each entry [B, Ht, P]; 0 for entries without a page."""
    sizes = np.zeros(entries.shape, np.int64)
    kinds = formats.pair_of(entries)
    for columns, first in ((slice(0, 1), 0), (slice(1, None), 1)):
        there = entries[..., columns] >= 0
        for pair in np.unique(kinds[..., columns][there]).tolist():
            size = page_size(store, pair, first, entries.shape[1])
            sizes[..., columns][there & (kinds[..., columns] == pair)] = size
    return sizes


def survey(store: PageStore) -> tuple[Arrays, NDArray[np.int64]]:
    """(the table with page numbers; pieces [n, 2]: offset and bytes of page i in the pool)."""
    table = store.table
    used = 1 + int((table.entries >= 0).nonzero()[2].max(initial=0))
    entries = np.ascontiguousarray(table.entries[..., :used])
    sizes, there = page_sizes(store, entries), entries >= 0
    unique, first, number = np.unique(entries[there], return_index=True, return_inverse=True)
    pieces = np.stack([formats.offset_of(unique), sizes[there][first]], 1)
    numbered = np.full(entries.shape, -1, np.int64)
    numbered[there] = number.reshape(-1) << 16 | formats.pair_of(entries[there])
    slots, scores = (x.copy() if x.size else None for x in (table.slots, table.scores))  # type: ignore[attr-defined]
    return Arrays(numbered, table.rows.copy(), slots, scores, table.seen), np.ascontiguousarray(pieces)


def page_bytes(store: PageStore, arrays: Arrays) -> NDArray[np.int64]:
    """Bytes of each page in `arrays`. Raises ValueError unless pages are numbered from 0 without gaps, each with one
    size."""
    entries, there = arrays.entries, arrays.entries >= 0
    numbers, sizes = formats.block_of(entries[there]), page_sizes(store, entries)[there]
    n = int(numbers.max(initial=-1)) + 1
    if n > numbers.size or len(np.unique(entries[there])) != n:
        raise ValueError(
            f"expected pages numbered from 0, each in one format, got {n} numbers for {numbers.size} entries"
        )
    rows = np.repeat(np.arange(len(entries)), there.reshape(len(entries), -1).sum(1))
    if len(np.unique(rows * n + numbers)) != numbers.size:
        raise ValueError("expected each page once in a row, got one twice")
    found = np.zeros(n, np.int64)
    found[numbers] = sizes
    if (found == 0).any() or (found[numbers] != sizes).any():
        raise ValueError("expected pages numbered without gaps, each of one size, got others")
    return found


def place(store: PageStore, arrays: Arrays, memory: Bytes, checksum: int) -> None:
    """Fills the empty `store` with `arrays` and the page bytes in `memory`. Raises MemoryError (pool full), Damaged
    (wrong checksum) or ValueError (arrays that do not match the layer); the store is then still empty."""
    pool, sizes = store.pool, page_bytes(store, arrays)
    if int(sizes.sum()) != memory.size:
        raise ValueError(f"expected {int(sizes.sum())} bytes of pages, got {memory.size}")
    offsets, more, refs = np.full(len(sizes), -1), np.empty(0, np.int64), 0
    try:
        pool.take(sizes, offsets)
        if scatter(memory_of(store), np.ascontiguousarray(np.stack([offsets, sizes], 1)), memory) != checksum:
            raise Damaged(f"expected the {memory.size} bytes that were written, got others (wrong checksum)")
        there = arrays.entries >= 0
        numbers = formats.block_of(arrays.entries[there])
        entries = arrays.entries.copy()
        entries[there] = formats.entry_of(offsets[numbers], formats.pair_of(entries[there]))
        more = np.repeat(offsets, np.bincount(numbers, minlength=len(sizes)) - 1)
        for offset in more.tolist():
            pool.ref(offset)
            refs += 1
        store.table.restore(entries, arrays.rows, arrays.slots, arrays.scores, arrays.seen)
    except BaseException:
        if not (store.table.entries >= 0).any():  # else Ctrl-C came after `restore`, and the pages are the table's
            pool.drop(np.concatenate([offsets[offsets >= 0], more[:refs]]))
        raise


def gather(store: PageStore, pieces: NDArray[np.int64]) -> tuple[Bytes, int]:
    """(bytes of the pieces, their checksum)."""
    memory = np.empty(int(pieces[:, 1].sum()), np.uint8)
    return memory, device_memory.gather(memory_of(store), pieces, memory)


def runs_of(store: PageStore, plain: dict[str, Any]) -> list[list[tuple[int, int]]]:
    """Runs of padding from a file. Raises ValueError if they do not match `store`."""
    runs = [[(int(a), int(b)) for a, b in row] for row in plain["pads"]]
    if len(runs) != store.batch or any(not 0 <= a < b <= store.seen for row in runs for a, b in row):
        raise ValueError(f"expected runs of padding for {store.batch} rows below slot {store.seen}, got others")
    return runs
