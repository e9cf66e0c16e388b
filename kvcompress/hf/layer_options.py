"""Options of each layer of a cache, from the arguments of KVCache and the model's config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from transformers import PreTrainedConfig
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    STATIC_LAYER_TYPE_MAPPING,
    get_layer_types_and_kwargs,
)

from .. import formats
from ..eviction.positions import frequencies
from ..quantization.calibration import Basis, Calibration
from ..quantization.mixed_precision import Spans, by_layer, guard_rails, rope_part
from .configs import chosen, head_dims

_CHUNKED = {"sliding_attention": False, "chunked_attention": True}
_PAGES = 8  # minimum number of pages per window, since only whole pages are freed


class LayerOptions(NamedTuple):
    """own: transformers' class for this layer type, and its arguments. paged: arguments of PagedKV, or None if the
    layer keeps transformers' class. dims: Dk and Dv of a paged layer. max_slots: limit of an indexed layer, or 0."""

    own: tuple[Any, dict[str, Any]]
    paged: dict[str, Any] | None = None
    dims: tuple[int, int] = (0, 0)
    max_slots: int = 0


def is_paged(kind: str, given: Mapping[str, Any], layer: Any, fixed: bool = False) -> bool:
    """True if a KVCache uses a paged layer for this layer type. given: arguments of transformers' layer; layer: its
    config; fixed: the cache has a `max_length`, which supports neither indexers nor windows that no mask shows."""
    if kind == "indexed_attention":
        return bool(chosen(layer)) and not fixed
    if kind not in _CHUNKED:
        return kind == "full_attention"
    window = given.get("sliding_window") or 0  # in chunks: a multiple of 16 tokens
    return window > 1 and not (_CHUNKED[kind] and window % 16) and not (fixed and layer.model_type == "moshi")


def window_options(
    options: Mapping[str, Any], own: Mapping[str, Any], kind: str, given: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of PagedKV for a layer with a window: `options` with a page size that fits the window, and sinks,
    spans and policy only if `own` sets them, for which PagedKV then raises."""
    window, chunked, size = given["sliding_window"], _CHUNKED[kind], options["page_size"]
    for size in range(min(size, max(16, window // _PAGES // 16 * 16)), 15, -16):  # noqa: B020
        if not chunked or window % size == 0:
            break
    without = {"sinks": 0, "spans": None, "span_tokens": None, "policy": None, "group": None}
    return {**options, **without, **own, "page_size": size, "window": window, "chunked": chunked}


def layer_options(
    text: PreTrainedConfig,
    common: Mapping[str, Any],
    *,
    per_layer: Any,
    guard: bool,
    max_length: int | None,
    calibration: Calibration | None = None,
) -> list[LayerOptions]:
    """LayerOptions of each layer of the model with config `text`. common: arguments of PagedKV (and `group`) for all
    layers; other arguments as of KVCache. Raises ValueError as KVCache."""
    types, kwargs = get_layer_types_and_kwargs(text)
    mapping = DYNAMIC_LAYER_TYPE_MAPPING if max_length is None else STATIC_LAYER_TYPE_MAPPING
    fixed = {} if max_length is None else {"max_cache_len": max_length}
    if unknown := sorted(set(types) - set(mapping)):
        raise ValueError(f"KVCache: config: expected layer types out of {sorted(mapping)}, got {unknown}")
    configs, n = text.per_layer_config, len(types)
    if not any(map(is_paged, types, kwargs, configs)):
        raise ValueError(
            f"KVCache: expected a model with full, sliding-window or chunked attention, got {type(text).__name__} with "
            f"{', '.join(sorted(set(types)))} layers alone, so there is nothing to compress; call generate without "
            "past_key_values"
        )
    ours = [i for i in range(n) if is_paged(types[i], kwargs[i], configs[i], max_length is not None)]
    full = [i for i in ours if types[i] not in _CHUNKED]
    named = by_layer(per_layer, ours) if per_layer is not None else {}
    images = getattr(text, "cross_attention_layers", None) or ()  # Mllama's, which cache images instead of tokens
    found = []
    for i, (kind, given) in enumerate(zip(types, kwargs, strict=True)):
        own = (mapping[kind], {**fixed, **given})
        if i not in ours:
            found.append(LayerOptions(own))
            continue
        options = {**common, **({"policy": None} if i in images else {}), **named.get(i, {})}
        if i in full:
            options["layer"] = (full.index(i), len(full))
        else:
            options = window_options(options, named.get(i, {}), kind, given)
        if guard:
            options = guard_rails(options, up=i in (ours[0], ours[-1]) and i not in named)
        options["basis"] = _basis(options, i, calibration if i in full else None)
        slots = chosen(configs[i]) if kind == "indexed_attention" else 0
        found.append(
            _of_model(text, i, options, own, "value" in named.get(i, {}), max_length)._replace(max_slots=slots)
        )
    return found


def _basis(options: Mapping[str, Any], index: int, calibration: Calibration | None) -> Basis | None:
    """The basis of a layer, for its formats. Raises ValueError if a format requires one and the layer has none."""
    spans, policy = options["spans"], options["policy"]
    pairs = [(options["key"], options["value"] or options["key"])]
    pairs += [*(Spans(spans).formats() if spans is not None else ()), *(policy.ladder if policy else ())]
    uneven = [{x for pair in pairs if isinstance(x := pair[side], str)} & set(formats.CALIBRATED) for side in (0, 1)]
    found = calibration.basis(index, (not uneven[0], not uneven[1])) if calibration else None
    if found is None and (alone := sorted(uneven[0] | uneven[1])):
        raise ValueError(
            f"KVCache: format {alone[0]}: expected calibration= with layer {index}, got none; write the file with "
            "`kvcompress calibrate MODEL --text FILE -o model.kvcal` (full-attention layers only)"
        )
    return found


def _of_model(
    text: PreTrainedConfig, index: int, options: dict[str, Any], own: Any, value_named: bool, max_length: int | None
) -> LayerOptions:
    """A paged layer's options with those from the model's config: latents, head dims, RoPE frequencies."""
    config = text.per_layer_config[index]  # dims may differ (Gemma 4); text.head_dim then raises
    options["latent"] = bool(getattr(config, "kv_lora_rank", None))
    if options["latent"] and not value_named:
        options = rope_part(options)
    dims, policy = head_dims(config), options["policy"]
    if policy is not None and max_length is not None:
        raise ValueError(f"KVCache: expected no policy with max_length, got {policy!r}; omit one of the two")
    if policy is not None and (policy.positions == "cache" or policy.needs_rope) and not options["latent"]:
        options["rope"] = frequencies(text, dims[0])
    return LayerOptions(own, options, dims)
