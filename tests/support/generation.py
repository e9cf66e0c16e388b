"""Shared by the tests of the cache: generate, logits of a forced text, DynamicCache as reference."""

from functools import lru_cache

import torch
import transformers as hf
from models import ids, model

from kvcompress import KVCache, enable

PAGE = 16
IMPLEMENTATIONS = ("kvcompress", "sdpa", "eager")
SPLIT = [50, 1, 1, 23, 1, 40, 1]  # lengths of the calls of a teacher-forced run, across page boundaries


def select(m, implementation):
    if implementation == "kvcompress":
        report = enable(m, verbose=False)
        assert report.fused
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


@torch.inference_mode()
def feed(m, cache, tokens, mask=None):
    """Logits of one call."""
    return m(tokens, past_key_values=cache, attention_mask=mask).logits


def greedy(m, cache):
    return [generate(m, ids(2, 45), cache)]


@lru_cache
def reference(name):
    """`greedy` with DynamicCache."""
    m = select(model(name), "eager")
    return greedy(m, hf.DynamicCache(config=m.config))


def check_same(got, want):
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g.sequences, w.sequences)
        if getattr(w, "sequences_scores", None) is not None:
            torch.testing.assert_close(g.sequences_scores, w.sequences_scores, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(torch.stack(g.logits), torch.stack(w.logits), rtol=1e-3, atol=1e-3)


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
