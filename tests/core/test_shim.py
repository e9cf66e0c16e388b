"""Our declarations of libtorch functions compared with torch's headers; leaks of handles and memory."""

import gc
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvcompress import _C, formats, ops

CSRC = Path(__file__).parents[2] / "csrc" / "torch"


@pytest.mark.skipif(not shutil.which("g++"), reason="the drift test compiles torch's C++ headers: needs g++")
def test_declarations_equal_torchs(tmp_path):
    """Every function of the list, as declared by torch, converts to the pointer type that we declare."""
    source = tmp_path / "drift.cpp"
    source.write_text(
        """
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>
#define KVC_SHIM_TYPES
#include "shim.h"
#define SAME(result, name, arguments, since) { result (*p) arguments = &name; (void)p; }
void all() { KVC_SHIM_FUNCTIONS(SAME) KVC_CUDA_SHIM_FUNCTIONS(SAME) }
"""
    )
    include = Path(torch.__file__).parent / "include"
    subprocess.run(
        ["g++", "-std=c++20", "-fsyntax-only", "-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020a000000000000",
         f"-I{include}", f"-I{CSRC}", str(source)], check=True,
    )  # fmt: skip


@pytest.mark.skipif(not shutil.which("g++"), reason="the drift test compiles torch's C++ headers: needs g++")
def test_structs_equal_dlpacks(tmp_path):
    """Each member that we declare has the same offset in torch's copy of dlpack.h."""
    pairs = {
        ("kvc_dl_tensor", "DLTensor"): "data device_type:device.device_type device_id:device.device_id ndim dtype.code "
        "dtype.bits dtype.lanes shape strides byte_offset",
        ("kvc_dl_managed", "DLManagedTensorVersioned"): "major:version.major minor:version.minor context:manager_ctx "
        "deleter flags tensor:dl_tensor",
        ("kvc_dl_exchange", "DLPackExchangeAPI"): "major:header.version.major minor:header.version.minor "
        "older:header.prev_api allocate:managed_tensor_allocator from_object:managed_tensor_from_py_object_no_sync "
        "to_object:managed_tensor_to_py_object_no_sync describe:dltensor_from_py_object_no_sync "
        "current_stream:current_work_stream",
    }
    lines = ["#include <ATen/dlpack.h>", "#include <cstddef>", '#include "dlpack.h"']
    for (ours, theirs), members in pairs.items():
        lines.append(f"static_assert(sizeof({ours}) == sizeof({theirs}));")
        for one, other in ((x.split(":") * 2)[:2] for x in members.split()):
            lines.append(f"static_assert(offsetof({ours}, {one}) == offsetof({theirs}, {other}));")
    lines.append("static_assert(KVC_DL_CPU == kDLCPU && KVC_DL_FLOAT == kDLFloat && KVC_DL_BFLOAT == kDLBfloat);")
    source = tmp_path / "drift.cpp"
    source.write_text("\n".join(lines))
    include = Path(torch.__file__).parent / "include"
    subprocess.run(["g++", "-std=c++20", "-fsyntax-only", f"-I{include}", f"-I{CSRC.parent / 'python'}", str(source)],
                   check=True)  # fmt: skip


def test_a_missing_function_is_named(tmp_path):
    """Bound to a library without torch's functions: the error names the function and the torch version that has it."""
    empty = tmp_path / "libempty.so"
    program = tmp_path / "main.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "/dev/null", "-o", str(empty)], check=True)
    program.write_text(
        '#include "shim.h"\n#include <dlfcn.h>\n#include <stdio.h>\nint main(int n, char **a) '
        "{ (void)n; if (!kvc_shim_bind(a[1])) return 1; puts(kvc_shim_bind(a[1])); dlopen(a[1], RTLD_NOW); "
        "puts(kvc_shim_bind(a[1])); return 0; }\n"
    )
    subprocess.run(["cc", "-std=c11", f"-I{CSRC}", str(program), str(CSRC / "shim.c"), "-o", str(tmp_path / "main"),
                    "-ldl"], check=True)  # fmt: skip
    out = subprocess.run([str(tmp_path / "main"), str(empty)], check=True, capture_output=True, text=True).stdout
    assert "import torch first" in out.splitlines()[0]
    assert "aoti_torch_library_init_def" in out.splitlines()[1] and "torch 2.9" in out and "torch>=2.10" in out


def test_binding_again_is_harmless():
    _C.bind_torch(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


def test_a_registration_that_failed_does_not_succeed_later():
    """An op of that name already exists: the import fails, and fails again when repeated."""
    code = """
import torch
other = torch.library.Library("kvcompress", "FRAGMENT")
other.define("attend(Tensor x) -> Tensor")
for _ in range(2):
    try:
        import kvcompress.ops
    except ImportError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "torch: registering the kvcompress ops failed\n" * 2


def test_handles_and_memory_stay_flat():
    """100,000 calls, half of them failing at various depths. A leak would grow in every round, unlike other
    allocations of the process."""
    x, int8 = torch.randn(2, 32), formats.CODES["int8"]
    bad = [x.double(), x[:, :20].contiguous(), x * torch.inf, torch.empty(0, 32)]

    def calls(n):
        for i in range(n):
            torch.ops.kvcompress.quantize(x, int8)
            with pytest.raises(RuntimeError):
                torch.ops.kvcompress.quantize(bad[i % len(bad)], int8)

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    def growth(n):
        gc.collect()
        before = resident()
        calls(n)
        gc.collect()
        return resident() - before

    calls(5000)
    assert min(growth(15_000) for _ in range(3)) < 1 << 20
    assert _C.handles_live() == 0
    assert ops.quantize(x, "int8")[0].shape == (2, 32)
