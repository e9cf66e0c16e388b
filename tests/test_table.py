"""Page tables against plain lists: what is stored where, in which format, and that no page is lost or shared wrongly.

The tests play the attention op: they copy tags from raw to sealed pages and write one tag per new token. A tag stands at
the start and at the end of the group of pages that an entry names, so that a page written while shared, or a copy cut
short, is a wrong tag later.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from kvcompress import _C

CODE = {f["name"]: f["code"] for f in _C.formats()}
RAW = {CODE["raw_f32"], CODE["raw_f16"], CODE["raw_bf16"]}
DIM = 32


@dataclass
class Spec:
    """What a table is made of; page arithmetic from the design, not from the code under test."""

    raw: str = "raw_f32"
    key: str = "int8"
    value: str = "int8"
    page_size: int = 16
    sinks: int = 4
    recent: int = 0
    direct: bool = False
    heads: int = 2

    def table(self, pool: Any, batch: int) -> Any:
        return _C.Table(
            pool, heads=self.heads, key_dim=DIM, value_dim=DIM, batch=batch, page_size=self.page_size,
            sinks=self.sinks, recent=self.recent, raw=CODE[self.raw], key=CODE[self.key], value=CODE[self.value],
            direct=self.direct,
        )  # fmt: skip

    @property
    def seals(self) -> bool:
        return (self.key, self.value) != (self.raw, self.raw)

    def column(self, i: int) -> tuple[int, int]:
        """(column, place in it) of token index i."""
        return (0, i) if i < self.sinks else (1 + (i - self.sinks) // self.page_size, (i - self.sinks) % self.page_size)

    def end(self, column: int) -> int:
        return self.sinks + column * self.page_size

    def group_bytes(self, column: int, entry: int) -> int:
        tokens = self.page_size if column else -(-self.sinks // 16) * 16
        return self.heads * _C.page_bytes(entry >> 8 & 255, entry & 255, DIM, DIM, tokens)


@dataclass
class Row:
    """A sequence: (slot, tag) of every stored token, (-1, 0) where dead; the columns whose page is sealed."""

    tokens: list[tuple[int, int]] = field(default_factory=list)
    sealed: set[int] = field(default_factory=set)

    def copy(self) -> Row:
        return Row(list(self.tokens), set(self.sealed))

    def live(self) -> list[tuple[int, int]]:
        return [token for token in self.tokens if token[0] >= 0]

    def plain(self) -> bool:
        return all(slot == self.tokens[0][0] + i for i, (slot, _) in enumerate(self.tokens))

    def append(self, spec: Spec, new: list[tuple[int, int]]) -> list[int]:
        """Adds tokens; returns the columns with older tokens that were sealed on the way."""
        n, sealed = len(self.tokens), []
        if not new:
            return sealed
        self.tokens += new
        last = spec.column(len(self.tokens) - 1)[0]
        for column in range(1, last + 1):
            end, fresh = spec.end(column), spec.end(column - 1) >= n
            if not spec.seals or column in self.sealed:
                continue
            far_behind = end <= len(self.tokens) - max(spec.page_size, spec.recent)
            if spec.direct or far_behind or end <= n - spec.recent:
                self.sealed.add(column)
                sealed += [] if fresh else [column]
        return sealed

    def crop(self, spec: Spec, seen: int) -> None:
        tokens = [token if token[0] < seen else (-1, 0) for token in self.tokens]
        kept = max((i + 1 for i, (slot, _) in enumerate(tokens) if slot >= 0), default=0)
        if kept and spec.column(kept - 1)[0] in self.sealed and not spec.direct:
            kept = spec.end(spec.column(kept - 1)[0])
        self.tokens = tokens[:kept]
        self.sealed = {column for column in self.sealed if spec.end(column - 1) < kept}


def places(table: Any, spec: Spec, b: int, i: int, raw: dict[int, int] | None = None) -> list[np.ndarray]:
    """The two places of token index i's tag, as int32 views into the arena; in the raw page of a page being sealed."""
    column, at = spec.column(i)
    entry = int(table.entries[b, 0, column])
    entry = (raw or {}).get(entry, entry)
    offset, size = (entry >> 16) * 64, spec.group_bytes(column, entry)
    arena = table.pool.arena
    return [arena[x : x + 4].view(np.int32) for x in (offset + 4 * at, offset + size - 4 * (at + 1))]


def slots_of(table: Any, b: int) -> list[int]:
    n, start = table.rows[b, 0].tolist()
    return table.slots[b, 0, :n].tolist() if table.slots.size else list(range(start, start + n))


def arrays(table: Any) -> dict[str, Any]:
    """All that an append may not change when it fails. Empty columns at the end are room, not state."""
    entries = table.entries[:, 0]
    used = int((entries >= 0).any(0).nonzero()[0].max(initial=-1)) + 1
    return {
        "entries": entries[:, :used].tolist(), "rows": table.rows.tolist(), "slots": table.slots.tolist(),
        "seen": table.seen, "batch": table.batch, "stats": table.stats() | {"table_bytes": 0},
        "refs": [table.pool.refs((e >> 16) * 64) for e in entries[entries >= 0].tolist()],
        "pool": {k: v for k, v in table.pool.stats().items() if k in ("used", "slots")},
    }  # fmt: skip


class Pair:
    """A table and its model, driven together."""

    tags = 0

    def __init__(self, spec: Spec, table: Any, rows: list[Row], seen: int = 0, sidecar: bool = False) -> None:
        self.spec, self.table, self.rows, self.seen, self.sidecar = spec, table, rows, seen, sidecar

    def append(self, T: int, real: np.ndarray | None = None, *, commit: bool = True) -> None:
        table, spec = self.table, self.spec
        old_rows, old_sidecar = [row.copy() for row in self.rows], self.sidecar
        before = table.entries[:, 0].copy()
        seals = table.plan(T, real).tolist()
        raw_of = {sealed: raw for raw, sealed in seals}
        assert len(raw_of) == len(set(raw_of.values())) == len(seals)  # a shared page is sealed once
        sealed_now = set()
        for b, row in enumerate(self.rows):
            new = []
            for j in range(T):
                if real is None or real[b, j]:
                    Pair.tags += 1
                    for place in places(table, spec, b, len(row.tokens) + len(new), raw_of):
                        place[0] = Pair.tags
                    new.append((self.seen + j, Pair.tags))
            n = len(row.tokens)
            for column in row.append(spec, new):
                sealed_now.add(int(table.entries[b, 0, column]))
                raw = raw_of[int(table.entries[b, 0, column])]
                if raw != before[b, column]:  # a copy of a shared page, for this call to fill
                    assert spec.end(column) > n and raw not in before and table.pool.refs((raw >> 16) * 64) == 1
        assert raw_of.keys() == sealed_now
        for raw, sealed in seals:
            self.seal(raw, sealed)
        if commit:
            table.commit()
            self.seen += T
            self.sidecar |= not all(row.plain() for row in self.rows)
        else:
            table.rollback()
            self.rows, self.sidecar = old_rows, old_sidecar

    def seal(self, raw: int, sealed: int) -> None:
        """The op's part: what is in the raw page goes to the sealed one."""
        spec, arena, size = self.spec, self.table.pool.arena, 4 * self.spec.page_size
        assert {raw >> 8 & 255, raw & 255} == {CODE[spec.raw]}
        assert (sealed >> 8 & 255, sealed & 255) == (CODE[spec.key], CODE[spec.value])
        for end in (False, True):
            a, b = ((e >> 16) * 64 + (spec.group_bytes(1, e) - size if end else 0) for e in (raw, sealed))
            arena[b : b + size] = arena[a : a + size]

    def crop(self, seen: int) -> None:
        self.table.crop(seen)
        if seen < self.seen:
            for row in self.rows:
                row.crop(self.spec, seen)
            self.seen = seen
            self.sidecar = not all(row.plain() for row in self.rows)

    def select(self, index: list[int]) -> None:
        self.table.select(np.array(index, np.int64))
        self.rows = [self.rows[i].copy() for i in index]

    def reset(self, batch: int) -> None:
        self.table.reset(batch=batch)
        self.rows, self.seen, self.sidecar = [Row() for _ in range(batch or len(self.rows))], 0, False

    def clone(self) -> Pair:
        return Pair(self.spec, self.table.clone(), [row.copy() for row in self.rows], self.seen, self.sidecar)

    def check(self) -> None:
        table, spec = self.table, self.spec
        assert (table.seen, table.batch) == (self.seen, len(self.rows))
        assert bool(table.slots.size) == self.sidecar
        kinds: Counter[str] = Counter()
        counted: set[int] = set()
        for b, row in enumerate(self.rows):
            assert slots_of(table, b) == [slot for slot, _ in row.tokens]
            used = spec.column(len(row.tokens) - 1)[0] + 1 if row.tokens else 0
            for column, entry in enumerate(table.entries[b, 0].tolist()):
                if column >= used or (column == 0 and not spec.sinks):
                    assert entry == -1
                    continue
                sealed = column in row.sealed
                wanted = (spec.key, spec.value) if sealed else (spec.raw, spec.raw)
                assert (entry >> 8 & 255, entry & 255) == (CODE[wanted[0]], CODE[wanted[1]])
                if entry not in counted:
                    kind = "sink" if column == 0 else "sealed" if sealed or not spec.seals else "open"
                    kinds[kind + "_bytes"] += spec.group_bytes(column, entry)
                    kinds[kind + "_pages"] += 1
                    counted.add(entry)
            for i, (slot, tag) in enumerate(row.tokens):
                if slot >= 0:
                    assert [int(place[0]) for place in places(table, spec, b, i)] == [tag, tag]
        stats = table.stats()
        assert stats["kept"] == sum(len(row.live()) for row in self.rows) and stats["seen"] == self.seen
        for name in ("sealed_bytes", "open_bytes", "sink_bytes", "sealed_pages", "open_pages"):
            assert stats[name] == kinds[name]


SPECS = [
    Spec(),
    Spec(raw="raw_bf16", key="int8", value="int4", sinks=0, page_size=32),
    Spec(raw="raw_f16", key="raw_f16", value="int8", sinks=20, recent=40),
    Spec(key="raw_f32", value="raw_f32", sinks=3),
    Spec(key="int8", value="fp8_e4m3", direct=True),
    Spec(raw="raw_bf16", key="int4", value="int4", recent=5, heads=3),
]


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

        def try_out() -> None:  # the plan that fails, or that is taken back at once
            pair.table.plan(T, real)
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

    @rule(pair=pairs, index=st.lists(st.integers(0, 99), min_size=1, max_size=4), fail=failing)
    def select(self, pair: Pair, index: list[int], fail: int) -> None:
        self.guarded(fail, pair.table, lambda: pair.select([i % len(pair.rows) for i in index]))

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


QUICK = settings(max_examples=100, stateful_step_count=40, deadline=None, derandomize=True, database=None,
                 suppress_health_check=list(HealthCheck))  # fmt: skip
TestMachine = Machine.TestCase
TestMachine.settings = QUICK


@pytest.mark.soak
def test_machine_for_long() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(Machine, settings=settings(QUICK, max_examples=3000, stateful_step_count=60))


# ------------------------------------------------------------------ single facts


def pair_of(batch: int = 1, **options: Any) -> Pair:
    spec = Spec(**options)
    return Pair(spec, spec.table(_C.Pool(1 << 27), batch), [Row() for _ in range(batch)])


def kinds(table: Any, b: int = 0) -> str:
    """Columns of a row: . none, r raw, s sealed."""
    return "".join(
        "." if e < 0 else "r" if {e >> 8 & 255, e & 255} <= RAW else "s" for e in table.entries[b, 0].tolist()
    ).rstrip(".")


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
    pair.append(16 * 6)
    assert kinds(pair.table) == ".ssssrr"  # pages of one call are sealed unless they overlap its last 32 tokens
    pair.append(15)
    assert kinds(pair.table) == ".ssssrrr"
    pair.append(1)
    assert kinds(pair.table) == ".sssssrr"


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
    assert pair.table.plan(16).tolist() == []  # the page ends inside the newest 16 tokens: crop stays exact there
    pair.table.rollback()
    assert pair.table.plan(17).tolist() == [[raw, int(pair.table.entries[0, 0, 1])]]
    pair.table.rollback()
    pair.append(17)
    assert kinds(pair.table) == "rsr"
    pair.append(3)
    pair.select([0, 0])
    raw = int(pair.table.entries[0, 0, 3])
    seals = pair.table.plan(40)[:, 0].tolist()
    assert len(seals) == 2 and raw in seals  # shared: one of the two fills a copy
    pair.table.rollback()
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
    """For drafts of up to a page: same lengths, same formats, same slots, same sidecar (none)."""
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
        assert got["rows"] == want["rows"] and got["slots"] == want["slots"] == [] and got["stats"] == want["stats"]
        assert kinds(detour.table) == kinds(straight.table)


def test_crop_into_a_sealed_page_keeps_its_tokens_and_kills_the_rest() -> None:
    pair = pair_of(sinks=4, page_size=16)
    pair.append(4 + 16 * 4)
    assert kinds(pair.table) == "rsssr"
    pair.crop(4 + 16 + 5)
    assert pair.table.rows[0, 0].tolist() == [4 + 32, 0]  # up to the end of the page
    assert slots_of(pair.table, 0) == [*range(25)] + [-1] * 11
    assert pair.table.stats()["kept"] == 25
    pair.append(2)  # behind the dead ones
    assert slots_of(pair.table, 0) == [*range(25)] + [-1] * 11 + [25, 26]
    assert kinds(pair.table) == "rssr"
    pair.crop(25)
    assert pair.table.rows[0, 0].tolist() == [4 + 32, 0]
    pair.crop(4 + 16)  # nothing is dead: the sidecar goes
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
