"""KVCache under transformers, in addition to test_product.py: compared with the stored values, and row by row."""

import copy

import pytest
import torch
import transformers as hf
from generation import SPLIT, cache_of, error, logits_of, select
from models import ids, model
from modes import MODES

from kvcompress import PagedKV


@pytest.mark.parametrize("mode", ["sampling", "left_padding", "beams", "chunked", "two_turns", "prompt_lookup"])
def test_the_fused_path_never_decodes_the_cache(mode, monkeypatch):
    def forbidden(store, *args):
        own = [layer.store for layer in cache.layers]
        assert store not in own or not store.page_store.parts()["sealed"], "the cache was decoded"
        return dense(store)  # raw tokens are checked once, before they are sealed

    m = select(model("llama"), "kvcompress")
    cache, dense = cache_of(m, "int8"), PagedKV.dense
    monkeypatch.setattr(PagedKV, "dense", forbidden)
    monkeypatch.setattr(PagedKV, "append_dense", forbidden)
    assert MODES[mode](m, lambda: cache, None).outputs[0].sequences.shape[1] > 45


@pytest.mark.parametrize("implementation", ["kvcompress", "sdpa"])
def test_autocast(implementation):
    """K comes in float32 and V in bfloat16: both are stored in float32, as in DynamicCache."""
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
    {"key": "raw", "value": "int8"}, {"key": "int8", "residual_length": 0}, {"key": "int4", "residual_length": 20},
    {"key": "int4", "residual_length": 16, "sinks": 0},
])  # fmt: skip
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_fused_equals_materialised(name, options):
    """Over the same stored tokens, the fused op equals eager attention over the decoded cache, call by call."""
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


def test_the_quantized_cache_is_close_to_the_exact_one():
    m = select(model("llama"), "kvcompress")
    exact = torch.cat(logits_of(m, hf.DynamicCache(config=m.config), SPLIT), 1)
    loss = {
        key: error(torch.cat(logits_of(m, cache_of(m, key), SPLIT), 1), exact)
        for key in ("raw", "int8", "fp8_e4m3", "int4")
    }
    assert loss["raw"] < 1e-5 < loss["int8"] < loss["fp8_e4m3"] < loss["int4"] < 0.4
