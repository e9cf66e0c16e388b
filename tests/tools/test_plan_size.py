"""kvcompress.tools.plan.size compared with the bytes of real caches, part by part."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    DeepseekV3Config,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from kvcompress import H2O, KVCache, StreamingLLM, Tiers, enable
from kvcompress.tools.plan import Recipe, exact, read, shared_prefix


def llama(layers, heads, dim, dtype="bfloat16"):
    return LlamaConfig(
        num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=heads, head_dim=dim, hidden_size=64,
        vocab_size=99, dtype=dtype,
    )  # fmt: skip


def filled(config, tokens, prompt, batch=1, **options):
    """A KVCache that got `prompt` tokens at once and the others one by one, as from a model's forward passes."""
    cache, shape = KVCache(config, **options), read(config)
    dtype = torch.float32 if shape.element == 4 else torch.bfloat16
    for T in [prompt] + [1] * (tokens - prompt):
        for i, layer in enumerate(shape.layers):
            k = torch.randn(batch, layer.heads, T, layer.key_dim, dtype=dtype)
            v = torch.randn(batch, layer.heads, T, layer.value_dim, dtype=dtype)
            cache.update(k, v, i)
    return cache.stats()


CASES = [
    # layers, heads, dim, key, value, tokens, prompt, batch, what else
    (2, 2, 64, "int8", "int8", 1000, 1000, 1, {}),
    (3, 8, 128, "int4", "int4", 300, 7, 3, {}),
    (2, 2, 64, "raw", "raw", 300, 100, 1, {}),
    (4, 1, 80, "int8", "int4", 515, 515, 1, {}),
    (2, 8, 128, "int2", "int2", 2000, 2000, 1, {}),
    (3, 2, 64, "int8", "int8", 600, 200, 1, {"residual_length": 150, "page_size": 16}),
    (3, 1, 80, "kivi4", "int4", 700, 300, 2, {"residual_length": 128, "sinks": 0}),
    (2, 2, 64, "int8", "int8", 3, 3, 1, {}),
    (2, 2, 64, "mxfp4", "nvfp4", 133, 132, 2, {"sinks": 20}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[3]}-{c[5]}")
def test_exact_to_the_byte(case):
    layers, heads, dim, key, value, tokens, prompt, batch, more = case
    config = llama(layers, heads, dim)
    got = filled(config, tokens, prompt, batch, key=key, value=value, **more)
    assert exact(read(config), Recipe(key, value, **more), tokens, batch, prompt).parts == got["parts"]


def test_latents_with_an_indexer():
    """DeepSeek-V3.2: pages of latents up to index_topk slots; beyond them transformers' layers, with each token's
    latent, rotary part and indexer key."""
    config = DeepseekV32Config(
        vocab_size=96, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, q_lora_rank=32,
        num_key_value_heads=4, kv_lora_rank=64, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16,
        index_n_heads=2, index_head_dim=32, index_topk=150, first_k_dense_replace=2, dtype="float32",
    )  # fmt: skip
    model, cache = DeepseekV32ForCausalLM(config).eval(), KVCache(config, "int8")
    with torch.no_grad():
        model(torch.zeros(2, 150, dtype=torch.long), past_key_values=cache)
    assert exact(read(config), "int8", 150, 2).parts == cache.stats()["parts"]
    assert exact(read(config), "int8", 151, 2).bytes == 2 * 151 * 2 * (64 + 16 + 32) * 4


@settings(max_examples=15, deadline=None)
@given(
    heads=st.sampled_from([1, 2, 4]), dim=st.sampled_from([32, 64, 96]),
    key=st.sampled_from(["int8", "int4", "raw", "nvfp4"]),
    prompt=st.integers(1, 600), more=st.integers(0, 90), batch=st.integers(1, 3), page=st.sampled_from([16, 64]),
    recent=st.sampled_from([0, 40, 128]), sinks=st.sampled_from([0, 4]),
)  # fmt: skip
def test_within_a_hundredth_whatever_the_shape(heads, dim, key, prompt, more, batch, page, recent, sinks):
    config, options = llama(2, heads, dim), {"page_size": page, "residual_length": recent or None, "sinks": sinks}
    got = filled(config, prompt + more, prompt, batch, key=key, value="int8" if key != "raw" else "raw", **options)
    found = exact(read(config), Recipe(key, "int8" if key != "raw" else "raw", **options), prompt + more, batch, prompt)
    for part in ("sealed", "open", "sinks", "tables"):
        assert found.parts[part] == got["parts"][part], part
    assert abs(found.bytes - got["bytes"]) <= 0.01 * got["bytes"] + 4096


SHAPES = {"MHA": (2, 8, 64), "GQA": (3, 2, 128), "MQA": (2, 1, 96)}


@pytest.mark.parametrize("file", [False, True], ids=["host", "file"])
@pytest.mark.parametrize("pair", [("raw", "raw"), ("int8", "int8"), ("fp8_e4m3", "int4_g32"), ("kivi2", "int2_asym")])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_tier_to_the_byte(shape, pair, file, tmp_path):
    layers, heads, dim = SHAPES[shape]
    config, (key, value) = llama(layers, heads, dim), pair
    for tokens, batch, resident in ((700, 1, 0), (1100, 2, 200), (60, 1, 0)):
        cache = KVCache(config, key=key, value=value)
        k = torch.randn(batch, heads, tokens, dim, dtype=torch.bfloat16)
        for i in range(layers):
            cache.update(k, k, i)
        tiers = Tiers(host_bytes=0 if file else None, file_bytes=None, folder=tmp_path)
        cache.use_tiers(tiers, resident=resident, unit=1)
        want = exact(read(config), Recipe(key, value), tokens, batch, resident=resident).parts
        found, stats = cache.stats()["parts"], tiers.stats()
        assert stats["file" if file else "host"] == want["offloaded"] and stats["host" if file else "file"] == 0
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) == (want["offloaded"] if file else 0)
        assert {name: found[name] for name in ("sealed", "open", "sinks")} == {
            name: want[name] for name in ("sealed", "open", "sinks")
        }
        assert (want["offloaded"] > 0) == (tokens > 100)
        for layer in cache.layers:  # each is fetched once
            layer.store.dense()
        used = cache.pool.stats()["used"]
        assert used == sum(want[name] for name in ("sealed", "open", "sinks", "stages"))
        cache.save(path := tmp_path / "all.kvc")
        assert sum(want[name] for name in ("sealed", "offloaded", "open", "sinks")) < path.stat().st_size
        cache.suspend(path)
        assert cache.pool.stats()["used"] == 0
        path.unlink()


def test_per_layer_formats_and_float32():
    config = llama(4, 2, 64, "float32")
    own = {0: ("int8", "int8"), 3: ("int2", "int4")}
    got = filled(config, 500, 500, key="int4", per_layer={i: "/".join(pair) for i, pair in own.items()})
    assert exact(read(config), Recipe("int4", per_layer=own), 500).parts == got["parts"]


@pytest.mark.parametrize("key", ["int8", "int4", "raw"])
@pytest.mark.parametrize(
    ("tokens", "prompt", "batch"),
    [(20, 20, 1), (200, 100, 1), (200, 200, 2), (300, 200, 1), (1000, 1000, 1), (500, 17, 1), (150, 1, 3)],
)
def test_sliding_layers_are_rings(key, tokens, prompt, batch):
    config = Gemma3TextConfig(
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=64, hidden_size=64,
        sliding_window=50, layer_types=["sliding_attention", "sliding_attention", "full_attention"], dtype="bfloat16",
    )  # fmt: skip
    got = filled(config, tokens, prompt, batch, key=key)
    assert exact(read(config), key, tokens, batch, prompt=prompt).parts == got["parts"]


def test_latent_attention():
    config = DeepseekV3Config(
        num_hidden_layers=2, num_attention_heads=4, kv_lora_rank=512, q_lora_rank=32, qk_rope_head_dim=64,
        qk_nope_head_dim=32, v_head_dim=32, hidden_size=64, dtype="bfloat16",
    )  # fmt: skip
    got = filled(config, 300, 300, key="int4")
    assert exact(read(config), "int4", 300).parts == got["parts"]


@pytest.mark.parametrize("policy", [H2O(128), StreamingLLM(4, 124)], ids=["h2o", "window"])
def test_a_budget_bounds_pages_and_tables(policy):
    config = llama(2, 2, 64)
    model = LlamaForCausalLM(config).bfloat16().eval()
    enable(model, verbose=False)
    cache = KVCache(model.config, "int8", policy=policy, page_size=16)
    ids = torch.randint(1, 99, (1, 600))
    with torch.inference_mode():
        model(ids[:, :500], past_key_values=cache)
        for i in range(500, 600):
            model(ids[:, i : i + 1], past_key_values=cache)
    h2o = isinstance(policy, H2O)
    bound = exact(read(config), Recipe("int8", page_size=16, budget=128, scores=h2o, ragged=h2o), 600, prompt=599)
    parts = cache.stats()["parts"]
    held = sum(parts.values()) - parts["slack"]
    assert 0.6 * bound.bytes <= held <= bound.bytes


def test_a_shared_prefix_of_real_copies():
    """Bytes of the pool shared by copies of a cache, and of all their tables."""
    config, prefix, tokens, requests = llama(2, 8, 128), 1000, 1500, 4
    shape = read(config)

    def append(cache, T):
        for i in range(2):
            cache.update(torch.randn(1, 8, T, 128).bfloat16(), torch.randn(1, 8, T, 128).bfloat16(), i)

    base = KVCache(config, "int8")
    append(base, prefix)
    copies = [base] + [copy.deepcopy(base) for _ in range(requests - 1)]
    for one in copies:
        append(one, tokens - prefix)
    held = base.pool.stats()["resident"] + sum(c.stats()["parts"]["tables"] for c in copies)
    once, apart = shared_prefix(shape, "int8", tokens, prefix, requests)
    # pages are exact; freed pages that stay resident are not counted
    assert abs(once - held) <= 0.05 * held and apart > 1.6 * held


def test_mistakes():
    model = read(llama(2, 2, 64))
    for arguments in (("int8", 0), ("int8", 5, 0)):
        with pytest.raises(ValueError, match="expected at least 1"):
            exact(model, *arguments)
    with pytest.raises(ValueError, match="resident: expected at least 0 tokens, got -1"):
        exact(model, "int8", 5, resident=-1)
    with pytest.raises(ValueError, match="expected one of"):
        exact(model, "int5", 10)
