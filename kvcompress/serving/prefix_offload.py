"""Prefixes in other tiers: pages that a PrefixCache has no room for wait there until they are asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import formats
from ..offload.tiers import UNIT, Extent, Tiers
from ..store.serialize import LOST

PART = 4
"""an extent is at most a fourth of what may be in the pool, or in the tiers."""


@contextlib.contextmanager
def pinned(index: Any, chain: tuple[Any, ...]) -> Iterator[None]:
    """What the index knows of a chain (arguments of `index.find`) stays meanwhile, whoever finds the pool full."""
    root, tokens, first, step, *entries = chain
    links = index.pin(*chain, 1)
    try:
        yield
    finally:
        if links:
            index.pin(root, tokens[: first + (links - 1) * step], first, step, *entries, -1)


class _Group:
    """Links that wait together, ends of a chain first; formats and bytes of their pages, and for each memory which of
    them wait in an extent."""

    def __init__(self, links: list[_Link], layers: int) -> None:
        ends = np.cumsum([len(x.entries) for x in links]).tolist()
        self.links = {x.id: slice(end - len(x.entries), end) for x, end in zip(links, ends, strict=True)}
        entries = np.concatenate([x.entries for x in links])
        self.offsets, self.formats = np.ascontiguousarray(formats.offset_of(entries)), formats.pair_of(entries)
        self.sizes = np.concatenate([x.sizes for x in links])
        self.layer = np.concatenate([np.arange(len(x.entries)) // (len(x.entries) // layers) for x in links])
        self.parts: list[tuple[Any, NDArray[np.int64], Extent]] = []

    def pieces(self, own: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.ascontiguousarray(np.stack([offsets[own], self.sizes[own]], 1))


class _Link(NamedTuple):
    id: int
    entries: NDArray[np.int64]
    sizes: NDArray[np.int64]


class Spill:
    """Offloads links of `index`, least recently used first, and brings them back. Links of a chain go together, in a
    extent of a unit (`tiers.UNIT`) for each device of its layers; less if that is much of what there is room for.

    memories: of a root, where the pages of each layer lie (`memory_of`).
    """

    def __init__(self, tiers: Tiers, pool: Any, index: Any, memories: Callable[[bytes], list[Any]]) -> None:
        self.tiers, self.pool, self.index, self.memories = tiers, pool, index, memories
        self.unit = min(UNIT, sum(tiers.budgets.values()) // PART)
        self.waiting: dict[int, _Group] = {}
        self.counts = {"from_host": 0, "from_file": 0, "failed": 0}

    def __del__(self) -> None:
        for link in list(self.waiting):
            self._drop(link)

    def _drop(self, link: int) -> None:
        """The last link of a group takes its extents along."""
        group = self.waiting.pop(link, None)
        if group is not None and not any(self.waiting.get(x) is group for x in group.links):
            self._let_go(group)

    def _let_go(self, group: _Group) -> None:
        for _, _, extent in group.parts:
            self.tiers.drop(extent)

    # ------------------------------------------------------------------ out

    def shrink(self, max_bytes: int, max_entries: int) -> None:
        """Offloads until the pool holds at most max_bytes, and forgets until there are at most max_entries; pinned ones
        stay. What finds no room in the tiers is forgotten, after all that waits there longer."""
        while (over := self.index.stats()["bytes"] - max_bytes) > 0 and (found := self.index.oldest(True)):
            self._offload(found, min(self.unit, max(over, max_bytes // PART)))
        while self.index.stats()["entries"] > max_entries and self._forget_oldest():
            pass

    def _forget_oldest(self) -> bool:
        """False if all are pinned."""
        link = 0
        while (found := self.index.oldest(False)) is not None and found[0] != link:
            link = found[0]
            if self.index.forget(link):  # else another thread has found the pool full and has evicted it
                self._drop(link)
                return True
        return False

    def _offload(self, found: tuple[int, bytes, int, int] | None, least: int) -> None:
        """`found` (of `index.oldest`), and so much of its chain before it as waits as long, until they are `least`
        bytes."""
        links: list[_Link] = []
        root, size, parent = found[1], 0, found[0]  # type: ignore[index]
        try:
            while found is not None and found[0] == parent and (not links or size < least):
                link, _, n, parent = found
                pages = self.index.entries(link, n)
                if pages is None:  # another thread has found the pool full
                    break
                links.append(_Link(link, *pages))
                size += int(links[-1].sizes.sum())
                self.index.offload(link)
                found = self.index.oldest(True)
            if links:
                self._send(root, links)
        finally:
            for one in links:
                self.pool.drop(np.ascontiguousarray(formats.offset_of(one.entries)))
                if one.id not in self.waiting:
                    self.index.forget(one.id)

    def _send(self, root: bytes, links: list[_Link]) -> None:
        memories = self.memories(root)
        group, whole = _Group(links, len(memories)), False
        try:
            for memory in {id(m): m for m in memories}.values():
                own = np.flatnonzero([memories[i] is memory for i in group.layer])
                group.parts.append((memory, own, self._put(memory, group.pieces(own, group.offsets), group)))
            whole = True
        except LOST:
            pass
        finally:
            if not whole:
                self._let_go(group)
        if whole:
            self.waiting.update(dict.fromkeys(group.links, group))
        elif len(links) > 1:
            for one in links:
                self._send(root, [one])

    def _put(self, memory: Any, pieces: NDArray[np.int64], group: _Group) -> Extent:
        """an extent of the pieces; what was used before `group` makes room. Raises one of LOST."""
        while True:
            try:
                return self.tiers.put(memory, pieces)
            except MemoryError:
                found = self.index.oldest(False)
                if found is None or found[0] in group.links or not self._forget_oldest():
                    raise

    # ------------------------------------------------------------------ back

    def bring(self, chain: tuple[Any, ...]) -> None:
        """What is offloaded of a chain (arguments of `index.find`) comes back, and what waits with it, up to the first
        link that does not: it is a miss."""
        came = True
        while came and len(offloaded := self.index.offloaded(*chain)):
            with pinned(self.index, chain):  # it shall not make room for its own end
                came = self._bring(int(offloaded[0]))

    def waits(self, chain: tuple[Any, ...]) -> int:
        """Links of a chain that follow those with pages, and can come back."""
        offloaded = self.index.offloaded(*chain).tolist()
        return next((n for n, link in enumerate(offloaded) if link not in self.waiting), len(offloaded))

    def _bring(self, link: int) -> bool:
        group = self.waiting.get(link)
        if group is None:  # it failed before; who commits it again fills it
            return False
        came, own = False, [one for one in group.links if self.waiting.get(one) is group]
        try:
            offsets = self.pool.take(group.sizes)
        except MemoryError:
            return False
        try:
            for memory, pages, extent in group.parts:
                place = "from_file" if extent.path else "from_host"
                self.tiers.load(extent, memory, group.pieces(pages, offsets))
                self.counts[place] += 1
            entries = formats.entry_of(offsets, group.formats)
            for one in reversed(own):  # what the others hang on comes first
                part = np.ascontiguousarray(entries[group.links[one]])
                if self.index.bring(one, part):
                    self._drop(one)
                    came |= one == link
        except LOST as error:
            self.counts["failed"] += 1
            for one in own if not isinstance(error, MemoryError) else ():
                self._drop(one)
        finally:
            self.pool.drop(offsets)  # the index has references of its own
        return came

    def filled(self, before: NDArray[np.int64], chain: tuple[Any, ...]) -> None:
        """Links that were offloaded `before` may have pages again, by `index.put`: theirs are not needed any more."""
        for link in set(before.tolist()) - set(self.index.offloaded(*chain).tolist()):
            self._drop(link)

    def stats(self) -> dict[str, int]:
        """host, file: bytes that wait there; from_host, from_file: extents that came back; failed: that did not."""
        sizes = {"host": 0, "file": 0}
        for group in {id(x): x for x in self.waiting.values()}.values():
            for _, _, extent in group.parts:
                sizes["file" if extent.path else "host"] += extent.size
        return {**sizes, **self.counts}
