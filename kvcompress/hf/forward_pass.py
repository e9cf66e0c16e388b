"""ForwardPass: state shared by the layers of one cache, and the current forward pass."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionCacheLayerMixin

from .. import _C
from ..layer import PagedKV
from ..offload.prefetch import Prefetcher
from ..quantization.calibration import Calibration
from ..store.pools import Pools
from . import attention, format_check
from .configs import misfit, reads_others
from .modules import attention_by_layer, weights_hash
from .native_layers import forget_states, put_back

_NAME = "_attn_implementation_internal"
_UNEVEN = (
    "KVCache: expected {} slots in each layer, got {} in layer {}: an exception interrupted a forward pass (reset() "
    "the cache, or use a copy made before), another thread runs one (use a cache in one thread at a time), or a model "
    "with cross-attention has updated a layer twice (pass it transformers.EncoderDecoderCache(cache, DynamicCache()))"
)
_SAFER = "use int4 or kivi4, which subtract the mean, or int8"


class LayeredCache(Cache):
    """The cache of a forward pass. Its paged layers are `revertible`: they can remove the tokens of a failed pass."""

    layers: list[Any]
    forward_pass: ForwardPass
    to_dict: Callable[[], dict[str, Any]]


class ForwardPass:
    """State shared by the layers of one cache: the pools, the model's config, and the current forward pass."""

    def __init__(
        self, cache: LayeredCache, config: PreTrainedConfig, pools: Pools, last_paged: int, strict: bool,
        calibration: Calibration | None,
    ) -> None:  # fmt: skip
        self.cache = weakref.ref(cache)
        self.config, self.pools, self.last_paged = config, pools, last_paged
        self._settings = config.__dict__  # faster: attribute access of a config takes four Python calls
        # The last layers may read K and V of earlier ones (Gemma 3n and 4).
        self.reused = any(reads_others(config, i) for i in range(config.num_hidden_layers))
        self.at = -1  # layer of the last update
        self.before: dict[int, dict[str, Any]] = {}  # state of transformers' own layers before this forward pass
        self.lazy_pairs: dict[tuple, list[Any]] = {}  # LazyKV created for later layers of this pass, by shape
        self.held: list[_C.Held] = []  # raw pages that this forward pass sealed
        self.complete = False  # all paged layers have stored their tokens of this forward pass
        self.states_lost = False  # states of linear-attention layers contain a failed call
        self.states_at = -1  # last linear-attention layer that the model has reached, or a layer before the first
        self.prefetcher: Prefetcher | None = None  # if the cache uses tiers
        # While the cache is suspended: its pages, or (path, digest) of the file; slots of each layer. See `suspend`.
        self.suspended: tuple[Any, dict[int, int]] | None = None
        self.strict, self.calibration = strict, calibration  # strict: keys that do not suit their format are an error
        self.checked_weights: set[int] = set()  # layers whose weights match the calibration
        self.fits = misfit(config) is None  # `enable` supports the model
        self.broken: dict[int, str] = {}  # layers of this pass whose keys do not suit their format, and why
        # Number of slots that each paged layer must have before this pass; -1: as many as the first; None: not checked.
        self.length: int | None = -1
        self.width: int | None = None  # tokens of dense K and V in this pass; None: not known yet
        self._masks: dict[int, tuple] = {}

    def clone(self, cache: LayeredCache) -> ForwardPass:
        """A copy for a copy of the cache."""
        twin = ForwardPass(cache, self.config, self.pools, self.last_paged, self.strict, self.calibration)
        twin.at, twin.states_at, twin.states_lost, twin.length = self.at, self.states_at, self.states_lost, self.length
        twin.complete, twin.fits, twin.checked_weights = self.complete, self.fits, set(self.checked_weights)
        return twin

    def check_weights(self, module: torch.nn.Module) -> None:
        """Raises ValueError if the weights of an attention module do not match the calibration. Checks each once."""
        index = getattr(module, "layer_idx", None)
        if not self.calibration or index not in self.calibration.weights or index in self.checked_weights:
            return
        found, known = weights_hash(module), self.calibration.weights[index]  # none of offloaded weights
        if found and known and found != known:
            raise ValueError(
                "KVCache: calibration: expected the model that it was measured on, got one with other weights in layer "
                f"{index} (or the same in float16); run `kvcompress calibrate` for this model"
            )
        self.checked_weights.add(index)

    def check_all_weights(self, model: Any) -> None:
        """`check_weights` of all layers whose attention module can be found before a call: not with fused projections,
        or several stacks of layers with the same numbers."""
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"KVCache: bind: expected a model, got {type(model).__name__}")
        for found in attention_by_layer(model).values() if self.calibration else ():
            if len(found) == 1:
                self.check_weights(found[0])

    @property
    def fused(self) -> bool:
        """True if the model passes the result of `update()` to the kvcompress attention function."""
        return (self._settings.get(_NAME) or self.config._attn_implementation) == attention.NAME

    def decoded(self) -> None:
        """Warns once when layers are decoded for another attention, if `enable` supports the model."""
        if self.fits:
            self.fits = False
            warnings.warn(
                f"KVCache: expected the kvcompress attention, got {self.config._attn_implementation!r}, for which "
                "pages are decoded at every step; call kvcompress.enable(model), and create the cache from "
                "model.config itself",
                stacklevel=2,
            )

    def split_mask(self, mask: torch.Tensor, store: PagedKV, T: int) -> tuple[torch.Tensor | None, bool]:
        """Splits a mask, bool [B, seen + T], into ([B, T] of the new tokens, or None without padding; whether the rest
        matches the stored tokens).

        Computed once per mask, as all layers of a type get the same one in a forward pass.
        """
        seen = store.seen
        memo = self._masks.get(id(mask))
        if memo is None or memo[1] != seen:
            own = mask[:, seen:].cpu()
            if len(self._masks) > 4:  # one per layer type
                self._masks.clear()
            memo = self._masks[id(mask)] = (mask, seen, None if bool(own.all()) else own.contiguous(), set())
        known, signature = memo[3], store.signature()
        if signature is None or signature not in known:
            if not torch.equal(mask[:, :seen].cpu(), store.real()):
                return memo[2], False
            known.add(signature)
        return memo[2], True

    def moved(self, pools: Pools) -> None:
        """The pages of all layers have moved to `pools`; pages held of the last pass are dropped."""
        self.pools = pools
        self._forget()

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Context manager around changes of the lengths of all layers: if interrupted, the next pass checks the
        lengths. Drops the pages held of the last pass."""
        complete, length = self.complete, self.length
        self.held.clear()
        self.complete, self.length = False, -1
        yield
        self.complete, self.length = complete, length

    def check_there(self) -> None:
        """Raises ValueError while the cache is suspended."""
        if self.suspended is not None:
            raise ValueError("KVCache: expected a cache with its pages, got a suspended one; call resume()")

    def check_even(self) -> None:
        """Raises ValueError if layers have different numbers of slots, after an interrupted forward pass."""
        cache = self.cache()
        paged = [(i, x) for i, x in enumerate(cache.layers if cache else ()) if getattr(x, "revertible", False)]
        lengths = {i: layer.get_seq_length() for i, layer in paged if not reads_others(self.config, i)}
        for index, length in lengths.items():
            if length != (first := next(iter(lengths.values()))):
                raise ValueError(_UNEVEN.format(first, length, index))

    def ready(self) -> None:
        """Raises ValueError if the cache cannot take another call."""
        self.check_there()
        if self.states_lost:
            raise ValueError(
                "KVCache: expected linear-attention layers as before the call that failed, got states of that call, "
                "which cannot be restored; reset() the cache, or use a copy made before"
            )

    def at_states(self, index: int) -> None:
        """The model reaches layer `index` and may write to its states. Raises ValueError if the pass before was
        interrupted between a linear-attention layer and the last paged one."""
        if index < self.states_at:  # a new pass
            self.states_lost |= not self.complete
            self.complete = False
        self.ready()
        self.states_at = index

    def begin(self, index: int, layer: Any) -> None:
        """An update of layer `index` is about to happen."""
        if self.suspended is not None or self.states_lost:  # saves a Python call for each layer and step
            self.ready()
        if index < self.states_at:  # a new forward pass, whose linear-attention layers come later
            self.at_states(index)
        if index == self.at < self.last_paged:
            self._check_twice(index, layer)
        if index <= self.at:
            self._forget()  # a new forward pass
            self.length = None if self.complete else -1  # the last one may have been interrupted
            self.complete = False
        self.at = index
        if getattr(layer, "revertible", False):
            if self.length is not None:
                self._check_length(index, layer.get_seq_length())
        elif index < self.last_paged and isinstance(layer, DynamicLayer):
            self.before[index] = dict(layer.__dict__)

    def check_format(self, store: PagedKV, k: torch.Tensor) -> bool:
        """Checks k (without padding) against the formats of `store`: if they do not suit it, warns after the pass, or
        raises ValueError if strict. Returns False if k is too short to tell."""
        if k.shape[2] < 16 or not bool(k.isfinite().all()):  # NaN and Inf raise when k is stored
            return False
        names = store.spans.formats() if store.spans else []
        keys = {key for key, _ in [*names, (store.key, store.value)]} - {"raw"}
        if store.page_store.basis is not None:
            k = store.page_store.filled(k, 0)
        what = format_check.trouble(k, sorted(keys), store.page_size)
        if what and self.strict:
            raise ValueError(f"KVCache: layer {self.at}: expected keys that suit their format, but {what}; {_SAFER}")
        if what:
            self.broken[self.at] = what
        return True

    def _check_length(self, index: int, length: int) -> None:
        if self.length in (-1, length):
            self.length = length
            return
        others, self.at = self.length or 0, index - 1
        self.rollback(others)
        raise ValueError(_UNEVEN.format(others, length, index))

    def _check_twice(self, index: int, layer: Any) -> None:
        """Raises ValueError if layer `index` of a decoder with cross-attention, updated last, is ahead of the last
        paged layer: the next update would fail. Other models may stop at earlier layers in any call."""
        cache = self.cache()
        if cache and getattr(self.config, "add_cross_attention", False) and getattr(layer, "revertible", False):
            others, length = cache.layers[self.last_paged].get_seq_length(), layer.get_seq_length()
            if others != length:
                raise ValueError(_UNEVEN.format(others, length, index))

    def check_width(self, width: int, T: int, evicts: bool) -> None:
        """Dense K and V of a layer have `width` tokens. Raises ValueError if it `evicts` and the first layer of the
        pass had another number, since transformers makes one mask for all layers. (For a single query only eager
        attention has a mask.)"""
        self.width = self.width or width
        if evicts and self.width != width and (T > 1 or self.config._attn_implementation == "eager"):
            raise ValueError(
                f"KVCache: expected layers that keep the same number of tokens, for attention outside of the cache, "
                f"got {width} in layer {self.at}, {self.width} before; call kvcompress.enable(model)"
            )

    def _forget(self) -> None:
        self.width = None
        self.lazy_pairs.clear()
        self.before.clear()
        self.held.clear()

    def done(self) -> None:
        """A paged layer has stored its tokens. After the last one, evicts and offloads: the pass cannot fail any
        more."""
        if self.at >= self.last_paged:
            self.complete = True
            self._forget()
            cache = self.cache()
            for layer in cache.layers if cache else ():
                if getattr(layer, "revertible", False):
                    layer.evict()
                    if self.prefetcher is not None:
                        layer.offload_pages(self.prefetcher)
            if self.broken:
                layers, (first, what) = sorted(self.broken), min(self.broken.items())
                self.broken = {}
                warnings.warn(
                    f"KVCache: layers {layers}: keys do not suit their format. Layer {first}: {what}; {_SAFER}",
                    stacklevel=2,
                )

    def rollback(self, seen: int) -> None:
        """Removes the tokens of a failed forward pass that began with `seen` slots from all layers."""
        cache = self.cache()
        if cache is None or self.complete:
            return
        for held in self.held:
            held.restore()
        for index, layer in enumerate(cache.layers[: self.at + 1]):
            if index in self.before:
                put_back(layer, self.before[index])
            elif getattr(layer, "revertible", False):
                layer.staged = None
                layer.forget(seen)
            if isinstance(layer, LinearAttentionCacheLayerMixin) and seen:
                self.states_lost = True  # models write states in place: restoring them would take a copy at every step
            elif isinstance(layer, LinearAttentionCacheLayerMixin):
                forget_states(layer)
        self._forget()
        self.broken = {}
        self.at = self.states_at = self.length = -1
