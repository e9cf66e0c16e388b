"""Latent attention (MLA) in compiled steps: absorbed in the graph, compared with growing caches and DynamicCache."""

import pytest
import torch
import transformers as hf
from generation import cache_of, check_same, error, feed, generate, select
from models import ids, left_pads
from test_latent import CONFIGS, build
from torch._dynamo.testing import CompileCounterWithBackend

from kvcompress import doctor, enable


def compiled(m, cache, tokens, first, mask=None):
    """Logits of one compiled step per token from `first` on, after a prompt; the code of its graph."""
    backend = CompileCounterWithBackend("eager")
    step = torch.compile(m, fullgraph=True, backend=backend)
    feed(m, cache, tokens[:, :first], mask)
    got = []
    with torch.no_grad():
        for i in range(first, tokens.shape[1]):
            sees = None if mask is None else mask[:, : i + 1]
            got.append(step(tokens[:, i : i + 1], attention_mask=sees, past_key_values=cache).logits.clone())
    torch._dynamo.reset()
    return torch.cat(got, 1), [graph.code for graph in backend.graphs]


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.full if i % 3 else ()) for i, x in enumerate(CONFIGS)]
)
def test_compiled_steps_attend_absorbed(name):
    """One graph for all steps, without expansion."""
    m, slots = build(name), 96
    tokens = ids(2, 60)
    with torch.no_grad():
        want = m(tokens).logits[:, 40:]
    enable(m, verbose=False)
    got, graphs = compiled(m, cache_of(m, "raw", max_length=slots), tokens, 40)
    assert len(graphs) == 1 and "static_attend" in graphs[0] and "static_dense" not in graphs[0]
    assert (got - want).abs().max() < 1e-4
    assert torch.equal(got.argmax(-1), want.argmax(-1))
    cache = cache_of(m, "raw", max_length=slots)
    check_same([generate(m, tokens, cache)], [generate(m, tokens, hf.DynamicCache(config=m.config))])


@pytest.mark.parametrize("key", ["raw", "int8", "int4"])
def test_compiled_steps_are_those_of_a_growing_cache(key):
    """Also with few bits, over pages that are sealed in the graph."""
    m, tokens = build("glm4_moe_lite"), ids(1, 150)
    enable(m, verbose=False)
    got, _ = compiled(m, cache_of(m, key, max_length=160), tokens, 60)
    cache = cache_of(m, key)
    want = [feed(m, cache, tokens[:, :60])] + [feed(m, cache, tokens[:, i : i + 1]) for i in range(60, 150)]
    assert error(got, torch.cat(want[1:], 1)) < 1e-5


def test_compiled_steps_see_what_a_mask_shows():
    """A 4D mask that hides stored tokens: dense attention over latents."""
    m, (tokens, mask) = build("deepseek_v3"), left_pads(ids(2, 60), [0, 9])
    holes = torch.ones(2, 1, 1, 60, dtype=torch.bool)
    holes[:, :, :, 20:25] = False
    enable(m, verbose=False)
    step = torch.compile(m, fullgraph=True, backend="eager")
    out = []
    for call, options in ((m, {}), (step, {"max_length": 60})):
        cache = cache_of(m, "raw", **options)
        feed(m, cache, tokens[:, :59], mask[:, :59])
        shown = holes & mask[:, None, None].bool()
        with torch.no_grad():
            out.append(call(tokens[:, 59:], attention_mask=shown, past_key_values=cache).logits)
    torch._dynamo.reset()
    assert error(out[1], out[0]) < 1e-5


def test_compiled_steps_expand_what_is_no_plain_linear_layer():
    m, tokens = build("minicpm3"), ids(1, 60)
    enable(m, verbose=False)
    m.model.layers[1].self_attn.kv_b_proj.bias = torch.nn.Parameter(0.1 * torch.ones(4 * 32))
    with torch.no_grad():
        want = m(tokens).logits[:, 40:]
    got, graphs = compiled(m, cache_of(m, "raw", max_length=96), tokens, 40)
    assert [graphs[0].count(f"kvcompress.static_{op}") for op in ("attend", "dense")] == [1, 1]
    assert (got - want).abs().max() < 1e-4


@pytest.mark.parametrize("T", [3, 16, 17])
def test_compiled_calls_of_several_tokens(T):
    """Few queries are absorbed; many are expanded, which is cheaper. And the message of `enable`."""
    m, tokens = build("deepseek_v3"), ids(2, 70 + T)
    report = enable(m, verbose=False)
    assert report.fused and "absorbed, compiled in calls of up to 16 tokens on the CPU" in str(report)
    with torch.no_grad():
        want = m(tokens).logits[:, 70:]
    cache, backend = cache_of(m, "raw", max_length=128), CompileCounterWithBackend("eager")
    feed(m, cache, tokens[:, :70])
    with torch.no_grad():
        got = torch.compile(m, fullgraph=True, backend=backend)(tokens[:, 70:], past_key_values=cache).logits
    torch._dynamo.reset()
    assert ("static_attend" in backend.graphs[0].code) == (T <= 16)
    assert (got - want).abs().max() < 1e-4


def test_graphs_of_a_model_that_is_not_enabled_are_refused():
    m, tokens = build("minicpm3"), ids(1, 20)
    enable(build("minicpm3"), verbose=False)  # registers the attention
    select(m, "kvcompress")
    for layer in m.model.layers:
        layer.self_attn.__dict__.pop("expand_kv", None)
    cache = cache_of(m, "raw", max_length=32)
    feed(m, cache, tokens[:, :10])
    with torch.no_grad(), pytest.raises(Exception, match=r"call enable\(model\)"):
        torch.compile(m, fullgraph=True, backend="eager")(tokens[:, 10:11], past_key_values=cache)
    torch._dynamo.reset()
    assert cache.get_seq_length() == 10


def test_doctor_says_which_calls_expand():
    m = build("deepseek_v3")
    enable(m, verbose=False)
    fixed, growing = (doctor(m, cache, verbose=False) for cache in (cache_of(m, "int8", max_length=96), "int8"))
    assert {r.why for r in fixed.rows} == {
        "compiled calls of more than 16 tokens, and all of them on a GPU, expand latents"
    }
    assert {r.why for r in growing.rows} == {""} and {r.attention for r in fixed.rows} == {"fused"}
