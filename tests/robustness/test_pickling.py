"""Pickling and copying of every public class: it works, or a one-line error says what to do instead."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import ids, model

import kvcompress
from kvcompress import KVCache, PagedKV, enable, policies
from kvcompress.parallel import ShardedKV

COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda x: pickle.loads(pickle.dumps(x)), "copy": copy.copy, "deepcopy": copy.deepcopy
}  # fmt: skip


def config() -> Any:
    m = model("llama")
    enable(m, verbose=False)
    return m.config


def filled(kind: type = KVCache, **options: Any) -> Any:
    cache = kind(config(), **options)
    with torch.no_grad():
        model("llama")(ids(1, 80), past_key_values=cache)
    return cache


def layer() -> PagedKV:
    made = PagedKV(2, 32)
    made.append(*torch.randn(2, 1, 2, 80, 32))
    return made


WRAPPERS = {"AdaKV": (), "Chain": (), "CriticalKV": (), "Demote": (("raw", "int4"),), "Protect": ([(0, 8)],),
            "PyramidBudget": (), "Watch": ()}  # fmt: skip
# how it is created, what to do instead, whether it can be copied
PROCESS_BOUND: dict[str, tuple[Callable[[], Any], str, bool]] = {
    "KVCache": (filled, r"save\(path\)", True),
    "H2OCache": (lambda: filled(kvcompress.H2OCache, budget=40), r"save\(path\)", True),
    "StreamingLLMCache": (lambda: filled(kvcompress.StreamingLLMCache), r"save\(path\)", True),
    "KVCache of a fixed length": (lambda: filled(max_length=128), r"save\(path\)", True),
    "a layer of a KVCache": (lambda: filled().layers[0], r"copy\.deepcopy\(\) or save\(\) the KVCache", False),
    "PagedKV": (layer, r"clone\(\)", True),
    "Batch": (lambda: kvcompress.Batch([filled()]), "a new Batch for each pass", False),
    "PrefixCache": (lambda: kvcompress.PrefixCache(config()), r"threads can share one.*commit\(\)", False),
    "Tiers": (kvcompress.Tiers, r"caches can share one.*KVCache\.save\(path\)", False),
    "Pool": (kvcompress.Pool, r"caches can share one.*KVCache\.save\(path\)", False),
}


@pytest.mark.parametrize("name", PROCESS_BOUND)
@pytest.mark.parametrize("how", COPIES)
def test_objects_with_pages_refuse_pickling(name: str, how: str) -> None:
    make, instead, copied = PROCESS_BOUND[name]
    made = make()
    if copied and how != "pickle":
        twin = COPIES[how](made)
        assert type(twin) is type(made) and twin is not made
        return
    acts = "pickled" if copied else "copied or pickled"
    with pytest.raises(TypeError, match=rf"^{type(made).__name__}: cannot be {acts} .*{instead}"):
        COPIES[how](made)


@pytest.mark.parametrize("name", sorted({*policies.__all__} - {"Policy", "StoredTokens", "from_dict"}))
@pytest.mark.parametrize("how", COPIES)
def test_policies_travel(name: str, how: str) -> None:
    kind = getattr(policies, name)
    made = kind(policies.SnapKV(40), *WRAPPERS[name]) if name in WRAPPERS else kind(40)
    assert repr(COPIES[how](made)) == repr(made)


@pytest.mark.parametrize("how", COPIES)
def test_tensors_travel(how: str) -> None:
    made = kvcompress.quantize(torch.randn(2, 64), "int8")
    assert torch.equal(COPIES[how](made).dequantize(), made.dequantize())


def test_a_prefix_travels_in_files(tmp_path) -> None:
    """As the error of PrefixCache suggests."""
    here, there, prompt = (*(kvcompress.PrefixCache(config(), page_size=16) for _ in range(2)), ids(1, 80))
    cache = here.open(prompt)
    with torch.no_grad():
        model("llama")(prompt, past_key_values=cache)
    kept = here.commit(cache, prompt)
    cache.save(tmp_path / "x.kvc")
    assert there.commit(KVCache.load(tmp_path / "x.kvc", config(), pool=there.pool), prompt) == kept > 0
    assert there.open(prompt).get_seq_length() == here.open(prompt).get_seq_length() == kept


def test_every_public_class_is_looked_at() -> None:
    public = {name for name in kvcompress.__all__ if inspect.isclass(getattr(kvcompress, name))}
    assert public - set(policies.__all__) - set(PROCESS_BOUND) == {"QuantizedTensor", "KVzip"}
    assert issubclass(ShardedKV, PagedKV)
