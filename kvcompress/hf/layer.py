"""PagedLayer: one layer of a KVCache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from .. import checks
from ..layer import PagedKV
from ..offload.prefetch import LayerOffload, Prefetcher
from ..parallel.context_parallel import paged
from . import attention, format_check, masks
from .forward_pass import ForwardPass
from .lazy import LazyKV

_AHEAD = 31  # further layers to create LazyKV for


class Block:
    """The new K/V of one `update()`: staged until it is committed, then readable until the layer changes."""

    __slots__ = ("base", "k", "layer", "not_evicted", "pair", "stamp", "start", "v")

    def __init__(self, layer: PagedLayer, k: torch.Tensor, v: torch.Tensor, base: int) -> None:
        self.layer, self.k, self.v, self.base = layer, k, v, base
        self.start = layer.start_of(base)  # first slot of the dense K and V
        self.stamp = -1  # the layer's stamp when the block was committed
        self.pair: Any = None  # K and V, see `dense_pair`
        self.not_evicted: torch.Tensor | None = None  # bool [B, 1 or H, base]: False at evicted slots

    def dense_pair(self, own: torch.Tensor | None = None, store: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """K, V [B, H, base - start + T, D]: stored tokens decoded, the new tokens exact. Commits the block if it is
        staged, unless `store` is False; own: bool [B, T], False at padding, if known."""
        if self.pair is None:
            if self.layer.staged is not self and self.stamp != self.layer.stamp:
                raise RuntimeError(
                    "kvcompress: expected the keys of the layer's latest update, got older ones; "
                    "use them before the next update, crop or reorder"
                )
            self.not_evicted = evict.not_evicted() if (evict := self.layer.store.eviction) else None
            if self.layer.staged is self and store:
                self.pair = self.layer.commit(own, partial(self.layer.store.append_dense, start=self.start))
            else:
                stored, first = self.layer.store.dense(self.start), self.base - self.start
                self.pair = (
                    torch.cat([stored[0][:, :, :first], self.k], 2),
                    torch.cat([stored[1][:, :, :first], self.v], 2),
                )
        return self.pair


class PagedLayer(checks.ProcessBound, CacheLayerMixin, instead="copy.deepcopy() or save() the KVCache of the layer"):
    """A full-attention layer of a KVCache. options: arguments of PagedKV; index: its index in the cache; slots: see
    StaticPagedLayer; max_slots: see IndexedPagedLayer."""

    revertible = True  # by forward_pass; faster than `isinstance`, for each layer and step
    is_sliding = False
    is_croppable = True

    def __init__(
        self, forward_pass: ForwardPass, options: dict[str, Any], index: int, slots: int = 0, max_slots: int = 0
    ) -> None:
        self.forward_pass, self.options = forward_pass, options
        self.index, self.slots, self.max_slots = index, slots, max_slots
        self.window, self.chunked = options.get("window", 0), options.get("chunked", False)
        self.store: PagedKV = None  # type: ignore[assignment]  # until lazy_initialization
        self.staged: Block | None = None  # of `update()`, until it is stored
        self.stamp = 0  # counts changes of the stored tokens
        self.recording = False  # drafts are expected: a crop may remove a part of any short call
        self.format_checked = False  # whether K was checked against its format
        self.is_initialized = False

    # ------------------------------------------------------------------ appending

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        for name, x in (("k", key_states), ("v", value_states)):
            if not isinstance(x, torch.Tensor) or x.dim() != 4:
                got = list(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
                raise ValueError(f"KVCache: {name}: expected a tensor [B, H, T, D], got {got}")
        B, H, _, D = key_states.shape
        latent = H == 1 and self.options.get("latent", False)  # some classes cache K and V of all heads instead
        self.store = paged(
            H, D, value_dim=value_states.shape[3], batch=B, dtype=key_states.dtype, device=key_states.device,
            pool=self.forward_pass.pools.on(key_states.device), **{**self.options, "latent": latent},
        )  # fmt: skip
        if self.store.eviction:
            self.store.eviction.deferred = True
        self.store.held = self.forward_pass.held
        if (sliding := self.store.sliding) is not None:
            sliding.deferred, sliding.recording, sliding.shared = True, self.recording, self.forward_pass.reused
        self.is_initialized = True
        self.moved()

    def fit(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Initializes an empty layer with the shape and device of k and v."""
        if not self.is_initialized:
            return self.lazy_initialization(k, v)
        store = self.store
        if store.seen or self.staged or k.dim() != 4 or v.dim() != 4 or k.shape[0] == 0:
            return
        if (k.shape[1], k.shape[3], v.shape[3], k.dtype, k.device) != (
            store.num_kv_heads, store.head_dim, store.value_dim, store.dtype, store.device,
        ):  # fmt: skip
            self.lazy_initialization(k, v)
        elif k.shape[0] != store.batch:
            store.reset(k.shape[0])

    def before_append(self, base: int, k: torch.Tensor, own: torch.Tensor | None = None) -> None:
        """Called before k is appended at slot `base`; own: its tokens that are not padding. Checks whether K suits its
        format in the first long call, or else before the first seal."""
        if self.format_checked:
            return
        pages, T = self.store.page_store, k.shape[2]
        enough = min(format_check.LEAST, 2 * pages.page_size)  # shorter calls seal none of their own tokens
        sealing = base + T > pages.sinks + pages.page_size + pages.residual_length and not pages.direct
        if enough <= T or sealing:
            if enough > T:
                start = self.start_of(base)
                k, own = self.store.dense(start)[0], self.store.real()[:, start:]
            if own is not None:  # the row with the most tokens
                b = int(own.sum(1).argmax())
                k = k[b : b + 1, :, own[b]]
            self.format_checked = self.forward_pass.check_format(self.store, k)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes k [B, H, T, Dk] and v [B, H, T, Dv]. With the kvcompress attention, stages them and returns the layer's
        K and V as LazyKV; with any other attention, stores them and returns dense K and V."""
        if self.staged is not None:
            self.commit()
        if not self.is_initialized or not self.store.page_store.table.seen:
            self.fit(key_states, value_states)
        store = self.store
        if store.eviction:
            store.eviction.evict_deferred()
        T = store.page_store.takes(key_states, value_states)
        if not T:
            value_states = attention.suited(value_states, key_states)
            store.check_pair(key_states, value_states)
        base, T = store.page_store.table.seen, T or key_states.shape[2]
        block = Block(self, key_states, value_states, base)
        if self.forward_pass.fused:
            self.staged = block
            return self._lazy_pair(block, T)
        if base and T == 1:
            self.forward_pass.decoded()
        if not self.is_sliding:
            self.forward_pass.check_width(self.get_mask_sizes(T)[0], T, self.store.eviction is not None)
        self.staged = block
        dense = partial(self.store.append_dense, start=block.start)
        return self.commit(None, self._append_outside if self.store.eviction else dense)

    def _lazy_pair(self, block: Block, T: int) -> tuple[LazyKV, LazyKV]:
        """`lazy_pair` of a block of T tokens. Layers of a pass need equal shapes, so pairs for several layers are
        created at once, while the code that creates them is in the CPU's caches."""
        store, coming = self.store.page_store, self.forward_pass
        shape = (store.table.batch, store.num_kv_heads, block.base - block.start + T)
        kind = (shape, (store.head_dim, store.value_dim), store.dtype, store.device)
        ready = coming.lazy_pairs.setdefault(kind, [])
        if not ready:
            ready += [LazyKV.pair(*kind) for _ in range(1 + min(_AHEAD, max(0, coming.last_paged - coming.at)))]
        pair = ready.pop()
        pair[0].block = pair[1].block = block
        return pair

    def _append_outside(
        self, k: torch.Tensor, v: torch.Tensor, own: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends for another attention implementation. Returns dense K, V: kept tokens in order, then k and v."""
        evict: Any = self.store.eviction
        many = evict.policy.uneven and k.shape[1] > 1
        if evict.policy.needs_attention or evict.policy.window or k.shape[0] > 1 or many:
            what = "in a batch (padding would be visible)" if k.shape[0] > 1 else "that uses attention"
            what = "whose heads keep different numbers of tokens" if many else what
            raise ValueError(
                f"KVCache: expected kvcompress attention for a policy {what}, got another; call enable(model)"
            )
        old = evict.in_order()
        self.store.append(k, v, own)
        return torch.cat([old[0], k], 2), torch.cat([old[1], v], 2)

    def after_append(self, base: int) -> None:
        """The tokens of a pass that began at slot `base` are stored. A first pass, which is reverted by a reset, evicts
        layer by layer; later ones evict when no layer can fail any more."""
        self.changed()
        if base == 0:
            self.evict()
        self.forward_pass.done()

    def evict(self) -> None:  # what the policy has put off
        if self.is_initialized and (evict := self.store.eviction) and not evict.defers(self.recording):
            evict.evict_or_defer()

    def has_drafts(self) -> bool:
        """True if a crop may remove tokens of the last call, for which an eviction waits."""
        return bool(self.recording and self.is_initialized and self.store.eviction and self.store.eviction.overdue)

    def evict_deferred(self) -> None:
        """Runs an eviction that ran out of memory after the last call, before the kept tokens are read."""
        if self.is_initialized and self.store.eviction:
            self.store.eviction.evict_deferred()

    def offload_pages(self, prefetcher: Prefetcher | None) -> None:
        """Offloads the oldest pages, if the cache uses tiers. (A window has few.)"""
        if prefetcher is not None and self.is_initialized and not self.is_sliding:
            if self.store.offload is None:
                self.store.attach(LayerOffload(self.store.page_store, prefetcher))
            assert self.store.offload is not None
            self.store.offload.offload_oldest()

    def commit(self, own: torch.Tensor | None = None, append: Callable[..., Any] | None = None) -> Any:
        """Stores the staged block, if any, by `append` (default: that of its store), whose result it returns. own: bool
        [B, T], False at padding; None: no padding."""
        block, pair = self.staged, None
        if block is not None:
            self.staged = None
            try:
                self.before_append(block.base, block.k, own)
                pair = (append or self.store.append)(block.k, block.v, own)
            except BaseException:
                self.forward_pass.rollback(block.base)
                raise
            self.after_append(block.base)
            block.stamp = self.stamp
        return pair

    def start_of(self, seen: int) -> int:
        """First slot of the dense K and V of `seen` slots."""
        return 0

    def changed(self) -> None:
        """Called when the stored tokens have changed."""
        self.stamp += 1

    def moved(self) -> None:  # elsewhere
        self.changed()

    def flat_mask(self, mask: torch.Tensor, base: int) -> torch.Tensor | None:
        """The mask for attention of queries from slot `base` on, from a 4D mask."""
        return mask.padding if isinstance(mask, masks.WindowMask) and not mask.window else mask

    def attend(
        self, block: Block, query: torch.Tensor, mask: torch.Tensor | None, **options: Any
    ) -> torch.Tensor | None:
        """Appends `block`, if it is staged, and attends, in one op: out [B, T, Hq, Dv]. mask: bool [B, seen + T] by
        slot. Returns None and does nothing if the mask hides stored tokens, which the op does not support. If it
        raises, the caller rolls the pass back."""
        if self.staged is not block:
            return self._attend_stored(block, query, mask, **options)
        own = None
        if mask is not None:
            own, fits = self.forward_pass.split_mask(mask, self.store, block.k.shape[2])
            if not fits:
                return None
        self.staged = None
        if not self.format_checked:
            self.before_append(block.base, block.k, own)
        out, _ = self.store.attend_checked(query, block.k, block.v, own, **options)
        self.after_append(block.base)
        block.stamp = self.stamp
        return out

    def _attend_stored(
        self, block: Block, query: torch.Tensor, mask: torch.Tensor | None, **options: Any
    ) -> torch.Tensor | None:
        """`attend` of a later layer that reads K and V of this one (Gemma 3n and 4), whose block is stored. None also
        if tokens of the block are already quantized, or tokens were evicted."""
        store = self.store
        raw = not store.page_store.direct and block.k.shape[2] <= store.page_size
        if store.eviction or not raw or query.shape[2] > block.k.shape[2] or query.requires_grad:
            return None
        if mask is not None and not self.forward_pass.split_mask(mask, store, 0)[1]:
            return None
        return store.attend_checked(query, None, None, None, **options)[0]

    def fill(self, keys: torch.Tensor, values: torch.Tensor, own: torch.Tensor | None, seen: int) -> None:
        """Stores K and V [B, H, T, D], the last of `seen` slots, of another cache in this empty layer. own: bool
        [B, seen], False at padding."""
        keys, values = (x.detach().contiguous() for x in (keys, values))
        self.lazy_initialization(keys, values)
        self.store.append(keys, values, own)

    # ------------------------------------------------------------------ reading

    def _dense(self, side: int) -> torch.Tensor | None:
        if not self.is_initialized:
            return None
        self.forward_pass.check_there()
        self.commit()
        return self.store.dense(self.start_of(self.store.seen))[side]

    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]
        """Dense K [B, H, seen, Dk], decoded at every access."""
        return self._dense(0)

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]
        """Dense V [B, H, seen, Dv], decoded at every access."""
        return self._dense(1)

    @property
    def batch_size(self) -> int:
        if not self.is_initialized:
            raise AttributeError("batch_size: the layer has seen no tokens yet")
        return self.store.batch

    def get_seq_length(self) -> int:
        if not self.is_initialized:
            return 0
        if self.forward_pass.suspended is not None:
            return max(self.forward_pass.suspended[1].values(), default=0)
        return self.store.seen + (self.staged.k.shape[2] if self.staged else 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        seen = self.get_seq_length()
        if not self.is_initialized or not self.store.eviction:
            return seen + int(query_length), 0
        self.evict_deferred()
        kept = self.store.eviction.longest_row() + seen - self.store.seen
        return kept + int(query_length), seen - kept

    def get_max_length(self) -> int:
        return self.slots or -1

    # ------------------------------------------------------------------ changing

    def change(self, method: str, *args: Any) -> None:
        self.forward_pass.check_there()
        self.commit()
        if self.is_initialized:
            getattr(self.store, method)(*args)
            self.changed()

    def crop(self, tokens_to_remove: int) -> None:
        tokens_to_remove = checks.cropped(tokens_to_remove)
        self.forward_pass.check_there()
        self.commit()
        self.forget(max(0, self.get_seq_length() + tokens_to_remove))

    def forget(self, seen: int) -> None:
        """Keeps the first `seen` slots."""
        if self.is_initialized and seen < self.store.seen:
            self.change("crop", seen)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.change("select", indices)

    reorder_cache = batch_select_indices  # type: ignore[assignment]

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.change("repeat", repeats)

    def reset(self) -> None:
        self.staged = None
        self.change("reset")

    def activate_past_recording(self) -> None:
        """Prepares for `crop` of draft tokens. Raises ValueError if another attention could not continue after one."""
        policy, configs = self.options["policy"], self.forward_pass.config.per_layer_config  # heads may differ
        heads = max(getattr(config, "num_key_value_heads", None) or 2 for config in configs)
        one = heads * self.options.get("layer", (0, 1))[1] == 1
        if policy is not None and policy.heads == "each" and not one and not self.forward_pass.fused:
            raise ValueError(
                f"KVCache: expected the kvcompress attention for drafts with {policy!r}, got another: a crop leaves "
                "heads and layers with different numbers of tokens; call kvcompress.enable(model)"
            )
        self.recording = True

    def offload(self) -> None:
        raise NotImplementedError(
            "KVCache: offload(): expected a cache on the model's device; use KVCache.use_tiers to offload pages"
        )

    prefetch = offload

    def clone(self, forward_pass: ForwardPass) -> PagedLayer:
        """A copy for another cache; both share pages until one of them writes (copy-on-write)."""
        self.commit()
        twin = type(self)(forward_pass, self.options, self.index, self.slots, self.max_slots)
        twin.recording = self.recording
        if self.is_initialized:
            twin.store, twin.is_initialized, twin.format_checked = self.store.clone(), True, self.format_checked
            twin.store.held = forward_pass.held
            twin.moved()
        return twin

    def __repr__(self) -> str:
        return repr(self.store) if self.is_initialized else f"PagedLayer({self.options['key']}, empty)"


def paged_layers(cache: Cache) -> list[PagedLayer]:
    """The paged layers of a cache."""
    return [layer for layer in cache.layers if isinstance(layer, PagedLayer)]


def committed_layers(cache: Cache) -> list[PagedLayer]:
    """The paged layers that have seen tokens, after committing staged blocks."""
    paged = [layer for layer in paged_layers(cache) if layer.is_initialized]
    for layer in paged:
        layer.commit()
    return paged
