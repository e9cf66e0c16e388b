"""Tiny random models, one of each kind of attention that the cache supports. fp32, eval mode, fixed seeds."""

from functools import lru_cache

import torch
import transformers as hf

SIZE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.2,  # large enough for distinct logits
}
WINDOW = 24

CONFIGS = {
    "llama": lambda: hf.LlamaConfig(**SIZE),
    "qwen2": lambda: hf.Qwen2Config(**SIZE),
    "qwen3": lambda: hf.Qwen3Config(**SIZE),
    "mistral": lambda: hf.MistralConfig(**SIZE, sliding_window=WINDOW),
    "gemma2": lambda: hf.Gemma2Config(
        **SIZE, sliding_window=WINDOW, query_pre_attn_scalar=32, attn_logit_softcapping=5.0
    ),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **{**SIZE, "num_hidden_layers": 3}, sliding_window=WINDOW, query_pre_attn_scalar=32,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
    ),
    "gpt_oss": lambda: hf.GptOssConfig(
        **SIZE, sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=1,
        layer_types=["sliding_attention", "full_attention"],
    ),
}  # fmt: skip
NO_SDPA = ("gemma2", "gpt_oss")  # transformers' sdpa supports neither softcap nor attention sinks


@lru_cache
def model(name: str, head_dim: int = 32) -> hf.PreTrainedModel:
    """The model `name` of CONFIGS. Cached per name, so set the attention that a test needs."""
    config = CONFIGS[name]()
    config.head_dim = head_dim
    torch.manual_seed(7)
    made = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in made.named_parameters():  # zero-initialized: give them nonzero values
            if parameter_name.endswith(("_proj.bias", "sinks")):
                parameter.normal_(0, 0.5)
    return made.eval()


def ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random prompt tokens [batch, length], never the padding token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, SIZE["vocab_size"], (batch, length), generator=generator)


def left_pads(tokens: torch.Tensor, pads: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, mask) with the first pads[b] tokens of row b replaced by padding."""
    tokens, mask = tokens.clone(), torch.ones_like(tokens)
    for row, n in enumerate(pads):
        tokens[row, :n] = 0
        mask[row, :n] = 0
    return tokens, mask
