"""What a model's config says of the cache."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

_DECODERS = ("gpt_neox", "gpt_neox_japanese")  # decoders whose configs say is_decoder=False


def text_config(config: Any) -> PreTrainedConfig:
    """The decoder's part of a model's config; ValueError unless the model is a decoder-only language
    model."""
    if not isinstance(config, PreTrainedConfig):
        got = type(config).__name__
        raise TypeError(f"KVCache: config: expected a transformers config (model.config), got {got}")
    text = config if config.is_encoder_decoder else config.get_text_config(decoder=True)
    decodes = getattr(text, "is_decoder", True) or text.model_type in _DECODERS
    encodes = text.is_encoder_decoder or not decodes
    if encodes or not hasattr(text, "vocab_size"):
        raise ValueError(
            f"KVCache: config: expected a decoder-only language model, got {type(config).__name__} "
            f"({config.model_type}); encoder-decoder and encoder models are not supported"
        )
    return text


def head_dims(layer: Any) -> tuple[int, int]:
    """(Dk, Dv) of what a layer of this config (of `per_layer_config`) caches."""
    if getattr(layer, "kv_lora_rank", None):  # MLA: the latents, and the rotated part of K
        return layer.kv_lora_rank, layer.qk_rope_head_dim
    heads = getattr(layer, "num_attention_heads", None) or 1
    dim = getattr(layer, "head_dim", None) or getattr(layer, "hidden_size", 64) // heads
    return dim, dim
