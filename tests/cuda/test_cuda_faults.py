"""Faults around the CUDA kernels: a library without the twin's functions, an old driver, flags, unaligned memory, the
first use of a device; and ops that policies and attention over parts of a cache need there."""

import ctypes
import hashlib
import re
import subprocess
import sys

import cuda_twin
import pytest
import torch
from cuda_twin import Twin
from test_accumulated_attention import by_matrix
from test_attend import data
from test_evict_store import PAGE, filled

from kvcompress import _C, PagedKV, ops

ALIGNMENT, CAPTURE = -1, -2
pytestmark = pytest.mark.skipif(cuda_twin.DEVICE != "cpu", reason="the twin's")


def test_a_real_library_has_no_functions_of_the_twin(monkeypatch):
    """The functions that `Twin` calls are those of kvc_cuda.h."""
    real, asked = cuda_twin.library(), []

    class Library:
        def __getattr__(self, name):
            asked.append(name)
            if name.startswith("twin_"):
                raise AttributeError(f"undefined symbol: {name}")
            return getattr(real, name)

    real.twin_set_stream(ctypes.c_void_p(cuda_twin.STREAM))
    monkeypatch.setattr(cuda_twin, "library", Library)
    kv = PagedKV(2, 32)
    kv.op = Twin().attend
    kv.attend(*(torch.randn(1, 2, 3, 32) for _ in range(3)))
    assert "kvc_cuda_attend" in asked


FAKE = """
int aoti_torch_create_cuda_guard(int device, void **guard) { *guard = 0; return device; }
int aoti_torch_delete_cuda_guard(void *guard) { return 0; }
int aoti_torch_get_current_cuda_stream(int device, void **stream) { *stream = 0; return 0; }
int kvc_cuda_found(int device, unsigned *flags) { return 35; }
int kvc_cuda_abi(void) { return ABI; }
const char *kvc_cuda_version(void) { return VERSION; }
const char *kvc_cuda_text(int status) { return status == 35 ? "CUDA driver version is insufficient" : "?"; }
"""


HEADER = (cuda_twin.ROOT / "csrc" / "cuda" / "kvc_cuda.h").read_text()
ABI = int(re.search(r"#define KVC_CUDA_ABI (\d+)", HEADER)[1])


def fake(folder, version=_C.__version__, abi=ABI):
    names = set(re.findall(r"^\w[^(/]*?(kvc_cuda_\w+)\(", HEADER, re.MULTILINE))
    rest = "".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted(names) if f"{name}(" not in FAKE)
    (folder / "fake.c").write_text(f'#define VERSION "{version}"\n#define ABI {abi}\n{FAKE}{rest}')
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", "fake.so", "fake.c"], cwd=folder, check=True)


def test_kernels_of_another_version_are_refused(tmp_path):
    """For example those of the package kvcompress-cuda: structs could differ."""
    fake(tmp_path, "0.0.9")
    ctypes.CDLL(str(tmp_path / "fake.so"))
    said = rf"of kvcompress {_C.__version__}, .*fake.so is of 0.0.9; install kvcompress-cuda=={_C.__version__}"
    with pytest.raises(ImportError, match=said):
        _C.bind_cuda(*[str(tmp_path / "fake.so")] * 2)


@pytest.mark.parametrize("abi,got", [(ABI + 1, str(ABI + 1)), (None, "one without a number")])
def test_kernels_of_another_interface_are_refused(tmp_path, abi, got):
    """Of the same version but another ABI number, as in an older developer build; or of a kvcompress without ABI
    numbers."""
    fake(tmp_path, abi=ABI if abi is None else abi)
    if abi is None:
        source = (tmp_path / "fake.c").read_text().replace("int kvc_cuda_abi(void) { return ABI; }", "")
        (tmp_path / "fake.c").write_text(source)
        subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", "fake.so", "fake.c"], cwd=tmp_path, check=True)
    ctypes.CDLL(str(tmp_path / "fake.so"))
    said = rf"with interface {ABI}, .*fake.so has {got}; install kvcompress-cuda=={_C.__version__}"
    with pytest.raises(ImportError, match=said):
        _C.bind_cuda(*[str(tmp_path / "fake.so")] * 2)


INTERFACE = {1: "b4e1e18cb7c6ba87", 2: "4bf9491154a1e8b5", 3: "25e8d58b03c8a8a9",
             4: "dd759f236a316121", 5: "e947825f2bc8bf67"}  # fmt: skip
"""Digest of the interface of each version, without comments and layout (from 4 on). A change requires a new version
and a line here."""


def test_the_number_changes_with_the_interface():
    text = HEADER
    for name in ("kvc.h", "keep.h", "varlen.h"):
        text += (cuda_twin.ROOT / "csrc" / "core" / name).read_text()
    structs = {
        "kvc_dense", "kvc_store", "kvc_attend_args", "kvc_move", "kvc_blocks", "kvc_varlen_args", "kvc_store_args",
        "kvc_cuda",
    }  # fmt: skip
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    found = re.findall(r"typedef struct (\w+) (\{.*?\}) \1;", text, re.DOTALL)
    parts = {name: " ".join(body.split()) for name, body in found if name in structs}
    assert set(parts) == structs
    parts |= {"": "".join(re.findall(r"^\w[^#;{}]*?kvc_cuda_\w+\([^;]*;", text, re.MULTILINE))}
    parts["#define"] = "".join(x for x in re.findall(r"^#define .*$", HEADER, re.MULTILINE) if "_ABI" not in x)
    digest = hashlib.sha256(re.sub(r"\s+", "", repr(sorted(parts.items()))).encode()).hexdigest()[:16]
    assert INTERFACE.get(ABI) == digest, f"the interface is another one ({digest}): KVC_CUDA_ABI is to go up"


def test_an_old_driver_is_said_to_be_one(tmp_path):
    """And not as a build without kernels. In a separate process, because libraries stay bound."""
    fake(tmp_path)
    code = f"""if True:
        import ctypes, torch
        from kvcompress import _C, ops
        from kvcompress.store import device_memory
        ctypes.CDLL({str(tmp_path / "fake.so")!r})
        _C.bind_cuda({str(tmp_path / "fake.so")!r}, {str(tmp_path / "fake.so")!r})
        torch.cuda.is_available, torch.cuda.current_device = lambda: True, lambda: 0
        print(device_memory.usable(torch.device("cuda")))
        try: ops.check("cuda:0")
        except ValueError as error: print(error)
        try: ops.check("cuda:1")
        except ValueError as error: print(error)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=cuda_twin.ROOT)
    old = "cuda:0: CUDA driver version is insufficient (status 35); update the driver"
    first, second, third = done.stdout.splitlines()
    assert first.startswith(old) and second.startswith(old) and third == "no device cuda:1"


def test_flags_are_taken_in_one_step():
    flags, twin = torch.tensor([0b1010], dtype=torch.int32), Twin()
    assert twin.take(flags) == 0b1010 and int(flags) == 0 and twin.take(flags) == 0


def test_an_arena_that_is_not_aligned_is_refused():
    """Instead of a fault that makes the GPU unusable for the process."""
    kv, q = filled(40), torch.randn(1, 4, 1, 32)
    arena, *rest = kv.page_store.views()
    moved = torch.empty(arena.numel() + 128, dtype=torch.uint8)
    start = -moved.data_ptr() % 64 + 16
    moved = moved[start : start + arena.numel()].copy_(arena)
    none, empty, seals = torch.empty(0), kv.page_store.empties(), torch.empty(0, 2).long()
    D, twin, library = kv.head_dim, Twin(), cuda_twin.library()
    q = torch.randn(1, 2 * kv.num_kv_heads, 1, D)
    with pytest.raises(AssertionError):
        twin.attend(q, *empty, moved, *rest, none.bool(), none, seals, kv.seen, PAGE, 4, 0, 0.2, 0.0)
    with pytest.raises(AssertionError):
        twin.read(none, moved, *rest, kv.num_kv_heads, D, D, kv.seen, PAGE, 4)
    with pytest.raises(AssertionError):
        twin.compact(moved, torch.zeros(1, 6).long(), 2, 2, D, D, PAGE, 4)
    library.kvc_cuda_text.restype = ctypes.c_char_p
    assert b"aligned to 64 bytes" in library.kvc_cuda_text(ALIGNMENT)


RUNTIME = """
#pragma once
typedef void *cudaStream_t;
typedef int cudaError_t;
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum { cudaErrorInvalidDevice = 101, cudaErrorInsufficientDriver = 35, cudaErrorInvalidDeviceFunction = 98 };
enum { cudaErrorNoKernelImageForDevice = 209, cudaErrorUnsupportedPtxVersion = 222 };
enum { cudaDevAttrMultiProcessorCount = 16, cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81 };
enum { cudaMemcpyDeviceToHost = 2 };
extern "C" cudaError_t cudaStreamIsCapturing(cudaStream_t, enum cudaStreamCaptureStatus *);
extern "C" cudaError_t cudaDeviceGetAttribute(int *, int, int);
extern "C" cudaError_t cudaMalloc(void **, size_t);
extern "C" cudaError_t cudaMemset(void *, int, size_t);
extern "C" cudaError_t cudaMemcpy(void *, const void *, size_t, int);
extern "C" cudaError_t cudaDeviceSynchronize(void);
struct cudaDeviceProp { char name[256]; int major, minor; };
extern "C" cudaError_t cudaDriverGetVersion(int *);
extern "C" cudaError_t cudaRuntimeGetVersion(int *);
extern "C" cudaError_t cudaGetDevice(int *);
extern "C" cudaError_t cudaGetDeviceProperties(cudaDeviceProp *, int);
extern "C" const char *cudaGetErrorString(cudaError_t);
"""
CALLS = """
#include "kvc_cuda.h"
#include <cuda_runtime.h>
#include <stdlib.h>
#include <string.h>
extern "C" int captured, allocated;
int captured, allocated;
cudaError_t cudaStreamIsCapturing(cudaStream_t, enum cudaStreamCaptureStatus *s)
{
    *s = captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return 0;
}
cudaError_t cudaDeviceGetAttribute(int *x, int, int) { *x = 7; return 0; }
cudaError_t cudaMalloc(void **at, size_t n) { allocated++; *at = malloc(n); return 0; }
cudaError_t cudaMemset(void *at, int x, size_t n) { memset(at, x, n); return 0; }
cudaError_t cudaMemcpy(void *to, const void *from, size_t n, int) { memcpy(to, from, n); return 0; }
cudaError_t cudaDeviceSynchronize(void) { return captured ? 900 : 0; }
const char *cudaGetErrorString(cudaError_t) { return "the runtime's"; }
cudaError_t cudaDriverGetVersion(int *x) { *x = 12080; return 0; }
cudaError_t cudaRuntimeGetVersion(int *x) { *x = 13000; return 0; }
cudaError_t cudaGetDevice(int *x) { *x = 0; return captured ? 35 : 0; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int) { *p = {"A GPU", 7, 5}; return 0; }
extern "C" int kvc_cuda_take(uint32_t *flags, uint32_t *found, const kvc_cuda *)
{
    *found = *flags, *flags = 8; /* another stream sets a bit meanwhile */
    return 0;
}
"""


def test_a_device_is_not_prepared_inside_a_capture(tmp_path):
    """device.cu with a counting runtime; and a bit that is set while flags are fetched is returned next time."""
    (tmp_path / "cuda_runtime.h").write_text(RUNTIME)
    (tmp_path / "calls.cu").write_text(CALLS)
    root = cuda_twin.ROOT
    flags = ["-std=c++17", "-shared", "-fPIC", "-w", f"-I{tmp_path}", f"-I{root}/csrc/core", f"-I{root}/csrc/cuda"]
    sources = [str(tmp_path / "calls.cu"), str(root / "csrc/cuda/device.cu")]
    subprocess.run(["g++", *flags, "-x", "c++", *sources, "-o", str(tmp_path / "device.so")], check=True)
    library = ctypes.CDLL(str(tmp_path / "device.so"))
    library.kvc_cuda_text.restype = ctypes.c_char_p
    captured, allocated = (ctypes.c_int.in_dll(library, name) for name in ("captured", "allocated"))
    captured.value, on, found = 1, cuda_twin.On(), ctypes.c_uint32()
    assert library.kvc_cuda_begin(0, ctypes.byref(on)) == CAPTURE and allocated.value == 0
    assert b"before the capture" in library.kvc_cuda_text(CAPTURE)
    captured.value = 0
    assert library.kvc_cuda_begin(0, ctypes.byref(on)) == 0 and allocated.value == 1 and on.processors == 7
    captured.value = 1
    assert library.kvc_cuda_begin(0, ctypes.byref(on)) == 0 and allocated.value == 1, "prepared: captures may use it"
    captured.value = 0
    for want in (0, 8):
        assert library.kvc_cuda_found(0, ctypes.byref(found)) == 0 and found.value == want
    told = "the runtime's (driver for CUDA 12.8; {}); kvcompress was built with CUDA 13.0 for unnamed architectures"
    assert library.kvc_cuda_text(209).decode() == told.format("A GPU, sm_75")
    assert library.kvc_cuda_text(700).decode() == "the runtime's"
    captured.value = 1
    assert library.kvc_cuda_text(35).decode() == told.format("no device to be asked")


@pytest.mark.parametrize("key, value", [("raw", "int8"), ("int4", "int4"), ("kivi2", "nvfp4"), ("fp8_e4m3", "raw")])
def test_score_tokens_equals_float64(key, value):
    kv = filled(4 + 16 * 6 + 5, key=key, value=value, batch=2)
    H, D = kv.num_kv_heads, kv.head_dim
    keep = torch.rand(2, H, kv.seen, generator=torch.Generator().manual_seed(2)) < 0.7
    keep[:, :, :4] = True
    kv.evict(keep)
    slots = kv.eviction.slots()
    at = slots.clamp(min=0).long()[..., None].expand(-1, -1, -1, D)
    k, v = (x.double().gather(2, at) * (slots >= 0)[..., None] for x in kv.dense())
    unit = torch.nn.functional.normalize(k, dim=-1)
    want = k.norm(dim=-1), v.norm(dim=-1), torch.cosine_similarity(unit, unit.sum(2, keepdim=True), dim=-1)
    for kind, x in enumerate(want):
        got = Twin().score_tokens(*kv.page_store.views(), H, D, D, slots.shape[2], PAGE, 4, kind)
        torch.testing.assert_close(got.double(), x, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("T", [1, 3, 20])
@pytest.mark.parametrize("key", ["raw", "int8"])
def test_accumulated_attention_against_the_lse_of_more_tokens(T, key):
    H, G, D = 2, 3, 64
    k, q = data(1, H, 150, D, 1), data(1, H * G, T, D, 3)
    kv = PagedKV(H, D, key=key)
    kv.append(k, k)
    lse = kv.attend(q)[1] + 0.5
    rest = kv.seen, kv.page_size, kv.sinks, 0, D**-0.5, 0.0, 160
    got = Twin().accumulate_attention(
        q, *(k[:, :, :0],) * 2, *kv.page_store.views(), kv.page_store.no_mask, lse, kv.page_store.no_seals, *rest
    )
    want = by_matrix(kv.dense()[0], q) * torch.exp(torch.tensor(-0.5)).double()
    assert (got[:, :, :150] - want).abs().max() <= (1e-5 if key == "raw" else 5e-3) * max(1.0, float(want.max()))
    assert bool((got[:, :, 150:] == 0).all())


@pytest.mark.parametrize("ties", [True, False])
def test_a_budget_is_shared_by_selects(ties):
    """As the CPU's op does, including equal scores."""
    random = torch.Generator().manual_seed(int(ties))
    for _ in range(40):
        B, H, N = (int(torch.randint(1, n, (1,), generator=random)) for n in (4, 6, 40))
        scores = torch.randn(B, H, N, generator=random)
        scores = (scores * 2).round() if ties else scores
        slots = torch.arange(N, dtype=torch.int32).expand(B, H, N).clone()
        slots[torch.rand(B, H, N, generator=random) < 0.2] = -1
        protect = torch.rand(B, H, N, generator=random) < 0.1
        total, floor = (torch.randint(0, H * N + 9, (B,), generator=random) for _ in range(2))
        floor = floor // (2 * H)
        got = ops._share_by_selects(scores, slots, protect, total, floor)
        assert torch.equal(got, ops.share(scores, slots, protect, total, floor))
