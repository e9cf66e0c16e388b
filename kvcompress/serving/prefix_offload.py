"""Offloading of the prefixes that a PrefixCache has no room for to tiers, and fetching them again."""

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
"""An extent is at most 1 / PART of the budget of the pool, or of the tiers."""


@contextlib.contextmanager
def pinned(index: Any, chain: tuple[Any, ...]) -> Iterator[None]:
    """Context manager: the known links of a chain (arguments of `index.find`) are not evicted, even by another thread
    that finds the pool full."""
    root, tokens, first, step, *entries = chain
    links = index.pin(*chain, 1)
    try:
        yield
    finally:
        if links:
            index.pin(root, tokens[: first + (links - 1) * step], first, step, *entries, -1)


class _Group:
    """Links offloaded together, last link of the chain first: formats and sizes of their pages, and for each memory the
    extent with its pages."""

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
    """Offloads links of `index`, least recently used first, and fetches them. Links of a chain are grouped into extents
    of about `tiers.UNIT` bytes per device; smaller ones if budgets are small.

    memories: maps a root to the memory of each layer's pages (`memory_of`).
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
        """Removes a link from its group; the last one frees the extents."""
        group = self.waiting.pop(link, None)
        if group is not None and not any(self.waiting.get(x) is group for x in group.links):
            self._let_go(group)

    def _let_go(self, group: _Group) -> None:
        for _, _, extent in group.parts:
            self.tiers.drop(extent)

    # ------------------------------------------------------------------ out

    def shrink(self, max_bytes: int, max_entries: int) -> None:
        """Offloads links until the pool holds at most max_bytes, and evicts until there are at most max_entries. Pinned
        links stay. Without room in the tiers, the least recently used links are evicted."""
        while (over := self.index.stats()["bytes"] - max_bytes) > 0 and (found := self.index.oldest(True)):
            self._offload(found, min(self.unit, max(over, max_bytes // PART)))
        while self.index.stats()["entries"] > max_entries and self._forget_oldest():
            pass

    def _forget_oldest(self) -> bool:
        """Evicts the least recently used link. False if all are pinned."""
        link = 0
        while (found := self.index.oldest(False)) is not None and found[0] != link:
            link = found[0]
            if self.index.forget(link):  # else another thread found the pool full and evicted it
                self._drop(link)
                return True
        return False

    def _offload(self, found: tuple[int, bytes, int, int] | None, least: int) -> None:
        """Offloads `found` (from `index.oldest`) and the equally old links before it in its chain, until they have
        `least` bytes."""
        links: list[_Link] = []
        root, size, parent = found[1], 0, found[0]  # type: ignore[index]
        try:
            while found is not None and found[0] == parent and (not links or size < least):
                link, _, n, parent = found
                pages = self.index.entries(link, n)
                if pages is None:  # another thread found the pool full and evicted it
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
        group = _Group(links, len(memories))
        try:
            for memory in {id(m): m for m in memories}.values():
                own = np.flatnonzero([memories[i] is memory for i in group.layer])
                group.parts.append((memory, own, self._put(memory, group.pieces(own, group.offsets), group)))
        except BaseException as error:
            self._let_go(group)
            if not isinstance(error, LOST):
                raise
            for one in links if len(links) > 1 else ():
                self._send(root, [one])
        else:
            self.waiting.update(dict.fromkeys(group.links, group))

    def _put(self, memory: Any, pieces: NDArray[np.int64], group: _Group) -> Extent:
        """Stores the pieces in an extent; evicts links older than `group` for room. Raises one of LOST."""
        while True:
            try:
                return self.tiers.put(memory, pieces)
            except MemoryError:
                found = self.index.oldest(False)
                if found is None or found[0] in group.links or not self._forget_oldest():
                    raise

    # ------------------------------------------------------------------ back

    def bring(self, chain: tuple[Any, ...]) -> None:
        """Fetches the offloaded links of a chain (arguments of `index.find`) with the rest of their groups, up to the
        first link that fails, which is a miss."""
        came = True
        while came and len(offloaded := self.index.offloaded(*chain)):
            with pinned(self.index, chain):  # so that fetching does not evict links of the same chain
                came = self._bring(int(offloaded[0]))

    def waits(self, chain: tuple[Any, ...]) -> int:
        """Number of offloaded links of a chain that can be fetched, after those with pages."""
        offloaded = self.index.offloaded(*chain).tolist()
        return next((n for n, link in enumerate(offloaded) if link not in self.waiting), len(offloaded))

    def _bring(self, link: int) -> bool:
        group = self.waiting.get(link)
        if group is None:  # failed before; the next commit of these tokens restores it
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
            for one in reversed(own):  # parents first
                part = np.ascontiguousarray(entries[group.links[one]])
                if self.index.bring(one, part):
                    self._drop(one)
                    came |= one == link
        except LOST as error:
            self.counts["failed"] += 1
            for one in own if not isinstance(error, MemoryError) else ():
                self._drop(one)
        finally:
            self.pool.drop(offsets)  # the index holds its own references
        return came

    def filled(self, before: NDArray[np.int64], chain: tuple[Any, ...]) -> None:
        """Drops the offloaded copies of links (offloaded `before`) that have pages again after `index.put`."""
        for link in set(before.tolist()) - set(self.index.offloaded(*chain).tolist()):
            self._drop(link)

    def stats(self) -> dict[str, int]:
        """host, file: bytes offloaded there; from_host, from_file: extents fetched; failed: fetches that failed."""
        sizes = {"host": 0, "file": 0}
        for group in {id(x): x for x in self.waiting.values()}.values():
            for _, _, extent in group.parts:
                sizes["file" if extent.path else "host"] += extent.size
        return {**sizes, **self.counts}
