"""`generate` with a fixed-length cache on a GPU: transformers compiles its decode steps by default. Each runs within
the cache's `step()`; a graph outside of it would store nothing, and must not run."""

import contextlib
import copy
import gc
import pickle

import models
import pytest
import torch
import transformers as hf
from cuda_twin import DEVICE
from families import family, some
from generation import cache_of, error, generate, logits_of, select
from models import ids, left_pads, model
from test_moving import Elsewhere

from kvcompress import KVCache, Tiers, ops
from kvcompress.hf.compiled_generate import Stepped

SLOTS = 160


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def fresh(implementation="kvcompress"):
    """A new model for the test: transformers stores the compiled call in it, and hooks that cannot be pickled after it
    has returned hidden states."""
    enabled = select(model.__wrapped__("llama"), "kvcompress")
    if implementation != "kvcompress":
        enabled.set_attn_implementation(implementation)
    return enabled.to(DEVICE)


class Compiles:
    """Makes `generate` compile as on an accelerator; counts graphs and their runs."""

    def __init__(self, **options):
        self.graphs = self.runs = 0

        def backend(graph, inputs):  # a method would be copied with the config, including self
            self.graphs += 1

            def run(*args):
                self.runs += 1
                return graph(*args)

            return run

        self.config = hf.CompileConfig(backend=backend, mode=None, **options)
        self.config._compile_all_devices = True


def both(m, key="int8", rows=2, **options):
    """(logits by steps, tokens) of `generate` with a cache on another device, and with one on the CPU."""
    tokens, mask = left_pads(ids(rows, 45), [0, 9][:rows])
    want = generate(m, tokens.to(DEVICE), cache_of(m, key), mask.to(DEVICE))
    with Elsewhere():
        cache = cache_of(m, key, max_length=SLOTS)
        got = generate(m, tokens.to(DEVICE), cache, mask.to(DEVICE), **options)
    assert cache.get_seq_length() == tokens.shape[1] + 19
    ops.check(DEVICE)
    return got, want


def check(got, want, bound=1e-4):
    assert torch.equal(got.sequences, want.sequences)
    assert max(float((a - b).abs().max()) for a, b in zip(got.logits, want.logits, strict=True)) < bound


@pytest.mark.parametrize("key,fullgraph", [
    ("int4", True), ("raw", False),
    *(pytest.param(*x, marks=pytest.mark.full) for x in (("raw", True), ("int4", False))),
])  # fmt: skip
def test_each_step_of_generate_is_a_graph_in_step(key, fullgraph):
    m, compiles = fresh(), Compiles(fullgraph=fullgraph)
    for runs in (19, 38):
        check(*both(m, key, compile_config=compiles.config))
        assert (compiles.graphs, compiles.runs) == (1, runs)


@pytest.mark.skipif(DEVICE != "cuda", reason="KVCOMPRESS_TEST_DEVICE=cuda: transformers compiles by itself")
def test_generate_on_a_gpu():
    m = fresh()
    for _ in range(2):
        check(*both(m), bound=1e-2)


@pytest.mark.parametrize("implementation", ["kvcompress", pytest.param("sdpa", marks=pytest.mark.full)])
def test_without_steps_only_pieces_are_compiled(implementation):
    """A model without `enable`: transformers compiles it all the same, and falls back."""
    m, compiles = fresh(implementation), Compiles()
    del m.__dict__["get_compiled_call"]
    check(*both(m, compile_config=compiles.config))


def test_other_attention_in_step_is_not_compiled():
    m, compiles = fresh("sdpa"), Compiles()
    check(*both(m, compile_config=compiles.config))
    assert compiles.graphs == 0


def test_a_prompt_in_chunks_is_not_compiled():
    m, compiles = fresh(), Compiles(fullgraph=True)
    check(*both(m, "raw", rows=1, compile_config=compiles.config, prefill_chunk_size=16))
    assert compiles.runs == 19 + (DEVICE == "cpu")  # an empty cache of host tensors looks like one on the CPU


@pytest.mark.parametrize("before", [pytest.param(0, marks=pytest.mark.full), 3])
def test_a_graph_outside_of_step_is_refused(before):
    m = fresh()
    fn, tokens = torch.compile(m, fullgraph=True, backend="eager"), ids(1, 60).to(DEVICE)
    with Elsewhere(), torch.no_grad():
        cache = cache_of(m, "int8", max_length=SLOTS)
        logits_of(m, cache, [40], tokens[:, :40])
        for i in range(before):
            with cache.step():
                fn(tokens[:, 40 + i : 41 + i], past_key_values=cache)
        with pytest.raises(Exception, match=r"expected max_length=, and on a GPU `with cache.step\(\):`"):
            fn(tokens[:, 50:51], past_key_values=cache)
        with pytest.raises(Exception, match="over one token a row"), cache.step():
            fn(tokens[:, 50:52], past_key_values=cache)
        assert cache.get_seq_length() == 40 + before
        with cache.step():
            fn(tokens[:, 50:51], past_key_values=cache)
        assert cache.get_seq_length() == 41 + before


def test_a_graph_outside_of_step_is_left():
    """Without fullgraph=True; the model asks the cache for positions."""
    m, tokens = fresh(), ids(1, 60).to(DEVICE)
    fn = torch.compile(m, backend="eager")
    with Elsewhere(), torch.no_grad():
        cache, twin = (cache_of(m, "int8", max_length=SLOTS) for _ in range(2))
        for c in (cache, twin):
            logits_of(m, c, [40], tokens[:, :40])
        for i, stepped in enumerate((False, True, True, False, False, True), 40):
            want = m(tokens[:, i : i + 1], past_key_values=twin).logits
            with cache.step() if stepped else contextlib.nullcontext():
                got = fn(tokens[:, i : i + 1], past_key_values=cache).logits
            assert error(got, want) < 1e-4 and cache.get_seq_length() == i + 1


def test_an_uncompiled_call_in_step_is_as_any():
    m, tokens = fresh(), ids(2, 60).to(DEVICE)
    with Elsewhere(), torch.no_grad():
        cache, twin = (cache_of(m, "int4", max_length=SLOTS) for _ in range(2))
        for c in (cache, twin):
            logits_of(m, c, [40], tokens[:, :40])
        for i in range(40, 60):
            want = m(tokens[:, i : i + 1], past_key_values=twin).logits
            with cache.step():
                got = m(tokens[:, i : i + 1], past_key_values=cache).logits
            assert torch.equal(got, want) and cache.get_seq_length() == i + 1
        with pytest.raises(ZeroDivisionError), cache.step():
            m(tokens[:, :1], past_key_values=cache)
            raise ZeroDivisionError
        assert cache.get_seq_length() == 61  # the call had finished


def test_copies_and_pickles_of_a_model_step_for_themselves():
    m = fresh()
    for twin in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert isinstance(twin.get_compiled_call, Stepped) and twin.get_compiled_call.model() is twin


# ---------------------------------------------------------------- features of generate() that graphs do not support


def pair(m, run, bound=1e-4 if DEVICE == "cpu" else 2e-2, **options):
    """Results of `run(cache, **options of generate)` uncompiled and compiled; number of graph runs. On a GPU they
    round differently, and another int8 code of K changes a logit by 5e-3."""
    compiles = Compiles()
    with Elsewhere():
        want = run(cache_of(m, "int8", max_length=SLOTS, **options))
        got = run(cache_of(m, "int8", max_length=SLOTS, **options), compile_config=compiles.config)
    check(got, want, bound)
    return compiles.runs


def padded():
    tokens, mask = left_pads(ids(2, 45), [0, 9])
    return tokens.to(DEVICE), mask.to(DEVICE)


@pytest.mark.parametrize("what", ["output_attentions", "training"])
def test_attention_that_needs_dense_k_and_v(what):
    m, (tokens, mask) = fresh(), padded()
    m.train(what == "training")
    more = {"output_attentions": True} if what == "output_attentions" else {}
    assert pair(m, lambda cache, **options: generate(m, tokens, cache, mask, **more, **options)) == 0


@pytest.mark.full
def test_attention_outside_of_the_graph_in_step():
    m, tokens = fresh(), ids(2, 60).to(DEVICE)
    fn = torch.compile(m, backend="eager")
    with Elsewhere(), torch.no_grad():
        cache, twin = (cache_of(m, "int8", max_length=SLOTS) for _ in range(2))
        for c in (cache, twin):
            logits_of(m, c, [40], tokens[:, :40])
        for i in range(40, 46):
            more = {"output_attentions": True} if i % 3 else {}
            want = m(tokens[:, i : i + 1], past_key_values=twin, **more).logits
            with cache.step():
                got = fn(tokens[:, i : i + 1], past_key_values=cache, **more).logits
            assert error(got, want) < 1e-4 and {layer.store.seen for layer in cache.layers} == {i + 1}


@pytest.mark.parametrize("chunk,pads", [(1, "left"), pytest.param(16, "right", marks=pytest.mark.full)])
def test_chunks_of_one_token_may_be_pads(chunk, pads, monkeypatch):
    monkeypatch.setattr(KVCache, "needs_step", lambda cache, device: True)  # as on a GPU, also for an empty cache
    tokens, mask = padded()
    if pads == "right":
        tokens, mask = tokens[:, :33], torch.ones_like(tokens[:, :33])
        mask[1, -5:] = 0
    m = fresh()
    run = pair(m, lambda cache, **options: generate(m, tokens, cache, mask, prefill_chunk_size=chunk, **options))
    assert run >= 19


def test_a_second_turn_hides_what_the_first_stored():
    """Row 0 ends early: generate() pads it, and the next mask hides the padding."""
    m, tokens = fresh(), ids(2, 45).to(DEVICE)
    end = int(generate(m, tokens, cache_of(m, "int8")).sequences[0, 48])
    later = ids(2, 10, seed=5).to(DEVICE)

    def run(cache, **options):
        first = generate(m, tokens, cache, eos_token_id=end, **options).sequences
        text = torch.cat([first, later], 1)
        assert bool((text == 0).any())
        return generate(m, text, cache, (text != 0).long(), **options)

    assert pair(m, run) == 19  # of the first turn


def test_windows_hide_nothing_more():
    m, (tokens, mask) = select(models.model.__wrapped__("gemma3"), "kvcompress").to(DEVICE), padded()
    assert pair(m, lambda cache, **options: generate(m, tokens, cache, mask, **options)) == 19


def test_half_of_a_model_in_autocast():
    m, (tokens, mask) = fresh(), padded()
    with torch.autocast(DEVICE, torch.bfloat16):
        runs = pair(m, lambda cache, **options: generate(m, tokens, cache, mask, **options),
                    bound=1e-4 if DEVICE == "cpu" else 0.1)  # fmt: skip
    assert runs == 19


def test_offloaded_pages_are_not_compiled():
    m, (tokens, mask) = fresh(), padded()

    def run(cache, **options):
        cache.use_tiers(Tiers(), resident=16, unit=1)
        return generate(m, tokens, cache, mask, **options)

    assert pair(m, run) == 0


def two_widths():
    """Layers with heads of 16 and of 512 dims."""
    config = hf.Gemma4TextConfig(
        **some(num_hidden_layers=2), sliding_window=24, global_head_dim=512, vocab_size_per_layer_input=96,
        hidden_size_per_layer_input=16, num_kv_shared_layers=0, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    torch.manual_seed(7)
    made = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    return select(made.eval(), "kvcompress").to(DEVICE)


def test_a_model_with_heads_of_two_widths():
    m, (tokens, mask) = two_widths(), padded()
    assert pair(m, lambda cache, **options: generate(m, tokens, cache, mask, **options)) == 19


def test_transformers_own_static_cache():
    m, compiles, tokens = fresh(), Compiles(), ids(2, 30).to(DEVICE)
    options = dict(cache_implementation="static", max_new_tokens=10, do_sample=False, pad_token_id=0)
    want = m.generate(tokens, **options)
    assert torch.equal(m.generate(tokens, compile_config=compiles.config, **options), want) and compiles.runs == 9


# ---------------------------------------------------------------- failures


def test_a_failed_step_leaves_all_layers_alike():
    m, tokens = two_widths(), ids(1, 60).to(DEVICE)
    fn = torch.compile(m, backend="eager")
    with Elsewhere(), torch.no_grad():
        cache, twin = (cache_of(m, "int8", max_length=SLOTS) for _ in range(2))
        for c in (cache, twin):
            logits_of(m, c, [40], tokens[:, :40])
        with pytest.raises(ZeroDivisionError), cache.step():
            fn(tokens[:, 40:41], past_key_values=cache)
            raise ZeroDivisionError
        assert {layer.store.seen for layer in cache.layers} == {40}
        want = m(tokens[:, 40:41], past_key_values=twin).logits
        assert error(m(tokens[:, 40:41], past_key_values=cache).logits, want) < 1e-4


@pytest.mark.parametrize("name", ["linear", pytest.param("conv", marks=pytest.mark.full)])
def test_states_of_a_failed_step_cannot_be_taken_back(name):
    m = select(copy.deepcopy(family(name)), "kvcompress").to(DEVICE)
    tokens = ids(1, 60).to(DEVICE)
    fn = torch.compile(m, backend="eager")
    with Elsewhere(), torch.no_grad():
        cache = cache_of(m, "int8", max_length=SLOTS)
        logits_of(m, cache, [40], tokens[:, :40])
        with pytest.raises(ZeroDivisionError), cache.step():
            fn(tokens[:, 40:41], past_key_values=cache)
            raise ZeroDivisionError
        for call in (m, fn):
            with pytest.raises(Exception, match=r"reset\(\) the cache"), cache.step():
                call(tokens[:, 40:41], past_key_values=cache)
        with pytest.raises(ValueError, match=r"reset\(\) the cache"):
            m(tokens[:, 40:41], past_key_values=cache)
        cache.reset()
        logits_of(m, cache, [40], tokens[:, :40])


def test_a_suspended_cache_takes_no_step():
    m, tokens = fresh(), ids(1, 60).to(DEVICE)
    with Elsewhere(), torch.no_grad():
        cache = cache_of(m, "int8", max_length=SLOTS)
        logits_of(m, cache, [40], tokens[:, :40])
        cache.suspend()
        with pytest.raises(ValueError, match="suspended"), cache.step():
            m(tokens[:, 40:41], past_key_values=cache)
        cache.resume()
        assert cache.get_seq_length() == 40


def test_the_original_of_a_shallow_copy_is_gone():
    shallow = copy.copy(m := fresh())
    del m
    gc.collect()
    with pytest.raises(RuntimeError, match=r"enable\(model\) on the copy"):
        shallow.get_compiled_call(None)
    assert select(shallow, "kvcompress").get_compiled_call.model() is shallow
