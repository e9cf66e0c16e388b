"""Cost of tiers. benchmarks/results/tiers.json.

    python benchmarks/tiers.py [--gigabytes N] [--tokens N] [--rounds N]

1. Copies: pages of a pool (64 KiB each, 1 GB in total) to host memory and back, with checksums, compared with memcpy of
as many bytes by one thread. Then the same with `Tiers.put`, 1 MiB at a time, with memory that was kept (`keep_bytes`)
and with new memory, whose page faults memcpy has, too. Interleaved.
2. Decode: PagedKV layers of 8 KV heads of 128 (the attention of a small model only), 3/4 of their tokens on the host or
in files, fetched one layer ahead by a thread, or attended to in place, compared with the same with all pages in the
pool. Interleaved; one thread for attention, the other core for fetching."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from common import copy_function, interleave, machine, save, spread

from kvcompress import _C, PagedKV, Tiers
from kvcompress.offload.prefetch import LayerOffload, Prefetcher


def copies(total: int, rounds: int) -> dict[str, object]:
    pool = _C.Pool(2 * total)
    size = 64 << 10
    offsets = pool.take(np.full(total // size, size))
    order = np.random.default_rng(0).permutation(offsets)  # pages in random order
    pieces = np.ascontiguousarray(np.stack([order, np.full(len(order), size)], 1))
    pool.arena[:] = 1
    host = torch.ones(total, dtype=torch.uint8)
    other = torch.ones(total, dtype=torch.uint8)
    copy, parts, kept = copy_function(), pieces.reshape(-1, 16, 2), Tiers(keep_bytes=2 * total)

    def put(tiers: Tiers) -> None:
        extents = [tiers.put(pool, part) for part in parts]
        for extent in extents:
            tiers.drop(extent)

    def copy_to_new() -> None:
        new = [np.empty(16 * size, np.uint8) for _ in parts]
        for i, to in enumerate(new):
            to[:] = other.numpy()[i * 16 * size :][: 16 * size]

    times = interleave({
        "memcpy": lambda i: copy(host, other, 1),
        "offload": lambda i: _C.gather(pool, pieces, host.numpy()),
        "fetch": lambda i: _C.scatter(pool, pieces, host.numpy()),
        "put": lambda i: put(kept),
        "memcpy, new memory": lambda i: copy_to_new(),
        "put, new memory": lambda i: put(Tiers(keep_bytes=0)),
    }, rounds)  # fmt: skip
    found = {name: {**spread(x), "GB/s": total / 1e9 / (spread(x)["ms"] / 1e3)} for name, x in times.items()}
    for name in ("offload", "fetch", "put", "put, new memory"):
        against = found["memcpy, new memory" if "new" in name else "memcpy"]
        found[name]["of_memcpy"] = share = against["ms"] / found[name]["ms"]
        print(f"{name}: {found[name]['GB/s']:.1f} GB/s, {100 * share:.0f}% of memcpy ({against['GB/s']:.1f} GB/s)")
    return {"bytes": total, **found}


def decode(fmt: str, tokens: int, rounds: int, layers: int = 6) -> dict[str, object]:
    H, Hq, D = 8, 32, 128
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, Hq, 1, D, generator=generator).bfloat16()
    file = {"host_bytes": 0, "file_bytes": None}
    places: dict[str, tuple[dict[str, Any], bool]] = {
        "fetched": ({}, False), "in place": ({}, True), "file, fetched": (file, False), "file, in place": (file, True),
    }  # fmt: skip
    made: dict[str, list[PagedKV]] = {}
    tiers = {name: Tiers(**options) for name, (options, _) in places.items()}
    for name in ("resident", *places):
        pool = _C.Pool()
        made[name] = [PagedKV(H, D, key=fmt, dtype=torch.bfloat16, pool=pool) for _ in range(layers)]
        for store in made[name]:
            x = torch.randn(1, H, tokens, D, generator=generator).bfloat16()
            store.append(x, x)
        if name in places:
            prefetcher = Prefetcher(tiers[name], resident=tokens // 4, in_place=places[name][1])
            for store in made[name]:
                store.attach(LayerOffload(store.page_store, prefetcher))
                store.offload.offload_oldest()
    times = interleave(
        {name: lambda i, s=stores: [store.attend(q) for store in s] for name, stores in made.items()}, rounds
    )
    found: dict[str, Any] = {name: spread(x) for name, x in times.items()}
    sealed = sum(s.page_store.parts()["sealed"] for s in made["resident"])
    moved = sum(tiers["fetched"].stats()[tier] for tier in ("host", "file"))
    found |= {"away_bytes": moved, "sealed_bytes": sealed, "share": moved / sealed}
    print(f"{fmt}, {tokens} tokens x {layers} layers, {100 * moved / sealed:.0f}% of the pages offloaded; "
          f"resident {found['resident']['ms']:.1f} ms a step")  # fmt: skip
    for name in places:
        found[name]["times"] = float(np.median(np.array(times[name]) / np.array(times["resident"])))
        print(f"    {name}: {found[name]['ms']:.1f} ms, {found[name]['times']:.2f} times")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    torch.set_num_threads(1)
    total = int(options.gigabytes * 2**30) >> 20 << 20
    result = {"machine": machine(), "copies": copies(total, options.rounds), "tokens": options.tokens}
    result["decode"] = {fmt: decode(fmt, options.tokens, 2 * options.rounds) for fmt in ("raw", "int8", "int4")}
    save("tiers", result)


if __name__ == "__main__":
    main()
