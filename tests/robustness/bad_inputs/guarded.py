"""Ops on arrays that each end right before an inaccessible page; prints the number of calls."""

import ctypes
import mmap
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "core"))

import numpy as np
import torch
from test_attend import Store, data

from kvcompress import _C, formats, ops

PAGE = mmap.PAGESIZE
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def guarded(x: torch.Tensor) -> torch.Tensor:
    """A copy whose last byte is right before an inaccessible page."""
    if not x.numel():
        return x
    data = x.contiguous().numpy().reshape(-1).view(np.uint8)
    room = -(-data.size // PAGE) * PAGE
    at = libc.mmap(None, room + PAGE, 3, 0x22, -1, 0)
    assert libc.mprotect(at + room, PAGE, 0) == 0
    array = np.frombuffer((ctypes.c_uint8 * data.size).from_address(at + room - data.size), np.uint8)
    array[:] = data
    return torch.from_numpy(array).view(x.dtype).reshape(x.shape)


def attend(key: str, P: int, stored: int, T: int) -> int:
    """One call, with all arrays guarded and a table no wider than needed."""
    store = Store(key, key, D=64, page_size=P, sinks=0)
    store.step(data(1, 4, 0, 64, 0), data(1, 2, stored, 64, 1), data(1, 2, stored, 64, 2))
    q, k, v = data(1, 4, max(T, 1), 64, 3), data(1, 2, T, 64, 4), data(1, 2, T, 64, 5)
    seals = torch.from_numpy(store.table.plan(T))
    arena, table, rows, slots = store.tensors()
    entries = [e for e in [*table.flatten().tolist(), *seals.flatten().tolist()] if e >= 0]
    end = max((e >> 16) * 64 + 2 * _C.page_bytes(e >> 8 & 255, e & 255, 64, 64, P) for e in entries)
    used = 1 + -(-(stored + T) // P)
    none = torch.empty(0)
    args = [q, k, v, arena[:end], table[:, :, :used].contiguous(), rows, slots, none.bool(), none, seals]
    rest = (stored, P, 0, 0, 0.125, 0.0)
    want = ops.attend(*[x.clone() for x in args], *rest)
    got = ops.attend(*[guarded(x) for x in args], *rest)
    assert all(map(torch.equal, got, want)), (key, P, stored, T)
    if T:
        return 1
    both = [ops.read(none, *x, 2, 64, 64, stored, P, 0) for x in (args[3:7], [guarded(x) for x in args[3:7]])]
    assert all(map(torch.equal, *both))
    return 2


def codecs(key: str) -> int:
    x, page, code = data(3, 5, 7, 64, 1), torch.randn(1, 2, 64, 64), formats.CODES[key]
    parts = ops.quantize(guarded(x), key)
    assert torch.equal(ops.dequantize(*[guarded(c) for c in parts], key), ops.dequantize(*ops.quantize(x, key), key))
    packed = [ops.pack(y, y, code, code, 64) for y in (guarded(page), page)]
    assert torch.equal(*packed)
    return 3


count = 0
for key in formats.NAMES:
    for P in (16, 64):
        for stored in (P - 1, P, 3 * P + 1):
            count += sum(attend(key, P, stored, T) for T in (0, 5))
    count += codecs(key) if key != "raw" else 0
print(count)
