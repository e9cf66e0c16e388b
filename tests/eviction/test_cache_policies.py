"""Policies in a KVCache under transformers, compared with the papers' formulas in a separate attention function."""

import copy
import resource
from pathlib import Path

import evict_reference as paper
import pytest
import torch
import transformers as hf
from evict_reference import Row
from generation import PAGE, cache_of, check_same, generate, logits_of, select
from models import ids, left_pads, model
from test_undo import poison

import kvcompress
from kvcompress import KVCache, PagedKV, patch_generate, policies
from kvcompress.eviction.eviction import Eviction
from kvcompress.policies import H2O, TOVA, AdaKV, CriticalKV, ExpectedAttention, KeyDiff, KNorm, SnapKV, StreamingLLM


def resident():
    """Resident memory of the process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


CASES = {
    "h2o": (H2O(48), paper.h2o(48), 48),
    "h2o shared": (H2O(0.3, heads="shared"), paper.h2o(0.3, shared=True), 0.3),
    "streaming": (StreamingLLM(4, 30), paper.streaming(4, 30), 34),
    "tova": (TOVA(40), paper.tova(40), 40),
    "snapkv": (SnapKV(40, 8), paper.snapkv(40, 8, 5), 40),
    "keydiff": (KeyDiff(40), paper.keydiff(40), 40),
    "expected": (ExpectedAttention(40, queries=16, future=32), paper.expected(40, 16, 32), 40),
    "adakv": (AdaKV(H2O(40, 10)), paper.adakv(40, 0.2, lambda r: r.accumulated / (r.n - torch.arange(r.n)), 4, 10), 40),
}
LENGTHS = [40, 33, 1, 1, 1, 26, *[1] * 20]


def as_the_paper_says(m, rule, budget, tokens, lengths):
    """Logits of one row without padding, with the attention of every layer computed by a Row."""
    rows = {}

    def attention(module, query, key, value, mask, scaling=None, **options):
        T, layer = query.shape[2], module.layer_idx
        if layer not in rows:
            limit = (lambda r: budget) if isinstance(budget, int) else (lambda r: -(-budget * r.n // 1))
            rows[layer] = Row(key.shape[1], query.shape[1] // key.shape[1], rule, limit)
        out = rows[layer].call(query[0], key[0, :, -T:], value[0, :, -T:])
        return out.to(query.dtype).transpose(0, 1)[None], None

    hf.AttentionInterface.register("paper", attention)
    m.set_attn_implementation("paper")
    return logits_of(m, hf.DynamicCache(config=m.config), lengths, tokens), rows


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("case", CASES)
def test_logits_of_a_padded_batch(case, name):
    policy, rule, budget = CASES[case]
    m = copy.deepcopy(model(name))
    pads = [0, 5, 31]
    tokens, mask = left_pads(ids(3, sum(LENGTHS)), pads)
    cache = cache_of(select(m, "kvcompress"), "raw", policy=policy)
    got = logits_of(m, cache, LENGTHS, tokens, mask)
    for b, p in enumerate(pads):
        want, rows = as_the_paper_says(m, rule, budget, tokens[b : b + 1, p:], [LENGTHS[0] - p, *LENGTHS[1:]])
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g[b : b + 1, -w.shape[1] :], w, rtol=2e-3, atol=2e-3)
        for layer, row in rows.items():
            assert [x.tolist() for x in cache.kept(layer).positions[b]] == [sorted(x) for x in row.kept]
    assert cache.get_seq_length() == sum(LENGTHS)
    size, offset = cache.layers[0].get_mask_sizes(1)
    assert size < 48 + PAGE + 2 and size + offset == sum(LENGTHS) + 1


@pytest.mark.parametrize("policy", [H2O(40), StreamingLLM(4, 36), SnapKV(40, 8), AdaKV(KNorm(40))], ids=repr)
def test_ways_to_generate(policy):
    """Beams, chunks, rejected drafts, turns: no token is lost, and a copy continues independently."""
    m = select(copy.deepcopy(model("llama")), "kvcompress")
    for options in ({"num_beams": 3}, {"prefill_chunk_size": 11}, {"prompt_lookup_num_tokens": 4}, {}):
        cache = cache_of(m, "int8", policy=policy)
        tokens = ids(1, 12).repeat(1, 8)
        first = generate(m, tokens, cache, max_new_tokens=40, **options)
        twin = copy.deepcopy(cache)
        if "num_beams" in options:
            continue
        more = torch.cat([first.sequences, ids(1, 30, 1)], 1)
        a, b = generate(m, more, cache), generate(m, more, twin)
        assert torch.equal(a.sequences, b.sequences)
        assert cache.layers[0].store.page_store.kept_tokens < 40 + 2 * PAGE
        cache.pool.check()


@pytest.mark.parametrize("policy", [H2O(40), SnapKV(40, 8), AdaKV(KNorm(40))], ids=repr)
def test_a_failed_pass_leaves_no_trace(policy):
    m = select(copy.deepcopy(model("llama")), "kvcompress")
    cache, twin = (cache_of(m, "int8", policy=policy) for _ in range(2))
    for step, T in enumerate((70, 20, *[1] * 20)):
        tokens = ids(2, T, step)
        for failing in (1, 90):
            hook = poison(m)
            with pytest.raises(ValueError, match="NaN"), torch.no_grad():
                m(ids(2, failing, 99), past_key_values=cache)
            hook.remove()
        with torch.no_grad():
            logits = [m(tokens, past_key_values=c).logits for c in (cache, twin)]
        assert torch.equal(*logits), step
        for layer in range(2):
            a, b = cache.kept(layer), twin.kept(layer)
            assert [[x.tolist() for x in r] for r in a.slots] == [[x.tolist() for x in r] for r in b.slots]
            for x, y in zip(a.scores or [], b.scores or [], strict=True):
                assert all(torch.equal(p, q) for p, q in zip(x, y, strict=True))
        assert cache.pool.stats()["used"] == twin.pool.stats()["used"]
    assert cache.layers[0].store.eviction.count == twin.layers[0].store.eviction.count > 1


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("policy", [StreamingLLM(4, 36), KNorm(40)], ids=repr)
def test_other_attention_sees_what_is_kept(policy, implementation):
    m = copy.deepcopy(model("llama"))
    want = logits_of(select(m, "kvcompress"), cache_of(m, "raw", policy=policy), LENGTHS)
    got = logits_of(select(m, implementation), cache_of(m, "raw", policy=policy), LENGTHS)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-3, atol=1e-3)


def test_what_other_attention_cannot_do_is_refused():
    m = select(copy.deepcopy(model("llama")), "sdpa")
    for policy, batch, text in ((H2O(40), 1, "uses attention"), (KNorm(40), 2, "in a batch")):
        with pytest.raises(ValueError, match=f"{text}.*enable"):
            generate(m, ids(batch, 20), cache_of(m, policy=policy))


@pytest.mark.parametrize("implementation,T", [("sdpa", 2), ("eager", 1)])
def test_uneven_layers_need_kvcompress_attention(implementation, T):
    """Transformers makes one mask for all layers, so other attention raises. Nothing is lost: our attention continues
    with the same cache."""
    m = select(copy.deepcopy(model("llama")), implementation)
    cache = cache_of(m, "raw", policy=policies.PyramidBudget(KNorm(40, slack=1), 3))
    tokens = ids(1, 64)
    with torch.no_grad():
        m(tokens[:, :60], past_key_values=cache)
        twin = copy.deepcopy(cache)
        with pytest.raises(ValueError, match="layers that keep the same number of tokens.*enable"):
            m(tokens[:, 60 : 60 + T], past_key_values=cache)
        assert [layer.store.seen for layer in cache.layers] == [60] * len(cache.layers)
        select(m, "kvcompress")
        got, want = (m(tokens[:, 60:], past_key_values=x).logits for x in (cache, twin))
    assert torch.equal(got, want)


def test_one_query_at_a_time_needs_no_mask():
    """With sdpa, layers may then keep different numbers of tokens."""
    m = copy.deepcopy(model("llama"))
    policy, lengths = policies.PyramidBudget(KNorm(40, slack=1), 3), [60, *[1] * 9]
    want = logits_of(select(m, "kvcompress"), cache_of(m, "raw", policy=policy), lengths)
    got = logits_of(select(m, "sdpa"), cache_of(m, "raw", policy=policy), lengths)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-3, atol=1e-3)


def test_drafts_with_per_head_policies_need_kvcompress_attention():
    """Except for a single head in a single layer: after a crop, heads have different numbers of tokens."""
    config = copy.deepcopy(model("llama").config)
    config._attn_implementation, config.num_key_value_heads = "sdpa", 1
    config.num_hidden_layers = 2
    with pytest.raises(ValueError, match="for drafts with KNorm.*heads and layers.*enable"):
        kvcompress.KVCache(config, policy=KNorm(40)).activate_past_recording()
    config.num_hidden_layers = 1
    kvcompress.KVCache(config, policy=KNorm(40)).activate_past_recording()


def test_cross_attention_layers_are_unchanged():
    """Without a policy: cross-attention layers keep their initial contents, next to layers that grow."""
    cache = kvcompress.KVCache(select(copy.deepcopy(model("llama")), "sdpa").config, "raw")
    wide, narrow = torch.randn(1, 2, 9, 16), torch.randn(1, 2, 4, 16)
    assert cache.update(wide, wide, 0)[0].shape[2] == 9
    assert torch.equal(cache.update(narrow, narrow, 1)[0], narrow)


def test_weights_of_evicted_tokens_are_zero():
    m = select(copy.deepcopy(model("llama")), "kvcompress")
    tokens, mask = left_pads(ids(2, 101), [0, 9])
    caches = [cache_of(m, "raw", policy=H2O(40)) for _ in range(2)]
    with torch.no_grad():
        for cache in caches:
            m(tokens[:, :100], attention_mask=mask[:, :100], past_key_values=cache)
        kept = caches[0].kept(0)
        plain, seen = (
            m(tokens[:, 100:], attention_mask=mask, past_key_values=cache, output_attentions=wanted)
            for cache, wanted in zip(caches, (False, True), strict=True)
        )
    torch.testing.assert_close(plain.logits, seen.logits, rtol=1e-3, atol=1e-3)
    weights = seen.attentions[0]
    assert weights.shape == (2, 4, 1, 101)
    for b in range(2):
        for h in range(4):
            assert set(weights[b, h, 0].nonzero().flatten().tolist()) <= {*kept.slots[b][h // 2].tolist(), 100}


def test_the_peak_falls_when_the_prompt_comes_in_chunks(monkeypatch):
    m, seen, run = select(copy.deepcopy(model("llama")), "kvcompress"), [], Eviction.evict_over_budget

    def record(self):
        seen.append(self.store.pool.stats()["used"])
        return run(self)

    monkeypatch.setattr(Eviction, "evict_over_budget", record)
    peak = {}
    for chunk in (None, 64):
        generate(m, ids(1, 900), cache_of(m, "int8", policy=H2O(64)), max_new_tokens=2, prefill_chunk_size=chunk)
        peak[chunk] = max(seen)
        seen.clear()
    plain = cache_of(m, "int8")
    generate(m, ids(1, 900), plain, max_new_tokens=2)
    assert peak[64] < 0.6 * peak[None] < 0.6 * 0.6 * plain.pool.stats()["used"]


def test_policies_by_layer():
    m = select(copy.deepcopy(model("llama")), "kvcompress")
    cache = cache_of(
        m, "int8", policy=policies.PyramidBudget(H2O(60), 2), per_layer={1: {"policy": StreamingLLM(4, 20)}}
    )
    generate(m, ids(1, 200), cache, max_new_tokens=1)
    sizes = [len(cache.kept(i).slots[0][0]) for i in range(2)]
    assert 80 <= sizes[0] < 80 + PAGE and 24 <= sizes[1] < 24 + PAGE
    with pytest.raises(ValueError, match="kept: expected a paged layer"):
        cache_of(m).kept(0)


def test_caches_by_the_names_of_tutorials():
    m = select(copy.deepcopy(model("llama")), "kvcompress")
    options = {"page_size": PAGE}
    for cache, kept in (
        (kvcompress.H2OCache(m.config, 48, 16, **options), 48),
        (kvcompress.StreamingLLMCache(m.config, 4, 40, **options), 44),
        (kvcompress.KVCache(m.config, policy=policies.SlidingWindow(40), **options), 40),
        (kvcompress.KVCache(m.config, "int8", policy=H2O(64, 32, 4), residual_length=32, **options), 64),
    ):  # fmt: skip
        generate(m, ids(1, 200), cache, max_new_tokens=PAGE + 1)
        assert kept <= len(cache.kept(0).slots[0][0]) < kept + PAGE


@pytest.mark.parametrize("policy", [StreamingLLM(4, 252), H2O(256)], ids=repr)
def test_memory_is_constant_over_twenty_thousand_tokens(policy):
    """Bytes, pages and resident memory, for a single layer."""
    kv = PagedKV(2, 32, key="int8", policy=policy)
    held = []
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, 2, 32, generator=generator) for h in (4, 2, 2))
    for step in range(10_000):
        kv.attend(q, k + step % 7, v)
        if step % 320 == 0:
            s = kv.page_store.table.stats()
            held.append((kv.stats()["bytes"], s["sealed_pages"] + s["open_pages"], resident()))
    assert kv.seen == 20_000
    byte, pages, rss = zip(*held[3:], strict=True)
    assert max(byte) <= 1.1 * min(byte) + 4096 and max(pages) - min(pages) <= 2 * 2 and min(rss[-5:]) - rss[0] < 4 << 20


def test_a_policy_is_bound_to_the_model():
    m = select(copy.deepcopy(model("llama")), "kvcompress")
    policy = policies.Chain(CriticalKV(H2O(60)), KNorm(40))
    with pytest.raises(ValueError, match=r"2 layers, got 0: call policy.bind\(model\)"):
        generate(m, ids(1, 200), cache_of(m, policy=policy), max_new_tokens=1)
    cache = cache_of(m, policy=policy.bind(m))
    generate(m, ids(1, 200), cache, max_new_tokens=1)
    for x, layer in zip(policy.policies[0].outputs, m.model.layers, strict=True):
        assert x.data_ptr() == layer.self_attn.o_proj.weight.data_ptr()
    assert 40 <= len(cache.kept(1).slots[0][0]) < 40 + PAGE
    again = policies.from_dict(policy.to_dict())
    assert again.policies[0].outputs == [] and again.policies[0].first == 0.5
    with patch_generate(m, policy=policy, page_size=PAGE) as patch:  # creates a policy per call
        m.generate(ids(1, 200), max_new_tokens=1)
    assert patch.calls == 1


def test_the_policy_of_a_loaded_cache_is_bound(tmp_path):
    m = select(copy.deepcopy(model("llama")), "kvcompress")
    cache = cache_of(m, policy=CriticalKV(H2O(60)).bind(m))
    generate(m, ids(1, 200), cache, max_new_tokens=1)
    cache.save(tmp_path / "a.kvc")
    more = torch.cat([ids(1, 200), ids(1, 100, seed=3)], 1)
    with pytest.raises(ValueError, match=r"cache.bind\(model\) for a loaded cache"):
        generate(m, more, KVCache.load(tmp_path / "a.kvc", m.config), max_new_tokens=1)
    loaded = KVCache.load(tmp_path / "a.kvc", m.config)
    assert loaded.bind(m) is loaded
    check_same([generate(m, more, loaded)], [generate(m, more, cache)])


def test_positions_in_the_cache_need_plain_rotary_positions():
    policy = StreamingLLM(4, 40, positions="cache")
    m = select(copy.deepcopy(model("llama")), "kvcompress")
    a, b = (cache_of(m, "raw", policy=p) for p in (policy, StreamingLLM(4, 40)))
    first, second = (torch.cat(logits_of(m, c, [50, *[1] * 20]), 1) for c in (a, b))
    torch.testing.assert_close(first[:, :51], second[:, :51])
    assert not torch.allclose(first[:, -1], second[:, -1], atol=1e-3)
    longer = copy.deepcopy(m.config)
    longer.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    for config, text in ((longer, "got llama with dynamic"), (hf.GPT2Config(), "got gpt2 with none")):
        with pytest.raises(ValueError, match=text):
            kvcompress.KVCache(config, policy=policy)
