"""Page tables as plain lists, for comparison with the real ones.

A Pair emulates the attention op: it writes a tag per new token and copies tags from raw to sealed pages. A tag is
stored at the start and at the end of the pages of an entry, so writing to a shared page, or an incomplete copy, shows
as a wrong tag."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvcompress import _C

CODE = {f["name"]: f["code"] for f in _C.formats()}
RAW = {CODE["raw_f32"], CODE["raw_f16"], CODE["raw_bf16"]}
DIM = 32


@dataclass
class Spec:
    """Parameters of a table; page arithmetic from the design, not from the code under test."""

    raw: str = "raw_f32"
    key: str = "int8"
    value: str = "int8"
    page_size: int = 16
    sinks: int = 4
    recent: int = 0
    direct: bool = False
    heads: int = 2
    spans: tuple[tuple[int, str, str], ...] = ()

    def table(self, pool: Any, batch: int) -> Any:
        table = _C.Table(
            pool, heads=self.heads, key_dim=DIM, value_dim=DIM, batch=batch, page_size=self.page_size,
            sinks=self.sinks, recent=self.recent, direct=self.direct, raw=CODE[self.raw], key=CODE[self.key],
            value=CODE[self.value],
        )  # fmt: skip
        table.spans = [(end, CODE[key], CODE[value]) for end, key, value in self.spans]
        return table

    def formats(self, column: int) -> tuple[str, str]:
        """Formats in which the pages of a column are sealed."""
        for end, key, value in self.spans:
            if self.end(column - 1) < end:
                return key, value
        return self.key, self.value

    def seals(self, column: int) -> bool:
        return self.formats(column) != (self.raw, self.raw)

    def column(self, i: int) -> tuple[int, int]:
        """(column, index in it) of token index i."""
        if i < self.sinks:
            return 0, i
        column, at = divmod(i - self.sinks, self.page_size)
        return 1 + column, at

    def end(self, column: int) -> int:
        return self.sinks + column * self.page_size

    def group_bytes(self, column: int, entry: int) -> int:
        tokens = self.page_size if column else -(-self.sinks // 16) * 16
        return self.heads * _C.page_bytes(entry >> 8 & 255, entry & 255, DIM, DIM, tokens)


@dataclass
class Row:
    """A sequence: (slot, tag) of every stored token, (-1, 0) for dead ones; the columns whose page is sealed."""

    tokens: list[tuple[int, int]] = field(default_factory=list)
    sealed: set[int] = field(default_factory=set)

    def copy(self) -> Row:
        return Row(list(self.tokens), set(self.sealed))

    def live(self) -> list[tuple[int, int]]:
        return [token for token in self.tokens if token[0] >= 0]

    def plain(self) -> bool:
        return all(slot == self.tokens[0][0] + i for i, (slot, _) in enumerate(self.tokens))

    def append(self, spec: Spec, new: list[tuple[int, int]]) -> list[int]:
        """Adds tokens; returns the columns with older tokens that were sealed in the process."""
        n, sealed = len(self.tokens), []
        if not new:
            return sealed
        self.tokens += new
        last = spec.column(len(self.tokens) - 1)[0]
        for column in range(1, last + 1):
            end, fresh = spec.end(column), spec.end(column - 1) >= n
            if not spec.seals(column) or column in self.sealed:
                continue
            draft = len(new) <= spec.page_size
            far_behind = not draft and end <= len(self.tokens) - max(spec.page_size, spec.recent)
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
    """The two locations of token index i's tag, as int32 views of the arena. `raw`: pages being sealed."""
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
    """Everything that a failed append must not change. Empty columns at the end are capacity, not state."""
    entries = table.entries[:, 0]
    used = int((entries >= 0).any(0).nonzero()[0].max(initial=-1)) + 1
    return {
        "entries": entries[:, :used].tolist(), "rows": table.rows.tolist(), "slots": table.slots.tolist(),
        "seen": table.seen, "batch": table.batch, "stats": table.stats() | {"table_bytes": 0},
        "refs": [table.pool.refs((e >> 16) * 64) for e in entries[entries >= 0].tolist()],
        "pool": {k: v for k, v in table.pool.stats().items() if k in ("used", "slots")},
    }  # fmt: skip


class Pair:
    """A table and its model, operated together."""

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
                if raw != before[b, column]:  # a copy of a shared page, to be filled by this call
                    assert spec.end(column) > n and raw not in before
                    assert table.pool.refs((raw >> 16) * 64) == 1
        assert raw_of.keys() == sealed_now
        for raw, sealed in seals:
            self.seal(raw, sealed, int((self.table.entries == sealed).nonzero()[2][0]))
        if commit:
            table.commit()
            self.seen += T
            self.sidecar |= not all(row.plain() for row in self.rows)
        else:
            table.rollback()
            self.rows, self.sidecar = old_rows, old_sidecar

    def seal(self, raw: int, sealed: int, column: int) -> None:
        """Emulates the op: copies the raw page to the sealed one."""
        spec, arena, size = self.spec, self.table.pool.arena, 4 * self.spec.page_size
        assert {raw >> 8 & 255, raw & 255} == {CODE[spec.raw]}
        assert (sealed >> 8 & 255, sealed & 255) == tuple(CODE[name] for name in spec.formats(column))
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

    def drop(self, before: list[int]) -> None:
        """Drops pages at the front whose tokens all have slots below before[b], but not the last page of a row."""
        P, pages = self.spec.page_size, 0
        for row, end in zip(self.rows, before, strict=True):
            while len(row.tokens) > P and all(slot < end for slot, _ in row.tokens[:P]):
                row.tokens, row.sealed, pages = row.tokens[P:], {c - 1 for c in row.sealed if c > 1}, pages + 1
        assert self.table.drop(np.array(before, np.int64), 0) == pages
        if pages:
            self.sidecar = not all(row.plain() for row in self.rows)

    def select(self, index: list[int], *others: Pair) -> None:
        self.table.select(np.array(index, np.int64), *(x.table for x in others))
        for pair in {id(x): x for x in (self, *others)}.values():
            pair.rows = [pair.rows[i].copy() for i in index]

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
                wanted = spec.formats(column) if sealed else (spec.raw, spec.raw)
                assert (entry >> 8 & 255, entry & 255) == (CODE[wanted[0]], CODE[wanted[1]])
                if entry not in counted:
                    kind = "sink" if column == 0 else "sealed" if sealed or not spec.seals(column) else "open"
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
    Spec(
        spans=((20, "raw_f32", "raw_f32"), (60, "int8", "int4"), (90, "raw_f32", "raw_f32")), key="int2", value="int2"
    ),
    Spec(raw="raw_f16", key="int4", value="int4", sinks=0, recent=20),
    Spec(direct=True, spans=((30, "fp8_e4m3", "int8"), (31, "int8", "fp8_e4m3")), page_size=32),
]


def pair_of(batch: int = 1, **options: Any) -> Pair:
    spec = Spec(**options)
    return Pair(spec, spec.table(_C.Pool(1 << 27), batch), [Row() for _ in range(batch)])


def kinds(table: Any, b: int = 0) -> str:
    """Columns of a row: . none, r raw, s sealed."""
    return "".join(
        "." if e < 0 else "r" if {e >> 8 & 255, e & 255} <= RAW else "s" for e in table.entries[b, 0].tolist()
    ).rstrip(".")
