"""The attention and mask functions registered with transformers under the name "kvcompress"."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

from . import masks
from .lazy import dense

NAME = "kvcompress"
OUTSIDE = (
    "a KVCache is read and written outside of graphs: expected max_length=, and on a GPU `with cache.step():` around a "
    "call over one token a row, after a prompt; generate() does this after enable(model)"
)
_HINT = 'this model needs its own attention: model.set_attn_implementation("eager") or "sdpa"'


class _Open:
    """A layer whose `update` was traced but whose attention was not yet, and the k that `update` returned."""

    layer: Any = None
    key: torch.Tensor | None = None


OPEN = _Open()


def kvcompress_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask for the kvcompress attention function.

    Causal attention over a growing cache: the 2D padding mask, bool [B, slots], or None without padding. Causal sliding
    windows and chunks, padding in models whose layers share K and V, and causal calls of models whose modules claim to
    be non-causal (PaliGemma): a `WindowMask`. Everything else (packed or bidirectional blocks, static caches):
    transformers' own 4D bool mask.
    """
    end = kv_offset + kv_length
    growing = not isinstance(q_offset, torch.Tensor) and end == q_offset + q_length

    def whole(skip: bool = False) -> Any:
        return sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            allow_is_causal_skip=skip, **kwargs,
        )  # fmt: skip

    # None means causal, with queries in the last q_length slots, which holds for a growing cache only.
    plain = growing and mask_function is causal_mask_function
    # Gemma 4 slices queries from a 4D mask, and indexers read it.
    indexed = "indexed_attention" in (getattr(kwargs.get("config"), "layer_types", None) or ())
    cut = bool(getattr(kwargs.get("config"), "num_kv_shared_layers", 0))
    # Modules of these models take None for bidirectional: text, or a later turn, needs an explicit causal mask.
    told = getattr(kwargs.get("config"), "use_bidirectional_attention", None) in (True, "all")
    window = None if plain or not growing or torch.compiler.is_dynamo_compiling() else masks.window_of(mask_function)
    if (not plain and window is None) or ((indexed or told) and torch.compiler.is_dynamo_compiling()):
        return whole(allow_is_causal_skip and growing and not indexed and not told)
    mask = None
    if attention_mask is not None:
        mask = attention_mask[:, :end].to(torch.bool)
        if mask.shape[1] < end:
            mask = F.pad(mask, (0, end - mask.shape[1]))
        mask = None if bool(mask.all()) else mask
    said = mask is None or not cut or torch.compiler.is_dynamo_compiling()
    if window is None and not indexed and not told and said:
        return mask
    device = kwargs.get("device", "cpu")
    size, chunked = window or (0, False)
    return masks.WindowMask.of(
        (batch_size, 1, q_length, kv_length), torch.bool, device, padding=mask, window=size, chunked=chunked, make=whole
    )


def visible(
    mask: torch.Tensor | None, q_length: int, kv_length: int, window: int, device: torch.device
) -> torch.Tensor | None:
    """The visibility mask, bool [B or 1, 1, q, kv] by slot, of causal attention of the last q_length of kv_length
    slots; None if every query sees everything. mask: bool [B, at least kv_length] (its last slots count), or None."""
    slots = torch.arange(kv_length, device=device)
    asks = slots[kv_length - q_length :, None]
    sees = None
    if q_length > 1 or (window and kv_length > window):
        sees = slots <= asks
        if window:
            sees = sees & (slots > asks - window)
        sees = sees[None, None]
    if mask is not None:
        real = mask[:, None, None, mask.shape[1] - kv_length :]
        sees = real if sees is None else sees & real
    return sees


def _visible_of(mask: Any, query: torch.Tensor, key: Any, causal: bool, window: int) -> torch.Tensor | None:
    """The visibility mask of queries over all keys, broadcast to [B, Hq, q, kv]; None if all are visible. mask: 4D,
    padding [B, kv], or None."""
    if mask is not None and mask.dim() != 2:
        return dense(mask)[..., : key.shape[2]]
    if causal:
        return visible(mask, query.shape[2], key.shape[2], window, query.device)
    return None if mask is None else mask[:, None, None]


def eager(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float = 0.0,
    s_aux: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in plain torch, softmax in fp32: out [B, Hq, q, Dv] and weights [B, Hq, q, kv].

    mask: bool (True: visible) or additive, broadcast to [B, Hq, q, kv]. Rows without visible keys are zero.
    """
    B, Hq, q_length, _ = query.shape
    H, kv_length = key.shape[1], key.shape[2]
    grouped = query.reshape(B, H, Hq // H * q_length, -1)
    scores = torch.matmul(grouped, key.transpose(2, 3)).reshape(B, Hq, q_length, kv_length).float() * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    top = scores.amax(-1, keepdim=True)
    if s_aux is not None:
        aux = s_aux.float().reshape(1, -1, 1, 1)
        top = torch.maximum(top, aux)
    top = top.masked_fill(top == -math.inf, 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if s_aux is not None:
        total = total + torch.exp(aux - top)
    weights = (weights / total.masked_fill(total == 0, 1.0)).to(query.dtype)
    if dropout:
        weights = F.dropout(weights, dropout)
    out = torch.matmul(weights.reshape(B, H, -1, kv_length), value).reshape(B, Hq, q_length, -1)
    return out, weights


def _dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    s_aux: torch.Tensor | None,
    bias: torch.Tensor | None,
    dropout: float,
    with_weights: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention over dense K and V by torch's SDPA, or `eager` if SDPA does not support it. out [B, q, Hq, Dv]."""
    mask = _visible_of(mask, query, key, causal, window)
    weights = None
    if softcap or s_aux is not None or bias is not None or with_weights:
        out, weights = eager(query, key, value, mask, scale, softcap, s_aux, bias, dropout)
    else:
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
    return out.transpose(1, 2).contiguous(), weights if with_weights else None


def _without_evicted(
    module: torch.nn.Module, kept: torch.Tensor, query: torch.Tensor, key: torch.Tensor,
    mask: torch.Tensor | None, causal: bool, window: int,
) -> torch.Tensor:  # fmt: skip
    """The visibility mask, bool [B, Hq, q, kv], for a layer that has evicted tokens."""
    if not causal or (mask is not None and mask.dim() != 2):
        raise ValueError(
            f"kvcompress: {type(module).__name__}: expected causal attention for a cache that evicts, got a 4D mask or "
            f"is_causal=False; {_HINT}"
        )
    q_length, kv_length = query.shape[2], key.shape[2]
    kept = F.pad(kept.to(query.device), (0, kv_length - kept.shape[2]), value=True)
    kept = kept.expand(-1, key.shape[1], -1).repeat_interleave(query.shape[1] // key.shape[1], 1)[:, :, None]
    sees = visible(mask, q_length, kv_length, window, query.device)
    return kept.expand(-1, -1, q_length, -1) if sees is None else sees & kept


def _refuse(module: torch.nn.Module, **given: Any) -> None:
    """Raises ValueError for an unsupported argument that would change the result."""
    if names := ", ".join(f"{name}=" for name, x in given.items() if x is not None):
        raise ValueError(f"kvcompress: {type(module).__name__}: expected attention without {names}, got some; {_HINT}")


def _is_causal(module: torch.nn.Module, mask: torch.Tensor | None) -> bool:
    """Whether attention is causal: as marked in the mask, or else by the module (Mllama's cross-attention modules do
    not say that they are not)."""
    crosses = "Cross" in type(module).__name__
    return isinstance(mask, masks.WindowMask) or getattr(module, "is_causal", not crosses)


def _check_updated(module: torch.nn.Module, same: bool) -> None:
    """Raises ValueError in a graph unless attention gets the K and V that `update` returned, which stand for those of
    all tokens."""
    if not same:
        raise ValueError(
            f"kvcompress: {type(module).__name__}: expected the K and V that the cache's update returned, got others; "
            f"call enable(model), or, if that does not help, {_HINT}"
        )


@torch.compiler.disable
def _taken_up(module: torch.nn.Module, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """LazyKV for k and v of a layer whose graph ended between `update` and attention; updates the layer now."""
    layer, OPEN.layer, OPEN.key = OPEN.layer, None, None
    pair = layer.forward_pass.cache().update_eager(key, value, layer.index)
    return module.expand_kv(*pair) if layer.options["latent"] else pair  # type: ignore[operator]


def suited(v: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """v in the dtype of k, which differ under torch.autocast: RoPE returns K in float32."""
    halves = getattr(v, "dtype", None) in (torch.float16, torch.bfloat16) and getattr(k, "dtype", None) is torch.float32
    return v.to(torch.float32) if halves else v


def _flat(
    module: torch.nn.Module, key: Any, block: Any, mask: torch.Tensor | None, causal: bool
) -> tuple[torch.Tensor | None, bool]:  # fmt: skip
    """(mask by slot [B, slots] if the 4D mask of a layer is equivalent to it, or None if all slots are visible; whether
    attention is causal). Raises ValueError for a wrong number of slots."""
    if mask is None:
        return None, causal
    slots = key.shape[2] if block is None else block.base + block.k.shape[2]
    if block is not None and mask.dim() == 4:
        mask = block.layer.flat_mask(mask, slots - mask.shape[2])
        # A padding mask results only from a mask that is causal otherwise, even if the module claims not to be.
        causal = causal or mask is None or mask.dim() == 2
    if mask is not None and mask.dim() == 2 and mask.shape[1] != slots:
        raise ValueError(
            f"kvcompress: {type(module).__name__}: attention_mask: expected {slots} slots, got {mask.shape[1]}; {_HINT}"
        )
    return mask, causal


def _of_chosen(
    query: torch.Tensor, key: Any, block: Any, mask: torch.Tensor | None, indices: Any, causal: bool, window: int
) -> torch.Tensor | None:
    """The mask without tokens that an indexer has not selected; in a layer with `max_slots` it selects all tokens."""
    if block is not None and block.layer.max_slots:
        return mask
    return masks.of_chosen(_visible_of(mask, query, key, causal, window), indices, key.shape[2])


def _dense_pair(
    module: torch.nn.Module, block: Any, query: torch.Tensor, key: Any, value: Any, mask: torch.Tensor | None,
    given_mask: torch.Tensor | None, causal: bool, window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int]:  # fmt: skip
    """Stores the new tokens; returns dense K and V [B, H, kv, D] of the layer with them, and the visibility mask."""
    own = None
    staged = block.layer.staged is block and getattr(value, "block", None) is block
    if (
        staged and mask is not None and mask.dim() == 4 and (evict := block.layer.store.eviction)
        and (evict.policy.needs_attention or evict.policy.window)
    ):  # fmt: skip
        raise ValueError(
            f"kvcompress: {type(module).__name__}: expected causal attention for {evict.policy!r}, which uses "
            "attention, got a 4D mask (images, packed sequences); use StreamingLLM, KNorm or KeyDiff"
        )
    if staged and mask is not None and mask.dim() == 2:
        own = mask[:, block.base :]
    block.dense_pair(own)
    key, value = dense(key), dense(value)
    if block.layer.window:
        mask, window = block.layer.window_mask(given_mask, window)
    if block.not_evicted is not None:
        mask = _without_evicted(module, block.not_evicted, query, key, mask, causal, window)
    return key, value, mask, window


def _on_pages(
    module: torch.nn.Module, block: Any, query: torch.Tensor, key: Any, value: Any, mask: torch.Tensor | None,
    given_mask: torch.Tensor | None, causal: bool, window: int, scale: float, softcap: float,
    s_aux: torch.Tensor | None, with_weights: bool,
) -> tuple[torch.Tensor, torch.Tensor | None] | None:  # fmt: skip
    """Causal attention by the op, which also stores the new tokens. Weights are computed before, from dense K and V.
    None if the op does not support the call."""
    layer, weights = block.layer, None
    ready = key.block is getattr(value, "block", None) and (
        layer.staged is block or (block.stamp == layer.stamp and block.pair is None)
    )
    if not (causal and ready) or (mask is not None and mask.dim() != 2):
        return None
    if with_weights:
        try:
            block.dense_pair(store=False)
            pair = _dense_pair(module, block, query, key, value, mask, given_mask, causal, window)
            weights = _dense_attention(query, *pair[:3], scale, causal, pair[3], softcap, s_aux, None, 0.0, True)[1]
        finally:
            block.pair = None
    out = key.attend(query, mask, scale=scale, window=window, softcap=softcap, s_aux=s_aux)
    return None if out is None else (out, weights)


def kvcompress_attention_forward(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None, position_bias: torch.Tensor | None = None,
    sinks: Any = None, indices: Any = None, block_indices: Any = None, **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """The attention function for transformers: out [B, q, Hq, Dv], and weights with `output_attentions`.

    For LazyKV of a KVCache layer, one op reads the compressed pages and stores the new tokens. Attention is dense for
    plain tensors (no cache, transformers' own layers) and for what the op does not support (4D masks, tokens selected
    by an indexer, bidirectional attention, position bias, dropout), and for weights. Raises ValueError for unsupported
    arguments: `sinks`, `block_indices`, a 2D mask that does not match the keys.
    """
    causal = _is_causal(module, attention_mask) if is_causal is None else is_causal
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window, cap = sliding_window or 0, softcap or 0.0
    with_weights = bool(kwargs.get("output_attentions", False))
    compiling = torch.compiler.is_dynamo_compiling()
    broken = OPEN.key is not None and OPEN.key is key
    if compiling and (layer := getattr(key, "kvcompress_layer", None)) is not None:
        _check_updated(module, key.kvcompress_value is value)  # type: ignore[attr-defined]
        _refuse(
            module, is_causal=None if causal else False, position_bias=position_bias, sinks=sinks, indices=indices,
            block_indices=block_indices, output_attentions=with_weights or None, training=module.training or None,
        )  # fmt: skip
        return layer.traced_attention(query, key, value, attention_mask, scale, window, cap, s_aux), None
    _check_updated(module, not compiling or broken or OPEN.layer is None)
    if compiling and (broken or getattr(key, "block", None) is not None):
        return _outside(
            module, query, key, value, attention_mask, scaling, dropout, sliding_window, softcap, s_aux, is_causal,
            position_bias, sinks, indices, block_indices, **kwargs,
        )  # fmt: skip
    if broken:
        key, value = _taken_up(module, key, value)
    block: Any = getattr(key, "block", None)
    try:
        if block is not None and block.layer.forward_pass.calibration:
            block.layer.forward_pass.check_weights(module)
        if not (sinks is None and block_indices is None):
            _refuse(module, sinks=sinks, block_indices=block_indices)
        if indices is not None:
            attention_mask = _of_chosen(query, key, block, attention_mask, indices, causal, window)
        dropout = dropout if module.training else 0.0
        mask, causal = _flat(module, key, block, attention_mask, causal)
        if block is not None:
            call = (module, block, query, key, value, mask, attention_mask, causal, window)
            if position_bias is None and not dropout and (found := _on_pages(*call, scale, cap, s_aux, with_weights)):
                return found
            key, value, mask, window = _dense_pair(*call)
        return _dense_attention(
            query, key, value, mask, scale, causal, window, cap, s_aux, position_bias, dropout, with_weights
        )
    except BaseException:
        if block is not None and block.stamp in (-1, block.layer.stamp):  # not outdated
            block.layer.forward_pass.rollback(block.base)
        raise


_outside = torch.compiler.disable(kvcompress_attention_forward, reason=OUTSIDE)


def register() -> None:
    """Registers "kvcompress" with transformers: the attention function and the mask function, without which
    transformers would drop the padding mask."""
    AttentionInterface.register(NAME, kvcompress_attention_forward)
    AttentionMaskInterface.register(NAME, kvcompress_mask)
