"""python -m kvcompress, as a user runs it, on the shipped model and text."""

import json
import subprocess
import sys
from pathlib import Path

import models
import pytest

from kvcompress import formats
from kvcompress.tools.cli import main
from kvcompress.tools.strategy import Strategy

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
from tutorial_tables import TABLES, run_table  # noqa: E402

NO_TORCH = """
import sys
sys.modules["torch"] = None
from kvcompress.tools.cli import main
sys.exit(main(sys.argv[1:]))
"""

MODEL = str(ROOT / "assets/books-tiny")
FEW = ["--context", "200", "--scored", "32", "--windows", "1", "--quiet"]


@pytest.mark.full
def test_eval_from_the_shell(tmp_path):
    command = [sys.executable, "-m", "kvcompress", "eval", MODEL, *FEW, "--samples", "1", "--steps", "16",
               "--tasks", "recall", "-s", "int8", "int4", "--out", str(tmp_path)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "KL (95%)" in done.stdout and "recall" in done.stdout and "int4" in done.stdout
    folder = tmp_path / "books-tiny"
    rows = json.loads((folder / "results.json").read_text())["rows"]
    assert [row["strategy"] for row in rows] == ["dynamic", "int8", "int4"]
    assert (folder / "results.png").stat().st_size > 10_000 and (folder / "results.csv").exists()


def test_inspect(tmp_path, capsys):
    assert main(["inspect", MODEL, "--tokens", "200", "--out", str(tmp_path)]) == 0
    assert "first-token attention" in capsys.readouterr().out
    assert (tmp_path / "books-tiny" / "inspect.png").exists()


@pytest.mark.parametrize(
    "arguments, hint",
    [
        (["./nowhere"], "expected a folder"),
        ([MODEL, "--text", "nowhere.txt"], "expected a file"),
        ([MODEL, "-s", "int5"], "expected a format"),
        ([MODEL, "--tasks", "needle"], "tasks: expected names"),
        ([MODEL, "--context", "0"], "at least 1"),
        ([MODEL, "elsewhere/books-tiny"], "different last parts"),
    ],
)
def test_mistakes_are_one_line(arguments, hint, tmp_path, capsys):
    assert main(["eval", *arguments, "--out", str(tmp_path), "--quiet"]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("kvcompress: ") and hint in error


def test_wrong_usage():
    with pytest.raises(SystemExit) as stop:
        main(["evaluate"])
    assert stop.value.code == 2


def test_every_row_of_every_table_is_known_or_waits_for_a_feature():
    for table in TABLES.values():
        assert table.why and len({row.label for row in table.rows}) == len(table.rows)
        for row in table.rows:
            Strategy(row.strategy)


@pytest.mark.full
def test_every_row_is_measured_or_says_why_not(tmp_path):
    model, ids = models.model("llama"), models.ids(1, 1500)[0]
    options = {"out": tmp_path, "scored": 16, "windows": 1, "progress": False}
    length = run_table("length", model, ids, **options)
    assert [line[0] for line in length.lines] == ["INT4 at 512 tokens"]
    assert "the model ends at 1024 tokens" in str(length)
    budget = run_table("h2o-budget", model, ids, context=100, **options)
    assert len(budget.lines) == 14 and not budget.left_out
    for name in ("sinks", "combined"):
        found = run_table(name, model, ids, context=100, **options)
        assert len(found.lines) == len(TABLES[name].rows) and not found.left_out
    with pytest.raises(ValueError, match="expected one of formats"):
        run_table("nothing", model, ids)


def test_a_command_without_torch_says_what_to_install():
    done = subprocess.run([sys.executable, "-c", NO_TORCH, "bench"], capture_output=True, text=True, check=False,
                          cwd=ROOT)  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "kvcompress: this command needs torch: pip install torch" in done.stderr


def test_formats_need_no_torch():
    code = NO_TORCH
    done = subprocess.run([sys.executable, "-c", code, "formats", "--json"], capture_output=True, text=True, check=True,
                          cwd=ROOT)  # fmt: skip
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert tuple(rows) == tuple(formats.CODES)
    got = rows["int4"]["key_bits"], rows["int4"]["value_bits"], rows["kivi2"]["key_bits"], rows["kivi2"]["value_bits"]
    assert got == (4.375, 4.125, 2.5, 2.25)
    bound = {name for name, row in rows.items() if not row["movable"]}
    assert bound == {"int4", "int3", "int2", "kivi4", "kivi2", "int4_lloyd", "cal2"}
    assert rows["int8"]["levels"][0] == "scalar" and rows["mxfp4"]["head_dim_multiple"] == 32
    shown = subprocess.run(
        [sys.executable, "-c", code, "formats"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert len(shown.stdout.splitlines()) == 2 + len(rows) and "| page-bound |" in shown.stdout
