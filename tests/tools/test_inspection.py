"""inspect and inject_outliers compared with plain computations on random models."""

import copy
from pathlib import Path

import models
import pytest
import torch
from families import family
from transformers import DynamicCache

import kvcompress
from kvcompress.tools.evaluation import inject_outliers, inspection, suite


def fresh(name):
    """A copy of the shared random model, for tests that change weights."""
    model = copy.deepcopy(models.model(name))
    model.set_attn_implementation("eager")  # another test may have changed the shared one
    return model


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_inspect_against_plain_sums(name):
    model, ids = fresh(name), models.ids(1, 200)
    found = kvcompress.inspect(model, ids[0], tokens=200, queries=40)
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        out = model(ids, past_key_values=cache, output_attentions=True)
    rows = {(h["layer"], h["head"], h["kind"]): h for h in found.heads}
    assert len(rows) == 2 * 2 * 3
    for layer in range(2):
        for kind, x in (("k", cache.layers[layer].keys[0]), ("v", cache.layers[layer].values[0])):
            for head in range(2):
                row, y = rows[layer, head, kind], x[head].double()
                assert row["absmax"] == pytest.approx(y.abs().max().item(), rel=1e-5)
                assert row["norm"] == pytest.approx(y.norm(dim=1).mean().item(), rel=1e-5)
                mean = y.mean(0)
                spread = ((y - mean) ** 2).sum(1).mean().sqrt()
                assert row["offset"] == pytest.approx((mean.norm() / spread).item(), rel=1e-4)
        weights = out.attentions[layer][0, :, -40:].double().mean(1)  # [Hq, n]
        assert found.layers[layer]["first_attention"] == pytest.approx(weights[:, 0].mean().item(), rel=1e-4)
        assert found.layers[layer]["first_attention_max"] == pytest.approx(weights[:, 0].max().item(), rel=1e-4)
    # RoPE rotates pairs and keeps their length, so heads keep their mean norm.
    for head in range(2):
        assert rows[0, head, "k_pre"]["norm"] == pytest.approx(rows[0, head, "k"]["norm"], rel=1e-5)
        assert rows[0, head, "k_pre"]["absmax"] != rows[0, head, "k"]["absmax"]
    assert model.config._attn_implementation == "eager"


def test_inspect_leaves_the_model_as_it_was():
    """Dropout is off during the measurement; other parts of the model keep their attention."""
    model, ids = copy.deepcopy(family("vlm")), models.ids(1, 200, seed=3)[0] % 90
    model.set_attn_implementation({"text_config": "sdpa", "vision_config": "eager"})
    want = kvcompress.inspect(model, ids, tokens=200, queries=40)
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    model.train()
    found = kvcompress.inspect(model, ids, tokens=200, queries=40)
    assert found.layers == want.layers and model.training
    configs = model.config.text_config, model.config.vision_config
    assert [config._attn_implementation for config in configs] == ["sdpa", "eager"]
    for name, value in (("queries", 0), ("tokens", -5)):
        with pytest.raises(ValueError, match=f"inspect: {name}: expected at least 1, got {value}"):
            kvcompress.inspect(model, ids, **{name: value})


def test_inspect_latents_against_plain_sums(tmp_path):
    """DeepSeek-V3: latents and rotary parts as transformers caches them; before RoPE as the projection returns them."""
    model, ids = copy.deepcopy(family("deepseek_v3")), models.ids(1, 120)
    model.set_attn_implementation("eager")
    found, cache, projected = kvcompress.inspect(model, ids[0], queries=20), DynamicCache(config=model.config), []
    attention = model.model.layers[1].self_attn
    hook = attention.kv_a_proj_with_mqa.register_forward_hook(lambda _, __, out: projected.append(out[0, :, -16:]))
    with torch.inference_mode():
        out = model(ids, past_key_values=cache, output_attentions=True)
    hook.remove()
    kinds = {"k": cache.layers[1].keys[0, 0], "v": cache.layers[1].values[0, 0], "k_pre": projected[0]}
    for kind, x in kinds.items():
        (row,) = (h for h in found.heads if (h["layer"], h["kind"]) == (1, kind))
        assert row["absmax"] == pytest.approx(x.abs().max().item(), rel=1e-5)
        assert row["norm"] == pytest.approx(x.norm(dim=1).mean().item(), rel=1e-5)
        assert found.channels[kind].shape == (2, 1, x.shape[1])
    weights = out.attentions[1][0, :, -20:].double().mean(1)
    assert found.layers[1]["first_attention"] == pytest.approx(weights[:, 0].mean().item(), rel=1e-4)
    assert found.latent and found.to_dict()["latent"] and "latent outlier ratio" in found.table()
    found.plot(tmp_path / "i.png")
    assert (tmp_path / "i.png").read_bytes().startswith(b"\x89PNG")


def test_keys_that_hold_ninety_percent():
    heavy = inspection._heavy(
        torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.25, 0.25, 0.25, 0.25], [0.01, 0.01, 0.95, 0.03]])
    )
    assert heavy.tolist() == [[True, True, True, False], [True] * 4, [False, False, True, False]]


def test_inspection_prints_and_draws(tmp_path):
    found = kvcompress.inspect(models.model("qwen2"), models.ids(1, 100)[0], queries=10)
    assert len(found.table().splitlines()) == 3 and "100 tokens" in str(found) and "outlier ratio: " in str(found)
    found.plot(tmp_path / "i.png")
    assert (tmp_path / "i.png").read_bytes().startswith(b"\x89PNG")
    assert found.to_dict()["heads"] and found.channels["k"].shape == (2, 2, 32)


@pytest.mark.parametrize("name", ["quantized_weights", "peft"])
def test_inspect_needs_no_plain_weights(name):
    """Weight-only quantizers and PEFT replace the linear layers; the results are those of plain weights."""
    model, ids = copy.deepcopy(family(name)), models.ids(1, 200)[0]
    twin = copy.deepcopy(model)
    for layer in twin.model.layers if name == "quantized_weights" else ():
        for module in (layer.self_attn, layer.mlp):
            for key, part in list(module.named_children()):
                if hasattr(part, "codes"):
                    plain = torch.nn.Linear(1, 1, bias=part.bias is not None)
                    plain.weight, plain.bias = torch.nn.Parameter(part.codes * part.scale), part.bias
                    setattr(module, key, plain)
    twin = twin.merge_and_unload() if name == "peft" else twin
    found, want = (kvcompress.inspect(x, ids, tokens=200, queries=40) for x in (model, twin))
    for a, b in zip(found.heads + found.layers, want.heads + want.layers, strict=True):
        assert a == {k: x if isinstance(x, str) else pytest.approx(x, rel=1e-3) for k, x in b.items()}


@pytest.mark.parametrize("as_path", [str, Path])
def test_inspect_loads_a_tokenizer(as_path):
    folder = Path(__file__).parents[2] / "assets" / "books-tiny"
    model, tokenizer = suite.load_model(folder, None)
    text = "It was a dark night, and the rain fell.\n" * 9
    want = kvcompress.inspect(model, text, tokenizer=tokenizer, queries=8)
    assert kvcompress.inspect(model, text, tokenizer=as_path(folder), queries=8).heads == want.heads


def test_inspect_refuses():
    with pytest.raises(ValueError, match="more than 64 tokens"):
        kvcompress.inspect(models.model("llama"), models.ids(1, 20)[0])


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3"])
def test_outliers_change_keys_and_nothing_else(name):
    model, ids = fresh(name), models.ids(2, 60)
    with torch.inference_mode():
        before = model(ids).logits
        plain = kvcompress.inspect(model, ids[0], queries=10)
        inject_outliers(model, scale=16.0, pairs=2, seed=3)
        after = model(ids).logits
        loud = kvcompress.inspect(model, ids[0], queries=10)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4 * before.abs().max().item())
    for a, b in zip(plain.heads, loud.heads, strict=True):
        if a["kind"] == "v":
            assert b["absmax"] == pytest.approx(a["absmax"], rel=1e-4)
        else:
            assert b["outliers"] > 4 * a["outliers"]


def test_outliers_hurt_what_has_one_scale():
    """The purpose of injection: one scale per tensor loses far more, a scale per channel does not."""
    ids = models.ids(1, 500)[0]
    settings = {"context": 200, "scored": 32, "windows": 2, "cost": False, "progress": False}
    strategies = ["fake:int4@tensor", "fake:int4@channel"]
    plain = kvcompress.evaluate(fresh("llama"), ids, strategies, **settings).rows[1:]
    loud = kvcompress.evaluate(inject_outliers(fresh("llama"), 16.0), ids, strategies, **settings).rows[1:]
    assert loud[0]["kl"] > 3 * plain[0]["kl"] and loud[1]["kl"] < 2 * plain[1]["kl"]


def test_outliers_refuse():
    with pytest.raises(ValueError, match="at most 16"):
        inject_outliers(fresh("llama"), pairs=17)
    with pytest.raises(ValueError, match="more than 0"):
        inject_outliers(fresh("llama"), scale=0)
