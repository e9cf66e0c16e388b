"""Pool and prefix index shared by threads: the C program tests/c/test_threads.c, plain and with ThreadSanitizer."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from test_pool import CC, CORE, FLAGS, ROOT, run

SOURCES = [ROOT / "tests" / "c" / "test_threads.c", *CORE, *(ROOT / "csrc" / "core" / f"{name}.c" for name in
           ("memory/pool", "memory/prefix", "memory/prefix_offload", "memory/transfer", "base/sha256",
            "base/system"))]  # fmt: skip


def build(to: Path, *options: str) -> subprocess.CompletedProcess:
    command = [CC, *FLAGS, *options, "-iquote", ROOT / "csrc" / "core", *SOURCES, "-lm", "-lpthread", "-o", to]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(shutil.which(CC) is None, reason="no C compiler")
@pytest.mark.parametrize("steps", [300, pytest.param(5000, marks=pytest.mark.full)])
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_eight_threads(tmp_path: Path, sanitizer: str, steps: int) -> None:
    (tmp_path / "probe.c").write_text("int main(void) { return 0; }\n")
    options = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    probe = [CC, *options, str(tmp_path / "probe.c"), "-o", str(tmp_path / "probe")]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip(f"no sanitizer: {sanitizer}")
    done = build(tmp_path / "harness", *options, f"-DSTEPS={steps}")
    assert done.returncode == 0, done.stderr
    run(str(tmp_path / "harness"))
