"""What the tests of the cache share: ways to generate, logits of a forced text, DynamicCache as reference."""

from functools import lru_cache

import models
import torch
import transformers as hf
from models import ids, left_pads, model

from kvcompress import KVCache, enable

PAGE = 16
IMPLEMENTATIONS = ("kvcompress", "sdpa", "eager")
SPLIT = [50, 1, 1, 23, 1, 40, 1]  # calls of a teacher-forced run, over page borders


def select(m, implementation):
    if implementation == "kvcompress":
        report = enable(m, verbose=False)
        assert report.fused == ("full_attention" in report.layers)
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
            tokens, attention_mask=mask, past_key_values=cache, return_dict_in_generate=True,
            output_logits=True, **options,
        )  # fmt: skip


def greedy(m, cache):
    return [generate(m, ids(2, 45), cache)]


def sampling(m, cache):
    torch.manual_seed(11)
    return [generate(m, ids(2, 45), cache, do_sample=True, temperature=1.3, top_k=0)]


def left_padding(m, cache):
    return [generate(m, *padded(ids(4, 50), [0, 7, 30, 49], cache))]


def beams(m, cache):
    return [generate(m, *padded(ids(2, 40), [0, 9], cache), num_beams=4, num_return_sequences=2)]


def chunked(m, cache):
    return [generate(m, *padded(ids(2, 61), [0, 20], cache), prefill_chunk_size=11)]


def two_turns(m, cache):
    tokens, mask = left_pads(ids(2, 33), [0, 5])
    first = generate(m, tokens, cache, mask)
    more = torch.cat([first.sequences, ids(2, 19, seed=1)], 1)
    mask = torch.cat([mask, torch.ones(2, more.shape[1] - 33, dtype=mask.dtype)], 1)
    return [first, generate(m, more, cache, mask)]


def drafts(m, cache):
    tokens = ids(1, 12).repeat(1, 4)  # repeats itself: prompt lookup finds drafts, and many are rejected
    return [generate(m, tokens, cache, prompt_lookup_num_tokens=4, max_new_tokens=40)]


def padded(tokens, pads, cache):
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
                tokens[:, start : start + T], attention_mask=own, position_ids=positions,
                past_key_values=cache,
            ).logits)  # fmt: skip
            start += T
    return out
