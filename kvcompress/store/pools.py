"""The pools that layers take their pages from, and the way from one to another."""

from __future__ import annotations

import threading
from typing import Any

import torch

from .. import _C
from . import serialize
from .device_memory import usable
from .page_store import PageStore


def device_of(device: Any) -> torch.device:
    """`device` as torch has it, a GPU with its number; ValueError where pages cannot lie there."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"PagedKV: device: expected cpu, cuda or cuda:n, got {device!r}") from None
    if reason := usable(found):
        raise ValueError(f"PagedKV: device: expected cpu, got {found} ({reason}); move the model to the CPU")
    return torch.device("cuda", torch.cuda.current_device()) if found.type == "cuda" and found.index is None else found


def for_pages(device: torch.device | None = None, max_bytes: int = 0) -> Any:
    """A pool for one layer or cache that names none. An arena on a GPU is as long as its pool, which therefore has an
    address space of its own there, as one with a limit has."""
    return _C.Pool(max_bytes, shared=(device is None or device.type == "cpu") and not max_bytes)


def like(pool: Any, device: torch.device) -> Any:
    """An empty pool with the limit of another, for pages on `device`."""
    return for_pages(device) if pool.shared else _C.Pool(pool.stats()["reserved"])


class Pools:
    """Where the layers of a cache take their pages from: all from `first`; or, if `each`, those of a device from a pool
    of their own, for an arena is as long as its pool (`first` is that of `device`, or of the first that asks)."""

    def __init__(self, first: Any, each: bool = False, device: torch.device | None = None) -> None:
        self.first, self.each = first, each
        self._on = {device: first} if device else {}
        self._lock = threading.Lock()  # copies of a cache share them, and may run in other threads

    def on(self, device: torch.device) -> Any:
        """The pool of layers on `device`. ValueError for one that pages cannot lie on."""
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
    """What `store` is to become: all its own but where its pages are. scores: the table keeps some."""
    arrays, pieces = serialize.survey(store)
    twin = object.__new__(PageStore)
    twin.__dict__.update(store.__dict__)
    twin.place(device, pool, store.batch)
    twin.table.spans = store.table.spans
    twin.table.keep_scores(scores)
    if store.seen:
        serialize.place(twin, arrays, *serialize.gather(store, pieces))
    columns = store.table.entries.shape[2]
    twin.table.reserve(max(0, store.sinks + (columns - 1) * store.page_size))  # places that were promised stay so
    return twin
