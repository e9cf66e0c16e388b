"""Arguments that no valid caller passes: overlapping memory, inconsistent indices."""

from __future__ import annotations

import itertools
import threading
import time

import numpy as np
import pytest
import torch
from hostile import GUARD, KINDS, Changing, arena_in_guards, attempt, moved, one, written
from test_ops import CALLS

from kvcompress import _C, formats, ops

KIVI4 = formats.CODES["kivi4"]
RANDOM = 150  # calls of each kind per run; `make fuzz` runs more


def many_to_one(n: int, page: int) -> list[list[int]]:
    return [[0, 0 << 16 | KIVI4 << 8 | KIVI4, i % 16, page << 16 | KIVI4 << 8 | KIVI4, i % 16, 16] for i in range(n)]


@pytest.mark.parametrize("n", [17, 300, 600, 1000])
def test_a_page_takes_no_more_moves_than_tokens(n):
    size = _C.page_bytes(KIVI4, KIVI4, 256, 256, 16)
    whole, arena = arena_in_guards(torch.zeros(2 * size, dtype=torch.uint8), 0)
    before = whole.clone()
    with pytest.raises(ValueError, match="moves: expected one move to a token, got two to token 0"):
        ops.compact(arena, torch.tensor(many_to_one(n, size // 64)), 1, 1, 256, 256, 16, 0)
    assert torch.equal(whole, before)
    ops.compact(arena, torch.tensor(many_to_one(16, size // 64)), 1, 1, 256, 256, 16, 0)


def test_moves_that_are_impossible_together():
    int8 = formats.CODES["int8"]
    size, token = _C.page_bytes(KIVI4, KIVI4, 64, 64, 16), _C.page_bytes(int8, int8, 64, 64, 16)
    pages = [(i * max(size, token) // 64 + i) << 16 for i in range(6)]
    anew, plain = ([p | f << 8 | f for p in pages] for f in (KIVI4, int8))
    arena = torch.zeros(8 * max(size, token), dtype=torch.uint8)
    fine = [[0, anew[0], 3, anew[1], 5, 16], [0, anew[0], 4, anew[1], 6, 16], [1, plain[2], 0, plain[3], 2, 16]]
    ops.compact(arena, torch.tensor(fine), 1, 1, 64, 64, 16, 0)
    before = arena.clone()
    for change, text in (
        ([*fine, [1, plain[2], 1, plain[3], 2, 16]], "one move to a token"),  # two moves to one place
        ([*fine, [2, anew[0], 1, anew[1], 9, 16]], "share no bytes"),  # two lines to one page
        ([*fine, [2, plain[2], 1, plain[3], 9, 16]], "share no bytes"),
        ([*fine, [2, plain[2], 1, plain[3] + (1 << 16), 9, 16]], "share no bytes"),  # to half of it
        ([fine[0], fine[2], [0, anew[0], 4, anew[1], 6, 16]], "share no bytes"),  # a re-encoded page in two runs
        ([*fine, [2, anew[1], 1, anew[4], 9, 16]], "nothing else writes"),  # read while it is written
        ([*fine, [2, plain[3], 0, plain[5], 1, 16]], "nothing else writes"),
    ):
        with pytest.raises(ValueError, match=f"compact: moves: expected .*{text}"):
            ops.compact(arena, torch.tensor(change), 1, 1, 64, 64, 16, 0)
        assert torch.equal(arena, before)


def test_lengths_change_during_attend_varlen():
    """Lengths are read once, so checked and used values are the same. A sequence of two passes becomes one token
    shorter while the first pass attends to 32K tokens; the result is that of one of the two lengths."""
    H, D, P, blocks, new = 8, 64, 64, 512, 69
    shape, code = formats.page_geometry("int4", 1, D, dtype=torch.float32), formats.CODES["int4"]
    none, end = torch.empty(0, dtype=torch.int32), (blocks - 1) * P + 10
    q, kv = torch.randn(new, H, D), torch.randn(2, new, 1, D)

    def call(lens: torch.Tensor) -> torch.Tensor:
        cache = torch.zeros(blocks, shape.page_bytes, dtype=torch.uint8)
        residual, out = torch.zeros(1, shape.residual_bytes, dtype=torch.uint8), torch.empty(new, H, D)
        ops.attend_varlen(
            q, *kv, cache, torch.arange(blocks, dtype=torch.int32)[None], residual, torch.zeros(1, 1).int(),
            torch.tensor([0, new]).int(), lens, none, none, torch.empty(0), out, torch.empty(0), torch.zeros(1).int(),
            code << 8 | code, P, P, P, 0, 0.1, 0.0,
        )  # fmt: skip
        return out

    began = time.perf_counter()
    possible = [call(torch.tensor([end - i]).int()) for i in range(2)]
    took = (time.perf_counter() - began) / 2
    assert not torch.equal(*possible)
    for part in (0.3, 0.5, 0.7):
        lens = torch.tensor([end]).int()
        changed = threading.Timer(part * took, lens.sub_, [1])
        changed.start()
        got = call(lens)
        changed.join()
        assert any(torch.equal(got, x) for x in possible)


def test_slots_change_during_store_tokens():
    size = formats.page_bytes(formats.CODES["int8"], formats.CODES["int8"], 32)
    whole, arena = arena_in_guards(torch.zeros(size, dtype=torch.uint8), 0)
    k, slots, int8 = torch.randn(64, 1, 32), torch.arange(64), formats.CODES["int8"]
    none = torch.empty(0, dtype=torch.int32)
    with Changing([(slots.numpy(), slots.numpy() + 64)]):  # after the only block
        for _ in range(300):
            attempt("store_tokens", [k, k, arena[None], slots, none, int8 << 8 | int8, 64, 64])
    assert all(bool((x == 0x5A).all()) for x in (whole[:GUARD], whole[-GUARD:]))


def test_slots_change_in_the_middle_of_store_tokens():
    """All heads use the same slots."""
    H, N, D, int8 = 64, 2048, 128, formats.CODES["int8"]
    block, none = H * formats.page_bytes(int8, int8, D), torch.empty(0, dtype=torch.int32)
    k, right, wrong = torch.randn(N, 1, D).expand(N, H, D), torch.arange(N), torch.arange(N).flip(0)

    def call(slots: torch.Tensor) -> torch.Tensor:
        cache = torch.zeros(N // 64, block, dtype=torch.uint8)
        ops.store_tokens(k, k, cache, slots, none, int8 << 8 | int8, 64, 64)
        return cache

    began = time.perf_counter()
    possible = [call(slots) for slots in (right, wrong)]
    took = (time.perf_counter() - began) / 2
    assert not torch.equal(*possible)
    for part in (0.2, 0.4, 0.6, 0.8):
        slots = right.clone()
        changed = threading.Timer(part * took, slots.copy_, [wrong])
        changed.start()
        got = call(slots)
        changed.join()
        assert any(torch.equal(got, x) for x in possible)


def test_no_tokens_are_stored():
    none, int8 = torch.empty(0, dtype=torch.int32), formats.CODES["int8"]
    cache = torch.zeros(1, formats.page_bytes(int8, int8, 32), dtype=torch.uint8)
    k = torch.empty(0, 1, 32)
    assert attempt("store_tokens", [k, k, cache, none.long(), none, int8 << 8 | int8, 64, 64]) and not cache.any()


def test_blocks_and_residual_pages_alternate_in_one_allocation():
    """As an engine allocates groups of layers: their address ranges overlap, their bytes do not."""
    shape, int4 = formats.page_geometry("int4", 1, 32, dtype=torch.float32), formats.CODES["int4"]
    both = torch.zeros(4, shape.page_bytes + shape.residual_bytes, dtype=torch.uint8)
    none, q, one = torch.empty(0, dtype=torch.int32), torch.randn(5, 1, 32), torch.tensor([[1]], dtype=torch.int32)
    table, outs = torch.tensor([[3]], dtype=torch.int32), []
    for cache, residual in (
        (both[:, : shape.page_bytes], both[:, shape.page_bytes :]),
        (both[:, : shape.page_bytes].clone(), both[:, shape.page_bytes :].clone()),
    ):
        outs.append(torch.zeros(5, 1, 32))
        ops.attend_varlen(
            q, q, q, cache, table, residual, one, torch.tensor([0, 5]).int(), torch.tensor([5]).int(), none, none,
            torch.empty(0), outs[-1], torch.empty(0), none, int4 << 8 | int4, 64, 64, 64, 0, 0.1, 0.0,
        )  # fmt: skip
    assert torch.equal(*outs) and bool(outs[0].any())


BLOCKS = {"attend_varlen": (3, 5), "store_tokens": (2, 4)}  # in one pool, if an engine keeps both there
WRITERS = [name for name in CALLS if written(name)]


def test_every_op_says_what_it_writes():
    assert WRITERS == ["attend_varlen", "store_tokens", "compact", "attend_feedback", "attend", "attend_step",
                       "accumulate_attention"]  # fmt: skip


@pytest.mark.parametrize("where", ["behind", "over"])
@pytest.mark.parametrize("name", WRITERS)
def test_no_input_lies_in_the_arena(name, where):
    """Each tensor in turn is a view of each that the op writes: of bytes after it, or overlapping its first ones."""
    for i, w in itertools.product(range(len(CALLS[name]())), written(name)):
        args = list(CALLS[name]())
        x, target = args[i], args[w]
        if not isinstance(x, torch.Tensor) or i == w or not x.numel() or not target.numel():
            continue
        if {i, w} <= {*BLOCKS.get(name, ())}:
            continue
        if where == "behind" and target.dim() > 1:
            continue  # only an arena may be longer than its pages
        size = (target.numel() * target.element_size() + 63) // 64 * 64
        block = torch.zeros(size + x.numel() * x.element_size(), dtype=torch.uint8)
        args[w] = moved(target, block, 0)
        args[i] = moved(x, block, size if where == "behind" else 0)
        if where == "behind":
            args[w] = block
        before = block.clone()
        first, last = sorted((i, w)) if i in written(name) else (w, i)
        text = rf"{name}: expected argument {last + 1} apart from argument {first + 1}, .*\.clone\(\)"
        with pytest.raises(RuntimeError, match=text):
            getattr(torch.ops.kvcompress, name)(*args)
        assert torch.equal(block, before)
        args[i] = args[i].clone()
        if where == "behind":
            getattr(torch.ops.kvcompress, name)(*args)


def test_arrays_of_a_table_are_no_arguments_of_it():
    pool = _C.Pool(1 << 22)
    table = _C.Table(pool, heads=2, key_dim=32, value_dim=32, batch=4, page_size=16, sinks=0)
    table.keep_scores(True)
    table.plan(32)
    table.commit()
    bools, longs = table.entries.view(np.bool_), table.rows
    calls = {
        "real": lambda: table.plan(4, bools.reshape(-1)[:16].reshape(4, 4)),
        "keep": lambda: table.plan_evict(table.scores.view(np.bool_).reshape(-1)[: 4 * 2 * 32].reshape(4, 2, 32)),
        "attention": lambda: table.observe(table.scores, 1.0),
        "before": lambda: table.drop(longs.reshape(-1)[:4], 0),
        "index": lambda: table.select(longs.reshape(-1)[:4]),
        "memory": lambda: _C.gather(pool, np.array([[0, 64]]), pool.arena[:64]),
    }
    state = table.rows.tolist(), table.entries.tolist(), table.scores.tolist()
    for what, call in calls.items():
        with pytest.raises(ValueError, match=rf"{what}: expected memory apart from the .*; use .copy\(\)"):
            call()
        assert (table.rows.tolist(), table.entries.tolist(), table.scores.tolist()) == state
    prefix = _C.Prefix(pool)
    tokens = np.arange(64)
    with pytest.raises(ValueError, match="shares no memory with tokens"):
        prefix.take(b"x" * 32, tokens, 16, 16, 1, 1, tokens[:4])


@pytest.mark.parametrize("kind", KINDS)
def test_random_calls(kind):
    taken = sum(one(kind, seed) for seed in range(RANDOM))
    assert RANDOM // 20 < taken < RANDOM  # some are valid and some are not
