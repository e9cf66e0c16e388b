"""KVCache: the face of PagedKV for transformers. One layer per layer of the model."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    LinearAttentionCacheLayerMixin,
)

from .. import checks
from ..layer_store import select_rows
from ..parallel.context_parallel import paged
from ..policies import Policy
from ..quantization.calibration import Calibration
from ..quantization.mixed_precision import pair
from ..store import pools
from ..store.display_mixin import DisplayMixin, Stats
from ..store.sequence import Kept, copies
from . import attention, convert, native_layers, static_layer
from .configs import masks_itself, misfit, text_config
from .forward_pass import ForwardPass
from .indexed_layer import IndexedPagedLayer
from .layer import PagedLayer, committed_layers, paged_layers
from .layer_options import LayerOptions, layer_options
from .save_load import check_model, options_of
from .sliding_layer import SlidingPagedLayer
from .static_layer import StaticPagedLayer, StaticSlidingPagedLayer
from .suspend import MovableCache


class KVCache(MovableCache, DisplayMixin):
    """A key/value cache for `model.generate(past_key_values=...)` whose attention layers are paged and compressed.

    Layers with a sliding window, or with chunks, hold what their window sees (`spans`, `sinks` and `policy` are not for
    them). Linear and other layers stay as transformers makes them. `kvcompress.enable(model)` makes
    attention read the pages directly; without it the layers are decoded for whatever attention the model
    uses.

    Args:
        config: `model.config` itself, not a copy (it tells which attention the model uses).
        key_or_format: format of K and V: "raw", "int8", "fp8_e4m3", "int4", or of both, "int8/int4". "int8" if None.
        key, value: formats of K and V apart; `value` follows `key`.
        policy: which tokens stay, one of `kvcompress.policies`; all if None. See docs/eviction.md.
        sinks: first tokens of each row, kept raw; the policy's sinks if None, 4 without a policy.
        residual_length: newest tokens that stay raw at least. None: those of the newest page. 0: none, tokens go
            straight into sealed pages (8-bit formats).
        page_size: tokens of a page, a multiple of 16.
        spans, span_tokens: formats by position; see `kvcompress.quantization.mixed_precision.Spans`.
        per_layer: {layer: format, K/V formats, or dict of PagedKV's arguments} for single layers; negative
            numbers count from the last paged layer.
        guard: guard rails: K must have at least the bits of V; the first and last paged layers go a step up (4 bits to
            int8, 2 bits to int4).
        strict: a model's K that its format would break (`hf.format_check.LIMIT`) is a ValueError on the first
            call of 64 tokens or more, or else before the first seal; without it a warning that names the layers.
        max_length: slots that the cache holds at most. With it the cache compiles: `torch.compile(model,
            fullgraph=True)` makes one graph of a decode step that serves every step.
        max_bytes: limit of the pages of all layers, of which each MiB has pages of one size; 0 for the machine's
            memory. Reaching it raises MemoryError.
        pool: the `_C.Pool` to take pages from, shared with other caches (see PrefixCache); if None a new one, without
            `max_bytes` one for each device of the model.
        calibration: what `kvcompress calibrate` measured of this model, a file or a `Calibration`: rows of
            full-attention layers are stored in its coordinates. `cal2` wants it. Not with `group`. Other weights than
            the measured ones are found in the first call under `enable(model)`, or by `bind(model)`.
        group: a torch.distributed process group that the tokens are spread over (`kvcompress.parallel.ShardedKV`).

    Raises:
        ValueError: config not of a decoder-only model with attention; unknown format; options that do not go
            together.
        TypeError: `config` is not a transformers config.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        key_or_format: str | None = None,
        *,
        key: str | None = None,
        value: str | None = None,
        policy: Policy | None = None,
        sinks: int | None = None,
        residual_length: int | None = None,
        page_size: int = 64,
        spans: Any = None,
        span_tokens: int | None = None,
        per_layer: Any = None,
        guard: bool = False,
        strict: bool = False,
        max_bytes: int = 0,
        max_length: int | None = None,
        pool: Any = None,
        calibration: Any = None,
        group: Any = None,
    ) -> None:
        text = text_config(config)
        checks.policy(policy)
        first, second = pair(key_or_format or key or "int8", "KVCache: a format")
        key, value = key or first, value or second
        self.key, self.value, self._masks_itself = key, value, masks_itself(config)
        each = pool is None and max_bytes == 0  # a limit is one of all layers
        pool = checks.pool(pool) or pools.for_pages(max_bytes=checks.integer("max_bytes", max_bytes, 0))
        if group is not None and max_length is not None:
            raise ValueError("KVCache: expected group or max_length, got both; a compiled step joins no ranks")
        measured = _measured(text, calibration, group)
        slots = None if max_length is None else checks.integer("max_length", max_length, 1)
        common: dict[str, Any] = {
            "key": key, "value": value, "page_size": page_size, "sinks": sinks, "residual_length": residual_length,
            "spans": spans, "span_tokens": span_tokens, "policy": policy,
        }  # fmt: skip
        self._options: dict[str, Any] = {
            **common, "per_layer": per_layer, "guard": checks.flag("guard", guard),
            "strict": checks.flag("strict", strict), "max_bytes": max_bytes, "max_length": max_length,
            "calibration": measured and (measured.path or measured),
        }  # fmt: skip
        options = layer_options(text, {**common, "group": group}, per_layer=per_layer, guard=guard, max_length=slots,
                                calibration=measured)  # fmt: skip
        last = max((i for i, x in enumerate(options) if x.paged is not None), default=-1)
        self.forward_pass = ForwardPass(self, text, pools.Pools(pool, each), last)
        self.forward_pass.strict, self.forward_pass.calibration = strict, measured
        self.forward_pass.fits = misfit(text) is None
        super().__init__(layers=[_layer(self.forward_pass, i, x, slots) for i, x in enumerate(options)])
        # Every option is tried on the layer's head dims now: a mistake shows here, not later.
        for x in options:
            if x.paged is not None:
                basis = x.paged.get("basis")
                paged(1 if basis is None else len(basis.key), x.dims[0], value_dim=x.dims[1], pool=pool, **x.paged)
        if not any(x.paged and not x.paged.get("window") for x in options):
            paged(1, 64, pool=pool, **common)

    # ------------------------------------------------------------------ other forms

    def to_dict(self) -> dict[str, Any]:
        """The arguments that make such a cache, as JSON takes them (but a calibration that no file has); see
        `from_dict`."""
        options = copy.deepcopy(self._options)
        if options["policy"] is not None:
            options["policy"] = options["policy"].to_dict()
        return options

    @classmethod
    def from_dict(cls, config: PreTrainedConfig, options: Mapping[str, Any]) -> KVCache:
        """An empty cache for the model of `config`. options: keyword arguments of KVCache, as from `to_dict` or JSON
        (where the numbers of layers are strings). ValueError for a name that is none of them."""
        if not isinstance(options, Mapping):
            raise TypeError(f"from_dict: expected a dict of KVCache's options, got {type(options).__name__}")
        known = [name for name in inspect.signature(cls).parameters if name not in ("config", "pool")]
        if unknown := sorted(set(options) - set(known)):
            raise ValueError(f"from_dict: expected options out of {known}, got {unknown}")
        return cls(config, **options_of(options))

    @classmethod
    def from_cache(
        cls,
        cache: Cache,
        config: PreTrainedConfig,
        *args: Any,
        attention_mask: torch.Tensor | None = None,
        **options: Any,
    ) -> KVCache:
        """A KVCache that holds what a DynamicCache holds; the rest are KVCache's arguments.

        attention_mask: [B, at least seen], 0 at pads, which are then not stored; without it they are, like tokens.
        Raises TypeError for another kind of cache, ValueError for another model's.
        """
        made = cls(config, *args, **options)
        convert.fill(made, cache, attention_mask)
        return made

    def to_dynamic_cache(self) -> DynamicCache:
        """A DynamicCache with the decoded K and V, independent of this cache; zeros at pads. ValueError where the last
        pass broke off between layers."""
        self.forward_pass.check_even()
        return convert.dense(self)

    # ------------------------------------------------------------------ transformers' calls

    @property
    def is_compileable(self) -> bool:
        """Has it a fixed length, and does its model take the masks that `generate` then makes? (PaliGemma 2 does not,
        nor does it with transformers' StaticCache.)"""
        return super().is_compileable and not self._masks_itself

    @property
    def is_updated(self) -> Any:
        """Not here: AttributeError with what models ask for that have cross-attention."""
        raise AttributeError(
            "KVCache: is_updated: expected a cache for a model with cross-attention, got one of its decoder alone: "
            "pass transformers.EncoderDecoderCache(cache, DynamicCache())"
        )

    @property
    def max_cache_len(self) -> int:
        """Not here: AttributeError with what PEFT's prefix tuning needs, which asks for it."""
        raise AttributeError(
            "KVCache: max_cache_len: expected a model that keeps the cache that it is given, got PEFT's prefix tuning, "
            "which puts a DynamicCache in its place: KVCache.from_cache(model.get_prompt(batch_size), model.config) "
            "holds its prefix, for the base model (docs/huggingface.md, PEFT)"
        )

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See PagedLayer.update. A failure leaves every layer as it was before the forward pass, to the byte. Only the
        states of linear-attention layers cannot be taken back, except in the first pass: the cache then raises
        ValueError until `reset()`."""
        if not 0 <= layer_idx < len(self.layers):
            raise ValueError(
                f"KVCache: layer_idx: expected 0 to {len(self.layers) - 1}, got {layer_idx}; "
                "was the cache made from this model's config?"
            )
        layer: Any = self.layers[layer_idx]
        if torch.compiler.is_dynamo_compiling():
            if isinstance(layer, StaticPagedLayer) and layer.traceable(key_states):
                return layer.traced(key_states, value_states)
            if isinstance(layer, PagedLayer):
                return _outside(self, key_states, value_states, layer_idx, *args, **kwargs)
            return layer.update(key_states, value_states)
        return self.update_eager(key_states, value_states, layer_idx, *args, **kwargs)

    def update_eager(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`update` outside of a traced graph."""
        layer: Any = self.layers[layer_idx]
        self.forward_pass.begin(layer_idx, layer)
        if not isinstance(layer, PagedLayer):
            return layer.update(key_states, value_states, *args, **kwargs)
        try:
            return layer.update(key_states, value_states, *args, **kwargs)
        except BaseException:
            self.forward_pass.rollback(layer.store.seen if layer.is_initialized else 0)
            raise

    def step(self) -> AbstractContextManager[None]:
        """Around each run of a compiled model over one token a row, where the pages are on a GPU and the run is kernels
        alone (`max_length=`, after a prompt): the host plans before it; after it the tokens are stored, or, if it
        failed, are not. All rows' tokens are real; stored pads are never seen, whatever mask the model has."""
        return static_layer.step(self)

    def needs_step(self, device: torch.device) -> bool:
        """Do graphs of a model on `device` that take this cache run in `step()`?"""
        paged = [layer for layer in self.layers if isinstance(layer, StaticPagedLayer)]
        there = [layer.graph_layer is not None if layer.is_initialized else device.type != "cpu" for layer in paged]
        return any(there)

    @property
    def is_initialized(self) -> bool:
        """Has it seen tokens? After `reset()` not: models ask it whether a prompt begins (PaliGemma)."""
        paged = paged_layers(self)
        return super().is_initialized and (not paged or any(layer.get_seq_length() for layer in paged))

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last -tokens_to_remove slots. ValueError, and nothing done, where the window of a layer would not
        be there any more (see `activate_past_recording`)."""
        tokens_to_remove = checks.cropped(tokens_to_remove)
        for layer in (x for x in self.layers if isinstance(x, SlidingPagedLayer)):
            layer.check_crop(tokens_to_remove)
        with self.forward_pass.changing():
            super().crop(tokens_to_remove)

    def reset(self) -> None:
        """Forgets all tokens; the next call may have another batch size."""
        coming, linear = self.forward_pass, [x for x in self.layers if isinstance(x, LinearAttentionCacheLayerMixin)]
        coming.suspended, coming.spoilt = None, bool(linear)  # until all are reset
        with coming.changing():
            super().reset()
        if coming.prefetcher:
            coming.prefetcher.release()
        for layer in linear:
            native_layers.forget_states(layer)
        coming.spoilt, coming.states_at = False, -1

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """New batch: row i is old row indices[i]. indices: int64 [rows] or bool [B]."""
        self._rows("batch_select_indices", checks.as_tensor(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, copies side by side; the copies share pages until they differ."""
        self._rows("batch_repeat_interleave", repeats)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i is old row beam_idx[i]."""
        self._rows("reorder_cache", beam_idx)

    def _rows(self, method: str, argument: Any) -> None:
        """`method` of every layer; of none if one fails."""
        others = [layer for layer in self.layers if not isinstance(layer, PagedLayer)]
        self.forward_pass.check_there()
        with native_layers.whole(others):
            for layer in others:
                native_layers.change_rows(layer, method, argument)
            if paged := committed_layers(self):
                again = method == "batch_repeat_interleave"
                index = copies(paged[0].store.batch, argument) if again else argument
                select_rows([layer.store for layer in paged], index)
                for layer in paged:
                    layer.changed()

    def __deepcopy__(self, memo: dict) -> KVCache:
        """An independent cache that shares pages with this one until one of them writes."""
        self.forward_pass.check_there()
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        forward_pass = self.forward_pass.clone(twin)
        for name, x in self.__dict__.items():
            if name not in ("layers", "forward_pass"):
                setattr(twin, name, copy.deepcopy(x, memo))
        twin.forward_pass = forward_pass
        twin.layers = [
            layer.clone(forward_pass) if isinstance(layer, PagedLayer) else copy.deepcopy(layer, memo)
            for layer in self.layers
        ]
        return twin

    # ------------------------------------------------------------------ figures

    def kept(self, layer: int) -> Kept:
        """What layer `layer` keeps: slots, positions, scores, by row and KV head, in the order of the sequence."""
        self.forward_pass.check_there()
        chosen = self.layers[checks.integer("KVCache: kept: layer", layer, -len(self.layers), len(self.layers) - 1)]
        if not isinstance(chosen, PagedLayer) or not chosen.is_initialized:
            raise ValueError(f"KVCache: kept: expected a paged layer that has seen tokens, got layer {layer}")
        chosen.commit()
        return chosen.store.kept_heads()

    def evicted_attention(self) -> torch.Tensor:
        """float32 [paged layers, B], experimental: of each layer's attention at the newest token the part that evicted
        tokens would have had, estimated (`policies.Watch`; docs/eviction.md says how well)."""
        self.forward_pass.check_there()
        if not (paged := committed_layers(self)):
            raise ValueError("KVCache: evicted_attention: expected a cache that has seen tokens, got an empty one")
        return torch.stack([layer.store.evicted_attention() for layer in paged])

    def stats(self) -> dict[str, Any]:
        """What the cache holds.

        seen: slots; kept: tokens over all rows; bytes: all that the cache holds, slack included; bytes_per_token: bytes
        / kept, over all layers; ratio: what DynamicCache would hold, in the model's dtype / bytes; ratio_kept: of the
        kept tokens alone, without those that a policy has dropped; rewritten: tokens that evictions wrote anew, over
        all layers; parts: bytes of sealed, open and sink pages, of tables, of the pool's slack, and of other layers
        (transformers' own). A deep copy shares the pool: pages in common and slack are counted in both.
        """
        parts = dict.fromkeys(("sealed", "open", "sinks", "tables", "slack", "other"), 0)
        dense, dropped, kept, paged = 0, 0, 0, committed_layers(self)
        for layer in paged:
            for name, n in layer.store.page_store.parts().items():
                parts[name] += n
            rows = layer.store.page_store.kept_tokens
            most = layer.store.batch * (layer.window - 1) if layer.window else rows  # as transformers' own would hold
            dense += min(rows, most) * layer.store.page_store.token_bytes()
            dropped += (layer.store.real_tokens() - rows) * layer.store.page_store.token_bytes()
            kept = max(kept, rows)
        for pool in {self.pool, *(layer.store.page_store.pool for layer in paged)}:
            memory = pool.stats()
            parts["slack"] += memory["resident"] - memory["used"]
        for other in self.layers:
            if not isinstance(other, PagedLayer):
                held, elements = native_layers.held(other)
                parts["other"] += held
                dense += elements
        seen = self.get_seq_length() if any(isinstance(x, CacheLayerMixin) for x in self.layers) else 0
        if not paged:
            keys = (getattr(layer, "keys", None) for layer in self.layers)
            kept = next((seen * k.shape[0] for k in keys if k is not None and k.dim() == 4), 0)
        total = sum(parts.values())
        return Stats(
            seen=seen, kept=kept, bytes=total, bytes_per_token=total / kept if kept else 0.0,
            ratio=(dense + dropped) / total if total else 0.0, ratio_kept=dense / total if total else 0.0,
            rewritten=sum(layer.store.stats()["rewritten"] for layer in paged), parts=parts,
        )  # fmt: skip

    def __repr__(self) -> str:
        s = self.stats()
        paged = len(paged_layers(self))
        others = f" + {len(self.layers) - paged} of transformers' own" if paged < len(self.layers) else ""
        evicts = s["ratio"] > s["ratio_kept"]
        of_kept = f" ({s['ratio_kept']:.2f} of the kept tokens)" if evicts else ""
        return (
            f"KVCache(key={self.key!r}, value={self.value!r}, {paged} paged layers{others}, "
            f"seen {s['seen']}, kept {s['kept']}, {s['bytes']:,} bytes, ratio {s['ratio']:.2f}{of_kept})"
        )


def _measured(text: PreTrainedConfig, calibration: Any, group: Any) -> Calibration | None:
    """What is known of the model of `text`; ValueError for another's, and with ranks, which have not all heads."""
    if calibration is None:
        return None
    if group is not None:
        raise ValueError("KVCache: expected calibration or group, got both; leave one of the two out")
    measured = Calibration.of(calibration)
    check_model(measured, text)
    return measured


def _layer(forward_pass: ForwardPass, index: int, options: LayerOptions, slots: int | None) -> Any:
    """Layer `index` of a cache. slots: that it holds at most, where it compiles."""
    if options.paged is None:
        kind, arguments = options.own
        return kind(**arguments)
    if options.most:
        return IndexedPagedLayer(forward_pass, options.paged, options.most)
    windowed = bool(options.paged.get("window"))
    if slots is None:
        return (SlidingPagedLayer if windowed else PagedLayer)(forward_pass, options.paged)
    return (StaticSlidingPagedLayer if windowed else StaticPagedLayer)(forward_pass, options.paged, index, slots)


attention.register()


_outside = torch.compiler.disable(KVCache.update_eager, reason=attention.OUTSIDE)
