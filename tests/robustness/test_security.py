"""Promises of SECURITY.md about the sources: they execute nothing that they read."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "kvcompress").rglob("*.py"))
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "subprocess", "code", "codeop"}
NAMES = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {
    ("torch", "load"),
    ("torch", "save"),
    ("os", "system"),
    ("os", "popen"),
    ("os", "execv"),
    ("yaml", "load"),
}


def offences(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [x.name for x in node.names if x.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES and not node.level:
            found.append(node.module or "")
        elif isinstance(node, ast.Call):
            f = node.func
            if isinstance(f, ast.Name) and f.id in NAMES:
                found.append(f.id)
            elif isinstance(f, ast.Attribute) and isinstance(f.value, ast.Name) and (f.value.id, f.attr) in ATTRIBUTES:
                found.append(f"{f.value.id}.{f.attr}")
            for keyword in node.keywords:
                true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
                if keyword.arg in ("allow_pickle", "trust_remote_code", "shell") and true:
                    found.append(f"{keyword.arg}=True")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT / "kvcompress")))
def test_nothing_runs_what_it_reads(path):
    assert not offences(path.read_text())


@pytest.mark.parametrize("bad", [
    "import pickle", "from marshal import loads", "eval('1')", "exec(x)", "torch.load(f)", "os.system('ls')",
    "np.load(f, allow_pickle=True)", "AutoModel.from_pretrained(x, trust_remote_code=True)",
])  # fmt: skip
def test_the_search_finds_it(bad):
    assert offences(bad)


def test_numpy_is_told_not_to_unpickle():
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            load = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load"
            if load and isinstance(node.func.value, ast.Name) and node.func.value.id in ("np", "numpy"):
                assert any(k.arg == "allow_pickle" for k in node.keywords), path
