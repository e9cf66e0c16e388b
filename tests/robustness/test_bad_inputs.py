"""Every mistake is a ValueError, TypeError or MemoryError with expected, got and a hint, and changes nothing."""

import copy

import models
import pytest
import torch
import transformers as hf
from models import ids, model

from kvcompress import _C, KVCache, PagedKV, enable

NAN, INF = float("nan"), float("inf")


def filled(**options):
    kv = PagedKV(2, 32, page_size=16, **options)
    x = torch.randn(1, 2, 40, 32)
    kv.append(x, x)
    return kv


def good(T=3):
    return torch.randn(1, 2, T, 32), torch.randn(1, 2, T, 32)


def poisoned(value, side):
    pair = [x.clone() for x in good()]
    pair[side][0, 1, 2, 5] = value
    return pair


BAD_PAIRS = {
    "k is no tensor": lambda: ([1.0], good()[1]),
    "rank": lambda: (good()[0][0], good()[1][0]),
    "dtype": lambda: tuple(x.double() for x in good()),
    "other float dtype": lambda: tuple(x.half() for x in good()),
    "heads": lambda: (torch.randn(1, 3, 3, 32), torch.randn(1, 3, 3, 32)),
    "head dim": lambda: (torch.randn(1, 2, 3, 16), good()[1]),
    "value dim": lambda: (good()[0], torch.randn(1, 2, 3, 48)),
    "batch": lambda: (torch.randn(2, 2, 3, 32), torch.randn(2, 2, 3, 32)),
    "lengths differ": lambda: (good(3)[0], good(4)[1]),
    "no tokens": lambda: good(0),
    "no rows": lambda: (torch.randn(0, 2, 3, 32), torch.randn(0, 2, 3, 32)),
    "last dim not contiguous": lambda: (torch.randn(1, 2, 32, 3).transpose(2, 3), good()[1]),
    "device": lambda: tuple(x.to("meta") for x in good()),
    "NaN in k": lambda: poisoned(NAN, 0),
    "NaN in v": lambda: poisoned(NAN, 1),
    "Inf in k": lambda: poisoned(INF, 0),
    "-Inf in v": lambda: poisoned(-INF, 1),
    "autograd": lambda: tuple(x.requires_grad_() for x in good()),
}


def state(kv):
    """Everything that must not change; spare capacity of the tables and the pool may."""
    parts, used = kv.page_store.parts(), kv.page_store.pool.stats()["used"]
    return kv.seen, kv.page_store.kept_tokens, kv.batch, parts["sealed"], parts["open"], parts["sinks"], used


def check_untouched(kv, before, frozen):
    assert state(kv) == before
    assert all(torch.equal(a, b) for a, b in zip(kv.dense(), frozen, strict=True))
    k, v = good()
    kv.append(k, v)
    assert kv.seen == before[0] + 3 and torch.equal(kv.dense()[0][:, :, -3:], k)
    kv.page_store.pool.check()


def check_text(caught):
    assert caught.type in (ValueError, TypeError, MemoryError)
    assert "expected" in str(caught.value) and "got" in str(caught.value), str(caught.value)


@pytest.mark.parametrize("options", [{"key": "int8"}, {"key": "int4", "value": "kivi2"}, {"key": "raw"},
                                     {"key": "fp8_e4m3", "residual_length": 0}], ids=str)  # fmt: skip
def test_nan_far_behind_what_was_written_already(options):
    """Own tokens are checked one page at a time, so most pages of a long call are written when the last one is
    rejected. The contents then, and after the next call, equal those of a layer without that call."""
    torch.manual_seed(0)
    x = torch.randn(2, 1, 2, 740, 32)
    kv, twin = PagedKV(2, 32, page_size=16, **options), PagedKV(2, 32, page_size=16, **options)
    for layer in (kv, twin):
        layer.append(*x[:, :, :, :40])
    before = state(kv)
    for side in (0, 1):
        bad = x[:, :, :, 40:].clone()
        bad[side, 0, 1, 699, 31] = NAN
        with pytest.raises(ValueError, match=f"{'kv'[side]}: .*sequence 0, head 1, token 699"):
            kv.append(*bad)
        assert state(kv) == before
        assert all(torch.equal(a, b) for a, b in zip(kv.dense(), twin.dense(), strict=True))
    for layer in (kv, twin):
        layer.append(*x[:, :, :, 40:])
    assert all(torch.equal(a, b) for a, b in zip(kv.dense(), twin.dense(), strict=True))
    kv.page_store.pool.check()


@pytest.mark.parametrize("what", BAD_PAIRS)
@pytest.mark.parametrize("call", ["append", "attend"])
def test_bad_keys_and_values(what, call):
    kv = filled()
    before, frozen = state(kv), kv.dense()
    k, v = BAD_PAIRS[what]()
    with pytest.raises((ValueError, TypeError)) as caught:
        if call == "append":
            kv.append(k, v)
        else:
            kv.attend(torch.randn(1, 4, 3, 32), k, v)
    check_text(caught)
    check_untouched(kv, before, frozen)


Q = (1, 4, 3, 32)
BAD_CALLS = {
    "q heads": lambda kv: kv.attend(torch.randn(1, 3, 3, 32), *good()),
    "q dim": lambda kv: kv.attend(torch.randn(1, 4, 3, 16), *good()),
    "q rank": lambda kv: kv.attend(torch.randn(4, 3, 32), *good()),
    "q batch": lambda kv: kv.attend(torch.randn(2, 4, 3, 32), *good()),
    "q length": lambda kv: kv.attend(torch.randn(1, 4, 2, 32), *good()),
    "q dtype": lambda kv: kv.attend(torch.randn(*Q).double(), *good()),
    "q ints": lambda kv: kv.attend(torch.ones(*Q, dtype=torch.int64), *good()),
    "q is none": lambda kv: kv.attend(None, *good()),
    "q strides": lambda kv: kv.attend(torch.randn(1, 4, 32, 3).transpose(2, 3), *good()),
    "q autograd": lambda kv: kv.attend(torch.randn(*Q, requires_grad=True), *good()),
    "k without v": lambda kv: kv.attend(torch.randn(*Q), good()[0]),
    "mask without k": lambda kv: kv.attend(torch.randn(*Q), mask=torch.ones(1, 3, dtype=torch.bool)),
    "mask shape": lambda kv: kv.append(*good(), torch.ones(1, 4, dtype=torch.bool)),
    "mask rank": lambda kv: kv.append(*good(), torch.ones(3, dtype=torch.bool)),
    "mask type": lambda kv: kv.append(*good(), [True] * 3),
    "mask device": lambda kv: kv.append(*good(), torch.ones(1, 3, dtype=torch.bool, device="meta")),
    "more queries than slots": lambda kv: kv.attend(torch.randn(1, 4, 41, 32)),
    "window": lambda kv: kv.attend(torch.randn(*Q), *good(), window=-1),
    "softcap": lambda kv: kv.attend(torch.randn(*Q), *good(), softcap=-1.0),
    "window type": lambda kv: kv.attend(torch.randn(*Q), *good(), window=2.5),
    "window bool": lambda kv: kv.attend(torch.randn(*Q), window=True),
    "window huge": lambda kv: kv.attend(torch.randn(*Q), window=2**63),
    "softcap NaN": lambda kv: kv.attend(torch.randn(*Q), *good(), softcap=NAN),
    "scale type": lambda kv: kv.attend(torch.randn(*Q), *good(), scale="a"),
    "scale tensor": lambda kv: kv.attend(torch.randn(*Q), *good(), scale=torch.ones(2)),
    "scale NaN": lambda kv: kv.attend(torch.randn(*Q), scale=NAN),
    "scale huge": lambda kv: kv.attend(torch.randn(*Q), *good(), scale=10**400),
    "s_aux": lambda kv: kv.attend(torch.randn(*Q), *good(), s_aux=torch.zeros(2)),
    "crop beyond": lambda kv: kv.crop(41),
    "crop negative": lambda kv: kv.crop(-1),
    "crop type": lambda kv: kv.crop(1.5),
    "crop huge": lambda kv: kv.crop(2**70),
    "select range": lambda kv: kv.select([1]),
    "select negative": lambda kv: kv.select([-1]),
    "select nothing": lambda kv: kv.select([]),
    "select floats": lambda kv: kv.select(torch.zeros(1)),
    "select mask": lambda kv: kv.select(torch.tensor([True, False])),
    "select rank": lambda kv: kv.select([[0]]),
    "repeat": lambda kv: kv.repeat(0),
    "repeat huge": lambda kv: kv.repeat(2**40),
    "reset": lambda kv: kv.reset(0),
}


@pytest.mark.parametrize("what", BAD_CALLS)
def test_bad_calls(what):
    kv = filled()
    before, frozen = state(kv), kv.dense()
    with pytest.raises((ValueError, TypeError)) as caught:
        BAD_CALLS[what](kv)
    check_text(caught)
    check_untouched(kv, before, frozen)


@pytest.mark.parametrize("options", [
    {"key": "int7"}, {"key": 8}, {"value": "int5"}, {"key": "raw_f16"}, {"dtype": torch.float64},
    {"device": "cuda"}, {"page_size": 20}, {"page_size": 0}, {"page_size": 512}, {"page_size": "64"},
    {"sinks": -1}, {"sinks": 1000}, {"residual_length": -1}, {"residual_length": True},
    {"batch": 0}, {"batch": True}, {"sinks": 2**70}, {"residual_length": 2**70}, {"batch": 2**40}, {"page_size": 2**70},
    {"value_dim": 2**40},
    {"key": "int4", "residual_length": 0}, {"value_dim": 600}, {"spans": []}, {"spans": "int8"}, {"spans": [(0, 5)]},
    {"spans": [(1, 5, "int8")]}, {"spans": [(0, 5, "int8"), (4, 9, "int4")]}, {"spans": [(0, 0.5, "int5")]},
    {"spans": [(0, 1.5, "int8")]}, {"spans": [(0, 5, "int8")], "span_tokens": 0}, {"spans": [(0, 5, ("int8", 4))]},
    {"spans": [(0, "5", "int8")]}, {"spans": [(i, i + 1, "int8") for i in range(17)]},
    {"spans": [(0, 5, "int4")], "residual_length": 0},
])  # fmt: skip
def test_bad_construction(options):
    with pytest.raises((ValueError, TypeError)) as caught:
        PagedKV(2, 32, **options)
    check_text(caught)


@pytest.mark.parametrize("heads,dim,key", [
    (0, 32, "int8"), (2**40, 32, "int8"), (2**70, 32, "int8"), (2, 0, "int8"), (2, 577, "int8"), (2, -1, "int4_g32"),
    (2, 1024, "int8"), (2, 2**40, "int8"),
])  # fmt: skip
def test_bad_heads(heads, dim, key):
    with pytest.raises(ValueError) as caught:
        PagedKV(heads, dim, key=key)
    check_text(caught)


def test_out_of_memory():
    kv = PagedKV(2, 32, pool=_C.Pool(8 << 20))
    x = torch.randn(1, 2, 500, 32)
    kv.append(x, x)
    before, frozen = state(kv), kv.dense()
    big = torch.randn(1, 2, 50_000, 32)
    with pytest.raises(MemoryError):
        kv.append(big, big)
    check_untouched(kv, before, frozen)


def test_a_plan_of_another_thread_is_left_alone():
    kv = filled()
    kv.page_store.table.plan(1)
    with pytest.raises(ValueError, match="append under way"):
        kv.append(*good())
    with pytest.raises(ValueError, match="append under way"):
        kv.crop(0)
    kv.page_store.table.rollback()
    kv.append(*good())
    assert kv.seen == 43


def test_an_interrupt_right_after_the_plan_puts_it_back():
    class Interrupted:
        def __init__(self, table):
            self.table = table

        def __getattr__(self, name):
            return getattr(self.table, name)

        def plan(self, *args):
            self.table.plan(*args)
            raise KeyboardInterrupt

    kv = filled()
    before, frozen, table = state(kv), kv.dense(), kv.page_store.table
    kv.page_store.table = Interrupted(table)
    with pytest.raises(KeyboardInterrupt):
        kv.append(*good())
    kv.page_store.table = table
    check_untouched(kv, before, frozen)


def test_nan_in_padding_is_ignored():
    kv = filled()
    k, v = good()
    k[:, :, 0] = NAN
    out, _ = kv.attend(torch.randn(*Q), k, v, mask=torch.tensor([[False, True, True]]))
    assert out.isfinite().all() and kv.stats()["kept"] == 42


# ---------------------------------------------------------------- KVCache


@pytest.mark.parametrize("make", [hf.T5Config, hf.BertConfig, hf.WhisperConfig, hf.ViTConfig, hf.BartConfig])
def test_not_a_decoder_only_model(make):
    with pytest.raises(ValueError) as caught:
        KVCache(make())
    check_text(caught)


@pytest.mark.parametrize("config", [None, {}, "llama"])
def test_not_a_config(config):
    with pytest.raises(TypeError) as caught:
        KVCache(config)
    check_text(caught)


@pytest.mark.parametrize("options", [
    {"key_or_format": "int5"}, {"key": "kivi"}, {"value": 4}, {"page_size": 17}, {"sinks": -1},
    {"residual_length": -2}, {"key": "int4", "residual_length": 0}, {"max_bytes": -1},
    {"max_bytes": 2.5}, {"max_bytes": 2**70}, {"max_bytes": True}, {"sinks": 2**70},
    {"max_bytes": 2**20, "pool": _C.Pool()},
])  # fmt: skip
def test_bad_cache_options(options):
    with pytest.raises((ValueError, TypeError)) as caught:
        KVCache(models.CONFIGS["llama"](), **options)
    check_text(caught)


def test_bad_head_dim_shows_at_construction():
    config = models.CONFIGS["llama"]()
    config.head_dim = 587  # too wide, and a prime
    with pytest.raises(ValueError) as caught:
        KVCache(config, "int4")
    check_text(caught)


def run(m, cache, T, seed):
    with torch.no_grad():
        return m(ids(2, T, seed), past_key_values=cache).logits


@pytest.mark.parametrize("implementation", ["kvcompress", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral"])
def test_nan_in_the_middle_of_a_forward_pass(name, implementation):
    """NaN in V of the last layer: the layers before it have already stored the tokens, and must remove them."""
    m = copy.deepcopy(model(name))
    enable(m, verbose=False) if implementation == "kvcompress" else m.set_attn_implementation(implementation)
    cache, twin = (KVCache(m.config, "raw", page_size=16) for _ in range(2))
    for c in (cache, twin):
        run(m, c, 40, 0)
    if name == "mistral":
        return  # no layer of ours: transformers' sliding layers accept NaN
    projection = m.model.layers[-1].self_attn.v_proj
    hook = projection.register_forward_hook(lambda module, args, out: out * NAN)
    for T in (1, 30):
        with pytest.raises(ValueError, match="NaN"):
            run(m, cache, T, 1)
        assert {layer.get_seq_length() for layer in cache.layers} == {40}
    hook.remove()
    for T in (1, 20, 1):
        torch.testing.assert_close(run(m, cache, T, 2), run(m, twin, T, 2), rtol=1e-5, atol=1e-5)


def test_every_failing_allocation_in_a_forward_pass():
    m = copy.deepcopy(model("llama"))
    enable(m, verbose=False)
    cache, twin = (KVCache(m.config, "int8", page_size=16) for _ in range(2))
    for c in (cache, twin):
        run(m, c, 21, 0)
    failures = 0
    while True:
        _C.alloc_fail_at(failures + 1)
        try:
            got = run(m, cache, 3, 1)
            break
        except MemoryError:
            failures += 1
        finally:
            _C.alloc_fail_at(0)
        assert {layer.get_seq_length() for layer in cache.layers} == {21}
        assert failures < 300
    assert failures >= 10
    torch.testing.assert_close(got, run(m, twin, 3, 1), rtol=1e-4, atol=1e-4)


def test_limit_of_memory_in_generate():
    m = copy.deepcopy(model("llama"))
    enable(m, verbose=False)
    cache = KVCache(m.config, "raw", max_bytes=2 << 20)
    with pytest.raises(MemoryError):
        run(m, cache, 3000, 0)
    assert cache.get_seq_length() == 0
    assert run(m, cache, 5, 0).isfinite().all() and cache.get_seq_length() == 5


def test_autograd_is_refused():
    m = copy.deepcopy(model("llama"))
    enable(m, verbose=False)
    cache = KVCache(m.config)
    with pytest.raises(ValueError, match="no_grad"):
        m(ids(1, 5), past_key_values=cache)
    assert cache.get_seq_length() == 0


def test_wrong_layer_and_wrong_mask():
    m = copy.deepcopy(model("llama"))
    enable(m, verbose=False)
    cache = KVCache(m.config)
    with pytest.raises(ValueError) as caught:
        cache.update(*good(), 2)
    check_text(caught)
    run(m, cache, 5, 0)
    with pytest.raises(ValueError) as caught:
        cache.update(torch.randn(3, 2, 1, 32), torch.randn(3, 2, 1, 32), 0)
    check_text(caught)
    with pytest.raises(TypeError) as caught:
        cache.update([1], [2], 0)
    check_text(caught)
    assert cache.get_seq_length() == 5
