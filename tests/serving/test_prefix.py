"""PrefixCache: shared pages are byte-identical, and nothing is shared between different salts or models."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from models import ids, model

from kvcompress import _C, KVCache, PrefixCache, SlidingWindow
from kvcompress.policies import H2O

P = 16  # tokens of a page in most tests: prompts can be short
OPTIONS = {"page_size": P}


@torch.inference_mode()
def feed(made, cache, tokens, *chunks):
    """Logits of the last call; tokens [B, T] in calls of the given sizes, the remaining ones in one call."""
    at = cache.get_seq_length()
    out = None
    for n in (*chunks, tokens.shape[1] - at - sum(chunks)):
        out = made(tokens[:, at : at + n], past_key_values=cache).logits if n else out
        at += n
    return out


def group_bytes(store, entry):
    key, value = entry >> 8 & 255, entry & 255
    return store.num_kv_heads * _C.page_bytes(key, value, store.head_dim, store.value_dim, store.page_size)


def pages(cache, tokens):
    """Bytes of the sealed pages of the first `tokens` tokens of all layers."""
    found = []
    for layer in cache.layers:
        store = layer.store
        arena, entries = store.page_store.views()[0].numpy(), store.page_store.table.entries
        for b in range(store.batch):
            for c in range(1, 1 + (tokens - store.sinks) // store.page_size):
                entry = int(entries[b, 0, c])
                at = (entry >> 16) * 64
                found.append((entry & 0xFFFF, arena[at : at + group_bytes(store, entry)].tobytes()))
    return found


@pytest.mark.parametrize("data", [b"", b"abc", b"a" * 55, b"a" * 56, b"a" * 64, bytes(range(256)) * 5])
def test_sha256(data):
    assert _C.sha256(data) == hashlib.sha256(data).digest()


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=400))
def test_sha256_of_anything(data):
    assert _C.sha256(data) == hashlib.sha256(data).digest()


@pytest.mark.parametrize("fmt", ["raw", "int8", "fp8_e4m3", "int4", "kivi2", "nvfp4"])
def test_second_prompt_is_that_of_a_run_with_the_same_calls(llama, fmt):
    """Bytes and logits after a hit equal those of a fresh cache that got the prefix and the rest in two calls."""
    prefix = PrefixCache(llama.config, fmt, **OPTIONS)
    common, first, second = ids(1, 100, 1), ids(1, 30, 2), ids(1, 40, 3)
    one, two = torch.cat([common, first], 1), torch.cat([common, second], 1)
    known = 4 + 6 * P  # of 100 common tokens
    cache = prefix.open(one)
    assert cache.get_seq_length() == 0
    feed(llama, cache, one, known)
    # Of 130 tokens; the newest 16 stay raw in a call of that length.
    assert prefix.commit(cache, one) == (4 + 7 * P if fmt == "raw" else known)
    hit = prefix.open(two)  # 100 common tokens
    assert hit.get_seq_length() == known
    fresh = KVCache(llama.config, fmt, **OPTIONS)
    logits, wanted = feed(llama, hit, two), feed(llama, fresh, two, known)
    assert torch.equal(logits, wanted)
    assert pages(hit, known) == pages(fresh, known) and len(pages(hit, known)) == 12
    for ours, theirs in zip(hit.layers, fresh.layers, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours.store.dense(), theirs.store.dense(), strict=True))
    assert prefix.stats()["saved_tokens"] == known


def test_a_config_is_required():
    for wrong in (_C.Pool(), None, "llama"):
        with pytest.raises(TypeError, match="config: expected a transformers config"):
            PrefixCache(wrong)


def test_pages_are_the_same_memory(llama):
    prefix = PrefixCache(llama.config, "int8", **OPTIONS)
    prompt = ids(1, 120)
    cache = prefix.open(prompt)
    feed(llama, cache, prompt)
    kept = prefix.commit(cache, prompt)
    used = prefix.pool.stats()["used"]
    more = [prefix.open(prompt) for _ in range(5)]
    assert [x.get_seq_length() for x in more] == [kept] * 5
    assert prefix.pool.stats()["used"] == used
    for i, x in enumerate(more):  # each writes its own pages
        feed(llama, x, torch.cat([prompt[:, :kept], ids(1, 20 + i, 9 + i)], 1))
    assert pages(more[0], kept) == pages(cache, kept)
    del cache, more, x
    prefix._prefix.check()
    assert prefix.pool.stats()["used"] == prefix.stats()["bytes"]
    prefix.trim()
    assert prefix.pool.stats()["used"] == 0 and prefix.stats()["entries"] == 0


def committed(llama, *args, extra=(), **options):
    prefix = PrefixCache(llama.config, *args, **{**OPTIONS, **options})
    prompt = ids(1, 100)
    cache = prefix.open(prompt, extra=extra)
    feed(llama, cache, prompt)
    assert prefix.commit(cache, prompt, extra=extra) == 4 + 5 * P
    return prefix, prompt


@pytest.mark.parametrize("weak", [0, 1])
def test_collisions_are_misses(llama, weak):
    """With digests of 0 or 1 bytes, nearly all links collide."""
    prefix = PrefixCache(llama.config, "int8", **OPTIONS)
    prefix._prefix.weaken(weak)
    right = 0
    for seed in range(24):
        prompt = ids(1, 60, seed)
        cache = prefix.open(prompt)
        n = cache.get_seq_length()
        assert n == 0
        feed(llama, cache, prompt)
        prefix.commit(cache, prompt)
        again = prefix.open(prompt)
        n = again.get_seq_length()
        right += n > 0
        if n:
            assert pages(again, n) == pages(cache, n)
    assert prefix.stats()["collisions"] > 0 and 1 <= right <= 24
    prefix._prefix.check()


def test_limits_and_pins(llama):
    prefix = PrefixCache(llama.config, "int8", max_entries=8, **OPTIONS)
    prompts = [ids(1, 60, seed) for seed in range(6)]  # 2 or 3 links each

    def put(prompt, pin=False):
        cache = prefix.open(prompt)
        feed(llama, cache, prompt)
        return prefix.commit(cache, prompt, pin=pin)

    assert put(prompts[0], pin=True) == 36
    for prompt in prompts[1:]:
        put(prompt)
        assert prefix.stats()["entries"] <= 8
        prefix._prefix.check()
    lengths = [prefix.open(prompt).get_seq_length() for prompt in prompts]
    assert lengths == [36, 0, 0, 36, 36, 36] and prefix.stats()["evicted"] == 4
    prefix.trim()
    assert [prefix.open(prompt).get_seq_length() for prompt in prompts] == [36, 0, 0, 0, 0, 0]
    prefix.unpin(prompts[0])
    prefix.trim()
    assert prefix.stats()["entries"] == prefix.stats()["bytes"] == prefix.pool.stats()["used"] == 0
    one = put(prompts[0]) and prefix.stats()["bytes"]
    tight = PrefixCache(llama.config, "int8", max_bytes=one * 2, **OPTIONS)
    for prompt in prompts:
        cache = tight.open(prompt)
        feed(llama, cache, prompt)
        tight.commit(cache, prompt)
        assert tight.stats()["bytes"] <= one * 2
    least = PrefixCache(llama.config, "int8", min_tokens=50, **OPTIONS)
    cache = least.open(prompts[0])
    feed(llama, cache, prompts[0])
    assert least.commit(cache, prompts[0]) == 0 and least.stats()["entries"] == 0
    long = ids(1, 90, 7)
    feed(llama, cache := least.open(long), long)
    assert least.commit(cache, long) > 50
    for known, found in ((45, 0), (80, 4 + 4 * P)):  # of the prompt; prefixes shorter than 50 are not used
        assert least.open(torch.cat([long[:, :known], ids(1, 20, 8)], 1)).get_seq_length() == found


def test_what_it_counts(llama):
    prefix = PrefixCache(llama.config, "int8", **OPTIONS)
    prompt, known = ids(1, 100, 1), 4 + 5 * P
    feed(llama, cache := prefix.open(prompt), prompt)
    assert prefix.commit(cache, prompt) == known
    prefix.open(prompt[:, : 4 + 2 * P + 1])
    prefix.open(ids(1, 50, 2))
    prefix.open(torch.cat([prompt, prompt]))
    stats = prefix.stats()
    saved = 4 + 2 * P + 2 * known
    assert stats["asked"] == 4 and stats["hits"] == 3 and stats["saved_tokens"] == saved
    assert stats["hit_rate"] == saved / (100 + 37 + 50 + 200)
    tables = [layer.store.page_store.table for layer in cache.layers]
    sizes = [sum(group_bytes(cache.layers[0].store, int(t.entries[0, 0, c])) for t in tables) for c in range(1, 6)]
    raw = 2 * 2 * 16 * 4 * 2 * cache.layers[0].store.head_dim  # sinks: layers, heads, a tile, float32, K and V
    assert stats["saved_bytes"] == 3 * raw + sum(sizes[:2]) + 2 * sum(sizes)


@pytest.mark.parametrize("more", [{}, {"max_length": 320}], ids=["", "max_length"])
def test_chat_through_generate(llama, more):
    """Each turn finds the prefix of the previous turns, and gives the answer of a cache that was kept all along."""
    prefix = PrefixCache(llama.config, "raw", **OPTIONS, **more)
    kept = KVCache(llama.config, "raw", **OPTIONS, **more)
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "disable_compile": True}
    text = ids(1, 50, 1)
    held = 0
    for turn in range(4):
        cache = prefix.open(text)
        assert cache.get_seq_length() >= held and (turn == 0) == (cache.get_seq_length() == 0)
        out = llama.generate(text, past_key_values=cache, **options)
        assert torch.equal(out, llama.generate(text, past_key_values=kept, **options))
        held = prefix.commit(cache, out)
        assert held >= out.shape[1] - 1 - 2 * P
        text = torch.cat([out, ids(1, 15, 5 + turn)], 1)
    assert prefix.stats()["hits"] == 3 and prefix.stats()["hit_rate"] > 0.5


def test_batches_and_pads(llama):
    prefix = PrefixCache(llama.config, "int8", **OPTIONS)
    common = ids(1, 70)
    batch = torch.cat([common.expand(3, -1), ids(3, 20, 4)], 1)
    pads = 7
    tokens = torch.cat([torch.zeros(3, pads, dtype=torch.long), batch], 1)
    mask = (tokens != 0).long()
    mask[:, pads:] = 1
    cache = prefix.new()
    with torch.inference_mode():
        llama(tokens, past_key_values=cache, attention_mask=mask)
    assert prefix.commit(cache, tokens) == 68  # of 90 tokens per row; padding does not count
    alone = prefix.open(batch[1:2])
    assert alone.get_seq_length() == 68
    both = prefix.open(torch.cat([batch[:2], batch[1:2]]))
    assert both.get_seq_length() == 68
    logits = feed(llama, both, torch.cat([batch[:2], batch[1:2]]))
    one = feed(llama, alone, batch[1:2])
    assert torch.allclose(logits[1], one[0], atol=1e-4) and torch.allclose(logits[2], one[0], atol=1e-4)
    other = prefix.open(torch.cat([batch[:1], ids(1, 90, 8)]))  # one row is known, the other is not
    assert other.get_seq_length() == 0


def test_evicted_rows_are_not_shared(llama):
    prefix = PrefixCache(llama.config, "int8", policy=SlidingWindow(100), **OPTIONS)
    short, long = ids(1, 60), ids(1, 200)
    for prompt, kept in ((short, 32), (long, 0)):
        cache = prefix.open(prompt)
        feed(llama, cache, prompt)
        assert prefix.commit(cache, prompt) == kept
    cache = prefix.open(short)
    assert cache.get_seq_length() == 32  # this policy keeps no sinks
    feed(llama, cache, torch.cat([short, ids(1, 200, 3)], 1))
    assert cache.stats()["kept"] < 150


@pytest.mark.parametrize("options", [{"residual_length": 0}, {"residual_length": 32}, {"sinks": 0}, {"max_length": 256},
                                     {"spans": [(0, 40, "raw"), (40, None, "int4")]}])  # fmt: skip
def test_options(llama, options):
    prefix = PrefixCache(llama.config, "int8", **{**OPTIONS, **options})
    prompt = ids(1, 120)
    cache = prefix.open(prompt)
    feed(llama, cache, prompt)
    kept = prefix.commit(cache, prompt)
    again = prefix.open(prompt)
    assert kept >= 80 - 4 and again.get_seq_length() == kept
    assert pages(again, kept) == pages(cache, kept)
    logits = feed(llama, again, prompt)
    # Shared pages are sealed whatever `residual_length` is; otherwise the same tokens would still be raw.
    wanted = feed(llama, prefix.new(), prompt, kept)
    assert torch.allclose(logits, wanted, atol=0.2) if options.get("residual_length") else torch.equal(logits, wanted)


def test_failures_leave_everything(llama, fail_at):
    prefix, prompt = committed(llama, "int8")
    stats, used = prefix.stats(), prefix.pool.stats()["used"]
    for n in range(1, 40):
        fail_at(n)
        try:
            cache = prefix.open(prompt)
        except MemoryError:
            pass
        else:
            if n > 30:
                assert cache.get_seq_length() == 84
        finally:
            fail_at(0)
        cache = None
        prefix._prefix.check()
        prefix.pool.check()
        assert prefix.pool.stats()["used"] == used and prefix.stats()["entries"] == stats["entries"]
    cache = prefix.open(prompt)
    longer = torch.cat([prompt, ids(1, 100, 5)], 1)
    feed(llama, cache, longer)
    for n in range(1, 12):
        fail_at(n)
        try:
            prefix.commit(cache, longer)
        except MemoryError:
            pass
        finally:
            fail_at(0)
        prefix._prefix.check()
    assert prefix.commit(cache, longer) == 4 + 11 * P
    assert prefix.open(longer).get_seq_length() == 4 + 11 * P


def test_bad_inputs(llama):
    prefix, prompt = committed(llama, "int8")
    with pytest.raises(TypeError, match="expected a KVCache, got DynamicCache"):
        prefix.commit(hf.DynamicCache(), prompt)
    with pytest.raises(ValueError, match="another pool"):
        prefix.commit(KVCache(llama.config, "int8"), prompt)
    before = prefix.pool.stats(), prefix.stats()["entries"]
    wrong = [torch.zeros(1, 5), [[[1]]], [True, False], [True, 5], [[3, False]], [[1], [2, 3]], ["a"], [2**70]]
    for tokens in (*wrong, np.full(5, 2**63, np.uint64)):
        with pytest.raises(ValueError, match="PrefixCache: input_ids: (expected|expected) integers"):
            prefix.open(tokens)
    assert (prefix.pool.stats(), prefix.stats()["entries"]) == before
    with pytest.raises(ValueError, match="does not use attention"):
        PrefixCache(llama.config, "int8", policy=H2O(budget=64))
    with pytest.raises(ValueError, match="full-attention layers, got a SlidingPaged"):
        PrefixCache(model("gemma3").config)
    with pytest.raises(ValueError, match="got group=, which shards them"):
        PrefixCache(llama.config, group=object())
    with pytest.raises(ValueError, match="span_tokens"):
        PrefixCache(llama.config, spans=[(0, 0.5, "int4"), (0.5, None, "int8")])
    with pytest.raises(ValueError, match="max_bytes"):
        PrefixCache(llama.config, max_bytes=-1)
    cache = prefix.open(prompt)
    with pytest.raises(ValueError, match="rows of tokens"):
        feed(llama, cache, prompt)
        prefix.commit(cache, ids(2, 90))
    with pytest.raises(ValueError, match="input_ids: expected integers"):
        prefix.open(torch.zeros(0, 5, dtype=torch.long))
    with pytest.raises(ValueError, match="suspended one; call resume"):
        cache.suspend()
        prefix.commit(cache, prompt)
    assert prefix.open(prompt[:, :1]).get_seq_length() == 0 and prefix.commit(prefix.new(), prompt) == 0
    index = prefix._prefix
    tokens, root = np.arange(40), bytes(32)
    with pytest.raises(ValueError, match="root: expected 32"):
        index.find(b"short", tokens, 20, 16, 2, 1)
    with pytest.raises(ValueError, match="entries: expected 3, got 2"):
        index.put(root, tokens, 20, 16, 2, 1, np.zeros(2, np.int64))
    with pytest.raises(ValueError, match="pages of its pool"):
        index.put(root, tokens, 20, 16, 2, 1, np.full(3, 1 << 40))
    with pytest.raises(ValueError, match="at least 1 token"):
        index.find(root, tokens, 0, 16, 2, 1)
    with pytest.raises(ValueError, match="that can be written"):
        index.take(root, tokens, 20, 16, 2, 1, np.frombuffer(bytes(24), np.int64))
    with pytest.raises(ValueError, match="truth value"):
        index.oldest(np.ones(3))
    with pytest.raises(ValueError, match="entries: expected"):
        index.put(root, tokens, 1, 1, 2, 1 << 61, np.zeros(2, np.int64))
