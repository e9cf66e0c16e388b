"""Number of parameters of a decoder, from its config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FAMILIES = (
    "deepseek_v2", "deepseek_v3", "falcon", "gemma2", "gemma3", "gemma3_text", "gpt_oss", "llama", "mistral", "mixtral",
    "phi3", "qwen2", "qwen3", "qwen3_moe",
)  # fmt: skip
"""Values of model_type that `count` supports, each tested against transformers."""


def _attention(c: Mapping[str, Any], h: int, queries: int) -> int:
    if rank := c.get("kv_lora_rank"):
        rope, nope, value = c["qk_rope_head_dim"], c["qk_nope_head_dim"], c["v_head_dim"]
        wide = queries * (nope + rope)
        q = h * c["q_lora_rank"] + c["q_lora_rank"] * (wide + 1) if c.get("q_lora_rank") else h * wide
        return q + h * (rank + rope) + rank + rank * queries * (nope + value) + queries * value * h
    dim = c.get("head_dim") or h // queries
    kv = 1 if c.get("multi_query") else c.get("num_key_value_heads") or queries
    total = h * dim * (2 * queries + 2 * kv)
    family = str(c.get("model_type", ""))
    if family.startswith("qwen2") or c.get("attention_bias") or c.get("add_qkv_bias"):
        total += dim * (queries + 2 * kv)
    if c.get("attention_bias") and not family.startswith(("qwen2", "glm")):
        total += h
    if family.startswith(("qwen3", "gemma3")):
        total += 2 * dim  # norms of q and k
    return total + (queries if family == "gpt_oss" else 0)  # a sink a head


def _mlp(c: Mapping[str, Any], h: int, layer: int) -> int:
    family = str(c.get("model_type", ""))
    experts = c.get("n_routed_experts") or c.get("num_local_experts") or c.get("num_experts") or 0
    if family == "falcon":
        return 8 * h * h
    if not experts or layer < (c.get("first_k_dense_replace") or 0):
        return 3 * h * c["intermediate_size"]
    inner = c.get("moe_intermediate_size") or c["intermediate_size"]
    total = experts * (3 * h * inner + h) + (c.get("n_shared_experts") or 0) * 3 * h * inner
    return total + (experts * (2 * inner + h + 1) if family == "gpt_oss" else 0)  # everything has a bias


def count(config: Mapping[str, Any]) -> int | None:
    """Number of parameters of the language model, for configs of `FAMILIES`; None for others and incomplete configs.
    Tied embeddings count once."""
    c = config
    needs = ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size"]
    family = str(c.get("model_type", ""))
    if family not in FAMILIES or not all(c.get(x) for x in needs[: 4 if family == "falcon" else 5]):
        return None
    h, layers, queries = (c[x] for x in needs[:3])
    norms = 4 if family.startswith("gemma") else 2
    body = sum(_attention(c, h, queries) + _mlp(c, h, i) + norms * h for i in range(layers))
    tied = c.get("tie_word_embeddings")
    tied = family.startswith(("gemma", "falcon")) if tied is None else tied
    return body + c["vocab_size"] * h * (1 if tied else 2) + h * (2 if family == "falcon" else 1)
