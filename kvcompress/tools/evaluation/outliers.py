"""Injects channel outliers into a model without changing its outputs, to stress quantizers."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import PreTrainedModel

from ...hf.modules import attention_modules


def _gain_offset(norm: Any) -> int:
    """1 for a norm that multiplies by 1 + weight, 0 for one that multiplies by weight."""
    ones = torch.ones_like(norm.weight)
    return round(float((norm(ones) - norm.weight).mean()))


@torch.no_grad()
def inject_outliers(model: PreTrainedModel, scale: float = 8.0, pairs: int = 2, seed: int = 0) -> PreTrainedModel:
    """Multiplies `pairs` RoPE pairs of the keys of every KV head by `scale`, and divides those of the queries by it.

    Both dims of a pair (i and i + D/2, which RoPE rotates together) are scaled in k_proj, and by 1/scale in the q_proj
    of the head's group (for models that normalise q and k per head: in the weights of these norms, equal for all
    heads). q.k does not change up to rounding, so the uncompressed model is unchanged, while quantizers see channels
    `scale` times as large as others, as in large models (KVQuant, arXiv 2401.18079, figure 2). In place; returns the
    model.

    Raises ValueError for a model without separate q_proj and k_proj, or with an odd number of rotary dims.
    """
    if scale <= 0:
        raise ValueError(f"inject_outliers: scale: expected more than 0, got {scale}")
    for index, module in attention_modules(model):
        dim = module.head_dim
        rotary = int(dim * getattr(model.config.get_text_config(decoder=True), "partial_rotary_factor", 1.0))
        if rotary % 2 or pairs > rotary // 2:
            raise ValueError(
                f"inject_outliers: pairs: expected at most {rotary // 2}, got {pairs} ({rotary} rotary dims)"
            )
        r = random.Random(f"{seed} {index}")
        if getattr(getattr(module, "k_norm", None), "weight", None) is not None:  # the same for all heads
            heads = 1
            sides = [([module.k_norm.weight], scale, _gain_offset(module.k_norm)),
                     ([module.q_norm.weight], 1 / scale, _gain_offset(module.q_norm))]  # fmt: skip
        else:
            heads = module.k_proj.weight.shape[0] // dim
            sides = [([module.k_proj.weight, module.k_proj.bias], scale, 0),
                     ([module.q_proj.weight, module.q_proj.bias], 1 / scale, 0)]  # fmt: skip
        for head in range(heads):
            chosen = r.sample(range(rotary // 2), pairs)
            dims = torch.tensor([i + half for i in chosen for half in (0, rotary // 2)])
            for parameters, factor, offset in sides:
                for p in (p for p in parameters if p is not None):
                    rows = p.data.view(heads, -1, dim, p.numel() // p.shape[0])  # [H, 1 or G, D, inputs]
                    rows[head, :, dims] = (rows[head, :, dims] + offset) * factor - offset
    return model
