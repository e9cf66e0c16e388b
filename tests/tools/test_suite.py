"""evaluate: its arguments, and its side effects."""

import copy

import models
import pytest
from families import family

import kvcompress
from kvcompress.tools.evaluation import caches
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
