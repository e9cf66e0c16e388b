"""Moving: the part of PagedKV that knows on which device, and in which pool, its pages lie."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .. import _C, formats, ops
from . import serialize
from .device_memory import mirror_of, usable

if TYPE_CHECKING:
    from ..layer import PagedKV


def device_of(device: Any) -> torch.device:
    """`device` as torch has it, a GPU with its number; ValueError where pages cannot lie there."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"PagedKV: device: wanted cpu, cuda or cuda:n, got {device!r}") from None
    if reason := usable(found):
        raise ValueError(f"PagedKV: device: wanted cpu, got {found} ({reason}); move the model to the CPU")
    return torch.device("cuda", torch.cuda.current_device()) if found.type == "cuda" and found.index is None else found


class Moving:
    """Device and pool of a PagedKV."""

    num_kv_heads: int
    head_dim: int
    value_dim: int
    page_size: int
    sinks: int
    recent: int
    direct: bool
    dtype: torch.dtype
    codes: tuple[int, int]
    _fill: tuple[int, ...]
    _forget_views: Any

    def lay(self, device: torch.device, pool: Any, batch: int) -> None:
        """An empty table over `pool`, and all that calls on `device` want."""
        self.device, self._pool = device, pool
        self._table = _C.Table(
            pool, heads=self.num_kv_heads, key_dim=self.head_dim + self._fill[0],
            value_dim=self.value_dim + self._fill[1], batch=batch, page_size=self.page_size, sinks=self.sinks,
            recent=self.recent, raw=formats.resolve("raw", self.dtype), key=self.codes[0], value=self.codes[1],
            direct=self.direct,
        )  # fmt: skip
        self._like = torch.empty(0, dtype=self.dtype, device=device)
        self._no_mask = torch.empty(0, dtype=torch.bool, device=device)
        self._no_aux = torch.empty(0, dtype=torch.float32, device=device)
        self._no_seals = torch.empty(0, 2, dtype=torch.int64, device=device)
        self._mirror = mirror_of(pool, device)
        self._forget_views()

    def planned(self, T: int, mask: torch.Tensor | None) -> np.ndarray:
        """The table's plan of an append, and what it copies also where the pages lie: seals [n, 2]."""
        table = self._table
        before = table.entries.copy() if self._mirror else np.empty(0)
        seals = table.plan(T, None if mask is None else mask.numpy())
        if self._mirror:
            dims = self.head_dim + self._fill[0], self.value_dim + self._fill[1]
            try:
                self._mirror.copy_shared(before, table, seals, (self.num_kv_heads, *dims, self.page_size, self.sinks))
            except BaseException:
                table.rollback()
                raise
        return seals

    def to(self, device: torch.device | str, *, pool: Any = None) -> PagedKV:
        """Moves the pages to `device` ("cpu", "cuda", "cuda:1"), in place; returns the layer. They are the same bytes
        there, and calls go on with tensors of that device.

        pool: the `_C.Pool` to take pages from there; if None a new one with the same limit. Pages that others share
            stay for them where they are.
        Raises ValueError for what is no device, and for what kernels have found wrong there (`ops.check`); MemoryError.
        """
        store: PagedKV = self  # type: ignore[assignment]
        there = device_of(device)
        if pool is not None or there != self.device:
            move([store], there, like(self._pool) if pool is None else pool)
        return store


def move(stores: Sequence[PagedKV], device: torch.device, pool: Any) -> None:
    """The pages of layers to `pool`, on a device (of `device_of`): those of all, or of none where it fails."""
    for place in {store.device for store in stores}:
        ops.check(place)
    twins = [_moved(store, device, pool) for store in stores]
    for store, twin in zip(stores, twins, strict=True):
        if store.eviction:
            store.eviction.__dict__.update(twin.__dict__.pop("eviction").__dict__)
        store.__dict__.update(twin.__dict__)


def like(pool: Any) -> Any:
    """An empty pool with the limit of another."""
    return _C.Pool(pool.stats()["reserved"])


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
                self._on[device] = like(self.first) if self._on else self.first
            return self._on[device]


def _moved(store: PagedKV, device: torch.device, pool: Any) -> PagedKV:
    """What `store` is to become: all its own but where its pages are."""
    store._home()
    arrays, pieces = serialize.survey(store)
    twin = object.__new__(type(store))
    twin.__dict__.update(store.__dict__)
    twin.lay(device, pool, store.batch)
    twin._table.spans = store._table.spans
    twin._table.keep_scores(store.eviction is not None and store.eviction.policy.needs_mass)
    if store.seen:
        serialize.place(twin, arrays, *serialize.gather(store, pieces))
    if store.eviction:
        twin.eviction = store.eviction.clone(store)
        twin.eviction.go(device)
    columns = store._table.entries.shape[2]
    twin._table.reserve(max(0, store.sinks + (columns - 1) * store.page_size))  # places that were promised stay so
    return twin
