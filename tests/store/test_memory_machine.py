"""Pool, tables, prefix index and tiers together, compared with plain lists: no page is lost, freed too early, or
wrong.

K and V of a token are functions of the token and its position, so the contents of a page follow from its tokens. Pages
from an index or a tier are compared with that."""

from __future__ import annotations

import functools
import gc
import os
from collections import Counter
from typing import Any

import numpy as np
import soaked
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcompress import _C, PagedKV, Tiers, formats
from kvcompress.offload.prefetch import LayerOffload, Prefetcher
from kvcompress.serving.prefix_offload import Spill
from kvcompress.store import serialize

NAME = "pool, tables, prefix index and tiers"
P, D, ROOT, SPACE = 16, 16, b"r" * 32, 1 << 26
SPECS = {"raw": {"key": "raw", "sinks": 0}, "int8": {"key": "int8", "sinks": 4}, "int4": {"key": "int4", "sinks": 4}}
BOUND = {"raw": 1e-5, "int8": 5e-3, "int4": 2e-2}


def values(tokens: list[int], first: int) -> torch.Tensor:
    """K of tokens at positions from `first` on: [1, 1, T, D]."""
    t = torch.tensor(tokens, dtype=torch.float32)[:, None]
    place = torch.arange(first, first + len(tokens), dtype=torch.float32)[:, None]
    return torch.sin(3 * t + 0.1 * place + torch.arange(D)).reshape(1, 1, len(tokens), D)


@functools.lru_cache(maxsize=1 << 14)
def stored_as(spec: str, tokens: tuple[int, ...], first: int) -> torch.Tensor:
    """The sealed contents of a full page of these tokens, from a fresh layer."""
    options = {**SPECS[spec], "sinks": 0}
    layer = PagedKV(1, D, page_size=P, **options)
    k = values(list(tokens), first)
    layer.append(k, k)
    layer.append(k[:, :, :1], k[:, :, :1])
    return layer.dense()[0][0, 0, :P]


class Layer:
    """A layer, its expected tokens, and the file it is suspended to."""

    def __init__(self, store: PagedKV, tokens: list[int]) -> None:
        self.store, self.tokens = store, tokens
        self.suspended: Any = None


class Machine(RuleBasedStateMachine):
    @initialize(spec=st.sampled_from(sorted(SPECS)), max_entries=st.sampled_from([0, 0, 3, 9]),
                host=st.sampled_from([None, 0, 5000, 40_000]), file=st.sampled_from([None, 0, 9000]),
                in_place=st.booleans())  # fmt: skip
    def start(self, spec: str, max_entries: int, host: int | None, file: int | None, in_place: bool) -> None:
        self.spec, self.pool, self.max_entries = spec, _C.Pool(SPACE), max_entries or 1 << 62
        self.index = _C.Prefix(self.pool)
        self.tiers = Tiers(host_bytes=host, file_bytes=file)
        self.spill = Spill(self.tiers, self.pool, self.index, lambda root: [self.pool])
        self.prefetcher = Prefetcher(self.tiers, resident=0, unit=1, in_place=in_place)
        self.layers: list[Layer] = []
        self.known: set[tuple[int, ...]] = set()
        self.alive: set[int] = set()  # links of the index
        self.newest_link = 0
        self.squeezed = False  # offloaded links may have lost their tier
        self.pinned: list[list[int]] = []
        soaked.steps[NAME] -= 1  # does not count
        sinks = SPECS[spec]["sinks"]
        self.chain = (sinks + P, P, 2 if sinks else 1, 1)

    def fresh(self) -> PagedKV:
        return PagedKV(1, D, page_size=P, pool=self.pool, **SPECS[self.spec])

    def pick(self, i: int) -> Layer | None:
        there = [x for x in self.layers if x.suspended is None]
        return there[i % len(there)] if there else None

    def guarded(self, fail: int, act: Any) -> Any:
        """The result of act() with its fail-th allocation failing; None if it failed."""
        _C.alloc_fail_at(fail)
        try:
            return act()
        except MemoryError:
            return None
        finally:
            _C.alloc_fail_at(0)

    number = st.integers(0, 9)
    failing = st.sampled_from([0, 0, 0, 1, 2, 3, 5, 9])
    text = st.lists(st.integers(0, 1), min_size=1, max_size=50)  # two distinct tokens: prompts often share a prefix

    # ------------------------------------------------------------------ layers

    @rule(tokens=text)
    @precondition(lambda self: len(self.layers) < 8)
    def new(self, tokens: list[int]) -> None:
        self.layers.append(Layer(self.fresh(), []))
        self.feed(len(self.layers) - 1, tokens, 0)

    @rule(i=number, tokens=text, fail=failing)
    def feed(self, i: int, tokens: list[int], fail: int) -> None:
        layer = self.pick(i)
        if layer is None:
            return
        k = values(tokens, len(layer.tokens))
        if self.guarded(fail, lambda: layer.store.append(k, k) or True):
            layer.tokens += tokens

    @rule(i=number, fail=failing)
    @precondition(lambda self: len(self.layers) < 8)
    def copy(self, i: int, fail: int) -> None:
        layer = self.pick(i)
        if layer is not None and (twin := self.guarded(fail, layer.store.clone)) is not None:
            self.layers.append(Layer(twin, list(layer.tokens)))

    @rule(i=number, back=st.integers(0, 12), fail=failing)
    def crop(self, i: int, back: int, fail: int) -> None:
        layer = self.pick(i)
        if layer is None:
            return
        # A crop into a sealed page leaves dead tokens; here pages start at the same position in every layer.
        sealed = layer.store.page_store.sealed_columns(0) * P + SPECS[self.spec]["sinks"]
        seen = max(len(layer.tokens) - back, min(sealed, len(layer.tokens)))
        if self.guarded(fail, lambda: layer.store.crop(seen) or True):
            del layer.tokens[seen:]

    @rule(i=number)
    def free(self, i: int) -> None:
        if self.layers:
            self.layers.pop(i % len(self.layers))

    # ------------------------------------------------------------------ the prefix index

    def links(self, tokens: list[int]) -> int:
        return 0 if len(tokens) < self.chain[0] else 1 + (len(tokens) - self.chain[0]) // P

    @rule(i=number, fail=failing, pin=st.booleans())
    def commit(self, i: int, fail: int, pin: bool) -> None:
        layer = self.pick(i)
        if layer is None or (layer.store.offload and layer.store.offload.runs):
            return
        n = min(layer.store.page_store.sealed_columns(0), self.links(layer.tokens))
        if n < 1:
            return
        sinks = SPECS[self.spec]["sinks"]
        tokens = layer.tokens[: sinks + n * P]
        entries = np.ascontiguousarray(layer.store.page_store.table.entries[0, 0, 0 if sinks else 1 : n + 1])
        args = (ROOT, np.array(tokens), *self.chain)
        offloaded = self.index.offloaded(*args)
        held = self.guarded(fail, lambda: self.index.put(*args, entries))
        self.spill.filled(offloaded, args)
        if held is not None:
            self.known |= {tuple(tokens[: sinks + k * P]) for k in range(1, held + 1)}
        if pin and self.index.pin(*args, 1):
            self.pinned.append(tokens)
        self.spill.shrink(1 << 62, self.max_entries)

    @rule(tokens=text, i=number, like=st.booleans(), bring=st.booleans(), fail=failing)
    @precondition(lambda self: len(self.layers) < 8)
    def open(self, tokens: list[int], i: int, like: bool, bring: bool, fail: int) -> None:
        layer = self.pick(i)
        if like and layer is not None:
            tokens = layer.tokens + tokens
        array = np.array(tokens)
        if bring:
            self.guarded(fail, lambda: self.spill.bring((ROOT, array, *self.chain)))
        n = self.index.find(ROOT, array, *self.chain)
        sinks = SPECS[self.spec]["sinks"]
        known = max(k for k in range(self.links(tokens) + 1) if not k or tuple(tokens[: sinks + k * P]) in self.known)
        stats = self.index.stats()
        assert n <= known and (n == known or stats["evicted"] or stats["offloaded"])
        assert not bring or fail or self.squeezed or not len(self.index.offloaded(ROOT, array, *self.chain))
        if not n:
            return
        cut, found = array[: sinks + n * P], np.empty(n + (sinks > 0), np.int64)
        assert self.index.take(ROOT, cut, *self.chain, found) == n
        entries = found if sinks else np.concatenate([[-1], found])
        store = self.fresh()
        rows = np.array([[[len(cut), 0]]])
        if self.guarded(fail, lambda: store.take_over(entries.reshape(1, 1, -1), rows, None, None, len(cut)) or True):
            self.layers.append(Layer(store, cut.tolist()))
        else:
            self.pool.drop((found >> 16) * 64)

    @rule(bytes=st.sampled_from([0, 2000, 10_000]), fail=failing)
    def trim(self, bytes: int, fail: int) -> None:
        self.guarded(fail, lambda: self.spill.shrink(bytes, self.max_entries))

    def links_here(self) -> int:
        stats = self.index.stats()
        return stats["entries"] - stats["offloaded"]

    @rule(n=st.integers(1, 6))
    def squeeze(self, n: int) -> None:
        """The pool is full: up to n links are evicted for pages of their size."""
        format = formats.resolve(self.spec, torch.float32)
        size, most = _C.page_bytes(format, format, D, D, P), self.links_here() - n
        held = [self.pool.alloc(SPACE - self.pool.extent)] if self.pool.extent < SPACE else []
        self.squeezed = True
        try:
            while self.links_here() > max(0, most):
                held.append(self.pool.alloc(size))
        except MemoryError:
            pass
        finally:
            self.pool.drop(np.array(held, np.int64))

    @rule(i=number)
    def unpin(self, i: int) -> None:
        if self.pinned:
            tokens = self.pinned.pop(i % len(self.pinned))
            self.index.pin(ROOT, np.array(tokens), *self.chain, -1)

    # ------------------------------------------------------------------ tiers

    @rule(i=number)
    def away(self, i: int) -> None:
        layer = self.pick(i)
        if layer is None:
            return
        if layer.store.offload is None:
            layer.store.attach(LayerOffload(layer.store.page_store, self.prefetcher))
        self.prefetcher.warned = True
        layer.store.offload.offload_oldest()

    @rule(i=number, fail=failing)
    def onload(self, i: int, fail: int) -> None:
        layer = self.pick(i)
        if layer is not None and layer.store.offload is not None:
            self.guarded(fail, layer.store.offload.onload)

    @rule(i=number, fail=failing)
    def suspend(self, i: int, fail: int) -> None:
        layer = self.pick(i)
        if layer is None or not layer.tokens:
            return

        def act() -> Any:
            layer.store.onload()
            arrays, pieces = serialize.survey(layer.store.page_store)
            return arrays, *serialize.gather(layer.store.page_store, pieces)

        layer.suspended = self.guarded(fail, act)
        if layer.suspended is not None:
            layer.store.page_store.table.reset()

    @rule(i=number, fail=failing)
    def resume(self, i: int, fail: int) -> None:
        offloaded = [x for x in self.layers if x.suspended is not None]
        if offloaded:
            layer = offloaded[i % len(offloaded)]
            if self.guarded(fail, lambda: serialize.place(layer.store.page_store, *layer.suspended) or True):
                layer.suspended = None

    # ------------------------------------------------------------------ invariants

    @rule(i=number)
    def read(self, i: int) -> None:
        layer = self.pick(i)
        if layer is None or not layer.tokens:
            return
        k, v = layer.store.dense()
        assert torch.equal(k, v) or self.spec != "raw"
        wanted, sinks = values(layer.tokens, 0)[0, 0], SPECS[self.spec]["sinks"]
        for column in range(layer.store.page_store.sealed_columns(0) if not layer.store.offload else 0):
            at = sinks + column * P
            wanted[at : at + P] = stored_as(self.spec, tuple(layer.tokens[at : at + P]), at)
        if layer.store.offload:  # the table does not show which of them are sealed: take the nearer one
            for at in range(sinks, len(layer.tokens) - P + 1, P):
                page = stored_as(self.spec, tuple(layer.tokens[at : at + P]), at)
                if torch.equal(k[0, 0, at : at + P], page):
                    wanted[at : at + P] = page
        assert k.shape[2] == len(layer.tokens) and torch.equal(k[0, 0], wanted)

    @rule(i=number)
    def attend(self, i: int) -> None:
        layer = self.pick(i)
        if layer is None or not layer.tokens:
            return
        q = values([7], len(layer.tokens))
        k, v = (x[0, 0].double() for x in layer.store.dense())
        wanted = torch.softmax(q[0, 0].double() @ k.T / D**0.5, 1) @ v
        assert float((layer.store.attend(q)[0][0, 0].double() - wanted).norm()) <= BOUND[self.spec] * float(
            v.norm(dim=1).max()
        )

    def pages_of_links(self, count: int) -> list[int]:
        """Offsets of the pages of the index's links, `count` of which have pages."""
        found: dict[int, list[int]] = {}
        for link in (*self.alive, *range(self.newest_link + 1, self.newest_link + 256)):
            for n in {*self.chain[2:]}:
                if (pair := self.index.entries(link, n)) is not None:
                    found[link] = ((pair[0] >> 16) * 64).tolist()
                    self.pool.drop(np.array(found[link]))
        assert len(found) == count
        # Links that are offloaded now may get pages again.
        self.alive = {*found, *self.spill.waiting}
        self.newest_link = max(self.newest_link, *self.alive, 0)
        return [offset for offsets in found.values() for offset in offsets]

    @invariant()
    def sums(self) -> None:
        if not hasattr(self, "pool"):
            return
        soaked.steps[NAME] += 1
        self.pool.check()
        self.index.check()
        stages = self.prefetcher.stages.get(self.pool, ())
        owners: Counter[int] = Counter(stage.slot.offset for stage in stages if stage.slot)
        for layer in self.layers:
            entries = layer.store.page_store.table.entries
            owners.update(((entries[entries >= 0] >> 16) * 64).tolist())
        index = self.index.stats()
        owners.update(self.pages_of_links(index["entries"] - index["offloaded"]))
        assert {offset: self.pool.refs(offset) for offset in owners} == owners
        assert self.pool.stats()["slots"] == len(owners)
        here, there = self.tiers.stats(), [run for x in self.prefetcher.layers for run in x.runs]
        extents = {id(run.extent): run.extent for run in there}
        groups = {id(group): group for group in self.spill.waiting.values()}
        waiting = [part[2].size for group in groups.values() for part in group.parts]
        assert here["host"] + here["file"] == sum(p.size for p in extents.values()) + sum(waiting)
        lost = index["offloaded"] - len(self.spill.waiting)
        assert lost == 0 or (lost > 0 and self.squeezed)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.layers.clear()
        gc.collect()
        for tokens in self.pinned:
            self.index.pin(ROOT, np.array(tokens), *self.chain, -1)
        self.spill.shrink(0, 0)
        stages = sum(stage.slot is not None for stage in self.prefetcher.stages.get(self.pool, ()))
        assert self.index.stats()["entries"] == 0
        stats = self.tiers.stats()
        assert self.pool.stats()["slots"] == stages and stats["host"] == stats["file"] == 0


soak = int(os.environ.get("KVCOMPRESS_SOAK", 0))
TestMemory = Machine.TestCase
TestMemory.settings = settings(
    max_examples=soak or 25, stateful_step_count=60 if soak else 50, deadline=None, report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip
