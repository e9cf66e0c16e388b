"""A whole layer on CUDA's kernels, run on the host: plan, append, attend, evict, read, byte-identical to the CPU."""

import contextlib

import numpy as np
import pytest
import torch
from cuda_twin import SCORE, Twin
from test_attend import error

from kvcompress import _C, PagedKV, ops, policies
from kvcompress.store.device_memory import Mirror


@contextlib.contextmanager
def on(twin):
    """The ops within layers are CUDA's."""
    names = ("attend", "read", "compact", "pack")
    before = {name: getattr(ops, name) for name in names}
    for name in names:
        setattr(ops, name, getattr(twin, name))
    PagedKV.op = staticmethod(twin.attend)
    try:
        yield
    finally:
        PagedKV.op = staticmethod(before["attend"])
        for name, op in before.items():
            setattr(ops, name, op)


def state(kv):
    table = kv.page_store.table
    return [kv.page_store.pool.arena.copy(), table.entries.copy(), table.rows.copy(), table.slots.copy()]


@pytest.mark.parametrize(
    "key,value",
    [("int8", "int4"), ("kivi4", "nvfp4"), *(pytest.param(x, y, marks=pytest.mark.full)
     for x, y in (("int4", "int2"), ("raw", "raw")))],
)  # fmt: skip
@pytest.mark.parametrize("page_size", [16, pytest.param(32, marks=pytest.mark.full)])
def test_a_life_with_evictions(key, value, page_size):
    """Appends, evictions shared by the heads and per head, crops: the stored bytes equal the CPU's."""
    layers = [
        PagedKV(
            2,
            32,
            key=key,
            value=value,
            batch=2,
            page_size=page_size,
            policy=policies.KNorm(budget=budget),
            pool=_C.Pool(),
        )
        for budget in (70, 70)
    ]
    layers[1].page_store.steps = False  # otherwise a sealing call plans twice, and its pages have other addresses
    generator = torch.Generator().manual_seed(1)
    for i, T in enumerate((120, 1, 1, 40, 17, 1, 70)):
        q, k, v = (torch.randn(2, h, T, 32, generator=generator) for h in (4, 2, 2))
        mask = torch.rand(2, T, generator=generator) < 0.9 if i in (0, 3) else None
        results = []
        for kv, where in zip(layers, (on(Twin()), contextlib.nullcontext()), strict=True):
            with where:
                results.append(kv.attend(q, k, v, mask=mask))
                results[-1] = (*results[-1], *kv.dense())
                if i == 4:
                    kv.crop(kv.seen - 9)
        assert error(results[0][0], results[1][0].double()) <= 2e-2
        assert all(torch.equal(a, b) for a, b in zip(results[0][2:], results[1][2:], strict=True))
        for a, b in zip(*(state(kv) for kv in layers), strict=True):
            assert np.array_equal(a, b), i


@pytest.mark.parametrize("key,value,page_size", [("int8", "int4", 64), ("raw", "raw", 64), ("int8", "int4", 16)])
def test_table_on_host_pages_in_device_arena(key, value, page_size):
    """As on a GPU: the table on the host, pages in a separate arena that grows. Beams that share open pages, which a
    call may fill and seal at once."""
    layers = [PagedKV(2, 32, key=key, value=value, batch=2, page_size=page_size, pool=_C.Pool()) for _ in range(2)]
    far = layers[0]
    far.page_store.mirror = Mirror(far.page_store.pool, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)

    def both(act):
        with on(Twin()):
            results = [act(far)]
        return [*results, act(layers[1])]

    for T in (3, 90, 1, 1, 1, 70, 1, 1):
        q, k, v = (torch.randn(2, h, T, 32, generator=generator) for h in (4, 2, 2))
        got, want = both(lambda kv: kv.attend(q, k, v))  # noqa: B023
        assert error(got[0], want[0].double()) <= 2e-2
        both(lambda kv: kv.select([1, 0] if T == 70 else [1, 1]))  # noqa: B023
        for a, b in zip(*both(lambda kv: kv.dense()), strict=True):
            assert torch.equal(a, b)
    copies = both(lambda kv: kv.clone())
    both(lambda kv: kv.crop(kv.seen - 1))
    q, k, v = (torch.randn(2, h, 1, 32, generator=generator) for h in (4, 2, 2))
    both(lambda kv: kv.attend(q, k, v))
    with on(Twin()):
        dense = [kv.dense() for kv in (copies[0], far)]
    assert all(torch.equal(a, b) for a, b in zip(dense[0], copies[1].dense(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(dense[1], layers[1].dense(), strict=True))


def test_other_devices_are_refused():
    with pytest.raises(ValueError, match="device: expected cpu"):
        PagedKV(1, 32, device="cuda" if not torch.cuda.is_available() else "meta")


@pytest.mark.parametrize("width", [1, 7, 300, 1500])
def test_the_same_tokens_are_chosen(width):
    generator = torch.Generator().manual_seed(width)
    scores = torch.randn(2, 3, width, generator=generator)
    scores[0] = scores[0].round()  # ties
    scores[1, 0, ::3] = 0
    scores[1, 0, 1::3] = -0.0
    scores[1, 1, 0] = torch.inf
    scores[1, 2] *= 1e-40
    slots = torch.stack([torch.randperm(width, generator=generator) for _ in range(6)]).view(2, 3, width).int()
    slots[torch.rand(2, 3, width, generator=generator) < 0.2] = -1
    protect = torch.rand(2, 3, width, generator=generator) < 0.1
    for budget in (0, 1, width // 2, width, width + 9):
        line = torch.full((2, 3), budget)
        for p in (None, protect):
            got = Twin().select(scores, slots, p, line)
            assert torch.equal(got, ops.select(scores, slots, p, line))


def test_nan_scores_are_flagged():
    twin = Twin()
    scores = torch.zeros(1, 1, 9)
    scores[0, 0, 4] = torch.nan
    twin.select(scores, torch.arange(9).view(1, 1, 9).int(), None, torch.ones(1, 1, dtype=torch.int64))
    assert twin.flags == SCORE


def test_invalid_moves_are_flagged_and_ignored():
    arena = torch.randint(0, 256, (4096,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    good = 3 << 8 | 3
    moves = torch.tensor(
        [[0, good, 99, good, 0, 16], [1, -1, 0, good, 0, 16], [2, good, 0, (1 << 40) | good, 0, 16],
         [3, good, 0, good, 16, 16], [4, good, 0, good, 0, 24], [5, good, -1, 3 << 8 | 4, -1, 16],
         [6, good, -1, good, 0, 16], [7, good, -1, (1 << 16) | good, 0, 16]]
    )  # fmt: skip
    before, twin = arena.clone(), Twin()
    with pytest.raises(AssertionError):
        twin.compact(arena, moves, 1, 1, 32, 32, 16, 0)
    assert twin.flags and torch.equal(arena, before)
