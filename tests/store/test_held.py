"""_C.Held: keeps the raw pages that an append seals until the append can no longer be rolled back."""

import numpy as np
import pytest
import torch

from kvcompress import _C, PagedKV

NOTHING = np.zeros((1, 1, 1), np.int64)


def sealing(T=40, chunk=1):
    """A layer whose last call sealed a page, the held pages, and K before that call."""
    kv, before = PagedKV(2, 32, key="int4", page_size=16, dtype=torch.float16), None
    kv.held = []
    x = torch.randn(1, 2, T, 32, dtype=torch.float16)
    for part in x.split(chunk, 2):
        kv.held.clear()
        before = kv.dense()[0] if kv.seen else None
        kv.append(part, part)
        if kv.held and kv.seen > 24:
            return kv, kv.held, before
    raise AssertionError("no page was sealed")


def restore(held):
    for one in held:
        one.restore()


@pytest.mark.parametrize("chunk", [1, 3, 20])
def test_restore_puts_the_raw_pages_back(chunk):
    kv, held, before = sealing(60, chunk)
    used = kv.page_store.pool.stats()["used"]
    sealed = kv.page_store.table.entries.copy()
    restore(held)
    assert torch.equal(kv.dense()[0][:, :, : before.shape[2]], before)
    restore(held)  # the sealed ones, which are now held
    assert np.array_equal(kv.page_store.table.entries, sealed) and kv.page_store.pool.stats()["used"] == used
    held.clear()
    kv.page_store.pool.check()
    assert kv.page_store.pool.stats()["used"] < used


@pytest.mark.parametrize("change", [lambda kv: kv.crop(0), lambda kv: kv.crop(18), lambda kv: kv.reset(),
                                    lambda kv: kv.reset(3)])  # fmt: skip
def test_freed_pages_are_not_restored(change):
    kv, held, _ = sealing()
    change(kv)
    now = kv.page_store.table.entries.copy()
    restore(held)
    assert np.array_equal(kv.page_store.table.entries, now)
    held.clear()
    kv.page_store.pool.check()
    assert kv.page_store.pool.stats()["used"] == 0 or kv.seen


@pytest.mark.parametrize("error,match,given", [
    (ValueError, r"seals: expected \[n, 2\]", lambda t: (np.zeros((1, 3), np.int64),)),
    (TypeError, "Held: seals", lambda t: (np.zeros((1, 2), np.int32),)),
    (ValueError, "expected entries of slots in use", lambda t: (np.array([[1 << 60, t.entries.max()]]),)),
    (ValueError, "before: expected the cells", lambda t: (np.array([[0, t.entries.max()]]), NOTHING)),
])  # fmt: skip
def test_bad_inputs(error, match, given):
    table = sealing()[0].page_store.table
    with pytest.raises(error, match=match):
        _C.Held(table, *given(table))
