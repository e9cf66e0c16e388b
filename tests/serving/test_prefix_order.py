"""The prefix index compared with a list in LRU order: what is evicted if there are too many links, or the pool is
full."""

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
        self.limits = max_pages or SLOTS, max_links or SLOTS
        self.order: list[Node] = []  # least recently used first
        self.pins: list[Node] = []
        self.page: dict[Node, int] = {}
        self.users: list[list[int]] = []  # pages of users that took a chain
        self.evicted = 0

    # ------------------------------------------------------------------ expected behaviour

    def known(self, node: Node) -> Node:
        return next((node[:n] for n in range(len(node), 0, -1) if node[:n] in self.order), ())

    def touch(self, node: Node) -> None:
        for n in range(len(node), 0, -1):
            if node[:n] in self.order:
                self.order.remove(node[:n])
            self.order.append(node[:n])

    def loose(self, node: Node) -> bool:
        return not any(pin[: len(node)] == node for pin in self.pins)

    def evict(self, node: Node) -> None:
        self.order.remove(node)
        self.evicted += 1

    def give_way(self) -> bool:
        """The pool is full: evicts the oldest end of a chain that is not pinned and whose page has no other user."""
        for node in self.order:
            leaf = not any(x[: len(node)] == node and x != node for x in self.order)
            if self.loose(node) and leaf and not any(self.page[node] in pages for pages in self.users):
                self.evict(node)
                return True
        return False

    def shrink(self, pages: int, links: int) -> None:
        for node in list(self.order):
            if len(self.order) > min(pages, links) and self.loose(node):
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
            self.order += [node[:k] for k in range(n + 1, len(node) + 1)]
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

    @rule(pages=st.integers(0, 9))
    def trim(self, pages: int) -> None:
        self.index.trim(pages * PAGE)
        self.shrink(pages, SLOTS)

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
        assert stats["entries"] == len(self.order) and stats["bytes"] == len(self.order) * PAGE
        assert stats["evicted"] == self.evicted
        assert stats["pinned"] == sum(not self.loose(x) for x in self.order)


TestOrder = Order.TestCase
TestOrder.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
