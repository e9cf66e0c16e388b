"""KVzip compared with one dense pass per chunk in float64; the result is an ordinary cache."""

import copy
import math

import pytest
import torch
from generation import cache_of, generate, select
from models import ids, left_pads, model
from transformers import AttentionInterface

from kvcompress import KVCache, KVzip

PROMPT, CHUNK, SINKS = [5, 7, 11], 40, 4


def reference(m, tokens):
    """Scores [B, H, n] by layer: the text, the instruction, and a chunk of the text again, in one call without a
    cache."""
    n, found = tokens.shape[1], {}

    def attention(module, query, key, value, mask, scaling=None, **options):
        G, T = query.shape[1] // key.shape[1], query.shape[2]
        s = query.double() @ key.double().repeat_interleave(G, 1).transpose(2, 3) * scaling
        s = s.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf)
        out = s.softmax(-1) @ value.double().repeat_interleave(G, 1)
        sees = torch.tensor([j < min(SINKS, begin) or begin <= j < end or j >= n for j in range(T)])
        p = s[:, :, n:].masked_fill(~sees, -math.inf).softmax(-1)[..., begin:end].amax(2)
        layer = found.setdefault(module.layer_idx, torch.zeros(len(tokens), key.shape[1], n, dtype=torch.float64))
        layer[:, :, begin:end] = p.unflatten(1, (-1, G)).amax(2)
        return out.to(query.dtype).transpose(1, 2), None

    AttentionInterface.register("zip_reference", attention)
    m = copy.deepcopy(m)
    m.set_attn_implementation("zip_reference")
    for begin in range(0, n, CHUNK):
        end = min(begin + CHUNK, n)
        asks = torch.tensor(PROMPT).expand(len(tokens), -1)
        with torch.no_grad():
            m(torch.cat([tokens, asks, tokens[:, max(0, begin - 8) : end]], 1), use_cache=False)
    return found


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize("budget", [0.3, 25])
def test_as_the_paper_says(name, budget):
    m = select(copy.deepcopy(model(name)), "kvcompress")
    tokens, cache = ids(2, 110), cache_of(m, "raw")
    with torch.no_grad():
        m(tokens, past_key_values=cache)
    zipper, want = KVzip(budget, PROMPT, chunk=CHUNK), reference(m, tokens)
    got = zipper.scores(m, cache, tokens)
    assert m.config._attn_implementation == "kvcompress"
    for layer in want:
        torch.testing.assert_close(got[layer].double(), want[layer], atol=1e-4, rtol=1e-3)
    used = cache.pool.stats()["used"]
    assert zipper.compress(m, cache, tokens) is cache and cache.pool.stats()["used"] < used
    heads = sum(x.shape[1] for x in want.values())
    total = round(heads * (budget if isinstance(budget, int) else budget * 110))
    for b in range(2):
        every = [
            (float(x[b, h, i]), la, h, i) for la, x in got.items() for h in range(x.shape[1]) for i in range(4, 110)
        ]
        best = {x[1:] for x in sorted(every, reverse=True)[: total - 4 * heads]}
        kept = {
            (layer, h, i) for layer in got for h, slots in enumerate(cache.kept(layer).slots[b]) for i in slots.tolist()
        }
        assert kept == best | {(layer, h, i) for layer, x in got.items() for h in range(x.shape[1]) for i in range(4)}


def test_a_model_in_training():
    """Dropout is off while it measures."""
    m = select(copy.deepcopy(model("llama")), "kvcompress")
    tokens, cache = ids(1, 110), cache_of(m, "raw")
    with torch.no_grad():
        m(tokens, past_key_values=cache)
    want = KVzip(0.3).scores(m, cache, tokens)
    for layer in m.model.layers:
        layer.self_attn.attention_dropout = 0.5
    got = KVzip(0.3).scores(m.train(), cache, tokens)
    assert m.training and all(torch.equal(got[layer], want[layer]) for layer in want)


def test_the_prefix_serves_as_any_cache():
    """Copies answer different questions, in batches with padding; keeping everything changes nothing."""
    m = select(copy.deepcopy(model("llama")), "kvcompress")
    tokens = ids(1, 90)
    for budget in (0.4, 1.0):
        cache, plain = cache_of(m, "int8"), cache_of(m, "int8")
        with torch.no_grad():
            for c in (cache, plain):
                m(tokens, past_key_values=c)
        KVzip(budget).compress(m, cache, tokens)
        for c in (cache, plain):
            c.batch_repeat_interleave(2)
        question, mask = left_pads(ids(2, 12, 5), [0, 4])
        mask = torch.cat([torch.ones(2, 90, dtype=mask.dtype), mask], 1)
        whole = torch.cat([tokens.repeat(2, 1), question], 1)
        a, b = (generate(m, whole, copy.deepcopy(c), mask) for c in (cache, plain))
        assert torch.equal(a.sequences, b.sequences) == (budget == 1.0)
        assert cache.layers[0].store.page_store.kept_tokens == (
            2 * 90 if budget == 1.0 else cache.layers[0].store.page_store.kept_tokens
        )


@pytest.mark.parametrize("fmt", ["int4", "int8"])
def test_a_compressed_prefix_is_a_file_for_later(fmt, tmp_path):
    """Saved once and loaded for other questions about the same text: bytes, kept tokens and answers are the same."""
    m = select(copy.deepcopy(model("llama")), "kvcompress")
    tokens, path, cache = ids(1, 120), tmp_path / "book.kvc", cache_of(m, fmt)
    with torch.no_grad():
        m(tokens, past_key_values=cache)
    whole = cache.pool.stats()["used"]
    KVzip(0.3).compress(m, cache, tokens)
    cache.save(path, tokens=tokens)
    with pytest.raises(ValueError, match="tokens"):
        KVCache.load(path, m.config, tokens=ids(1, 120, 3))
    loaded = KVCache.load(path, m.config, tokens=tokens)
    assert loaded.pool.stats()["used"] == cache.pool.stats()["used"] < 0.7 * whole
    for layer in range(len(cache.layers)):
        ours, theirs = (x.kept(layer) for x in (cache, loaded))
        for a, b in zip(ours.slots[0], theirs.slots[0], strict=True):
            assert torch.equal(a, b)
    for question in (ids(1, 9, 4), ids(1, 15, 5)):
        asked = torch.cat([tokens, question], 1)
        a, b = (generate(m, asked, copy.deepcopy(c)) for c in (cache, loaded))
        assert torch.equal(a.sequences, b.sequences)
        for x, y in zip(a.logits, b.logits, strict=True):
            assert torch.equal(x, y)
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"book\.kvc"):
        KVCache.load(path, m.config)


def test_what_it_cannot_do_is_refused():
    m = select(copy.deepcopy(model("llama")), "kvcompress")
    tokens, mask = left_pads(ids(2, 30), [0, 3])
    padded, short = cache_of(m), cache_of(m)
    with torch.no_grad():
        m(tokens, attention_mask=mask, past_key_values=padded)
        m(ids(1, 30), past_key_values=short)
    for cache, given in ((padded, tokens), (short, ids(1, 31)), (short, ids(2, 30)), (cache_of(m), ids(1, 1))):
        with pytest.raises(ValueError, match="KVzip: expected a cache that holds exactly the tokens"):
            KVzip(0.5).compress(m, cache, given)
    KVzip(0.5).compress(m, short, ids(1, 30).tolist())
    with pytest.raises(ValueError, match="without padding"):
        KVzip(0.5).compress(m, short, ids(1, 30).tolist())
    with pytest.raises(ValueError, match="budget"):
        KVzip(0)
    with pytest.raises(TypeError, match="KVzip: prompt: expected an int, got float"):
        KVzip(prompt=[5, 1.5])
    assert m.config._attn_implementation == "kvcompress"


def test_windows_are_refused_by_name():
    """If the window holds the whole prefix, the error used to come from the op, or from a mask."""
    m = select(copy.deepcopy(model("mistral")), "kvcompress")
    for n in (5, 200):
        cache = cache_of(m)
        with torch.no_grad():
            m(ids(1, n), past_key_values=cache)
        with pytest.raises(ValueError, match="without padding, in full-attention layers, got"):
            KVzip(0.5).compress(m, cache, ids(1, n))
        assert cache.get_seq_length() == n
