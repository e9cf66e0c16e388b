"""Formats by position and by layer, and head dims that require padding."""

import models
import numpy as np
import pytest
import torch
from test_layer import eager, error, rand

from kvcompress import KVCache, PagedKV, formats
from kvcompress.quantization.mixed_precision import Spans, by_layer

SINKS, PAGE = 4, 16


def filled(options, lengths=(70, 1, 1, 40, 9), dim=32, mask=None):
    kv = PagedKV(2, dim, sinks=SINKS, page_size=PAGE, **options)
    for i, T in enumerate(lengths):
        own = None if mask is None else mask[:, kv.seen : kv.seen + T]
        kv.append(rand(kv.batch, 2, T, dim, seed=i), rand(kv.batch, 2, T, dim, seed=99 + i), own)
    return kv


def names(kv, b=0):
    """("int8", "int4") of every page of a row."""
    entries = kv.page_store.table.entries[b, 0]
    return [(formats.name_of(e >> 8 & 255), formats.name_of(e & 255)) for e in entries[entries >= 0].tolist()]


def test_a_span_stores_what_a_layer_of_its_format_stores():
    mixed = filled({"key": "int2", "spans": [(0, 36, "int8"), (36, 68, "kivi4/int4"), (68, 84, "raw")]})
    # Pages start at 4, 20, 36, 52, 68, 84, 100, 116 (open).
    wanted = ["raw", "int8", "int8", "kivi4", "kivi4", "raw", "int2", "raw", "raw"]
    assert [key for key, _ in names(mixed)] == wanted and names(mixed)[3] == ("kivi4", "int4")
    store = mixed.page_store
    pairs = [(formats.name_of(x >> 8), formats.name_of(x & 255)) for x in store.sealed_format(np.arange(1, 7)).tolist()]
    assert pairs == names(mixed)[1:7]
    assert pairs[2] == tuple(formats.name_of(x) for x in divmod(int(store.sealed_format(3)), 256))
    assert store.sealed_columns(0) == 6  # the newest two pages are raw
    store.table.spans = [(20, *store.codes_of["int2", "int2"])]
    assert store.sealed_columns(0) == 0
    pure = {"int8": ("int8", "int8"), "kivi4": ("kivi4", "int4"), "int2": ("int2", "int2"), "raw": ("raw", "raw")}
    dense = {name: filled({"key": k, "value": v}).dense() for name, (k, v) in pure.items()}
    for side in (0, 1):
        for column, name in enumerate(wanted):
            first = 0 if column == 0 else SINKS + PAGE * (column - 1)
            part = slice(first, min(SINKS + PAGE * column, mixed.seen))
            assert torch.equal(mixed.dense()[side][:, :, part], dense[name][side][:, :, part]), (column, name)


def test_fractions_are_of_the_first_call_or_of_a_given_length():
    spans = [(0, 0.5, "int8"), (0.5, 1, "int4")]
    first = filled({"key": "int2", "spans": spans}, (104, *[1] * 40))  # pages from 4 on: 52 is reached by 4 .. 36
    assert [key for key, _ in names(first)] == ["raw", *["int8"] * 3, *["int4"] * 4, *["int2"], "raw"]
    given = filled({"key": "int2", "spans": spans, "span_tokens": 60}, (104, *[1] * 40))
    assert [key for key, _ in names(given)] == ["raw", *["int8"] * 2, *["int4"] * 2, *["int2"] * 4, "raw"]
    given.reset()
    assert given.clone().spans is given.spans and given.page_store.table.spans
    again = filled({"key": "int8", "spans": [(0, None, "int4")]})
    assert {key for key, _ in names(again)} == {"raw", "int4"}


def test_positions_are_counted_without_pads():
    real = torch.ones(2, 121, dtype=torch.bool)
    real[1, :40] = False
    kv = filled({"key": "int4", "batch": 2, "spans": [(0, 36, "int8")]}, mask=real)
    assert [key for key, _ in names(kv, 0)[1:4]] == [key for key, _ in names(kv, 1)[1:4]] == ["int8", "int8", "int4"]


@pytest.mark.parametrize("spans", [
    [(0, 30, "raw"), (30, 60, "fp8_e5m2/int2"), (60, 90, "nvfp4")], [(0, 0.2, "int8"), (0.2, 1, "int4")],
])  # fmt: skip
def test_attention_over_spans(spans):
    kv = filled({"key": "int8", "value": "int4", "spans": spans})
    q, k, v = rand(1, 4, 5, 32, seed=7), rand(1, 2, 5, 32, seed=8), rand(1, 2, 5, 32, seed=9)
    K, V = kv.clone().append_dense(k, v)
    out, _ = kv.attend(q, k, v)
    want, _ = eager(q, K, V, 32**-0.5)
    assert error(out, want) < 5e-3


def test_crop_into_a_page_of_a_span_that_is_written_directly():
    """Its format has 8 bits, too, so the page can be cut anywhere and continued."""
    options = {"key": "int8", "residual_length": 0, "spans": [(0, 30, "fp8_e4m3/int8")]}
    kv, want = filled(options, (10,)), filled(options, (10,))
    kv.append(rand(1, 2, 3, 32, seed=5), rand(1, 2, 3, 32, seed=6))
    kv.crop(10)
    assert kv.stats()["kept"] == 10 and not kv.page_store.table.slots.size
    q, k, v = rand(1, 4, 2, 32, seed=7), rand(1, 2, 2, 32, seed=8), rand(1, 2, 2, 32, seed=9)
    assert torch.equal(kv.attend(q, k, v)[0], want.attend(q, k, v)[0])


@pytest.mark.parametrize("dim,value_dim", [(46, 46), (100, 100), (24, 7), (80, 112), (1, 250), (192, 96)])
@pytest.mark.parametrize("key,value", [("raw", "raw"), ("int8", "fp8_e4m3"), ("int4", "int4"), ("mxfp4", "int4_g32"),
                                       ("kivi2", "int8_asym")])  # fmt: skip
def test_any_head_dim(dim, value_dim, key, value):
    kv = PagedKV(2, dim, value_dim=value_dim, key=key, value=value, page_size=PAGE)
    for i, T in enumerate((50, 1, 20)):
        q, k, v = rand(1, 6, T, dim, seed=i), rand(1, 2, T, dim, seed=i + 9), rand(1, 2, T, value_dim, seed=i + 99)
        want, want_lse = eager(q, *kv.clone().append_dense(k, v), dim**-0.5)
        out, lse = kv.attend(q, k, v)
        assert out.shape == (1, 6, T, value_dim) and kv.dense()[0].shape == (1, 2, kv.seen, dim)
        assert error(out, want) < 5e-3 and error(lse, want_lse) < 5e-3
    again, _ = kv.attend(q[:, :, -1:])
    want, _ = eager(q[:, :, -1:], *kv.dense(), dim**-0.5)
    assert error(again, want) < 5e-3
    x = rand(1, 2, 64, dim, seed=3)
    store = PagedKV(2, dim, key=key, value=value, page_size=PAGE, sinks=0, value_dim=value_dim)
    store.append(x, rand(1, 2, 64, value_dim, seed=4))
    store.append(x[:, :, :1], rand(1, 2, 1, value_dim, seed=4))
    tolerance = {"raw": 0, "int8": 0.02, "int4": 0.15, "mxfp4": 0.35, "kivi2": 0.6}[key]
    assert error(store.dense()[0][:, :, :64], x) <= tolerance


def test_formats_by_layer():
    m = models.model("llama")
    cache = KVCache(m.config, "int4", per_layer={0: "int8/raw", -1: {"key": "int2", "value": "int2", "sinks": 9}})
    with torch.no_grad():
        m(models.ids(1, 200), past_key_values=cache)
        m(models.ids(1, 1), past_key_values=cache)
    stores = [layer.store for layer in cache.layers]
    assert names(stores[0])[1] == ("int8", "raw") and names(stores[-1])[1] == ("int2", "int2")
    assert stores[-1].sinks == 9 and all(names(store)[1] == ("int4", "int4") for store in stores[1:-1])
    assert KVCache(m.config, "int4", guard=True, per_layer={0: "int2"}).layers[0].options["key"] == "int2"


def test_guard_rails_and_layers_go_before_spans():
    config = models.CONFIGS["llama"]()
    config.num_hidden_layers = 4
    spans = [(0, 0.2, "int8"), (0.2, 1, "int4/int2")]
    layers = KVCache(config, "int4", guard=True, spans=spans, per_layer={1: "int8", 2: {"sinks": 9}}).layers
    edge = [(0, 0.2, ("int8", "int8")), (0.2, 1, ("int8", "int4"))]
    assert [layer.options["spans"] for layer in layers] == [edge, None, spans, edge]
    assert layers[0].options["key"] == "int8" and layers[1].options["key"] == "int8"
    for bad in ({"spans": [(0, None, "int2/int8")]}, {"per_layer": {2: "int2/int8"}}, {"value": "int8"}):
        with pytest.raises(ValueError, match="K in at least the bits of V"):
            KVCache(config, key="int4", guard=True, **bad)


def test_filling_up_does_not_stretch_a_rows_range():
    x = rand(1, 2, 64, 100, seed=1) + 10
    wide, odd = (PagedKV(2, D, key="int4_asym", page_size=PAGE, sinks=0) for D in (96, 100))
    for kv, k in ((wide, x[..., :96]), (odd, x)):
        kv.append(k, k)
        kv.append(k[:, :, :1], k[:, :, :1])
    assert error(odd.dense()[0][:, :, :64] - 10, x - 10) < 1.1 * error(
        wide.dense()[0][:, :, :64] - 10, x[..., :96] - 10
    )


@pytest.mark.parametrize("bad", [
    {9: "int8"}, {0: "int8", -4: "int4"}, {-5: "int8"}, {True: "int8"}, {"0": "int8"}, {0: {"format": "int8"}}, {0: 8},
    {0: "int8/int4/int2"}, {0: "int5"}, {0: {"key": "int8", "page_size": 17}},
])  # fmt: skip
def test_bad_layers(bad):
    config = models.CONFIGS["llama"]()
    config.num_hidden_layers = 4
    with pytest.raises(ValueError, match="expected"):
        KVCache(config, "int4", per_layer=bad)
    with pytest.raises(TypeError, match="expected a dict"):
        by_layer([bad], [0])


def test_spans_that_a_short_call_empties_are_left_out():
    spans = Spans([(0, 0.01, "int8"), (0.01, 0.5, "int4"), (0.5, 1, "int2")])
    assert spans.resolve(10) == [(5, ("int4", "int4")), (10, ("int2", "int2"))]
    assert spans.resolve(1) == [(1, ("int2", "int2"))]
    assert np.all([end > 0 for end, _ in spans.resolve(3)])
