"""The C harness on every kernel level, and the fuzz targets on their corpora: see tests/c and tests/fuzz."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FUZZ = ROOT / "tests" / "fuzz"
TARGETS = ("pages", "codecs", "table", "args", "prefix", "varlen")
SANITIZERS = {  # compiler, sanitizers, options
    "sanitized": ("cc", "-fsanitize=address,undefined", ""),
    "msan": (
        "clang",
        "-fsanitize=memory",
        "-g1 -fno-omit-frame-pointer -DKVC_UNPOISONED -fsanitize-ignorelist=tests/c/msan.list",
    ),
}
needs_tools = pytest.mark.skipif(not (shutil.which("cc") and shutil.which("make")), reason="no C compiler or make")


def make(makefile: str, out: str, options: str, *goals: str) -> Path:
    """Builds in build/, once for all workers and runs; both makefiles build the same objects of the core."""
    folder = ROOT / "build" / out
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(["make", "-s", "-j2", "-f", makefile, f"OUT=build/{out}", f"OPTIONS={options}", *goals],
                              cwd=ROOT, capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def run(*command: object) -> None:
    env = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}  # the suite itself may run with a sanitizer
    done = subprocess.run([str(x) for x in command], capture_output=True, text=True, check=False, env=env, timeout=600)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[-2000:]


@needs_tools
def test_harness():
    run(make("tests/c/Makefile", "harness/plain", "-O1") / "harness")


@needs_tools
@pytest.mark.full
@pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which("objdump"), reason="no x86-64, or no objdump")
def test_avxvnni_has_instructions_of_avx2_and_avxvnni_alone(tmp_path):
    """The level must not use AVX-512 instructions; this CPU may not have AVX-VNNI."""
    for name in ("avxvnni", "avxvnni_affine"):
        out = tmp_path / f"{name}.o"
        call = ["cc", "-std=c11", "-O1", "-iquote", "csrc/core", "-c", f"csrc/core/kernels/{name}.c", "-o", out]
        subprocess.run(call, cwd=ROOT, check=True)
        code = subprocess.run(["objdump", "-d", out], capture_output=True, text=True, check=True).stdout
        assert (
            "{vex} vpdpbusd" in code and "evex" not in code and not re.search(r"%zmm|%[xy]mm(1[6-9]|[23]\d)|%k\d", code)
        )
        assert code.count("vpdpbusd") == code.count("{vex} vpdpbusd")


def sanitized(kind: str, makefile: str, *goals: str) -> Path:
    compiler, sanitizers, more = SANITIZERS[kind]
    options = f"-O1 {sanitizers} -fno-sanitize-recover=all {more}"
    probe = [compiler, sanitizers, "-x", "c", "-", "-o", os.devnull]
    if not shutil.which(compiler) or subprocess.run(probe, input=b"int main(void){}", check=False).returncode:
        pytest.skip(f"no {compiler}, or it has not this sanitizer")
    return make(makefile, f"harness/{kind}", options, f"CC={compiler}", *goals)


@needs_tools
@pytest.mark.full
@pytest.mark.parametrize("kind", SANITIZERS)
def test_harness_under_sanitizers(kind):
    run(sanitized(kind, "tests/c/Makefile") / "harness")


def inputs(target: str) -> list[bytes]:
    paths = [FUZZ / kind / f"{target}.txt" for kind in ("corpus", "regressions")]
    lines = [line for path in paths if path.exists() for line in path.read_text().splitlines()]
    return [bytes.fromhex(line) for line in lines if not line.startswith("#")]


def replay(folder: Path, target: str, tmp_path: Path) -> None:
    known = inputs(target)
    assert len(known) > 10
    for i, data in enumerate(known):
        (tmp_path / f"{i:03}").write_bytes(data)
    run(folder / target, *sorted(tmp_path.iterdir()))


@needs_tools
@pytest.mark.parametrize("target", TARGETS)
def test_fuzz_inputs(target, tmp_path):
    replay(make("tests/fuzz/Makefile", "harness/plain", "-O1", f"build/harness/plain/{target}"), target, tmp_path)


@needs_tools
@pytest.mark.full
@pytest.mark.parametrize("kind", SANITIZERS)
@pytest.mark.parametrize("target", TARGETS)
def test_fuzz_inputs_under_sanitizers(target, kind, tmp_path):
    replay(sanitized(kind, "tests/fuzz/Makefile", f"build/harness/{kind}/{target}"), target, tmp_path)


@pytest.mark.parametrize("target", ["strategy", "kvc"])
def test_python_fuzz_inputs(target):
    spec = importlib.util.spec_from_file_location("python_targets", FUZZ / "python_targets.py")
    assert spec and spec.loader
    targets = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(targets)
    known = inputs(target)
    assert len(known) > 10
    for data in known:
        targets.TARGETS[target](data)
