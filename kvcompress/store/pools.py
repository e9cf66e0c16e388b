"""The pools of layers, and moving layers between pools."""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch

from .. import _C
from . import serialize
from .device_memory import usable
from .page_store import PageStore


def device_of(device: Any) -> torch.device:
    """`device` as a torch.device, with an index for a GPU. Raises ValueError if it is not supported."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"PagedKV: device: expected cpu, cuda or cuda:n, got {device!r}") from None
    if reason := usable(found):
        raise ValueError(f"PagedKV: device: expected cpu, got {found} ({reason}); move the model to the CPU")
    return torch.device("cuda", torch.cuda.current_device()) if found.type == "cuda" and found.index is None else found


def for_pages(device: torch.device | None = None, max_bytes: int = 0) -> Any:
    """A new pool for a layer or cache. With a limit, or for a GPU, it has a separate address space, since an arena is
    as long as its pool."""
    return _C.Pool(max_bytes, shared=(device is None or device.type == "cpu") and not max_bytes)


def like(pool: Any, device: torch.device) -> Any:
    """An empty pool with the limit of `pool`, for pages on `device`."""
    return for_pages(device) if pool.shared else _C.Pool(pool.stats()["reserved"])


class Pools:
    """The pools of a cache's layers: `first` for all layers; or with `each` one per device, since an arena is as long
    as its pool (`first` is then that of `device`, or of the first device used)."""

    def __init__(self, first: Any, each: bool = False, device: torch.device | None = None) -> None:
        self.first, self.each = first, each
        self._on = {device: first} if device else {}
        self._lock = threading.Lock()  # copies of a cache share the pools, and may run in other threads

    def on(self, device: torch.device) -> Any:
        """The pool of layers on `device`. Raises ValueError if the device is not supported."""
        if not self.each:
            return self.first
        device = device_of(device)
        with self._lock:
            if device not in self._on:
                if self._on:
                    self._on[device] = like(self.first, device)
                else:
                    if self.first.shared and device.type != "cpu":
                        self.first = for_pages(device)
                    self._on[device] = self.first
            return self._on[device]


def moved(store: PageStore, device: torch.device, pool: Any, scores: bool) -> PageStore:
    """A copy of `store` with its pages in `pool` on `device`. scores: whether the table has scores."""
    arrays, pieces = serialize.survey(store)
    twin = copy.copy(store)
    twin.place(device, pool, store.batch)
    twin.table.spans = store.table.spans
    twin.table.keep_scores(scores)
    if store.seen:
        serialize.place(twin, arrays, *serialize.gather(store, pieces))
    columns = store.table.entries.shape[2]
    twin.table.reserve(max(0, store.sinks + (columns - 1) * store.page_size))  # keep the reserved capacity
    return twin
