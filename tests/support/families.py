"""The model families of the product test: a tiny random model of each, fp32, eval mode, fixed seed."""

from functools import lru_cache

import models
import torch
import transformers as hf
from models import SIZE, WINDOW

MLA = {
    "head_dim": None, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 64, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def some(**changes):
    return {name: x for name, x in {**SIZE, **changes}.items() if x is not None or name.endswith("_token_id")}


def vlm():
    return hf.LlavaConfig(
        text_config=models.CONFIGS["llama"](), image_token_index=95,
        vision_config=hf.CLIPVisionConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=8,
            patch_size=4,
        ),
    )  # fmt: skip


CONFIGS = {
    **models.CONFIGS,
    "phi": lambda: hf.PhiConfig(**some(head_dim=None, partial_rotary_factor=0.5)),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**some(head_dim=None, num_key_value_heads=None)),
    "moe": lambda: hf.Qwen3MoeConfig(**some(**EXPERTS)),
    "llama4": lambda: hf.Llama4TextConfig(
        **some(num_hidden_layers=4), intermediate_size_mlp=64, num_local_experts=2, attention_chunk_size=32,
        layer_types=["chunked_attention", "full_attention"] * 2, no_rope_layers=[1, 0, 1, 0],
    ),
    "deepseek_v3": lambda: hf.DeepseekV3Config(
        **some(**MLA), n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=32,
        first_k_dense_replace=1,
    ),
    "gemma3n": lambda: hf.Gemma3nTextConfig(
        **some(num_hidden_layers=6), sliding_window=WINDOW, num_kv_shared_layers=2, vocab_size_per_layer_input=96,
        hidden_size_per_layer_input=16, laurel_rank=8, altup_num_inputs=2, activation_sparsity_pattern=[0.0] * 6,
        layer_types=["sliding_attention", "full_attention"] * 3,
    ),
    "gemma4": lambda: hf.Gemma4TextConfig(
        **some(num_hidden_layers=6), sliding_window=WINDOW, global_head_dim=64, vocab_size_per_layer_input=96,
        hidden_size_per_layer_input=16, num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 3,
    ),
    # as in the large models: layers share nothing, global layers use K as V
    "gemma4_k_eq_v": lambda: hf.Gemma4TextConfig(
        **some(num_hidden_layers=4), sliding_window=WINDOW, global_head_dim=64, hidden_size_per_layer_input=0,
        num_kv_shared_layers=0, attention_k_eq_v=True, num_global_key_value_heads=1,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "linear": lambda: hf.Qwen3NextConfig(
        **some(**EXPERTS), layer_types=["linear_attention", "full_attention"], shared_expert_intermediate_size=32,
        linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
    ),
    "conv": lambda: hf.Lfm2Config(
        **some(head_dim=None), layer_types=["conv", "full_attention"],
        block_auto_adjust_ff_dim=False, conv_L_cache=3,
    ),
    "vlm": vlm,
    "peft": models.CONFIGS["llama"],
    "quantized_weights": models.CONFIGS["qwen3"],
}  # fmt: skip
NO_CROP = ("linear",)  # states of linear attention cannot be rolled back, in transformers' caches neither
NO_ROWS = ("linear", "conv")  # families whose states transformers' caches cannot select by row; ours can
ROUTED = ("moe", "llama4", "deepseek_v3", "gpt_oss")  # in half precision, rounding changes the routing of a few tokens


def with_adapter(model):
    """A LoRA adapter applied by PEFT."""
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


class Int8Linear(torch.nn.Module):
    """A linear layer with 8-bit weights and a scale per row, as weight-only quantizers make it."""

    def __init__(self, linear):
        super().__init__()
        weight = linear.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("codes", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x):
        return torch.nn.functional.linear(x, self.codes * self.scale.to(x.dtype), self.bias)


def with_int8_weights(model):
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, child in list(part.named_children()):
                if isinstance(child, torch.nn.Linear):
                    setattr(part, name, Int8Linear(child))
    return model


@lru_cache
def family(name):
    """The model `name`. Cached per name, so set the attention that a test needs."""
    if name in models.CONFIGS:
        return models.model(name)
    config = CONFIGS[name]()
    torch.manual_seed(7)
    kind = hf.LlavaForConditionalGeneration if name == "vlm" else hf.AutoModelForCausalLM
    make = kind._from_config if name == "vlm" else kind.from_config
    made = make(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter_name, parameter in made.named_parameters():
            if parameter_name.endswith("_proj.bias"):
                parameter.normal_(0, 0.5)
    if name == "peft":
        made = with_adapter(made)
    if name == "quantized_weights":
        made = with_int8_weights(made)
    return made
