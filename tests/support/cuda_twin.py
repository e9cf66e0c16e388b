"""The CUDA sources compiled for the host (tests/cuda_host/), and launchers with the signatures of kvcompress.ops.

KVCOMPRESS_TWIN_SANITIZE=1 builds with ASan and UBSan (start Python with libasan preloaded). With
KVCOMPRESS_TEST_DEVICE=cuda the same calls go to kvcompress/libkvcompress_cuda.so and a GPU; tensors are copied there
and back. With KVCOMPRESS_TEST_UNWRITTEN=1 results and workspace start uninitialized, for sanitizers that detect such
reads; otherwise they are filled with a recognizable pattern."""

import ctypes
import fcntl
import functools
import hashlib
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    byref,
    c_bool,
    c_char_p,
    c_float,
    c_int,
    c_int64,
    c_uint32,
    c_void_p,
    sizeof,
)
from pathlib import Path

import torch

from kvcompress import _C

ROOT = Path(__file__).resolve().parents[2]
SANITIZE = bool(os.environ.get("KVCOMPRESS_TWIN_SANITIZE"))
FLAGS = ["-std=c++17", "-g1", "-fPIC", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror",
         "-Wno-missing-field-initializers",
         "-DKVC_HOST_TWIN", "-Icsrc/core", "-Icsrc/cuda", "-Itests/cuda_host", "-x", "c++"]  # fmt: skip
FLAGS += ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"] if SANITIZE else ["-O2"]
ENTRY, ROWS, FINITE, PAGE, SCORE, STAGE = (1 << i for i in range(6))
DEVICE = os.environ.get("KVCOMPRESS_TEST_DEVICE", "cpu")
STREAM = 0x57 if DEVICE == "cpu" else None
"""Of all calls: the twin ends the program where one queues work on another."""
LAUNCHER = CFUNCTYPE(c_int, c_char_p, c_void_p, c_int64, POINTER(c_int64), c_int, c_int64)
"""(kernel, argument, its bytes, grid, threads, shared memory) -> 0: the twin runs it, 1: it has been run."""
UNWRITTEN = "KVCOMPRESS_TEST_UNWRITTEN" in os.environ
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class Dense(Structure):
    _fields_ = [("data", c_void_p), ("stride", c_int64 * 3), ("dtype", c_int)]


class KernelStore(Structure):
    _fields_ = [
        ("arena", c_void_p), ("arena_bytes", c_int64), ("table", c_void_p), ("rows", c_void_p), ("slots", c_void_p),
        *((name, c_int64) for name in ("slot_capacity", "batch", "heads", "table_heads", "columns", "key_dim",
                                       "value_dim", "page_size", "sinks")),
    ]  # fmt: skip


class AttendArgs(Structure):
    _fields_ = [
        ("store", KernelStore), ("q", Dense), ("k", Dense), ("v", Dense), ("latent", c_bool),
        *((name, c_int64) for name in ("query_heads", "Tq", "T")), ("real", c_void_p), ("seals", c_void_p),
        *((name, c_int64) for name in ("n_seals", "seen", "window")), ("scale", c_float), ("softcap", c_float),
        ("s_aux", c_void_p), ("out", Dense), ("lse", c_void_p), ("accumulated", c_void_p),
        ("accumulated_width", c_int64), ("given_lse", c_void_p), ("exec", c_void_p),
    ]  # fmt: skip


class On(Structure):
    _fields_ = [("stream", c_void_p), ("flags", c_void_p), ("workspace", c_void_p), ("processors", c_int),
                ("formats", c_uint32), ("seen", c_void_p), ("shared", c_int), ("done_words", c_int),
                ("done", c_void_p)]  # fmt: skip


class Blocks(Structure):
    _fields_ = [("data", c_void_p), *((name, c_int64) for name in ("blocks", "bytes", "stride", "pages")),
                ("key", c_int), ("value", c_int), ("table", c_void_p), ("table_width", c_int64),
                ("table_stride", c_int64)]  # fmt: skip


class VarlenArgs(Structure):
    _fields_ = [
        ("cache", Blocks), ("residual", Blocks),
        *((name, c_int64) for name in ("batch", "tokens", "heads", "query_heads", "key_dim", "value_dim", "page_size")),
        ("query_start", c_void_p), ("seq_lens", c_void_p), ("max_query", c_int64), ("sealed_lens", c_void_p),
        ("draft_lens", c_void_p), ("q", Dense), ("k", Dense), ("v", Dense), ("out", Dense), ("stored", c_bool),
        ("lse", c_void_p), ("s_aux", c_void_p), ("window", c_int64), ("scale", c_float), ("softcap", c_float),
        ("flags", c_void_p), ("exec", c_void_p),
    ]  # fmt: skip


class StoreArgs(Structure):
    _fields_ = [
        ("cache", Blocks), *((name, c_int64) for name in ("tokens", "heads", "key_dim", "value_dim", "page_size")),
        ("k", Dense), ("v", Dense), ("slots", c_void_p), ("flag", c_void_p), ("exec", c_void_p),
    ]  # fmt: skip


def _build() -> Path:
    """Builds the shared library if a source has changed; one process at a time."""
    sources = [*sorted((ROOT / "csrc/cuda").glob("*.cu")), *sorted((ROOT / "tests/cuda_host").glob("*.cu"))]
    read = [*sources, *(ROOT / "csrc/cuda").glob("*h"), *(ROOT / "csrc/core").rglob("*.[hd]*"),
            *(ROOT / "tests/cuda_host").glob("*.h")]  # fmt: skip
    compiler = os.environ.get("CXX", "g++")
    digest = hashlib.sha256(repr((compiler, FLAGS)).encode())
    for path in sorted(read):
        digest.update(path.read_bytes())
    folder = ROOT / "build" / "twin"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"twin-{digest.hexdigest()[:16]}.so"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.exists():
            return library
        for old in folder.glob("*.so" if not SANITIZE else "none"):
            old.unlink()

        def compile_one(source: Path) -> str:
            out = str(folder / f"{source.stem}-{os.getpid()}.o")
            subprocess.run([compiler, *FLAGS, "-c", str(source), "-o", out], check=True, cwd=ROOT)
            return out

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, sources))
        sanitize = ["-fsanitize=address,undefined"] if SANITIZE else []
        subprocess.run([compiler, "-shared", *sanitize, "-o", f"{library}.new", *objects], check=True)
        for path in objects:
            os.unlink(path)
        os.rename(f"{library}.new", library)
    return library


@functools.cache
def library() -> ctypes.CDLL:
    found = ctypes.CDLL(str(ROOT / "kvcompress/libkvcompress_cuda.so" if DEVICE == "cuda" else _build()))
    found.kvc_cuda_workspace.restype = found.kvc_cuda_varlen_workspace.restype = c_int64
    if DEVICE == "cpu":
        found.twin_copied.restype = c_int64
        assert found.twin_args_bytes() == sizeof(AttendArgs) << 16 | sizeof(On), "structs here are not those of kvc.h"
        assert found.twin_engine_bytes() == sizeof(VarlenArgs) << 16 | sizeof(StoreArgs), "nor those of varlen.h"
    return found


def _dense(x: torch.Tensor) -> Dense:
    assert x.numel() == 0 or x.shape[3] == 1 or x.stride(3) == 1
    return Dense(x.data_ptr(), (c_int64 * 3)(*x.stride()[:3]), DTYPES[x.dtype])


def _pointer(x: torch.Tensor | None):
    return x.data_ptr() if x is not None and x.numel() else None


def _store(arena, table, rows, slots, heads, key_dim, value_dim, page_size, sinks) -> KernelStore:
    capacity = slots.shape[2] if slots.numel() else 0
    return KernelStore(arena.data_ptr(), arena.numel(), table.data_ptr(), rows.data_ptr(), _pointer(slots), capacity,
                       table.shape[0], heads, table.shape[1], table.shape[2], key_dim, value_dim, page_size,
                       sinks)  # fmt: skip


def _blocks(x, code, size, page_size, table=None) -> Blocks:
    if x.numel() == 0:
        return Blocks()
    width, stride = (table.shape[1], table.stride(0)) if table is not None else (0, 0)
    return Blocks(x.data_ptr(), x.shape[0], x.shape[1], x.stride(0), size // page_size, code >> 8, code & 255,
                  _pointer(table), width, stride)  # fmt: skip


def _tokens(x) -> Dense:
    return Dense(x.data_ptr(), (c_int64 * 3)(0, x.stride(1), x.stride(0)), DTYPES[x.dtype])


def _spans(tensors) -> list[tuple[int, int]]:
    """(address, bytes) of each tensor."""
    return [(x.data_ptr(), x.untyped_storage().nbytes() - x.storage_offset() * x.itemsize)
            for x in tensors if x is not None and x.numel()]  # fmt: skip


class Guarded:
    """A tensor between guard bytes that must not change."""

    def __init__(self, shape, dtype, fill=0xAB):
        size = torch.empty(0, dtype=dtype).itemsize
        count = int(torch.Size(shape).numel())
        self.bytes = torch.empty(count * size + 512, dtype=torch.uint8, device=DEVICE)
        self.fill = fill
        start = 256 + -(self.bytes.data_ptr() + 256) % 256
        start = start if start + count * size <= len(self.bytes) else 256
        self.start, self.end = start, start + count * size
        self.bytes[: self.start], self.bytes[self.end :] = fill, fill
        if not UNWRITTEN:
            self.bytes[self.start : self.end] = fill
        self.tensor = self.bytes[start : self.end].view(dtype).view(shape)

    def check(self):
        """The tensor on the device of the tests."""
        assert bool((self.bytes[: self.start] == self.fill).all()) and bool((self.bytes[self.end :] == self.fill).all())
        return self.tensor.cpu()


class Twin:
    """Flags of the last call are in `flags`. formats, processors, shared: as in kvc_cuda. order: execution order of
    warps and lanes (0 ascending, 1 descending, otherwise the seed of a random one). launcher: runs kernels instead
    of the twin, with `memory`: (address, bytes) of everything that the call may access. counters: words that are 0
    before and after each call."""

    def __init__(self, formats=0, processors=2, order=2026, launcher=None, shared=228 << 10, counters=0):
        self.launcher, self.memory = launcher, []
        self.counters = torch.zeros(counters, dtype=torch.int32, device=DEVICE)
        self.formats, self.processors, self.shared, self.order, self.flags = formats, processors, shared, order, 0

    def _prepare(self):
        """Functions that only the twin's library has."""
        if hasattr(library(), "twin_set_order"):
            library().twin_set_order(c_uint32(self.order))
            library().twin_set_stream(c_void_p(STREAM))
            library().twin_set_launcher(self.launcher)

    def copied(self):
        """Bytes that kernels copied to shared memory asynchronously since the last call; None on a GPU."""
        return library().twin_copied() if hasattr(library(), "twin_copied") else None

    def _on(self, flags, formats=0, seen=None, counters=None):
        words = 0 if counters is None else counters.numel()
        return On(STREAM, flags.data_ptr(), None, self.processors, formats or self.formats, seen, self.shared, words,
                  _pointer(counters))  # fmt: skip

    def _run(self, function, *args, uses):
        """uses: tensors that kernels read or write."""
        flags = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        on, self.memory = self._on(flags), _spans((*uses, flags))
        self._prepare()
        assert getattr(library(), function)(*args, byref(on)) == 0
        self.flags = int(flags)

    def _there(self, *tensors):
        return [None if x is None else x.to(DEVICE) for x in tensors]

    def take(self, flags):
        """Atomically fetches and clears the flags."""
        (flags,) = self._there(flags)
        found = Guarded((1,), torch.int32)
        on, self.memory = self._on(flags), _spans((flags, found.tensor))
        self._prepare()
        assert library().kvc_cuda_take(c_void_p(flags.data_ptr()), c_void_p(found.tensor.data_ptr()), byref(on)) == 0
        return int(found.check())

    def score_tokens(self, arena, table, rows, slots, heads, key_dim, value_dim, width, page_size, sinks, kind):
        arena, table, rows, slots = self._there(arena, table, rows, slots)
        store = _store(arena, table, rows, slots, heads, key_dim, value_dim, page_size, sinks)
        out = Guarded((table.shape[0], heads, width), torch.float32)
        self._run("kvc_cuda_score_tokens", byref(store), c_int(kind), c_int64(width),
                  c_void_p(out.tensor.data_ptr()), uses=(arena, table, rows, slots, out.tensor))  # fmt: skip
        return out.check()

    def accumulate_attention(self, q, k, v, arena, table, rows, slots, mask, lse, seals, *numbers):
        there = self._there(q, k, v, arena, table, rows, slots, mask, torch.empty(0), seals)
        accumulated = self.record(*there, *numbers, lse=lse.to(DEVICE))()[2]
        arena.copy_(there[3])
        return accumulated

    def attend(self, q, k, v, arena, table, rows, slots, mask, s_aux, seals, seen, page_size, sinks, window, scale,
               softcap, attention_width=0, formats=0):  # fmt: skip
        there = self._there(q, k, v, arena, table, rows, slots, mask, s_aux, seals)
        run = self.record(*there, seen, page_size, sinks, window, scale, softcap, attention_width, formats)
        result = run()
        arena.copy_(there[3])
        return result

    def attend_step(self, *args):
        """The last argument overrides the twin's counters for this call."""
        kept, self.counters = self.counters, self._there(args[-1])[0]
        try:
            return self.attend(*args[:-1])
        finally:
            self.counters = kept

    def record(self, q, k, v, arena, table, rows, slots, mask, s_aux, seals, seen, page_size, sinks, window, scale,
               softcap, attention_width=0, formats=0, lse=None):  # fmt: skip
        """A call as captured in a CUDA graph, on tensors of the device: () -> (out, lse, accumulated attention). Every
        run finds all inputs and outputs at the same addresses."""
        B, Hq, Tq, _ = q.shape
        at = seen.to(DEVICE) if isinstance(seen, torch.Tensor) else None
        H, T, Dv = k.shape[1], k.shape[2], v.shape[3]
        latent = q.shape[3] != k.shape[3]
        out, own_lse = Guarded((B, Tq, Hq, k.shape[3] if latent else Dv), q.dtype), Guarded((B, Hq, Tq), torch.float32)
        accumulated = Guarded((B, H, attention_width), torch.float32)
        a = AttendArgs(
            _store(arena, table, rows, slots, H, k.shape[3], Dv, page_size, sinks), _dense(q), _dense(k), _dense(v),
            latent, Hq, Tq, T, _pointer(mask), _pointer(seals), seals.shape[0], 0 if at is not None else seen, window,
            scale, softcap, _pointer(s_aux),
            _dense(out.tensor.transpose(1, 2)), own_lse.tensor.data_ptr(), _pointer(accumulated.tensor),
            attention_width, _pointer(lse), None,
        )  # fmt: skip
        flags = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        counters = self.counters
        on = self._on(flags, formats, _pointer(at), counters)
        room = Guarded((max(1, library().kvc_cuda_workspace(byref(a), byref(on))),), torch.uint8, 0xFF)
        on.workspace = room.tensor.data_ptr()
        assert on.workspace % 16 == 0
        kept = q, k, v, arena, table, rows, slots, mask, s_aux, seals, at, lse

        def run():
            assert kept
            flags.zero_()
            self._prepare()
            self.memory = _spans((*kept, *(x.tensor for x in (out, own_lse, accumulated, room)), flags, counters))
            assert library().kvc_cuda_attend(byref(a), byref(on)) == 0
            self.flags = int(flags)
            room.check()
            assert not counters.any()
            return tuple(x.check().clone() for x in (out, own_lse, accumulated))

        return run

    def record_varlen(self, q, k, v, cache, block_table, residual, residual_table, query_start_loc, seq_lens,
                      sealed_lens, draft_lens, s_aux, out, lse, flags, formats, block_size, residual_size, page_size,
                      window, scale, softcap, max_query_len=0):  # fmt: skip
        """`ops.attend_varlen` as captured in a CUDA graph: () runs it on the current contents of the tensors."""
        raw = DTYPES[k.dtype] << 8 | DTYPES[k.dtype]
        a = VarlenArgs(
            _blocks(cache, formats, block_size, page_size, block_table),
            _blocks(residual, raw, residual_size, page_size, residual_table), seq_lens.shape[0], q.shape[0], k.shape[1],
            q.shape[1], q.shape[2], out.shape[2], page_size, query_start_loc.data_ptr(), seq_lens.data_ptr(),
            max_query_len, _pointer(sealed_lens), _pointer(draft_lens), *map(_tokens, (q, k, v, out)),
            k.shape[0] == 0 < q.shape[0], _pointer(lse), _pointer(s_aux), window, scale, softcap, _pointer(flags), None,
        )  # fmt: skip
        found = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        on = self._on(found, 1 << (formats >> 8) | 1 << (formats & 255))
        room = Guarded((max(1, library().kvc_cuda_varlen_workspace(byref(a), byref(on))),), torch.uint8, 0xFF)
        on.workspace = room.tensor.data_ptr()
        uses = q, k, v, cache, block_table, residual, residual_table, query_start_loc, seq_lens, sealed_lens, draft_lens

        def run():
            found.zero_()
            self.memory = _spans((*uses, s_aux, out, lse, flags, found, room.tensor))
            self._prepare()
            assert library().kvc_cuda_attend_varlen(byref(a), byref(on)) == 0
            self.flags = int(found)
            room.check()

        return run

    def attend_varlen(self, *args):
        there = [x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in args]
        self.record_varlen(*there)()
        for i in (3, 5, 12, 13, 14):
            args[i].copy_(there[i])

    def store_tokens(self, k, v, cache, slots, flag, formats, block_size, page_size):
        there = self._there(k, v, cache, slots, flag)
        a = StoreArgs(_blocks(there[2], formats, block_size, page_size), k.shape[0], k.shape[1], k.shape[2], v.shape[2],
                      page_size, _tokens(there[0]), _tokens(there[1]), there[3].data_ptr(), _pointer(there[4]),
                      None)  # fmt: skip
        self._run("kvc_cuda_store_tokens", byref(a), uses=there)
        cache.copy_(there[2])
        flag.copy_(there[4])

    def read(self, like, arena, table, rows, slots, heads, key_dim, value_dim, width, page_size, sinks):
        arena, table, rows, slots = self._there(arena, table, rows, slots)
        store = _store(arena, table, rows, slots, heads, key_dim, value_dim, page_size, sinks)
        k = Guarded((table.shape[0], heads, width, key_dim), like.dtype)
        v = Guarded((table.shape[0], heads, width, value_dim), like.dtype)
        self._run("kvc_cuda_read", byref(store), c_int64(width), byref(_dense(k.tensor)), byref(_dense(v.tensor)),
                  uses=(arena, table, rows, slots, k.tensor, v.tensor))  # fmt: skip
        return k.check(), v.check()

    def pack(self, k, v, key, value, page_size):
        B, H, T, Dk = k.shape
        k, v = self._there(k, v)
        size = _C.page_bytes(key, value, Dk, v.shape[3], page_size)
        pages = Guarded((B, T // page_size, H, size), torch.uint8)
        sizes = [c_int64(n) for n in (B, H, T, Dk, v.shape[3], page_size)]
        self._run("kvc_cuda_pack", c_int(key), c_int(value), byref(_dense(k)), byref(_dense(v)), *sizes,
                  c_void_p(pages.tensor.data_ptr()), uses=(k, v, pages.tensor))  # fmt: skip
        return pages.check()

    def quantize(self, x, format):
        row = _C.formats()[format]
        (x,) = self._there(x)
        n, D = x.numel() // x.shape[-1], x.shape[-1]
        from kvcompress import formats

        planes, dtype = formats.metadata(format, D)
        codes, scales = Guarded((n, D * row["bits"] // 8), torch.uint8), Guarded((n, planes), getattr(torch, dtype))
        self._run("kvc_cuda_quantize", c_int(format), c_int(DTYPES[x.dtype]), c_void_p(x.data_ptr()), c_int64(n),
                  c_int64(D), c_void_p(codes.tensor.data_ptr()), c_void_p(scales.tensor.data_ptr()),
                  uses=(x, codes.tensor, scales.tensor))  # fmt: skip
        return codes.check(), scales.check()

    def dequantize(self, codes, scales, format):
        n, D = codes.shape[0], codes.shape[1] * 8 // _C.formats()[format]["bits"]
        codes, scales = self._there(codes, scales)
        x = Guarded((n, D), torch.float32)
        self._run("kvc_cuda_dequantize", c_int(format), c_void_p(codes.data_ptr()), c_void_p(scales.data_ptr()),
                  c_int64(n), c_int64(D), c_void_p(x.tensor.data_ptr()), uses=(codes, scales, x.tensor))  # fmt: skip
        return x.check()

    def select(self, scores, slots, protect, budget):
        scores, slots, protect, budget = self._there(scores, slots, protect, budget)
        keep = Guarded(scores.shape, torch.bool)
        lines, width = scores.shape[0] * scores.shape[1], scores.shape[2]
        pointers = [c_void_p(_pointer(x)) for x in (scores, slots, protect, budget)]
        self._run("kvc_cuda_choose", *pointers, c_int64(lines), c_int64(width), c_void_p(keep.tensor.data_ptr()),
                  uses=(scores, slots, protect, budget, keep.tensor))  # fmt: skip
        return keep.check()

    def compact(self, arena, moves, heads, table_heads, key_dim, value_dim, page_size, sinks):
        host = arena
        arena, moves = self._there(arena, moves)
        none = torch.zeros(1, table_heads, 0, dtype=torch.int64, device=DEVICE)
        store = _store(arena, none, none, none.int(), heads, key_dim, value_dim, page_size, sinks)
        self._run("kvc_cuda_compact", byref(store), c_void_p(moves.data_ptr()), c_int64(moves.shape[0]),
                  uses=(arena, moves))  # fmt: skip
        host.copy_(arena)
        assert self.flags == 0
