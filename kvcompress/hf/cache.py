"""KVCache: a transformers `Cache` with one `PagedKV` per attention layer of the model."""

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
from ..quantization.mixed_precision import pair
from ..store import pools
from ..store.display_mixin import DisplayMixin, Stats
from ..store.sequence import Kept, copies
from . import attention, convert, native_layers, static_layer
from .configs import masks_itself, text_config
from .forward_pass import ForwardPass
from .indexed_layer import IndexedPagedLayer
from .layer import PagedLayer, committed_layers, paged_layers
from .layer_options import LayerOptions, layer_options
from .save_load import of_model, options_of
from .sliding_layer import SlidingPagedLayer
from .static_layer import StaticPagedLayer, StaticSlidingPagedLayer
from .suspend import MovableCache


class KVCache(MovableCache, DisplayMixin):
    """A key/value cache for `model.generate(past_key_values=...)` whose attention layers are paged and compressed.

    Layers with sliding-window or chunked attention keep the tokens of their window only (`spans`, `sinks` and `policy`
    do not apply to them). Linear-attention and other layers keep the cache that transformers gives them. After
    `kvcompress.enable(model)` attention reads the pages directly; without it every step decodes each layer to dense
    tensors for the attention implementation of the model.

    Args:
        config: `model.config` itself, not a copy: the cache reads from it which attention the model uses.
        key_or_format: format of K and V ("raw", "int8", "fp8_e4m3", "int4", ...) or one for each, "int8/int4".
            Default: "int8".
        key, value: format of K and of V, in place of that of `key_or_format`; `value` defaults to `key`.
        policy: eviction policy, one of `kvcompress.policies`; None keeps all tokens. See docs/eviction.md.
        sinks: number of first tokens of each row that stay raw. Default: the policy's sinks; 4 without a policy.
        residual_length: minimum number of newest tokens that stay raw. None: those of the newest page. 0: none; tokens
            are written to sealed pages directly (8-bit formats only).
        page_size: tokens per page, a multiple of 16.
        spans, span_tokens: formats by position; see `kvcompress.quantization.mixed_precision.Spans`.
        per_layer: {layer: format, K/V formats, or dict of PagedKV arguments}. Negative layer numbers count from the
            last paged layer.
        guard: safer formats: K must have at least the bits of V, and the first and last paged layers use the next
            larger format (4 bits: int8; 2 bits: int4).
        strict: raise ValueError if the keys of the model are too large for their format (`hf.format_check.LIMIT`), on
            the first call of 64 tokens or more, or else before the first seal. False: warn, and name the layers.
        max_length: maximum number of slots. The cache is then compilable: `torch.compile(model, fullgraph=True)`
            compiles one graph for all decode steps.
        max_bytes: limit in bytes for the pages of all layers, allocated in slabs of 1 MiB or more with pages of one
            size; MemoryError when it is reached. 0: limited by the machine's memory only. Not with `pool`.
        pool: the `_C.Pool` to allocate pages from, shared with other caches (see PrefixCache). Default: a new one;
            without `max_bytes`, one per device of the model.
        calibration: result of `kvcompress calibrate` for this model, a path or a `Calibration`. Full-attention layers
            store K and V in its basis; `cal2` requires it. Not with `group`. Calibrations of other weights are detected
            in the first call after `enable(model)`, or by `bind(model)`.
        group: torch.distributed process group to shard the tokens over (`kvcompress.parallel.ShardedKV`).

    Raises:
        ValueError: not the config of a decoder-only model with attention; unknown format; conflicting options.
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
        if key_or_format and key and value:
            raise ValueError(f"KVCache: expected a format, or key and value, got {key_or_format!r}, {key!r}, {value!r}")
        first, second = pair(key_or_format or key or "int8", "KVCache: a format")
        key, value = key or first, value or second
        self.key, self.value, self._masks_itself = key, value, masks_itself(config)
        if pool is not None and max_bytes:
            raise ValueError("KVCache: expected pool or max_bytes, got both; Pool(max_bytes) has a limit of its own")
        each = pool is None and max_bytes == 0  # a limit is one of all layers
        pool = checks.pool(pool) or pools.for_pages(max_bytes=checks.integer("max_bytes", max_bytes, 0))
        if group is not None and max_length is not None:
            raise ValueError("KVCache: expected group or max_length, got both; compiled steps do not support ranks")
        if group is not None and calibration is not None:
            raise ValueError("KVCache: expected calibration or group, got both; omit one of the two")
        measured = None if calibration is None else of_model(calibration, text)
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
        self.forward_pass = ForwardPass(self, text, pools.Pools(pool, each), last, strict, measured)
        super().__init__(layers=[_layer(self.forward_pass, i, x, slots) for i, x in enumerate(options)])
        # Build a layer of each kind now, so that invalid options raise here and not in the first forward pass.
        for x in options:
            if x.paged is not None:
                basis = x.paged.get("basis")
                paged(1 if basis is None else len(basis.key), x.dims[0], value_dim=x.dims[1], pool=pool, **x.paged)
        if not any(x.paged and not x.paged.get("window") for x in options):
            paged(1, 64, pool=pool, **common)

    # ------------------------------------------------------------------ other forms

    def to_dict(self) -> dict[str, Any]:
        """The arguments of this cache as a JSON-serializable dict for `from_dict` (a `Calibration` that was not loaded
        from a file is kept as the object)."""
        options = copy.deepcopy(self._options)
        if options["policy"] is not None:
            options["policy"] = options["policy"].to_dict()
        return options

    @classmethod
    def from_dict(cls, config: PreTrainedConfig, options: Mapping[str, Any]) -> KVCache:
        """An empty cache for the model of `config`. options: keyword arguments of KVCache, from `to_dict` or from JSON
        (where layer numbers are strings). Raises ValueError for unknown names."""
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
        """A KVCache with the contents of a DynamicCache; further arguments are those of KVCache.

        attention_mask: [B, at least seen], 0 at padding, which is then not stored; without it padding is stored too.
        Raises TypeError if `cache` is not a DynamicCache, ValueError if it belongs to another model.
        """
        made = cls(config, *args, **options)
        convert.fill(made, cache, attention_mask)
        return made

    def to_dynamic_cache(self) -> DynamicCache:
        """A DynamicCache with the decoded K and V, independent of this cache; zeros at padding. Raises ValueError if
        the last forward pass stopped between layers."""
        self.forward_pass.check_even()
        return convert.dense(self)

    # ------------------------------------------------------------------ transformers' calls

    @property
    def is_compileable(self) -> bool:
        """True with `max_length`, unless the model builds its own masks (PaliGemma 2, which does not compile with
        transformers' StaticCache either). Without super(), which torch 2.11 does not trace."""
        return bool(self.layers) and not self._masks_itself and all(layer.is_compileable for layer in self.layers)

    @property
    def is_updated(self) -> Any:
        """Not supported: models with cross-attention need an EncoderDecoderCache around this cache."""
        raise AttributeError(
            "KVCache: is_updated: expected a cache for a model with cross-attention, got one of its decoder alone: "
            "pass transformers.EncoderDecoderCache(cache, DynamicCache())"
        )

    @property
    def max_cache_len(self) -> int:
        """Not supported: read by PEFT's prefix tuning, which replaces the cache."""
        raise AttributeError(
            "KVCache: max_cache_len: expected a model that keeps the cache that it is given, got PEFT's prefix tuning, "
            "which puts a DynamicCache in its place: KVCache.from_cache(model.get_prompt(batch_size), model.config) "
            "holds its prefix, for the base model (docs/huggingface.md, PEFT)"
        )

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See PagedLayer.update. On failure all layers are restored to their state before the forward pass. The states
        of linear-attention layers cannot be restored, except in the first pass: the cache then raises ValueError until
        `reset()`."""
        if not 0 <= layer_idx < len(self.layers):
            raise ValueError(
                f"KVCache: layer_idx: expected 0 to {len(self.layers) - 1}, got {layer_idx}; "
                "was the cache made from this model's config? If that counts encoder_layers of a decoder alone "
                "(MBartForCausalLM), set its encoder_layers to decoder_layers first"
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
        """`update` outside of compiled graphs."""
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
        """Context manager around each decode step of a model compiled for the GPU (`max_length=`, after the prompt).
        Plans the step on entry; commits the tokens on exit, or rolls them back on an error. One token per row, no
        padding among them; padding of the prompt stays masked, whatever mask the model passes."""
        return static_layer.step(self)

    def needs_step(self, device: torch.device) -> bool:
        """True if compiled graphs of a model on `device` must run inside `step()`."""
        paged = [layer for layer in self.layers if isinstance(layer, StaticPagedLayer)]
        return any(layer.graph_layer is not None if layer.is_initialized else device.type != "cpu" for layer in paged)

    @property
    def is_initialized(self) -> bool:
        """True once the cache has seen tokens, False again after `reset()` (PaliGemma detects a prompt by it)."""
        paged = paged_layers(self)
        return super().is_initialized and (not paged or any(layer.get_seq_length() for layer in paged))

    def crop(self, tokens_to_remove: int) -> None:
        """Removes slots from the end. tokens_to_remove: their number as a negative int (-3: the last 3), as in
        transformers. Raises ValueError and changes nothing if a sliding-window layer no longer has the tokens of the
        earlier window (see `activate_past_recording`), or if a layer has recurrent states."""
        self.forward_pass.check_there()
        tokens_to_remove = checks.cropped(tokens_to_remove)
        for layer in (x for x in self.layers if isinstance(x, SlidingPagedLayer)):
            layer.check_crop(tokens_to_remove)
        native_layers.crop([layer for layer in self.layers if not isinstance(layer, PagedLayer)], tokens_to_remove)
        with self.forward_pass.changing():
            for paged in paged_layers(self):
                paged.crop(tokens_to_remove)

    def reset(self) -> None:
        """Removes all tokens; the next call may have another batch size."""
        coming, linear = self.forward_pass, [x for x in self.layers if isinstance(x, LinearAttentionCacheLayerMixin)]
        coming.suspended, coming.states_lost = None, bool(linear)  # until all are reset
        with coming.changing():
            super().reset()
        if coming.prefetcher:
            coming.prefetcher.release()
        for layer in linear:
            native_layers.forget_states(layer)
        coming.states_lost, coming.states_at = False, -1

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Row i of the new batch is row indices[i] of the old one. indices: int64 [rows] or bool [B]."""
        self._rows("batch_select_indices", checks.as_tensor(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row `repeats` times, as torch.repeat_interleave. Copies share pages until one is written."""
        self._rows("batch_repeat_interleave", repeats)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i of the new batch is row beam_idx[i] of the old one. beam_idx: int64 [rows]."""
        self._rows("reorder_cache", beam_idx)

    def _rows(self, method: str, argument: Any) -> None:
        """Calls `method` of every layer; restores all layers if one fails."""
        others = [layer for layer in self.layers if not isinstance(layer, PagedLayer)]
        self.forward_pass.check_there()
        with native_layers.whole(others):
            for layer in others:
                native_layers.change_rows(layer, method, argument)
            if paged := committed_layers(self):
                index = copies(paged[0].store.batch, argument) if method == "batch_repeat_interleave" else argument
                select_rows([layer.store for layer in paged], index)
                for layer in paged:
                    layer.changed()

    def __deepcopy__(self, memo: dict) -> KVCache:
        """An independent copy; both share pages until one of them writes (copy-on-write)."""
        self.forward_pass.check_there()
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        forward_pass = self.forward_pass.clone(twin)
        memo[id(self.forward_pass)] = forward_pass
        memo.update((id(layer), layer.clone(forward_pass)) for layer in paged_layers(self))
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    # ------------------------------------------------------------------ figures

    def kept(self, layer: int) -> Kept:
        """Slots, positions and scores of the tokens that `layer` stores, by row and KV head, in sequence order."""
        self.forward_pass.check_there()
        chosen = self.layers[checks.integer("KVCache: kept: layer", layer, -len(self.layers), len(self.layers) - 1)]
        if not isinstance(chosen, PagedLayer) or not chosen.is_initialized:
            raise ValueError(f"KVCache: kept: expected a paged layer that has seen tokens, got layer {layer}")
        chosen.commit()
        return chosen.store.kept_heads()

    def evicted_attention(self) -> torch.Tensor:
        """Experimental: the estimated share of the newest token's attention that evicted tokens would have received,
        float32 [paged layers, B]. Needs `policies.Watch`; docs/eviction.md has its accuracy."""
        self.forward_pass.check_there()
        if not (paged := committed_layers(self)):
            raise ValueError("KVCache: evicted_attention: expected a cache that has seen tokens, got an empty one")
        return torch.stack([layer.store.evicted_attention() for layer in paged])

    def stats(self) -> dict[str, Any]:
        """Size and contents of the cache, as a dict.

        seen: slots; kept: stored tokens, summed over rows; bytes: total, allocator slack included; bytes_per_token:
        bytes / kept, over all layers; ratio: bytes of a DynamicCache of the same tokens, in the model's dtype / bytes;
        ratio_kept: the same without evicted tokens; rewritten: tokens that evictions rewrote, summed over layers;
        parts: bytes of sealed, open and sink pages, of tables, of allocator slack, and of the other layers
        (transformers' own). A deep copy shares the pool: shared pages and slack are counted in both copies.
        """
        paged = committed_layers(self)
        each = [layer.store.page_store.parts() for layer in paged]
        others = [native_layers.held(layer) for layer in self.layers if not isinstance(layer, PagedLayer)]
        memory = [pool.stats() for pool in {self.pool, *(layer.store.page_store.pool for layer in paged)}]
        parts = {name: sum(x[name] for x in each) for name in ("sealed", "open", "sinks", "tables")}
        parts["slack"] = sum(x["resident"] - x["used"] for x in memory)
        parts["other"] = sum(size for size, _ in others)
        dense = sum(elements for _, elements in others)
        dropped = kept = 0
        for layer in paged:
            rows = layer.store.page_store.kept_tokens
            most = layer.store.batch * (layer.window - 1) if layer.window else rows  # as transformers' own would hold
            dense += min(rows, most) * layer.store.page_store.token_bytes()
            dropped += (layer.store.real_tokens() - rows) * layer.store.page_store.token_bytes()
            kept = max(kept, rows)
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


def _layer(forward_pass: ForwardPass, index: int, options: LayerOptions, slots: int | None) -> Any:
    """Layer `index` of a cache. slots: `max_length`, or None."""
    if options.paged is None:
        kind, arguments = options.own
        return kind(**arguments)
    full, windowed = (StaticPagedLayer, StaticSlidingPagedLayer) if slots else (PagedLayer, SlidingPagedLayer)
    kind = IndexedPagedLayer if options.max_slots else windowed if options.paged.get("window") else full
    return kind(forward_pass, options.paged, index, slots or 0, options.max_slots)


attention.register()


_outside = torch.compiler.disable(KVCache.update_eager, reason=attention.OUTSIDE)
