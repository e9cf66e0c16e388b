"""`generate` with a fixed-length cache on a GPU: transformers compiles its decode steps, asked or not. Each stands in
the cache's `step()`; a graph that runs elsewhere would store nothing, and must not run."""

import contextlib
import copy
import pickle

import pytest
import torch
import transformers as hf
from cuda_twin import DEVICE
from generation import cache_of, error, generate, logits_of, select
from models import ids, left_pads, model
from test_moving import Elsewhere

from kvcompress import ops
from kvcompress.models.stepping import Stepped

SLOTS = 160


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def fresh(implementation="kvcompress"):
    """A model of the test's own, built anew: transformers keeps its compiled call in it, and hooks that do not pickle
    once it has shown its hidden states."""
    enabled = select(model.__wrapped__("llama"), "kvcompress")
    if implementation != "kvcompress":
        enabled.set_attn_implementation(implementation)
    return enabled.to(DEVICE)


class Compiles:
    """`generate` compiles as on an accelerator; counts graphs and their runs."""

    def __init__(self, **options):
        self.graphs = self.runs = 0

        def backend(graph, inputs):  # a method would be copied with the config, and its self with it
            self.graphs += 1

            def run(*args):
                self.runs += 1
                return graph(*args)

            return run

        self.config = hf.CompileConfig(backend=backend, mode=None, **options)
        self.config._compile_all_devices = True


def both(m, key="int8", rows=2, **options):
    """(logits by steps, tokens) of `generate` with a cache elsewhere, and of one on the CPU."""
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
def test_without_steps_nothing_is_compiled(implementation):
    """A model that `enable` has not seen: transformers compiles it all the same, and falls back."""
    m, compiles = fresh(implementation), Compiles()
    del m.__dict__["get_compiled_call"]
    check(*both(m, compile_config=compiles.config))


def test_other_attention_in_step_is_not_compiled():
    m, compiles = fresh("sdpa"), Compiles()
    check(*both(m, compile_config=compiles.config))


def test_a_prompt_in_chunks_is_not_compiled():
    m, compiles = fresh(), Compiles(fullgraph=True)
    check(*both(m, "raw", rows=1, compile_config=compiles.config, prefill_chunk_size=16))
    assert compiles.runs == 19 + (DEVICE == "cpu")  # of an empty cache the host's tensors say that it is on the CPU


@pytest.mark.parametrize("before", [0, 3])
def test_a_graph_outside_of_step_is_refused(before):
    m = fresh()
    fn, tokens = torch.compile(m, fullgraph=True, backend="eager"), ids(1, 60).to(DEVICE)
    with Elsewhere(), torch.no_grad():
        cache = cache_of(m, "int8", max_length=SLOTS)
        logits_of(m, cache, [40], tokens[:, :40])
        for i in range(before):
            with cache.step():
                fn(tokens[:, 40 + i : 41 + i], past_key_values=cache)
        with pytest.raises(Exception, match=r"wanted max_length=, and on a GPU `with cache.step\(\):`"):
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
        assert cache.get_seq_length() == 61  # the call was over


def test_copies_and_pickles_of_a_model_step_for_themselves():
    m = fresh()
    for twin in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert isinstance(twin.get_compiled_call, Stepped) and twin.get_compiled_call.model() is twin
