"""Queries of policies to the core: positions, smoothing in sequence order, and the tokens to keep."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kvcompress import _C, PagedKV
from kvcompress.store.padding import Pads


def lines(rng, batch, heads, width, holes=7):
    """Slots of each line in random order, with holes; positions: slots minus 3."""
    slots = np.full((batch, heads, width), -1, np.int32)
    for line in slots.reshape(-1, width):
        line[rng.permutation(width)[holes:]] = 3 + rng.permutation(5000)[: width - holes]
    return slots, np.where(slots < 0, -1, slots.astype(np.int64) - 3)


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("kernel, largest", [(1, False), (5, False), (7, True), (301, True)])
def test_smoothing_is_pooling_in_the_order_of_the_sequence(alike, kernel, largest):
    rng, B, H, N = np.random.default_rng(0), 2, 3, 90
    slots, positions = lines(rng, B, 1 if alike else H, N)
    x, newest = rng.random((B, H, N), np.float32), np.array([4000, 2500])
    got = _C.smooth(x, slots, positions, newest, kernel, largest)
    for b in range(B):
        for h in range(H):
            line = 0 if alike else h
            order = sorted(np.flatnonzero(slots[b, line] >= 0), key=lambda i, b=b, line=line: slots[b, line, i])
            row = torch.tensor([x[b, h, i] if positions[b, line, i] < newest[b] else 0 for i in order]).double()[None]
            pool = F.max_pool1d if largest else F.avg_pool1d
            want = pool(row, kernel, 1, kernel // 2)[0] if kernel < 300 else row.max().expand(len(order))
            np.testing.assert_allclose(got[b, h, order], want, rtol=1e-5)
            assert not got[b, h, slots[b, line] < 0].any()


@pytest.mark.parametrize("heads, alike", [(3, True), (3, False), (1, True)])
def test_keep_selects_protected_then_best(heads, alike):
    """Compared with sorting in Python: protected tokens, then the best, ties to the younger; mean scores if heads
    share tokens."""
    rng, B, H, N = np.random.default_rng(1), 2, 3, 60
    slots, positions = lines(rng, B, 1 if alike else heads, N)
    scores = rng.integers(0, 6, (B, H, N)).astype(np.float32)
    protect, newest = rng.random((B, heads, N)) < 0.1, np.array([4500, 3000])
    budget = rng.integers(0, N, (B, heads))
    for given in (protect, None):
        got = _C.keep(scores, slots, positions, given, budget, newest, 200)
        for b in range(B):
            for h in range(heads):
                s, p = slots[b, 0 if alike else h], positions[b, 0 if alike else h]
                score = scores[b].mean(0, dtype=np.float64).astype(np.float32) if heads == 1 else scores[b, h]
                sure = {i for i in range(N) if s[i] >= 0 and (
                    p[i] < 200 or p[i] >= newest[b] or (given is not None and given[b, h, i]))}  # fmt: skip
                rest = sorted((i for i in range(N) if s[i] >= 0 and i not in sure), key=lambda i: (-score[i], -s[i]))
                want = sure | set(rest[: max(0, budget[b, h] - len(sure))])
                assert set(np.flatnonzero(got[b, h])) == want, (b, h)


def test_positions_count_no_pads():
    kv = PagedKV(2, 32, batch=2, page_size=16)
    pads = Pads(2)
    for own in (torch.arange(40) >= torch.tensor([[7], [0]]), torch.rand(2, 30) < 0.6):
        kv.append(*torch.randn(2, 2, 2, own.shape[1], 32), own)
        pads.append(kv.seen - own.shape[1], own)
    runs = np.array([(b, *run) for b, row in enumerate(pads.runs) for run in row], np.int64)
    slots, positions = kv.page_store.table.tokens(runs)
    want = kv.kept()[0]
    for b in range(2):
        live = slots[b, 0] >= 0
        assert slots[b, 0][live].tolist() == want[b].tolist()
        assert positions[b, 0][live].tolist() == list(range(len(want[b])))
        assert (positions[b, 0][~live] == -1).all()


def test_padding_costs_a_step_per_run():
    class Counted(list):
        changes = 0

        def append(self, run):
            Counted.changes += 1
            super().append(run)

        def __setitem__(self, at, run):
            Counted.changes += 1
            super().__setitem__(at, run)

    pads, seen = Pads(2), 0
    pads.runs = [Counted(), Counted()]
    slots = torch.arange(1000)
    for own in (slots >= 900, (slots >= 10) & (slots < 990), slots >= 10, slots < 0):
        pads.append(seen, own.expand(2, -1))
        seen += 1000
    assert pads.runs == [[(0, 900), (1000, 1010), (1990, 2010), (3000, 4000)]] * 2
    assert Counted.changes == 2 * 5


def test_bad_arguments():
    rng = np.random.default_rng(0)
    slots, positions = lines(rng, 1, 2, 20)
    x, newest, budget = np.ones((1, 2, 20), np.float32), np.array([30]), np.ones((1, 2), np.int64)
    with pytest.raises(ValueError, match="odd number, got 4"):
        _C.smooth(x, slots, positions, newest, 4, False)
    with pytest.raises(ValueError, match="smooth: expected slots"):
        _C.smooth(x[:, :, :9].copy(), slots, positions, newest, 3, False)
    with pytest.raises(TypeError, match="smooth: newest"):
        _C.smooth(x, slots, positions, None, 3, False)
    with pytest.raises(TypeError, match="keep: scores"):
        _C.keep(None, slots, positions, None, budget, newest, 0)
    with pytest.raises(ValueError, match="keep: expected scores"):
        _C.keep(x, slots, positions, None, budget[:, :1].repeat(3, 1), newest, 0)
    with pytest.raises(ValueError, match="got NaN at token 4 of row 1"):
        slots[0, 1, 4], x[0, 1, 4] = 9, np.nan
        _C.keep(x, slots, positions, None, budget, newest, 0)
    with pytest.raises(ValueError, match="runs: expected"):
        PagedKV(1, 32).page_store.table.tokens(np.zeros((2, 2), np.int64))
