"""Following: what a layer holds, and what must not hold the layer."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..layer import PagedKV


class Following:
    """Refers to its layer weakly: a cycle of references would keep the layer's pages until a collection."""

    _store: weakref.ref[PagedKV]

    @property
    def store(self) -> PagedKV:
        """The layer."""
        store = self._store()
        assert store is not None
        return store
