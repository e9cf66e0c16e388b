"""Plots and HTML show the contents of the cache. Readability was checked by eye."""

import copy
import sys
from pathlib import Path

import models
import pytest
import torch

from kvcompress import H2O, KVCache, PagedKV, enable
from kvcompress.store import display
from kvcompress.tools import plot
from kvcompress.tools.plan import plan

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))
import speed_cuda


def run(cache, tokens, model):
    with torch.inference_mode():
        for T in tokens:
            model(models.ids(1, T), past_key_values=cache)


@pytest.fixture(scope="module")
def model():
    made = models.model("llama")
    enable(made, verbose=False)
    yield made
    made.set_attn_implementation("eager")


@pytest.mark.parametrize("kind", plot.KINDS)
def test_pictures_of_shipped_figures(kind, tmp_path):
    figure = plot.draw(kind, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000
    for axis in figure.axes:
        # tick labels or an axis label
        assert axis.get_ylabel() and (axis.get_xlabel() or axis.get_xticklabels()[0].get_text())
        assert axis.lines or axis.patches


def test_pareto_of_results_and_what_it_refuses(tmp_path):
    rows = [{"strategy": "dynamic", "kl": 1e-13, "bytes_per_token": 100},
            {"strategy": "int8", "kl": 1e-5, "bytes_per_token": 50},
            {"strategy": "int4", "kl": 1e-3, "bytes_per_token": 26}]  # fmt: skip
    figure = plot.draw("pareto", tmp_path / "x.png", results={"rows": rows})
    assert {text.get_text() for text in figure.axes[0].texts} == {"int8", "int4"}
    for kind, results in (("pareto", {"x": 1}), ("pareto", {"rows": []}), ("latency", {"rows": []})):
        with pytest.raises(ValueError, match=f"plot: {kind}: expected"):
            plot.draw(kind, tmp_path / "y.png", results=results)
    with pytest.raises(ValueError, match="expected one of"):
        plot.draw("pie", tmp_path / "y.png")


def test_latency_names_the_format_it_compares_with():
    rows = [{"format": name, "tokens": n, "ms": ms * n}
            for n in (1024, 4096) for name, ms in (("int8", 2e-3), ("int4", 1e-3), ("raw", 3e-3))]  # fmt: skip
    about = {"shape": {"query_heads": 8, "kv_heads": 2, "dim": 64}, "machine": {"isa": "avx2", "threads": 1}}
    for base, names in (("raw", ("int8", "int4", "raw")), ("int8", ("int8", "int4"))):
        figure = plot.latency({**about, "rows": [row for row in rows if row["format"] in names]})
        labels = {str(line.get_label()).split(",")[0]: str(line.get_label()) for line in figure.axes[0].lines}
        assert labels["int4"].endswith(f"faster than {base} from the start") and "faster" not in labels[base]
    slower = [{**row, "ms": row["ms"] * (9 if row["format"] == "int4" else 1)} for row in rows]
    labels = [str(line.get_label()) for line in plot.latency({**about, "rows": slower}).axes[0].lines]
    assert any(x.startswith("int4,") and x.endswith("never faster than raw") for x in labels)


def test_savings_of_a_plan():
    figure = plot.savings(plan("llama-3-8b", context=4096))
    assert "llama-3-8b, 4,096 tokens" in figure.axes[0].get_title()


def test_pages_say_what_the_cache_holds(model):
    cache = KVCache(model.config, "int8", value="int4", per_layer={0: "int2"}, page_size=16)
    run(cache, [150, 5], model)
    pages = cache.pages()
    for layer in (0, 1):
        own = [p for p in pages if p["layer"] == layer]
        assert sum(p["tokens"] for p in own) == 155
        assert own[0]["kind"] == "sink" and own[-1]["kind"] == "open"
        table = cache.layers[layer].store.page_store.table.stats()
        assert sum(p["kind"] == "sealed" for p in own) == table["sealed_pages"]
        assert sum(p["kind"] == "open" for p in own) == table["open_pages"]
        assert {p["format"] for p in own if p["kind"] == "sealed"} == {("int2", "int8/int4")[layer]}
        assert not any(p["shared"] for p in own)
    twin = copy.deepcopy(cache)
    run(twin, [40], model)
    shared = [p for p in twin.pages() if p["shared"]]
    assert shared and all(p["kind"] != "open" for p in shared)
    figure = twin.plot()
    assert len(figure.axes[0].patches) == 2 * len(twin.pages())


def test_a_map_of_ragged_heads(model, tmp_path):
    cache = KVCache(model.config, "int8", policy=H2O(48), page_size=16)
    run(cache, [200, *[1] * 40], model)
    pages = cache.pages()
    assert {p["head"] for p in pages if p["layer"] == 1} == {0, 1}
    kept = cache.kept(1).slots[0]
    for head in (0, 1):
        assert sum(p["tokens"] for p in pages if (p["layer"], p["head"]) == (1, head)) == len(kept[head])
    cache.plot(tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 3000


def test_html(model):
    cache = KVCache(model.config, "int4", page_size=16)
    assert "empty" in cache._repr_html_()
    run(cache, [100], model)
    html = cache._repr_html_()
    assert html.count("sealed int4, 16 tokens") == 2 * 5 and "layer 1, row 0" in html and "100" in html
    stats = cache.stats()
    assert isinstance(stats, dict) and f"{stats['bytes'] / 1e3:.1f} kB" in stats._repr_html_()
    assert stats["parts"] == {**stats}["parts"]
    layer = PagedKV(2, 32, key="int8")
    layer.append(torch.randn(3, 2, 200, 32)[:1], torch.randn(1, 2, 200, 32))
    assert "PagedKV" in layer._repr_html_() and len(display.pages(layer)) == 5
    many = KVCache(model.config, "raw", page_size=16)
    run(many, [1023], model)
    assert "and 1 more" in many._repr_html_()


@pytest.mark.parametrize(
    "shapes", [[(4096, 1, 128)], [(S, B, D) for S in (4096, 32768) for B in (1, 8) for D in (64, 128)]]
)
def test_the_picture_is_drawn(shapes, tmp_path):
    """For a quick run and a full one; a backend that does not support a shape has no time."""
    rows = [
        {"name": name, "S": S, "B": B, "D": D, "T": 1, "us": S * B / 100 + i, "of read": 0.5 + i / 20}
        for S, B, D in shapes
        for i, name in enumerate((*speed_cuda.FORMATS, "int8 with accumulated attention", "append", "read", "flash"))
    ]
    rows += [{"name": "cudnn", "S": S, "B": B, "D": D, "error": "no kernel"} for S, B, D in shapes]
    speed_cuda.picture({"device": "a GPU", "rows": rows}, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000
