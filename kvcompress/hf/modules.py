"""The attention modules of a model, and their weights."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from typing import Any

import torch
from transformers import PreTrainedModel

from .configs import text_config

_SAMPLE = 4096  # elements of each weight


def attention_by_layer(model: torch.nn.Module) -> dict[int, list[Any]]:
    """The self-attention modules with separate q_proj and k_proj for each layer index; several if a model has several
    stacks of layers."""
    found = defaultdict(list)
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and all(hasattr(module, name) for name in ("q_proj", "k_proj", "v_proj", "head_dim")):
            found[index].append(module)
    return found


def attention_modules(model: PreTrainedModel) -> list[tuple[int, Any]]:
    """(layer index, module) of all self-attention modules with separate q_proj and k_proj, in layer order.

    Raises ValueError if there is none.
    """
    found = {index: modules[-1] for index, modules in attention_by_layer(model).items()}
    if not found:
        raise ValueError(
            f"expected attention layers with q_proj, k_proj and v_proj, got none in {type(model).__name__} "
            "(fused projections are not supported)"
        )
    return sorted(found.items())


def paged_attention_modules(model: PreTrainedModel) -> list[Any]:
    """The attention modules of the full-attention layers, which a KVCache pages, in order."""
    types = getattr(text_config(model.config), "layer_types", None)
    return [module for index, module in attention_modules(model) if types is None or types[index] == "full_attention"]


def weights_hash(module: torch.nn.Module) -> str | None:
    """SHA-256 over a sample of each weight of an attention module, as bfloat16; None for offloaded (meta) weights."""
    digest = hashlib.sha256()
    for name, x in module.named_parameters():
        if x.is_meta:
            return None
        flat = x.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // _SAMPLE)].to("cpu", torch.bfloat16)
        digest.update(f"{name} {list(x.shape)}".encode() + some.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()
