"""Warp instructions a page of 64 tokens x 128 dims that decode takes, counted on machine code for sm_90, beside
what lets memory bind: `make gpu-budget`. Everything in the loop over pages counts, in the warp that has most of
it; what is counted is the difference of two lengths. The share of HBM that may be had is modelled from the
count alone:

    H200: 132 multiprocessors of 4 schedulers at 1.755 GHz, 0.6 instructions a cycle and scheduler (what replays
    of our kernels against their encoded stalls give), 4.8 TB/s; whole waves of 3 blocks a multiprocessor; 3 us
    for the launch of attention (not for the one before it that writes the new token); the block that comes last
    makes one of its runs, in 60 instructions each.

It says nothing of caches, of latency that is not hidden, or of clocks under load: no GPU has run this.
"""

import argparse
import sys

import runner
import torch

from kvcompress import _C, PagedKV, formats

PAGE, DIM, HEADS = 64, 128, 3
BUDGETS = {"raw": (3200, 85, 70), "int8": (2200, 80, 60), "fp8_e4m3": (2200, 80, 60), "int4": (1600, 70, 45),
           "int2": (1100, 55, 35)}  # fmt: skip
"""Instructions a page; % of HBM at 8 sequences of 32K tokens, and at one."""
ENDS = 3000
"""Instructions of a warp before and after its pages."""
CORES, SCHEDULERS, CLOCK, RATE, HBM, LAUNCH = 132, 4, 1.755e9, 0.6, 4.8e12, 3e-6


def layer(name: str, tokens: int, group: int) -> tuple[PagedKV, list[torch.Tensor]]:
    random = torch.Generator().manual_seed(1)
    kv = PagedKV(HEADS, DIM, key=name, page_size=PAGE, dtype=torch.bfloat16)
    kv.append(*(torch.randn(1, HEADS, tokens, DIM, generator=random).bfloat16() for _ in range(2)))
    return kv, [torch.randn(1, h, 1, DIM, generator=random).bfloat16() for h in (HEADS * group, HEADS, HEADS)]


def blocks(name: str, pages: int, group: int) -> list[runner.Block]:
    """One run over all pages: a launch's first block, on a multiprocessor that its heads fill."""
    kv, step = layer(name, pages * PAGE, group)
    machine = runner.Machine("kvc_attend.*", processors=1, most=1)
    kv.op = lambda *args, **options: machine.call("attend", *args, **options)
    kv.attend(*step)
    grid = next(grid for kernel, grid in machine.launches if kernel.startswith("kvc_attend"))
    assert grid == (HEADS, 1, 1), f"pages are cut up in runs: {grid}"
    return machine.blocks


def measured(name: str, group: int) -> tuple[float, float]:
    """Warp instructions a page, and of a warp besides."""
    found = []
    for pages in (12, 28):
        ran = blocks(name, pages, group)
        total = sum(w.executed for b in ran for w in b.warps)
        found.append((pages, total, sum(len(b.warps) for b in ran)))
    (a, first, warps), (z, second, same) = found
    assert warps == same, "the two lengths are cut up differently"
    each = (second - first) / (z - a)
    return each, (first - each * a) / warps


def share(size: int, each: float, ends: float, sequences: int, tokens: int = 32768, heads: int = 8) -> float:
    """% of HBM's bandwidth, by the model above, with as many runs as take the least time."""
    pages, slots = tokens // PAGE, CORES * 3
    best = float("inf")
    for runs in range(1, 65):
        waves = -(-sequences * heads * runs // slots)
        resident = min(3, -(-sequences * heads * runs // CORES))  # blocks: a warp of each on every scheduler
        cycles = (waves * resident * (-(-pages // (4 * runs)) * each + ends) + 60 * (runs > 1) * runs) / RATE
        best = min(best, cycles / CLOCK)
    moved = sequences * heads * pages * size
    return 100 * moved / HBM / (max(best, moved / HBM) + LAUNCH)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", default=",".join(BUDGETS))
    parser.add_argument("--groups", default="4,8")
    wanted = parser.parse_args()
    if why := runner.missing():
        print(f"gpu-budget: {why} (PyPI: nvidia-cuda-nvdisasm; nvcc: CUDA 13)")
        return 1
    missed = 0
    print(f"{'format':10} {'GQA':>3}  {'counted':>8} {'budget':>7}  {'ends':>6} {'budget':>6}  "
          f"{'HBM, B=8':>9} {'wanted':>6}  {'B=1':>4} {'wanted':>6}   of 32K tokens, modelled")  # fmt: skip
    for name in wanted.formats.split(","):
        budget, eight, one = BUDGETS[name]
        code = formats.resolve(name, torch.bfloat16)
        size = _C.page_bytes(code, code, DIM, DIM, PAGE)
        for group in map(int, wanted.groups.split(",")):
            each, ends = measured(name, group)
            many, alone = share(size, each, ends, 8), share(size, each, ends, 1)
            bad = each > budget or ends > ENDS or many < eight or alone < one
            missed += bad
            print(f"{name:10} {group:3}  {each:8.0f} {budget:7}  {ends:6.0f} {ENDS:6}  {many:8.0f}% {eight:5}%  "
                  f"{alone:3.0f}% {one:5}%{'   missed' if bad else ''}", flush=True)  # fmt: skip
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
