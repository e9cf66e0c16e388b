"""Every allocation of every op and every operation on caches fails once: the right error, nothing is lost, and
afterwards the result is that of a run without the fault. Other faults: test_faults_world.py."""

from __future__ import annotations

import copy
import functools
from typing import Any

import models
import pytest
import torch
from faults import every_failing_allocation
from models import ids, model
from test_ops import CALLS

from kvcompress import _C, Batch, KVCache, KVzip, PagedKV, PrefixCache, Tiers, enable, ops, policies

# Ops without allocations of ours.
FREE = ("quantize", "dequantize", "quantize_by", "dequantize_by", "pack_codes", "map_heads")


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


# ---------------------------------------------------------------- ops


@pytest.mark.parametrize("name", CALLS)
def test_ops(name: str) -> None:
    torch.manual_seed(3)
    args = CALLS[name]()

    def make() -> list:
        return [[x.clone() if isinstance(x, torch.Tensor) else x for x in args], None]

    def act(call: list) -> None:
        call[1] = getattr(torch.ops.kvcompress, name)(*call[0])

    # Outputs written in place must not change before the op succeeds.
    n = every_failing_allocation(
        make, act, lambda call: [x for x in call[0] if isinstance(x, torch.Tensor)], lambda call: call,
        lambda a, b: equal(a, b),
    )  # fmt: skip
    assert (n == 0) == (name in FREE)


def test_ops_are_all_there() -> None:
    """Every op of the schema table is in CALLS."""
    every = torch._C._dispatch_get_all_op_names()
    known = {name.split("::")[1].split(".")[0] for name in every if name.startswith("kvcompress::")}
    assert known - {"static_attend", "static_dense"} == set(CALLS)
    assert callable(ops.attend)


# ---------------------------------------------------------------- a layer

B, H, G, D = 2, 2, 2, 32
POLICIES = {
    "none": lambda: None, "h2o": lambda: policies.H2O(40, slack=8), "ada": lambda: policies.AdaKV(policies.KNorm(40)),
    "demote": lambda: policies.Demote(policies.KNorm(48, slack=8), ("int8", "int4")),
}  # fmt: skip


def tokens(T: int, seed: int, rows: int = B) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, h, T, D, generator=g) for h in (H * G, H, H))


def layer(policy: str, key: str, **options: Any) -> PagedKV:
    kv = PagedKV(H, D, key=key, batch=B, page_size=16, policy=POLICIES[policy](), **options)
    for i, T in enumerate((52, 1, 30, 1)):
        kv.attend(*tokens(T, i))
    return kv


def state(kv: PagedKV) -> Any:
    kv.page_store.pool.check()
    parts = kv.page_store.parts()
    del parts["tables"]  # spare capacity may stay
    return kv.seen, kv.page_store.kept_tokens, kv.batch, parts, kv.page_store.pool.stats()["used"], kv.dense()


def go_on(kv: PagedKV) -> Any:
    out = [kv.attend(*tokens(T, 90 + i, kv.batch)) for i, T in enumerate((1, 40, 1))]
    kv.page_store.pool.check()
    return out, kv.dense()


class Held(list):
    """A layer, and other inputs or results of its operation."""


ACTS = {
    "append": lambda x: x[0].append(*tokens(30, 50)[1:]),
    "append with pads": lambda x: x[0].append(*tokens(9, 50)[1:], torch.arange(9) >= torch.tensor([[2], [7]])),
    "attend": lambda x: x[0].attend(*tokens(20, 51)),
    "a token": lambda x: x[0].attend(*tokens(1, 51)),
    "accumulated attention": lambda x: x[0].attend(*tokens(5, 52), return_attention=True),
    "a query alone": lambda x: x[0].attend(tokens(3, 53)[0]),
    "dense": lambda x: x[0].dense(),
    "crop": lambda x: x[0].crop(37),
    "select": lambda x: x[0].select([1, 0, 1]),
    "a beam's step": lambda x: x[0].select([1, 1]),
    "repeat": lambda x: x[0].repeat(2),
    "clone": lambda x: x.append(x[0].clone()),
    "evict": lambda x: x[0].evict(torch.arange(x[0].seen).expand(B, H, -1) % torch.tensor([[[5], [7]]]) < 4),
}
LAYERS = {
    "raw": ("none", "raw", {}), "int8": ("none", "int8", {}),
    "kivi4, recent": ("none", "kivi4", {"residual_length": 20}),
    "direct": ("none", "int8", {"residual_length": 0}), "window": ("none", "int4", {"window": 24}),
    "h2o": ("h2o", "int8", {}),
    "ada": ("ada", "int4", {}), "demote": ("demote", "raw", {}),
}  # fmt: skip


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, act: str) -> None:
    policy, key, options = LAYERS[name]
    if name == "window" and act in ("crop", "a query alone", "evict"):
        pytest.skip("a window refuses it")
    first = layer(policy, key, **options)

    def make() -> Held:  # shares its pages, which must be copied before they are written
        return Held([first.clone()])

    n = every_failing_allocation(
        make, ACTS[act], lambda x: state(x[0]), lambda x: [go_on(kv) for kv in x], equal,
        quiet=0 if policy == "none" else 45,  # an eviction may be deferred, but comes before the next step
    )  # fmt: skip
    reads = ("dense", "crop") if first.page_store.table.slots.size or act == "dense" else ("dense",)
    assert n >= 1 or act in reads or act in ("crop", "a beam's step")


# ---------------------------------------------------------------- a cache


@functools.lru_cache
def llama() -> Any:
    made = copy.deepcopy(model("llama"))
    enable(made, verbose=False)
    return made


def feed(cache: KVCache, T: int, seed: int) -> torch.Tensor:
    rows = next((x.store.batch for x in cache.layers if x.is_initialized and x.store.seen), B)
    with torch.no_grad():
        return llama()(ids(rows, T, seed), past_key_values=cache).logits


def filled(name: str) -> KVCache:
    policy = {"h2o": lambda: policies.H2O(40, slack=8)}.get(name, lambda: None)()
    length = {"fixed": 160}.get(name)
    cache = KVCache(llama().config, "int8", page_size=16, policy=policy, max_length=length)
    for i, T in enumerate((61, 1, 17)):
        feed(cache, T, i)
    return cache


def cache_state(cache: KVCache) -> Any:
    cache.pool.check()
    return cache.get_seq_length(), [x.store.dense() for x in cache.layers if not cache.forward_pass.suspended]


def cache_goes_on(cache: KVCache) -> Any:
    if cache.forward_pass.suspended:
        cache.resume()
    out = [feed(cache, T, 70 + i) for i, T in enumerate((1, 20, 1))]
    cache.pool.check()
    return out, [x.store.dense() for x in cache.layers]


def moved(cache: KVCache) -> None:
    cache.suspend()
    cache.resume()


CACHE_ACTS = {
    "forward": lambda x: feed(x[0], 20, 40),
    "forward of a token": lambda x: feed(x[0], 1, 40),
    "crop": lambda x: x[0].crop(-23),
    "reorder": lambda x: x[0].reorder_cache(torch.tensor([1, 1])),
    "select": lambda x: x[0].batch_select_indices(torch.tensor([1])),
    "repeat": lambda x: x[0].batch_repeat_interleave(3),
    "deepcopy": lambda x: x.append(copy.deepcopy(x[0])),
    "suspend": lambda x: x[0].suspend() if not x[0].forward_pass.suspended else None,
    "suspend and resume": lambda x: moved(x[0]) if not x[0].forward_pass.suspended else x[0].resume(),
    "to dynamic": lambda x: x[0].to_dynamic_cache(),
    "from dynamic": lambda x: KVCache.from_cache(x[0].to_dynamic_cache(), llama().config),
    "reset": lambda x: x[0].reset(),
}


@pytest.mark.parametrize("act", CACHE_ACTS)
@pytest.mark.parametrize("name", ["plain", "h2o", "fixed"])
def test_caches(name: str, act: str) -> None:
    first = filled(name)
    if name == "h2o" and "dynamic" in act:
        pytest.skip("an evicted cache is none of transformers'")

    def make() -> Held:
        return Held([copy.deepcopy(first)])

    def look(x: Held) -> Any:  # "suspend and resume" may stop in between: the cache is then completely suspended
        return cache_state(x[0])[0] if act == "suspend and resume" else cache_state(x[0])

    quiet = 60 if name == "h2o" and "forward" in act else 0
    every_failing_allocation(make, CACHE_ACTS[act], look, lambda x: [cache_goes_on(c) for c in x], equal, 900, quiet)


def test_files_and_tiers(tmp_path: Any) -> None:
    first, path = filled("plain"), tmp_path / "a.kvc"
    first.save(path)

    def make() -> Held:
        return Held([copy.deepcopy(first)])

    def load(x: Held) -> None:
        x[1:] = [KVCache.load(path, llama().config)]

    def tiers(x: Held) -> None:  # pages without space in the tier stay, with a warning
        x[0].use_tiers(Tiers(file_bytes=None, folder=tmp_path), resident=0, unit=1)

    def back(x: Held) -> None:
        tiers(x)
        x[0].use_tiers(None)

    def follow(x: Held) -> Any:
        return [cache_goes_on(c) for c in x]

    def look(x: Held) -> Any:
        return x[0].get_seq_length()

    every_failing_allocation(make, lambda x: x[0].save(path), look, follow, equal)
    every_failing_allocation(make, load, look, follow, equal)
    every_failing_allocation(make, tiers, look, follow, equal, quiet=20)
    every_failing_allocation(make, back, look, follow, equal, quiet=20)


def test_batches() -> None:
    """A pass over separate sequences: all of them store their tokens, or none."""
    first = [KVCache(llama().config, "int8", page_size=16) for _ in range(1)]
    first += [KVCache(llama().config, "int8", page_size=16, pool=first[0].pool) for _ in range(2)]
    for i, cache in enumerate(first):
        with torch.no_grad():
            llama()(ids(1, 20 + 14 * i, i), past_key_values=cache)

    def step(x: Held) -> None:
        one = Batch(x, [1, 1, 30])
        with torch.no_grad():
            llama()(ids(1, 32, 7), position_ids=one.positions, past_key_values=one)

    def follow(x: Held) -> Any:
        step(x)
        return [cache_state(c) for c in x]

    every_failing_allocation(
        lambda: Held(copy.deepcopy(first)), step, lambda x: [cache_state(c) for c in x], follow, equal
    )


def test_kvzip() -> None:
    """Tokens are evicted in all layers, or in none."""
    first, prompt = KVCache(llama().config, "int4", page_size=16), ids(1, 90, 5)
    with torch.no_grad():
        llama()(prompt, past_key_values=first)
    every_failing_allocation(
        lambda: Held([copy.deepcopy(first)]), lambda x: KVzip(0.4).compress(llama(), x[0], prompt),
        lambda x: cache_state(x[0]), lambda x: cache_goes_on(x[0]), equal, quiet=20,
    )  # fmt: skip


def test_prefixes() -> None:
    prompt = ids(1, 90, 5)

    def make() -> Held:
        prefix = PrefixCache(llama().config, "int8", page_size=16)
        cache = prefix.new()
        with torch.no_grad():
            llama()(prompt, past_key_values=cache)
        return Held([prefix, cache])

    def commit(x: Held) -> None:
        x[0].commit(x[1], prompt)

    def opened(x: Held) -> None:
        x[0].commit(x[1], prompt)
        x[2:] = [x[0].open(prompt)]

    def follow(x: Held) -> Any:
        x[0].commit(x[1], prompt)
        cache = x[0].open(prompt)
        at = cache.get_seq_length()
        assert at >= 64
        with torch.no_grad():
            logits = llama()(prompt[:, at:], past_key_values=cache).logits
        x[0].pool.check()
        return logits, cache_state(cache)

    def look(x: Held) -> Any:
        x[0].pool.check()
        return cache_state(x[1])

    every_failing_allocation(make, commit, look, follow, equal)
    every_failing_allocation(make, opened, look, follow, equal)


def test_construction() -> None:
    n = every_failing_allocation(
        list, lambda x: x.append(PagedKV(H, D, key="int4")), lambda x: len(x), lambda x: go_on_of(x[0]), equal
    )
    assert n >= 4
    config = models.CONFIGS["llama"]()
    every_failing_allocation(
        list, lambda x: x.append(KVCache(config, "int4")), lambda x: len(x), lambda x: len(x[0].layers), equal
    )


def go_on_of(kv: PagedKV) -> Any:
    return kv.attend(*tokens(70, 1, 1)), kv.attend(*tokens(1, 2, 1))


def test_nothing_leaks() -> None:
    """Failed calls have freed all their memory."""
    first = layer("h2o", "int8")

    def round_trip() -> int:
        for act in ACTS.values():
            for n in (1, 2, 3, 5, 8):
                x = Held([first.clone()])
                _C.alloc_fail_at(n)
                try:
                    act(x)
                except MemoryError:
                    pass
                finally:
                    _C.alloc_fail_at(0)
                del x
        return _C.alloc_live()

    round_trip()
    assert round_trip() <= round_trip()


if __name__ == "__main__":  # for `make soak`
    import sys
    from pathlib import Path

    import faults
    from record import record

    files = map(str, Path(__file__).parent.glob("test_faults*.py"))
    code = pytest.main(["-q", "-p", "no:xdist", "-p", "no:cacheprovider", *files])
    if code == 0:
        record("faults", "python tests/robustness/test_faults.py", **{k: v for k, v in sorted(faults.INJECTED.items())})
    sys.exit(code)
