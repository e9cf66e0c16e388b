"""Performs the recipes of CONTRIBUTING.md on a copy of the tree: the files that a recipe names are changed, in its
order, and no others. A step that the text omits is not done, and the test fails."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from recipes import RECIPES

ROOT = Path(__file__).parents[2]
GOLDEN = "tests/golden/make.py"


def recipe(title: str) -> str:
    """The text of a recipe."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = re.search(rf"^## {title}\b.*?(?=^## |\Z)", text, re.M | re.S)
    assert section, f"no recipe {title!r}"
    return section[0]


def steps(title: str) -> list[str]:
    """The files named at the beginning of its steps."""
    return re.findall(r"^\d+\. `([^`]+)`", recipe(title), re.M)


def carried_out(folder: Path, title: str, without: str | None = None) -> subprocess.CompletedProcess:
    changes, works, name = RECIPES[title]
    for part in ("kvcompress", "tests", "docs", *(("csrc",) if built(title) else ())):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "*.png"))
    for file in ("pyproject.toml", "setup.py", "build_cuda.py", "README.md"):
        shutil.copy(ROOT / file, folder)
    (folder / "assets").symlink_to(ROOT / "assets")
    for step in steps(title):
        if step != without:
            path = folder / re.sub("NAME|<isa>", name, step)
            path.write_text(changes[step](path.read_text() if path.exists() else ""))
    compiler = f"{sys.executable} {ROOT / 'tests/planted/cc.py'} {ROOT / 'build/planted/objects'} cc"
    env = {**os.environ, "PYTHONPATH": str(folder), "CC": compiler}
    command = [sys.executable, "-c", works]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("title", RECIPES)
def test_the_text_has_every_step(title: str) -> None:
    assert steps(title) == list(RECIPES[title][0])


@pytest.mark.parametrize("title", [title for title in RECIPES if GOLDEN in RECIPES[title][0]])
def test_it_is_built_before_it_runs(title: str) -> None:
    """`make.py` writes what the built extension stores, so it has to be built first."""
    before, _, _ = recipe(title).partition(f"python {GOLDEN}")
    assert "`make build`" in before and f"python {GOLDEN}" in recipe(title)


def built(title: str) -> bool:
    """Whether it changes C code."""
    return any(step.startswith("csrc") for step in RECIPES[title][0])


@pytest.mark.parametrize("title", [
    pytest.param(title, marks=[pytest.mark.full] if built(title) or "models" in title else []) for title in RECIPES
])  # fmt: skip
def test_a_recipe_is_enough(title: str, tmp_path: Path) -> None:
    done = carried_out(tmp_path, title)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.parametrize("title,step", [(title, step) for title in RECIPES for step in RECIPES[title][0]])
def test_every_step_is_needed(title: str, step: str, tmp_path: Path) -> None:
    assert step in steps(title)
    assert carried_out(tmp_path, title, without=step).returncode != 0


@pytest.mark.parametrize("title", RECIPES)
def test_every_step_names_a_file_that_is_there(title: str) -> None:
    for step in steps(title):
        if not re.search("NAME|<", step):
            assert (ROOT / step).exists(), step
