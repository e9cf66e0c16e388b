"""Operations on a KVCache: reset, crop, copies, batch methods, options, statistics, stand-ins for K and V."""

import copy

import models
import pytest
import torch
import transformers as hf
from generation import (
    IMPLEMENTATIONS,
    SPLIT,
    cache_of,
    check_same,
    error,
    generate,
    greedy,
    logits_of,
    reference,
    select,
)
from models import ids, left_pads, model

from kvcompress import H2OCache, KVCache, StreamingLLMCache
from kvcompress.hf.lazy import LazyKV


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_reset_serves_another_batch(implementation):
    want = reference("llama")
    m = select(model("llama"), implementation)
    cache = cache_of(m, "raw")
    generate(m, ids(3, 30), cache)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.stats()["kept"] == 0
    check_same(greedy(m, cache), want)


@pytest.mark.parametrize("implementation", ["kvcompress", "sdpa"])
def test_crop_goes_back(implementation):
    m = select(model("llama"), implementation)
    tokens = ids(2, 60)
    cache, plain = cache_of(m, "raw"), hf.DynamicCache(config=m.config)
    for c in (cache, plain):
        logits_of(m, c, [50, 10], tokens)
        c.crop(0)
        c.crop(-23)
        assert c.get_seq_length() == 37
    other = ids(2, 9, seed=5)
    torch.testing.assert_close(
        logits_of(m, cache, [9], other)[0], logits_of(m, plain, [9], other)[0], rtol=1e-4, atol=1e-4
    )
    cache.crop(-1000)
    assert cache.get_seq_length() == 0
    with pytest.raises(ValueError, match="expected 0 or a negative"):
        cache.crop(5)


@pytest.mark.parametrize("key", ["raw", "int4"])
def test_deepcopy_reuses_a_prefix(key):
    """A prompt is prefilled once and used twice; the copies share its pages and do not change it."""
    m = select(model("llama"), "kvcompress")
    prefix = ids(1, 55)
    base = cache_of(m, key)
    logits_of(m, base, [55], prefix)
    held = base.stats()["bytes"]
    for seed in (1, 2):
        question = ids(1, 12, seed=seed)
        twin = copy.deepcopy(base)
        got = logits_of(m, twin, [12, 1], torch.cat([question, question[:, :1]], 1))
        alone = cache_of(m, key)
        logits_of(m, alone, [55], prefix)
        want = logits_of(m, alone, [12, 1], torch.cat([question, question[:, :1]], 1))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert base.get_seq_length() == 55 and twin.get_seq_length() == 68
        del twin
    assert base.stats()["bytes"] >= held - 4096 and base.stats()["kept"] == 55


@pytest.mark.parametrize("implementation", ["kvcompress", "eager"])
def test_batch_methods(implementation):
    m = select(model("gemma2"), implementation)
    tokens = ids(3, 40)
    cache, plain = cache_of(m, "raw"), hf.DynamicCache(config=m.config)
    for c in (cache, plain):
        logits_of(m, c, [40], tokens)
        c.reorder_cache(torch.tensor([2, 0, 0]))
        c.batch_repeat_interleave(2)
        c.batch_select_indices(torch.tensor([5, 0, 1]))
    assert cache.layers[1].batch_size == 3
    more = ids(3, 5, seed=3)
    torch.testing.assert_close(
        logits_of(m, cache, [5], more)[0], logits_of(m, plain, [5], more)[0], rtol=1e-4, atol=1e-4
    )


def test_a_dropped_cache_is_freed_at_once():
    """No reference cycle keeps pages until garbage collection."""
    m = select(model("gemma2"), "kvcompress")
    cache = cache_of(m, "int8")
    generate(m, ids(2, 40), cache)
    twin = copy.deepcopy(cache)
    pool = cache.pool
    del cache
    assert pool.stats()["used"] > 0 and twin.stats()["kept"] == 2 * 59
    del twin
    assert pool.stats()["used"] == 0


def test_guard_rails():
    config = models.CONFIGS["llama"]()
    config.num_hidden_layers = 4
    cache = KVCache(config, "int4", guard=True)
    assert [layer.options["key"] for layer in cache.layers] == ["int8", "int4", "int4", "int8"]
    cache = KVCache(config, "int8", value="kivi2", guard=True)
    assert [layer.options["value"] for layer in cache.layers] == ["int4", "kivi2", "kivi2", "int4"]
    with pytest.raises(ValueError, match="K in at least the bits of V"):
        KVCache(config, key="int4", value="int8", guard=True)
    assert KVCache(config, key="int4", value="int8").value == "int8"


def test_formats_by_name():
    config = models.CONFIGS["llama"]()
    assert (KVCache(config).key, KVCache(config, "int4").value, KVCache(config, key="int4").value) == (
        "int8", "int4", "int4",
    )  # fmt: skip
    cache = KVCache(config, "int8", value="int4", residual_length=32)
    assert (cache.key, cache.value) == ("int8", "int4") and cache.layers[0].options["residual_length"] == 32
    assert (KVCache(config, "int8", key="int4").key, KVCache(config, "int8", key="int4").value) == ("int4", "int8")
    with pytest.raises(ValueError, match="expected a format, or key and value, got 'int4', 'int8', 'int8'"):
        KVCache(config, "int4", key="int8", value="int8")
    for make in (H2OCache, StreamingLLMCache):
        found = [make(config, 8), make(config, 8, key="int8", value="int4"), make(config, 8, value="int8")]
        assert [(x.key, x.value) for x in found] == [("raw", "raw"), ("int8", "int4"), ("raw", "int8")]
        with pytest.raises(ValueError, match="or key and value, got"):
            make(config, 8, key_or_format="int4", key="int8", value="int8")


# ---------------------------------------------------------------- figures


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral"])
def test_stats(name):
    m = select(model(name), "kvcompress")
    cache = cache_of(m, "int8")
    assert cache.stats()["bytes"] == cache.stats()["parts"]["tables"] == 0 and "seen 0" in repr(cache)
    tokens, mask = left_pads(ids(2, 300), [0, 40])
    logits_of(m, cache, [300], tokens, mask)
    s = cache.stats()
    assert s["seen"] == 300 and s["kept"] == (560 if name != "mistral" else 2 * 48)  # slots 252 to 299: whole pages
    pool = cache.pool.stats()
    other = sum(
        x.untyped_storage().nbytes() for layer in cache.layers if not hasattr(layer, "store")
        for x in (layer.keys, layer.values)
    )  # fmt: skip
    assert s["parts"]["other"] == other
    assert s["bytes"] == pool["resident"] + s["parts"]["tables"] + other == sum(s["parts"].values())
    assert s["bytes_per_token"] == s["bytes"] / s["kept"]
    if name == "llama":
        assert s["ratio"] == pytest.approx(560 * 2 * 2 * 2 * 32 * 4 / s["bytes"])
        assert pool["used"] == s["parts"]["sealed"] + s["parts"]["open"] + s["parts"]["sinks"]
    for part in ("KVCache", "int8", "seen 300", f"{s['bytes']:,} bytes"):
        assert part in repr(cache)
    assert repr(cache.layers[-1])


def test_int8_is_small():
    """Long enough for the open page to be negligible: 8 bits instead of 32, plus scales."""
    m = select(model("llama"), "kvcompress")
    cache = KVCache(m.config, "int8")
    x = torch.randn(1, 2, 8000, 32)
    for layer in range(2):
        cache.layers[layer].update(x, x)
    assert cache.stats()["ratio"] > 3.5


# ---------------------------------------------------------------- stand-ins


def staged(key="raw", seen=20, T=3):
    m = select(model("llama"), "kvcompress")
    cache = cache_of(m, key)
    logits_of(m, cache, [seen], ids(1, seen))
    k, v = torch.randn(1, 2, T, 32), torch.randn(1, 2, T, 32)
    return cache, k, v, cache.update(k, v, 0)


def test_lazy_kv_becomes_dense_when_used():
    cache, k, v, (keys, values) = staged()
    old = cache.layers[1].keys  # another layer, with nothing staged
    assert isinstance(keys, LazyKV) and keys.shape == (1, 2, 23, 32) and "LazyKV" in repr(keys)
    assert cache.layers[0].store.seen == 20 and cache.get_seq_length() == 23
    dense = keys * 1
    assert type(dense) is torch.Tensor and torch.equal(dense[:, :, 20:], k) and old.shape[2] == 20
    assert cache.layers[0].store.seen == 23 and cache.layers[0].staged is None
    assert torch.equal(values + 0, torch.cat([cache.layers[0].values[:, :, :20], v], 2))
    assert cache.layers[0].store.seen == 23


@pytest.mark.parametrize("touch", [
    lambda c: c.update(torch.ones(1, 2, 1, 32), torch.ones(1, 2, 1, 32), 0), lambda c: c.crop(0),
    lambda c: c.stats(), lambda c: repr(c), lambda c: copy.deepcopy(c),
    lambda c: c.reorder_cache(torch.tensor([0])),
    lambda c: c.layers[0].keys,
])  # fmt: skip
def test_staged_tokens_are_committed_once(touch):
    cache, k, _, (keys, _) = staged()
    touch(cache)
    assert cache.layers[0].store.seen == 23
    assert torch.equal(cache.layers[0].store.dense()[0][:, :, 20:23], k)
    if cache.layers[0].stamp == keys.block.stamp:
        assert torch.equal((keys * 1)[:, :, 20:], k)
    else:  # crop, reorder: the layer no longer has the contents that the stand-in represents
        with pytest.raises(RuntimeError, match="latest update"):
            keys * 1
    assert cache.layers[0].store.seen == 23


def test_reset_drops_what_is_staged():
    cache, *_ = staged()
    cache.reset()
    assert cache.get_seq_length() == 0


def test_a_model_that_touches_keys_still_works():
    """Code between update and attention (here a float64 round trip) gets dense tensors; logits do not change."""
    from kvcompress.hf.attention import kvcompress_attention_forward as forward

    m = select(model("llama"), "kvcompress")
    want = torch.cat(logits_of(m, cache_of(m, "raw"), SPLIT), 1)

    def meddling(module, query, key, value, *args, **kwargs):
        return forward(module, query, key.double().float(), value.double().float(), *args, **kwargs)

    hf.AttentionInterface.register("kvcompress", meddling)
    try:
        got = torch.cat(logits_of(m, cache_of(m, "raw"), SPLIT), 1)
    finally:
        hf.AttentionInterface.register("kvcompress", forward)
    assert error(got, want) < 1e-5


def test_keys_shared_between_layers():
    """A later layer may attend to the K and V of an earlier one: the stand-in is valid until the layer changes."""
    from kvcompress.hf.attention import kvcompress_attention_forward as forward

    cache, _, _, (keys, values) = staged()
    module = torch.nn.Module().eval()
    q = torch.randn(1, 4, 3, 32)
    first, _ = forward(module, q, keys, values, None)
    again, _ = forward(module, q, keys, values, None)
    assert error(again, first) < 1e-5 and cache.layers[0].store.seen == 23


def test_a_first_call_without_memory_leaves_windows_whole():
    """A layer with a window frees pages after a pass only, also if its first call found no memory for max_length."""
    config = hf.MistralConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                              sliding_window=33)  # fmt: skip
    config._attn_implementation = "sdpa"
    cache = KVCache(config, "int8", page_size=32, sinks=0, max_length=1 << 33)
    k = torch.randn(1, 2, 200, 16)
    for layer in range(2):
        with pytest.raises(ValueError, match="expected 0 to 2\\^31 tokens"):
            cache.update(k, k, layer)
        cache.update(k, k, layer)
    cache.update(k, k, 0)
    with pytest.raises(ValueError, match="finite"):
        cache.update(k * float("nan"), k, 1)
    assert [layer.get_seq_length() for layer in cache.layers] == [200, 200]
