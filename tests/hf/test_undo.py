"""A failed forward pass leaves every layer exactly as before."""

import copy

import models
import numpy as np
import pytest
import torch
import transformers as hf
from generation import cache_of, select
from models import ids, model

from kvcompress import _C, enable

NAN = float("nan")


def run(m, cache, T, seed=0, pads=None):
    tokens, past = ids(2, T, seed), cache.get_seq_length()
    mask = torch.ones(2, past + T, dtype=torch.long)
    if pads is not None:
        mask[1, :pads] = 0
    with torch.no_grad():
        return m(tokens, attention_mask=mask, past_key_values=cache).logits


def poison(m, layer=-1):
    """NaN in V of a layer; the layers before it have already stored the tokens."""
    return m.model.layers[layer].self_attn.v_proj.register_forward_hook(lambda module, args, out: out * NAN)


def state(cache):
    """Everything that a layer stores; addresses of pages and spare capacity of tables may change."""
    for layer in cache.layers:
        table = layer.store.page_store.table
        entries = table.entries[:, 0]
        yield [
            *layer.store.dense(), layer.store.seen, table.rows.tolist(), [x.tolist() for x in layer.store.kept()[0]],
            [row[row >= 0].tolist() for row in np.where(entries < 0, -1, entries & 0xFFFF)],
            {k: v for k, v in layer.store.page_store.parts().items() if k != "tables"},
        ]  # fmt: skip


def check_same(cache, twin):
    for got, want in zip(state(cache), state(twin), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got[:2], want[:2], strict=True)) and got[2:] == want[2:]
    assert cache.pool.stats()["used"] == twin.pool.stats()["used"]
    cache.pool.check()


@pytest.mark.parametrize("implementation", ["kvcompress", pytest.param("sdpa", marks=pytest.mark.full)])
@pytest.mark.parametrize("options", [
    {"key": "raw"}, {"key": "int8"}, {"key": "int4"}, {"key": "raw", "value": "int8"},
    {"key": "int8", "residual_length": 0},
    {"key": "int4", "residual_length": 20}, {"key": "int8", "residual_length": 7, "sinks": 0},
    {"key": "int4", "spans": [(0, 20, "raw"), (20, 40, "int8/int2"), (40, 60, "raw")]},
    {"key": "raw", "spans": [(0, 30, "kivi2")]}, {"key": "raw", "spans": [(0, 0.49, "int8")]},
    {"key": "int8", "spans": [(0, 0.3, "raw"), (0.3, 1, "int4")]},
])  # fmt: skip
def test_a_failed_pass_is_rolled_back(options, implementation):
    """Calls of one token and of many, with or without sealed pages, rows of equal or different lengths."""
    m = select(copy.deepcopy(model("llama")), implementation)
    for pads, lengths in ((None, [40, 13, 1, 1, 1]), (5, [30, *[1] * 22]), (17, [70, 5, 31])):
        cache, twin = cache_of(m, **options), cache_of(m, **options)
        for step, T in enumerate(lengths):
            for failing in (1, 6, 90):
                hook = poison(m)
                with pytest.raises(ValueError, match="NaN"):
                    run(m, cache, failing, 99, pads)
                hook.remove()
                if step:
                    check_same(cache, twin)
            assert torch.equal(run(m, cache, T, step, pads), run(m, twin, T, step, pads))
        check_same(cache, twin)


def test_pages_are_held_only_where_some_are_sealed_and_let_go():
    m = select(copy.deepcopy(model("llama")), "kvcompress")
    cache, held = cache_of(m, "int8"), []
    m.model.layers[-1].register_forward_pre_hook(lambda *args: held.append(len(cache.forward_pass.held)))
    run(m, cache, 20)
    for _ in range(32):
        run(m, cache, 1)
        assert not cache.forward_pass.held
    assert len(held) == 33 and sum(held[1:]) == 2  # 2 pages were left behind


def test_beams_that_share_what_is_sealed():
    m = select(copy.deepcopy(model("llama")), "kvcompress")
    cache, twin = cache_of(m, "int4"), cache_of(m, "int4")
    for c in (cache, twin):
        run(m, c, 35)
        c.reorder_cache(torch.tensor([1, 1]))
        run(m, c, 1, 1)
    hook = poison(m)
    for T in (1, 40):
        with pytest.raises(ValueError, match="NaN"):
            run(m, cache, T, 2)
        check_same(cache, twin)
    hook.remove()
    assert torch.equal(run(m, cache, 30, 3), run(m, twin, 30, 3))


def test_rollback_does_not_allocate():
    m = select(copy.deepcopy(model("llama")), "kvcompress")
    hook = None
    for n in range(1, 60):
        cache, twin = cache_of(m, "int8"), cache_of(m, "int8")
        for c in (cache, twin):
            run(m, c, 10)
        hook = poison(m)
        fail = m.model.layers[-1].self_attn.v_proj.register_forward_hook(lambda *args, n=n: _C.alloc_fail_at(n))
        try:
            with pytest.raises((ValueError, MemoryError)):
                run(m, cache, 60, 1)
        finally:
            _C.alloc_fail_at(0)
            hook.remove()
            fail.remove()
        check_same(cache, twin)


# ---------------------------------------------------------------- states that models update in place


def hybrid_of(*layers):
    config = hf.Qwen3NextConfig(
        **{**models.SIZE, "num_hidden_layers": len(layers)}, layer_types=[f"{x}_attention" for x in layers],
        num_experts=2, num_experts_per_tok=1,
        moe_intermediate_size=32, shared_expert_intermediate_size=32, linear_num_key_heads=2,
        linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
    )  # fmt: skip
    torch.manual_seed(7)
    m = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    assert enable(m, verbose=False).fused
    return m


@pytest.fixture(scope="module")
def hybrid():
    return hybrid_of("linear", "full")


def test_the_first_pass_of_a_hybrid_model_is_rolled_back(hybrid):
    cache, twin = cache_of(hybrid, "raw"), cache_of(hybrid, "raw")
    hook = poison(hybrid)
    with pytest.raises(ValueError, match="NaN"), torch.no_grad():
        hybrid(ids(3, 9), past_key_values=cache)  # another batch size
    hook.remove()
    for T in (20, 1):
        assert torch.equal(run(hybrid, cache, T), run(hybrid, twin, T))


def test_later_passes_of_a_hybrid_model_raise_until_reset(hybrid):
    cache, twin = cache_of(hybrid, "raw"), cache_of(hybrid, "raw")
    run(hybrid, cache, 20)
    before = copy.deepcopy(cache)
    hook = poison(hybrid)
    with pytest.raises(ValueError, match="NaN"):
        run(hybrid, cache, 1)
    hook.remove()
    for failed in (cache, copy.deepcopy(cache)):
        with pytest.raises(ValueError, match=r"linear-attention.*got.*reset"):
            run(hybrid, failed, 1)
    run(hybrid, twin, 20)
    assert torch.equal(run(hybrid, before, 1), run(hybrid, twin, 1))
    cache.reset()
    twin.reset()
    assert torch.equal(run(hybrid, cache, 9), run(hybrid, twin, 9))


@pytest.mark.parametrize("recorded", [False, True])
def test_a_crop_that_is_refused_changes_nothing(recorded):
    """By a layer with recurrent states behind a paged one; with `recorded`, transformers would leave the states as they
    are."""
    m = hybrid_of("full", "linear", "full", "linear")
    cache, twin = cache_of(m, "int8"), cache_of(m, "int8")
    for c in (cache, twin):
        if recorded:
            c.activate_past_recording()
        run(m, c, 20)
    with pytest.raises(ValueError, match="crop: expected layers without recurrent states"):
        cache.crop(-3)
    assert torch.equal(run(m, cache, 1), run(m, twin, 1))


def test_a_crop_of_a_suspended_cache_changes_nothing():
    """Of layers that it leaves to transformers, like one with a window of 1, either."""
    config = hf.Gemma3TextConfig(
        **{**models.SIZE, "num_hidden_layers": 2}, layer_types=["sliding_attention", "full_attention"], sliding_window=1
    )
    m = hf.Gemma3ForCausalLM(config).eval()
    cache = cache_of(m, "raw")
    run(m, cache, 9)
    cache.suspend()
    with pytest.raises(ValueError, match="got a suspended one"):
        cache.crop(-3)
    assert cache.layers[0].get_seq_length() == 9


# ---------------------------------------------------------------- passes interrupted elsewhere


class Broken(Exception):
    pass


def break_off(m, cache, where, T):
    def stop(*args):
        raise Broken

    hook = where.register_forward_pre_hook(stop)
    with pytest.raises(Broken):
        run(m, cache, T, 9)
    hook.remove()


@pytest.mark.parametrize("filled", [0, 20])
@pytest.mark.parametrize("layers,last", [
    (("linear", "linear", "full", "linear"), 1), (("full", "linear", "linear", "full"), 2),
])  # fmt: skip
def test_states_ahead_of_the_pages_are_detected(layers, last, filled):
    """A pass interrupted between linear-attention layers and the attention layers after them."""
    m = hybrid_of(*layers)
    cache, twin = cache_of(m, "raw"), cache_of(m, "raw")
    for c in (cache, twin):
        for T in (filled, 1) if filled else ():
            run(m, c, T)
    break_off(m, cache, m.model.layers[last].mlp, 9)
    for failed in (cache, copy.deepcopy(cache)):
        with pytest.raises(ValueError, match=r"linear-attention.*got.*reset"):
            run(m, failed, 1)
    for c in (cache, twin):
        c.reset()
    for T in (9, 1, 1):
        assert torch.equal(run(m, cache, T), run(m, twin, T))


@pytest.mark.parametrize("implementation", ["kvcompress", "sdpa"])
def test_an_interrupted_pass_is_detected(implementation):
    m = select(copy.deepcopy(model("llama")), implementation)
    for start in (0, 30):
        cache, twin = cache_of(m, "int8"), cache_of(m, "int8")
        for c in (cache, twin):
            if start:
                run(m, c, start)
        break_off(m, cache, m.model.layers[0].mlp, 3)
        for c in (cache, cache, copy.deepcopy(cache)):
            with pytest.raises(ValueError, match=rf"expected {start + 3} slots .*got {start} in layer 1.*reset"):
                run(m, c, 1)
        cache.reset()
        twin.reset()
        assert torch.equal(run(m, cache, 9), run(m, twin, 9))


def test_a_pass_interrupted_after_its_last_layer_is_complete():
    m = select(copy.deepcopy(model("llama")), "kvcompress")
    cache, twin = cache_of(m, "int8"), cache_of(m, "int8")
    break_off(m, cache, m.model.norm, 3)
    run(m, twin, 3, 9)
    assert torch.equal(run(m, cache, 2), run(m, twin, 2))


def test_a_model_that_runs_only_its_first_layers():
    """Only the first layers, call after call: the contents of the others do not matter."""
    m = copy.deepcopy(model("llama"))
    enable(m, verbose=False)
    cache = cache_of(m, "raw")
    del m.model.layers[1:]
    for T in (20, 1, 1):
        run(m, cache, T)
    assert [c.get_seq_length() for c in cache.layers] == [22, 0]
