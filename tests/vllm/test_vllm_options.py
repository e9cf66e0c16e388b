"""kvcompress in vLLM (`make test-vllm`): other features of vLLM's own backend on CPUs, with the same tokens."""

import pytest
from test_vllm_engine import engines, own, same

DRAFT = {"method": "draft_model", "model": "books-tiny", "num_speculative_tokens": 3}
MODES = {
    "tensor parallel": {"tensor_parallel_size": 2},
    "pipeline parallel": {"pipeline_parallel_size": 2, "enforce_eager": False},  # eager mode fails in vLLM 0.32
    "compiled": {"enforce_eager": False},
    "a draft model": {"speculative_config": DRAFT},
}
OTHER_TEXT = {
    "LoRA": {"lora": True},
    "structured output": {"pattern": r"(the|of|and)( (house|door|man|night))+"},
}


@pytest.mark.parametrize("mode", MODES)
def test_raw_gives_the_tokens_of_vllm(mode):
    (got,) = engines({"tokens": 24, "format": "raw", **MODES[mode]})
    assert [same(tokens, [x[:24] for x in own("float32")]) for tokens in got["tokens"]] == [1, 1]
    if mode == "a draft model":
        assert got["metrics"]["vllm:spec_decode_num_accepted_tokens"] > 100


@pytest.mark.parametrize("mode", OTHER_TEXT)
def test_raw_gives_them_where_the_text_is_another(mode):
    wanted, got = engines(*({"tokens": 24, "format": format, **OTHER_TEXT[mode]} for format in (None, "raw")))
    assert [same(tokens, wanted["tokens"][0]) for tokens in got["tokens"]] == [1, 1]
    assert same(wanted["tokens"][0], [x[:24] for x in own("float32")]) < 0.9, "the mode changed nothing"


@pytest.mark.parametrize("mode", ["tensor parallel", "pipeline parallel", "compiled"])
def test_formats_with_residual_pages(mode):
    """Most tokens are equal: ranks sum in another order, compiled code rounds differently."""
    (got,) = engines({"tokens": 24, "format": "int4", "dtype": "bfloat16", "block_size": 512, **MODES[mode]})
    assert min(same(tokens, [x[:24] for x in own("bfloat16")]) for tokens in got["tokens"]) > 0.5


def test_drafts_by_a_model_with_residual_pages():
    """The target's layers and the draft's int8 layers share vLLM's blocks."""
    settings = {
        "tokens": 60,
        "format": "int4",
        "dtype": "bfloat16",
        "block_size": 512,
        "mib": 16,
        **MODES["a draft model"],
    }
    (got,) = engines({**settings, "max_num_batched_tokens": 300})
    assert min(same(tokens, own("bfloat16")) for tokens in got["tokens"]) > 0.5
    said = got["metrics"]
    assert said["vllm:num_preemptions"] > 0
    assert said["vllm:spec_decode_num_accepted_tokens"] > 0.8 * said["vllm:spec_decode_num_draft_tokens"] > 200


def test_pages_are_handed_on_to_another_engine(tmp_path):
    """With vLLM's example of KV transfer. The second engine computes of each prompt only what follows the last whole
    block, like an engine that finds the blocks in its prefix cache."""
    # it does not save chunks
    alone = {"tokens": 24, "format": "int8", "block_size": 64, "max_num_batched_tokens": 4096}
    (one,) = engines(alone)
    (first,), (second,) = (engines({**alone, "shared": str(tmp_path)}) for _ in range(2))
    assert first["loaded"] == 0 and first["tokens"] == one["tokens"]
    assert second["loaded"] == one["hits"] > 2500 and second["tokens"][0] == one["tokens"][1]
    blocks, found = second["pages"]
    assert blocks == found > 40 * 6
