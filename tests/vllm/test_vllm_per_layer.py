"""kvcompress in vLLM (`make test-vllm`): different formats per layer, compared with an equal KVCache."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from test_vllm_engine import engines, own, same

from kvcompress import KVCache, enable, formats

ROOT = Path(__file__).resolve().parents[2]
BOOKS = ROOT / "assets" / "books-tiny"
LAYERS = json.loads((BOOKS / "config.json").read_text())["num_hidden_layers"]
CHUNK = 256


def test_raw_in_every_layer_gives_the_tokens_of_vllm():
    """With raw in every layer, the default format has no effect."""
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
    """The most likely token after each token of the prompts, with a KVCache."""
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


CASES = {
    "fp8_e5m2": (["raw", "fp8_e5m2", "int8/raw", *["fp8_e5m2"] * (LAYERS - 4), "int8"], 0.9995),
    "int4": (["raw", "int4", "int4", "int8/int2", *["int4"] * (LAYERS - 5), "int8"], 0.995),
}
"""What layers have, and how many tokens at most are those of the same format in all layers."""


@pytest.mark.parametrize("format", CASES)
def test_layers_have_the_formats_that_they_have_in_a_kv_cache(format):
    """Also if layers with residual pages are next to layers without, in blocks shared by all of them."""
    wanted, most = CASES[format]
    named = {i - LAYERS if i == LAYERS - 1 else i: x for i, x in enumerate(wanted) if x != format}
    settings = {"forced": True, "tokens": 8, "max_num_batched_tokens": CHUNK, "max_num_seqs": 1, "block_size": 1024}
    (got,) = engines({"format": {"format": format, "per_layer": {str(i): x for i, x in named.items()}}, **settings})
    assert [x for x, _ in got["formats"]] == wanted
    shape = json.loads((BOOKS / "config.json").read_text())
    for name, size in got["formats"]:
        page = formats.page_geometry(name, shape["num_key_value_heads"], shape["head_dim"], dtype=torch.float32)
        assert size == page.page_bytes
    assert same(got["choices"], choices(format, named)) > 0.9995
    assert same(got["choices"], choices(format, None)) < most


def test_prompts_in_pieces_beside_answers():
    """And prefix hits, for layers with and without residual pages."""
    named = {"0": "raw", "-1": "int8"}
    settings = {"dtype": "bfloat16", "block_size": 512, "max_num_batched_tokens": 300}
    (got,) = engines({"format": {"format": "int4", "per_layer": named}, **settings})
    assert min(same(tokens, own("bfloat16")) for tokens in got["tokens"]) > 0.5 and got["hits"] >= 512
