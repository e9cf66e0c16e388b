"""What nvcc makes of the kernels: tensor cores in fp16 and bf16, next to nothing in local memory.
Needs nvcc and nvdisasm (PyPI: nvidia-cuda-nvdisasm)."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tests" / "sass"))
import program  # noqa: E402

from build_cuda import ALL  # noqa: E402

NVCC, DISASM = map(program.tool, ("nvcc", "nvdisasm"))
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not (NVCC and DISASM), reason="wants nvcc and nvdisasm"),
]
SPILL = 80
"""Bytes of spilled registers that an attention kernel may have: what is used once a page or less. `any` holds eight
kinds and staging, and may have more (docs/cuda.md)."""
MORE = {**{("ints_128", arch): 256 for arch in ("80", "86", "89", "90")},
        **{("raw_128", arch): 200 for arch in ("80", "86", "89")},
        **{("ints_64", arch): 160 for arch in ("80", "90")}, **{("ints_256", arch): 200 for arch in ("80", "90")},
        **{("int4_128", arch): 100 for arch in ("80", "86", "89")}}  # fmt: skip
"""Where the compiler spills more of what stays from page to page."""
ATTEND = ("accumulate_any", *(f"attend_{kinds}" for kinds in ("raw", "int8", "fp8", "int4", "int2", "ints", "any")))
KERNELS = {
    **{f"attend{dims}": tuple(f"{name}_{dims}" for name in ATTEND) for dims in (64, 128, 256)},
    "prefill": ("prefill_64", "prefill_128"),
    "launch": ("kept", "list"),
    "token": ("token",),
    "write": ("write", "pack", "quantize", "dequantize", "store"),
    "read": ("clear", "read"),
    "move": ("anew", "move"),
    "choose": ("choose",),
    "flags": ("take",),
    "score": ("score",),
    "varlen": ("varlen",),
    "wide": ("write_wide", "pack_rows_wide", "quantize_rows_wide", "dequantize_rows_wide", "clear_wide",
             "read_rows_wide", "anew_wide", "move_wide", "score_wide", "store_wide"),
    "attend_wide": ("attend_wide", "accumulate_wide"),
}  # fmt: skip
LOCAL = {"write": 272, "write_wide": 640, "anew_wide": 64, "pack_rows_wide": 40, "score_wide": 120, "store_wide": 16}
"""Bytes of local memory of the others: none, but for what the write kernel is to do, which it finds once a block, and
for rows of more than 256 dims, of which a lane has 36 numbers."""


def compiled(source, arch, out):
    """{kernel: (SASS, spilled bytes, bytes of local memory)} of a source for one architecture."""
    flags = ["-std=c++17", "-O3", "-fmad=false", "-Icsrc/core", f"-arch=sm_{arch}", "-cubin", "-Xptxas", "-v"]
    env = {name: x for name, x in os.environ.items() if name != "LD_PRELOAD"}  # nvcc does not bear a sanitizer
    done = subprocess.run([NVCC, *flags, f"csrc/cuda/{source}.cu", "-o", str(out)], cwd=ROOT, capture_output=True,
                          text=True, check=True, env=env)  # fmt: skip
    pattern = r"Compiling entry function 'kvc_(\w+?)(?:_kernel)?'.*?(\d+) bytes stack frame, (\d+) bytes spill stores"
    sizes = {name: (int(spilled), int(stack)) for name, stack, spilled in re.findall(pattern, done.stderr, re.DOTALL)}
    text = subprocess.run([DISASM, "-c", str(out)], env=env, capture_output=True, text=True, check=True).stdout
    parts = (part.split(",", 1) for part in re.split(r"\.section\s+\.text\.kvc_", text)[1:])
    sass = {name.removesuffix("_kernel"): part for name, part in parts}
    assert set(sass) == set(sizes) == set(KERNELS[source])
    return {name: (sass[name], *sizes[name]) for name in sass}


def test_no_kernel_is_left_out():
    found = {
        p.stem
        for p in (ROOT / "csrc" / "cuda").glob("*.cu")
        if any(word in p.read_text() for word in ("KVC_KERNEL", "SET(", '.cu"'))
    }
    assert found == set(KERNELS)


@pytest.mark.parametrize("source,arch", [("attend128", arch) for arch in ALL] + [
    (source, arch) for source in ("attend64", "attend256") for arch in ("80", "90")])  # fmt: skip
def test_attention_kernels_use_tensor_cores_and_hardly_spill(source, arch, tmp_path):
    """Tensor cores take fp16 and bf16, words are loaded 16 bytes at a time, hardly anything spills."""
    for name, (sass, spilled, _) in compiled(source, arch, tmp_path / "attend.cubin").items():
        assert "HMMA.16816.F32" in sass and "IMMA" not in sass, name
        assert len(re.findall(r"LDG\.E\S*\.128", sass)) >= 8, name
        most = MORE.get((name.removeprefix("attend_"), arch), SPILL)
        assert spilled <= most or "any" in name, f"{name}: {spilled} bytes"


@pytest.mark.parametrize("arch", ["80", "90", "120"])
@pytest.mark.parametrize("source", [name for name in KERNELS if not re.match(r"attend\d", name)])
def test_other_kernels_do_not_spill(source, arch, tmp_path):
    """Everything in registers."""
    for name, (sass, spilled, stack) in compiled(source, arch, tmp_path / "other.cubin").items():
        assert max(spilled, stack) <= LOCAL.get(name, 0), f"{name}: {spilled} bytes spilled, {stack} of local memory"
        assert name in LOCAL or not re.search(r"\b(LDL|STL)\b", sass), name
