"""Entry points: dicts, conversion from and to DynamicCache, patched models, doctor, versions."""

import copy
import gc
import json
import warnings
import weakref

import pytest
import torch
import transformers as hf
from families import family
from generation import PAGE, cache_of, check_same, error, generate, logits_of, reference, select
from models import ids, left_pads, model

import kvcompress
from kvcompress import KVCache, doctor, patch_generate, policies
from kvcompress.hf import versions
from kvcompress.hf.configs import CACHE_ARGUMENT

# ---------------------------------------------------------------- dicts


@pytest.mark.parametrize("options", [
    {}, {"key": "int8", "value": "int4", "residual_length": 20},
    {"key_or_format": "int4", "guard": True, "strict": True},
    {"key_or_format": "int4", "residual_length": 32}, {"per_layer": {0: "int8", -1: ("int8", "int4")}, "sinks": 0},
    {"spans": [(0, 0.2, "int8"), (0.2, None, "int4/int2")], "span_tokens": 500, "page_size": 32},
    {"policy": policies.AdaKV(policies.H2O(64, recent=8), floor=0.1)},
    {"policy": policies.Chain(policies.StreamingLLM(4, 100), policies.Protect(policies.SnapKV(0.5), [(1, 4)]))},
])  # fmt: skip
def test_dict_and_back(options):
    config = model("llama").config
    cache = KVCache(config, **options)
    twin = KVCache.from_dict(config, json.loads(json.dumps(cache.to_dict())))
    assert json.dumps(twin.to_dict()) == json.dumps(cache.to_dict())
    assert [layer.options["key"] for layer in twin.layers] == [layer.options["key"] for layer in cache.layers]
    assert KVCache.from_dict(config, options).to_dict() == cache.to_dict()


def test_invalid_policies_are_refused():
    config = model("llama").config
    for bad in ({"policy": "StoredTokens"}, {"policy": "H2O", "args": [64], "more": 1}, {}):
        with pytest.raises(ValueError, match=r"Policy\.to_dict"):
            KVCache.from_dict(config, {"policy": bad})
    with pytest.raises(ValueError, match="no policy with max_length"):
        KVCache(config, policy=policies.H2O(64), max_length=128)


def test_from_dict_with_an_unknown_name():
    with pytest.raises(ValueError, match=r"expected options out of .*'sinks'.*got \['bits'\]"):
        KVCache.from_dict(model("llama").config, {"bits": 4})


# ---------------------------------------------------------------- DynamicCache and back


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral", "linear", "gemma3n"])
def test_from_dynamic_cache_and_back(name):
    """A conversation starts with DynamicCache, continues with raw pages, and then again with DynamicCache: the same
    tokens."""
    m = select(family(name), "eager")
    theirs = hf.DynamicCache(config=m.config)
    tokens, more, last = ids(2, 60), ids(2, 9, seed=1), ids(2, 3, seed=2)
    logits_of(m, theirs, [60], tokens)
    ours = KVCache.from_cache(theirs, m.config, "raw", page_size=PAGE)
    assert ours.get_seq_length() == 60
    kvcompress.enable(m, verbose=False)
    got = logits_of(m, ours, [9], more)[0]
    back = ours.to_dynamic_cache()
    m.set_attn_implementation("eager")
    assert error(got, logits_of(m, theirs, [9], more)[0]) < 1e-5
    assert error(logits_of(m, back, [3], last)[0], logits_of(m, theirs, [3], last)[0]) < 1e-5
    assert ours.get_seq_length() == 69 and type(back) is hf.DynamicCache


def test_from_a_padded_cache_pads_are_not_stored():
    m = select(model("llama"), "eager")
    tokens, mask = left_pads(ids(2, 50), [0, 21])
    theirs = hf.DynamicCache(config=m.config)
    logits_of(m, theirs, [50], tokens, mask)
    cache = KVCache.from_cache(theirs, m.config, "int8", attention_mask=mask)
    assert (cache.stats()["kept"], cache.get_seq_length()) == (79, 50)
    assert KVCache.from_cache(theirs, m.config).stats()["kept"] == 100
    dense = cache.to_dynamic_cache().layers[0].keys
    assert error(dense * mask[:, None, :, None], theirs.layers[0].keys * mask[:, None, :, None]) < 1e-2


def test_from_cache_refuses_what_it_cannot_take():
    config = model("llama").config
    with pytest.raises(TypeError, match="expected a DynamicCache, got StaticCache"):
        KVCache.from_cache(hf.StaticCache(config=config, max_cache_len=8), config)
    theirs = hf.DynamicCache()
    theirs.update(torch.ones(1, 2, 3, 32), torch.ones(1, 2, 3, 32), 0)
    with pytest.raises(ValueError, match="expected 2 layers.*got 1"):
        KVCache.from_cache(theirs, config)
    theirs.update(torch.ones(1, 2, 3, 32), torch.ones(1, 2, 3, 32), 1)
    with pytest.raises(
        TypeError, match=r"0: expected a DynamicSlidingWindowLayer of 24 slots, got DynamicLayer; .*fig="
    ):
        KVCache.from_cache(theirs, model("mistral").config)
    assert KVCache.from_cache(hf.DynamicCache(config=config), config).get_seq_length() == 0


# ---------------------------------------------------------------- patched models


def plain(m):
    return generate(m, ids(2, 45), None)


@pytest.fixture
def llama():
    return select(copy.deepcopy(model("llama")), "eager")


def test_patch_for_a_block(llama):
    with patch_generate(llama, "raw", page_size=PAGE) as patch:
        got = plain(llama)
        assert isinstance(got.past_key_values, KVCache) and llama.config._attn_implementation == "kvcompress"
        assert patch.calls == 1 and patch.last["kept"] == 2 * 64 and patch.report.fused and "1 calls" in repr(patch)
    check_same([got], reference("llama"))
    assert llama.config._attn_implementation == "eager" and "generate" not in llama.__dict__
    assert isinstance(plain(llama).past_key_values, hf.DynamicCache)
    patch.remove()


def test_a_patch_asks_the_configs_that_generate_asks(llama, monkeypatch):
    """An argument, the config of the call, the model's; "hybrid", from older Gemma models, is ignored."""
    tokens, Config = ids(1, 9), hf.GenerationConfig
    ours = [
        ({}, "dynamic"), ({}, "hybrid"), ({"cache_implementation": "dynamic"}, None),
        ({"cache_implementation": None}, "static"),
        ({"generation_config": Config(cache_implementation="dynamic")}, "static"),
    ]  # fmt: skip
    with patch_generate(llama, "raw") as patch:
        for call, (options, models) in enumerate(ours, 1):
            monkeypatch.setattr(llama.generation_config, "cache_implementation", models)
            llama.generate(tokens, max_new_tokens=3, **options)
            assert patch.calls == call
        for options, models in (({}, "static"), ({"generation_config": Config()}, "static")):
            monkeypatch.setattr(llama.generation_config, "cache_implementation", models)
            llama.generate(tokens, max_new_tokens=3, **options)
        monkeypatch.setattr(llama.generation_config, "cache_implementation", None)
        monkeypatch.setattr(llama.generation_config, "use_cache", False)
        llama.generate(tokens, max_new_tokens=3, generation_config=Config())
        assert patch.calls == len(ours)


def test_permanent_and_nested_patches(llama):
    outer = patch_generate(llama, key="int8", value="int4", fused=False)
    assert llama.config._attn_implementation == "eager" and outer.report is None
    with patch_generate(llama, "int4"):
        assert plain(llama).past_key_values.key == "int4"
    assert plain(llama).past_key_values.value == "int4" and plain(llama).past_key_values.key == "int8"
    assert outer.calls == 2


def test_calls_with_a_cache_argument_are_not_patched(llama):
    patch = patch_generate(llama, "int8")
    for name in {"past_key_values", CACHE_ARGUMENT, *(["cache_params"] if CACHE_ARGUMENT == "cache" else [])}:
        own = hf.DynamicCache(config=llama.config)
        out = llama.generate(ids(1, 9), **{name: own}, max_new_tokens=3, return_dict_in_generate=True)
        assert out[CACHE_ARGUMENT] is own
    assert generate(llama, ids(1, 9), None, use_cache=False).past_key_values is None
    static = generate(llama, ids(1, 9), None, cache_implementation="static").past_key_values
    assert isinstance(static, hf.StaticCache)
    given = hf.GenerationConfig(max_new_tokens=3, use_cache=False)
    llama.generate(ids(1, 9), generation_config=given)
    assert patch.calls == 0
    llama.generate(ids(1, 9), hf.GenerationConfig(max_new_tokens=3))
    assert patch.calls == 1


@pytest.mark.parametrize("mode", [{"num_beams": 3}, {"num_return_sequences": 3, "do_sample": True}])
def test_a_new_cache_for_each_call(llama, mode):
    patch_generate(llama, "int8")
    first, second = (generate(llama, ids(2, 30), None, **mode).past_key_values for _ in range(2))
    assert first is not second and first.batch_size == 6


def test_a_patched_model_is_copied_saved_and_freed(llama, tmp_path):
    patch = patch_generate(llama, "int4")
    twin = copy.deepcopy(llama)
    assert plain(twin).past_key_values.key == "int4" and patch.calls == 0
    assert twin.__dict__["generate"].model() is twin
    llama.save_pretrained(tmp_path)
    assert hf.AutoModelForCausalLM.from_pretrained(tmp_path).config.architectures == ["LlamaForCausalLM"]
    gone = weakref.ref(llama)
    call = llama.generate
    del llama, twin
    gc.collect()
    if gone() is None:  # the fixture may hold a reference
        with pytest.raises(RuntimeError, match="freed"):
            call(ids(1, 3))


def test_a_patch_that_fails_changes_nothing(llama):
    with pytest.raises(ValueError, match="expected"):
        patch_generate(llama, "int5")
    with pytest.raises(TypeError, match="patch_generate: model: expected a transformers model"):
        patch_generate(torch.nn.Linear(2, 2))
    assert llama.config._attn_implementation == "eager" and "generate" not in llama.__dict__


def test_an_adapter_and_a_pipeline(monkeypatch, request):
    m = copy.deepcopy(family("peft"))
    with patch_generate(m, "int4"):
        assert generate(m, ids(1, 20), None).past_key_values.key == "int4"
    monkeypatch.chdir(request.config.rootpath)
    books = hf.AutoModelForCausalLM.from_pretrained("assets/books-tiny", dtype=torch.float32)
    pipe = hf.pipeline("text-generation", model=books, tokenizer="assets/books-tiny")
    options = {"max_new_tokens": 12, "do_sample": False}
    want = pipe("It was a dark night,", **options)
    with patch_generate(books, "raw") as patch:
        assert pipe("It was a dark night,", **options) == want
    assert patch.calls == 1


def test_prefix_tuning():
    """PEFT replaces any cache by its own; one that holds the prefix works with the base model."""
    import peft

    adapted = peft.get_peft_model(
        copy.deepcopy(model("llama")), peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    ).eval()
    for way in (kvcompress.enable, patch_generate, doctor):
        with pytest.raises(ValueError, match=r"PREFIX_TUNING, .*from_cache\(model\.get_prompt"):
            way(adapted)
    if CACHE_ARGUMENT == "cache":
        pytest.skip("PEFT 0.21 passes its prefix by the argument's old name: generate of transformers 5.24 loses it")
    tokens, mask = left_pads(ids(2, 12), [3, 0])
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    want = adapted.generate(input_ids=tokens, attention_mask=mask, **options)
    with pytest.raises(AttributeError, match=r"PEFT's prefix tuning, .*from_cache\(model\.get_prompt"):
        adapted.generate(input_ids=tokens, past_key_values=KVCache(adapted.config), **options)
    with torch.no_grad():
        cache = KVCache.from_cache(adapted.get_prompt(2), adapted.config, "raw")
    base, prefix = adapted.get_base_model(), torch.ones(2, 5, dtype=tokens.dtype)
    kvcompress.enable(base, verbose=False)
    got = base.generate(
        torch.cat([prefix, tokens], 1), attention_mask=torch.cat([prefix, mask], 1), past_key_values=cache, **options
    )
    assert torch.equal(got[:, 5:], want)


# ---------------------------------------------------------------- doctor


def test_doctor(capsys):
    m = select(model("gemma3"), "eager")
    found = doctor(m)
    assert [r.attention for r in found.rows] == ["decoded"] * 3
    assert repr(found) == f"Diagnosis({found.model}: attention of 0 of 3 layers is fused)"
    assert "call kvcompress.enable(model)" in found.rows[1].why and "paged int8" in capsys.readouterr().out
    cache = cache_of(m, "int8", value="int4", per_layer={-1: "raw"})
    stale = KVCache(copy.deepcopy(m.config))
    select(m, "kvcompress")
    found = doctor(m, cache, verbose=False)
    assert [(r.cache, r.attention, r.why) for r in found.rows] == [
        ("paged int8/int4, window of 24", "fused", ""), ("paged int8/int4", "fused", ""), ("paged raw", "fused", ""),
    ]  # fmt: skip
    assert "copy of the config" in doctor(m, stale, verbose=False).rows[1].why
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name,why", [
    ("deepseek_v3", ""), ("gemma4", ""), ("peft", ""), ("vlm", ""), ("mistral", ""),
    ("linear", "keeps transformers'"),
])  # fmt: skip
def test_doctor_knows_why(name, why):
    m = family(name)
    m.set_attn_implementation("eager")
    kvcompress.enable(m, verbose=False)
    rows = doctor(m, "int4", verbose=False).rows
    assert len(rows) == len(KVCache(m.config, "int4").layers)
    row = rows[0] if name == "linear" else next((r for r in rows if r.kind == "full_attention"), rows[0])
    assert why in row.why and (row.attention == "fused") == (why == "")


# ---------------------------------------------------------------- versions


def test_versions():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.check(hf.__version__)
        versions.check("5.19.0")
    with pytest.warns(UserWarning, match=r"expected transformers 5\.19 to 5\.24, got 5\.99\.0\.dev0, which"):
        versions.check("5.99.0.dev0")
    with pytest.raises(ImportError, match=r"expected transformers 5\.19 to 5\.24, got 4\.57\.1; pip install"):
        versions.check("4.57.1")
