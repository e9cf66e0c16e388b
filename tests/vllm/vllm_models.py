"""Random-weight models of the families, in a size that vLLM's CPU kernels support: heads of 64, float32."""

from pathlib import Path

import torch
import transformers as hf

SIZE = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512, "max_position_embeddings": 4096, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
WINDOW = 96  # ends within a page
SLIDING = ["sliding_attention", "full_attention"] * 2

FAMILIES = {
    "llama": lambda: hf.LlamaConfig(**SIZE),
    "qwen3": lambda: hf.Qwen3Config(**SIZE),
    "gemma2": lambda: hf.Gemma2Config(
        **SIZE, sliding_window=WINDOW, layer_types=SLIDING, query_pre_attn_scalar=64, attn_logit_softcapping=2.0
    ),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **SIZE, sliding_window=WINDOW, layer_types=SLIDING, query_pre_attn_scalar=64
    ),
    "gpt_oss": lambda: hf.GptOssConfig(
        **SIZE, sliding_window=WINDOW, layer_types=SLIDING, num_local_experts=4, num_experts_per_tok=2
    ),
    "gemma3n": lambda: hf.Gemma3nTextConfig(
        **{**SIZE, "num_hidden_layers": 6}, sliding_window=WINDOW, num_kv_shared_layers=2,
        vocab_size_per_layer_input=512, hidden_size_per_layer_input=32, laurel_rank=8,
        activation_sparsity_pattern=[0.0] * 6, layer_types=["sliding_attention", "full_attention"] * 3,
    ),
    "deepseek_v2": lambda: hf.DeepseekV2Config(
        **{k: v for k, v in SIZE.items() if k not in ("head_dim", "num_key_value_heads")}, num_key_value_heads=4,
        kv_lora_rank=512, q_lora_rank=None, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, n_shared_experts=1,
        first_k_dense_replace=4, n_group=1, topk_group=1, topk_method="greedy",
    ),
    "qwen3_next": lambda: hf.Qwen3NextConfig(
        **SIZE, **EXPERTS, layer_types=["linear_attention", "full_attention"] * 2, shared_expert_intermediate_size=64,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64,
    ),
}  # fmt: skip


def make(family: str, folder: Path) -> str:
    """Its folder; written once."""
    at = folder / family
    if not at.exists():
        torch.manual_seed(0)
        config = FAMILIES[family]()
        config.dtype = torch.float32
        model = hf.AutoModelForCausalLM.from_config(config).float()
        with torch.no_grad():
            for name, x in model.named_parameters():
                if x.ndim > 1:  # larger than an initialization for training, so that tokens depend on attention
                    x.normal_(std=x.shape[-1] ** -0.5)
                elif "sinks" in name:
                    x.normal_()
        model.save_pretrained(at)
    return str(at)
