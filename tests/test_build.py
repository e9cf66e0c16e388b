"""What the extension is made of: C only, layers one way, no torch at build time. And of the Python package:
rooms one way."""

import ast
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from kvcompress import _C

ROOT = Path(__file__).parent.parent
LAYERS = {"core": (), "cuda": ("core",), "torch": ("core", "cuda"), "python": ("core", "torch")}
# Folders of csrc/core/: each includes only from those before it, from itself, and the headers of the API above them.
CORE = ("base", "codec", "kernels", "memory", "table", "attend", "evict")
# Folders and files of kvcompress/: each imports only from those before it, and from itself.
ROOMS = (
    "_C", "checks", "formats", "schemes", "ops", "numbers", "policies", "strategy",
    "memory", "tokens", "eviction", "pages",  # a layer, without a model
    "caches", "models", "serving", "evaluation", "plan", "plot", "cli", "__main__",
)  # fmt: skip
UPWARD = {  # in functions, when they are called
    "pages/show.py": {"plot"},  # draws itself
    "policies/critical.py": {"models"},  # is told a model, looks for its output projections
}
HF = ("caches", "models", "serving", "evaluation", "plan", "cli")  # may import transformers


def test_no_cpp_and_no_torch_symbol_is_linked():
    undefined = subprocess.run(["nm", "-D", "-u", _C.__file__], check=True, capture_output=True, text=True).stdout
    names = [line.split()[-1] for line in undefined.splitlines()]
    assert names and not [n for n in names if n.startswith("_Z") or "torch" in n or "c10" in n or "__cxa_throw" in n]
    defined = subprocess.run(
        ["nm", "-D", "--defined-only", _C.__file__], check=True, capture_output=True, text=True
    ).stdout
    assert [line.split()[-1] for line in defined.splitlines()] == ["PyInit__C"]
    assert Path(_C.__file__).name == "_C.abi3.so"


def test_sources_are_c():
    suffixes = {p.suffix for p in (ROOT / "csrc").rglob("*") if p.is_file()}
    assert suffixes <= {".c", ".h", ".def", ".cu", ".cuh"}
    assert {p.parent.name for p in (ROOT / "csrc").rglob("*.cu*")} == {"cuda"}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_includes_only_lower_ones(layer):
    allowed = {p.name for part in (layer, *LAYERS[layer]) for p in (ROOT / "csrc" / part).rglob("*")}
    system = {
        "core": r"[a-z_0-9]+\.h|sys/(mman|syscall)\.h",
        "cuda": r"cuda_runtime\.h|(math|stddef|stdlib|pthread)\.h",
        "torch": r"[a-z_0-9]+\.h",
        "python": r"Python\.h|numpy/.*|[a-z]+\.h",
    }
    for path in (ROOT / "csrc" / layer).rglob("*.[ch]*"):
        for kind, name in re.findall(r'^\s*#\s*include\s+([<"])([^>"]+)', path.read_text(), re.MULTILINE):
            if kind == '"':
                assert Path(name).name in allowed or (layer, name) == ("cuda", "twin.h"), (
                    f"{path}: {name} is not of this layer or a lower one"
                )
            else:
                assert re.fullmatch(system[layer], name) and name not in ("Python.h" if layer != "python" else ""), path


@pytest.mark.parametrize("path", sorted((ROOT / "csrc/core").rglob("*.[ch]")), ids=lambda p: p.name)
def test_a_room_of_the_core_includes_only_lower_ones(path):
    core, room = ROOT / "csrc/core", path.parent.name
    lower = CORE[: CORE.index(room) + 1] if path.parent != core else ()
    for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.MULTILINE):
        found = next(p for p in (path.parent / name, core / name) if p.is_file())
        assert ".." not in name and (found.parent == core or found.parent.name in lower), f"{path}: {name}"


PYTHON = {p.relative_to(ROOT / "kvcompress").as_posix(): p for p in sorted((ROOT / "kvcompress").rglob("*.py"))}


def imported(name):
    """(module, is it imported with the module) of all that kvcompress/`name` imports, but for type checkers: absolute
    names. From a package everything is one name more: `from ..memory import parking` is kvcompress.memory.parking."""
    here, found = ["kvcompress", *name.split("/")[:-1]], []

    def walk(node, at_once):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                found.extend((x.name, at_once) for x in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = here[: len(here) - child.level + 1] if child.level else []
                base = ".".join([*base, *([child.module] if child.module else [])])
                found.extend((f"{base}.{x.name}", at_once) for x in child.names)
            walk(child, at_once and not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)))

    walk(ast.parse(PYTHON[name].read_text()), True)
    return found


def room_of(name):
    return name.split("/")[0].removesuffix(".py")


def test_every_room_is_in_the_order():
    rooms = {room_of(name) for name in PYTHON} - {"__init__"}
    assert rooms | {"_C"} == set(ROOMS), "a new file or folder of kvcompress/: say in ROOMS what it may import"
    folders = {p for p in (ROOT / "kvcompress").rglob("*") if p.is_dir() and list(p.glob("*.py"))}
    assert all((p / "__init__.py").is_file() for p in folders), "a folder without it is in no wheel"


@pytest.mark.parametrize("name", [name for name in PYTHON if name != "__init__.py"])
def test_a_room_imports_only_lower_ones(name):
    lower = ROOMS[: ROOMS.index(room_of(name)) + 1]
    for module, at_once in imported(name):
        package, _, rest = module.partition(".")
        if package == "transformers":
            assert room_of(name) in HF, f"{name}: transformers is for {HF}"
        elif package == "kvcompress":
            room = rest.split(".")[0]
            late = not at_once and room in UPWARD.get(name, ())
            assert room in lower or late, f"{name} imports {module}, but {room} is not before {room_of(name)} in ROOMS"


def test_modules_import_one_another_one_way():
    """Inside rooms too: a cycle works or not by who is imported first."""
    known = {"kvcompress." + re.sub(r"(/__init__)?\.py$", "", name).replace("/", "."): name for name in PYTHON}
    needs = {
        name: {
            known[m]
            for module, at_once in imported(name)
            if at_once and (m := module if module in known else module.rpartition(".")[0]) in known
        }
        for name in PYTHON
    }
    while needs:
        free = {name for name, others in needs.items() if not others & needs.keys()}
        assert free, f"in a cycle, or behind one: {sorted(needs)}"
        needs = {name: others for name, others in needs.items() if name not in free}


def test_files_are_short():
    for path in [p for part in ("csrc", "kvcompress", "tests", "benchmarks") for p in (ROOT / part).rglob("*")]:
        if path.suffix in (".c", ".h", ".py", ".def", ".cu", ".cuh"):
            lines = len(path.read_text().splitlines())
            assert lines <= 420, f"{path}: {lines} lines"


@pytest.mark.full
def test_isolated_build_needs_no_torch(tmp_path):
    """pip's own build environment has setuptools and numpy, nothing else."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(tmp_path), str(ROOT)], check=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    assert "cp310-abi3" in wheel.name and sysconfig.get_platform().replace("-", "_") in wheel.name
