"""What nvcc makes of the kernels: integer tensor cores in the integer kernels, floats in the float ones, next to
nothing in local memory. Needs nvcc, cuobjdump and nvdisasm (PyPI: nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm)."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from build_cuda import ALL  # noqa: E402

BIN = [str(p) for p in Path(sysconfig.get_paths()["purelib"]).glob("nvidia/*/bin")]
SEARCH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin", *BIN])
NVCC, OBJDUMP, DISASM = (shutil.which(name, path=SEARCH) for name in ("nvcc", "cuobjdump", "nvdisasm"))
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not (NVCC and OBJDUMP and DISASM), reason="wants nvcc, cuobjdump and nvdisasm"),
]
SPILL = 72
"""Bytes of spilled registers that a kernel may have: what is used once a page or less. `any` holds eight kinds and
staging, and may have more (docs/cuda.md)."""


def compiled(arch, out):
    """{kernel: (SASS, spilled bytes)} of head dim 128 for one architecture."""
    flags = ["-std=c++17", "-O3", "-fmad=false", "-Icsrc/core", f"-arch=sm_{arch}", "-cubin", "-Xptxas", "-v"]
    env = {name: x for name, x in os.environ.items() if name != "LD_PRELOAD"}  # nvcc does not bear a sanitizer
    done = subprocess.run([NVCC, *flags, "csrc/cuda/attend128.cu", "-o", str(out)], cwd=ROOT, capture_output=True,
                          text=True, check=True, env=env)  # fmt: skip
    pattern = r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
    spills = {name: int(stores) for name, stores, _ in re.findall(pattern, done.stderr, re.DOTALL)}
    text = subprocess.run([OBJDUMP, "-sass", str(out)], env={**env, "PATH": SEARCH}, capture_output=True,
                          text=True, check=True).stdout  # fmt: skip
    sass = {part.split("\n", 1)[0].strip(): part for part in text.split("Function : ")[1:]}
    assert set(sass) == set(spills) and len(sass) == 5
    return {name: (sass[name], spills[name]) for name in sass}


@pytest.mark.parametrize("arch", ALL)
def test_what_the_kernels_become(arch, tmp_path):
    """Integers go to integer tensor cores, words are loaded 16 bytes at a time, hardly anything spills."""
    for name, (sass, spilled) in compiled(arch, tmp_path / "attend.cubin").items():
        assert "HMMA.16816.F32" in sass, name  # raw pages
        assert ("IMMA.16832.U8.S8" in sass) == ("fp8" not in name), name
        if "attend" in name:
            assert ("IMMA.16832.U8.U8" in sass) == ("fp8" not in name), name
        assert len(re.findall(r"LDG\.E\S*\.128", sass)) >= 8, name
        assert spilled <= SPILL or "any" in name, f"{name}: {spilled} bytes"
