"""Edge cases: arrays that end at the end of memory, unwritten slots, dims and strides that do not fit vectors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvcompress import _C, PagedKV

TESTS = Path(__file__).resolve().parents[1]


def test_nothing_is_read_past_its_end() -> None:
    """q, k, v, tables, rows and the arena each end right before an inaccessible page; tables are no wider than needed;
    lengths around multiples of a page."""
    done = subprocess.run(
        [sys.executable, str(TESTS / "bad_inputs" / "guarded.py")],
        cwd=TESTS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"
    assert int(done.stdout.split()[-1]) > 150


def test_new_memory_is_nan_in_every_test() -> None:
    """Enabled by conftest: new pages and workspace are filled with NaN whenever they are allocated; no test reads
    them."""
    pool = _C.Pool(8 << 20)
    for _ in range(3):
        at = pool.alloc(1 << 14)
        assert (pool.arena[at : at + (1 << 14)] == 0xFF).all()
        pool.arena[at : at + (1 << 14)] = 0
        pool.unref(at)
    for key in ("raw", "int8", "int4", "kivi4"):
        for T in (1, 15, 17, 40):
            kv = PagedKV(2, 32, key=key, page_size=16, sinks=4, residual_length=0 if key == "int8" else None, pool=pool)
            kv.append(*torch.randn(2, 1, 2, T, 32))
            used = kv.page_store.table.entries[kv.page_store.table.entries >= 0]
            arena = pool.arena
            ones = sum((arena[(e >> 16) * 64 : (e >> 16) * 64 + 512] == 0xFF).sum() for e in used.tolist())
            out, lse = kv.attend(torch.randn(1, 4, 1, 32))
            assert out.isfinite().all() and lse.isfinite().all() and ones > 0


@pytest.mark.parametrize("D", [1, 7, 46, 64, 80, 96, 100, 128, 255, 256])
@pytest.mark.parametrize("key", ["raw", "int8", "int4", "kivi4"])
def test_odd_dims_and_strides(key: str, D: int) -> None:
    """Storage at an odd element offset, non-contiguous tokens and heads, an expanded head: compared with dense copies
    and float64."""
    base = torch.randn(1, 2, 50, 2, D + 3)
    k = base[:, :, :, 0, 1 : D + 1]
    v = base.transpose(1, 2)[:, :, :, 1, 3:].transpose(1, 2)
    q = torch.randn(1, 1, 50, D + 1)[..., 1:].expand(1, 4, 50, D)
    odd, plain = (PagedKV(2, D, key=key, page_size=16) for _ in "ab")
    for a, b in ((0, 33), (33, 34), (34, 50)):
        got = odd.attend(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b])
        want = plain.attend(*(x[:, :, a:b].clone(memory_format=torch.contiguous_format) for x in (q, k, v)))
        assert all(map(torch.equal, got, want))
    if key == "raw":
        K, V = (x.double().repeat_interleave(2, 1) for x in (k, v))
        s = q[:, :, 34:].double() @ K.transpose(2, 3) / D**0.5
        s = s.masked_fill(torch.arange(50) > torch.arange(34, 50)[:, None], -torch.inf)
        torch.testing.assert_close(got[0].double(), s.softmax(-1) @ V, rtol=1e-4, atol=1e-5)
