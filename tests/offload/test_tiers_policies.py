"""Tiers with a policy: kept tokens, their scores and the logits are identical to those of the same cache without
tiers."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from generation import PAGE as P
from generation import feed
from models import ids
from test_tiers import Rough

from kvcompress import KVCache, Tiers, policies
from kvcompress.store.serialize import LOST

CALLS = [90, 1, 30, 1, 60, 1, 1, 40, 1]
POLICIES = {
    "StreamingLLM": policies.StreamingLLM(4, 60),
    "StreamingLLM, moved": policies.StreamingLLM(4, 60, positions="cache"),
    "SlidingWindow": policies.SlidingWindow(64),
    "H2O": policies.H2O(budget=64),
    "H2O, heads alike": policies.H2O(budget=64, heads="shared"),
    "SnapKV": policies.SnapKV(64, window=8),
    "TOVA": policies.TOVA(64),
    "KNorm": policies.KNorm(64),
    "KeyDiff": policies.KeyDiff(64),
    "ExpectedAttention": policies.ExpectedAttention(64),
    "RKV": policies.RKV(64, window=8),
    "AdaKV": policies.AdaKV(policies.SnapKV(64, window=8)),
    "Demote": policies.Demote(policies.H2O(budget=96), ladder=("int8", "int4"), shares=(0.5, 0.5)),
    "Watch": policies.Watch(policies.H2O(budget=64)),
}


HOW = [("int8", "host"), ("int4", "file"), ("kivi2", "host"), ("raw", "file"), ("int8", "in place")]
FILE = {"host_bytes": 0, "file_bytes": None}


def pair(llama, name, fmt="int8"):
    torch.set_num_threads(1)
    return (KVCache(llama.config, fmt, page_size=P, policy=POLICIES[name]) for _ in range(2))


def same(ours, theirs):
    """Both have the same slots, scores, K and V."""
    for x, y in zip(ours.layers, theirs.layers, strict=True):
        for a, b in zip(x.store.kept_heads(), y.store.kept_heads(), strict=True):
            for one, two in zip(itertools.chain(*(a or [])), itertools.chain(*(b or [])), strict=True):
                assert torch.equal(one, two)
        for a, b in zip(x.store.dense(), y.store.dense(), strict=True):
            assert torch.equal(a, b)


def check_life(llama, name, fmt, where):
    ours, theirs = pair(llama, name, fmt)
    tiers = Tiers(**(FILE if where == "file" else {}))
    ours.use_tiers(tiers, resident=16, unit=1, in_place=where == "in place")
    for step, T in enumerate(CALLS):
        tokens = ids(2, T, step)
        got, want = feed(llama, ours, tokens), feed(llama, theirs, tokens)
        assert torch.equal(got, want) if where != "in place" else torch.allclose(got, want, atol=1e-3), step
    ours.pool.check()
    assert tiers.stats()["fetches"] + tiers.stats()["viewed"] > 10
    evictions = [layer.store.eviction.count for layer in ours.layers]
    assert evictions == [layer.store.eviction.count for layer in theirs.layers] and min(evictions) > 1
    if where != "in place":  # there hidden states differ by rounding
        same(ours, theirs)


@pytest.mark.parametrize("i, name", list(enumerate(POLICIES)))
def test_the_same_to_the_bit(llama, i, name):
    check_life(llama, name, *HOW[i % len(HOW)])


@pytest.mark.full
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("fmt, where", HOW)
def test_every_policy_everywhere(llama, name, fmt, where):
    check_life(llama, name, fmt, where)


@pytest.mark.parametrize("name", ["StreamingLLM", "H2O", "Demote"])
def test_what_changes_the_cache(llama, name, tmp_path):
    """Rejected drafts, crops into offloaded pages, beams, files: as without tiers."""

    def acts(cache):
        yield lambda: cache.crop(-3)
        yield lambda: cache.reorder_cache(torch.tensor([1, 0]))
        yield lambda: cache.crop(-70)
        yield lambda: (cache.suspend(), cache.resume())
        yield lambda: cache.batch_repeat_interleave(2)
        yield lambda: cache.save(tmp_path / "a.kvc")
        yield lambda: [layer.store.evict(layer.store.real() & (torch.arange(layer.store.seen) % 3 > 0)
                                         | (torch.arange(layer.store.seen) < 8)) for layer in cache.layers]  # fmt: skip
        yield lambda: cache.batch_select_indices(torch.tensor([0, 3]))

    ours, theirs = pair(llama, name)
    tiers = Tiers()
    ours.use_tiers(tiers, resident=0, unit=1)
    for step, (a, b) in enumerate(zip(acts(ours), acts(theirs), strict=True)):
        for T in (60, 1, 20):
            tokens = ids(ours.layers[0].store.batch if step else 2, T, step)
            assert torch.equal(feed(llama, ours, tokens), feed(llama, theirs, tokens)), step
        a()
        b()
        ours.pool.check()
        same(ours, theirs)
    assert tiers.stats()["puts"] > 10
    assert torch.equal(feed(llama, copy.deepcopy(ours), ids(2, 30)), feed(llama, theirs, ids(2, 30)))
    twin = copy.deepcopy(ours)
    ours.use_tiers(None)
    assert tiers.stats()["host"] == 0
    same(ours, twin)


@pytest.mark.filterwarnings("ignore:KVCache. pages stay")
@pytest.mark.parametrize("name", ["StreamingLLM", "H2O", "SnapKV"])
def test_delays_and_failures(llama, name):
    """A load that fails during an eviction defers it: the next call starts with it, or raises and changes nothing."""
    _, theirs = pair(llama, name)
    wanted = [(tokens := ids(1, T, step), feed(llama, theirs, tokens)) for step, T in enumerate(CALLS)]
    failures = late = 0
    for seed in range(20):
        tiers = Rough(seed, host_bytes=[0, 20_000, None][seed % 3], file_bytes=None)
        ours, _ = pair(llama, name)
        ours.use_tiers(tiers, resident=[0, 32][seed % 2], unit=1)
        for step, (tokens, logits) in enumerate(wanted):
            while True:
                seen = ours.get_seq_length()
                try:
                    got = feed(llama, ours, tokens)
                    break
                except LOST:
                    failures += 1
                    assert ours.get_seq_length() == seen
            late += any(layer.store.eviction.overdue for layer in ours.layers)
            assert torch.equal(got, logits), (seed, step)
        tiers.on = False
        for layer in ours.layers:
            layer.evict_deferred()
        same(ours, theirs)
        ours.pool.check()
    assert failures > 10 and late
