"""The reported size of a cache in each tier equals an exact formula of shapes and format definitions."""

from __future__ import annotations

import pytest
import torch
from codec_reference import SPEC

from kvcompress import _C, PagedKV, Tiers, formats
from kvcompress.offload.prefetch import LayerOffload, Prefetcher
from kvcompress.store import serialize


def up(n: int, to: int = 64) -> int:
    return -(-n // to) * to


def page(key: str, value: str, Dk: int, Dv: int, tokens: int, raw_bytes: int) -> int:
    """Bytes of a page of one head: codes, then metadata, each section aligned to 64 bytes."""
    total = 0
    rows = {row["name"]: row for row in formats.TABLE}
    for name, D, is_key in ((key, Dk, True), (value, Dv, False)):
        if name == "raw":
            total += up(tokens * D * raw_bytes)
            continue
        row = rows[name]
        total += up(tokens * D * row["bits"] // 8)
        groups = D // row["group"] if row["group"] else 1
        each = (1 if row["block_scale"] else 2) * groups * (2 if row["zero_point"] else 1)
        meta = 0 if is_key and row["keys"] == "channel" else each * tokens
        if is_key:
            meta += {"token": 0, "centred": 2 * D, "channel": 4 * D}[row["keys"]]
        total += up(meta)
    return total


SHAPES = {"MHA": (12, 64, 64), "GQA": (2, 128, 128), "MQA": (1, 96, 64)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pair", [("raw", "raw"), ("int8", "int8"), ("fp8_e4m3", "fp8_e4m3"), ("int4", "int2"),
                                  ("int8", "int4_g32"), ("kivi2", "kivi2"), ("mxfp4", "int4_asym")])  # fmt: skip
@pytest.mark.parametrize("tokens", [1, 700, 2053])
def test_bytes_in_each_tier(shape, pair, tokens):
    (H, Dk, Dv), (key, value) = SHAPES[shape], pair
    if any(
        formats.TABLE[formats.resolve(f, torch.bfloat16)]["rotated"] and d == 96
        for f, d in zip(pair, (Dk, Dv), strict=True)
    ):
        Dk = 128
    B, P, sinks = 2, 64, 4
    store = PagedKV(H, Dk, value_dim=Dv, key=key, value=value, batch=B, dtype=torch.bfloat16)
    k, v = torch.randn(B, H, tokens, Dk).bfloat16(), torch.randn(B, H, tokens, Dv).bfloat16()
    store.append(k, v)
    full = max(0, tokens - sinks) // P
    pages = -(-max(0, tokens - sinks) // P)
    sealed = full if key == "raw" else min(full, max(0, tokens - sinks - P) // P)
    wanted = {
        "sinks": B * H * page("raw", "raw", Dk, Dv, 16, 2),
        "sealed": B * H * sealed * page(key, value, Dk, Dv, P, 2),
        "open": B * H * (pages - sealed) * page("raw", "raw", Dk, Dv, P, 2),
    }
    if key == "raw":  # an open page has the same size
        wanted["sealed"], wanted["open"] = wanted["sealed"] + wanted["open"], 0
    parts = store.page_store.parts()
    assert {name: parts[name] for name in wanted} == wanted
    used = store.page_store.pool.stats()["used"]
    assert used == sum(wanted.values())
    if tokens > 2000:  # tables and spare capacity of slots: measured on a single layer
        assert parts["tables"] < 0.01 * used or H * B == 2
    # LayerOffload: the same bytes in another tier, none counted twice.
    tiers = Tiers()
    store.attach(LayerOffload(store.page_store, Prefetcher(tiers, resident=0, unit=1)))
    store.offload.offload_oldest()
    moved = tiers.stats()["host"]
    if key != "raw":
        assert moved == wanted["sealed"]
    assert store.page_store.pool.stats()["used"] + moved == used
    store.offload.onload()
    # Suspended: all bytes.
    _, pieces = serialize.survey(store.page_store)
    memory, _ = serialize.gather(store.page_store, pieces)
    assert memory.size == used == int(pieces[:, 1].sum())


def test_codes_and_scales_are_those_of_the_reference():
    """The table that the formula uses agrees with the reference codecs."""
    assert set(SPEC) <= {row["name"] for row in formats.TABLE}
    for row in formats.TABLE:
        assert _C.formats()[row["code"]]["bits"] == row["bits"]


def test_files_are_what_memory_is(tmp_path):
    import transformers as hf
    from models import ids, model

    from kvcompress import KVCache, enable

    made: hf.PreTrainedModel = model("llama")
    enable(made, verbose=False)
    cache = KVCache(made.config, "int8", page_size=16)
    with torch.inference_mode():
        made(ids(1, 900), past_key_values=cache)
    used = cache.pool.stats()["used"]
    cache.save(tmp_path / "a.kvc")
    size = (tmp_path / "a.kvc").stat().st_size
    assert used < size < 1.02 * used + 4096  # and a header
    cache.suspend()
    assert cache.pool.stats()["resident"] == 0
    assert sum(memory.size for _, memory, _ in cache.forward_pass.suspended[0].values()) == used
