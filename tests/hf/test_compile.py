"""KVCache(max_length=): one graph of a decode step serves every step and every cache."""

import copy

import pytest
import torch
import transformers as hf
from families import CONFIGS, family
from generation import IMPLEMENTATIONS, PAGE, cache_of, check_same, error, generate, logits_of, select
from models import SIZE, ids, left_pads, model
from modes import MODES
from torch._dynamo.testing import CompileCounter

from kvcompress import KVCache, PrefixCache, enable, policies
from kvcompress.hf.layer import PagedLayer

SLOTS = 160
OLD_LLAMA4 = "5.19."


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def steps(m, fn, cache, tokens, start, masked):
    """Logits of single tokens after a prompt of `start`, with constant shapes as in a compiled model."""
    mask = masked[1] if masked else None
    positions = (mask.cumsum(1) - 1).clamp(min=0) if masked else None
    logits_of(m, cache, [start], tokens[:, :start], None if mask is None else mask[:, :start])
    fixed = (
        {} if mask is None else {"attention_mask": torch.nn.functional.pad(mask, (0, SLOTS - mask.shape[1]), value=1)}
    )
    out = []
    with torch.no_grad():
        for i in range(start, tokens.shape[1]):
            own = {} if mask is None else {**fixed, "position_ids": positions[:, i : i + 1]}
            out.append(fn(tokens[:, i : i + 1], past_key_values=cache, **own).logits.clone())
    return torch.cat(out, 1)


def want(m, key, tokens, start, masked):
    mask = masked[1] if masked else None
    lengths = [start, *[1] * (tokens.shape[1] - start)]
    return torch.cat(logits_of(m, cache_of(m, key), lengths, tokens, mask)[1:], 1)


@pytest.mark.parametrize("padded", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("key", [pytest.param("raw", marks=pytest.mark.full), "int4"])
def test_one_graph_for_all_steps_and_caches(key, implementation, padded):
    m = select(model("llama"), implementation)
    counter = CompileCounter()
    fn = torch.compile(m, fullgraph=True, backend=counter)
    tokens = ids(2, 150)
    masked = left_pads(tokens, [0, 9]) if padded else None
    tokens = masked[0] if padded else tokens
    expected = want(m, key, tokens, 45, masked)
    for _ in range(2):
        cache = cache_of(m, key, max_length=SLOTS)
        assert cache.is_compileable and cache.get_max_length() == SLOTS
        assert error(steps(m, fn, cache, tokens, 45, masked), expected) < 1e-4
        assert cache.get_seq_length() == 150 and cache.layers[0].length == 150
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.full), "gemma3"])
def test_memory_of_a_static_cache_does_not_move(name):
    """100 steps over page boundaries and windows: the pool and the tables that a CUDA graph reads are not
    reallocated."""
    m = select(model(name), "kvcompress")
    counter = CompileCounter()
    fn, cache = torch.compile(m, fullgraph=True, backend=counter), cache_of(m, "int4", max_length=SLOTS)
    tokens = ids(1, 150)

    def places():
        tables = [layer.store.page_store.table for layer in cache.layers]
        arrays = [x for table in tables for x in (table.entries, table.rows)] + [cache.pool.arena]
        return [x.ctypes.data for x in arrays]

    steps(m, fn, cache, tokens[:, :46], 45, None)
    before = places()
    with torch.no_grad():
        for i in range(46, 150):
            fn(tokens[:, i : i + 1], past_key_values=cache)
            assert places() == before
    assert counter.frame_count == 1
    with pytest.raises(ValueError, match="reserve: expected 0 to"):
        cache.layers[0].store.page_store.table.reserve(-1)


@pytest.mark.full  # half a minute each
@pytest.mark.parametrize("implementation", ["sdpa", "kvcompress"])
def test_inductor(implementation):
    """Inductor reorders what the graph allows: the length must not change between its reads."""
    m = select(model("llama"), implementation)
    fn, tokens = torch.compile(m, fullgraph=True), ids(2, 60)
    got = steps(m, fn, cache_of(m, "int8", max_length=SLOTS), tokens, 40, None)
    assert error(got, want(m, "int8", tokens, 40, None)) < 1e-4


@pytest.mark.parametrize("key", ["raw", pytest.param("int4", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", [
    "gemma3", "linear", "split",
    *(pytest.param(x, marks=pytest.mark.full)
      for x in ("mistral", "gemma4", "gpt_oss", "deepseek_v3", "llama4", "gemma3n", "conv")),
])  # fmt: skip
def test_one_graph_where_a_static_cache_needs_two(name, key):
    """transformers' sliding layers need a second graph when their window is full. In "split", split() made K."""
    m = family(name) if name != "split" else hf.GPTBigCodeForCausalLM(
        hf.GPTBigCodeConfig(vocab_size=96, n_embd=64, n_layer=2, n_head=2)
    ).eval()  # fmt: skip
    m = select(m, "eager" if name == "deepseek_v3" else "kvcompress")
    tokens, counter = ids(1, 45), CompileCounter()
    fn = torch.compile(m, fullgraph=True, backend=counter)
    cache = cache_of(m, key, max_length=SLOTS)
    got = steps(m, fn, cache, tokens, 10, None)
    assert counter.frame_count == 1
    assert {layer.get_seq_length() for layer in cache.layers if isinstance(layer, PagedLayer)} == {45}, "stored once"
    assert error(got, want(m, key, tokens, 10, None)) < 1e-4


def test_the_graph_serves_after_a_prefix_was_found():
    """A conversation over a PrefixCache with fixed length: turns that start with shared pages run the graph of the
    first."""
    m = select(model("llama"), "kvcompress")
    counter, tokens = CompileCounter(), ids(1, 150)
    fn = torch.compile(m, fullgraph=True, backend=counter)
    prefix = PrefixCache(m.config, "int8", max_length=SLOTS, page_size=16)
    expected = want(m, "int8", tokens, 84, None)
    for held in (0, 84, 84):
        cache = prefix.open(tokens[:, :100])
        assert cache.get_seq_length() == held
        with torch.no_grad():
            if not held:
                m(tokens[:, :84], past_key_values=cache)
            got = torch.cat([fn(tokens[:, i : i + 1], past_key_values=cache).logits for i in range(84, 150)], 1)
        assert error(got, expected) < 1e-4
        prefix.commit(cache, tokens[:, :100])
    assert counter.frame_count == 1 and prefix.stats()["hits"] == 2


def test_generate_compiles():
    m = select(copy.deepcopy(model("llama")), "kvcompress")
    counter = CompileCounter()
    config = hf.CompileConfig(fullgraph=True, backend=lambda graph, inputs: counter(graph, inputs), mode=None)
    config._compile_all_devices = True  # transformers compiles on accelerators only
    tokens, mask = left_pads(ids(2, 45), [0, 9])
    expected = generate(m, tokens, cache_of(m, "int8"), mask)
    for _ in range(2):
        got = generate(m, tokens, cache_of(m, "int8", max_length=SLOTS), mask, compile_config=config)
        check_same([got], [expected])
    assert counter.frame_count == 1


@pytest.mark.parametrize("implementation", [
    pytest.param(x, marks=[] if x == "kvcompress" else pytest.mark.full) for x in IMPLEMENTATIONS
])  # fmt: skip
@pytest.mark.parametrize("mode", [mode for mode in MODES if "fp" not in mode and "bf" not in mode])
def test_uncompiled_static_cache_equals_a_growing_one(mode, implementation):
    m = select(model("llama"), implementation)
    noisy = copy.deepcopy(m)
    with torch.no_grad():
        noisy.lm_head.weight += 0.02 * torch.randn(
            noisy.lm_head.weight.shape, generator=torch.Generator().manual_seed(1)
        )
    runs = [
        MODES[mode](m, lambda options=options: cache_of(m, "raw", **options), lambda: noisy)
        for options in ({}, {"max_length": SLOTS})
    ]
    if isinstance(runs[0].outputs[0], torch.Tensor):
        assert error(runs[1].outputs[0], runs[0].outputs[0]) < 1e-5
    else:
        check_same(runs[1].outputs, runs[0].outputs)


def test_more_than_max_length():
    m = select(model("llama"), "kvcompress")
    cache = KVCache(m.config, "int8", max_length=20)
    logits_of(m, cache, [18, 1])
    for T in (2, 30):
        with pytest.raises(ValueError, match=rf"max_length: expected at most 20 slots, got {19 + T}; crop or reset"):
            logits_of(m, cache, [T])
        assert cache.get_seq_length() == 19
    logits_of(m, cache, [1])
    with pytest.raises(TypeError, match="max_length: expected an int"):
        KVCache(m.config, max_length=2.5)


@pytest.mark.parametrize("implementation", ["kvcompress", "sdpa"])
def test_a_failure_in_a_graph_is_taken_back(implementation):
    m = select(copy.deepcopy(model("llama")), implementation)
    fn = torch.compile(m, fullgraph=True, backend="eager")
    cache, twin = (cache_of(m, "int4", max_length=SLOTS) for _ in range(2))
    tokens = ids(2, 60)
    for c in (cache, twin):
        steps(m, fn, c, tokens[:, :53], 36, None)
    weight = m.model.layers[1].self_attn.v_proj.weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
        with pytest.raises(Exception, match="NaN"):
            fn(tokens[:, 53:54], past_key_values=cache)
        weight.copy_(before)
        assert [layer.store.seen for layer in cache.layers] == [53, 53] and cache.layers[0].length == 53
        for i in range(53, 60):
            got, expected = (fn(tokens[:, i : i + 1], past_key_values=c).logits for c in (cache, twin))
            assert torch.equal(got, expected)


def test_what_a_graph_cannot_do_is_refused():
    m = select(model("llama"), "kvcompress")
    fn = torch.compile(m, fullgraph=True, backend="eager")
    cache = cache_of(m, "raw", max_length=SLOTS)
    logits_of(m, cache, [20])
    m.model.layers[1].self_attn.is_causal = False
    try:
        with torch.no_grad(), pytest.raises(Exception, match="is_causal"):
            fn(ids(1, 1), past_key_values=cache)
    finally:
        m.model.layers[1].self_attn.is_causal = True
    assert cache.get_seq_length() == 20


@pytest.mark.parametrize("config", [
    hf.DiffLlamaConfig(**SIZE),
    hf.JetMoeConfig(vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_local_experts=2),
], ids=lambda config: config.model_type)  # fmt: skip
def test_what_a_graph_attends_to_is_what_update_returned(config):
    """Models that change V or K after it, which `enable` leaves unchanged."""
    m = hf.AutoModelForCausalLM.from_config(config, attn_implementation="kvcompress").eval()
    cache = cache_of(m, "raw", max_length=SLOTS)
    logits_of(m, cache, [20])
    with torch.no_grad(), pytest.raises(Exception, match="expected the K and V that the cache.{2,3}s update"):
        torch.compile(m, fullgraph=True, backend="eager")(ids(1, 1), past_key_values=cache)
    assert cache.get_seq_length() == 20


@pytest.mark.parametrize("what", ["output_attentions", pytest.param("training", marks=pytest.mark.full)])
def test_attention_outside_of_the_graph_that_has_updated(what):
    """Without fullgraph=True, attention that a graph does not support breaks it, and must not attend to its own token
    only."""
    m, tokens = select(copy.deepcopy(model("llama")), "kvcompress"), ids(2, 60)
    fn, more = torch.compile(m, backend="eager"), {what: True} if what == "output_attentions" else {}
    cache, twin = (cache_of(m, "int8", max_length=SLOTS) for _ in range(2))
    for c in (cache, twin):
        logits_of(m, c, [40], tokens[:, :40])
    with torch.no_grad():
        for i in range(40, 46):
            m.train(what == "training" and i % 3 != 2)
            want = m(tokens[:, i : i + 1], past_key_values=twin, **more)
            got = fn(tokens[:, i : i + 1], past_key_values=cache, **more)
            assert error(got.logits, want.logits) < 1e-4
            assert not more or all(map(torch.allclose, got.attentions, want.attentions))
            assert {layer.store.seen for layer in cache.layers} == {i + 1} == {int(x.length) for x in cache.layers}


@pytest.mark.parametrize("options", [{}, dict(max_length=SLOTS), dict(policy=policies.H2O(32))], ids=str)
def test_while_another_thread_compiles(options):
    """`torch.compiler.is_compiling()` is then true in all threads."""
    m, tokens = select(model("llama"), "kvcompress"), ids(2, 60)
    cache, twin = (cache_of(m, "int8", **options) for _ in range(2))
    want = logits_of(m, twin, [40, 1, 5, 1], tokens[:, :47])
    with torch.compiler._compile_session_context():
        assert torch.compiler.is_compiling()
        got = logits_of(m, cache, [40, 1, 5, 1], tokens[:, :47])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("policy,implementation", [
    (policies.H2O(32), "kvcompress"), *(pytest.param(*x, marks=pytest.mark.full) for x in (
        (None, "kvcompress"), (policies.KNorm(32), "kvcompress"), (None, "sdpa"), (policies.KNorm(32), "sdpa"))),
])  # fmt: skip
def test_a_growing_cache_stays_out_of_graphs(policy, implementation):
    """Its Python code is not traced: tracing around it gives the same result."""
    m = select(copy.deepcopy(model("llama")), implementation)
    tokens, mask = left_pads(ids(2, 45), [0, 9])
    if policy and implementation == "sdpa":
        tokens, mask = tokens[:1], mask[:1]
    want = generate(m, tokens, cache_of(m, "int4", policy=policy), mask)
    m.forward = torch.compile(m.forward, backend="eager")
    check_same([generate(m, tokens, cache_of(m, "int4", policy=policy), mask)], [want])
    del m.forward
    # transformers 5.24 wraps every forward with one function, which has exhausted its recompilations
    torch._dynamo.reset()
    fn, cache = torch.compile(m, fullgraph=True, backend="eager"), cache_of(m, "int4", policy=policy)
    with torch.no_grad(), pytest.raises(Exception, match="outside of graphs: expected max_length="):
        fn(tokens, past_key_values=cache)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("mode", ["left_padding", pytest.param("two_turns", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", CONFIGS)
def test_static_caches_of_every_family(name, mode):
    """Not compiled: with every kind of layer, a static cache gives the results of a growing one."""
    if name == "llama4" and hf.__version__.startswith(OLD_LLAMA4):
        pytest.skip("this transformers cannot make Llama 4's masks for static caches, its own included")
    m = family(name)
    m.set_attn_implementation("eager")
    enable(m, verbose=False)
    got, expected = (
        MODES[mode](m, lambda options=options: KVCache(m.config, "int8", page_size=PAGE, **options), None).outputs
        for options in ({"max_length": SLOTS}, {})
    )
    check_same(got, expected)
