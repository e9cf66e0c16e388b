"""Large sizes: offsets beyond 2^31 elements and 2^32 bytes, in sparse memory; and thousands of calls without leaks."""

from __future__ import annotations

import mmap
import os
import resource
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from test_ops import INT8, NO_SEALS, NONE, attend_args, paged

from kvcompress import _C, PagedKV, ops

ROOT = Path(__file__).resolve().parents[3]
NORESERVE = 0x4000  # Linux only; in mmap since Python 3.13


def sparse(size: int) -> np.ndarray:
    """uint8 [size] of zeros that take no memory until they are touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    try:
        return np.frombuffer(mmap.mmap(-1, size, flags=flags), np.uint8)
    except OSError:
        pytest.skip(f"no address space of {size} bytes")


@pytest.mark.parametrize("base", [(1 << 31) - 4096, 1 << 31, (1 << 32) - 8192, (1 << 33) + 64])
def test_pages_beyond_4_gib(base: int) -> None:
    """The same pages at the start of an arena, and around and far beyond 2^31 and 2^32 bytes."""
    torch.manual_seed(0)
    args = attend_args(T=3, B=2)
    want = [x.clone() for x in ops.attend(*[x.clone() if isinstance(x, torch.Tensor) else x for x in args])]
    small, table = args[3], args[4]
    arena = torch.from_numpy(sparse(base + small.numel() + 4096))
    arena[base : base + small.numel()] = small
    moved = torch.where(table >= 0, table + (base // 64 << 16), table)
    got = ops.attend(*args[:3], arena, moved, *args[5:])
    assert all(map(torch.equal, got, want))
    k, v = ops.read(torch.empty(0), arena, moved, args[5], NONE.int(), 2, 32, 32, 128, 64, 0)
    k0, v0 = ops.read(torch.empty(0), small, table, args[5], NONE.int(), 2, 32, 32, 128, 64, 0)
    assert torch.equal(k, k0) and torch.equal(v, v0) and k.any()
    kinds = [
        ops.score_tokens(a, t, args[5], NONE.int(), 2, 32, 32, 128, 64, 0, 0)
        for a, t in ((arena, moved), (small, table))
    ]
    assert torch.equal(*kinds)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_strides_beyond_2_31_elements(name: str) -> None:
    """Tokens of a call are 2^30 elements apart, so the third is beyond 2^31."""
    args = attend_args(T=4)
    want = ops.attend(*[x.clone() if isinstance(x, torch.Tensor) else x for x in args])
    at = "qkv".index(name)
    x = args[at]
    step = (1 << 30) + 16
    memory = torch.from_numpy(sparse(4 * (3 * step + 4096)).view(np.float32))
    B, H, T, D = x.shape
    far = memory.as_strided((B, H, T, D), (H * D, D, step, 1))
    far.copy_(x)
    got = ops.attend(*[far if i == at else y for i, y in enumerate(args)])
    assert all(map(torch.equal, got, want))


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_entries_hold_any_offset(tmp_path: Path) -> None:
    """The arithmetic of page.h and of the table at 2^31, 2^32, 2^40 and near the maximum."""
    (tmp_path / "t.c").write_text(r"""
#include "page.h"
#include "kvc.h"
#include <stdio.h>
int main(void)
{
    const int64_t at[] = {0, 64, ((int64_t)1 << 31) - 64, (int64_t)1 << 31, (int64_t)1 << 32, ((int64_t)1 << 40) + 64,
                          ((int64_t)1 << 52) - 64};
    for (int i = 0; i < 7; i++)
        for (int key = 0; key < 17; key++) {
            int64_t e = kvc_entry(at[i], key, 16 - key);
            if (kvc_entry_offset(e) != at[i] || kvc_entry_key(e) != key || kvc_entry_value(e) != 16 - key || e < 0)
                return printf("entry %lld %d\n", (long long)at[i], key), 1;
        }
    for (int64_t t = ((int64_t)1 << 31) - 300; t < ((int64_t)1 << 31) + 300; t++) {
        int64_t c = kvc_column(t, 4, 64), first = kvc_column_first(c, 4, 64);
        if (first > t || t >= first + 64 || c != 1 + (t - 4) / 64) return printf("column %lld\n", (long long)t), 1;
    }
    printf("ok\n");
    return 0;
}
""")
    done = subprocess.run(
        ["cc", "-std=c11", "-iquote", str(ROOT / "csrc/core"), str(tmp_path / "t.c"), "-o", str(tmp_path / "t")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    env = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    done = subprocess.run([str(tmp_path / "t")], capture_output=True, text=True, check=False, env=env)
    assert done.stdout == "ok\n"


def test_errors_leak_nothing() -> None:
    """Thousands of calls, most of which fail: handles, blocks and memory are unchanged."""
    args, kv = attend_args(T=3, B=2), PagedKV(2, 32, page_size=16)
    x = torch.randn(1, 2, 3, 32)
    bad = [
        lambda: ops.attend(args[0].double(), *args[1:]),
        lambda: ops.attend(*args[:4], args[4] + (1 << 55), *args[5:]),
        lambda: ops.quantize(torch.full((3, 32), torch.nan), INT8),
        lambda: ops.pack(x, x[:, :1], INT8, INT8, 64),
        lambda: kv.append(x * torch.inf, x),
        lambda: kv.select([7]),
        lambda: _C.Table(_C.Pool(1 << 20), heads=0, key_dim=32, value_dim=32, batch=1, page_size=16, sinks=0, recent=0,
                         raw=0, key=0, value=0, direct=False),
    ]  # fmt: skip

    def round_trip(n: int) -> tuple[int, int, int]:
        for _ in range(n):
            for call in bad:
                with pytest.raises((ValueError, TypeError)):
                    call()
            ops.attend(*args)
            ops.read(torch.empty(0), *paged()[:3], NONE.int(), 2, 32, 32, 128, 64, 0)
        return _C.handles_live(), _C.alloc_live(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    assert NO_SEALS.numel() == 0
    round_trip(60)
    handles, live, peak = round_trip(60)
    after = round_trip(300)
    assert after[:2] == (handles, live) and handles == 0
    assert after[2] - peak < 6 << 10  # KiB: 2,100 failures
