"""Pool and tables against a plain Python model: who holds which page, and nothing lost."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcompress import _C

RAW, INT8, INT4 = 0, 3, 5


def make(pool, batch=2, **options):
    return _C.Table(pool, **(dict(heads=2, key_dim=32, value_dim=32, batch=batch, page_size=16, sinks=3, raw=RAW,
                                  key=INT8, value=INT4) | options))  # fmt: skip


def offsets(table):
    return [int(e) >> 16 << 6 for e in table.entries.ravel() if e >= 0]


def state(table):
    """All that a table is: to compare before and after."""
    return (table.entries.tobytes(), table.rows.tobytes(), table.slots.tobytes(), table.seen, table.batch)


def check_counts(pool, tables):
    """Every reference belongs to one table cell, and the pool's own books are right."""
    pool.check()
    held = list(itertools.chain(*map(offsets, tables)))
    assert sum(pool.refs(at) for at in set(held)) == len(held)
    assert all(pool.refs(at) == held.count(at) for at in set(held))
    assert pool.stats()["slots"] == len(set(held))


def fmt(entry):
    return (int(entry) >> 8 & 255, int(entry) & 255)


def slots_of(table, b):
    n, first = (int(x) for x in table.rows[b, 0])
    return table.slots[b, 0, :n].tolist() if table.slots.size else list(range(first, first + n))


def append(table, T, real=None):
    seals = table.plan(T, real)
    table.commit()
    return seals


def test_pages_are_sealed_at_the_next_append():
    t = make(_C.Pool(), batch=1)
    assert len(append(t, 3 + 16)) == 0  # sinks and one full page, not sealed yet
    assert [fmt(e) for e in t.entries[0, 0, :2]] == [(RAW, RAW), (RAW, RAW)]
    raw = int(t.entries[0, 0, 1])
    seals = append(t, 1)
    assert seals.tolist() == [[raw, int(t.entries[0, 0, 1])]]
    assert [fmt(e) for e in t.entries[0, 0, :3]] == [(RAW, RAW), (INT8, INT4), (RAW, RAW)]


@pytest.mark.parametrize("recent", [0, 20, 100])
def test_a_long_append_seals_all_but_the_newest(recent):
    t = make(_C.Pool(), batch=1, recent=recent)
    T = 200
    assert len(append(t, T)) == 0
    for c in range(1, 1 + -(-(T - 3) // 16)):
        end = 3 + 16 * c
        assert fmt(t.entries[0, 0, c]) == ((INT8, INT4) if end <= T - max(16, recent) else (RAW, RAW))


def test_raw_never_exceeds_two_pages_and_recent():
    for recent, step in itertools.product((0, 30), (1, 5, 16, 17, 100)):
        t = make(_C.Pool(), batch=1, recent=recent)
        while t.seen < 300:
            append(t, step)
            n = int(t.rows[0, 0, 0])
            raw = sum(fmt(e) == (RAW, RAW) for e in t.entries[0, 0, 1:] if e >= 0)
            assert raw <= 2 + -(-recent // 16), (recent, step, n)


def test_rollback_restores_every_byte():
    pool = _C.Pool()
    t = make(pool)
    mask = np.ones((2, 60), bool)
    mask[1, :20] = False
    append(t, 60, mask)
    other = t.clone()
    before = state(t), state(other), [pool.refs(a) for a in offsets(t)]
    for T in (1, 40, 3):
        t.plan(T)
        t.rollback()
        assert (state(t), state(other), [pool.refs(a) for a in offsets(t)]) == before
        check_counts(pool, [t, other])


def test_a_shared_open_page_is_copied_before_it_is_written():
    pool = _C.Pool()
    t = make(pool, batch=1)
    append(t, 10)
    other = t.clone()
    pool.arena[:] = np.arange(pool.extent, dtype=np.uint8)
    shared = int(t.entries[0, 0, 1])
    append(t, 1)
    copy = int(t.entries[0, 0, 1])
    assert copy != shared and int(other.entries[0, 0, 1]) == shared
    size = 2 * _C.page_bytes(RAW, RAW, 32, 32, 16)
    a, b = (e >> 16 << 6 for e in (shared, copy))
    assert np.array_equal(pool.arena[a : a + size], pool.arena[b : b + size])
    assert int(t.entries[0, 0, 0]) == int(other.entries[0, 0, 0])  # the sink page is not written: still shared


def test_beams_that_share_a_page_seal_it_once():
    pool = _C.Pool()
    t = make(pool, batch=1)
    append(t, 3 + 16)
    t.select(np.zeros(4, np.int64))
    seals = t.plan(1)
    t.commit()
    assert len(seals) == 1 and len(set(t.entries[:, 0, 1].tolist())) == 1
    check_counts(pool, [t])


def test_crop_in_raw_pages_is_exact():
    pool = _C.Pool()
    t = make(pool, batch=1)
    append(t, 25)
    append(t, 1)  # seals the first page
    want = state(t)
    append(t, 5)
    t.crop(26)
    assert state(t) == want


def test_crop_into_a_sealed_page_keeps_it_and_leaves_the_rest_dead():
    pool = _C.Pool()
    t = make(pool, batch=1)
    append(t, 100)
    sealed = int(t.entries[0, 0, 1])
    t.crop(10)
    assert int(t.entries[0, 0, 1]) == sealed and t.rows[0, 0, 0] == 19
    assert slots_of(t, 0) == [*range(10), *[-1] * 9]
    assert t.stats()["kept"] == 10
    append(t, 2)
    assert slots_of(t, 0) == [*range(10), *[-1] * 9, 10, 11]
    t.crop(3)  # only sinks: the sealed page goes
    assert int(t.entries[0, 0, 1]) == -1 and slots_of(t, 0) == [0, 1, 2] and t.slots.size == 0
    check_counts(pool, [t])


def test_empty_slabs_and_surplus_go_back():
    pool = _C.Pool()
    t = make(pool, batch=1, heads=8, page_size=64)
    append(t, 40_000)
    large = pool.stats()["resident"]
    t.crop(100)
    assert pool.stats()["resident"] < large / 10
    t.reset()
    assert pool.stats() | {"reserved": 0} == dict(reserved=0, resident=0, used=0, slots=0, slabs=0)


def test_memory_is_resident_only_where_used():
    """The pool's count of bytes held is what the system gave, to a few pages of the system."""
    import resource

    def rss():
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * resource.getpagesize()

    pool = _C.Pool()
    before = rss()
    at = [pool.alloc(100_000) for _ in range(300)]
    for a in at:
        pool.arena[a : a + 100_000] = 1
    assert abs((rss() - before) - pool.stats()["resident"]) < 3 << 20
    assert pool.stats()["resident"] < 1.02 * 300 * 100_032 + 300 * 4096
    for a in at:
        pool.unref(a)
    assert rss() - before < 3 << 20


def test_every_failing_allocation_leaves_all_as_it_was(fail_at):
    acts = {
        "plan": lambda t: t.plan(200),
        "mask": lambda t: t.plan(40, np.eye(2, 40, dtype=bool)),
        "crop": lambda t: t.crop(20),
        "select": lambda t: t.select(np.array([1, 0, 1])),
        "clone": lambda t: t.clone(),
        "reset": lambda t: t.reset(batch=5),
    }
    for name, act in acts.items():
        for n in range(1, 100):
            pool = _C.Pool()
            t = make(pool)
            append(t, 60)
            before, live = state(t), _C.alloc_live()
            columns = t.entries.shape[2]
            fail_at(n)
            try:
                act(t)
            except MemoryError:
                fail_at(0)
                entries = t.entries[:, :, :columns]
                assert (entries.tobytes(), *state(t)[1:]) == before, (name, n)
                assert (t.entries[:, :, columns:] == -1).all()
                check_counts(pool, [t])
                t.rollback()
                append(t, 5)
                continue
            fail_at(0)
            break
        else:
            raise AssertionError(f"{name} never succeeded")
        assert n > 1, name
        del t, pool
        assert _C.alloc_live() <= live


class Tables(RuleBasedStateMachine):
    """Random appends, crops, selects, clones on tables of one pool; the model is the list of slots of every row."""

    def __init__(self):
        super().__init__()
        self.pool = _C.Pool()
        self.tables = [(make(self.pool), [[], []], [0])]

    pick = st.integers(0, 100)

    @rule(i=pick, T=st.integers(0, 40), seed=st.none() | st.integers(0, 9), back=st.booleans())
    def append(self, i, T, seed, back):
        table, rows, seen = self.tables[i % len(self.tables)]
        real = None if seed is None else np.random.default_rng(seed).random((table.batch, T)) < 0.6
        before = state(table)
        columns = table.entries.shape[2]
        table.plan(T, real)
        if back:
            table.rollback()
            assert (table.entries[:, :, :columns].tobytes(), *state(table)[1:]) == before
            return
        table.commit()
        for b, row in enumerate(rows):
            row += [seen[0] + j for j in range(T) if real is None or real[b, j]]
        seen[0] += T

    @rule(i=pick, keep=st.floats(0, 1))
    def crop(self, i, keep):
        table, rows, seen = self.tables[i % len(self.tables)]
        seen[0] = int(seen[0] * keep)
        table.crop(seen[0])
        for row in rows:
            row[:] = [s for s in row if s < seen[0]]

    @rule(i=pick, index=st.lists(st.integers(0, 100), min_size=1, max_size=4))
    def select(self, i, index):
        table, rows, _ = self.tables[i % len(self.tables)]
        index = [j % len(rows) for j in index]
        table.select(np.array(index))
        rows[:] = [list(rows[j]) for j in index]

    @rule(i=pick)
    def clone(self, i):
        table, rows, seen = self.tables[i % len(self.tables)]
        if len(self.tables) < 4:
            self.tables.append((table.clone(), [list(r) for r in rows], list(seen)))

    @rule(i=pick, batch=st.integers(0, 3))
    def reset(self, i, batch):
        table, rows, seen = self.tables[i % len(self.tables)]
        table.reset(batch)
        rows[:] = [[] for _ in range(batch or len(rows))]
        seen[0] = 0

    @rule()
    def drop(self):
        if len(self.tables) > 1:
            self.tables.pop()

    @invariant()
    def holds(self):
        for table, rows, seen in self.tables:
            assert table.seen == seen[0] and table.batch == len(rows)
            for b, row in enumerate(rows):
                assert [s for s in slots_of(table, b) if s >= 0] == row
        check_counts(self.pool, [t for t, *_ in self.tables])


Tables.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestTables = Tables.TestCase
