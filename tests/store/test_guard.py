"""K that does not suit its format causes a warning or an error before any of it is stored."""

import copy
import warnings
from pathlib import Path

import models
import pytest
import torch
from generation import select
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvcompress import KVCache, PagedKV, formats
from kvcompress.hf import format_check

ROOT = Path(__file__).parents[2]


def keys(kind, T=256, D=64, seed=0):
    g = torch.Generator().manual_seed(seed)
    k = torch.randn(1, 2, T, D, generator=g)
    if kind == "bias":
        k[:, 1, :, ::16] += 25.0  # as a biased k_proj does to slow RoPE pairs: the same for every token
    elif kind == "outliers":
        k[:, 1, :, ::16] *= 12.0
    return k


# Error relative to K's own variation, float64, on the decoded page; shares no code with format_check.noise.
def reference(k, key):
    kv = PagedKV(2, k.shape[3], key=key, value="raw", sinks=0)
    kv.append(torch.cat([k, k[:, :, :64]], 2), torch.zeros(1, 2, k.shape[2] + 64, k.shape[3]))
    got, k = kv.dense()[0][0, :, : k.shape[2]].double(), k[0].double()
    return ((got - k) ** 2).sum((1, 2)) / ((k - k.mean(1, keepdim=True)) ** 2).sum((1, 2))


@pytest.mark.parametrize("key", [name for name in formats.NAMES if name != "raw"])
@pytest.mark.parametrize("kind", ["plain", "bias", "outliers"])
def test_noise_is_what_a_page_does(key, kind):
    k = keys(kind)
    torch.testing.assert_close(format_check.noise(k, key).double(), reference(k, key), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("key,kind,broken", [
    ("int8", "bias", False), ("fp8_e4m3", "bias", False), ("int4", "plain", False), ("int4", "bias", False),
    ("int4", "outliers", False), ("kivi4", "bias", False), ("int2", "bias", False), ("int4_token", "plain", False),
    ("int4_token", "bias", True), ("int4_asym", "bias", True), ("nvfp4", "bias", True), ("mxfp4", "bias", True),
    ("int2_asym", "bias", True), ("int2_asym", "outliers", True),
])  # fmt: skip
def test_format_check_rule(key, kind, broken):
    what = format_check.trouble(keys(kind), [key])
    assert bool(what) == broken
    if broken:
        assert what.startswith(f"{key} adds noise") and "head 1" in what


def biased(scale=40.0):
    m = copy.deepcopy(models.model("llama", head_dim=64))
    with torch.no_grad():
        for layer in m.model.layers[1:]:
            proj = layer.self_attn.k_proj
            proj.bias = torch.nn.Parameter(torch.zeros(proj.out_features))
            proj.bias[28:32] = scale  # slow pairs of head 0
    return m


def call(m, cache, T=80, seed=0):
    with torch.no_grad():
        m(models.ids(2, T, seed), past_key_values=cache)


@pytest.mark.parametrize("implementation", ["kvcompress", "sdpa"])
def test_a_warning_names_the_layers_once(implementation):
    m = select(biased(), implementation)
    cache = KVCache(m.config, "int4_token")
    with pytest.warns(UserWarning, match=r"layers \[1\]: keys do not suit .*Layer 1: int4_token.*head 0.*use int4"):
        call(m, cache)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        call(m, cache)  # no second warning
        call(m, copy.deepcopy(cache))
        cache.reset()
        call(m, cache)
        call(m, KVCache(m.config, "int4"))
        call(m, KVCache(m.config, "int8"))
        call(m, KVCache(m.config, "raw"))
        call(m, KVCache(m.config, "int4_token"), 20)  # nothing is sealed yet
        call(m, KVCache(m.config, "int4_token", per_layer={1: "int8"}))
    with pytest.warns(UserWarning, match="layers"):
        call(m, KVCache(m.config, "int8", spans=[(0, 50, "int4_token")]))


@pytest.mark.parametrize("implementation", ["kvcompress", "sdpa"])
def test_strict_raises_and_changes_nothing(implementation):
    m = select(biased(), implementation)
    cache = KVCache(m.config, "int4_token", strict=True)
    call(m, cache, 20)
    before = [x.clone() for layer in cache.layers for x in layer.store.dense()]
    for _ in range(2):
        with pytest.raises(ValueError, match="layer 1: expected keys that suit their format, but int4_token"):
            call(m, cache)
    assert cache.get_seq_length() == 20
    assert all(
        torch.equal(a, b) for a, b in zip(before, [x for y in cache.layers for x in y.store.dense()], strict=True)
    )
    call(m, cache, 5)  # continues
    call(m, KVCache(m.config, "int4", strict=True))


def test_short_calls_are_checked_before_they_are_sealed():
    m = select(biased(), "kvcompress")
    cache = KVCache(m.config, "int4_token", strict=True, page_size=32)
    call(m, cache, 20)
    with pytest.raises(ValueError, match="layer 1: expected keys"):
        for i in range(40):
            call(m, cache, 1, seed=i)
    assert cache.get_seq_length() == 36 and cache.layers[1].store.page_store.parts()["sealed"] == 0


def test_pads_may_hold_anything():
    layer = KVCache(models.CONFIGS["llama"](), "int4_token").layers[0]
    k = keys("plain", T=160, D=32).expand(2, -1, -1, -1).clone()
    k[1, :, :30] = float("nan")
    own = torch.ones(2, 160, dtype=torch.bool)
    own[1, :30] = False
    layer.lazy_initialization(k, k)
    layer.before_append(0, k, own)
    assert layer.format_checked


@pytest.mark.parametrize("name,breaks", [
    ("books-tiny", {"int2_asym"}),
    ("books-tiny-bias", {"int2_asym", "int4_token", "int4_asym", "nvfp4", "mxfp4"}),
])  # fmt: skip
def test_shipped_models(name, breaks):
    m = AutoModelForCausalLM.from_pretrained(ROOT / "assets" / name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets" / name)
    ids = tokenizer((ROOT / "assets/text/book.txt").read_text()[:2000], return_tensors="pt").input_ids[:, :400]
    for key in ("int8", "fp8_e4m3", "int4", "int2", "kivi4", "kivi2", "int4_token", "int4_asym", "nvfp4", "mxfp4",
                "int2_asym"):  # fmt: skip
        with warnings.catch_warnings(record=True) as caught, torch.no_grad():
            warnings.simplefilter("always")
            m(ids, past_key_values=KVCache(m.config, key))
        assert any("do not suit their format" in str(w.message) for w in caught) == (key in breaks), key
