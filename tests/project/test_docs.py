"""Docstrings: every public function has one, with shapes, units, errors and sources where they apply."""

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import families
import pytest

import kvcompress
from kvcompress.parallel import ShardedKV

ROOT = Path(__file__).parents[2]
MODULES = (  # used by users
    "tools.cli.bench", "tools.cli.info", "formats", "ops", "quantization.pack", "quantization.metrics",
    "quantization.tensor", "store.display", "tools.plan", "tools.plan.fit", "tools.plan.measure", "tools.plot",
    "policies", "schemes",
)  # fmt: skip
IN_FULL = ("KVCache", "PagedKV", "evaluate", "inspect", "quantize", "plan.plan", "plan.recommend", "plan.search",
           "bench.bench")  # fmt: skip
UNITS = r"bytes?|tokens?|slots?|bits?|ms\b|nats|decibels|dB|GB|percent|share|rows?|layers?|elements?|pages?|text"
NO_PAPER = ("Chain", "Policy", "Protect", "Random", "ScoreOnly", "SlidingWindow", "StoredTokens", "from_dict")


def public():
    """(name, object, its class or None) of the whole public API."""
    found = {}
    for name in kvcompress.__all__:
        x = getattr(kvcompress, name)
        if inspect.isfunction(x) or inspect.isclass(x):
            found[name] = (x, None)
    for path in MODULES:
        module = re.sub(r"^(tools\.cli|tools|quantization|store)\.", "", path)
        for name, x in vars(importlib.import_module(f"kvcompress.{path}")).items():
            own = (getattr(x, "__module__", "") + ".").startswith(f"kvcompress.{path}.")
            if own and not name.startswith("_") and (inspect.isfunction(x) or inspect.isclass(x)):
                if (module == "plan.measure" and name != "search") or found.get(name, (None,))[0] is x:
                    continue
                found["plan.search" if name == "search" else f"{module}.{name}"] = (x, None)
    for name, (x, _) in list(found.items()):
        for method, f in vars(x).items() if inspect.isclass(x) else ():
            f = f.fget if isinstance(f, property) else getattr(f, "__func__", f)
            if not method.startswith("_") and inspect.isfunction(f) and f.__module__.startswith("kvcompress"):
                found[f"{name}.{method}"] = (f, x)
    return found


PUBLIC = public()


def doc_of(name):
    x, owner = PUBLIC[name]
    own = inspect.getdoc(x) or ""
    if owner and not own:  # an override has the meaning of the base method
        own = next((d for base in owner.__mro__[1:] if (d := inspect.getdoc(getattr(base, x.__name__, None)))), "")
    return own


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_docstrings_are_complete(name):
    x, owner = PUBLIC[name]
    doc = doc_of(name)
    assert len(doc.split()) >= 3, "no docstring"
    bases = (
        [base for base in (owner or x).__mro__ if base.__module__.startswith("kvcompress")]
        if owner or isinstance(x, type)
        else []
    )
    around = doc + "".join(base.__doc__ or "" for base in bases)
    function = x.__init__ if inspect.isclass(x) else x
    try:
        parameters = inspect.signature(function).parameters.values()
        source = inspect.getsource(function)
    except (TypeError, ValueError, OSError):
        return
    if any("Tensor" in str(p.annotation) and "Quantized" not in str(p.annotation) for p in parameters) and not owner:
        assert re.search(r"\[[^\]]+\]|shape", doc), "takes tensors: of which shape?"
    raised = set(re.findall(r"^\s+raise (\w*Error)", source, re.MULTILINE)) - {"NotImplementedError"}
    if raised and not owner:
        assert re.search(r"Raises|raise|Error|refuse", around), f"raises {raised}: when?"
    if name in IN_FULL:
        for p in parameters:
            if p.name != "self" and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
                assert re.search(rf"\b{p.name}\b", doc), f"what is {p.name}?"
    if name.startswith(("plan.", "bench.", "display.")) and inspect.isfunction(x) and not owner and "return" in source:
        assert re.search(UNITS, doc, re.IGNORECASE), "in which units?"


@pytest.mark.parametrize("name", [n for n in kvcompress.policies.__all__ if n not in NO_PAPER])
def test_policies_name_their_source(name):
    policy = getattr(kvcompress.policies, name)
    text = (inspect.getdoc(policy) or "") + (inspect.getdoc(inspect.getmodule(policy)) or "")
    assert re.search(r"\d{4}\.\d{4,5}|section|no paper", text), (
        "expected the arXiv number of its paper in the docstring, or 'no paper'"
    )


def test_every_module_says_what_it_is():
    for path in (ROOT / "kvcompress").rglob("*.py"):
        assert path.read_text().startswith(('"""', "# ruff")), path


def test_every_page_is_in_the_site():
    text = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        assert str(page.relative_to(ROOT / "docs")) in text, page
    for name in re.findall(
        r"^::: ([\w.]+)", "".join(p.read_text() for p in (ROOT / "docs/api").glob("*.md")), re.MULTILINE
    ):
        module, _, attribute = name.rpartition(".")
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            assert hasattr(importlib.import_module(module), attribute), name


def test_every_public_name_is_in_the_api_pages():
    pages = "".join(p.read_text() for p in (ROOT / "docs/api").glob("*.md"))
    shown = set(re.findall(r"^::: ([\w.]+)", pages, re.MULTILINE))
    public = [
        x for name in kvcompress.__all__ if inspect.isclass(x := getattr(kvcompress, name)) or inspect.isfunction(x)
    ]
    assert not [x for x in [*public, ShardedKV] if not {x.__module__, f"{x.__module__}.{x.__name__}"} & shown
                and x.__module__ != "kvcompress._C"]  # fmt: skip


def test_the_site_is_strict_and_shows_every_default(tmp_path):
    """As built by `make docs`: no broken links, and each of several arguments in one docstring line has a row with
    type and default."""
    pytest.importorskip("mkdocstrings")
    (command,) = re.findall(r"bin/mkdocs (build .*)", (ROOT / "Makefile").read_text())
    assert "--strict" in command and "-q" not in command.split()  # which would hide warnings that --strict counts
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", *command.split(), "-d", tmp_path], cwd=ROOT, capture_output=True, text=True,
        check=False, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    pages = {page.parent.name: page.read_text() for page in (tmp_path / "api").glob("*/index.html")}
    assert not [x for text in pages.values() for x in re.findall(r"<code>\w+, \w+", text)]
    rows = {tuple(re.findall(r"<code>(.*?)</code>", row)) for row in re.findall(r"<tr.*?</tr>", pages["caches"], re.S)}
    shown = {row[0]: row[-1] for row in rows if row}
    assert shown["span_tokens"] == shown["spans"] == shown["value"] == "None", shown


def test_the_readme_counts_families_once():
    """Of the tests' models: an adapter and quantized weights are not families, and variants of a family count once."""
    (said,) = re.findall(r"(\d+) model families", (ROOT / "README.md").read_text())
    assert int(said) == len({make().model_type for make in families.CONFIGS.values()})


def test_decisions_have_numbers_of_their_own():
    text = "".join((ROOT / f"docs/{name}.md").read_text() for name in ("decisions", "decisions-archive"))
    numbers = re.findall(r"^\*\*(\d+)\*\* \(", text, re.MULTILINE)
    assert len(numbers) > 100 and not {n for n in numbers if numbers.count(n) > 1}


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda p: p.stem)
def test_notebooks_are_small_and_clean(path):
    """They contain their outputs, are small, and do not mention a machine."""
    text = path.read_text()
    assert len(text) < 120_000 and not re.search(r"/(root|home|work|tmp)/", text)
    cells = json.loads(text)["cells"]
    assert cells[0]["cell_type"] == "markdown" and any(cell.get("outputs") for cell in cells)
    assert not any(out.get("name") == "stderr" for cell in cells for out in cell.get("outputs", ()))


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda p: p.stem)
def test_notebooks_outside_of_the_repository_say_so(path, tmp_path, monkeypatch):
    """The first cell that needs the repository's files stops with an explanation."""
    monkeypatch.chdir(tmp_path)
    cells = ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    first = next((code for code in cells if "assets" in code or "errata" in code), None)
    if first is None:
        return  # it needs none
    with pytest.raises(AssertionError, match=r"expected a folder of the repository, whose \w+/ this notebook reads"):
        exec(first, {})


def test_no_hint_names_a_package_that_no_index_has():
    """kvcompress is installed from a copy of the repository."""
    texts = [*(ROOT / "kvcompress").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    named = re.compile(r"pip install \S*\bkvcompress(?![-/.\w])|(?<![\w/])kvcompress\[\w")
    assert not [(path, found[0]) for path in texts for found in [named.search(path.read_text())] if found]


def test_type_checkers_know_every_name():
    block = (ROOT / "kvcompress/__init__.py").read_text().partition("if TYPE_CHECKING:")[2].partition("_POLICIES")[0]
    assert not [name for name in kvcompress.__all__ if not re.search(rf"\b{name}\b", block)]
