"""Every operation that changes a cache, on every format, compared with DynamicCache; and rejected drafts, compared
exactly."""

import random

import models
import pytest
import torch
import transformers as hf
from generation import PAGE, error

from kvcompress import _C, KVCache, PagedKV, formats

NAMES = sorted(set(formats.NAMES))
BOUND = {"raw": 0.0, 8: 0.08, 4: 0.35, 3: 0.6, 2: 1.0}  # error of stored values, Gaussian
CASES = [(name, {}) for name in NAMES] + [
    ("int8", {"residual_length": 0}), ("fp8_e4m3", {"residual_length": 0}), ("int4", {"residual_length": 20}),
    ("int8", {"sinks": 0}),
    ("int4", {"spans": [(0, 0.3, "int8"), (0.3, 1, "kivi2")]}), ("int8", {"value": "int2"}),
]  # fmt: skip
PLANS = {  # operations between calls of generate: (method, argument), or tokens to append
    "crop after the prompt": [70, ("crop", -10), 1],
    "crop into the residual and beyond": [220, ("crop", -50), 1, ("crop", -1), ("crop", 0), 30],
    "crop to nothing": [40, ("crop", -1000), 9],
    "select after the prompt": [70, ("batch_select_indices", torch.tensor([2, 0])), 1, 40],
    "beams": [50, ("batch_repeat_interleave", 2), 1, ("reorder_cache", torch.tensor([5, 0, 0, 3, 3, 1])), 33],
    "rows after a crop": [100, ("crop", -37), ("batch_select_indices", torch.tensor([1, 1])), 20, ("crop", -3)],
    "reset and another batch": [60, ("reset",), 20, ("crop", -4), 50],
}  # fmt: skip


def caches(name, options):
    config = models.CONFIGS["llama"]()
    config.num_hidden_layers = 1
    return KVCache(config, key=name, **{"page_size": PAGE, **options}), hf.DynamicCache(config=config)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name,options", CASES, ids=lambda x: x if isinstance(x, str) else str(len(x)))
def test_as_dynamic_cache(name, options, plan):
    """As DynamicCache: shapes and lengths, K and V up to the format's error; the remaining tokens do not change."""
    ours, theirs = caches(name, options)
    generator, rows = torch.Generator().manual_seed(3), 3
    for step in PLANS[plan]:
        if isinstance(step, int):
            k, v = torch.randn(2, rows, 2, step, 32, generator=generator)
            for cache in (ours, theirs):
                cache.update(k, v, 0)
        else:
            method, *arguments = step
            before = ours.layers[0].keys, ours.layers[0].values
            for cache in (ours, theirs):
                if (method, arguments) != ("reset", []):
                    getattr(cache, method)(*arguments)
            if method == "reset":  # transformers keeps the tokens, as zeros
                ours.reset()
                theirs, rows = caches(name, options)[1], 2
                continue
            after = ours.layers[0].keys, ours.layers[0].values
            for old, new in zip(before, after, strict=True):
                if method == "crop":
                    assert torch.equal(new, old[:, :, : new.shape[2]])
                else:
                    n = old.shape[0]
                    index = torch.arange(n).repeat_interleave(*arguments) if "repeat" in method else arguments[0]
                    assert torch.equal(new, old[index])
            rows = after[0].shape[0]
        assert ours.get_seq_length() == theirs.get_seq_length()
        want = theirs.layers[0]
        sides = ((name, "keys"), (options.get("value", name), "values"))
        for kind, side in sides:
            got, exact = getattr(ours.layers[0], side), getattr(want, side)
            assert got.shape == exact.shape and got.dtype == exact.dtype
            if exact.numel():
                bits = "raw" if kind == "raw" else formats.TABLE[formats.resolve(kind, torch.float32)]["bits"]
                assert error(got, exact) <= (1.0 if "spans" in options else BOUND[bits])
    if ours.get_seq_length():
        assert ours.layers[0].batch_size == rows
    ours.pool.check()


@pytest.mark.parametrize("name", NAMES)
def test_scales_are_not_frozen_by_the_first_call(name):
    """Zeros first, then data, then data a hundred times as large: each page has its own scales."""
    ours, theirs = caches(name, {})
    for size, T in ((0.0, 40), (1.0, 40), (100.0, 60)):
        k, v = size * torch.randn(2, 1, 2, T, 32, generator=torch.Generator().manual_seed(5))
        for cache in (ours, theirs):
            cache.update(k, v, 0)
    bits = "raw" if name == "raw" else formats.TABLE[formats.resolve(name, torch.float32)]["bits"]
    keys, exact = ours.layers[0].keys, theirs.layers[0].keys
    assert not keys[:, :, :32].any()  # pages of zeros only
    for part in (slice(52, 68), slice(84, 140)):  # pages with values of one magnitude
        assert error(keys[:, :, part], exact[:, :, part]) <= BOUND[bits]


# ---------------------------------------------------------------- drafts


def sealed_bytes(store):
    """The bytes of every full sealed page, row by row."""
    table, raw, pages = store.page_store.table, formats.resolve("raw", store.dtype), []
    for entries, (stored, _) in zip(table.entries[:, 0].tolist(), table.rows[:, 0].tolist(), strict=True):
        for entry in entries[1 : 1 + max(0, stored - store.sinks) // store.page_size]:
            key, value = entry >> 8 & 0xFF, entry & 0xFF
            if (key, value) != (raw, raw):
                dims = (store.head_dim + store.page_store.fill[0], store.value_dim + store.page_store.fill[1])
                size = store.num_kv_heads * _C.page_bytes(key, value, *dims, store.page_size)
                at = (entry >> 16) * 64
                pages.append(store.page_store.pool.arena[at : at + size].tobytes())
    return pages


@pytest.mark.parametrize("name,options", CASES, ids=lambda x: x if isinstance(x, str) else str(len(x)))
def test_a_rejected_draft_leaves_no_trace(name, options):
    """Calls of a token and its drafts, some of which are rejected, compared with a layer that never got those."""
    options = {"key": name, "page_size": PAGE, "batch": 2, **options}
    drafting, plain = PagedKV(2, 32, **options), PagedKV(2, 32, **options)
    chance, generator = random.Random(name), torch.Generator().manual_seed(9)

    def block(T):
        return torch.randn(2, 2, 2, T, 32, generator=generator)

    first = block(37)
    for store in (drafting, plain):
        store.append(*first)
    for _ in range(40):
        drafts = chance.randint(1, PAGE)
        accepted = chance.randint(1, drafts)
        kv = block(drafts)
        if chance.random() < 0.5:
            q = torch.randn(2, 4, drafts, 32, generator=generator)
            drafting.attend(q, *kv)
        else:
            drafting.append(*kv)
        drafting.crop(drafting.seen - (drafts - accepted))
        plain.append(kv[0][:, :, :accepted].contiguous(), kv[1][:, :, :accepted].contiguous())
        assert drafting.seen == plain.seen and (drafting.page_store.table.rows == plain.page_store.table.rows).all()
        assert sealed_bytes(drafting) == sealed_bytes(plain)
        assert all(torch.equal(a, b) for a, b in zip(drafting.dense(), plain.dense(), strict=True))
        assert {**drafting.page_store.parts(), "tables": 0} == {
            **plain.page_store.parts(),
            "tables": 0,
        }  # with spare capacity
