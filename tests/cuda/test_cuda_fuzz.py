"""Random calls on CUDA's kernels (on the host, or on a GPU with KVCOMPRESS_TEST_DEVICE=cuda), compared with the CPU
op: formats, dims, groups, masks, windows, page sizes, strides, accumulated attention. KVCOMPRESS_SOAK: seconds; a
few calls otherwise."""

import os
import sys
import time

import numpy as np
import pytest
import torch
from cuda_twin import Twin
from test_attend import data, error
from test_cuda_attend import Store, formats_of

from kvcompress import _C, formats

NAMES = [row["name"] for row in formats.TABLE if row["bits"] <= 8] + ["raw"]


def one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pick = lambda *x: x[rng.integers(len(x))]  # noqa: E731
    D, Dv, H, B = pick(32, 64, 96, 128, 256), pick(32, 64, 128), pick(1, 2), pick(1, 1, 2)
    key, value, dtype = pick(*NAMES), pick(*NAMES), pick(torch.float32, torch.float16, torch.bfloat16)
    known = pick(0, formats_of(key, value, dtype=dtype)) | pick(0, formats.OPEN_RAW)
    twin = Twin(formats=known, processors=pick(1, 4, 132), order=pick(0, 1, 2, 3))
    store = Store(
        key, value, B=B, H=H, D=D, Dv=Dv, dtype=dtype, page_size=pick(16, 32, 64), sinks=pick(0, 4, 20), twin=twin
    )
    for i in range(4):
        T, group = pick(1, 1, 2, 7, 90), pick(1, 2, 4, 5)
        q, k, v = (data(B, h, T, d, seed + i, dtype) for h, d in ((H * group, D), (H, D), (H, Dv)))
        mask = torch.from_numpy(rng.random((B, T)) < 0.8) if pick(0, 0, 1) else None
        s_aux = torch.randn(H * group) if pick(0, 1) else None
        width = pick(0, store.table.seen + T + pick(0, 5))
        out, _ = store.step(q, k, v, mask, s_aux, pick(0, 0, 50), pick(0.0, 0.0, 5.0), width)
        want = store.want[0].transpose(1, 2)
        if bool(want.any()):
            assert error(out, want.double()) <= 2e-2, seed
        if bool(store.want[2].any()):
            assert error(store.accumulated[0], store.want[2].double()) <= 2e-2, seed


@pytest.mark.parametrize("part", range(2))
def test_random_calls(part):
    seconds = int(os.environ.get("KVCOMPRESS_SOAK", 0))
    seed, end = 1000 * part, time.time() + seconds / 2
    while seed % 1000 < 3 or time.time() < end:
        one(seed)
        seed += 1


if __name__ == "__main__":  # a fuzz target: takes seconds like libFuzzer, prints its count at the end
    _C.alloc_poison(True)
    begin, seconds = time.time(), next(int(x.split("=")[1]) for x in sys.argv if x.startswith("-max_total_time="))
    calls = 0
    while time.time() < begin + seconds:
        one(int(begin) * 100_000 + calls)  # different calls in each run
        calls += 1
    print(f"stat::number_of_executed_units: {calls}")
