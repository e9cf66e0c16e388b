"""Decode of batches whose sequences have different lengths, against batches of equal ones with as many tokens.

    python benchmarks/uneven.py [--threads N] [--rounds N]

One sequence has 32K tokens, the others few. Both batches are called in turn; between calls, 256 MB are read. Prints ms
and the ratio of each pair (median, 10th and 90th percentile), which is 1 if no core waits for the longest sequence."""

from __future__ import annotations

import argparse
import statistics

import torch
from common import COLD, beside_reads, machine_name, read_function

from kvcompress import PagedKV

LONG, D, G = 32768, 128, 4
CASES = ((64, 1, 100, "int8"), (32, 2, 100, "int4"), (8, 8, 500, "int8"))  # sequences, KV heads, tokens of the others


def layer(lengths: list[int], heads: int, key: str) -> PagedKV:
    kv = PagedKV(heads, D, key=key, batch=len(lengths), dtype=torch.bfloat16)
    longest = max(lengths)
    real = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]  # shorter ones are padded on the left
    for start in range(0, longest, 4096):
        part = real[:, start : start + 4096]
        x = torch.randn(len(lengths), heads, part.shape[1], D, dtype=torch.bfloat16)
        kv.append(x, x, part)
    return kv


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=31)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    read, cold = read_function(), torch.zeros(COLD, dtype=torch.uint8)
    print(f"{machine_name()}, {args.threads} threads, {G} query heads of {D} dims per KV head")
    for B, H, few, key in CASES:
        lengths = [few] * (B - 1) + [LONG]
        equal = sum(lengths) // B
        layers = {"uneven": layer(lengths, H, key), "equal": layer([equal] * B, H, key)}
        q = torch.randn(B, G * H, 1, D, dtype=torch.bfloat16)
        calls = {name: lambda i, kv=kv, q=q: kv.attend(q) for name, kv in layers.items()}
        times, _ = beside_reads(calls, lambda: read(cold), args.rounds)
        ratios = sorted(a / b for a, b in zip(times["uneven"], times["equal"], strict=True))
        tenth = len(ratios) // 10
        ms = {name: f"{statistics.median(x) * 1e3:.3f}" for name, x in times.items()}
        print(
            f"{key}, {H} KV heads, {B - 1} x {few:,} and {LONG:,} tokens: {ms['uneven']} ms, {B} x {equal:,} tokens: "
            f"{ms['equal']} ms, ratio {statistics.median(ratios):.2f} ({ratios[tenth]:.2f} to {ratios[-1 - tenth]:.2f})"
        )


if __name__ == "__main__":
    main()
