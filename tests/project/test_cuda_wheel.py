"""kvcompress-cuda, the wheel of the CUDA library: its contents, and how kvcompress finds it. nvcc is a stub."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvcompress import _C

ROOT = Path(__file__).parents[2]
NVCC = """#!/bin/sh
case "$1" in
--version) echo "Cuda compilation tools, release 12.4, V12.4.131"; exit;;
--list-gpu-code) echo sm_89; echo sm_90; exit;;
esac
while [ "$1" != -o ]; do shift; done
echo made > "$2"
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built in a copy of the parts of the tree that it needs."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("csrc", "kvcompress-cuda"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    for name in ("setup.py", "build_cuda.py"):
        shutil.copy(ROOT / name, tree)
    (tree / "kvcompress").mkdir()
    (tree / "nvcc").write_text(NVCC)
    (tree / "nvcc").chmod(0o755)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "-w",
        "out",
    ]
    env = os.environ | {"NVCC": str(tree / "nvcc"), "KVCOMPRESS_CUDA": "90"}
    subprocess.run([*command, "./kvcompress-cuda"], cwd=tree, env=env, check=True, capture_output=True)
    (found,) = (tree / "out").glob("*.whl")
    return found


def test_wheel_contains_only_the_library(wheel):
    assert wheel.name.startswith(f"kvcompress_cuda-{_C.__version__}-py3-none-linux_")
    with zipfile.ZipFile(wheel) as archive:
        names = sorted(x for x in archive.namelist() if "dist-info" not in x)
        assert names == ["kvcompress_cuda/__init__.py", "kvcompress_cuda/libkvcompress_cuda.so"]
        (metadata,) = (archive.read(x).decode() for x in archive.namelist() if x.endswith("METADATA"))
    assert f"Requires-Dist: kvcompress=={_C.__version__}\n" in metadata


def test_kvcompress_finds_the_installed_wheel(wheel, tmp_path):
    code = "from kvcompress.files import cuda_library; print(cuda_library())"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    for path, wanted in (("", "None"), (str(tmp_path), str(tmp_path / "kvcompress_cuda/libkvcompress_cuda.so"))):
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), path])}
        said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
        if not (ROOT / "kvcompress" / "libkvcompress_cuda.so").exists():  # that of this build has priority
            assert said.strip() == wanted
