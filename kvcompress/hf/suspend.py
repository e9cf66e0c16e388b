"""Caches whose pages can leave the pool: files, suspending, tiers and devices."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache

from .. import checks, ops
from ..layer import PagedKV
from ..layer_store import move
from ..offload.prefetch import Prefetcher
from ..offload.tiers import UNIT, Tiers
from ..quantization.calibration import Calibration
from ..store import pools, serialize
from . import native_layers, save_load
from .configs import text_config
from .forward_pass import LayeredCache
from .layer import PagedLayer, committed_layers, paged_layers

if TYPE_CHECKING:
    from typing_extensions import Self


def _states(name: str, at: int) -> Callable[..., Any]:
    """The method `name` of transformers' Cache for the states of a layer (its argument `at`), which models write into.
    It raises ValueError if the cache is suspended or a pass has failed, since states updated before the first paged
    layer could not be restored."""

    def call(self: MovableCache, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or self.is_compileable:  # not tracked there
            self.forward_pass.ready()
        else:
            self.forward_pass.at_states(kwargs["layer_idx"] if "layer_idx" in kwargs else args[at])
        return getattr(Cache, name)(self, *args, **kwargs)

    return call


class MovableCache(
    checks.ProcessBound, LayeredCache, instead="use save(path) for its contents, or to_dict() for its options"
):
    """`save`, `load`, `to`, `use_tiers`, `suspend`, `resume` of a cache of paged layers."""

    @property
    def pool(self) -> Any:
        """The `_C.Pool` of its pages, or of those on its first device."""
        return self.forward_pass.pools.first

    is_linear = checks.InstanceProperty(Cache.is_linear.fget)  # type: ignore[attr-defined]  # generate's first look

    def __copy__(self) -> Self:
        return copy.deepcopy(self)

    get_conv_state = _states("get_conv_state", 0)  # type: ignore[assignment]
    get_recurrent_state = _states("get_recurrent_state", 0)  # type: ignore[assignment]
    update_conv_state = _states("update_conv_state", 1)  # type: ignore[assignment]
    update_recurrent_state = _states("update_recurrent_state", 1)  # type: ignore[assignment]

    def check(self) -> None:
        """Raises ValueError for errors that kernels on a GPU have recorded, in this or another cache on the device: NaN
        or Inf in K or V (stored as 0), invalid block tables. Kernels cannot raise in the call itself. Synchronizes the
        GPU. `save`, `suspend` and `to` call it first. No-op on the CPU, where the call itself raises."""
        paged = paged_layers(self)
        for layer in paged:
            if layer.options.get("group") is None:  # ranks check collectively
                layer.commit()
        for device in {layer.store.device for layer in paged if layer.is_initialized}:
            ops.check(device)

    def save(self, path: str | os.PathLike[str], tokens: Any = None) -> None:
        """Writes the cache to one `.kvc` file for `KVCache.load`, atomically. Pages are stored as they are in memory.

        tokens: int [seen] or [B, seen], the token ids of the cache; a hash of them is stored.

        No other thread may use the cache meanwhile, as in all its methods. Raises OSError (an existing file is then
        unchanged); ValueError for a wrong number of tokens, layers with states (linear attention), a suspended cache, a
        path that a suspended cache uses, a forward pass that stopped between layers, a cache that another thread
        changes (if it is noticed), and the errors of `check`.
        """
        self.forward_pass.check_there()
        self.check()
        if (first := next((i for i, x in enumerate(self.layers) if native_layers.has_states(x)), None)) is not None:
            raise ValueError(
                f"KVCache: save: expected layers with K and V, got the states of {self.layers[first]} at {first}, "
                "which files do not support; use suspend() or copies, which keep them in memory"
            )
        accepting = self._accepting()
        accepting.forward_pass.check_even()
        save_load.save(accepting, path, tokens)

    def _accepting(self) -> Self:
        """A cache to save: a copy if this one has drafts. Saving accepts the attention that drafts gave to other
        tokens; this cache may still remove it with them."""
        return copy.deepcopy(self) if any(layer.has_drafts() for layer in paged_layers(self)) else self

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], config: Any, *, tokens: Any = None, pool: Any = None, max_bytes: int = 0,
        max_slots: int | None = None, calibration: Any = None,
    ) -> Self:  # fmt: skip
        """Loads a cache that `save` wrote, for the model of `config`. It continues as the saved cache would have.

        Args:
            path: the file.
            config: `model.config`.
            tokens: token ids that the cache must contain, checked by hash. Default: not checked.
            pool, max_bytes: as of KVCache.
            max_slots: maximum number of slots (or `max_length`) if fewer tokens are stored, as after evictions.
                Default: the model's `max_position_embeddings`; no limit with StreamingLLM(positions="cache").
            calibration: the calibration of the saved cache, if it had one.

        Allocates at most four times the size of the file plus 1 MB. Raises OSError if the file cannot be read;
        ValueError if it is damaged or malicious, or of another model or other tokens; MemoryError.
        """
        text, pool = text_config(config), checks.pool(pool)
        if max_slots is not None:
            checks.integer("max_slots", max_slots, 1)
        reader = save_load.Reader(path)
        if reader.about.get("model") != save_load.model_hash(text):
            raise reader.refuse("a cache of another model (its config differs)")
        if tokens is not None and reader.about.get("tokens") != save_load.tokens_hash(tokens):
            known = "a cache of other tokens" if reader.about.get("tokens") else "a cache saved without tokens="
            raise reader.refuse(known)
        calibration = None if calibration is None else Calibration.of(calibration)
        if reader.about.get("calibration") != (calibration and calibration.digest()):
            given = "calibration=None" if calibration is None else f"calibration={calibration.path}"
            had = "one" if "calibration" in reader.about else "none"
            raise reader.refuse(f"a cache with {had} for {given}: pass load() the calibration that it was saved with")
        try:
            options = save_load.options_of(reader.options)
            cache = cls(config, pool=pool, max_bytes=max_bytes, calibration=calibration, **options)  # type: ignore[call-arg]
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise reader.refuse(f"invalid options ({error})") from None
        if max_slots is None and getattr(options.get("policy"), "positions", None) == "cache":
            max_slots = 1 << 31  # a stream may be longer than the model was trained for
        most = max_slots or getattr(text, "max_position_embeddings", None) or 1 << 20
        reader.check_slots(most, options.get("max_length"))
        if len(reader.layers) != len(cache.layers):
            raise reader.refuse(f"{len(reader.layers)} layers where the model has {len(cache.layers)}")
        for index, layer in enumerate(cache.layers):
            if isinstance(layer, PagedLayer):
                reader.fill(index, layer)
            else:
                reader.fill_other(index, layer)
        return cache

    def bind(self, model: Any) -> Self:
        """Gives policies what they need from `model` (CriticalKV: the output projections), which `load` and `from_dict`
        do not restore. Returns the cache. Raises ValueError and changes nothing if the cache is calibrated for other
        weights. Without `bind`, only the first call after `enable(model)` checks that."""
        self.forward_pass.check_all_weights(model)
        found = [layer.options["policy"] for layer in paged_layers(self)]
        for policy in {id(policy): policy for policy in found if policy is not None}.values():
            policy.bind(model)
        return self

    def to(self, device: torch.device | str, *, pool: Any = None) -> Self:
        """Moves all layers to `device` ("cpu", "cuda", "cuda:1") in place, byte for byte; returns the cache. Later
        calls need the model on that device.

        pool: the `_C.Pool` to allocate pages from there. Default: a new one with the same limit. Pages shared with
            other caches (prefixes, copies) are copied. `PrefixCache.commit` needs the cache moved back to its pool.

        Offloaded pages are fetched first, and offloaded again from the new device. Raises ValueError for an invalid
        device or one without kernels, for a suspended cache, and the errors of `check`; MemoryError; OSError. The cache
        is then unchanged.
        """
        forward_pass, prefetcher = self.forward_pass, self.forward_pass.prefetcher
        forward_pass.check_there()
        paged = committed_layers(self)
        others = [layer for layer in self.layers if not isinstance(layer, PagedLayer)]
        stores = [layer.store for layer in paged]
        there = pools.device_of(device)
        each = pool is None and forward_pass.pools.each
        if pool is None and any(store.device != there for store in stores):
            pool = pools.like(self.pool, there)
        if prefetcher and pool:
            self.use_tiers(None)
        try:
            with native_layers.whole(others):
                for layer in others:
                    native_layers.move(layer, there)
                if pool:
                    move(stores, there, pool)
            if pool:
                forward_pass.moved(pools.Pools(pool, each, there))
        finally:
            if prefetcher and pool:
                self.use_tiers(prefetcher.tiers, prefetcher.resident, prefetcher.unit, prefetcher.in_place)
        for layer in paged if pool else ():
            layer.moved()
        return self

    def use_tiers(self, tiers: Tiers | None, resident: int = 1024, unit: int = UNIT, in_place: bool = False) -> None:
        """Offloads the oldest sealed pages to `tiers`. The pages of a layer are in the pool only while it attends, and
        are prefetched one layer ahead.

        Args:
            tiers: `kvcompress.Tiers`; None fetches all pages and ends offloading.
            resident: number of newest tokens of each row that are never offloaded.
            unit: minimum number of bytes that a layer offloads at once.
            in_place: attend to offloaded pages in place, on the CPU, with files mapped, instead of fetching them. Calls
                that do not support it (windows, padding between tokens, evicted tokens, policies that accumulate
                attention, several queries without new tokens) fetch them.

        Results are bitwise equal with fetching, and equal up to rounding in place. Operations other than appending
        (evictions, crop, beam search, copies, files) move all pages back first. A call that cannot fetch its pages
        raises OSError or ValueError and leaves the cache unchanged; an eviction is then retried in the next call.
        """
        self.forward_pass.check_there()
        if tiers is not None and not isinstance(tiers, Tiers):
            raise TypeError(f"KVCache: use_tiers: expected kvcompress.Tiers or None, got {type(tiers).__name__}")
        least, size = checks.integer("resident", resident, 0), checks.integer("unit", unit, 1)
        for layer in paged_layers(self):
            if layer.is_initialized and layer.store.offload:
                layer.store.offload.onload()
                layer.store.attach(None)
        self.forward_pass.prefetcher = None
        if tiers is not None:
            prefetcher = self.forward_pass.prefetcher = Prefetcher(tiers, resident=least, unit=size, in_place=in_place)
            for layer in committed_layers(self):
                layer.offload_pages(prefetcher)

    def suspend(self, path: str | os.PathLike[str] | None = None) -> None:
        """Frees the pages of all layers in the pool, after copying them to separate memory, or to the file `path`,
        which must not be changed before `resume()`. Until then all calls that need the pages raise. Raises MemoryError;
        OSError; ValueError for a suspended cache, a path that another suspended cache uses, and the errors of `check`.
        Nothing changes then.
        """
        if self.forward_pass.suspended is not None:
            raise ValueError("KVCache: suspend: expected a cache that is not suspended, got a suspended one")
        self.check()
        paged = committed_layers(self)
        stores = {i: layer.store for i, layer in enumerate(self.layers) if layer in paged and layer.store.seen}
        if path is None:
            suspended: Any = {index: _pack(store) for index, store in stores.items()}
        else:
            where = os.path.realpath(checks.path("KVCache: suspend", path))
            suspended = where, save_load.save(self, path, accepting=self._accepting())
        seen = {index: store.seen for index, store in stores.items()}
        if path is not None:
            save_load.WAITING[suspended[0]] = self.forward_pass
        self.forward_pass.suspended = suspended, seen  # first: `resume` clears what an interrupt leaves of the tables
        for store in stores.values():
            store.page_store.table.reset()
        if self.forward_pass.prefetcher:
            self.forward_pass.prefetcher.release()

    def resume(self) -> None:
        """Moves the pages back to the pool, possibly in a different order. Raises MemoryError (pool full), OSError,
        ValueError (damaged bytes, or the file was replaced). The cache then stays suspended."""
        if self.forward_pass.suspended is None:
            raise ValueError("KVCache: resume: expected a suspended cache, got one that is not suspended")
        suspended, seen = self.forward_pass.suspended
        reader = save_load.Reader(suspended[0]) if isinstance(suspended, tuple) else None
        if reader and reader.seal != suspended[1]:
            raise ValueError(f"KVCache: resume: expected the file that suspend() wrote, got another in {suspended[0]}")
        stores = {index: self.layers[index].store for index in seen}
        for store in stores.values():  # if `suspend` or `resume` was interrupted
            store.page_store.table.reset()
        try:
            for index, store in stores.items():
                if reader:
                    reader.place(index, store)
                else:
                    serialize.place(store.page_store, *suspended[index])
        except BaseException:
            for store in stores.values():
                store.page_store.table.reset()
            raise
        for index in seen:
            self.layers[index].changed()
        self.forward_pass.suspended = None


def _pack(store: PagedKV) -> tuple[serialize.Arrays, serialize.Bytes, int]:
    store.onload()
    arrays, pieces = serialize.survey(store.page_store)
    return arrays, *serialize.gather(store.page_store, pieces)
