"""Interleaving of heads by a worker: the order of work does not change results."""

import math

import pytest
import torch
from test_attend import BOUND, NO_SEALS, NONE, data, error

from kvcompress import formats, ops

D, GROUP, PAGE = 128, 2, 64


class Heads:
    """int8 pages, every third one raw; heads have their own columns."""

    def __init__(self, columns):
        self.columns, tokens = columns, PAGE * max(columns)
        self.k, self.v = (data(1, len(columns), tokens, D, seed, torch.bfloat16) for seed in (1, 2))
        self.q = data(2, len(columns) * GROUP, 1, D, 3, torch.bfloat16)
        codes = [formats.resolve(name, torch.bfloat16) for name in ("int8", "raw")]
        packed = [ops.pack(self.k, self.v, code, code, PAGE) for code in codes]
        self.arena = torch.cat([x.flatten() for x in packed])
        starts, sizes = (0, packed[0].numel()), [x.shape[3] for x in packed]

        def entry(h, c):
            raw = int(c % 3 == 2)
            return (starts[raw] + (c * len(columns) + h) * sizes[raw]) // 64 << 16 | codes[raw] << 8 | codes[raw]

        self.table = torch.tensor([[-1, *(entry(h, c) for c in range(max(columns)))] for h in range(len(columns))])

    def attend(self, heads, batch=1):
        """out [batch, heads * GROUP, D]"""
        q = self.q.view(2, -1, GROUP, 1, D)[:batch, heads].flatten(1, 2)
        none = torch.empty(batch, len(heads), 0, D, dtype=torch.bfloat16)
        rows = torch.tensor([[[PAGE * self.columns[h], 0] for h in heads]] * batch)
        table = self.table[heads].expand(batch, -1, -1).contiguous()
        out, lse, _ = ops.attend(q, none, none, self.arena, table, rows, NONE.int(), NONE.bool(), NONE, NO_SEALS,
                                 PAGE * max(self.columns), PAGE, 0, 0, 1 / math.sqrt(D), 0.0)  # fmt: skip
        return out.view(batch, -1, D), lse

    def stored(self, h):
        """K and V of a head in float64, [tokens, D] each."""
        n = PAGE * self.columns[h]
        rows = torch.tensor([[[n, 0]]])
        kv = ops.read(torch.empty(0), self.arena, self.table[None, [h]], rows, NONE.int(), 1, D, D, n, PAGE, 0)
        return [x[0, 0].double() for x in kv]

    def wanted(self, b, h):
        k, v = self.stored(h)
        q = self.q[b, GROUP * h : GROUP * (h + 1), 0].double()
        return torch.softmax(q @ k.T / math.sqrt(D), -1) @ v


RAGGED = {3: [7, 0, 40], 8: [33, 1, 0, 64, 9, 10, 64, 2], 12: [20, 3] * 6, 17: [5] * 16 + [70]}


@pytest.mark.parametrize("heads", RAGGED)
def test_heads_of_different_lengths(heads):
    every = Heads(RAGGED[heads])
    out, lse = every.attend(list(range(heads)), batch=2)
    for h, columns in enumerate(RAGGED[heads]):
        part = slice(GROUP * h, GROUP * (h + 1))
        if not columns:
            assert not out[:, part].any() and torch.all(lse[:, part] == -torch.inf)
            continue
        for b in range(2):
            assert error(out[b, part], every.wanted(b, h)) <= BOUND["int8"]
        alone, _ = every.attend([h])
        assert error(out[0, part], alone[0].double()) <= 5e-3  # bf16


@pytest.mark.parametrize("columns", [[130] * 8, RAGGED[8], RAGGED[17]], ids=str)
def test_results_do_not_depend_on_threads(columns):
    every, results = Heads(columns), []
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            results.append(every.attend(list(range(len(columns)))))
    finally:
        torch.set_num_threads(2)
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])
