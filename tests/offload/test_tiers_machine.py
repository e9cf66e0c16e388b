"""A layer with a policy whose pages are offloaded and fetched, next to one whose pages stay: random calls, evictions,
crops, row selection, suspension, failing allocations. Both have identical contents and results."""

from __future__ import annotations

import os
from typing import Any

import soaked
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcompress import _C, PagedKV, Tiers, policies
from kvcompress.offload.prefetch import LayerOffload, Prefetcher
from kvcompress.store import serialize

NAME = "tiers under a policy"
H, HQ, D, P = 2, 4, 32, 16
POLICIES = {
    "StreamingLLM": lambda: policies.StreamingLLM(4, 44),
    "SlidingWindow": lambda: policies.SlidingWindow(48),
    "H2O": lambda: policies.H2O(budget=48),
    "H2O, heads alike": lambda: policies.H2O(budget=48, heads="shared"),
    "SnapKV": lambda: policies.SnapKV(48, window=4),
    "TOVA": lambda: policies.TOVA(48),
    "AdaKV": lambda: policies.AdaKV(policies.SnapKV(48, window=4)),
    "Demote": lambda: policies.Demote(policies.H2O(budget=64), ladder=("int8", "int4"), shares=(0.5, 0.5)),
}
BATCH = 2


class Pair(RuleBasedStateMachine):
    @initialize(name=st.sampled_from(sorted(POLICIES)), fmt=st.sampled_from(["raw", "int8", "int4", "kivi2"]),
                host=st.sampled_from([None, 0, 8000, 40_000]), file=st.sampled_from([None, 0, 9000]),
                resident=st.sampled_from([0, 16, 40]), unit=st.sampled_from([1, 4000]))  # fmt: skip
    def start(self, name: str, fmt: str, host: int | None, file: int | None, resident: int, unit: int) -> None:
        fmt = "int8" if name == "Demote" else fmt
        self.near, self.far = (
            PagedKV(H, D, key=fmt, page_size=P, batch=BATCH, policy=POLICIES[name](), pool=_C.Pool(1 << 24))
            for _ in range(2)
        )
        self.tiers = Tiers(host_bytes=host, file_bytes=file)
        self.prefetcher = Prefetcher(self.tiers, resident=resident, unit=unit)
        self.prefetcher.warned = True
        self.far.attach(LayerOffload(self.far.page_store, self.prefetcher))
        self.generator = torch.Generator().manual_seed(len(name) + resident)
        soaked.steps[NAME] -= 1  # does not count

    def both(self, act: Any, fail: int = 0) -> tuple[Any, Any]:
        """Runs act on each; first on the offloaded one with its fail-th allocation failing, which must change
        nothing."""
        if fail:
            _C.alloc_fail_at(fail)
            try:
                got = act(self.far)
                self.ended = True
            except MemoryError:
                self.ended = False
            finally:
                _C.alloc_fail_at(0)
        if not fail or not self.ended:
            got = act(self.far)
        self.far.eviction.evict_deferred()
        return got, act(self.near)

    failing = st.sampled_from([0, 0, 0, 0, 1, 2, 3, 5, 8, 13])

    @rule(T=st.sampled_from([1, 1, 1, 2, 7, 16, 40]), fail=failing)
    def call(self, T: int, fail: int) -> None:
        q, k, v = (torch.randn(BATCH, h, T, D, generator=self.generator) for h in (HQ, H, H))
        for got, want in zip(*self.both(lambda kv: kv.attend(q, k, v), fail), strict=True):
            assert torch.equal(got, want)

    @rule()
    def settle(self) -> None:
        self.far.offload.offload_oldest()

    @rule(fail=failing)
    def onload(self, fail: int) -> None:
        _C.alloc_fail_at(fail)
        try:
            self.far.offload.onload()
        except MemoryError:
            assert fail
        finally:
            _C.alloc_fail_at(0)

    @rule(back=st.sampled_from([1, 1, 2, 5, 15, 30, 100]))
    def crop(self, back: int) -> None:
        seen = max(0, self.near.seen - back)
        self.both(lambda kv: kv.crop(seen))

    @rule(index=st.sampled_from([[0, 1], [1, 0], [0, 0], [1, 1]]))
    def rows(self, index: list[int]) -> None:
        self.both(lambda kv: kv.select(index))

    @rule(every=st.integers(2, 5), head=st.booleans())
    def evict(self, every: int, head: bool) -> None:
        if self.near.seen:
            keep = torch.arange(self.near.seen) % every > 0
            keep[:8] = True
            keep = keep.expand(BATCH, H, -1).clone()
            keep[:, 1] |= head
            self.both(lambda kv: kv.evict(keep))

    @rule()
    def park(self) -> None:
        """Suspends and resumes the offloaded layer only, which must have no effect."""
        if self.far.seen:
            self.far.onload()
            arrays, pieces = serialize.survey(self.far.page_store)
            memory, checksum = serialize.gather(self.far.page_store, pieces)
            self.far.page_store.table.reset()
            serialize.place(self.far.page_store, arrays, memory, checksum)

    @rule()
    def copied(self) -> None:
        self.far = self.far.clone()
        self.far.attach(LayerOffload(self.far.page_store, self.prefetcher))

    @rule()
    def read(self) -> None:
        if not self.near.seen:
            return
        for got, want in zip(self.far.dense(), self.near.dense(), strict=True):
            assert torch.equal(got, want)
        got, want = self.far.kept_heads(), self.near.kept_heads()
        assert str(got) == str(want)

    @invariant()
    def sums(self) -> None:
        if not hasattr(self, "far"):
            return
        soaked.steps[NAME] += 1
        pool, table = self.far.page_store.pool, self.far.page_store.table
        pool.check()
        named = len({entry >> 16 for entry in table.entries[table.entries >= 0].tolist()})
        assert pool.stats()["slots"] == named + sum(bool(stage.slot) for stage in self.prefetcher.stages.get(pool, ()))
        sizes = [run.extent.size for away in self.prefetcher.layers for run in away.runs]
        assert self.tiers.bytes["host"] + self.tiers.bytes["file"] == sum(sizes)
        assert (table.rows == self.near.page_store.table.rows).all() and table.seen == self.near.seen

    def teardown(self) -> None:
        if hasattr(self, "far"):
            self.read()
            self.far.reset()
            assert self.tiers.bytes == {"host": 0, "file": 0}


TestPair = Pair.TestCase
TestPair.settings = settings(
    max_examples=int(os.environ.get("KVCOMPRESS_SOAK", 0)) or 40, stateful_step_count=40, deadline=None,
    report_multiple_bugs=False, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip
