"""Random sequences of operations on layers, and digests of the bytes that they store, which must be equal on every
kernel level.

    KVCOMPRESS_ISA=avx2 python tests/support/life.py FIRST LAST    a line per seed, with a digest after each step"""

from __future__ import annotations

import hashlib
import sys

import numpy as np
import torch

from kvcompress import PagedKV, formats
from kvcompress.store import serialize

NAMES = ["raw", *formats.NAMES, *formats.CALIBRATED]
HEADS = 2


def digest(kv: PagedKV) -> str:
    """Digest of everything that the layer stores: pages, and the slots of tokens."""
    arrays, pieces = serialize.survey(kv.page_store)
    found = hashlib.sha256(serialize.gather(kv.page_store, pieces)[0])
    for x in (arrays.entries, arrays.rows, arrays.slots):
        if x is not None:
            found.update(np.ascontiguousarray(x).tobytes())
    return found.hexdigest()[:12]


def life(seed: int, steps: int = 12) -> list[str]:
    """Appends, attention, crops, row selection, copies, evictions; yields a digest after each."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    dim, dtype = int(rng.choice([32, 64, 128])), (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
    key, value = str(rng.choice(NAMES)), str(rng.choice(NAMES))
    kv = PagedKV(
        HEADS, dim, key=key, value=value, batch=2, page_size=int(rng.choice([16, 64])), dtype=dtype,
        sinks=int(rng.choice([0, 4])), residual_length=(None, 20)[int(rng.integers(2))],
    )  # fmt: skip
    found, outliers = [], torch.ones(dim).index_fill_(0, torch.tensor([3, dim // 2]), 30.0)
    for _ in range(steps):
        what, T = int(rng.integers(8)), int(rng.choice([1, 1, 7, 40, 130]))
        q = torch.randn(kv.batch, 2 * HEADS, T, dim, generator=generator).to(dtype)
        k, v = ((torch.randn(kv.batch, HEADS, T, dim, generator=generator) * outliers).to(dtype) for _ in range(2))
        if what < 2 or not kv.seen:
            kv.append(k, v, torch.from_numpy(rng.random((kv.batch, T)) < 0.8) if what == 0 and T > 1 else None)
        elif what < 4:
            kv.attend(q, k, v)
        elif what == 4:
            kv.crop(int(rng.integers(kv.seen // 2, kv.seen + 1)))
        elif what == 5:
            kv.select(rng.integers(0, kv.batch, int(rng.integers(1, 4))))
        elif what == 6:
            twin = kv.clone()
            twin.append(k, v)
            found.append(digest(twin))
        elif kv.batch:
            keep = torch.from_numpy(rng.random((kv.batch, HEADS, kv.seen)) < 0.7)
            keep |= (kv.real().cumsum(1) <= kv.sinks)[:, None]  # sinks stay
            kv.evict(keep)
        found.append(digest(kv))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        print(seed, *life(seed), flush=True)
