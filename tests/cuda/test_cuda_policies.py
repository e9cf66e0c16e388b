"""Policies with pages on a device (support/far.py): the same tokens, bytes and outputs as on the CPU, and no
synchronization between evictions."""

import copy
import json
from itertools import chain

import numpy as np
import pytest
import torch
from far import FAR
from far_kernels import a_device
from generation import select
from models import ids, left_pads, model
from test_attend import error

from kvcompress import KVCache, KVzip, PagedKV, formats, policies
from kvcompress.store import serialize

B, H, G, D, PAGE = 2, 2, 2, 32, 16
SPEED = 10000.0 ** -(torch.arange(0, D, 2, dtype=torch.float64) / D)
OUTPUT = torch.randn(48, H * G * D, generator=torch.Generator().manual_seed(11)) * torch.linspace(0.1, 3, H * G * D)


def bound(policy):
    policy.outputs = [OUTPUT]
    return policy


CASES = {
    "h2o": policies.H2O(20),
    "h2o ema": policies.H2O(20, score="ema"),
    "h2o of a share": policies.H2O(0.4, score="sum", heads="shared"),
    "score only": policies.ScoreOnly(18),
    "streaming": policies.StreamingLLM(4, 16),
    "streaming in the cache": policies.StreamingLLM(4, 16, positions="cache"),
    "window": policies.SlidingWindow(18),
    "tova": policies.TOVA(18),
    "snapkv": policies.SnapKV(20, 8, 5),
    "snapkv of many": policies.SnapKV(20, 14, 5),
    "knorm": policies.KNorm(18),
    "keydiff": policies.KeyDiff(18),
    "random": policies.Random(18),
    "rkv": policies.RKV(18, 4, similar=0.2, weight=0.3),
    "expected": policies.ExpectedAttention(18, queries=20, future=16),
    "critical": bound(policies.CriticalKV(policies.H2O(20, 8, 4))),
    "critical snapkv": bound(policies.CriticalKV(policies.SnapKV(20, 8))),
    "adakv": policies.AdaKV(policies.H2O(20, 6)),
    "adakv of norms": policies.AdaKV(policies.KNorm(18)),
    "pyramid": policies.PyramidBudget(policies.KNorm(18)),
    "protect": policies.Protect(policies.KNorm(20), [(9, 14)]),
    "chain": policies.Chain(policies.KNorm(24), policies.H2O(18)),
    "demote": policies.Demote(policies.KNorm(36, slack=4), ("int8", "int4/int2")),
    "demote h2o": policies.Demote(policies.H2O(36, slack=4), ("int8", "int4")),
    "watch": policies.Watch(policies.H2O(20), 4),
}


def names(policy):
    """Names of its class, and of its inner policies."""
    inner = [getattr(policy, "policy", None), *getattr(policy, "policies", ())]
    return {type(policy).__name__}.union(*(names(x) for x in inner if x is not None))


CLASSES = {name for name in policies.__all__ if isinstance(getattr(policies, name), type)} - {"Policy", "StoredTokens"}
CASES |= {name: getattr(policies, name)(18) for name in sorted(CLASSES - set().union(*map(names, CASES.values())))}
QUICK = (
    "h2o",
    "h2o ema",
    "streaming in the cache",
    "tova",
    "snapkv",
    "keydiff",
    "expected",
    "critical",
    "demote",
    "watch",
)
CALLS = (28, 10, *[1] * 6, 14, *[1] * 4)
RAW = formats.resolve("raw", torch.float32) * 257


def sealed(kv):
    """The bytes of all sealed pages, in the table's order: addresses depend on other allocations."""
    arrays, pieces = serialize.survey(kv.page_store)
    found = [*dict.fromkeys(e >> 16 for e in arrays.entries[arrays.entries >= 0].tolist() if e & 0xFFFF != RAW)]
    return serialize.gather(kv.page_store, pieces[found])[0] if found else np.empty(0)


def same(far, here, bound=1e-3, pools=False):
    """The two layers have the same contents; scores differ by at most `bound`. pools: pages may have other addresses,
    and spare capacity."""
    entries = [far.page_store.table.entries, here.page_store.table.entries]
    if pools:
        width = min(x.shape[2] for x in entries)
        assert all((x[..., width:] < 0).all() for x in entries)
        entries = [x[..., :width] for x in entries]
    assert np.array_equal(*(np.where(x < 0, x, x & 0xFFFF) for x in entries))  # formats: pools have other addresses
    for name in ("rows", "slots"):
        assert np.array_equal(getattr(far.page_store.table, name), getattr(here.page_store.table, name)), name
    a, b = far.kept_heads(), here.kept_heads()
    for x, y in zip(chain(*a.slots), chain(*b.slots), strict=True):
        assert torch.equal(x, y)
    for x, y in zip(*(chain(*kept.scores or []) for kept in (a, b)), strict=True):
        assert (x - y).norm() <= bound * y.norm() + 1e-6
    for x, y in zip(far.dense(), here.dense(), strict=True):
        assert torch.equal(x.cpu(), y)
    assert pools or np.array_equal(sealed(far), sealed(here))


LIVES = [("raw", name) for name in CASES] + [
    ("int8", name) for name, policy in CASES.items() if not policy.needs_attention and not policy.window
]  # attention to quantized pages differs by more than scores do


@pytest.mark.parametrize("key,name", [pytest.param(*x, marks=() if x[1] in QUICK else pytest.mark.full) for x in LIVES])
def test_policies_over_random_operations(key, name):
    """Padding, prompts, single tokens, a crop, reordered rows, a copy; evictions in between."""
    policy = CASES[name]
    exact = key == "raw" and not policy.ladder
    options = {"key": key, "value": {"int8": "int4"}.get(key, key), "batch": B, "page_size": PAGE, "rope": SPEED}
    here = PagedKV(H, D, policy=policy, **options)
    generator = torch.Generator().manual_seed(3)
    with a_device() as device:
        there = copy.copy(policy)
        if hasattr(there, "outputs"):
            there.outputs = [OUTPUT.to(FAR)]
        far = PagedKV(H, D, policy=there, device=FAR, **options)
        for i, T in enumerate(CALLS):
            q, k, v = (torch.randn(B, h, T, D, generator=generator) for h in (H * G, H, H))
            k = k * (1 + 2 * torch.rand(B, H, T, 1, generator=generator))
            mask = torch.arange(T) >= torch.tensor([0, 7])[:, None] if i == 0 else None
            given, count = [x.to(FAR) for x in (q, k, v)], here.eviction.count
            want, waits = here.attend(q, k, v, mask=mask)[0], device.waits
            got, *_ = far.attend(*given, mask=mask)
            assert here.eviction.count > count or device.waits == waits, i
            assert error(got.cpu(), want.double()) <= (1e-5 if exact else 2e-2), i
            if here.eviction.count > count:
                same(far, here, 1e-3 if exact else 2e-2)
            if i == 4:
                for kv in (far, here):
                    kv.crop(kv.seen - 2)
            if i == 7:
                for kv in (far, here):
                    kv.select([1, 0])
                copies = far.clone(), here.clone()
        assert here.eviction.count >= 2
        for pair in ((far, here), copies):
            same(*pair, 1e-3 if exact else 2e-2)
        if policy.clusters:
            assert torch.allclose(far.evicted_attention(), here.evicted_attention(), rtol=1e-3)
    far.page_store.pool.check()


@pytest.mark.parametrize("name", ["h2o", "tova", "streaming in the cache", "demote", "watch", "critical"])
def test_a_layer_that_moves(name):
    """To the CPU and back, between evictions: the policy's state moves, too."""
    options = {"key": "raw", "batch": B, "page_size": PAGE, "rope": SPEED, "policy": CASES[name]}
    here, generator, evicted = PagedKV(H, D, **options), torch.Generator().manual_seed(3), set()
    with a_device():
        far = PagedKV(H, D, device=FAR, **options)
        for i, T in enumerate((28, 10, *[1] * 12, 9, *[1] * 9)):
            q, k, v = (torch.randn(B, h, T, D, generator=generator) for h in (H * G, H, H))
            count = here.eviction.count
            want = here.attend(q, k, v)[0]
            got = far.attend(*(x.to(far.device) for x in (q, k, v)))[0]
            assert got.device.type == far.device.type and error(got.cpu(), want.double()) <= 2e-2, i
            if here.eviction.count > count:
                evicted.add(far.device)
                same(far, here, 2e-2, pools=True)
            if i % 3 == 1:
                assert far.to("cpu" if far.device.type != "cpu" else FAR) is far
        assert len(evicted) == 2
        same(far, here, 2e-2, pools=True)
        if CASES[name].clusters:
            assert torch.allclose(far.evicted_attention(), here.evicted_attention(), rtol=1e-3)


@pytest.mark.parametrize("name", ["h2o", "snapkv", "streaming in the cache", "watch"])
def test_saved_layers_continue(name):
    """Saved from the device and loaded to another layer there, which continues like the first one."""
    generator = torch.Generator().manual_seed(5)
    options = {"key": "int8", "batch": 1, "page_size": PAGE, "rope": SPEED, "policy": CASES[name], "device": FAR}
    with a_device():
        one, two = (PagedKV(H, D, **options) for _ in range(2))
        for T in (40, 1, 1):
            first = [torch.randn(1, h, T, D, generator=generator).to(FAR) for h in (H * G, H, H)]
            one.attend(*first)
        assert one.eviction.count
        arrays, pieces = serialize.survey(one.page_store)
        memory, checksum = serialize.gather(one.page_store, pieces)
        plain, tensors = one.state()
        assert all(x.device.type == "cpu" for x in tensors.values())
        serialize.place(two.page_store, arrays, memory, checksum)
        two.restore_state(json.loads(json.dumps(plain)), tensors)
        for T in (1, 20, 1):
            last = [torch.randn(1, h, T, D, generator=generator).to(FAR) for h in (H * G, H, H)]
            a, b = one.attend(*last)[0].cpu(), two.attend(*last)[0].cpu()
            assert error(a, b.double()) <= 1e-6
        assert all(map(torch.equal, *(chain(*kv.kept_heads().slots) for kv in (one, two))))
        if CASES[name].clusters:
            assert torch.allclose(one.evicted_attention(), two.evicted_attention())


def on(device):
    """Tiny Llama with its weights on the device."""
    made = copy.deepcopy(model("llama"))
    for module in made.modules():
        for kind in (module._parameters, module._buffers):
            kind.update({name: x.detach().to(device) for name, x in kind.items() if x is not None})
    return select(made, "kvcompress")


CHAIN = policies.Chain(policies.KNorm(20), policies.SnapKV(16, 4))


@pytest.mark.parametrize(
    "policy", [policies.AdaKV(policies.H2O(16, 6)), *(pytest.param(x, marks=pytest.mark.full) for x in (None, CHAIN))]
)
def test_generate(policy):
    """Weights and cache on FAR, padded prompts: the tokens of the same model on the CPU."""
    tokens, mask = left_pads(ids(2, 30), [0, 9])
    results = []
    with a_device():
        for place in (torch.device("cpu"), FAR):
            m = on(place)
            cache = KVCache(m.config, "raw", page_size=PAGE, policy=policy)
            with torch.no_grad():
                step, seen, out = tokens.to(place), mask.to(place), []
                for _ in range(6):
                    logits = m(step, attention_mask=seen, past_key_values=cache).logits[:, -1]
                    out.append(logits.cpu())
                    step = logits.argmax(-1, keepdim=True)
                    seen = torch.cat([seen, torch.ones_like(step)], 1)
            results.append((torch.stack(out), *(x.store for x in cache.layers)))
        (want, *here), (got, *far) = results
        assert far[0].device == FAR and error(got, want.double()) <= 1e-4
        assert policy is None or here[1].eviction.count >= 1
        if FAR.type != "cuda":
            same(far[0], here[0])  # K and V of the second layer differ by rounding
        assert all(map(torch.equal, *(chain(*kv.kept_heads().slots) for kv in (far[1], here[1]))))


@pytest.mark.full
def test_kvzip():
    tokens, kept = ids(1, 40), []
    with a_device():
        for place in (torch.device("cpu"), FAR):
            m = on(place)
            cache = KVCache(m.config, "raw", page_size=PAGE)
            with torch.no_grad():
                m(tokens.to(place), past_key_values=cache)
            KVzip(0.5, [3, 4]).compress(m, cache, tokens.to(place))
            kept.append([x for layer in cache.layers for x in chain(*layer.store.kept_heads().slots)])
    assert all(map(torch.equal, *kept)) and sum(map(len, kept[0])) == 80
