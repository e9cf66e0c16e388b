"""The recipes of CONTRIBUTING.md, carried out on a copy of the tree: the files that a recipe names are changed, in its
order, and no others. A step that the text leaves out is not done, and the test fails."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def steps(title: str) -> list[str]:
    """The files that a recipe names at the beginning of its steps."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = re.search(rf"^## {title}\b.*?(?=^## |\Z)", text, re.M | re.S)
    assert section, f"no recipe {title!r}"
    return re.findall(r"^\d+\. `([^`]+)`", section[0], re.M)


def after(mark: str, new: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        assert text.count(mark) == 1, f"{mark!r}: {text.count(mark)} times"
        return text.replace(mark, mark + new)

    return change


def both(*changes: Callable[[str], str]) -> Callable[[str], str]:
    def change(text: str) -> str:
        for one in changes:
            text = one(text)
        return text

    return change


POLICY = '''"""Thirds: every third of the old tokens."""

from torch import Tensor

from .base import Policy, Stored


class Thirds(Policy):
    """Keeps every third token first, then the newest (after StreamingLLM, 2309.17453)."""

    heads = "shared"

    def score(self, stored: Stored) -> Tensor:
        return (stored.positions % 3 == 0) * 1e6 + stored.positions.float()
'''
REFERENCE = """def thirds(budget, sinks=4):
    def rule(row):
        score = torch.tensor([[i + (i % 3 == 0) * 1e6 for i in range(row.n)]] * row.H, dtype=torch.float64)
        return best(row, score, budget, sinks)

    return rule


"""
ADD_POLICY = {
    "kvcompress/policies/NAME.py": lambda _: POLICY,
    "kvcompress/policies/__init__.py": both(
        after("from .rkv import RKV\n", "from .thirds import Thirds\n"), after('    "Stored",\n', '    "Thirds",\n')
    ),
    "kvcompress/__init__.py": both(
        after("        StreamingLLM,\n", "        Thirds,\n"), after('"StreamingLLM", "TOVA", ', '"Thirds", ')
    ),
    "kvcompress/policies/text.py": both(
        after("from .rkv import RKV\n", "from .thirds import Thirds\n"),
        after('    "knorm": KNorm,\n', '    "thirds": Thirds,\n'),
    ),
    "tests/support/evict_reference.py": lambda text: text.replace("def knorm(", REFERENCE + "def knorm("),
    "tests/eviction/test_policies.py": both(
        after("    StreamingLLM,\n", "    Thirds,\n"),
        after("CASES = {\n", '    "thirds": (Thirds(40), reference.thirds(40), 40),\n'),
    ),
    "docs/eviction.md": after("| each | 2406.11430 |\n", "| `Thirds(budget)` | every third token | each | |\n"),
}
POLICY_WORKS = """
import pathlib, pytest, kvcompress
from kvcompress.policies.text import make
policy = make("thirds", "25%", 4, 0)
assert type(policy) is kvcompress.Thirds
assert type(kvcompress.policies.from_dict(policy.to_dict())) is kvcompress.Thirds
assert "`Thirds(" in pathlib.Path("docs/eviction.md").read_text()
files = ["tests/eviction/test_policies.py", "-k", "as_the_paper_says and thirds"]
assert pytest.main(["-q", "-p", "no:xdist", "-p", "no:cacheprovider", *files]) == 0
"""
COMMAND = '''def shout(args: argparse.Namespace) -> int:
    """The name of the library, loud."""
    _print(args, {"said": "KVCOMPRESS"}, "KVCOMPRESS")
    return 0


def add('''
ADD_COMMAND = {
    "kvcompress/tools/cli/commands.py": both(
        lambda text: text.replace("def add(", COMMAND),
        lambda text: (
            text + '\n    p = commands.add_parser("shout", parents=[common], help="its name")\n'
            "    p.set_defaults(run=shout)\n"
        ),
    ),
    "docs/cli.md": after("| yes |\n| `demo` | the demonstration of the repository | yes |\n", "| `shout` | | no |\n"),
    "tests/tools/test_commands.py": lambda text: (
        text + "\n\ndef test_shout(capsys):\n"
        '    assert printed(capsys, "shout") == (0, "KVCOMPRESS\\n")\n'
        '    assert json.loads(printed(capsys, "shout", "--json")[1]) == {"said": "KVCOMPRESS"}\n'
    ),
}
COMMAND_WORKS = """
import pathlib, pytest
assert "| `shout`" in pathlib.Path("docs/cli.md").read_text()
files = ["tests/tools/test_commands.py", "-k", "shout"]
assert pytest.main(["-q", "-p", "no:xdist", "-p", "no:cacheprovider", *files]) == 0
"""
ADD_FORMAT = {
    "csrc/core/formats.def": lambda text: (
        text + 'KVC_FORMAT(INT4_G64, "int4_g64", 4, UINT, F16, 64, TOKEN, 0, 64, "scale and zero point per 64 dims")\n'
    ),
    "tests/support/codec_reference.py": lambda text: text.replace(
        "}\nQUANTIZED", '    "int4_g64": (4, "uint", 64, "token"),\n}\nQUANTIZED', 1
    ),
    "tests/golden/make.py": lambda text: text.replace(
        ")\n\n\ndef uniform", '    ("int4_g64", "int4_g64", 128, 32),\n)\n\n\ndef uniform', 1
    ),
    "docs/formats.md": lambda text: text + "\n| `int4_g64` |\n",
}
FORMAT_WORKS = """
import pathlib, subprocess, sys, numpy, pytest, torch
assert "`int4_g64`" in pathlib.Path("docs/formats.md").read_text()
subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], check=True)
from kvcompress import PagedKV
make, golden = "tests/golden/make.py", "tests/golden/codec.npz"
old = dict(numpy.load(golden))
subprocess.run([sys.executable, make], check=True)
new = numpy.load(golden)
assert "page_int4_g64_int4_g64_128_32" in new and all((new[name] == x).all() for name, x in old.items())
kv, x = PagedKV(2, 64, key="int4_g64", page_size=16), torch.randn(1, 2, 90, 64)
kv.append(x, x.flip(3))
kv.append(x[:, :, :1], x[:, :, :1])
q, (k, v) = torch.randn(1, 4, 1, 64), kv.dense()
want = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
assert (kv.attend(q)[0] - want).abs().max() < 0.02
files = ["tests/core/test_codec.py", "-k", "golden or same_bytes or meant or int4_g64"]
assert pytest.main(["-q", "-p", "no:xdist", "-p", "no:cacheprovider", *files]) == 0
"""
RECIPES = {
    "Adding a policy": (ADD_POLICY, POLICY_WORKS, "thirds"),
    "Adding a command": (ADD_COMMAND, COMMAND_WORKS, "shout"),
    "Adding a format": (ADD_FORMAT, FORMAT_WORKS, "int4_g64"),
}


def carried_out(folder: Path, title: str, without: str | None = None) -> subprocess.CompletedProcess:
    changes, works, name = RECIPES[title]
    for part in ("kvcompress", "tests", "docs", *(("csrc",) if changes is ADD_FORMAT else ())):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "*.png"))
    for file in ("pyproject.toml", "setup.py", "build_cuda.py", "README.md"):
        shutil.copy(ROOT / file, folder)
    (folder / "assets").symlink_to(ROOT / "assets")
    for step in steps(title):
        if step != without:
            path = folder / step.replace("NAME", name)
            path.write_text(changes[step](path.read_text() if path.exists() else ""))
    env = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", works]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("title", [
    pytest.param(title, marks=[pytest.mark.full] if "format" in title else []) for title in RECIPES
])  # fmt: skip
def test_a_recipe_is_enough(title: str, tmp_path: Path) -> None:
    done = carried_out(tmp_path, title)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.parametrize("title,step", [(title, step) for title in RECIPES for step in RECIPES[title][0]])
def test_every_step_is_needed(title: str, step: str, tmp_path: Path) -> None:
    assert step in steps(title)
    assert carried_out(tmp_path, title, without=step).returncode != 0


@pytest.mark.parametrize("kind", [
    "a format", "an instruction set", "a policy", "a command", "an op", "a family of models", "what a page holds",
])  # fmt: skip
def test_every_step_names_a_file_that_is_there(kind: str) -> None:
    found = steps(f"Adding {kind}" if kind != "what a page holds" else "Changing what a page holds")
    assert found
    for step in found:
        if not re.search("NAME|<", step):
            assert (ROOT / step).exists(), step
