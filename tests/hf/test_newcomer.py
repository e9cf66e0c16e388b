"""First use by someone who has read only the first page: a hint where one is needed, and errors that say what to do."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable

import pytest
import torch
from families import CONFIGS
from models import ids, model
from transformers import RwkvConfig

from kvcompress import H2O, KVCache, PagedKV, QuantizedTensor, Tiers, enable, patch_generate, policies
from kvcompress.policies import Policy
from kvcompress.quantization.calibration import Calibration
from kvcompress.tools.cli import program
from kvcompress.tools.evaluation.report import Evaluation
from kvcompress.tools.plan import plan


def said(name: str) -> list[str]:
    """Warnings of a model that generates twice with one cache."""
    m = model(name)
    cache = KVCache(m.config)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        out = m.generate(ids(1, 12), past_key_values=cache, max_new_tokens=3, do_sample=False)
        m.generate(out, past_key_values=cache, max_new_tokens=3, do_sample=False)
    return [str(w.message) for w in found if "KVCache" in str(w.message)]


def test_enable_forgotten() -> None:
    """One warning, with the line to add; none if enable was called, or if it would have no effect."""
    m = model("llama")
    m.set_attn_implementation("sdpa")
    (text,) = said("llama")
    assert "got 'sdpa'" in text and "kvcompress.enable(model)" in text
    report = enable(m, verbose=False)
    assert said("llama") == []
    assert repr(report) == "Report(LlamaForCausalLM: fused attention on)"
    assert not KVCache(CONFIGS["linear"]()).forward_pass.fits or "full_attention" in CONFIGS["linear"]().layer_types


@pytest.mark.parametrize(("score", "got"), [(torch.zeros(3, 5), r"\[3, 5\]"), ([1, 2], "list"), (None, "NoneType")])
def test_scores_of_a_wrong_shape(score: object, got: str) -> None:
    class Own(Policy):
        def score(self, stored):  # type: ignore[no-untyped-def]
            return score

    kv = PagedKV(2, 32, policy=Own(20), page_size=16)
    with pytest.raises(ValueError, match=rf"score: expected a tensor \[B, H, N\] = \[1, 2, \d+\].*got {got}"):
        kv.append(*torch.randn(2, 1, 2, 70, 32))


def test_arguments_of_another_kind(tmp_path) -> None:
    """Typical mistakes in a first program are named, with the expected value."""
    config, cache = CONFIGS["llama"](), KVCache(CONFIGS["llama"]())
    cases: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (TypeError, "from_dict: expected a dict of KVCache's options, got NoneType",
         lambda: KVCache.from_dict(config, None)),
        (ValueError, "kept: layer: expected at most 1, got 77", lambda: cache.kept(77)),
        (TypeError, "kept: layer: expected an int, got str", lambda: cache.kept("0")),
        (TypeError, "bind: expected a model, got NoneType", lambda: cache.bind(None)),
        (TypeError, r"Protect: spans: expected a list of spans, got int", lambda: policies.Protect(H2O(40), 3)),
        (TypeError, r"Protect: spans: expected a list of \(begin, end\), got int",
         lambda: policies.Protect(H2O(40), [3])),
        (ValueError, r"Protect: spans: expected \(begin, end\) each", lambda: policies.Protect(H2O(40), [(1, 2, 3)])),
        (TypeError, "Demote: ladder: expected a list of formats, got int4", lambda: policies.Demote(H2O(40), "int4")),
        (TypeError, "Demote: shares: expected a list of numbers, got int",
         lambda: policies.Demote(H2O(40), ["int4"], 1)),
        (TypeError, "from_dict: expected a dict from Policy.to_dict, got int", lambda: policies.from_dict(3)),
        (NotADirectoryError, "Tiers: folder: expected an existing folder, got .*nowhere",
         lambda: Tiers(0, None, tmp_path / "nowhere")),
        (TypeError, "crop: tokens_to_remove: expected an int, got str", lambda: cache.crop("a")),
        (TypeError, "crop: tokens_to_remove: expected an int, got NoneType", lambda: cache.crop(None)),
        (ValueError, "crop: expected 0 or a negative number, got 3", lambda: cache.crop(torch.tensor(3))),
        (TypeError, r"KVCache: save: path: expected the path of a file \(str or pathlib.Path\), got NoneType",
         lambda: cache.save(None)),
        (TypeError, "KVCache: suspend: path: expected the path of a file .*, got bytes", lambda: cache.suspend(b"a")),
        (TypeError, "KVCache: load: path: expected the path of a file .*, got int", lambda: KVCache.load(5, config)),
        (ValueError, "KVCache: save: path: expected the path of a file, got '', which", lambda: cache.save("")),
        (TypeError, "Calibration: load: path: expected the path of a file", lambda: Calibration.load(5)),
        (TypeError, "QuantizedTensor: load: path: expected the path of a file", lambda: QuantizedTensor.load(None)),
        (ValueError, "got RwkvConfig, which uses a cache of its own", lambda: KVCache(RwkvConfig())),
    ]  # fmt: skip
    for kind, says, do in cases:
        with pytest.raises(kind, match=says):
            do()


@pytest.mark.parametrize("patched", [False, True])
def test_the_class_for_a_cache(patched: bool) -> None:
    m = model("llama")
    says = r"expected a cache, such as KVCache\(model.config\), got the class KVCache"
    with patch_generate(m) if patched else contextlib.nullcontext(), pytest.raises(AttributeError, match=says):
        m.generate(ids(1, 12), past_key_values=KVCache, max_new_tokens=3)
    assert KVCache(m.config).is_linear == [False, False]


def test_plan_says_the_floor_and_the_context() -> None:
    text = str(plan("llama-3-8b", context="16k"))
    assert "(medium context)" in text and "quality high (KL up to 2e-03)" in text


@pytest.mark.parametrize(("command", "goes_on"), [("eval", True), ("bench", False), ("plan", False)])
def test_an_interrupt_says_whether_it_goes_on(monkeypatch, capsys, command: str, goes_on: bool) -> None:
    def interrupted(args):
        raise KeyboardInterrupt

    parser = program._parser()
    monkeypatch.setattr(program, "_parser", lambda: parser)
    monkeypatch.setattr(parser, "parse_args", lambda argv: _args(command, interrupted))
    assert program.main([command]) == 130
    assert ("to resume" in capsys.readouterr().err) == goes_on


def _args(command, run):
    import argparse

    return argparse.Namespace(command=command, run=run, measure=None, out=None)


def test_time_of_dynamic_relative_to_itself_is_one() -> None:
    cost = {"steady": 1, "peak": 1, "prefill": 1.0, "held": 8, "spread": [0.8, 1.4]}
    cells = [
        ({"strategy": name, "kind": "cost"}, {**cost, "decode": ms, "decode_ratio": ratio})
        for name, ms, ratio in (("dynamic", 0.9, 0.9), ("int8", 1.2, 1.3))
    ]
    about = {"context": 8, "model": "m", "windows": 1, "scored": 1, "chunk": 1}
    found = Evaluation.from_cells(about, ["dynamic", "int8"], cells, {})
    assert [row["decode_ratio"] for row in found.rows] == [1.0, 1.3]
    assert "1.20 (0.80-1.40)" in found.table()
