"""KVCache under transformers: with raw pages the tokens of DynamicCache (eager), with all others what it
stores."""

import copy
from functools import lru_cache

import models
import pytest
import torch
import transformers as hf
from models import ids, left_pads, model

from kvcompress import KVCache, PagedKV, enable
from kvcompress.cache import LazyKV

PAGE = 16
IMPLEMENTATIONS = ("kvcompress", "sdpa", "eager")
REQUIRED = ("llama", "qwen2", "qwen3", "mistral", "gemma2")


def select(m, implementation):
    if implementation == "kvcompress":
        assert enable(m, verbose=False).fused
    else:
        m.set_attn_implementation(implementation)
    return m


def cache_of(m, *args, **options):
    options.setdefault("page_size", PAGE)
    return KVCache(m.config, *args, **options)


def generate(m, tokens, cache, mask=None, **options):
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, **options}
    mask = torch.ones_like(tokens) if mask is None else mask
    with torch.no_grad():
        return m.generate(
            tokens, attention_mask=mask, past_key_values=cache, return_dict_in_generate=True, output_logits=True,
            **options,
        )  # fmt: skip


def greedy(m, cache):
    return [generate(m, ids(2, 45), cache)]


def sampling(m, cache):
    torch.manual_seed(11)
    return [generate(m, ids(2, 45), cache, do_sample=True, temperature=1.3, top_k=0)]


def left_padding(m, cache):
    return [generate(m, *reversed_args(ids(4, 50), [0, 7, 30, 49], cache))]


def beams(m, cache):
    return [generate(m, *reversed_args(ids(2, 40), [0, 9], cache), num_beams=4, num_return_sequences=2)]


def chunked(m, cache):
    return [generate(m, *reversed_args(ids(2, 61), [0, 20], cache), prefill_chunk_size=11)]


def two_turns(m, cache):
    tokens, mask = left_pads(ids(2, 33), [0, 5])
    first = generate(m, tokens, cache, mask)
    more = torch.cat([first.sequences, ids(2, 19, seed=1)], 1)
    mask = torch.cat([mask, torch.ones(2, more.shape[1] - 33, dtype=mask.dtype)], 1)
    return [first, generate(m, more, cache, mask)]


def drafts(m, cache):
    tokens = ids(1, 12).repeat(1, 4)  # repeats itself: prompt lookup finds drafts, and many are rejected
    return [generate(m, tokens, cache, prompt_lookup_num_tokens=4, max_new_tokens=40)]


def reversed_args(tokens, pads, cache):
    tokens, mask = left_pads(tokens, pads)
    return tokens, cache, mask


MODES = {f.__name__: f for f in (greedy, sampling, left_padding, beams, chunked, two_turns)}


@lru_cache
def reference(name, mode):
    m = select(model(name), "eager")
    return MODES.get(mode, drafts)(m, hf.DynamicCache(config=m.config))


def check_same(got, want):
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g.sequences, w.sequences)
        if getattr(w, "sequences_scores", None) is not None:
            torch.testing.assert_close(g.sequences_scores, w.sequences_scores, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(torch.stack(g.logits), torch.stack(w.logits), rtol=1e-3, atol=1e-3)


def runs(names_and_modes, implementations):
    """All (name, mode, implementation) that transformers itself can run."""
    return [
        (name, mode, implementation)
        for name, mode in names_and_modes
        for implementation in implementations
        if implementation != "sdpa" or name not in models.NO_SDPA
    ]


def check_mode(name, mode, implementation):
    want = reference(name, mode)
    m = select(model(name), implementation)
    cache = cache_of(m, "raw")
    check_same(MODES.get(mode, drafts)(m, cache), want)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", REQUIRED)
def test_raw_pages_generate_as_dynamic_cache(name, mode):
    check_mode(name, mode, "kvcompress")


@pytest.mark.parametrize("mode", ["greedy", "left_padding", "beams", "two_turns"])
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_hybrid_models(name, mode):
    check_mode(name, mode, "kvcompress")


@pytest.mark.parametrize("name,mode,implementation", runs([
    ("llama", "greedy"), ("llama", "left_padding"), ("llama", "two_turns"), ("qwen2", "beams"), ("qwen3", "chunked"),
    ("mistral", "two_turns"), ("gemma2", "sampling"), ("gemma2", "left_padding"), ("gemma2", "beams"),
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
    def forbidden(*args):
        raise AssertionError("the cache was decoded")

    m = select(model("llama"), "kvcompress")
    cache = cache_of(m, "int8")
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


# ---------------------------------------------------------------- quantized formats


def error(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm())


def logits_of(m, cache, lengths, tokens=None, mask=None):
    """Teacher-forced logits [B, T, vocab] of consecutive calls of the given lengths."""
    tokens = ids(1, sum(lengths)) if tokens is None else tokens
    out, start = [], 0
    with torch.no_grad():
        for T in lengths:
            own = None if mask is None else mask[:, : start + T]
            positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)[:, start : start + T]
            out.append(m(
                tokens[:, start : start + T], attention_mask=own, position_ids=positions, past_key_values=cache,
            ).logits)  # fmt: skip
            start += T
    return out


SPLIT = [50, 1, 1, 23, 1, 40, 1]


@pytest.mark.parametrize("options", [
    {"key": "int8"}, {"key": "fp8_e4m3"}, {"key": "int4"}, {"key": "int8", "value": "int4"}, {"key": "raw", "value": "int8"},
    {"key": "int8", "residual": 0}, {"key": "int4", "recent": 20}, {"nbits": 4, "residual_length": 16, "sinks": 0},
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


# ---------------------------------------------------------------- life of a cache


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_reset_serves_another_batch(implementation):
    m = select(model("llama"), implementation)
    cache = cache_of(m, "raw")
    generate(m, ids(3, 30), cache)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.stats()["kept"] == 0
    check_same(greedy(m, cache), reference_again(m, implementation, "llama", "greedy"))


def reference_again(m, implementation, name, mode):
    want = reference(name, mode)
    select(m, implementation)
    return want


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
    with pytest.raises(ValueError, match="wanted 0 or a negative"):
        cache.crop(5)


@pytest.mark.parametrize("key", ["raw", "int4"])
def test_deepcopy_reuses_a_prefix(key):
    """A prompt is prefilled once and asked twice; the copies share its pages and leave it as it was."""
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


def test_guard_rails():
    config = models.CONFIGS["llama"]()
    config.num_hidden_layers = 4
    cache = KVCache(config, "int4", guard=True)
    assert [layer.options["key"] for layer in cache.layers] == ["int8", "int4", "int4", "int8"]
    with pytest.raises(ValueError, match="K in at least the bits of V"):
        KVCache(config, key="int4", value="int8", guard=True)
    assert KVCache(config, key="int4", value="int8").value == "int8"


def test_options_and_aliases():
    config = models.CONFIGS["llama"]()
    assert (KVCache(config).key, KVCache(config, nbits=4).value, KVCache(config, key="int4").value) == (
        "int8", "int4", "int4",
    )  # fmt: skip
    cache = KVCache(config, "int8", value="int4", residual_length=32)
    assert (cache.key, cache.value) == ("int8", "int4") and cache.layers[0].options["residual"] == 32
    for bad in ({"nbits": 3}, {"nbits": 4, "key_or_format": "int8"}, {"residual": 1, "residual_length": 2}):
        with pytest.raises(ValueError, match="wanted"):
            KVCache(config, **bad)


# ---------------------------------------------------------------- figures


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral"])
def test_stats(name):
    m = select(model(name), "kvcompress")
    cache = cache_of(m, "int8")
    assert cache.stats()["bytes"] == cache.stats()["parts"]["tables"] == 0 and "seen 0" in repr(cache)
    tokens, mask = left_pads(ids(2, 300), [0, 40])
    logits_of(m, cache, [300], tokens, mask)
    s = cache.stats()
    paged = [layer.store for layer in cache.layers if hasattr(layer, "store")]
    assert s["seen"] == 300 and s["kept"] == (560 if paged else 600)
    pool = cache._shared.pool.stats()
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
    """Long enough for the open page not to matter: 8 bits of 32 and their scales."""
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


def test_a_stand_in_is_dense_for_whoever_asks():
    cache, k, v, (keys, values) = staged()
    old = cache.layers[1].keys  # another layer, nothing staged
    assert isinstance(keys, LazyKV) and keys.shape == (1, 2, 23, 32) and "LazyKV" in repr(keys)
    assert cache.layers[0].store.seen == 20 and cache.get_seq_length() == 23
    dense = keys * 1
    assert type(dense) is torch.Tensor and torch.equal(dense[:, :, 20:], k) and old.shape[2] == 20
    assert cache.layers[0].store.seen == 23 and cache.layers[0].staged is None
    assert torch.equal(values + 0, torch.cat([cache.layers[0].values[:, :, :20], v], 2))
    assert cache.layers[0].store.seen == 23


@pytest.mark.parametrize("touch", [
    lambda c: c.update(torch.ones(1, 2, 1, 32), torch.ones(1, 2, 1, 32), 0), lambda c: c.crop(0), lambda c: c.stats(),
    lambda c: repr(c), lambda c: copy.deepcopy(c), lambda c: c.reorder_cache(torch.tensor([0])),
    lambda c: c.layers[0].keys,
])  # fmt: skip
def test_whoever_comes_first_commits_once(touch):
    cache, k, _, (keys, _) = staged()
    touch(cache)
    assert cache.layers[0].store.seen == 23
    assert torch.equal(cache.layers[0].store.dense()[0][:, :, 20:23], k)
    if cache.layers[0].stamp == keys.block.stamp:
        assert torch.equal((keys * 1)[:, :, 20:], k)
    else:  # crop, reorder: the layer is no longer what the stand-in stands for
        with pytest.raises(RuntimeError, match="latest update"):
            keys * 1
    assert cache.layers[0].store.seen == 23


def test_reset_drops_what_is_staged():
    cache, *_ = staged()
    cache.reset()
    assert cache.get_seq_length() == 0


def test_a_model_that_touches_keys_still_works():
    """Something between update and attention (here: a fp64 round trip) gets dense tensors; logits do not
    change."""
    from kvcompress.attention import kvcompress_attention_forward as forward

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
    """A later layer may attend to the K and V of an earlier one: the stand-in is good until the layer
    changes."""
    from kvcompress.attention import kvcompress_attention_forward as forward

    cache, k, v, (keys, values) = staged()
    module = torch.nn.Module().eval()
    q = torch.randn(1, 4, 3, 32)
    first, _ = forward(module, q, keys, values, None)
    again, _ = forward(module, q, keys, values, None)
    assert error(again, first) < 1e-5 and cache.layers[0].store.seen == 23


# ---------------------------------------------------------------- masks and other attention


def dense_twin(call):
    """`call(model, cache)` under eager with DynamicCache and under kvcompress with raw pages: both
    results."""
    m = select(model("llama"), "eager")
    want = call(m, hf.DynamicCache(config=m.config))
    m = select(m, "kvcompress")
    return call(m, cache_of(m, "raw")), want


def test_4d_mask():
    allowed = torch.rand(1, 1, 30, 30, generator=torch.Generator().manual_seed(2)) > 0.5
    allowed = (allowed | torch.eye(30, dtype=torch.bool)) & torch.ones(30, 30, dtype=torch.bool).tril()
    additive = torch.zeros(1, 1, 30, 30).masked_fill(~allowed, torch.finfo(torch.float32).min)

    def call(m, cache):
        with torch.no_grad():
            first = m(ids(1, 30), attention_mask=additive, past_key_values=cache).logits
            return torch.cat([first, m(ids(1, 4, seed=1), past_key_values=cache).logits], 1)

    got, want = dense_twin(call)
    assert error(got, want) < 1e-5


def test_a_mask_that_hides_stored_tokens():
    """Tokens that were real when stored and are masked later: computed densely, as transformers does."""
    mask = torch.ones(2, 45, dtype=torch.long)
    mask[0, 10:20] = 0

    def call(m, cache):
        with torch.no_grad():
            m(ids(2, 40), past_key_values=cache)
            return m(ids(2, 5, seed=1), attention_mask=mask, past_key_values=cache).logits

    got, want = dense_twin(call)
    assert error(got, want) < 1e-5


def test_switching_implementations_midway():
    """Pads stored under sdpa, where no mask is seen, are not attended to under kvcompress."""
    tokens, mask = left_pads(ids(2, 60), [0, 25])

    def call(m, cache):
        implementation = m.config._attn_implementation
        if implementation == "kvcompress":
            m.set_attn_implementation("sdpa")
        logits_of(m, cache, [40], tokens[:, :40], mask[:, :40])
        m.set_attn_implementation(implementation)
        positions = (mask.cumsum(1) - 1)[:, 40:]
        with torch.no_grad():
            return m(tokens[:, 40:], attention_mask=mask, position_ids=positions, past_key_values=cache).logits

    got, want = dense_twin(call)
    assert error(got, want) < 1e-5


def test_output_attentions_comes_from_the_dense_path():
    def call(m, cache):
        with torch.no_grad():
            m(ids(1, 20), past_key_values=cache)
            return m(ids(1, 3, seed=1), past_key_values=cache, output_attentions=True)

    got, want = dense_twin(call)
    assert error(got.logits, want.logits) < 1e-5
    for a, b in zip(got.attentions, want.attentions, strict=True):
        assert a.shape == b.shape and error(a, b) < 1e-5


@pytest.mark.parametrize("name", models.CONFIGS)
def test_the_backend_alone_without_our_cache(name):
    """enable() must not change a model that runs without a cache, with DynamicCache or with StaticCache."""
    m = select(model(name), "eager")
    tokens, mask = left_pads(ids(3, 40), [0, 11, 30])
    static = {"config": m.config, "max_cache_len": 64}

    def run():
        yield torch.cat(logits_of(m, hf.DynamicCache(config=m.config), [30, 1, 9], tokens, mask), 1)[mask.bool()]
        yield torch.cat(logits_of(m, hf.StaticCache(**static), [30, 1, 9], tokens, mask), 1)[mask.bool()]
        with torch.no_grad():
            yield m(tokens, attention_mask=mask, use_cache=False).logits[mask.bool()]

    want = list(run())
    select(m, "kvcompress")
    for got, expected in zip(run(), want, strict=True):
        assert error(got, expected) < 1e-5


def test_training_goes_through_torch():
    m = copy.deepcopy(select(model("llama"), "kvcompress")).train()
    m(ids(1, 20), labels=ids(1, 20), use_cache=False).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in m.parameters())


def test_enable_reports(capsys):
    report = enable(model("gemma3"))
    assert report.fused and report.layers == {"sliding_attention": 1, "full_attention": 2}
    assert "fused attention on" in capsys.readouterr().out and "1 of 3 layers" in str(report)
    enable(model("llama"), verbose=False)
    assert capsys.readouterr().out == ""
    with pytest.raises(TypeError, match="wanted a transformers model"):
        enable(torch.nn.Linear(2, 2))


def test_composite_model_only_its_text_part():
    config = hf.LlavaConfig(
        text_config=models.CONFIGS["llama"](),
        vision_config=hf.CLIPVisionConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
        ),
        image_token_index=95,
    )  # fmt: skip
    torch.manual_seed(0)
    m = hf.LlavaForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    tokens = ids(1, 30) % 90 + 1
    want = generate(m, tokens, hf.DynamicCache(config=m.config.get_text_config(decoder=True)))
    assert enable(m, verbose=False).fused
    assert m.config.text_config._attn_implementation == "kvcompress"
    assert m.config.vision_config._attn_implementation == "eager"
    cache = cache_of(m, "raw")
    check_same([generate(m, tokens, cache)], [want])
    assert cache.layers[0].store.seen == 49


def test_a_copied_config_degrades_to_dense():
    """A cache made from a copy of the config does not see enable(): slower, and right."""
    m = select(model("llama"), "eager")
    cache = KVCache(copy.deepcopy(m.config), "raw", page_size=PAGE)
    select(m, "kvcompress")
    check_same(greedy(m, cache), reference_again(m, "kvcompress", "llama", "greedy"))
