"""Masks and attention that the fused op does not support, other caches with our backend, and enable()."""

import copy

import models
import pytest
import torch
import transformers as hf
from generation import PAGE, cache_of, check_same, error, generate, greedy, logits_of, reference, select
from models import ids, left_pads, model

from kvcompress import KVCache, enable


def dense_twin(call):
    """`call(model, cache)` with eager attention and DynamicCache, and with kvcompress and raw pages: both results."""
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
    """Tokens that were real when stored and are masked later: computed densely, as in transformers."""
    mask = torch.ones(2, 45, dtype=torch.long)
    mask[0, 10:20] = 0

    def call(m, cache):
        with torch.no_grad():
            m(ids(2, 40), past_key_values=cache)
            return m(ids(2, 5, seed=1), attention_mask=mask, past_key_values=cache).logits

    got, want = dense_twin(call)
    assert error(got, want) < 1e-5


def test_what_a_mask_says_is_remembered_for_one_length_of_the_cache():
    tokens, mask = left_pads(ids(2, 30), [0, 26])
    m = select(model("llama"), "kvcompress")
    cache = cache_of(m, "raw")
    with torch.no_grad():
        m(tokens, attention_mask=mask, past_key_values=cache)
    longer = torch.nn.functional.pad(mask.bool(), (0, 4))  # four more padding tokens
    store = cache.layers[0].store
    for back in (0, 10, 3):
        if back:
            cache.crop(-back)
        own, fits = cache.forward_pass.split_mask(longer, store, longer.shape[1] - store.seen)
        assert fits and own.equal(longer[:, store.seen :])


def test_switching_implementations_midway():
    """Padding stored under sdpa, where no mask is seen, is not attended to under kvcompress."""
    tokens, mask = left_pads(ids(2, 60), [0, 25])

    def call(m, cache):
        implementation = m.config._attn_implementation
        if implementation == "kvcompress":
            m.set_attn_implementation("sdpa")
        logits_of(m, cache, [40], tokens[:, :40], mask[:, :40])
        m.set_attn_implementation(implementation)
        own = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1)[:, 40:]}
        with torch.no_grad():
            return m(tokens[:, 40:], past_key_values=cache, **own).logits

    got, want = dense_twin(call)
    assert error(got, want) < 1e-5


def test_output_attentions_are_those_of_eager_attention():
    def call(m, cache, seen=True):
        with torch.no_grad():
            m(ids(1, 20), past_key_values=cache)
            return m(ids(1, 3, seed=1), past_key_values=cache, output_attentions=seen)

    got, want = dense_twin(call)
    assert error(got.logits, want.logits) < 1e-5
    for a, b in zip(got.attentions, want.attentions, strict=True):
        assert a.shape == b.shape and error(a, b) < 1e-5
    m = select(model("llama"), "kvcompress")
    assert torch.equal(got.logits, call(m, cache_of(m, "raw"), seen=False).logits)


@pytest.mark.parametrize("name", models.CONFIGS)
def test_the_backend_alone_without_our_cache(name):
    """enable() must not change results without a cache, with DynamicCache or with StaticCache."""
    m = select(model(name), "eager")
    tokens, mask = left_pads(ids(3, 40), [0, 11, 30])

    def run():
        for cache in (hf.DynamicCache(config=m.config), hf.StaticCache(config=m.config, max_cache_len=64)):
            yield torch.cat(logits_of(m, cache, [30, 1, 9], tokens, mask), 1)[mask.bool()]
        with torch.no_grad():
            yield m(tokens, attention_mask=mask, use_cache=False).logits[mask.bool()]

    want = list(run())
    m.set_attn_implementation("kvcompress")
    for got, expected in zip(run(), want, strict=True):
        assert error(got, expected) < 1e-5


def test_training_goes_through_torch():
    m = copy.deepcopy(select(model("llama"), "kvcompress")).train()
    m(ids(1, 20), labels=ids(1, 20), use_cache=False).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in m.parameters())


def test_enable_reports(capsys):
    report = enable(model("gemma3"))
    assert report.fused and report.layers == {"sliding_attention": 1, "full_attention": 2}
    assert "fused attention on (1 sliding_attention, 2 full_attention)" in capsys.readouterr().out
    enable(model("llama"), verbose=False)
    assert capsys.readouterr().out == ""
    with pytest.raises(TypeError, match="expected a transformers model"):
        enable(torch.nn.Linear(2, 2))


def test_composite_model_only_its_text_part():
    config = hf.LlavaConfig(
        text_config=models.CONFIGS["llama"](),
        vision_config=hf.CLIPVisionConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=8,
            patch_size=4,
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
    """A cache made from a copy of the config does not see enable(): slower, but correct."""
    want = reference("llama")
    m = select(model("llama"), "eager")
    cache = KVCache(copy.deepcopy(m.config), "raw", page_size=PAGE)
    select(m, "kvcompress")
    check_same(greedy(m, cache), want)
