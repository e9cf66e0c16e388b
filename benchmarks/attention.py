"""Decode attention over paged, quantized K/V: time against bytes read, against this machine's read bandwidth, and
against torch's SDPA, all in one run.

Every call reads other pages than the one before (over at least 256 MB), so no cache helps; --warm repeats one copy.
Medians of interleaved calls. Writes benchmarks/results/attention.json.
"""

from __future__ import annotations

import argparse
import math

import torch
from common import COLD, interleave, machine, read_function, save, spread

from kvcompress import formats, ops

FORMATS = ("raw", "int8", "fp8_e4m3", "int4")
NONE, NO_SEALS = torch.empty(0), torch.empty(0, 2, dtype=torch.int64)


def paged_decode(name: str, B: int, Hq: int, H: int, D: int, S: int, dtype: torch.dtype, warm: bool):
    """(call(i) that attends to copy i of the pages, bytes that it reads)."""
    code = formats.resolve(name, dtype)
    g = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, H, S, D, generator=g).to(dtype) for _ in range(2))
    pages = ops.pack(k, v, code, code, 64)
    n, size = S // 64, pages.shape[3]
    read = B * n * H * size
    copies = B if warm else max(B * 2, -(-COLD // (n * H * size)))
    copies = -(-copies // B) * B
    arena = pages.flatten().repeat(copies)
    q = torch.randn(B, Hq, 1, D, generator=g).to(dtype)
    none = torch.empty(B, H, 0, D, dtype=dtype)

    def table(copy: int) -> torch.Tensor:
        entries = [-1] + [((copy * n + p) * H * size // 64) << 16 | code << 8 | code for p in range(n)]
        return torch.tensor([entries])

    tables = [torch.stack([table(i + b) for b in range(B)]) for i in range(0, copies, B)]
    rows = torch.tensor([[[S, 0]]] * B)

    def call(i: int):
        return ops.attend(q, none, none, arena, tables[i % len(tables)], rows, NONE.int(), NONE.bool(), NONE, NO_SEALS,
                          S, 64, 0, 0, 1 / math.sqrt(D), 0.0)  # fmt: skip

    return call, read


def sdpa(B: int, Hq: int, H: int, D: int, S: int, dtype: torch.dtype, warm: bool, folded: bool):
    """torch's attention on dense K/V; folded: query heads of a group as query rows (what a careful user writes)."""
    read = 2 * B * H * S * D * dtype.itemsize
    copies = 1 if warm else max(2, -(-COLD // read))
    k, v = (torch.randn(copies, B, H, S, D).to(dtype) for _ in range(2))
    q = torch.randn(B, Hq, 1, D).to(dtype)
    attend = torch.nn.functional.scaled_dot_product_attention

    def call(i: int):
        if folded:
            return attend(q.view(B, H, Hq // H, D), k[i % copies], v[i % copies])
        return attend(q, k[i % copies], v[i % copies], enable_gqa=True)

    return call, read


def cell(B: int, Hq: int, H: int, D: int, S: int, args: argparse.Namespace) -> list[dict]:
    shape = (B, Hq, H, D, S)
    calls, read = {}, {}
    for name in FORMATS:
        label = "raw bf16" if name == "raw" else name
        calls[label], read[label] = paged_decode(name, *shape, torch.bfloat16, args.warm)
    for label, dtype, folded in (("sdpa bf16", torch.bfloat16, False), ("sdpa bf16 folded", torch.bfloat16, True),
                                 ("sdpa fp32 folded", torch.float32, True)):  # fmt: skip
        calls[label], read[label] = sdpa(*shape, dtype, args.warm, folded)
    buffer = torch.zeros(COLD, dtype=torch.uint8)
    reader, threads = read_function(), torch.get_num_threads()
    calls["read"], read["read"] = (lambda i: reader(buffer, threads)), COLD
    rows = []
    times = {name: spread(t) for name, t in interleave(calls, args.rounds).items()}
    limit = read["read"] / times["read"]["ms"] / 1e6
    for name, t in times.items():
        speed = read[name] / t["ms"] / 1e6
        rows.append({"B": B, "Hq": Hq, "H": H, "D": D, "S": S, "what": name, **t, "MB": read[name] / 1e6, "GB/s": speed,
                     "fraction": speed / limit, "vs sdpa bf16": times["sdpa bf16"]["ms"] / t["ms"],
                     "vs sdpa folded": times["sdpa bf16 folded"]["ms"] / t["ms"]})  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--warm", action="store_true", help="one copy of the data, in whatever cache holds it")
    parser.add_argument("--full", action="store_true", help="B 1 and 8, GQA 1, 4, 8")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shapes = [(1, 32, 8, 128, 8192), (1, 32, 8, 128, 32768)]
    if args.full:
        shapes += [(8, 32, 8, 128, 4096), (1, 8, 8, 128, 8192), (1, 64, 8, 128, 8192), (1, 32, 8, 64, 8192)]
    result = {"machine": machine(), "warm": args.warm, "cells": []}
    print(result["machine"])
    print(
        f"{'B Hq/H D S':<18} {'what':<17} {'ms (p10-p90)':>23} {'GB/s':>6} {'of read':>8} {'x sdpa':>7} {'x folded':>8}"
    )
    for shape in shapes:
        for row in cell(*shape, args):
            result["cells"].append(row)
            where = f"{row['B']} {row['Hq']}/{row['H']} {row['D']} {row['S']}"
            ms = f"{row['ms']:.3f} ({row['p10_ms']:.3f}-{row['p90_ms']:.3f})"
            print(f"{where:<18} {row['what']:<17} {ms:>23} {row['GB/s']:6.1f} {row['fraction']:8.2f} "
                  f"{row['vs sdpa bf16']:7.1f} {row['vs sdpa folded']:8.2f}")  # fmt: skip
    print("wrote", save("attention-warm" if args.warm else "attention", result))


if __name__ == "__main__":
    main()
