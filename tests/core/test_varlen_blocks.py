"""attend_varlen with sealed and residual pages in blocks of one pool, as vLLM allocates them."""

import pytest
import torch
from test_varlen import Engine, no_handle_stays  # noqa: F401

from kvcompress import _C, ops


def step_both(apart, engine):
    """The same three sequences in both engines: equal outputs, and the pages have the expected contents."""
    for _ in range(3):
        apart.open(4), engine.open(4)
    for lengths in ([130, 1, 64], [1, 70, 1], [63, 60, 1]):
        a = apart.step(lengths)
        b = engine.step(lengths, **{x: a[x] for x in "qkv"})
        assert torch.equal(a["out"], b["out"])
    engine.check_pages()


def test_sealed_and_raw_pages_in_blocks_of_one_pool():
    """As vLLM allocates them: block b of the cache and block b of the residual are the same bytes."""
    torch.manual_seed(11)
    apart, engine = Engine("int4", pages=8), Engine("int4", pages=8)
    pool = torch.zeros(40, engine.cache.shape[1], dtype=torch.uint8)
    engine.cache, engine.residual = pool, pool[:, : engine.shape.residual_bytes]
    engine.free_residual, engine.free = engine.free[:8], engine.free[8:]
    step_both(apart, engine)


def test_residual_blocks_of_several_blocks_of_the_cache():
    """As vLLM addresses them: one of its blocks is a sequence's residual page, or eight blocks of one page each."""
    torch.manual_seed(13)
    apart, engine = Engine("int4", pages=1), Engine("int4", pages=1)
    pool = torch.zeros(40, 8 * engine.shape.page_bytes, dtype=torch.uint8)
    engine.cache, engine.residual = pool.view(320, -1), pool[:, : engine.shape.residual_bytes]
    engine.free_residual, engine.free = [0, 7, 3], [8 * b + j for b in range(8, 40) for j in range(8)]
    step_both(apart, engine)
    span = -(-engine.shape.residual_bytes // engine.shape.page_bytes)
    assert 1 < span < 8
    for block in (24, 24 + span - 1):
        a = engine.arguments([1, 1, 1])
        a["block_table"][0, 1] = block
        before = pool.clone()
        with pytest.raises(ValueError, match="expected a block that is not of the (cache|residual) too"):
            ops.attend_varlen(*a.values())
        assert torch.equal(before, pool)
    a["block_table"][0, 1] = 24 + span  # after the residual page of the second sequence
    ops.attend_varlen(*a.values())


@pytest.mark.parametrize("change", ["residual of one, page of another", "its own page", "a page that is only read"])
@pytest.mark.parametrize("apart", [0, 3, -3])
def test_a_block_is_of_the_cache_or_of_the_residual(change, apart):
    """A page written raw must not be a sealed page. apart: distance in blocks between the first block of each."""
    torch.manual_seed(12)
    engine = Engine("int4", pages=8)
    pool = torch.zeros(43, engine.cache.shape[1], dtype=torch.uint8)
    engine.cache, engine.residual = pool[max(0, -apart) :], pool[max(0, apart) :, : engine.shape.residual_bytes]
    engine.free_residual, engine.free = [5, 11, 20], [x for x in range(8, 40) if x - apart not in (5, 11, 20)]
    for _ in range(3):
        engine.open(4)
    engine.step([130, 70, 1])
    assert engine.error(engine.step([1, 1, 1])) < 0.35
    a = engine.arguments([1, 1, 1])
    row = {"residual of one, page of another": 1, "its own page": 0, "a page that is only read": 2}[change]
    table = a["residual_table"].clone()
    table[row, 0] = a["block_table"][0, 0] - apart
    before = pool.clone()
    with pytest.raises(ValueError, match=r"expected a block that is not of the (cache|residual) too, got block"):
        ops.attend_varlen(*{**a, "residual_table": table}.values())
    assert torch.equal(before, pool)
    ops.attend_varlen(*a.values())


def test_residual_blocks_that_begin_within_blocks_of_the_cache():
    engine = Engine("int4", pages=8)
    pool = torch.zeros(40, engine.cache.shape[1] + engine.shape.residual_bytes, dtype=torch.uint8)
    engine.open()
    size = engine.cache.shape[1]
    a = engine.arguments([70])
    beside = {"cache": pool[:, :size], "residual": pool[:, size:]}
    ops.attend_varlen(*{**a, **beside}.values())
    within = {"cache": pool[:, :size], "residual": pool[:, size - 64 : size - 64 + engine.shape.residual_bytes]}
    with pytest.raises(ValueError, match="residual: expected blocks of the cache's memory to begin where those do"):
        ops.attend_varlen(*{**a, **within}.values())


@pytest.mark.parametrize("ring", [1, 2])
def test_a_call_in_two_parts_that_runs_out_of_memory_may_be_repeated(ring):
    """The second part overwrites the residual page that the first one sealed, which holds stored tokens."""
    torch.manual_seed(17)
    engine = Engine("int4", ring=ring)
    for _ in range(2):
        engine.open(4)
    engine.step([40, 90])
    a = engine.arguments([64 * ring, 3])
    before, parts = [engine.cache.clone(), engine.residual.clone()], [engine.cache, engine.residual]
    ops.attend_varlen(*a.values())
    after = [x.clone() for x in (*parts, a["out"], a["lse"])]
    for n in range(1, 100):
        for x, y in zip(parts, before, strict=True):
            x.copy_(y)
        try:
            _C.alloc_fail_at(n)
            ops.attend_varlen(*a.values())
            break
        except MemoryError:
            pass
        finally:
            _C.alloc_fail_at(0)
        ops.attend_varlen(*a.values())
        assert all(torch.equal(x, y) for x, y in zip((*parts, a["out"], a["lse"]), after, strict=True)), n
    assert 10 < n < 99
