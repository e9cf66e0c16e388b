"""kvcompress inside of vLLM (`make test-vllm`): layers with formats of their own, beside a KVCache with the same."""

import json
from functools import cache
from pathlib import Path

import torch
import transformers
from test_vllm_engine import engines, own, same

from kvcompress import KVCache, enable, formats

ROOT = Path(__file__).resolve().parents[2]
BOOKS = ROOT / "assets" / "books-tiny"
LAYERS = json.loads((BOOKS / "config.json").read_text())["num_hidden_layers"]
FORMAT, PER_LAYER = "fp8_e5m2", {"0": "raw", "2": "int8/raw", "-1": "int8"}
CHUNK = 256


def test_raw_in_every_layer_gives_the_tokens_of_vllm():
    """Nothing is left of the format that layers without one of their own have."""
    named = {str(i): "raw" for i in range(LAYERS)}
    (got,) = engines({"format": {"format": "int8", "per_layer": named}})
    assert [same(tokens, own("float32")) for tokens in got["tokens"]] == [1, 1] and got["hits"] > 2000
    assert [x for x, _ in got["formats"]] == ["raw"] * LAYERS


@cache
def prompts():
    text = (ROOT / "assets" / "text" / "book.txt").read_text()
    ids = transformers.AutoTokenizer.from_pretrained(BOOKS).encode("<s>" + text[20000:60000], add_special_tokens=False)
    return [ids[500 * i :][:n] for i, n in enumerate((566, 865, 1500, 31, 64, 127))]


def choices(format, per_layer):
    """What the model with a KVCache would have said behind each token of the prompts."""
    model = transformers.AutoModelForCausalLM.from_pretrained(BOOKS, dtype=torch.float32).eval()
    enable(model, verbose=False)
    found = []
    for ids in prompts():
        kv, said = KVCache(model.config, format, per_layer=per_layer, sinks=0), []
        for piece in torch.tensor(ids).split(CHUNK):
            with torch.no_grad():
                said += model(piece[None], past_key_values=kv).logits[0].argmax(-1).tolist()
        found.append(said[:-1])
    return found


def test_layers_have_the_formats_that_they_have_in_a_kv_cache():
    named = {int(layer): format for layer, format in PER_LAYER.items()}
    wanted, all_alike = choices(FORMAT, named), choices(FORMAT, None)
    settings = {"forced": True, "tokens": 8, "max_num_batched_tokens": CHUNK, "max_num_seqs": 1}
    got, alike = engines(
        {"format": {"format": FORMAT, "per_layer": PER_LAYER}, **settings}, {"format": FORMAT, **settings}
    )
    assert [x for x, _ in got["formats"]] == ["raw", FORMAT, "int8/raw", *[FORMAT] * (LAYERS - 4), "int8"]
    shape = json.loads((BOOKS / "config.json").read_text())
    for format, stride in got["formats"]:
        page = formats.page_geometry(format, shape["num_key_value_heads"], shape["head_dim"], dtype=torch.float32)
        assert stride == page.page_bytes
    ours, theirs = same(got["choices"], wanted), same(alike["choices"], all_alike)
    across = same(got["choices"], all_alike)
    assert min(ours, theirs) > 0.9995 > across, (ours, theirs, across)
