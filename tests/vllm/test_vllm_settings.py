"""Settings in `additional_config`; needs no vLLM."""

from types import SimpleNamespace as Some

import pytest
import torch

from kvcompress.vllm.settings import Settings, asked_for


def config(
    value="int8", dtype=torch.bfloat16, cache_dtype="auto", block_size=128, transfer=None, drafts=None, method="ngram",
    one_group=False, hybrid=False,
):  # fmt: skip
    model = Some(dtype=dtype, is_hybrid=hybrid, get_total_num_hidden_layers=lambda: 6)
    return Some(
        additional_config={"kvcompress": value}, model_config=model, kv_transfer_config=transfer,
        cache_config=Some(cache_dtype=cache_dtype, block_size=block_size),
        scheduler_config=Some(disable_hybrid_kv_cache_manager=one_group, max_num_seqs=8),
        compilation_config=Some(static_forward_context={}),
        speculative_config=drafts and Some(num_speculative_tokens=drafts, method=method),
    )  # fmt: skip


BAD = [
    ({"value": "int9"}, "expected one of raw, int8"),
    ({"value": "int8/int4/int2"}, "one for K and one for V"),
    ({"value": 8}, "expected a format such as"),
    ({"value": {"format": "int8", "formats": 1}}, r"the keys 'format' and, .*, got \['format', 'formats'\]"),
    ({"value": {}}, "the keys 'format' and"),
    ({"value": {"per_layer": {"0": "raw"}}}, "the keys 'format' and"),
    ({"value": {"format": "int8", "per_layer": ["raw"]}}, "formats by layer such as"),
    ({"value": {"format": "int8", "per_layer": {"6": "raw"}}}, r"each paged layer .* at most once, got 6"),
    ({"value": {"format": "int8", "per_layer": {"0": "raw", "-6": "raw"}}}, "at most once, got -6"),
    ({"value": {"format": "int8", "per_layer": {"first": "raw"}}}, "at most once, got 'first'"),
    ({"value": {"format": "int8", "per_layer": {"0": "int9"}}}, "expected one of raw, int8"),
    ({"value": {"format": "int8", "per_layer": {"0": {"key": "raw", "value": "raw", "sinks": 4}}}}, "layer: format"),
    ({"value": {"format": "int8", "per_layer": {"0": "int4"}}, "transfer": Some()}, "no KV offloading with int4"),
    (
        {"value": "int4", "drafts": 3, "method": "eagle", "hybrid": True},
        "only with int4 and drafts by eagle, got a hy",
    ),
    ({"value": {"format": "int8", "per_layer": {"0": "raw"}}, "hybrid": True}, "attention layers only with per_layer"),
    ({"value": {"format": "int8", "per_layer": {"0": "raw"}}, "drafts": 3, "method": "eagle"}, "no eagle drafts"),
    ({"cache_dtype": "fp8"}, "--kv-cache-dtype auto, got fp8"),
    ({"block_size": 96}, "multiple of 64 for --block-size, got 96"),
    ({"value": "int4", "transfer": Some(kv_connector="ExampleConnector")}, "no --kv-transfer-config .* with int4"),
    ({"transfer": Some(kv_connector="LMCacheConnectorV1")}, "copies whole blocks .*, got LMCacheConnectorV1"),
    ({"transfer": Some(kv_connector="ExampleConnector")}, "--block-size 64 with ExampleConnector, got 128"),
    ({"value": "int4", "drafts": 63}, "at most 62 draft tokens per step with int4, got 63"),
    ({"value": "int4", "one_group": True}, "hybrid KV cache manager with int4, got --disable-hybrid"),
]


@pytest.mark.parametrize("change, text", BAD)
def test_bad_settings(change, text):
    with pytest.raises(ValueError, match=text):
        Settings.of(config(**change))


def test_missing_settings():
    for extra in ({}, None, Some()):
        said = config()
        said.additional_config = extra
        with pytest.raises(ValueError, match="expected additional_config="):
            Settings.of(said)


@pytest.mark.parametrize("key", ["kvcompres", "kv_compress", "KVCompress"])
def test_misspelled_keys(key):
    """vLLM accepts it silently, and would use its own cache."""
    for extra in ({key: "int8"}, {key: "int8", "other": 1}):
        with pytest.raises(ValueError, match=f"the key 'kvcompress' in additional_config, got '{key}'"):
            asked_for(Some(additional_config=extra))


def test_keys_of_other_plugins_are_ignored():
    for extra in ({}, None, Some(), {"compress": 1, "kv_cache": 2, 3: 4}):
        assert asked_for(Some(additional_config=extra)) is False
    assert asked_for(None) is False
    assert asked_for(Some(additional_config={"kvcompress": "int8", "kvcompres": 1})) is True


@pytest.mark.parametrize("dtype, least", [(torch.bfloat16, 256), (torch.float32, 512)])
def test_blocks_have_room_for_the_raw_tokens_of_a_sequence(dtype, least):
    settings = Settings.of(config("int4", dtype))
    settings.check_block(2, 64, least)
    with pytest.raises(ValueError, match=f"--block-size of at least {least} for int4"):
        settings.check_block(2, 64, least - 64)


def test_layers_with_formats_of_their_own():
    named = {"0": "raw", "-1": "int8/raw", 2: ["fp8_e4m3", "int8"]}
    settings = Settings.of(config({"format": "int8", "per_layer": named}, drafts=3))
    found = [settings.of_layer(i) for i in range(6)]
    assert [x.format for x in found] == ["raw", "int8", "fp8_e4m3/int8", "int8", "int8", "int8/raw"]
    assert all(x.drafts == 3 and not x.per_layer for x in found) and len({hash(x) for x in found}) == 4


def test_layers_of_draft_models_have_8_bits():
    alike, other = (Settings.of(config(x, drafts=3, method="draft_model")) for x in ("fp8_e4m3", "int4"))
    assert (alike.packed, alike.of_draft().format) == (False, "fp8_e4m3")
    assert (other.packed, other.of_draft().format, other.of_draft().packed) == (True, "int8", True)
    assert not Settings.of(config("int4", drafts=3)).packed


def test_drafts_need_room_too():
    assert [Settings.of(config("int4", drafts=n)).residual_pages for n in (None, 1, 62)] == [1, 2, 2]
    assert Settings.of(config({"format": "int8"})).check_block(2, 64, 64) is None
