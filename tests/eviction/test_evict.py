"""Eviction in the table: any tokens of any head, interleaved with all other operations of a layer."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from kvcompress import _C, PagedKV, formats, ops
from kvcompress.eviction import tokens
from kvcompress.eviction.eviction import Eviction

H, D, PAGE = 2, 32, 16
EXACT = {"raw", "int8", "nvfp4", "int4_token", "int2_asym"}  # formats whose tokens are moved as codes
LAYERS: list[dict[str, Any]] = [
    {"key": "raw"}, {"key": "int8", "sinks": 0}, {"key": "int8", "residual_length": 0},
    {"key": "int4_token", "residual_length": 20},
    {"key": "nvfp4", "value": "int2_asym", "sinks": 20, "dtype": torch.bfloat16}, {"key": "int4", "value": "int8"},
    {"key": "kivi2"}, {"key": "int8", "value": "int4", "page_size": 32},
    {"key": "int8", "spans": [(0, 30, "int4"), (30, 60, "raw")]},
]  # fmt: skip


class Pair:
    """A layer, and its expected contents: rows[b][h] = {slot: (k, v) as first sealed or written}."""

    def __init__(self, kv: PagedKV, rows: list[list[dict[int, int]]]) -> None:
        self.kv, self.rows, self.exact = kv, rows, True  # exact: no page was demoted

    def held(self) -> list[list[list[int]]]:
        return [[x.tolist() for x in row] for row in self.kv.kept_heads().slots]


def state(kv: PagedKV) -> dict[str, Any]:
    """Everything that a failed call must not change."""
    table = kv.page_store.table
    used = [e for e in table.entries.ravel().tolist() if e >= 0]
    return {
        "entries": used, "rows": table.rows.tolist(), "seen": kv.seen, "slots": table.slots.tolist(),
        "refs": [kv.page_store.pool.refs((e >> 16) * 64) for e in used], "dense": [x.tolist() for x in kv.dense()],
        "pool": {k: v for k, v in kv.page_store.pool.stats().items() if k in ("used", "slots")},
    }  # fmt: skip


class Machine(RuleBasedStateMachine):
    """Several layers over one pool; any allocation may fail. Stored values are compared with those before."""

    pairs = Bundle("pairs")

    @initialize(target=pairs, options=st.sampled_from(LAYERS), batch=st.integers(1, 3))
    def start(self, options: dict[str, Any], batch: int) -> Pair:
        self.pool, self.options, self.seed = _C.Pool(1 << 27), options, 0
        kv = PagedKV(H, D, batch=batch, pool=self.pool, **{"page_size": PAGE, **options})
        first = Pair(kv, [[{} for _ in range(H)] for _ in range(batch)])
        self.all = [first]
        self.append_now(first, 90, False, 0)
        return first

    def guarded(self, fail: int, kv: PagedKV, call: Any) -> bool:
        """Runs call with its fail-th allocation failing; a failure must change nothing."""
        before = state(kv) if fail else None
        failed = False
        _C.alloc_fail_at(fail)
        try:
            call()
        except MemoryError:
            failed = True
        finally:
            _C.alloc_fail_at(0)
        # Not in the handler: frames of the traceback hold references to pages.
        assert not failed or state(kv) == before
        return not failed

    failing = st.sampled_from([0, 0, 0, 0, 0, 1, 2, 3, 5, 8, 12, 20, 30, 50])

    @rule(pair=pairs, T=st.sampled_from([1, 2, 15, 40, 90]), pads=st.booleans(), fail=failing)
    def append(self, pair: Pair, T: int, pads: bool, fail: int) -> None:
        self.append_now(pair, T, pads, fail)

    @rule(pair=pairs, T=st.sampled_from([1, 16, 33, 64]))
    def go_on(self, pair: Pair, T: int) -> None:
        self.append_now(pair, T, False, 0)

    def append_now(self, pair: Pair, T: int, pads: bool, fail: int) -> None:
        kv = pair.kv
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        k, v = (torch.randn(kv.batch, H, T, D, generator=generator).to(kv.dtype) for _ in range(2))
        mask = torch.rand(kv.batch, T, generator=generator) < 0.8 if pads else None
        seen = kv.seen
        if not self.guarded(fail, kv, lambda: kv.append(k, v, mask)):
            return
        for b, row in enumerate(pair.rows):
            real = range(T) if mask is None else mask[b].nonzero().flatten().tolist()
            for h in range(H):
                row[h].update({seen + t: 1 for t in real})

    @rule(pair=pairs, seed=st.integers(0, 99), share=st.sampled_from([0.0, 0.3, 0.7, 0.97, 1.0]),
          each=st.booleans(), fail=failing)  # fmt: skip
    def evict(self, pair: Pair, seed: int, share: float, each: bool, fail: int) -> None:
        kv = pair.kv
        keep = torch.from_numpy(np.random.default_rng(seed).random((kv.batch, H if each else 1, kv.seen)) < share)
        if kv.page_store.table.rows.shape[1] > 1 and not each:
            keep = keep.expand(-1, H, -1)
        slots = kv.kept_heads().slots
        table = kv.page_store.table
        for b in range(kv.batch):  # the sinks of the table are the tokens it stored first
            for h in range(H):
                line = h if table.rows.shape[1] > 1 else 0
                n = min(kv.sinks, int(table.rows[b, line, 0]))
                sidecar = table.slots[b, line] if table.slots.size else np.arange(n) + table.rows[b, line, 1]
                keep[b, h if each else 0, torch.from_numpy(sidecar[:n].astype(np.int64))] = True
        before = kv.dense()
        pages = table.stats()
        if not self.guarded(fail, kv, lambda: kv.evict(keep if each else keep[:, 0])):
            return
        plain = pair.exact and "spans" not in self.options
        after, exact = kv.dense(), self.options["key"] in EXACT and plain
        for b in range(kv.batch):
            for h in range(H):
                stays = keep[b, h if each else 0]
                pair.rows[b][h] = {slot: 1 for slot in pair.rows[b][h] if stays[slot]}
                live = [s for s in slots[b][h].tolist() if stays[s]]
                for old, new, whole in zip(before, after, (exact, plain), strict=True):
                    a, z = old[b, h, live].float(), new[b, h, live].float()
                    assert torch.equal(a, z) if whole else (a - z).norm() <= 0.6 * a.norm() + 1e-3
        if share == 0.0 and kv.sinks == 0:
            assert table.stats()["sealed_pages"] == 0 and pages["seen"] == kv.seen

    @rule(pair=pairs, seed=st.integers(0, 99), share=st.sampled_from([0.5, 1.0]), fail=failing)
    def demote(self, pair: Pair, seed: int, share: float, fail: int) -> None:
        """Evicts some tokens and demotes some pages, separately for each head."""
        kv, table, random = pair.kv, pair.kv.page_store.table, np.random.default_rng(seed)
        slots = Eviction.bare(kv.page_store, None, ops.attend).slots().expand(-1, H, -1)
        keep = torch.from_numpy(random.random(slots.shape) < share) | (torch.arange(slots.shape[2]) < kv.sinks)
        own = formats.CODES["int2_asym"] if D % 32 else formats.CODES["int2"]
        columns = table.entries.shape[2]
        wanted = random.choice([-1, own << 8 | own, formats.CODES["int4_token"] << 8 | own], (kv.batch, H, columns))
        now = np.broadcast_to(table.entries, wanted.shape)
        bits = np.array([row["bits"] for row in formats.TABLE])
        up = (bits[wanted >> 8 & 15] > bits[now >> 8 & 15]) | (bits[wanted & 15] > bits[now & 15])
        wanted = torch.from_numpy(np.where(up | (now < 0), -1, wanted).astype(np.int32))
        before = kv.dense()
        if not self.guarded(fail, kv, lambda: tokens.drop(kv.page_store, (keep & (slots >= 0)).contiguous(), wanted)):
            return
        pair.exact = False
        after = kv.dense()
        for b, h in np.ndindex(kv.batch, H):
            live = sorted(set(slots[b, h][keep[b, h] & (slots[b, h] >= 0)].tolist()))
            pair.rows[b][h] = {slot: 1 for slot in live}
            for old, new in zip(before, after, strict=True):
                a, z = old[b, h, live].float(), new[b, h, live].float()
                assert (a - z).norm() <= 0.6 * a.norm() + 1e-3

    @rule(pair=pairs, back=st.sampled_from([1, 3, 5, 8, 20, 60, 150]), fail=failing)
    def crop(self, pair: Pair, back: int, fail: int) -> None:
        seen = max(pair.kv.seen - back, 0)
        if self.guarded(fail, pair.kv, lambda: pair.kv.crop(seen)):
            pair.rows = [[{s: 1 for s in head if s < seen} for head in row] for row in pair.rows]

    @rule(pair=pairs, index=st.lists(st.integers(0, 99), min_size=1, max_size=4), fail=failing)
    def select(self, pair: Pair, index: list[int], fail: int) -> None:
        rows = [i % pair.kv.batch for i in index]
        if self.guarded(fail, pair.kv, lambda: pair.kv.select(rows)):
            pair.rows = [[dict(head) for head in pair.rows[i]] for i in rows]

    @rule(pair=pairs, batch=st.integers(1, 3), often=st.integers(0, 5), fail=failing)
    def reset(self, pair: Pair, batch: int, often: int, fail: int) -> None:
        if often == 1 and self.guarded(fail, pair.kv, lambda: pair.kv.reset(batch)):
            pair.rows = [[{} for _ in range(H)] for _ in range(batch)]

    @rule(target=pairs, pair=pairs, fail=failing)
    def clone(self, pair: Pair, fail: int) -> Any:
        copies: list[PagedKV] = []
        if len(self.all) >= 3 or not self.guarded(fail, pair.kv, lambda: copies.append(pair.kv.clone())):
            return multiple()
        twin = Pair(copies[0], [[dict(head) for head in row] for row in pair.rows])
        twin.exact = pair.exact
        self.all.append(twin)
        return twin

    @invariant()
    def holds(self) -> None:
        owners: Counter[int] = Counter()
        for pair in getattr(self, "all", ()):
            kv, table = pair.kv, pair.kv.page_store.table
            assert pair.held() == [[sorted(head) for head in row] for row in pair.rows]
            k, v = kv.dense()
            assert bool(k.isfinite().all()) and bool(v.isfinite().all())
            owners.update((e >> 16) * 64 for e in table.entries.ravel().tolist() if e >= 0)
            lines = [len(head) for row in pair.rows for head in (row if table.rows.shape[1] > 1 else row[:1])]
            assert table.stats()["kept"] == -(-sum(lines) // table.rows.shape[1])
            self.check_attention(kv, k, v)
        if owners:
            self.pool.check()
            assert self.pool.stats()["slots"] == len(owners)  # none lost
            assert all(self.pool.refs(offset) == n for offset, n in owners.items())

    def check_attention(self, kv: PagedKV, k: torch.Tensor, v: torch.Tensor) -> None:
        if kv.seen == 0:
            return
        there = torch.zeros(kv.batch, H, kv.seen, dtype=torch.bool)
        for b, row in enumerate(kv.kept_heads().slots):
            for h, slots in enumerate(row):
                there[b, h, slots] = True
        q = torch.randn(kv.batch, H, 1, D, generator=torch.Generator().manual_seed(self.seed))
        out, lse = kv.attend(q)
        s = (q.double() @ k.double().transpose(2, 3) / D**0.5).masked_fill(~there[:, :, None], -torch.inf)
        want = s.softmax(-1).nan_to_num(0) @ v.double()
        torch.testing.assert_close(out.double(), want, atol=5e-2, rtol=5e-2)
        assert torch.equal(lse == -torch.inf, s.logsumexp(-1) == -torch.inf)

    def teardown(self) -> None:
        getattr(self, "all", []).clear()


def test_a_page_from_pages_of_several_formats():
    """V of some tokens is copied as codes, of others re-encoded."""
    machine = Machine()
    pair = machine.start(options={"key": "raw"}, batch=1)
    for T in (1, 1, 1, 1, 33):
        machine.go_on(pair=pair, T=T)
    for seed in (0, 1):
        machine.demote(pair=pair, seed=seed, share=0.5, fail=0)


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=int(os.environ.get("KVCOMPRESS_SOAK", "60")), stateful_step_count=25, deadline=None,
    derandomize="KVCOMPRESS_SOAK" not in os.environ, database=None, suppress_health_check=list(HealthCheck),
)  # fmt: skip


# ------------------------------------------------------------------ single facts


def filled(n: int = 200, **options: Any) -> PagedKV:
    kv = PagedKV(H, D, **{"page_size": PAGE, "key": "int8", **options})
    generator = torch.Generator().manual_seed(5)
    kv.append(*(torch.randn(kv.batch, H, n, D, generator=generator) for _ in range(2)))
    return kv


def test_heads_part_only_when_they_keep_different_tokens():
    kv = filled()
    keep = torch.rand(1, 1, 200) < 0.5
    keep[:, :, :4] = True
    kv.evict(keep.expand(1, H, 200))
    assert kv.page_store.table.entries.shape[1] == 1
    keep = torch.rand(1, H, 200) < 0.5
    keep[:, :, :4] = True
    kv.evict(keep)
    assert (
        kv.page_store.table.entries.shape[1] == H
        and kv.kept_heads().slots[0][0].tolist() != kv.kept_heads().slots[0][1].tolist()
    )
    kv.reset()
    assert kv.page_store.table.entries.shape[1] == 1


def test_pages_go_back_at_once_and_holes_are_filled():
    kv = filled(4 + 16 * 10)  # 4 sinks and 10 pages, of which the newest is open
    used = kv.page_store.pool.stats()["used"]
    keep = torch.ones(1, kv.seen, dtype=torch.bool)
    keep[0, 4:148:2] = False  # half of each of the 9 sealed pages
    kv.evict(keep)
    assert kv.page_store.table.stats()["sealed_pages"] == 5 and kv.page_store.table.stats()["rewritten"] == 0
    code = formats.CODES["int8"]
    assert used - kv.page_store.pool.stats()["used"] == 4 * H * _C.page_bytes(code, code, D, D, 16)
    kept = kv.page_store.table.slots[0, 0, : kv.page_store.table.rows[0, 0, 0]]
    assert (kept[4 : 4 + 5 * 16] < 0).sum() == 8  # less than a page of dead tokens remains


def test_pages_with_statistics_are_written_anew_by_the_rule():
    """Nothing up to a quarter of dead tokens; beyond it the emptiest pages, until at most a sixteenth is dead."""
    kv = filled(4 + 16 * 17, key="int4")
    keep = torch.ones(1, kv.seen, dtype=torch.bool)
    keep[0, 4 : 4 + 16 * 16 : 4] = False  # exactly a quarter of 16 sealed pages
    kv.evict(keep)
    assert kv.page_store.table.stats()["rewritten"] == 0 and kv.page_store.table.stats()["sealed_pages"] == 16
    keep[0, 5] = False
    kv.evict(keep)
    stats = kv.page_store.table.stats()
    live = 16 * 12 - 1
    assert stats["rewritten"] > 0 and live / 16 <= stats["sealed_pages"] <= live / 16 * 16 / 15 + 1
    keep[:, 4:-16] = False
    kv.evict(keep)
    assert kv.page_store.table.stats()["sealed_pages"] == 0  # pages whose tokens are all dead


def test_shared_pages_are_not_touched():
    for key in ("int8", "int4"):
        kv = filled(key=key)
        twin = kv.clone()
        before = [x.clone() for x in twin.dense()]
        keep = torch.rand(1, H, 200, generator=torch.Generator().manual_seed(0)) < 0.4
        keep[:, :, :4] = True
        kv.evict(keep)
        assert all(torch.equal(a, b) for a, b in zip(before, twin.dense(), strict=True))
        del twin
        kv.page_store.pool.check()


def test_the_open_page_keeps_its_order():
    """So that the tokens appended last can be cropped exactly."""
    kv = filled(4 + 16 * 3 + 9)
    keep = torch.ones(1, kv.seen, dtype=torch.bool)
    keep[0, [54, 57, 60]] = False
    kv.evict(keep)
    assert kv.page_store.table.slots[0, 0, 52 : 52 + 6].tolist() == [52, 53, 55, 56, 58, 59]
    kv.crop(58)
    assert kv.kept()[0][0].tolist() == [s for s in range(58) if s not in (54, 57)]


def test_bad_arguments_change_nothing():
    kv = filled()
    before = state(kv)
    with pytest.raises(ValueError, match=r"first 4 tokens \(sinks\) kept, got token 0"):
        kv.evict(torch.zeros(1, 200, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"expected bool \[B, seen\]"):
        kv.evict(torch.ones(1, 199, dtype=torch.bool))
    with pytest.raises(ValueError, match="expected 2 heads, got 3"):
        kv.evict(torch.ones(1, 3, 200, dtype=torch.bool))
    with pytest.raises(ValueError, match="layer with a policy"):
        kv.evict()
    with pytest.raises(TypeError, match="expected a bool tensor, got int"):
        kv.evict(5)
    for start, error in ((-3, ValueError), (201, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match="start: expected"):
            kv.dense(start)
    for keep, text in ((np.ones((2, 1, 200), bool), "expected 1 rows"), (np.ones((1, 1, 9), bool), "200 stored tokens"),
                       (np.ones((1, 3, 200), bool), "expected 1 or 2 heads")):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            kv.page_store.table.plan_evict(keep)
    with pytest.raises(TypeError, match="bool"):
        kv.page_store.table.plan_evict(np.ones((1, 1, 200)))
    assert kv.page_store.table.plan_evict(np.ones((1, 1, 200), bool)) is None  # and no plan is left
    kv.page_store.table.plan_evict((np.arange(200) != 100)[None, None])
    with pytest.raises(ValueError, match="under way"):
        kv.append(torch.randn(1, H, 1, D), torch.randn(1, H, 1, D))
    kv.page_store.table.rollback()
    assert state(kv) == before


def test_select_takes_the_best_ties_to_the_younger():
    scores = torch.tensor([[[1.0, 5.0, 1.0, 1.0, 0.0, 9.0]]])
    slots = torch.tensor([[[0, 4, 2, 8, 1, -1]]], dtype=torch.int32)
    protect = torch.tensor([[[False, False, False, False, True, True]]])
    for budget, kept in ((0, [4]), (1, [4]), (2, [1, 4]), (3, [1, 3, 4]), (4, [1, 2, 3, 4]), (9, [0, 1, 2, 3, 4])):
        keep = ops.select(scores, slots, protect, torch.tensor([[budget]]))
        assert keep[0, 0].nonzero().flatten().tolist() == kept
    assert ops.select(scores, slots, None, torch.tensor([[1]]))[0, 0].tolist() == [False, True] + [False] * 4
    with pytest.raises(ValueError, match="NaN at token 1 of row 0"):
        ops.select(torch.tensor([[[0.0, torch.nan]]]), slots[:, :, :2].contiguous(), None, torch.tensor([[1]]))
    with pytest.raises(ValueError, match="0 or more tokens"):
        ops.select(scores, slots, None, torch.tensor([[-1]]))
    with pytest.raises(ValueError, match="other shapes"):
        ops.select(scores, slots[:, :, :3].contiguous(), None, torch.tensor([[1]]))


def test_compact_checks_its_moves():
    kv = filled()
    arena = kv.page_store.views()[0]
    raw = formats.resolve("raw", torch.float32)
    code = formats.CODES["int8"]
    page = int(kv.page_store.table.entries[0, 0, 1])
    for move, text in (((0, 0, 0, -1, 0, 16), "names none"), ((0, page, 99, page, 0, 16), "tokens from 0 to 15"),
                       ((0, page, 0, page, 0, 64), "pages of 16 tokens"),
                       ((0, page, -1, page & ~0xFFFF | raw << 8 | raw, 0, 16), "one format"),
                       ((0, (1 << 40) | code << 8 | code, 0, page, 0, 16), "inside the arena")):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            ops.compact(arena, torch.tensor([move]), H, 1, D, D, 16, 4)
