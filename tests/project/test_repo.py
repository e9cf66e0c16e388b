"""What a newcomer reads and runs: README, docs, examples; and what must not be in the repository."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def python_blocks(path):
    return re.findall(r"```python\n(.*?)```", (ROOT / path).read_text(), re.DOTALL)


PAGES = ["README.md", *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs").glob("*.md")))]


@pytest.mark.parametrize("path", [p for p in PAGES if python_blocks(p) and p != "docs/parallel.md"])  # many processes
def test_code_blocks_run(path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    space: dict = {}
    blocks = python_blocks(path)
    assert blocks
    for block in blocks:
        exec(compile(block, path, "exec"), space)


def test_readme_names_both_commands():
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text and "make test" in text


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("example", ["paged_layer.py"])
def test_examples_run(example):
    command = [sys.executable, str(ROOT / "examples" / example)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_ci_is_red_when_a_test_failed_before_time_was_up(tmp_path):
    """`.ci/run` with a `make test-full` of one failing and one endless test, and a `timeout` of seconds."""
    (tmp_path / "test_it.py").write_text("import time\ndef test_a(): assert 0\ndef test_b(): time.sleep(300)\n")
    pytest_command = f"{sys.executable} -m pytest -q -p no:cacheprovider {tmp_path}/test_it.py"
    for name, line in {
        "make": f'[ "$1" = test ] || exec {pytest_command}',
        "timeout": 'shift; exec $(command -pv timeout) 50 "$@"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run([ROOT / ".ci" / "run"], env={**os.environ, "PATH": path}, capture_output=True, check=False)
    assert done.returncode not in (0, 124), done.stdout


def test_generated_docs_are_current(tmp_path):
    from kvcompress import formats

    text = (ROOT / "docs" / "formats.md").read_text()
    for row in formats.TABLE:
        bits = formats.effective_bits(row["code"], 128)
        assert f"| `{row['name']}` | {row['bits']} | {bits:g} |" in text, "run make docs"


def test_no_machine_paths():
    here = Path(__file__).name
    for path in ROOT.rglob("*"):
        parts = path.relative_to(ROOT).parts
        if path.suffix in (".py", ".c", ".h", ".md", ".toml", ".def", ".pyi") and not parts[0].startswith(".") \
                and parts[0] not in ("build",) and path.name != here:  # fmt: skip
            assert not re.search(r"/(root|home|work)/", path.read_text()), path
