"""kvcompress in vLLM (`make test-vllm`): kinds of attention, compared with vLLM's own backend."""

import pytest
from test_vllm_engine import engines, same

FAMILIES = ("gemma2", "gemma3", "gemma3n", "gpt_oss")  # soft caps, windows, layers that share a cache, sinks


def check_equal(own, raw):
    """All tokens, and their log-probabilities: a random model may repeat one token whatever it attends to."""
    assert "error" not in own and "error" not in raw, (own.get("error"), raw.get("error"))
    assert [same(tokens, own["tokens"][0]) for tokens in raw["tokens"]] == [1, 1]
    wanted, got = (x["logprobs"][0] for x in (own, raw))
    assert max(abs(x - y) for x, y in zip(got, wanted, strict=True)) < 1e-3
    assert raw["hits"] > 2000


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    own, raw = engines(*({"model": family, "tokens": 40, "format": x} for x in (None, "raw")))
    check_equal(own, raw)


def test_layers_that_share_a_cache_see_less_of_the_prompt():
    """vLLM gives them another builder, with metadata of the last tokens only."""
    own, raw = engines(
        *({"model": "gemma3n", "tokens": 40, "format": x, "kv_sharing_fast_prefill": True} for x in (None, "raw"))
    )
    check_equal(own, raw)


def test_a_hybrid_model():
    """Qwen3-Next, whose states vLLM manages; in bfloat16, the only dtype of vLLM's CPU kernels for it: nearly all
    tokens after the same text are equal. Much of it is found in the cache, in chunks."""
    settings = {"model": "qwen3_next", "tokens": 8, "dtype": "bfloat16", "forced": True, "max_num_batched_tokens": 576}
    own, raw = engines(*({**settings, "format": x} for x in (None, "raw")))
    assert "error" not in own and "error" not in raw, (own.get("error"), raw.get("error"))
    assert same(raw["choices"], own["choices"]) > 0.95 and raw["hits"] == own["hits"] > 2000


def test_formats_by_layer_want_one_kind_of_layers():
    (got,) = engines({"model": "gemma3", "format": {"format": "int8", "per_layer": {"0": "raw"}}})
    assert "without sliding windows with per_layer" in got.get("error", "none")


def test_latent_attention_is_an_error():
    (got,) = engines({"model": "deepseek_v2", "format": "int8"})
    assert "latent attention (MLA) is not supported in vLLM" in got.get("error", "none")
