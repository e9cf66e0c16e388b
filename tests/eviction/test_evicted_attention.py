"""Attention that evicted tokens would receive: the estimate compared with the exact value, on recorded runs of a
model."""

import copy
import functools
import math
from pathlib import Path

import pytest
import torch
from generation import select
from models import ids, model
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

import kvcompress
from kvcompress import PagedKV
from kvcompress.eviction.evicted_attention import Summary
from kvcompress.policies import H2O, AdaKV, KNorm, Random, StreamingLLM, Watch, from_dict

ASSETS = Path(__file__).parents[2] / "assets"
TOKENS, PROMPT = 640, 320


@functools.cache
def recorded(name):
    """q, k, v and scale of every layer of a model on book text."""
    found = {}
    m = AutoModelForCausalLM.from_pretrained(ASSETS / name, dtype=torch.float32).eval()
    text = (ASSETS / "text" / "book.txt").read_text()[20_000:26_000]
    tokens = AutoTokenizer.from_pretrained(ASSETS / name)(text, return_tensors="pt").input_ids[:, :TOKENS]

    def record(module, query, key, value, mask, scaling=None, **options):
        found[module.layer_idx] = query, key, value, scaling
        s = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(2, 3) * scaling
        s = s.masked_fill(torch.ones(s.shape[2:], dtype=torch.bool).triu(1), -math.inf)
        return (s.softmax(-1) @ value.repeat_interleave(query.shape[1] // key.shape[1], 1)).transpose(1, 2), None

    AttentionInterface.register("recording", record)
    m.set_attn_implementation("recording")
    with torch.no_grad():
        m(tokens)
    return list(found.values())


def rank(x):
    return x.argsort().argsort().double()


def run(record, policy):
    """(estimated, exact) evicted_attention at every step after the prompt, float64."""
    q, k, v, scale = record
    H, G = k.shape[1], q.shape[1] // k.shape[1]
    kv = PagedKV(H, k.shape[3], key="raw", page_size=16, policy=Watch(policy))
    kv.attend(q[:, :, :PROMPT], k[:, :, :PROMPT], v[:, :, :PROMPT], scale=scale)
    estimated, exact = [], []
    for t in range(PROMPT, q.shape[2]):
        there = torch.zeros(H, t + 1, dtype=torch.bool)
        for h, slots in enumerate(kv.kept_heads().slots[0]):
            there[h, slots] = True
        there[:, t] = True
        kv.attend(*(x[:, :, t : t + 1] for x in (q, k, v)), scale=scale)
        p = (q[0, :, t, None] @ k[0, :, : t + 1].repeat_interleave(G, 0).transpose(1, 2) * scale)[:, 0].softmax(-1)
        exact.append(float(p.masked_fill(there.repeat_interleave(G, 0), 0).sum(-1).mean()))
        estimated.append(float(kv.evicted_attention()[0]))
    return torch.tensor(estimated), torch.tensor(exact)


@pytest.mark.parametrize("name, policy", [
    ("books-tiny", H2O(96)), ("books-tiny-bias", Random(96, recent=24)),
    ("books-tiny-bias", H2O(96)), ("books-tiny", StreamingLLM(4, 92)),
], ids=repr)  # fmt: skip
def test_within_twice_the_exact_value(name, policy):
    """For nine in ten steps over all layers; and the ranking within a layer."""
    inside, order = [], []
    for record in recorded(name):
        estimated, exact = run(record, policy)
        ratio = estimated / exact
        inside.append(float(((ratio > 0.5) & (ratio < 2)).double().mean()))
        order.append(float(torch.corrcoef(torch.stack([rank(estimated), rank(exact)]))[0, 1]))
    print(name, policy, "within twice:", [round(x, 2) for x in inside], "ranks:", [round(x, 2) for x in order])
    assert sum(inside) / len(inside) >= 0.9, inside
    assert sum(order) / len(order) >= 0.8, order


def test_moments_of_clusters_are_those_of_their_keys():
    """In whatever order the keys come; with one cluster per key the result is exact."""
    keys = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    one, many = Summary.empty(1, 1, 1, 8).clone(), Summary.empty(1, 1, 64, 8).clone()
    for part in keys.split(7):
        one.add(0, 0, part)
        many.add(0, 0, part)
    assert one.count.item() == 50
    torch.testing.assert_close(one.mean[0, 0, 0], keys.mean(0))
    torch.testing.assert_close(one.spread[0, 0, 0] / 50, keys.var(0, correction=0))
    q = torch.randn(1, 2, 8)
    torch.testing.assert_close(many.log_sum(q, 0.3), (q @ keys.T * 0.3).logsumexp(-1))
    assert Summary.empty(1, 1, 4, 8).log_sum(q, 1.0).tolist() == [[-math.inf] * 2]


def test_estimate_in_a_cache():
    """Batches with padding, copies, reordered rows, crops; without evictions the estimate is 0."""
    m = select(copy.deepcopy(model("llama")), "kvcompress")
    policy = Watch(AdaKV(H2O(40)), 8)
    assert from_dict(policy.to_dict()).clusters == 8
    cache = kvcompress.KVCache(m.config, "int8", policy=policy, page_size=16)
    with pytest.raises(ValueError, match="got an empty one"):
        cache.evicted_attention()
    mask = torch.ones(2, 120, dtype=torch.long)
    mask[1, :9] = 0
    with torch.no_grad():
        m(ids(2, 30), attention_mask=mask[:, :30], past_key_values=cache)
        assert cache.evicted_attention().tolist() == [[0.0, 0.0]] * 2
        m(ids(2, 90, 1), attention_mask=mask, past_key_values=cache)
        assert cache.evicted_attention().tolist() == [[0.0, 0.0]] * 2  # its queries have seen everything
        m(ids(2, 1, 2), past_key_values=cache)
    first = cache.evicted_attention()
    assert first.shape == (2, 2) and bool((first > 0.05).all()) and bool((first < 0.95).all())
    twin = copy.deepcopy(cache)
    cache.batch_select_indices(torch.tensor([1, 0]))
    assert torch.equal(cache.evicted_attention(), first[:, [1, 0]])
    with torch.no_grad():
        m(ids(2, 40, 3), past_key_values=cache)
    assert torch.equal(twin.evicted_attention(), first) and not torch.equal(cache.evicted_attention(), first)
    cache.reset()
    assert cache.layers[0].store.evicted_attention().tolist() == [0.0, 0.0]


def test_what_cannot_be_estimated_is_refused():
    with pytest.raises(ValueError, match="policies.Watch"):
        PagedKV(1, 32, policy=KNorm(64)).evicted_attention()
    x = torch.randn(1, 1, 3, 32)
    for options in ({"window": 2}, {"softcap": 5.0}):
        with pytest.raises(ValueError, match="without window and softcap"):
            PagedKV(1, 32, policy=Watch(KNorm(64))).attend(x, x, x, **options)
    with pytest.raises(ValueError, match="at least 1"):
        Watch(KNorm(64), 0)
