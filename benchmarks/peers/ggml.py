"""ggml's flash attention (llama.cpp) through ctypes, from the package llama-cpp-python. For latents as llama.cpp
implements MLA: V is a view of K's rows. Usage: ggml.py SHAPE THREADS"""

from __future__ import annotations

import ctypes as C
import os

import llama_cpp
import numpy as np
from timing import LATENT, arguments, report

LIB = os.path.join(os.path.dirname(llama_cpp.__file__), "lib")
base = C.CDLL(os.path.join(LIB, "libggml-base.so"), mode=C.RTLD_GLOBAL)
cpu = C.CDLL(os.path.join(LIB, "libggml-cpu.so"), mode=C.RTLD_GLOBAL)
P = C.c_void_p
F32, F16, BF16 = 0, 1, 30
TYPES = {"f16": F16, "bf16": BF16, "q8_0": 8, "q4_0": 2}


class Init(C.Structure):
    _fields_ = (("mem_size", C.c_size_t), ("mem_buffer", P), ("no_alloc", C.c_bool))


def function(library, name: str, result, *args):
    f = getattr(library, name)
    f.restype, f.argtypes = result, list(args)
    return f


init = function(base, "ggml_init", P, Init)
free = function(base, "ggml_free", None, P)
tensor = function(base, "ggml_new_tensor_4d", P, P, C.c_int, *[C.c_int64] * 4)
view = function(base, "ggml_view_4d", P, P, P, *[C.c_int64] * 4, *[C.c_size_t] * 4)
flash = function(base, "ggml_flash_attn_ext", P, P, P, P, P, P, C.c_float, C.c_float, C.c_float)
new_graph = function(base, "ggml_new_graph", P, P)
expand = function(base, "ggml_build_forward_expand", None, P, P)
compute = function(cpu, "ggml_graph_compute_with_ctx", C.c_int, P, P, C.c_int)
data = function(base, "ggml_get_data", P, P)
nbytes = function(base, "ggml_nbytes", C.c_size_t, P)
quantize = function(base, "ggml_quantize_chunk", C.c_size_t, C.c_int, P, P, C.c_int64, C.c_int64, C.c_int64, P)
function(cpu, "ggml_cpu_init", None)()


def fill(to, x: np.ndarray, kind: int) -> None:
    if kind == F16:
        x = x.astype(np.float16)
    elif kind == BF16:
        x = ((x.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)
    elif kind != F32:
        quantize(kind, x.ctypes.data, data(to), 0, x.size // x.shape[-1], x.shape[-1], None)
        return
    C.memmove(data(to), x.ctypes.data, x.nbytes)


(B, Hq, H, D, S, T), threads = arguments()
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal(s, dtype=np.float32) for s in ((B, Hq, T, D), (B, H, S, D), (B, H, S, D)))
for name, kind in TYPES.items():
    context = init(Init(int(2.2 * B * H * S * D * 4) + (256 << 20) + S * T * 4, None, False))
    tq, tk = tensor(context, F32, D, T, Hq, B), tensor(context, kind, D, S, H, B)
    size, row = nbytes(tk), nbytes(tk) // (S * H * B)
    if H == 1:
        tv = view(context, tk, LATENT, S, H, B, row, row * S, row * S, 0)
    else:
        tv, size = tensor(context, kind, D, S, H, B), 2 * size
        fill(tv, v, kind)
    fill(tq, q, F32)
    fill(tk, k, kind)
    mask = None
    if T > 1:
        mask = tensor(context, F16, S, T, 1, 1)
        fill(mask, np.where(np.arange(S)[None] > np.arange(T)[:, None] + S - T, -np.inf, 0).astype(np.float32), F16)
    graph = new_graph(context)
    expand(graph, flash(context, tq, tk, tv, mask, D**-0.5, 0.0, 0.0))
    report("ggml", name, size / 1e6, lambda c=context, g=graph: compute(c, g, threads))
    free(context)
