"""A cache whose pages can leave their pool: files, suspension, other tiers and devices."""

from __future__ import annotations

import copy
import os
from functools import partialmethod
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
from .forward_pass import ForwardPass
from .layer import PagedLayer, committed_layers, paged_layers

if TYPE_CHECKING:
    from typing_extensions import Self


class MovableCache(
    checks.ProcessBound, Cache, instead="use save(path) for all that it holds, or to_dict() for its options"
):
    """`save`, `load`, `to`, `use_tiers`, `suspend`, `resume` of a cache of paged layers."""

    layers: list[Any]
    forward_pass: ForwardPass

    @property
    def pool(self) -> Any:
        """The `_C.Pool` of its pages, or of those on its first device."""
        return self.forward_pass.pool

    is_linear = checks.InstanceProperty(Cache.is_linear.fget)  # type: ignore[attr-defined]  # generate's first look

    def __copy__(self) -> Self:
        return copy.deepcopy(self)

    # A call of transformers' Cache for the states of a layer (its argument `at`), which models write into. ValueError
    # while the cache is suspended, or broken: states that went ahead of the first paged layer could not be taken back.
    def _states(self, name: str, at: int, /, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or self.is_compileable:  # passes are not seen there
            self.forward_pass.ready()
        else:
            self.forward_pass.at_states(kwargs["layer_idx"] if "layer_idx" in kwargs else args[at])
        return getattr(super(), name)(*args, **kwargs)

    get_conv_state = partialmethod(_states, "get_conv_state", 0)  # type: ignore[assignment]
    get_recurrent_state = partialmethod(_states, "get_recurrent_state", 0)  # type: ignore[assignment]
    update_conv_state = partialmethod(_states, "update_conv_state", 1)  # type: ignore[assignment]
    update_recurrent_state = partialmethod(_states, "update_recurrent_state", 1)  # type: ignore[assignment]

    def check(self) -> None:
        """Raises ValueError with what kernels on a GPU have found wrong, of this cache or another there: NaN or Inf in
        K or V (stored as 0), tables that name no pages. They cannot raise in the call that brings it. Waits for the
        GPU; `save`, `suspend` and `to` do the same, before anything changes. Nothing to do on the CPU, where the call
        itself raises."""
        paged = paged_layers(self)
        for layer in paged:
            if layer.options.get("group") is None:  # ranks do that together
                layer.commit()
        for device in {layer.store.device for layer in paged if layer.is_initialized}:
            ops.check(device)

    def save(self, path: str | os.PathLike[str], tokens: Any = None) -> None:
        """Writes the whole cache as one `.kvc` file that `KVCache.load` reads: whole or not at all. What it holds on a
        disk is what it holds in memory, page for page.

        tokens: int [seen] or [B, seen], the ids that it has seen, of which a hash is kept. Raises OSError (nothing is
        lost then, the old file least of all), ValueError for other numbers of tokens, layers of states (linear
        attention), a suspended cache, a path where one waits, and what `check` finds.
        """
        self.forward_pass.check_there()
        self.check()
        if (first := next((i for i, x in enumerate(self.layers) if native_layers.has_states(x)), None)) is not None:
            raise ValueError(
                f"KVCache: save: expected layers whose K and V a file holds, got the states of {self.layers[first]} at "
                f"{first}; suspend() and copies keep them in memory"
            )
        save_load.save(self, path, tokens)  # type: ignore[arg-type]

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], config: Any, *, tokens: Any = None, pool: Any = None, max_bytes: int = 0,
        max_slots: int | None = None, calibration: Any = None,
    ) -> Self:  # fmt: skip
        """The cache that `save` wrote, for the model of `config`; it goes on as the saved one would have.

        tokens: ids that it must hold, if given. pool, max_bytes: as for KVCache. max_slots: that it may have seen (or
        may come to see, its `max_length`) when fewer tokens are stored, evicted ones for instance; None: the model's
        `max_position_embeddings`, and any number under StreamingLLM(positions="cache"). calibration: what the saved
        cache had, if any. Memory that is asked for is at most four times the file's length and 1 MB.
        Raises OSError if the file cannot be read; ValueError if it is damaged, hostile, of another model, or of other
        tokens; MemoryError.
        """
        text, pool = text_config(config), checks.pool(pool)
        if max_slots is not None:
            checks.integer("max_slots", max_slots, 1)
        reader = save_load.Reader(path)
        if reader.about.get("model") != save_load.model_hash(text):
            raise reader.refuse("one of another model's cache (its config differs)")
        if tokens is not None and reader.about.get("tokens") != save_load.tokens_hash(tokens):
            known = "one that holds other tokens" if reader.about.get("tokens") else "one saved without tokens="
            raise reader.refuse(known)
        calibration = None if calibration is None else Calibration.of(calibration)
        if reader.about.get("calibration") != (calibration and calibration.digest()):
            given = "calibration=None" if calibration is None else f"calibration={calibration.path}"
            had = "one" if "calibration" in reader.about else "none"
            raise reader.refuse(f"a cache with {had} for {given}: give load() the calibration that it was saved with")
        try:
            options = save_load.options_of(reader.options)
            cache = cls(config, pool=pool, max_bytes=max_bytes, calibration=calibration, **options)  # type: ignore[call-arg]
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise reader.refuse(f"options that make no cache ({error})") from None
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
        """Its policies take what they need to know of `model` (CriticalKV its output projections): `load` and
        `from_dict` make them anew, without. Returns the cache. ValueError, and nothing done, if the cache is calibrated
        for other weights; else the first call tells, under `enable(model)`, and without it nothing does."""
        self.forward_pass.check_all_weights(model)
        found = [layer.options["policy"] for layer in paged_layers(self)]
        for policy in {id(policy): policy for policy in found if policy is not None}.values():
            policy.bind(model)
        return self

    def to(self, device: torch.device | str, *, pool: Any = None) -> Self:
        """Moves all layers to `device` ("cpu", "cuda", "cuda:1"), in place, and returns the cache, which goes on with a
        model that is there. Pages are the same bytes on every device.

        pool: the `_C.Pool` to take pages from; if None a new one with the limit of the old. What other caches share of
            the pages (a prefix, copies) stays for them where it is; `PrefixCache.commit` wants its own pool given back.
        Pages in other tiers are onloaded first, and go out again from there.
        Raises ValueError for what is no device, or has no kernels, for a suspended cache, and for what `check` finds;
        MemoryError, OSError: the cache is then as it was.
        """
        forward_pass, prefetcher = self.forward_pass, self.forward_pass.prefetcher
        forward_pass.check_there()
        paged = committed_layers(self)
        others = [layer for layer in self.layers if not isinstance(layer, PagedLayer)]
        stores = [layer.store for layer in paged]
        there = pools.device_of(device)
        each = pool is None and forward_pass.pools.each
        if pool is None and any(store.device != there for store in stores):
            pool = pools.like(forward_pass.pool, there)
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
        """From now on the oldest sealed pages wait in `tiers`, but for the `resident` newest tokens of each row: a
        layer's are in the pool only while it attends, fetched one layer ahead. None brings them all back.

        unit: bytes that a layer offloads at once, at least. in_place: pages are not fetched, but attended where they
        lie, by the CPU, files mapped; where a call cannot (windows, pads between tokens, evicted tokens, attention that
        a policy gathers, several queries without tokens of their own) they are fetched. Fetched, results are the same
        to the bit; in place, to rounding.
        Whatever changes the cache other than by new tokens (evictions, crop, beams, copies, files) brings the pages
        back first. A call whose pages do not come back raises OSError or ValueError and leaves the cache as it was; an
        eviction without them waits for the next call.
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
        """Gives the pages of all layers back to the pool; their bytes wait in memory of their own, or in the file
        `path`, which is this cache's alone till then. Until `resume()` every call that wants them raises. Raises
        MemoryError, OSError, or ValueError for a cache that is suspended, a path where one waits, or what `check`
        finds; then nothing has changed.
        """
        if self.forward_pass.suspended is not None:
            raise ValueError("KVCache: suspend: expected a cache that is not suspended, got one that is")
        self.check()
        paged = committed_layers(self)
        stores = {i: layer.store for i, layer in enumerate(self.layers) if layer in paged and layer.store.seen}
        if path is None:
            suspended: Any = {index: _pack(store) for index, store in stores.items()}
        else:
            suspended = os.path.realpath(checks.path("KVCache: suspend", path)), save_load.save(self, path)  # type: ignore[arg-type]
        seen = {index: store.seen for index, store in stores.items()}
        for store in stores.values():
            store.page_store.table.reset()
        if self.forward_pass.prefetcher:
            self.forward_pass.prefetcher.release()
        self.forward_pass.suspended = suspended, seen
        if path is not None:
            save_load.WAITING[suspended[0]] = self.forward_pass

    def resume(self) -> None:
        """Takes the pages back; their order in the pool may be another. Raises MemoryError (pool), OSError, ValueError
        (damaged bytes, or another file in the place of its own): the cache is then still suspended."""
        if self.forward_pass.suspended is None:
            raise ValueError("KVCache: resume: expected a suspended cache, got one that is not")
        suspended, seen = self.forward_pass.suspended
        reader = save_load.Reader(suspended[0]) if isinstance(suspended, tuple) else None
        if reader and reader.seal != suspended[1]:
            raise ValueError(f"KVCache: resume: expected the file that suspend() wrote, got another in {suspended[0]}")
        done = []
        try:
            for index in seen:
                store = self.layers[index].store
                done.append(store)
                if reader:
                    reader.place(index, store)
                else:
                    serialize.place(store.page_store, *suspended[index])
        except BaseException:
            for store in done:
                store.page_store.table.reset()
            raise
        self.forward_pass.suspended = None
        for index in seen:
            self.layers[index].changed()


def _pack(store: PagedKV) -> tuple[serialize.Arrays, serialize.Bytes, int]:
    store.onload()
    arrays, pieces = serialize.survey(store.page_store)
    return arrays, *serialize.gather(store.page_store, pieces)
