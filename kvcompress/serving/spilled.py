"""Prefixes in other tiers: pages that a PrefixCache has no room for wait there until they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..memory.parking import LOST
from ..memory.tiers import Parcel, Tiers


class _Waiting(NamedTuple):
    """The pages of a link of the index: their formats and bytes, and for each memory which of them wait in a parcel."""

    formats: NDArray[np.int64]
    sizes: NDArray[np.int64]
    parts: list[tuple[Any, NDArray[np.int64], Parcel]]


class Spill:
    """Parks links of `index`, least recently used first, and brings them back. A link is one parcel for each device of
    its layers.

    memories: of a root, where the pages of each layer lie (`memory_of`).
    """

    def __init__(self, tiers: Tiers, pool: Any, index: Any, memories: Callable[[bytes], list[Any]]) -> None:
        self.tiers, self.pool, self.index, self.memories = tiers, pool, index, memories
        self.waiting: dict[int, _Waiting] = {}
        self.counts = {"from_host": 0, "from_file": 0, "failed": 0}

    def __del__(self) -> None:
        for link in list(self.waiting):
            self._drop(link)

    def _drop(self, link: int) -> None:
        found = self.waiting.pop(link, None)
        for _, _, parcel in found.parts if found else ():
            self.tiers.drop(parcel)

    # ------------------------------------------------------------------ out

    def shrink(self, max_bytes: int, max_entries: int) -> None:
        """Parks until the pool holds at most max_bytes, and forgets until there are at most max_entries; pinned ones
        stay. What finds no room in the tiers is forgotten, after all that waits there longer."""
        while self.index.stats()["bytes"] > max_bytes and (found := self.index.oldest(True)):
            self._park(*found)
        while self.index.stats()["entries"] > max_entries and self._forget_oldest():
            pass

    def _forget_oldest(self) -> bool:
        """False if all are pinned."""
        found = self.index.oldest(False)
        if found is None or not self.index.forget(found[0]):
            return False
        self._drop(found[0])
        return True

    def _park(self, link: int, root: bytes, n: int) -> None:
        entries, sizes = self.index.entries(link, n)
        offsets = np.ascontiguousarray((entries >> 16) * 64)
        parts: list[tuple[Any, NDArray[np.int64], Parcel]] = []
        try:
            memories = self.memories(root)
            owner = np.arange(n) // (n // len(memories))  # the layer of each page
            for memory in {id(m): m for m in memories}.values():
                own = np.flatnonzero([memories[i] is memory for i in owner])
                pieces = np.ascontiguousarray(np.stack([offsets[own], sizes[own]], 1))
                parts.append((memory, own, self._put(memory, pieces, link)))
        except LOST:
            pass
        finally:
            self.pool.drop(offsets)
        if sum(len(own) for _, own, _ in parts) == n and self.index.park(link):
            self.waiting[link] = _Waiting(entries & 0xFFFF, sizes, parts)
            return
        for _, _, parcel in parts:
            self.tiers.drop(parcel)
        self.index.forget(link)

    def _put(self, memory: Any, pieces: NDArray[np.int64], link: int) -> Parcel:
        """A parcel of the pieces; what was used before `link` makes room. Raises one of LOST."""
        while True:
            try:
                return self.tiers.put(memory, pieces)
            except MemoryError:
                found = self.index.oldest(False)
                if found is None or found[0] == link or not self._forget_oldest():
                    raise

    # ------------------------------------------------------------------ back

    def bring(self, chain: tuple[Any, ...]) -> None:
        """What is parked of a chain (arguments of `index.find`) comes back, up to the first link that does not: it is a
        miss."""
        for link in self.index.parked(*chain).tolist():
            if not self._bring(link):
                return

    def _bring(self, link: int) -> bool:
        found = self.waiting.get(link)
        if found is None:  # it failed before; who commits it again fills it
            return False
        try:
            offsets = self.pool.take(found.sizes)
        except MemoryError:
            return False
        try:
            for memory, own, parcel in found.parts:
                place = "from_file" if parcel.path else "from_host"
                self.tiers.load(parcel, memory, np.ascontiguousarray(np.stack([offsets[own], found.sizes[own]], 1)))
                self.counts[place] += 1
            came = self.index.bring(link, offsets // 64 << 16 | found.formats)
        except LOST as error:
            came = False
            self.counts["failed"] += 1
            if isinstance(error, MemoryError):
                return False
        finally:
            self.pool.drop(offsets)  # the index has references of its own
        self._drop(link)
        return came

    def filled(self, before: NDArray[np.int64], chain: tuple[Any, ...]) -> None:
        """Links that were parked `before` may have pages again, by `index.put`: theirs are not needed any more."""
        for link in set(before.tolist()) - set(self.index.parked(*chain).tolist()):
            self._drop(link)

    def stats(self) -> dict[str, int]:
        """host, file: bytes that wait there; from_host, from_file: parcels that came back; failed: that did not."""
        sizes = {"host": 0, "file": 0}
        for found in self.waiting.values():
            for _, _, parcel in found.parts:
                sizes["file" if parcel.path else "host"] += parcel.size
        return {**sizes, **self.counts}
