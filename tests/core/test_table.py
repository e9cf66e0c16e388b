"""Page tables compared with plain lists: slots and formats of tokens, no page lost or wrongly shared."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule
from table_model import SPECS, Pair, Row, Spec, arrays, kinds, pair_of, slots_of

from kvcompress import _C


class Machine(RuleBasedStateMachine):
    """Several tables over one pool; any allocation may fail."""

    pairs = Bundle("pairs")

    @initialize(target=pairs, spec=st.sampled_from(SPECS), batch=st.integers(1, 3))
    def start(self, spec: Spec, batch: int) -> Pair:
        self.pool = _C.Pool(1 << 27)
        first = Pair(spec, spec.table(self.pool, batch), [Row() for _ in range(batch)])
        self.all = [first]
        return first

    def guarded(self, fail: int, table: Any, call: Any) -> bool:
        """Runs call with its fail-th allocation failing; a failure must change nothing."""
        before = arrays(table)
        _C.alloc_fail_at(fail)
        try:
            call()
        except MemoryError:
            assert arrays(table) == before
            return False
        finally:
            _C.alloc_fail_at(0)
        return True

    lengths = st.one_of(st.integers(0, 3), st.integers(0, 80))
    failing = st.sampled_from([0, 0, 0, 1, 2, 3, 4, 5, 7, 10])

    @rule(pair=pairs, T=lengths, pads=st.sampled_from(["none", "left", "any"]), seed=st.integers(0, 99),
          fail=failing, commit=st.sampled_from([True, True, True, False]))  # fmt: skip
    def append(self, pair: Pair, T: int, pads: str, seed: int, fail: int, commit: bool) -> None:
        rng, B = np.random.default_rng(seed), len(pair.rows)
        real = None
        if pads == "left":
            real = np.arange(T)[None] >= rng.integers(0, T + 1, (B, 1))
        elif pads == "any":
            real = rng.random((B, T)) < 0.8
        before = arrays(pair.table)

        def try_out() -> None:  # a plan that fails or is rolled back
            old, seals, now = pair.table.entries.copy(), pair.table.plan(T, real), pair.table.entries
            fills = not len(seals) and np.array_equal(now[now >= 0], old[old >= 0])
            pair.table.rollback()
            assert real is not None or pair.table.plan_fill(T) is fills
            pair.table.rollback()

        self.guarded(fail, pair.table, try_out)
        assert arrays(pair.table) == before
        pair.append(T, real, commit=commit)
        if not commit:
            assert arrays(pair.table) == before

    @rule(pair=pairs, back=st.one_of(st.integers(0, 8), st.integers(0, 200)), fail=failing)
    def crop(self, pair: Pair, back: int, fail: int) -> None:
        seen = max(pair.seen - back, 0)
        self.guarded(fail, pair.table, lambda: pair.crop(seen))

    @rule(pair=pairs, behind=st.lists(st.integers(0, 60), min_size=3, max_size=3))
    def drop(self, pair: Pair, behind: list[int]) -> None:
        if pair.spec.sinks == 0 and not pair.spec.spans:
            pair.drop([pair.seen - n for n, _ in zip(behind * len(pair.rows), pair.rows, strict=False)])

    @rule(pair=pairs, index=st.lists(st.integers(0, 99), min_size=1, max_size=4), fail=failing)
    def select(self, pair: Pair, index: list[int], fail: int) -> None:
        self.guarded(fail, pair.table, lambda: pair.select([i % len(pair.rows) for i in index]))

    @rule(pair=pairs, other=pairs, index=st.lists(st.integers(0, 99), min_size=1, max_size=4), fail=failing)
    def select_both(self, pair: Pair, other: Pair, index: list[int], fail: int) -> None:
        index = [i % min(len(pair.rows), len(other.rows)) for i in index]
        before = arrays(other.table)
        if not self.guarded(fail, pair.table, lambda: pair.select(index, other)):
            assert arrays(other.table) == before

    @rule(pair=pairs, batch=st.integers(0, 3), fail=failing)
    def reset(self, pair: Pair, batch: int, fail: int) -> None:
        self.guarded(fail, pair.table, lambda: pair.reset(batch))

    @rule(target=pairs, pair=pairs, fail=failing)
    def clone(self, pair: Pair, fail: int) -> Any:
        if len(self.all) >= 4:
            return multiple()
        copies: list[Pair] = []
        if not self.guarded(fail, pair.table, lambda: copies.append(pair.clone())):
            return multiple()
        self.all += copies
        return copies[0]

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "all"):
            return
        owners: Counter[int] = Counter()
        for pair in self.all:
            pair.check()
            owners.update((e >> 16) * 64 for e in pair.table.entries.ravel().tolist() if e >= 0)
        self.pool.check()
        assert self.pool.stats()["slots"] == len(owners)  # none lost
        assert all(self.pool.refs(offset) == n for offset, n in owners.items())

    def teardown(self) -> None:
        if not hasattr(self, "all"):
            return
        self.all.clear()


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=int(os.environ.get("KVCOMPRESS_SOAK", "100")), stateful_step_count=40, deadline=None,
    derandomize="KVCOMPRESS_SOAK" not in os.environ, database=None, suppress_health_check=list(HealthCheck),
)  # fmt: skip


# ------------------------------------------------------------------ single facts


def test_what_drop_refuses() -> None:
    with pytest.raises(ValueError, match="without sinks and spans, got 4 and 0"):
        pair_of(sinks=4).table.drop(np.zeros(1, np.int64), 0)
    pair = pair_of(sinks=0, page_size=16)
    with pytest.raises(ValueError, match="chunk: expected a multiple of the page's 16 tokens, got 24"):
        pair.table.drop(np.zeros(1, np.int64), 24)
    with pytest.raises(ValueError, match="before: expected 1 rows, got 2"):
        pair.table.drop(np.zeros(2, np.int64), 0)
    with pytest.raises(TypeError, match="got 1 arguments"):
        pair.table.drop(np.zeros(1, np.int64))


def test_drop_by_chunks_keeps_where_they_begin() -> None:
    """Also with stored slots, which are kept as long as slots and indices differ."""
    pair = pair_of(sinks=0, page_size=16, key="int4", value="int4")
    pair.append(100)
    assert pair.table.drop(np.array([90]), 32) == 4 and pair.table.rows[0, 0].tolist() == [36, 64]
    assert pair.table.drop(np.array([95]), 32) == 0
    assert pair.table.drop(np.array([10**6]), 32) == 2  # not the last page
    pair = pair_of(sinks=0, page_size=16, key="int4", value="int4")
    pair.append(100)
    pair.append(1)
    pair.table.crop(70)  # inside a sealed page: 10 dead tokens
    pair.table.plan(60)
    pair.table.commit()
    assert pair.table.slots.size and pair.table.drop(np.array([70]), 32) == 5
    assert pair.table.slots.size and pair.table.rows[0, 0].tolist() == [60, 0] and slots_of(pair.table, 0)[0] == 70
    assert pair.table.drop(np.array([96]), 32) == 1
    assert pair.table.drop(np.array([128]), 32) == 2 and pair.table.rows[0, 0].tolist() == [12, 0]


def test_a_page_is_sealed_one_append_after_it_filled() -> None:
    pair = pair_of(sinks=4, page_size=16)
    history = []
    for _ in range(4 + 16 * 2 + 1):
        pair.append(1)
        history.append(kinds(pair.table))
    assert history[3:5] == ["r", "rr"]  # sinks full, then the first page
    assert history[19:21] == ["rr", "rsr"]  # full at 20 tokens, sealed with the 21st
    assert history[35:] == ["rsr", "rssr"]


def test_recent_keeps_pages_raw() -> None:
    pair = pair_of(sinks=0, page_size=16, recent=32)
    pair.append(16 * 6)  # pages of one call are sealed unless they overlap its last 32 tokens
    assert kinds(pair.table) == ".ssssrr"
    pair.append(15)
    assert kinds(pair.table) == ".ssssrrr"
    pair.append(1)
    # a draft could be rolled back: pages that will be far enough back are sealed before it
    assert kinds(pair.table) == ".ssssrrr"
    pair.append(1)
    assert kinds(pair.table) == ".sssssrrr"


@pytest.mark.parametrize("recent", [0, 30])
@pytest.mark.parametrize("step", [1, 5, 16, 17, 100])
def test_raw_pages_never_exceed_two_and_recent(recent: int, step: int) -> None:
    pair = pair_of(sinks=4, page_size=16, recent=recent)
    while pair.seen < 250:
        pair.append(step)
        assert pair.table.stats()["open_pages"] <= 2 + -(-recent // 16)
    for T in range(1, 120):
        pair = pair_of(sinks=4, page_size=16)
        pair.append(T)
        assert pair.table.stats()["open_bytes"] <= 2 * pair.spec.group_bytes(1, 0)


def test_a_page_that_a_long_call_fills_is_sealed_by_it() -> None:
    pair = pair_of(batch=1, sinks=4, page_size=16)
    pair.append(4 + 10)
    raw = int(pair.table.entries[0, 0, 1])
    pair.append(5)
    assert kinds(pair.table) == "rr"
    # The page ends within the newest 16 tokens: cropping these must be exact.
    assert pair.table.plan(16).tolist() == []
    pair.table.rollback()
    assert pair.table.plan(17).tolist() == [[raw, int(pair.table.entries[0, 0, 1])]]
    pair.table.rollback()
    pair.append(17)
    assert kinds(pair.table) == "rsr"
    pair.append(3)
    pair.select([0, 0])
    raw, before = int(pair.table.entries[0, 0, 3]), arrays(pair.table)
    seals = pair.table.plan(40)[:, 0].tolist()
    assert len(seals) == 2 and raw in seals  # shared: one of the two fills a copy
    pair.table.rollback()
    assert arrays(pair.table) == before  # including a cell that changed twice
    pair.check()
    pair.append(40)
    assert kinds(pair.table, 0) == kinds(pair.table, 1) == "rsssrr"
    pair.check()


def test_the_copy_of_a_shared_page_is_whole() -> None:
    pair = pair_of(sinks=0, page_size=16, heads=3)
    pair.append(10)
    copy, arena = pair.clone(), pair.table.pool.arena
    arena[:] = np.arange(len(arena)) % 251
    shared = int(pair.table.entries[0, 0, 1])
    pair.table.plan(1)
    own = int(pair.table.entries[0, 0, 1])
    assert own != shared and int(copy.table.entries[0, 0, 1]) == shared
    a, b = ((e >> 16) * 64 for e in (shared, own))
    size = pair.spec.group_bytes(1, shared)
    assert np.array_equal(arena[a : a + size], arena[b : b + size])
    pair.table.rollback()
    assert int(pair.table.entries[0, 0, 1]) == shared


def test_crop_then_append_equals_never_appended() -> None:
    """For drafts of up to a page: same lengths, formats and slots, and no stored slots."""
    for n, drafts in itertools.product((3, 10, 19, 20, 21, 36, 50, 70), (1, 5, 15, 16)):
        straight, detour = pair_of(), pair_of()
        for pair in (straight, detour):
            pair.append(n)
        detour.append(drafts)
        detour.crop(n)
        for pair in (straight, detour):
            pair.append(1)
            pair.append(1)
        detour.check()
        got, want = arrays(detour.table), arrays(straight.table)
        assert got["slots"] == []
        assert [got[x] for x in ("rows", "slots", "stats")] == [want[x] for x in ("rows", "slots", "stats")]
        assert kinds(detour.table) == kinds(straight.table)


def test_crop_into_a_sealed_page_keeps_its_tokens_and_kills_the_rest() -> None:
    pair = pair_of(sinks=4, page_size=16)
    pair.append(4 + 16 * 4)
    assert kinds(pair.table) == "rsssr"
    pair.crop(4 + 16 + 5)
    assert pair.table.rows[0, 0].tolist() == [4 + 32, 0]  # up to the end of the page
    assert slots_of(pair.table, 0) == [*range(25)] + [-1] * 11
    assert pair.table.stats()["kept"] == 25
    pair.append(2)  # after the dead ones
    assert slots_of(pair.table, 0) == [*range(25)] + [-1] * 11 + [25, 26]
    assert kinds(pair.table) == "rssr"
    pair.crop(25)
    assert pair.table.rows[0, 0].tolist() == [4 + 32, 0]
    pair.crop(4 + 16)  # no dead tokens: the stored slots are dropped
    assert pair.table.slots.size == 0 and kinds(pair.table) == "rs"
    pair.check()
    pair.crop(0)
    assert pair.table.pool.stats()["slots"] == 0 and pair.table.rows[0, 0].tolist() == [0, 0]


def test_pads_are_not_stored() -> None:
    pair = pair_of(batch=2)
    real = np.array([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], bool)
    pair.append(5, real)
    assert pair.table.rows[:, 0].tolist() == [[3, 2], [5, 0]] and pair.table.slots.size == 0
    pair.append(2, np.array([[1, 0], [1, 1]], bool))
    pair.append(1)
    assert slots_of(pair.table, 0) == [2, 3, 4, 5, 7] and slots_of(pair.table, 1) == [*range(8)]
    pair.crop(1)
    assert pair.table.rows[:, 0].tolist() == [[0, 0], [1, 0]]
    pair.check()


def test_beams_copy_only_the_open_page() -> None:
    pair = pair_of(sinks=4, page_size=16)
    pair.append(4 + 16 * 2 + 3)
    pair.select([0, 0, 0])
    slots = pair.table.pool.stats()["slots"]
    version = pair.table.version
    pair.append(1)
    assert pair.table.pool.stats()["slots"] == slots + 2  # the last row that shares the page keeps it
    shared = pair.table.entries[:, 0]
    assert (shared[:, :3] == shared[0, :3]).all() and len(set(shared[:, 3].tolist())) == 3
    pair.select([2, 2, 0])
    assert pair.table.version == version  # same batch: arrays stay in place
    pair.append(20)
    pair.check()


def test_rows_of_several_tables_change_together_or_not_at_all() -> None:
    one, two = pair_of(sinks=0, page_size=16), pair_of(sinks=0, page_size=16)
    for pair in (one, two):
        pair.append(20)
    one.select([0, 0], two)
    one.check(), two.check()
    before = arrays(one.table)
    two.table.plan(1)
    with pytest.raises(ValueError, match="select: expected no append under way"):
        one.select([0], two)
    assert arrays(one.table) == before
    two.table.rollback()
    with pytest.raises(ValueError, match="expected rows from 0 to 1, got 2"):
        one.select([0, 2], two)
    for bad in ((), (np.zeros(1, np.int64), 3)):
        with pytest.raises(TypeError, match="select: expected"):
            one.table.select(*bad)
    assert arrays(one.table) == before


def test_beams_that_share_a_full_page_seal_it_once() -> None:
    pair = pair_of(sinks=0, page_size=16)
    pair.append(16)
    pair.select([0, 0, 0, 0])
    assert len(pair.table.plan(1)) == 1
    sealed = int(pair.table.entries[0, 0, 1])
    assert pair.table.pool.refs((sealed >> 16) * 64) == 4
    pair.table.rollback()
    pair.append(1)
    pair.check()


def test_clone_is_independent() -> None:
    pair = pair_of(batch=2)
    pair.append(30)
    copy = pair.clone()
    assert copy.table.pool is pair.table.pool
    used = pair.table.pool.stats()["used"]
    assert copy.table.stats() == pair.table.stats() and used == pair.table.pool.stats()["used"]
    copy.append(50)
    pair.append(3)
    copy.crop(10)
    pair.check()
    copy.check()
    copy.table = None
    pair.check()
    pair.reset(0)
    assert pair.table.pool.stats()["slots"] == 0


def test_full_pool_changes_nothing() -> None:
    spec = Spec(heads=8, page_size=64)
    table = spec.table(_C.Pool(6 << 20), 1)
    pair = Pair(spec, table, [Row()])
    with pytest.raises(MemoryError, match="pool is full"):
        for _ in range(100_000):
            before = arrays(table)
            pair.append(64)
    assert arrays(table) == before and pair.seen > 1000
    pair.check()
    pair.crop(pair.seen // 2)
    pair.append(64)
    pair.check()
    with pytest.raises(MemoryError, match="pool is full"):
        table.plan(100_000)
    pair.check()


def test_every_allocation_of_a_new_table_may_fail() -> None:
    pool, failures = _C.Pool(1 << 20), 0
    while True:
        _C.alloc_fail_at(failures + 1)
        try:
            table = Spec().table(pool, 2)
            break
        except MemoryError:
            failures += 1
        finally:
            _C.alloc_fail_at(0)
    assert failures == 3 and table.seen == 0


def test_sum_of_parts_is_what_the_pool_uses() -> None:
    for spec in SPECS:
        pair = Pair(spec, spec.table(_C.Pool(1 << 27), 2), [Row(), Row()])
        pair.append(333)
        pair.select([0, 0, 1])
        pair.append(2)
        stats = pair.table.stats()
        parts = stats["sealed_bytes"] + stats["open_bytes"] + stats["sink_bytes"]
        assert parts == pair.table.pool.stats()["used"]


def test_spans_are_read_back_and_bad_ones_change_nothing() -> None:
    pair = pair_of(spans=((20, "int8", "int8"), (52, "int4", "int2")), key="int2", value="int2")
    good = pair.table.spans
    assert [end for end, _, _ in good] == [20, 52]
    int8 = good[0][1]
    for bad in ([(0, int8, int8)], [(5, int8, int8), (5, int8, int8)], [(5, 99, int8)], [(5, int8, int8)] * 17,
                [(-3, int8, int8)], [(1, 1, int8)]):  # fmt: skip
        with pytest.raises(ValueError, match="expected"):
            pair.table.spans = bad
    for bad in ([5], [(1, 2)], 7, [("a", int8, int8)]):
        with pytest.raises(TypeError):
            pair.table.spans = bad
    assert pair.table.spans == good
    pair.append(150)
    pair.check()
    assert pair.clone().table.spans == good
