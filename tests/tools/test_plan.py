"""kvcompress.tools.plan: sizes equal hand calculations; configs equal those of transformers; what fits, and why."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Mistral4ForCausalLM
from transformers.cache_utils import get_layer_types_and_kwargs

from kvcompress import KVCache, formats, policies
from kvcompress.hf.configs import head_dims
from kvcompress.tools import plan
from kvcompress.tools.plan import choices, evidence, fit, models, parameters, size, units

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))
import errata  # noqa: E402


def test_the_formula_by_hand():
    seventy = plan.read("llama-3-70b")
    assert plan.formula(seventy, 131_072) == 2 * 80 * 8 * 128 * 131_072 * 2 == 42_949_672_960
    assert plan.formula(seventy, 4096) == 1_342_177_280  # a request for which tutorials give 0.33 GB
    assert plan.formula(seventy, 32_768, batch=200) == 2_147_483_648_000  # not 1,720 GB: that ignores GQA
    assert plan.formula(seventy.with_attention("MHA"), 32_768, 200) == 17_179_869_184_000
    assert plan.formula(plan.read("llama-2-7b"), 4096) == 2 * 32 * 32 * 128 * 4096 * 2 == 2 * 2**30
    # GPT-OSS: half of the layers have windows, which the plain formula ignores
    oss = plan.read("gpt-oss-120b")
    assert plan.formula(oss, 131_072) == 2 * 36 * 8 * 64 * 131_072 * 2
    assert plan.formula(oss, 131_072, windows=True) == 2 * 18 * 8 * 64 * (131_072 + 128) * 2
    # Gemma 4: full layers of 512 dims and 4 heads, windows of 256 and 16; hybrids: a quarter of the layers, or less
    gemma = plan.read("gemma-4-31b")
    assert plan.formula(gemma, 131_072, windows=True) == 2 * 2 * (10 * 4 * 512 * 131_072 + 50 * 16 * 256 * 1024)
    assert plan.formula(plan.read("qwen3-next-80b-a3b"), 1) == 12 * 2 * 2 * 256 * 2
    assert plan.formula(plan.read("nemotron-3-nano-30b-a3b"), 1) == 6 * 2 * 2 * 128 * 2
    # GLM-5's indexer keeps a key of 128 beside each latent
    assert plan.formula(plan.read("glm-5"), 1) == 78 * (512 + 64 + 128) * 2
    # DeepSeek-V3 keeps 512 + 64 numbers a token and layer
    v3 = plan.read("deepseek-v3")
    assert plan.formula(v3, 1000) == 61 * (512 + 64) * 1000 * 2 and v3.attention == "MLA"
    assert plan.formula(v3.with_attention("MHA"), 1) == 61 * 128 * (192 + 128) * 2


def test_units():
    assert units.read_bytes("80GB") == 80 * 10**9 and units.read_bytes("80 GiB") == 80 * 2**30
    assert units.read_bytes(5) == 5 and units.read_bytes("1.5mb") == 1_500_000
    assert units.read_tokens("32k") == 32_768 == units.read_tokens("32K") and units.read_tokens(100) == 100
    assert units.read_device("h100") == (80 * 10**9, 3350) and units.read_device("40GiB") == (40 * 2**30, None)
    assert units.show_bytes(10_737_418_240) == "10.74 GB (10.00 GiB)"
    for bad in ("GB", "80XB", "-1GB", "0GB", "0"):
        with pytest.raises(ValueError, match="expected bytes such as 80GB"):
            units.read_bytes(bad)
    with pytest.raises(ValueError, match="gpu: expected an amount with its unit, such as 80GB"):
        units.read_device("h1000")
    for bare in ("80", 80, "80B"):  # means GB
        with pytest.raises(ValueError, match="gpu: expected an amount with its unit, such as 80GB"):
            units.read_device(bare)
    with pytest.raises(ValueError, match="context: expected tokens"):
        units.read_tokens("many")


@pytest.mark.parametrize("name", models.names())
def test_the_table_agrees_with_transformers(name):
    """Kinds of layers, KV heads and head dims."""
    entry, model = models.table()[name], plan.read(name)
    config = AutoConfig.for_model(**entry["config"])
    kinds, _ = get_layer_types_and_kwargs(config)
    assert kinds == [layer.kind for layer in model.layers]
    for layer, own in zip(model.layers, config.per_layer_config, strict=True):
        if layer.kind == "full_attention":
            assert (layer.key_dim, layer.value_dim) == head_dims(own)
            latent = getattr(own, "kv_lora_rank", None)
            assert layer.heads == (1 if latent or name == "falcon-7b" else own.num_key_value_heads)
    assert entry["source"].startswith("https://")


@pytest.mark.parametrize("name", [
    pytest.param(x, marks=pytest.mark.full if "parameters" in models.table()[x] else ()) for x in models.names()
])  # fmt: skip
def test_parameters_are_those_that_transformers_builds(name):
    entry = models.table()[name]
    if name in ("deepseek-v3", "kimi-k2", "llama-3.1-405b", "gpt-oss-120b"):  # many modules: slow to build
        small = {**entry["config"], "num_hidden_layers": 4}
    else:
        small = entry["config"]
    config = AutoConfig.for_model(**small)
    with torch.device("meta"):
        mistral = config.model_type == "mistral4"  # which AutoModelForCausalLM does not know
        built = Mistral4ForCausalLM._from_config(config) if mistral else AutoModelForCausalLM.from_config(config)
    known = entry.get("parameters") or parameters.count(small)
    assert known == sum(p.numel() for p in built.parameters())
    assert plan.read(name).parameters == known or small != entry["config"]


def test_any_config_is_read(tmp_path):
    config = LlamaConfig(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, hidden_size=64)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    wanted = plan.read(config)
    assert [len(wanted.layers), wanted.layers[0].heads, wanted.layers[0].key_dim] == [3, 2, 16]
    for given in (config.to_dict(), str(tmp_path), tmp_path / "config.json", wanted):
        assert plan.read(given).layers == wanted.layers
    assert plan.read("meta-llama/Llama-3-70B").name == "llama-3-70b"
    assert plan.read({"text_config": config.to_dict(), "model_type": "x"}).layers == wanted.layers
    assert plan.read({**config.to_dict(), "model_type": "new"}).parameters is None
    gpt2 = plan.read({"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024})
    assert plan.formula(gpt2, 1024) == 2 * 12 * 768 * 1024 * 2 and gpt2.attention == "MHA"
    with pytest.raises(ValueError, match="expected a config.json, its folder, or one of"):
        plan.read("llama-9")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ValueError, match="expected JSON"):
        plan.read(tmp_path / "bad.json")
    with pytest.raises(ValueError, match="expected num_hidden_layers"):
        plan.read({"hidden_size": 5})


def test_what_fits_by_hand():
    found = plan.plan("llama-3-70b", gpu="80GB", context="32k")
    assert found.usable == 72 * 10**9 and found.fits
    cells = {(c.bits, c.format): c for c in found.cells}
    assert cells[16, "raw"].weights == 2 * 70_553_706_496 and cells[16, "raw"].requests == 0
    four = cells[4, "int4"]
    assert four.weights == 35_276_853_248 and four.room == 72 * 10**9 - 35_276_853_248
    # A page of int4: 64 x 128 x 4 bits of K and of V, 64 gains of 2 bytes each, a centroid of 256 bytes.
    page = 2 * 64 * 128 // 2 + 2 * 64 * 2 + 256
    assert formats.page_bytes(formats.CODES["int4"], formats.CODES["int4"], 128) == page
    sealed = 80 * 8 * (32_768 - 4) // 64 * page
    assert abs(four.request - sealed) < 0.01 * sealed
    assert four.requests == (72 * 10**9 - 35_276_853_248) // four.request
    for cell in found.cells:
        if cell.room > 0:
            recipe = size.recipe_of(cell.format)
            assert not cell.requests or fit.held(found.model, recipe, 32_768, cell.requests) <= cell.room
            assert fit.held(found.model, recipe, 32_768, cell.requests + 1) > cell.room
            assert fit.held(found.model, recipe, cell.context) <= cell.room
            assert fit.held(found.model, recipe, cell.context + 64) > cell.room
    text = str(found)
    for said in ("2 x 80 layers x 8 KV heads x 128 dims x 32,768 tokens x 2 bytes = 10.74 GB (10.00 GiB)",
                 "do not fit: 69.11 GB over", "recommended: int4", "beyond the 8,192"):  # fmt: skip
        assert said in text
    json.dumps(found.to_dict())


def test_nothing_fits_says_what_would():
    found = plan.plan("llama-3-70b", gpu="24GB", context="32k")
    assert not found.fits and "weights of 2 bits: 17.64 GB" in str(found)
    usable = 0.9 * 24e9
    devices = int(found.remedies[0].split()[0])
    need = 35_276_853_248 + fit.held(found.model, size.recipe_of("int2"), 32_768)
    assert (devices - 1) * usable < need <= devices * usable
    short = plan.plan("llama-3-8b", gpu="24GB", context="128k", weight_bits=(16,), formats=("raw",))
    assert not short.fits and "a context of" in str(short)
    longest = short.cells[0].context
    assert fit.held(short.model, size.recipe_of("raw"), longest) <= short.cells[0].room
    many = plan.plan("llama-3-8b", gpu="24GB", context="8k", batch=50, weight_bits=(16,), formats=("int8",))
    assert not many.fits and f"{many.cells[0].requests} requests instead of 50" in str(many)


def test_prefix_savings():
    model = plan.read("llama-3-8b")
    once, apart = plan.shared_prefix(model, "int8", 4096, 2048, 10)
    one = size.exact(model, "int8", 4096).bytes
    pages = (2048 - 4) // 64 * 32 * 8 * formats.page_bytes(formats.CODES["int8"], formats.CODES["int8"], 128)
    assert apart == 10 * one and apart - once == 9 * pages
    assert plan.shared_prefix(model, "int8", 4096, 0, 3) == (3 * one, 3 * one)
    more = plan.plan(model, gpu="24GB", context=4096, prefix=2048).cells
    less = plan.plan(model, gpu="24GB", context=4096).cells
    assert all(a.requests > b.requests for a, b in zip(more, less, strict=True) if b.requests > 1)


def test_mistakes():
    for options, hint in (
        ({"gpu": "80XB"}, "gpu: expected"), ({"context": "x"}, "context: expected"),
        ({"quality": "best"}, "quality: expected"), ({"workload": "poems"}, "workload: expected"),
        ({"batch": 0}, "at least 1"), ({"prefix": 10**9}, "prefix up to"),
        ({"formats": ("int5",), "gpu": "80GB"}, "expected one of"), ({"weight_bits": (16, 0)}, "more than 0 bits"),
        *(({"weight_bits": (x,)}, "more than 0 bits") for x in (-4, math.nan, math.inf)),
        *(({"parameters": x}, "at least one parameter") for x in (0, -7e9, math.nan, math.inf)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=hint):
            plan.plan("llama-3-8b", **options)
    with pytest.raises(ValueError, match="expected the number of parameters"):
        plan.plan({"n_layer": 2, "n_head": 2, "n_embd": 64}, gpu="8GB", context=10)
    assert plan.plan({"n_layer": 2, "n_head": 2, "n_embd": 64}, gpu="8GB", context=10, parameters=1e6).fits


def test_recommendations_come_from_what_was_measured():
    model, rows = plan.read("llama-3-8b"), evidence.measured()["formats"]
    for quality, limit in choices.FLOORS.items():
        best, *others = plan.recommend(model, 16_384, quality=quality)
        assert best.role == "recommended" and best.kl <= limit
        assert best.kl == max(x["kl"] for x in rows[best.strategy].values())
        smaller = [x for x in choices.LADDER if evidence.kl(x) <= limit]
        assert best.bytes <= 1.15 * min(fit.held(model, size.recipe_of(x), 16_384) for x in smaller)
        assert any("KL" in why for why in best.why)
        assert {x.role for x in others} <= {"safer", "smaller"}
    assert plan.recommend(model, 8192, quality=1e-12)[0].strategy == "raw"
    streaming = plan.recommend(model, 100_000, workload="streaming")[0]
    assert "window" in streaming.strategy and streaming.options["policy"]["options"]["positions"] == "cache"
    assert "attention over 4,096 tokens" in str(streaming.why)  # of the window
    (note,) = (x for x in plan.plan(model, gpu="h200", context=100_000, workload="streaming").notes if "reading" in x)
    assert f"takes {streaming.bytes / 4.8e9:.2f} ms" in note
    assert "+window" not in plan.recommend(model, 100_000, workload="retrieval")[0].strategy
    assert any("no eviction" in why for why in plan.recommend(model, 100_000, workload="multi-turn")[0].why)
    assert any("bias" in why for why in plan.recommend(plan.read("qwen2.5-7b"), 32_768)[0].why)
    assert [choices.regime(n) for n in (100, 4096, 40_000, 200_000)] == ["short", "medium", "long", "very long"]


def test_recommendations_for_latents_come_from_the_latent_model():
    """The results of the latent model, not of K and V heads; formats of equal size are one choice."""
    rows = evidence.measured()["latents"]
    for quality, limit in choices.FLOORS.items():
        found = plan.recommend(plan.read("deepseek-v3"), 16_384, quality=quality)
        assert found[0].kl == rows[found[0].strategy]["kl"] <= limit
        assert found[0].strategy == [x for x in ("int8", "int4", "int2") if rows[x]["kl"] <= limit][-1]
        assert f"KL {found[0].kl:.1e} on the shipped model with latent attention" in found[0].why[1]


def test_an_indexer_bounds_what_is_recommended():
    """GLM-5 attends to all of 2,048 slots: beyond them there is nothing to compress, as the report says."""
    glm = plan.read("glm-5")
    assert plan.recommend(glm, 2048)[0].strategy == "int4"
    assert plan.recommend(glm, 2049)[0].strategy == "raw"
    assert any("a KVCache supports up to 2,048 slots" in why for why in plan.recommend(glm, 2049)[0].why)
    texts = [str(plan.plan("glm-5", context=n)) for n in (2048, 4096)]
    assert "indexed_attention" not in texts[0] and "a KVCache supports up to 2,048 slots (index_topk)" in texts[1]


@pytest.mark.parametrize("workload", choices.WORKLOADS)
def test_what_is_recommended_opens_as_a_cache(workload):
    config = LlamaConfig(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=64)
    for choice in plan.recommend(plan.read(config), 3000, workload=workload, drafts=True):
        cache = KVCache.from_dict(config, json.loads(json.dumps(choice.options)))
        assert cache.key == choice.options["key"]
        policy = choice.options.get("policy")
        assert policy is None or policies.from_dict(policy).sinks == 4


def test_measured_json_is_current():
    """The shipped file is what the benchmarks wrote (`make docs`)."""
    assert evidence.measured() == json.loads(json.dumps(evidence.condense(ROOT / "benchmarks" / "results")))


def test_errata_state_claim_and_correct_value():
    table = errata.table()
    for claim, truth in (("160 GB", "42.95 GB (40.00 GiB)"), ("0.33 GB", "1.34 GB"), ("1,720 GB", "2147.48 GB"),
                         ("31.2x", "19.8x"), ("4.0x", "3.88x")):  # fmt: skip
        row = next(e for e in errata.entries() if claim in e.claim)
        assert truth in row.truth + row.why and row.claim in table


def test_options_of_engines_are_like_formats_that_there_are():
    rows = (ROOT / "docs" / "plan.md").read_text().split("## Other engines")[1].split("|---|---|---|---|")[1]
    named = [row.split("|")[3].strip(" `") for row in rows.strip().splitlines()]
    assert len(named) > 10 and all(part in formats.NAMES for name in named for part in name.split("/"))


def test_planning_loads_no_torch():
    code = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
from kvcompress.tools.cli import main
sys.exit(main(sys.argv[1:]))
"""
    for command in (["plan", "--config", "llama-3-70b", "--gpu", "80GB", "--context", "32k"], ["info"], ["formats"],
                    ["plan", "--list"]):  # fmt: skip
        run = [sys.executable, "-c", code, *command, "--json"]
        done = subprocess.run(run, capture_output=True, text=True, check=False, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)
