"""Model families: what KVCache and enable() accept, leave unchanged and reject. Tiny random models of each."""

import models
import pytest
import torch
import transformers as hf
from families import MLA, some
from generation import cache_of, check_same, generate
from models import ids, left_pads

from kvcompress import KVCache, doctor, enable, patch_generate
from kvcompress.hf.attention import kvcompress_attention_forward

GEMMA4 = {
    "num_hidden_layers": 4, "sliding_window": models.WINDOW, "global_head_dim": 64, "vocab_size_per_layer_input": 96,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
CONFIGS = {
    "gemma4": lambda: hf.Gemma4TextConfig(**some(**GEMMA4, hidden_size_per_layer_input=0, num_kv_shared_layers=0)),
    "minicpm3": lambda: hf.MiniCPM3Config(**some(**MLA)),
}

SPARSE = {
    **MLA, "index_n_heads": 2, "index_head_dim": 32, "index_topk": 16, "n_routed_experts": 4, "n_group": 1,
    "num_experts_per_tok": 2, "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
}  # fmt: skip


def pooled(config):
    """An indexer that selects pools of tokens, as in GLM-5-Next."""
    config.index_kpool = 4
    return config


ALONE = {  # models that enable() does not change, and why
    "doge": (lambda: hf.DogeConfig(**some()), "doge attention works on the 4D masks"),
    "git": (
        lambda: hf.GitConfig(
            **some(head_dim=None, num_key_value_heads=None),
            vision_config={"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
        ),
        "do not use transformers' attention interface",
    ),
    "bigbird_pegasus": (
        lambda: hf.BigBirdPegasusConfig(
            vocab_size=96,
            d_model=64,
            decoder_layers=2,
            decoder_attention_heads=4,
            decoder_ffn_dim=64,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=None,
            init_std=0.2,
            attention_type="original_full",
        ),
        "needs eager's 4D mask",
    ),
    "diffllama": (lambda: hf.DiffLlamaConfig(**some()), "its attention splits V in two"),
    "jetmoe": (
        lambda: hf.JetMoeConfig(
            vocab_size=96,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=2,
            num_key_value_heads=2,
            kv_channels=32,
            num_local_experts=2,
            initializer_range=0.2,
            pad_token_id=0,
            eos_token_id=None,
        ),
        "its attention repeats K and V for each expert",
    ),
    "moshi": (  # a causal mask over a cache of windows: what a query sees depends on the calls
        lambda: hf.MoshiConfig(**some(sliding_window=models.WINDOW), ffn_dim=64),
        "its window is that of the cache alone",
    ),
}


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


@pytest.mark.parametrize("make", [hf.GPTNeoXJapaneseConfig, hf.JambaConfig])
def test_configs_that_are_taken(make):
    KVCache(make())


@pytest.mark.parametrize("config", [
    hf.MambaConfig(vocab_size=512, hidden_size=32, num_hidden_layers=2, state_size=4),
    hf.FalconH1Config(**some(), mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8),
    pooled(hf.DeepseekV32Config(**some(**SPARSE))),
], ids=lambda config: config.model_type)  # fmt: skip
def test_models_with_nothing_to_compress_are_refused(config):
    model = build(config)
    want = generate(model, ids(1, 9), None).sequences
    for make in (lambda: KVCache(model.config), lambda: patch_generate(model, "int8")):
        with pytest.raises(ValueError, match=rf"got {type(config).__name__} with .* so there is nothing to compress"):
            make()
    report = enable(model, verbose=False)
    assert not report.fused and "there is nothing to compress" in str(report)
    assert torch.equal(generate(model, ids(1, 9), None).sequences, want)  # unchanged


def test_a_model_with_a_cache_of_its_own_is_refused():
    model = build(hf.MiniMaxConfig(**some(), num_local_experts=2, block_size=16))
    want = generate(model, ids(1, 9), None).sequences
    for make in (lambda: KVCache(model.config), lambda: enable(model), lambda: patch_generate(model, "int8")):
        with pytest.raises(ValueError, match="got MiniMaxConfig, which uses a cache of its own"):
            make()
    assert torch.equal(generate(model, ids(1, 9), None).sequences, want)


def test_head_dims_show_at_construction():
    """Of the paged layers: here the global ones of Gemma 4."""
    with pytest.raises(ValueError, match=r"head_dim: expected at most 576, got 640"):
        KVCache(hf.Gemma4TextConfig(global_head_dim=640), "int4")


@pytest.mark.parametrize("make", [hf.DeepseekV3Config, hf.Gemma4TextConfig])
def test_wide_heads_are_taken(make):
    """In released sizes: latents of 512 for MLA, global layers of 512 for Gemma 4."""
    KVCache(make(), "int4")


WIDE = {
    "gemma4": lambda: hf.Gemma4TextConfig(
        **some(**{**GEMMA4, "global_head_dim": 512}), hidden_size_per_layer_input=0, num_kv_shared_layers=0
    ),
    "gemma4_shared": lambda: hf.Gemma4TextConfig(  # the last two layers attend to the K and V of the first two
        **some(**{**GEMMA4, "global_head_dim": 512}), hidden_size_per_layer_input=16, num_kv_shared_layers=2
    ),
    "gemma4_k_eq_v": lambda: hf.Gemma4TextConfig(
        **some(**{**GEMMA4, "global_head_dim": 512}), hidden_size_per_layer_input=0, num_kv_shared_layers=0,
        attention_k_eq_v=True, num_global_key_value_heads=1,
    ),
    "deepseek_v3": lambda: hf.DeepseekV3Config(
        **some(**{**MLA, "kv_lora_rank": 512, "qk_rope_head_dim": 64}), n_routed_experts=4, n_group=1, topk_group=1,
        num_experts_per_tok=2, moe_intermediate_size=32, first_k_dense_replace=1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"max_length": 96}])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", WIDE)
def test_wide_heads(name, fused, options):
    m = build(WIDE[name]())
    tokens, mask = left_pads(ids(2, 45), [0, 9])
    want = generate(m, tokens, own(m), mask)
    if fused:
        report = enable(m, verbose=False)
        assert report.fused and "decoded at every step" not in str(report)
    check_same([generate(m, tokens, cache_of(m, "raw", **options), mask)], [want])
    cache = cache_of(m, "int4", **options)
    generate(m, tokens, cache, mask)
    layer = cache.layers[1]
    assert layer.keys.shape[3] == layer.store.head_dim == 512 and layer.keys.shape[2] == 64
    if name == "deepseek_v3":
        assert layer.options["value"] == "int8"  # the rotary part of K
        assert layer.values.shape == (2, 1, 64, 64)
    twin = KVCache.from_cache(cache.to_dynamic_cache(), m.config, "raw") if not options else None
    if twin is not None:
        assert torch.equal(twin.layers[1].keys, layer.keys)
    ways = {r.attention for r in doctor(m, cache, verbose=False).rows}
    assert ways == ({"fused"} if fused else {"decoded"})


@pytest.mark.parametrize("make", [hf.GPTNeoXConfig, lambda: hf.Gemma4TextConfig(global_head_dim=46)])
def test_head_dims_that_are_filled_up(make):
    KVCache(make(), "int4")


@pytest.mark.parametrize("name", ALONE)
def test_enable_leaves_alone_what_needs_its_own_masks(name, capsys):
    make, why = ALONE[name]
    m = build(make())
    tokens, mask = left_pads(ids(2, 45), [0, 9])
    want = generate(m, tokens, own(m), mask)
    report = enable(m)
    assert not report.fused and why in str(report) and "NOT on" in capsys.readouterr().out
    assert m.config._attn_implementation == "eager"
    for cache in (cache_of(m, "raw"), own(m)):
        check_same([generate(m, tokens, cache, mask)], [want])
    fixed = hf.StaticCache(config=m.config, max_cache_len=96), cache_of(m, "raw", max_length=96)
    want, got = (generate(m, tokens, cache, mask) for cache in fixed)
    check_same([got], [want])
    want, got = (generate(m, tokens, cache, mask, prefill_chunk_size=11) for cache in (own(m), cache_of(m, "raw")))
    check_same([got], [want])


def test_a_kind_of_layer_that_we_do_not_know_is_left_alone():
    m = build(models.CONFIGS["llama"]())
    m.config.layer_types = ["full_attention", "indexed_attention"]
    assert "indexed_attention attention needs the 4D masks" in str(enable(m, verbose=False))


@pytest.mark.parametrize("given", [
    {"sinks": torch.zeros(1)}, {"block_indices": torch.zeros(1)},
    {"attention_mask": torch.ones(1, 22, dtype=torch.bool)}, {"attention_mask": torch.ones(1, 24, dtype=torch.bool)},
])  # fmt: skip
def test_attention_refuses_what_it_would_ignore(given):
    """With plain tensors, and with a layer of ours, whose forward pass is rolled back."""
    m = build(models.CONFIGS["llama"]())
    assert enable(m, verbose=False).fused
    cache = cache_of(m, "raw")
    with torch.no_grad():
        m(ids(1, 20), past_key_values=cache)
    x, q = torch.randn(1, 2, 3, 32), torch.randn(1, 4, 3, 32)
    cache.update(x, x, 0)[0] * 1
    dense = torch.randn(1, 2, 23, 32)
    for k, v in ((dense, dense), cache.update(x, x, 1)):
        with pytest.raises(ValueError, match=r"Module: .*expected.*got.*eager") as caught:
            kvcompress_attention_forward(torch.nn.Module().eval(), q, k, v, **{"attention_mask": None, **given})
        assert next(iter(given)) in str(caught.value)
    assert [layer.store.seen for layer in cache.layers] == [20, 20] and cache.get_seq_length() == 20
    kvcompress_attention_forward(torch.nn.Module().eval(), q, *cache.update(x, x, 0), None, sinks=None)
