"""README, docs and examples work as written; and files that must not be in the repository."""

import importlib
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


def test_a_version_that_is_not_released_is_called_so():
    """Until a release, builds have the version before it (RELEASING.md)."""
    version, date = re.search(r"^## \[(.+?)\] - (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M).groups()
    built = re.search(r'^VERSION = "(.+)"$', (ROOT / "setup.py").read_text(), re.M)[1]
    said = " ".join((ROOT / "docs/migration.md").read_text().split())
    assert (date == "unreleased") == (built != version)
    coming = date == "unreleased" and f"## From kvcompress {built.rpartition('.')[0]}" in said
    assert coming == (
        f"It is not released yet: the repository has the new names, and its builds call themselves {built}" in said
    )


@pytest.mark.parametrize("example", ["paged_layer.py"])
def test_examples_run(example):
    command = [sys.executable, str(ROOT / "examples" / example)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def ci(tmp_path, part):
    """Output and status of `.ci/run` if every part runs `part`; the last one takes long."""
    shims = {
        "make": f'echo "ran $*"; [ "$*" = test ] || {{ {part}; }}',
        "timeout": 'shift 2; exec $(command -pv timeout) 5 "$@"',
    }
    for name, line in shims.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run([ROOT / ".ci" / "run"], env={**os.environ, "PATH": path, "PYTHON": sys.executable},
                          capture_output=True, text=True, check=False)  # fmt: skip
    return done.returncode, done.stdout


def test_ci_is_red_when_one_part_failed(tmp_path):
    code, said = ci(tmp_path, '[ "$*" != "full ROOM=core" ]')
    assert code == ("ran full ROOM=core" in said), said
    code, said = ci(tmp_path, "false")
    assert code == 1 and "FAILED" in said and "passed" not in said


def test_ci_goes_on_after_a_part_that_was_cut(tmp_path):
    marker = tmp_path / "slept"
    code, said = ci(tmp_path, f"[ -e {marker} ] || {{ touch {marker}; sleep 60; }}")
    assert code == 0 and said.count("cut after") == 1 and said.count(": passed") > 3, said


def test_every_part_of_ci_runs_within_a_few_commits():
    sys.path.insert(0, str(ROOT / ".ci"))
    import parts

    table = parts.parts()
    runs = []
    for commit in range(1000, 1000 + -(-sum(minutes for minutes, *_ in table) // parts.HOUR) + 3):
        left, taken = 75 - 12, []
        for part in parts.order(commit):
            if part[0] <= left:
                left -= part[0]
                taken.append(part)
        runs.append(taken)
    assert {part for taken in runs for part in taken} == set(table) and len(runs) < 12
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text() + (ROOT / "tests/tools.mk").read_text(), re.M)
    for _, _, command in table:
        what, *rest = command.split()
        own = what.startswith(".ci/") and os.access(ROOT / what, os.X_OK)
        assert own or (what == "make" and rest[0] in targets), command


def test_generated_docs_are_current(monkeypatch):
    """The files are what `make docs` writes: change text in docs/*.py, and numbers by a benchmark."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    generate, speed = (importlib.import_module(name) for name in ("generate", "speed"))
    for name, page in (("formats", generate.formats_page()), ("speed", speed.page())):
        assert (ROOT / "docs" / f"{name}.md").read_text() == page, f"docs/{name}.md: run make docs"


def test_no_machine_paths():
    here = Path(__file__).name
    for path in ROOT.rglob("*"):
        parts = path.relative_to(ROOT).parts
        if path.suffix in (".py", ".c", ".h", ".md", ".toml", ".def", ".pyi", ".json") \
                and not parts[0].startswith(".") and parts[0] not in ("build",) and path.name != here:  # fmt: skip
            assert not re.search(r"/(root|home|work)/", path.read_text()), path
