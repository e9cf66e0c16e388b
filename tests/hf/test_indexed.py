"""Models whose indexer selects the tokens to attend to (DeepSeek-V3.2, GLM-5): supported while it selects all
tokens."""

import copy
from functools import lru_cache

import pytest
import torch
import transformers as hf
from families import MLA, some
from generation import cache_of, check_same, feed, generate
from models import ids, left_pads
from shadow import shadow

from kvcompress import H2O, TOVA, KVCache, StreamingLLM, doctor, enable
from kvcompress.hf.indexed_layer import IndexedPagedLayer

TOPK = 96
INDEXER = {
    "index_n_heads": 2, "index_head_dim": 32, "index_topk": TOPK, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip
KINDS = {"deepseek_v32": "DeepseekV32Config", "glm_moe_dsa": "GlmMoeDsaConfig"}


@lru_cache
def made(name):
    torch.manual_seed(7)
    config = getattr(hf, KINDS[name])(**some(**MLA, num_hidden_layers=3), **INDEXER)
    return hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()


def build(name):
    return copy.deepcopy(made(name))


@pytest.mark.parametrize("attention", ["kvcompress", "sdpa", "eager"])
@pytest.mark.parametrize("name", KINDS)
def test_the_same_tokens_and_logits_up_to_the_last_slot(name, attention):
    m = build(name)
    tokens, mask = left_pads(ids(2, 60), [0, 9])
    new = TOPK + 1 - 60  # the last one is not stored
    want = generate(m, tokens, hf.DynamicCache(config=m.config), mask, max_new_tokens=new)
    calls = ids(2, TOPK)
    with torch.no_grad():
        logits = m(calls).logits
    if attention == "kvcompress":
        assert enable(m, verbose=False).fused
    else:
        m.set_attn_implementation(attention)
    cache = cache_of(m, "raw")
    check_same([generate(m, tokens, cache, mask, max_new_tokens=new)], [want])
    assert cache.get_seq_length() == TOPK and all(type(x) is IndexedPagedLayer for x in cache.layers)
    cache = cache_of(m, "raw")
    got = torch.cat([feed(m, cache, calls[:, a:b]) for a, b in ((0, 50), (50, 51), (51, 90), (90, TOPK))], 1)
    assert (got - logits).abs().max() < 1e-4


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_the_first_slot_at_which_the_model_would_choose_is_an_error(name, fused):
    m = build(name)
    if fused:
        enable(m, verbose=False)
    cache = cache_of(m, "int8")
    feed(m, cache, ids(2, TOPK - 1))
    before = [x.clone() for x in (cache.layers[1].keys, cache.layers[1].values)]
    for T in (2, 40):
        with pytest.raises(ValueError, match=rf"at most {TOPK} slots, the config.s index_topk, got {TOPK - 1 + T}: "):
            feed(m, cache, ids(2, T))
        assert [x.get_seq_length() for x in cache.layers] == [TOPK - 1] * 3
    assert torch.equal(cache.layers[1].keys, before[0]) and torch.equal(cache.layers[1].values, before[1])
    feed(m, cache, ids(2, 1))
    assert cache.get_seq_length() == TOPK


@pytest.mark.parametrize("key", ["int8", "int4"])
def test_pages_hold_latents_once_and_steps_read_them(key):
    m = build("deepseek_v32")
    enable(m, verbose=False)
    cache = cache_of(m, key, sinks=0)
    with shadow() as errors:
        generate(m, ids(2, 80), cache, max_new_tokens=16)
    assert len(errors) >= 16 and max(errors) < 1e-3
    assert all(x.store.page_store.latent for x in cache.layers)
    theirs = 2 * TOPK * 3 * (64 + 16 + 32) * 4  # including the indexer's keys
    assert cache.stats()["bytes"] < (0.6 if key == "int8" else 0.5) * theirs


@pytest.mark.parametrize("policy", [H2O(48), TOVA(48)])
def test_policies(policy):
    m = build("glm_moe_dsa")
    enable(m, verbose=False)
    cache = cache_of(m, "raw", policy=policy)
    generate(m, ids(2, 70), cache, max_new_tokens=26)
    assert cache.stats()["kept"] < 2 * 80
    with pytest.raises(ValueError, match="at most 96 slots"):
        feed(m, cache, ids(2, 2))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_policies_without_fused_attention(attention):
    """Tokens that the first pass evicts at once still count for the indexer."""
    m = build("deepseek_v32")
    m.set_attn_implementation(attention)
    cache = cache_of(m, "raw", policy=StreamingLLM(4, 20))
    feed(m, cache, ids(1, 60))
    feed(m, cache, ids(1, 1))
    assert cache.get_seq_length() == 61 and cache.stats()["kept"] < 40


def test_too_many_slots_of_another_cache():
    m = build("deepseek_v32")
    source = hf.DynamicCache(config=m.config)
    feed(m, source, ids(1, TOPK + 4))
    with pytest.raises(ValueError, match=f"at most {TOPK} slots"):
        KVCache.from_cache(source, m.config, "int8")


def test_doctor_and_enable_say_what_is_not_served():
    m = build("deepseek_v32")
    report = enable(m, verbose=False)
    assert f"3 of 3 layers select tokens with an indexer: supported up to {TOPK} slots (index_topk)" in str(report)
    rows = doctor(m, "int4", verbose=False).rows
    assert {(r.attention, r.cache) for r in rows} == {("fused", f"paged int4/int8, up to {TOPK} slots")}
    assert all(f"ValueError from slot {TOPK} on" in r.why for r in rows)


def test_other_ways_to_change_a_cache(tmp_path):
    m = build("glm_moe_dsa")
    enable(m, verbose=False)
    tokens = ids(2, 70)
    want = generate(m, tokens, cache_of(m, "raw"))
    cache = cache_of(m, "raw")
    feed(m, cache, tokens[:, :60])
    feed(m, cache, ids(2, 5, seed=3))
    cache.crop(-5)
    cache.save(tmp_path / "a.kvc")
    for one in (copy.deepcopy(cache), KVCache.load(tmp_path / "a.kvc", m.config)):
        check_same([generate(m, tokens, one)], [want])
    dynamic = hf.DynamicCache(config=m.config)
    feed(m, dynamic, tokens[:, :60])
    ours = KVCache.from_cache(dynamic, m.config, "raw", page_size=16)
    check_same([generate(m, tokens, ours)], [generate(m, tokens, hf.DynamicCache(config=m.config))])
    with pytest.raises(ValueError, match="to_dynamic_cache: expected a model without an indexer"):
        ours.to_dynamic_cache()


@pytest.mark.parametrize("name", KINDS)
def test_other_caches_go_on_as_before(name):
    """Beyond the indexer's limit, for a model after `enable`: the results of eager attention."""
    m = build(name)
    tokens, mask = left_pads(ids(2, TOPK + 40), [0, 9])
    calls = ids(2, TOPK + 60)
    want = generate(m, tokens, hf.DynamicCache(config=m.config), mask)
    n = calls.shape[1]
    added = torch.full((n, n), torch.finfo(torch.float32).min).triu(1)[None, None]  # a custom mask
    with torch.no_grad():
        logits = [m(calls, attention_mask=x).logits for x in (None, added)]
        enable(m, verbose=False)
        got = [m(calls, attention_mask=x).logits for x in (None, added)]
    assert max((x - y).abs().max() for x, y in zip(got, logits, strict=True)) < 1e-4
    check_same([generate(m, tokens, hf.DynamicCache(config=m.config), mask)], [want])
    fixed = KVCache(m.config, "int8", max_length=TOPK + 60)  # layers of fixed length remain transformers' own
    static = generate(m, tokens, hf.StaticCache(m.config, max_cache_len=TOPK + 60), mask)
    check_same([generate(m, tokens, fixed, mask)], [static])
