"""KVCache under transformers: with raw pages the tokens of DynamicCache; the rest against what is stored."""

import copy

import models
import pytest
import torch
import transformers as hf
from generation import IMPLEMENTATIONS, MODES, SPLIT, cache_of, check_mode, error, logits_of, runs, select
from models import ids, left_pads, model

from kvcompress import PagedKV

REQUIRED = ("llama", "qwen2", "qwen3", "mistral", "gemma2")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", REQUIRED)
def test_raw_pages_generate_as_dynamic_cache(name, mode):
    check_mode(name, mode, "kvcompress")


@pytest.mark.parametrize("mode", ["greedy", "left_padding", "beams", "two_turns"])
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_hybrid_models(name, mode):
    check_mode(name, mode, "kvcompress")


@pytest.mark.parametrize("name,mode,implementation", runs([
    ("llama", "greedy"), ("llama", "left_padding"), ("llama", "two_turns"), ("qwen2", "beams"),
    ("qwen3", "chunked"), ("mistral", "two_turns"), ("gemma2", "sampling"),
    ("gemma2", "left_padding"), ("gemma2", "beams"),
], ["sdpa", "eager"]))  # fmt: skip
def test_raw_pages_materialised(name, mode, implementation):
    check_mode(name, mode, implementation)


@pytest.mark.full
@pytest.mark.parametrize("name,mode,implementation", runs(
    [(name, mode) for name in models.CONFIGS for mode in (*MODES, "drafts")], IMPLEMENTATIONS
))  # fmt: skip
def test_raw_pages_product(name, mode, implementation):
    check_mode(name, mode, implementation)


@pytest.mark.parametrize("name,mode,implementation", runs(
    [("llama", "drafts"), ("gemma2", "drafts"), ("mistral", "drafts")], IMPLEMENTATIONS
))  # fmt: skip
def test_prompt_lookup_crops_rejected_drafts(name, mode, implementation):
    check_mode(name, mode, implementation)


@pytest.mark.parametrize("mode", MODES)
def test_the_fused_path_never_decodes_the_cache(mode, monkeypatch):
    def forbidden(store, *args):
        own = [layer.store for layer in cache.layers]
        assert store not in own or not store.parts()["sealed"], "the cache was decoded"
        return dense(store)  # what is raw is looked at once, before it is sealed

    m = select(model("llama"), "kvcompress")
    cache, dense = cache_of(m, "int8"), PagedKV.dense
    monkeypatch.setattr(PagedKV, "dense", forbidden)
    monkeypatch.setattr(PagedKV, "append_dense", forbidden)
    assert MODES[mode](m, cache)[0].sequences.shape[1] > 45


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_models_stay_close_to_eager(dtype):
    m = copy.deepcopy(model("llama")).to(dtype)
    select(m, "eager")
    want = torch.cat(logits_of(m, hf.DynamicCache(config=m.config), [40, 1, 1]), 1)
    select(m, "kvcompress")
    got = torch.cat(logits_of(m, cache_of(m, "raw"), [40, 1, 1]), 1)
    assert error(got, want) < {torch.float16: 3e-3, torch.bfloat16: 3e-2}[dtype]


@pytest.mark.parametrize("implementation", ["kvcompress", "sdpa"])
def test_autocast(implementation):
    """K comes in float32 and V in bfloat16: stored in float32, as DynamicCache does."""
    m = select(model("llama"), implementation)
    with torch.autocast("cpu", torch.bfloat16):
        cache = cache_of(m, "raw")
        got = torch.cat(logits_of(m, cache, [40, 1, 23]), 1)
        m.set_attn_implementation("sdpa")
        want = torch.cat(logits_of(m, hf.DynamicCache(config=m.config), [40, 1, 23]), 1)
    assert cache.layers[0].store.dtype is torch.float32
    assert error(got, want) < 2e-2


# ---------------------------------------------------------------- quantized formats


@pytest.mark.parametrize("options", [
    {"key": "int8"}, {"key": "fp8_e4m3"}, {"key": "int4"}, {"key": "int8", "value": "int4"},
    {"key": "raw", "value": "int8"}, {"key": "int8", "residual": 0}, {"key": "int4", "recent": 20},
    {"nbits": 4, "residual_length": 16, "sinks": 0},
])  # fmt: skip
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_fused_equals_materialised(name, options):
    """On the same stored tokens, the fused op computes what eager does on the decoded cache, call by call."""
    m = model(name)
    fast, start = cache_of(m, **options), 0
    for T in SPLIT:
        tokens = ids(1, sum(SPLIT))[:, start : start + T]
        slow = copy.deepcopy(fast)
        want = logits_of(select(m, "eager"), slow, [T], tokens)[0]
        got = logits_of(select(m, "kvcompress"), fast, [T], tokens)[0]
        assert error(got, want) < 1e-3
        for a, b in zip(fast.layers, slow.layers, strict=True):
            assert a.keys.shape == b.keys.shape and error(a.keys, b.keys) < 1e-2
        start += T


@pytest.mark.parametrize("key", ["int8", "fp8_e4m3", "int4"])
def test_rows_of_a_padded_batch_equal_the_rows_alone(key):
    m = select(model("llama"), "kvcompress")
    pads, lengths = [0, 13, 30], [50, 1, 1, 30, 1]
    tokens, mask = left_pads(ids(3, sum(lengths)), pads)
    batch = torch.cat(logits_of(m, cache_of(m, key), lengths, tokens, mask), 1)
    for row, n in enumerate(pads):
        alone = logits_of(m, cache_of(m, key), [lengths[0] - n, *lengths[1:]], tokens[row : row + 1, n:])
        assert error(batch[row, n:], torch.cat(alone, 1)[0]) < 1e-3


def test_the_quantized_cache_is_close_to_the_exact_one():
    m = select(model("llama"), "kvcompress")
    exact = torch.cat(logits_of(m, hf.DynamicCache(config=m.config), SPLIT), 1)
    loss = {
        key: error(torch.cat(logits_of(m, cache_of(m, key), SPLIT), 1), exact)
        for key in ("raw", "int8", "fp8_e4m3", "int4")
    }
    assert loss["raw"] < 1e-5 < loss["int8"] < loss["fp8_e4m3"] < loss["int4"] < 0.4
