"""What the cache needs from a model's config."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.generation.utils import ALL_CACHE_NAMES

CACHE_ARGUMENT = ALL_CACHE_NAMES[0]
"""Name of the cache argument of models and `generate`: "past_key_values", or "cache" from transformers 5.24 on."""

# Decoders whose configs say is_decoder=False, or neither that nor `use_cache`.
_DECODERS = ("gpt_neox", "gpt_neox_japanese", "inkling_text", "diffusion_gemma_text", "xlm", "xlnet", "openai-gpt")
# Decoders that do not support the kvcompress attention, and why, which the config does not show.
_ALONE = {
    "doge": "doge attention works on the 4D masks of eager and sdpa",
    "git": "its text layers do not use transformers' attention interface, only its image layers do",
    "bigbird_pegasus": "its decoder's attention needs eager's 4D mask",
    "diffllama": "its attention splits V in two",
    "jetmoe": "its attention repeats K and V for each expert of a token",
    "moshi": "its window is that of the cache alone: within a call every token is seen",
}

# Layer types that use the mask of the mask function unchanged.
_KINDS = {
    "full_attention", "sliding_attention", "chunked_attention", "linear_attention", "conv", "hybrid",
    "hybrid_sliding", "dummy",
}  # fmt: skip


def chosen(layer: Any) -> int:
    """Number of tokens that the indexer of a layer of type `indexed_attention` selects; with up to this many slots it
    selects all. 0 if the layer does not select single tokens among latents."""
    single = getattr(layer, "kv_lora_rank", None) and (getattr(layer, "index_kpool", None) or 1) == 1
    return (getattr(layer, "index_topk", None) or 0) if single else 0


def misfit(text: Any) -> str | None:
    """Why kvcompress attention does not support the model; None if it does.

    Some models slice, extend or replace the 4D mask of eager and sdpa before attention. With a 2D mask, or none, they
    fail or silently compute wrong results.
    """
    types = get_layer_types_and_kwargs(text)[0]
    indexed = {"indexed_attention"} if chosen(text) else set()
    strange = sorted(set(types) - _KINDS - indexed)
    if not ({"full_attention", "sliding_attention", "chunked_attention"} | indexed) & set(types):
        return "no layer uses full, sliding-window or chunked attention, so there is nothing to compress"
    if strange:
        return f"{', '.join(strange)} attention needs the 4D masks of eager and sdpa"
    return _ALONE.get(text.model_type)


def masks_itself(config: Any) -> bool:
    """True if the model makes the masks for each layer type itself, from a 2D mask only. For compileable caches
    `generate` makes them, and PaliGemma 2 raises AttributeError."""
    return config.model_type == "paligemma" and getattr(config.text_config, "sliding_window", None) is not None


def text_config(config: Any) -> PreTrainedConfig:
    """The decoder's part of a model's config. Raises ValueError unless the model is a decoder-only language model."""
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"KVCache: config: expected a transformers config (model.config), got {type(config).__name__}")
    text = config if config.is_encoder_decoder else config.get_text_config(decoder=True)
    decodes = getattr(text, "is_decoder", hasattr(text, "use_cache")) or text.model_type in _DECODERS
    if text.is_encoder_decoder or not decodes or not hasattr(text, "vocab_size"):
        raise ValueError(
            f"KVCache: config: expected a decoder-only language model, got {type(config).__name__} "
            f"({config.model_type}); encoder-decoder and encoder models are not supported (decoders have "
            "config.is_decoder or config.use_cache)"
            + (", but their decoders are: call enable(model.decoder), and pass transformers."
               "EncoderDecoderCache(KVCache(model.config.decoder), DynamicCache())"
               if isinstance(getattr(config, "decoder", None), PreTrainedConfig) else "")
        )  # fmt: skip
    if text.model_type in ("minimax", "rwkv"):
        raise ValueError(
            f"KVCache: config: expected a model that uses transformers' caches, got {type(text).__name__}, which "
            "uses a cache of its own; call generate without past_key_values"
        )
    return text


def head_dims(layer: Any) -> tuple[int, int]:
    """(Dk, Dv) of what a layer of this config (of `per_layer_config`) caches."""
    if getattr(layer, "kv_lora_rank", None):  # MLA: the latents, and the rotary part of K
        return layer.kv_lora_rank, layer.qk_rope_head_dim
    heads = getattr(layer, "num_attention_heads", None) or 1
    dim = getattr(layer, "head_dim", None) or getattr(layer, "hidden_size", 64) // heads
    return dim, dim


def reads_others(text: Any, layer: int) -> bool:
    """True if this layer attends to K and V of an earlier one (Gemma 3n and 4)."""
    modes = getattr(text, "kv_sharing_modes", None)
    if modes is not None:
        return modes[layer] == "reuse"
    return layer >= text.num_hidden_layers - (getattr(text, "num_kv_shared_layers", 0) or 0)
