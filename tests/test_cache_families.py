"""Families of models: what KVCache and enable() take, leave alone and refuse. Tiny random models of each."""

import models
import pytest
import torch
import transformers as hf
from generation import cache_of, check_same, generate
from models import ids, left_pads

from kvcompress import KVCache, enable

MLA = {
    "head_dim": None, "q_lora_rank": 32, "kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "num_key_value_heads": 4,
}  # fmt: skip
GEMMA4 = {
    "num_hidden_layers": 4, "sliding_window": models.WINDOW, "global_head_dim": 64, "vocab_size_per_layer_input": 96,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
CONFIGS = {
    "gpt_neox": lambda: hf.GPTNeoXConfig(**some(head_dim=None, num_key_value_heads=None)),
    "gemma4": lambda: hf.Gemma4TextConfig(**some(**GEMMA4, hidden_size_per_layer_input=0, num_kv_shared_layers=0)),
    "minicpm3": lambda: hf.MiniCPM3Config(**some(**MLA)),
}


def some(**changes):
    return {name: x for name, x in {**models.SIZE, **changes}.items() if x is not None or name.endswith("_token_id")}


def build(config):
    torch.manual_seed(7)
    return hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()


def own(m):
    return hf.DynamicCache(config=m.config)


@pytest.mark.parametrize("name", CONFIGS)
def test_generates_as_dynamic_cache(name):
    m = build(CONFIGS[name]())
    tokens, mask = left_pads(ids(2, 45), [0, 9])
    want = generate(m, tokens, own(m), mask)
    check_same([generate(m, tokens, cache_of(m, "raw"), mask)], [want])
    assert enable(m, verbose=False).fused
    for cache in (cache_of(m, "raw"), own(m)):
        check_same([generate(m, tokens, cache, mask)], [want])


@pytest.mark.parametrize("make", [hf.MambaConfig, hf.FalconH1Config, hf.GPTNeoXJapaneseConfig, hf.JambaConfig])
def test_configs_that_are_taken(make):
    KVCache(make())


@pytest.mark.parametrize("make,got", [
    (lambda: hf.GPTNeoXConfig(), "got 96"), (lambda: hf.DeepseekV3Config(), "got 512"),
    (lambda: hf.Gemma4TextConfig(), "got 512"), (lambda: hf.Gemma4TextConfig(global_head_dim=48), "got 48"),
])  # fmt: skip
def test_head_dims_show_at_construction(make, got):
    """Of the layers that are paged: latents for MLA, the global ones for Gemma 4."""
    with pytest.raises(ValueError, match=rf"int4: wanted a head dim .*{got}"):
        KVCache(make(), "int4")
