"""Rejected drafts have no effect on what a policy knows and keeps."""

import copy

import pytest
import torch
from generation import PAGE, feed, generate
from models import ids, model

from kvcompress import KVCache, enable
from kvcompress.policies import H2O, AdaKV, KNorm, SnapKV

POLICIES = {
    "h2o, nothing goes": lambda: H2O(300, slack=8),
    "h2o": lambda: H2O(40, slack=8),
    "ada": lambda: AdaKV(H2O(40, slack=8)),
    "snapkv": lambda: SnapKV(48, slack=8),
    "knorm": lambda: KNorm(40, slack=8),
}


@pytest.fixture(scope="module")
def llama():
    made = copy.deepcopy(model("llama"))
    enable(made, verbose=False)
    return made


def known(cache):
    """Slots that each layer keeps, and their scores."""
    found = []
    for i, layer in enumerate(cache.layers):
        layer.get_mask_sizes(1)  # runs deferred evictions
        slots = [[x.tolist() for x in row] for row in cache.kept(i)[0]]
        found.append((slots, layer.store.eviction.scores().clone()))
    return found


@pytest.mark.parametrize("fmt", ["raw", "int8", "int4"])
@pytest.mark.parametrize("accepted", [0, 1, 3, 6])
@pytest.mark.parametrize("name", POLICIES)
def test_rejected_drafts_leave_no_trace(llama, name, accepted, fmt):
    drafting, plain = (KVCache(llama.config, fmt, page_size=PAGE, policy=POLICIES[name]()) for _ in range(2))
    for cache in (drafting, plain):
        feed(llama, cache, ids(1, 60))
    drafting.activate_past_recording()
    for i in range(8):
        draft, step = ids(1, 6, 10 + i), ids(1, 1, 90 + i)
        feed(llama, drafting, draft)
        drafting.crop(accepted - 6)
        if accepted:
            feed(llama, plain, draft[:, :accepted])
        got, want = feed(llama, drafting, step), feed(llama, plain, step)
        # drafts within a page change no codes, only rounding
        torch.testing.assert_close(got, want, rtol=1e-2, atol=2e-3)
    for (slots, scores), (same, wanted) in zip(known(drafting), known(plain), strict=True):
        assert slots == same
        n = min(scores.shape[-1], wanted.shape[-1])
        torch.testing.assert_close(scores[..., :n], wanted[..., :n], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["h2o", "ada"])
def test_prompt_lookup_gives_the_tokens_of_greedy(llama, name):
    prompt = ids(1, 12).repeat(1, 4)
    outs = []
    for options in ({}, {"prompt_lookup_num_tokens": 4}):
        cache = KVCache(llama.config, "raw", page_size=PAGE, policy=POLICIES[name]())
        outs.append(generate(llama, prompt, cache, max_new_tokens=40, **options).sequences)
    assert torch.equal(*outs)


def test_copy_and_select_between_draft_and_crop(llama):
    """Between a draft and its crop."""
    cache = KVCache(llama.config, "int8", page_size=PAGE, policy=H2O(40, slack=8))
    feed(llama, cache, ids(2, 60))
    cache.activate_past_recording()
    feed(llama, cache, ids(2, 6, 1))
    twin = copy.deepcopy(cache)
    for x in (cache, twin):
        x.batch_select_indices(torch.tensor([1, 0, 1]))
        x.crop(-4)
    step = torch.full((3, 1), 7)
    assert torch.equal(feed(llama, cache, step), feed(llama, twin, step))
    for (slots, scores), (same, wanted) in zip(known(cache), known(twin), strict=True):
        assert slots == same and torch.equal(scores, wanted)
        assert torch.equal(scores[0], scores[2])


@pytest.mark.parametrize("name", POLICIES)
def test_saving_between_draft_and_crop(llama, tmp_path, name):
    """Saving changes nothing in the cache, and the file goes on as a copy does."""
    saving, plain = (KVCache(llama.config, "int8", page_size=PAGE, policy=POLICIES[name]()) for _ in range(2))
    for cache in (saving, plain):
        feed(llama, cache, ids(1, 60))
        cache.activate_past_recording()
    for i in range(5):
        for cache in (saving, plain):
            feed(llama, cache, ids(1, 6, 10 + i))
        saving.save(tmp_path / "draft.kvc")
        for cache in (saving, plain):
            cache.crop(-4)
        saving.save(tmp_path / "kept.kvc")
        loaded, twin = KVCache.load(tmp_path / "kept.kvc", llama.config), copy.deepcopy(plain)
        for layer, _ in enumerate(known(loaded) and known(twin)):
            (slots, _, scores), (same, _, wanted) = loaded.kept(layer), twin.kept(layer)
            assert all(torch.equal(*x) for x in zip(slots[0], same[0], strict=True))
            assert scores is wanted or all(torch.equal(*x) for x in zip(scores[0], wanted[0], strict=True))
        del twin  # evictions leave shared pages as they are
        step = ids(1, 1, 90 + i)
        assert torch.equal(feed(llama, saving, step), feed(llama, plain, step))
    assert KVCache.load(tmp_path / "draft.kvc", llama.config).get_seq_length() == 60 + 4 * 3 + 6


@pytest.mark.parametrize("name", POLICIES)
def test_suspending_between_draft_and_crop(llama, tmp_path, name):
    """A cache suspended to a file while drafts may be removed goes on as one that was not suspended."""
    moved, plain = (KVCache(llama.config, "int8", page_size=PAGE, policy=POLICIES[name]()) for _ in range(2))
    for cache in (moved, plain):
        feed(llama, cache, ids(1, 60))
        cache.activate_past_recording()
    for i in range(5):
        for cache in (moved, plain):
            feed(llama, cache, ids(1, 6, 10 + i))
        for path in (tmp_path / "a.kvc", None):
            moved.suspend(path)
            moved.resume()
        for cache in (moved, plain):
            cache.crop(-4)
        step = ids(1, 1, 90 + i)
        assert torch.equal(feed(llama, moved, step), feed(llama, plain, step))
    for (slots, scores), (same, wanted) in zip(known(moved), known(plain), strict=True):
        assert slots == same and torch.equal(scores, wanted)
