"""Snapshots of what a layer stores, for comparison with another layer."""

import numpy as np
import torch

from kvcompress import formats
from kvcompress.store import serialize


def state(kv):
    """Slots; formats of pages (their addresses may differ); rows and slots; bytes of sealed pages; all tokens,
    decoded. A list of arrays and tensors."""
    (arrays, pieces), store = serialize.survey(kv.page_store), kv.page_store
    entries, pair = arrays.entries, formats.resolve("raw", store.dtype) * 257
    sealed = [*dict.fromkeys(e >> 16 for e in entries[entries >= 0].tolist() if e & 0xFFFF != pair)]
    kept = serialize.gather(store, pieces[sealed])[0] if sealed else np.empty(0)
    kinds = np.where(entries < 0, entries, entries & 0xFFFF)
    return [kv.seen, kinds, store.table.rows.copy(), store.table.slots.copy(), kept, *(x.cpu() for x in kv.dense())]


def same(a, b):
    """Compares two states."""
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else np.array_equal(x, y)
               for x, y in zip(a, b, strict=True))  # fmt: skip
