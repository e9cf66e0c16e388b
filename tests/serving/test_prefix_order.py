"""The prefix index compared with a list in LRU order: what is evicted if there are too many links, or the pool is
full, and what is offloaded."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcompress import _C

PAGE, DEPTH, ROOT, CHAIN = 64 << 10, 4, b"r" * 32, (1, 1, 1, 1)  # a token and a page a link
SLOTS = (1 << 20) // PAGE

Node = tuple[int, ...]  # a link of a binary tree, identified by all tokens up to it
NODES = [tuple(map(int, f"{i:0{n}b}")) for n in range(1, DEPTH + 1) for i in range(1 << n)]


class Order(RuleBasedStateMachine):
    @initialize(max_pages=st.sampled_from([0, 0, 3, 7]), max_links=st.sampled_from([0, 0, 5]))
    def start(self, max_pages: int, max_links: int) -> None:
        self.pool = _C.Pool(1 << 20)  # a single slab
        self.index = _C.Prefix(self.pool, max_pages * PAGE, max_links)
        self.limits = max_pages or SLOTS, max_links or len(NODES)
        self.order: list[Node] = []  # least recently used first
        self.offloaded: dict[Node, int] = {}  # ids of links without pages; their descendants have none either
        self.pins: list[Node] = []
        self.page: dict[Node, int] = {}
        self.users: list[list[int]] = []  # pages of users that took a chain
        self.evicted = 0

    # ------------------------------------------------------------------ expected behaviour

    def known(self, node: Node) -> Node:
        return next((node[:n] for n in range(len(node), 0, -1) if self.resident(node[:n])), ())

    def resident(self, node: Node) -> bool:
        return node in self.order and node not in self.offloaded

    def touch(self, node: Node) -> None:
        for n in range(len(node), 0, -1):
            if node[:n] in self.order:
                self.order.remove(node[:n])
            self.order.append(node[:n])

    def loose(self, node: Node) -> bool:
        return not any(pin[: len(node)] == node for pin in self.pins)

    def evict(self, node: Node) -> None:
        self.order.remove(node)
        self.offloaded.pop(node, None)
        self.evicted += 1

    def oldest(self, here: bool) -> Node | None:
        return next((x for x in self.order if self.loose(x) and not (here and x in self.offloaded)), None)

    def give_way(self) -> bool:
        """The pool is full: evicts the oldest end of a chain that is not pinned and whose page has no other user. Only
        its page, if links after it are offloaded, as these need it."""
        for node in filter(self.resident, self.order):
            after = [x for x in self.order if x[: len(node)] == node and x != node]
            used = any(self.page[node] in pages for pages in self.users)
            if self.loose(node) and not any(map(self.resident, after)) and not used:
                if after:
                    self.offloaded[node] = 0  # its id is not known
                else:
                    self.evict(node)
                return True
        return False

    def shrink(self, pages: int, links: int) -> None:
        for node in list(self.order):
            if (len(self.order) - len(self.offloaded) > pages or len(self.order) > links) and self.loose(node):
                self.evict(node)

    def pages(self) -> int:
        """Slots in use: by links, and by users of evicted links."""
        return self.pool.stats()["slots"]

    # ------------------------------------------------------------------ operations

    node = st.sampled_from(NODES)

    @rule(node=node)
    def put(self, node: Node) -> None:
        own, n = [], len(self.known(node))
        for _ in node:
            if self.pages() == SLOTS and not self.give_way():
                break
            own.append(self.pool.alloc(PAGE))
        if len(own) == len(node):
            n = len(self.known(node))  # part of it may have been evicted
            entries = np.array(own) // 64 << 16
            held = self.index.put(ROOT, np.array(node), *CHAIN, entries)
            for k in range(n + 1, len(node) + 1):
                self.offloaded.pop(node[:k], None)
            self.page |= {node[:k]: own[k - 1] for k in range(n + 1, len(node) + 1)}
            self.touch(node)
            self.shrink(*self.limits)
            assert held == len(self.known(node))
        self.pool.drop(np.array(own, np.int64))

    @rule(node=node)
    def take(self, node: Node) -> None:
        found, entries = self.known(node), np.empty(len(node), np.int64)
        assert self.index.take(ROOT, np.array(node), *CHAIN, entries) == len(found)
        if found:
            self.touch(found)
            self.users.append(((entries[: len(found)] >> 16) * 64).tolist())
            assert self.users[-1] == [self.page[found[: k + 1]] for k in range(len(found))]

    @rule(i=st.integers(0, 9))
    def leave(self, i: int) -> None:
        if self.users:
            self.pool.drop(np.array(self.users.pop(i % len(self.users))))

    @rule(node=node)
    def pin(self, node: Node) -> None:
        found = self.known(node)
        assert self.index.pin(ROOT, np.array(node), *CHAIN, 1) == len(found)
        if found:
            self.pins.append(found)

    @rule(i=st.integers(0, 9))
    def unpin(self, i: int) -> None:
        if self.pins:
            self.index.pin(ROOT, np.array(self.pins.pop(i % len(self.pins))), *CHAIN, -1)

    def is_link(self, found: tuple[int, bytes, int, int], node: Node) -> None:
        """Checks that `found`, of `index.oldest`, is the link of this node."""
        if node in self.offloaded:
            assert self.offloaded[node] in (0, found[0]) and self.index.entries(found[0], 1) is None
        else:
            entries, sizes = self.index.entries(found[0], 1)
            own = (entries >> 16) * 64
            assert own.tolist() == [self.page[node]] and sizes.tolist() == [PAGE]
            self.pool.drop(own)

    @rule()
    def offload(self) -> None:
        node, found = self.oldest(True), self.index.oldest(True)
        assert (node is None) == (found is None)
        if node and found:
            self.is_link(found, node)
            assert self.index.offload(found[0]) and not self.index.offload(found[0])
            self.offloaded[node] = found[0]

    @rule()
    def forget(self) -> None:
        node, found = self.oldest(False), self.index.oldest(False)
        assert (node is None) == (found is None)
        if node and found:
            self.is_link(found, node)
            assert self.index.forget(found[0]) and not self.index.forget(found[0])
            self.evict(node)

    @rule(node=node)
    def bring(self, node: Node) -> None:
        """Brings back the first link of a chain that is offloaded."""
        known = self.known(node)
        after = [node[:k] for k in range(len(known) + 1, len(node) + 1) if node[:k] in self.offloaded]
        ids = self.index.offloaded(ROOT, np.array(node), *CHAIN).tolist()
        assert len(ids) == len(after) and all(self.offloaded[x] in (0, i) for x, i in zip(after, ids, strict=True))
        self.touch(known)
        if ids and (self.pages() < SLOTS or self.give_way()):
            own, first = self.pool.alloc(PAGE), after[0]
            may = first in self.order and (len(first) == 1 or self.resident(first[:-1]))
            assert self.index.bring(ids[0], np.array([own]) // 64 << 16) == may
            if may:
                self.page[first] = own
                del self.offloaded[first]
            self.pool.drop(np.array([own]))

    @rule(pages=st.integers(0, 9))
    def trim(self, pages: int) -> None:
        self.index.trim(pages * PAGE)
        self.shrink(pages, len(NODES))

    @rule(n=st.integers(1, SLOTS))
    def crowd(self, n: int) -> None:
        """Allocates n pages, or as many as possible."""
        own = []
        for _ in range(n):
            if self.pages() == SLOTS and not self.give_way():
                try:
                    raise AssertionError(self.pool.alloc(PAGE))
                except MemoryError:
                    break
            own.append(self.pool.alloc(PAGE))
        self.pool.drop(np.array(own, np.int64))

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.index.check()
        for node in NODES:
            assert self.index.find(ROOT, np.array(node), *CHAIN) == len(self.known(node))
        stats = self.index.stats()
        assert stats["entries"] == len(self.order) and stats["offloaded"] == len(self.offloaded)
        assert stats["bytes"] == (len(self.order) - len(self.offloaded)) * PAGE
        assert stats["evicted"] == self.evicted
        assert stats["pinned"] == sum(not self.loose(x) for x in self.order)


TestOrder = Order.TestCase
TestOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
