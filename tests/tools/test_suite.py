"""evaluate: its arguments, and its side effects."""

import copy
import json
import math

import models
import peft
import pytest
import torch
from families import family

import kvcompress
from kvcompress.hf.calibrate import calibrate
from kvcompress.tools import plot
from kvcompress.tools.evaluation import caches, measure
from kvcompress.tools.evaluation.report import Evaluation
from kvcompress.tools.strategy import Strategy

SMALL = {"context": 150, "scored": 48, "chunk": 16, "windows": 2, "cost": False, "progress": False}


def test_one_strategy_and_a_model_in_training():
    """A string is one strategy, not a list of letters; dropout is off during the evaluation, and modules are
    restored."""
    model, ids = copy.deepcopy(models.model("llama")), models.ids(1, 400)[0]
    want = kvcompress.evaluate(model, ids, ["int8"], **SMALL).rows
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()
    model.lm_head.eval()
    for strategies in ("int8", {"key": "int8"}, Strategy("int8")):
        assert kvcompress.evaluate(model, ids, strategies, **SMALL).rows == want
    assert model.training and model.model.layers[0].self_attn.training and not model.lm_head.training


@pytest.mark.parametrize("strategy, meanwhile", [("int8", "kvcompress"), ("dynamic", "sdpa")])
def test_a_vision_tower_keeps_its_attention(strategy, meanwhile):
    model = copy.deepcopy(family("vlm"))
    configs = model.config.text_config, model.config.vision_config
    before = "kvcompress" if strategy == "dynamic" else "sdpa"
    model.set_attn_implementation({"text_config": before, "vision_config": "eager"})
    with caches.attention_for(model, Strategy(strategy)):
        assert [config._attn_implementation for config in configs] == [meanwhile, "eager"]
    assert [config._attn_implementation for config in configs] == [before, "eager"]


def test_an_adapter_is_part_of_its_model():
    """A PEFT model gives the results of a model with merged weights."""
    adapted, ids = copy.deepcopy(family("peft")), models.ids(1, 400)[0]
    merged = copy.deepcopy(adapted).merge_and_unload()
    plain = kvcompress.evaluate(models.model("llama"), ids, "int8", **SMALL).rows[0]["ppl"]
    for got, want in zip(*(kvcompress.evaluate(x, ids, "int8", **SMALL).rows for x in (adapted, merged)), strict=True):
        assert got["ppl"] == pytest.approx(want["ppl"], rel=1e-4) != pytest.approx(plain, rel=1e-2)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    prompted = peft.get_peft_model(copy.deepcopy(models.model("llama")), config)
    with pytest.raises(ValueError, match=r"got PEFT's PROMPT_TUNING, .*model\.get_base_model\(\)"):
        kvcompress.evaluate(prompted, ids, "int8", **SMALL)


@pytest.mark.parametrize("scored", [1, 17, 40])
def test_every_token_counts_once(scored):
    """The results are means over tokens, also where they do not fill the last block."""
    model, ids = models.model("llama"), models.ids(1, 201)
    window, context = ids[:, : 151 + scored], 150
    row = kvcompress.evaluate(model, window[0], ["int4"], **{**SMALL, "scored": scored, "windows": 1}).rows[1]
    reference = measure.reference_logits(model, window[:, :-1], scored)
    got = torch.cat(list(measure.logits_through(model, Strategy("int4"), window[:, :-1], scored, 16, 0)))
    p, q = (x.double().log_softmax(-1) for x in (reference, got))
    nll = -q.gather(-1, window[0, context + 1 :, None])
    assert row["kl"] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-6)
    assert row["top1"] == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    assert row["ppl"] == pytest.approx(math.exp(nll.mean()), rel=1e-6)
    assert math.isnan(row["kl_low"]) == (scored <= measure.BLOCK)


def test_a_single_block_has_no_interval_in_strict_json(tmp_path):
    found = kvcompress.evaluate(
        models.model("llama"), models.ids(1, 300)[0], ["int8", "int4"], out=tmp_path,
        **{**SMALL, "scored": measure.BLOCK, "windows": 1, "cost": True, "steps": 16},
    )  # fmt: skip
    saved = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)
    assert math.isnan(found.rows[1]["kl_low"]) and saved["rows"][1]["kl_low"] is None
    again = Evaluation(**saved)
    assert again.table() == found.table() and "nan" not in found.table() and "(-" not in found.table()
    again.save(tmp_path / "again")
    assert (tmp_path / "again" / "results.json").read_text() == (tmp_path / "results.json").read_text()
    plot.draw("pareto", tmp_path / "pareto.png", results=saved)


@pytest.mark.parametrize("name, value", [("prefill", -5), ("scored", 0), ("steps", 15), ("context", 100.0)])
def test_settings_are_checked(name, value):
    """A negative `prefill` would skip the context."""
    with pytest.raises((ValueError, TypeError), match=f"evaluate: {name}: expected"):
        kvcompress.evaluate(models.model("llama"), models.ids(1, 400)[0], "int8", **{**SMALL, name: value})


def test_a_new_calibration_at_the_same_path_is_measured(tmp_path):
    model, ids = models.model("llama"), models.ids(1, 600)[0]
    path, folder = str(tmp_path / "m.kvcal"), tmp_path / "out"

    def kl(out, seed):
        calibrate(model, models.ids(1, 300, seed=seed)[0], context=260, tokens=260).save(path)
        return kvcompress.evaluate(model, ids, f"cal2+calibration:{path}", out=out, **SMALL).rows[1]["kl"]

    first = kl(folder, 1)
    assert kl(folder, 2) == kl(None, 2) != first
