"""What `additional_config` may say; needs no vLLM."""

from types import SimpleNamespace as Some

import pytest
import torch

from kvcompress.vllm.settings import Settings, asked_for


def config(
    value="int8", dtype=torch.bfloat16, cache_dtype="auto", block_size=128, transfer=None, drafts=None, method="ngram",
    one_group=False,
):  # fmt: skip
    return Some(
        additional_config={"kvcompress": value}, model_config=Some(dtype=dtype), kv_transfer_config=transfer,
        cache_config=Some(cache_dtype=cache_dtype, block_size=block_size),
        scheduler_config=Some(disable_hybrid_kv_cache_manager=one_group, max_num_seqs=8),
        speculative_config=drafts and Some(num_speculative_tokens=drafts, method=method),
    )  # fmt: skip


BAD = [
    ({"value": "int9"}, "expected one of raw, int8"),
    ({"value": "int8/int4/int2"}, "one for K and one for V"),
    ({"value": 8}, "expected a format such as"),
    ({"value": {"format": "int8", "formats": 1}}, r"the key 'format' alone, got \['format', 'formats'\]"),
    ({"value": {}}, "the key 'format' alone"),
    ({"value": {"format": "int4", "per_layer": {0: "int8"}}}, "one format for all layers, got per_layer"),
    ({"cache_dtype": "fp8"}, "--kv-cache-dtype auto with it, got fp8"),
    ({"block_size": 96}, "--block-size of a multiple of 64, got 96"),
    ({"transfer": Some()}, "no --kv-transfer-config"),
    ({"value": "int4", "drafts": 3, "method": "eagle"}, "8 bits or more with drafts by eagle, got int4"),
    ({"value": "int4", "drafts": 63}, "at most 62 drafts a step with int4, got 63"),
    ({"value": "int4", "one_group": True}, "hybrid KV cache manager with int4, got --disable-hybrid"),
]


@pytest.mark.parametrize("change, text", BAD)
def test_bad_settings(change, text):
    with pytest.raises(ValueError, match=text):
        Settings.of(config(**change))


def test_none_at_all():
    for extra in ({}, None, Some()):
        said = config()
        said.additional_config = extra
        with pytest.raises(ValueError, match="expected additional_config="):
            Settings.of(said)


@pytest.mark.parametrize("key", ["kvcompres", "kv_compress", "KVCompress"])
def test_a_key_that_is_nearly_ours(key):
    """vLLM takes it without a word, and would serve with its own cache."""
    for extra in ({key: "int8"}, {key: "int8", "other": 1}):
        with pytest.raises(ValueError, match=f"the key 'kvcompress' in additional_config, got '{key}'"):
            asked_for(Some(additional_config=extra))


def test_keys_of_others_are_theirs():
    for extra in ({}, None, Some(), {"compress": 1, "kv_cache": 2, 3: 4}):
        assert asked_for(Some(additional_config=extra)) is False
    assert asked_for(None) is False
    assert asked_for(Some(additional_config={"kvcompress": "int8", "kvcompres": 1})) is True


@pytest.mark.parametrize("dtype, least", [(torch.bfloat16, 256), (torch.float32, 512)])
def test_blocks_have_room_for_the_raw_tokens_of_a_sequence(dtype, least):
    settings = Settings.of(config("int4", dtype))
    shape = settings.geometry(2, 64)
    settings.check_block(shape, least)
    with pytest.raises(ValueError, match=f"--block-size of at least {least} for int4"):
        settings.check_block(shape, least - 64)


def test_drafts_of_models_want_8_bits():
    assert Settings.of(config("int8", drafts=3, method="draft_model")).drafts == 3


def test_drafts_need_room_too():
    assert [Settings.of(config("int4", drafts=n)).residual_pages for n in (None, 1, 62)] == [1, 2, 2]
    assert Settings.of(config({"format": "int8"})).check_block(Settings.of(config()).geometry(2, 64), 64) is None
