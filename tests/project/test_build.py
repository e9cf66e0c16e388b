"""Structure of the extension: C only, layers include only lower ones, no torch at build time. Python:
`test_structure.py`."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from kvcompress import _C

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
import build_cuda  # noqa: E402

LAYERS = {"core": (), "cuda": ("core",), "torch": ("core", "cuda"), "python": ("core", "torch")}
# Folders of csrc/core/: each includes only from the ones before it, from itself, and the headers of the API above them.
CORE = ("base", "codec", "kernels", "memory", "table", "attend", "evict", "engine")


def test_no_cpp_and_no_torch_symbol_is_linked():
    undefined = subprocess.run(["nm", "-D", "-u", _C.__file__], check=True, capture_output=True, text=True).stdout
    names = [line.split()[-1] for line in undefined.splitlines()]
    assert names and not [n for n in names if n.startswith("_Z") or "torch" in n or "c10" in n or "__cxa_throw" in n]
    defined = subprocess.run(
        ["nm", "-D", "--defined-only", _C.__file__], check=True, capture_output=True, text=True
    ).stdout
    assert [line.split()[-1] for line in defined.splitlines()] == ["PyInit__C"]
    assert Path(_C.__file__).name == "_C.abi3.so"


@pytest.mark.skipif(not shutil.which("objdump"), reason="no objdump")
def test_kernels_prefetch():
    """gcc removes calls of functions that only prefetch, unless they are always inlined."""
    code = subprocess.run(["objdump", "-d", _C.__file__], check=True, capture_output=True, text=True).stdout
    kernels = {
        m[1]: m[2]
        for m in re.finditer(r"^\w+ <(kvc_(?!scalar)\w+_(?:qk|pv)_\w+)>:\n(.*?)\n\n", code, re.MULTILINE | re.DOTALL)
    }
    if not kernels:
        pytest.skip("a stripped build, or scalar kernels only")
    assert not [name for name, x in kernels.items() if "prefetch" not in x and "prfm" not in x]


def test_no_compiler_is_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--build-temp", str(tmp_path), "--build-lib", str(tmp_path)],
        cwd=ROOT, env={**os.environ, "CC": "no-such-compiler"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode and "Traceback" not in done.stderr
    assert "kvcompress: expected a C compiler, got none: no-such-compiler is not there" in done.stderr


def test_an_old_python_is_one_line():
    old = "import runpy, sys; sys.version_info = (3, 9, 18); runpy.run_path('setup.py')"
    done = subprocess.run([sys.executable, "-c", old], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode and done.stderr.startswith("kvcompress: expected Python 3.10 or newer, got")
    assert len(done.stderr.splitlines()) == 1


def test_a_free_threaded_python_is_refused():
    """They lack the stable ABI that the extension is built for; the build says so before it compiles."""
    free = (
        "import runpy, sys, sysconfig; sysconfig.get_config_vars()['Py_GIL_DISABLED'] = 1; "
        "sys.argv = ['setup.py', '--name']; runpy.run_path('setup.py')"
    )
    done = subprocess.run([sys.executable, "-c", free], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode and "free-threaded" in done.stderr and "python3" in done.stderr


def test_source_that_is_not_built_says_so(tmp_path):
    shutil.copytree(ROOT / "kvcompress", tmp_path / "kvcompress", ignore=shutil.ignore_patterns("_C.*", "__pycache__"))
    # An editable install of this repository would use the extension of the built source.
    alone = "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in getattr(f, '__module__', '')]"
    done = subprocess.run([sys.executable, "-c", f"{alone}; from kvcompress import PagedKV"], cwd=tmp_path,
                          capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": str(tmp_path)})  # fmt: skip
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: kvcompress: expected the built extension, got source that is not built in")
    assert "make build" in last


def test_sources_are_c():
    suffixes = {p.suffix for p in (ROOT / "csrc").rglob("*") if p.is_file()}
    assert suffixes <= {".c", ".h", ".def", ".cu", ".cuh"}
    assert {p.parent.name for p in (ROOT / "csrc").rglob("*.cu*")} == {"cuda"}


def test_python_comes_before_any_header_of_the_system():
    """Python.h defines macros that system headers check (_POSIX_C_SOURCE); included later, this is an error with zig
    cc, which builds the wheels."""
    for path in (ROOT / "csrc" / "python").glob("*.c"):
        assert re.findall(r"^#include (.*)$", path.read_text(), re.M)[0] == '"module.h"', path.name


def test_memory_is_asked_for_where_tests_make_it_fail():
    """kvc_alloc and kvc_scratch, or Python's allocators; not the C library's."""
    asks = re.compile(r"(?<!\w)(malloc|calloc|realloc|aligned_alloc|posix_memalign|strdup)\(")
    for path in [p for layer in LAYERS for p in (ROOT / "csrc" / layer).rglob("*.[ch]")]:
        assert path.name == "alloc.c" or not asks.search(path.read_text()), path


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_includes_only_lower_ones(layer):
    allowed = {p.name for part in (layer, *LAYERS[layer]) for p in (ROOT / "csrc" / part).rglob("*")}
    system = {
        "core": r"[a-z_0-9]+\.h|sys/(auxv|mman|resource|syscall|sysctl)\.h",
        "cuda": r"cuda_runtime\.h|(math|stddef|stdio|stdlib|pthread)\.h",
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


def test_files_are_short():
    for path in [p for part in ("csrc", "kvcompress", "tests", "benchmarks") for p in (ROOT / part).rglob("*")]:
        if path.suffix in (".c", ".h", ".py", ".def", ".cu", ".cuh"):
            lines = len(path.read_text().splitlines())
            assert lines <= 420, f"{path}: {lines} lines"


@pytest.mark.full
def test_isolated_build_needs_no_torch(tmp_path):
    """pip's build environment has only setuptools and numpy."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(tmp_path), str(ROOT)], check=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    assert "cp310-abi3" in wheel.name and sysconfig.get_platform().replace("-", "_") in wheel.name


@pytest.mark.parametrize("wanted", ["all", "80", "80,90", "90,80", "89,120", "100,120"])
def test_every_gpu_from_the_first_on_is_reached(wanted):
    """By machine code for its family, not for a later member, or by PTX that is not newer."""
    code, ptx = (list(map(int, names)) for names in build_cuda.targets(wanted))
    for gpu in (80, 86, 87, 89, 90, 100, 103, 110, 120, 121, 130):
        own = any(x // 10 == gpu // 10 and x <= gpu for x in code)
        assert own or any(x <= gpu for x in ptx) or gpu < min(code), gpu


def test_an_older_nvcc_builds_what_it_knows():
    old = ["75", "80", "86", "87", "89", "90"]  # CUDA 12.4
    assert build_cuda.targets("all", old) == (["80", "86", "89", "90"], ["90"])
    for wanted in ("100", "75", "9x"):
        with pytest.raises(SystemExit, match=r"expected .* knows \(80, 86, 87, 89, 90\); got"):
            build_cuda.targets(wanted, old)


def test_machine_code_that_stands_for_itself_takes_no_ptx():
    assert build_cuda.targets("all") == (["80", "86", "89", "90", "100", "120"], ["100", "120"])
    flags = build_cuda.options(["90"], ["90"])
    assert flags[-1] == '-DKVC_BUILT_FOR="sm_90 compute_90"' and len(flags) == 3
