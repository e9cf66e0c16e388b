"""Counts the warp instructions of attention per page, and compares them with targets: `make gpu-budget`.

For decode, a page has 64 tokens x 128 dims, and the machine code is for sm_90. All instructions of the loop over pages
are counted, in the warp with the most; the count is the difference of two lengths. The targets let memory be the
bottleneck. The achievable share of HBM bandwidth is modelled from the count alone:

    H200: 132 multiprocessors with 4 schedulers at 1.755 GHz, 4.8 TB/s. A row is split into as many runs as the host
    selects. 3 blocks per multiprocessor at a time (2 for 8 and 16 bits), with one warp of each on every scheduler. A
    scheduler issues 0.6 instructions per cycle, or less if its warps stall: a single warp takes `alone` cycles per
    instruction, from a replay of its trace with the encoded stalls (replay.py, with assumed latencies). Warps in the
    middle of a row are modelled, because the first and the last have fewer pages besides the raw ones. The launch of
    attention takes 3 us. The new token, which one block of a row writes, is included in the printed prologue and
    epilogue (`ends`), but not in the share (except for raw); a separate launch that writes it is not included. The last
    block merges its runs, which is counted for 16 and 32 runs.

For prefill, the same is counted for a block of 128 query rows and a page, and the resulting rate of the tensor cores is
modelled: per multiprocessor the longest of issuing (as above), MMAs (m16n8k16 in 8 cycles on one of 4 tensor cores, as
on sm_80) and shared memory (128 bytes per cycle), plus 1,000 cycles for two barriers and an L2 load that are not
hidden. Codes (loads of 16 bytes per lane) are loaded from memory once per block.

Caches, latency that is not hidden, and clocks under load are not modelled: docs/cuda-speed.md has measurements on an
H200.
"""

import argparse
import re
import struct
import sys

import replay
import runner
import torch

from kvcompress import _C, PagedKV, formats

PAGE, DIM, HEADS = 64, 128, 6
BUDGETS = {"raw": (3200, 85, 70), "int8": (2200, 80, 60), "fp8_e4m3": (2200, 80, 60), "int4": (1600, 70, 45),
           "int2": (1100, 55, 35)}  # fmt: skip
"""Instructions per page; % of HBM bandwidth at 8 sequences of 32K tokens, and at one."""
ENDS = 3000
"""Instructions per warp before and after its pages."""
PREFILL, EXPOSED = 200, 1000
"""Target TFLOP/s; cycles that are not hidden."""
CORES, SCHEDULERS, CLOCK, RATE, HBM, LAUNCH = 132, 4, 1.755e9, 0.6, 4.8e12, 3e-6


def layer(
    name: str, tokens: int, group: int, own: int = 1, heads: int = HEADS, writes: bool = False
) -> tuple[PagedKV, list[torch.Tensor]]:  # fmt: skip
    """Returns a layer and its next call. writes: the call has nothing to seal, so attention writes the token."""
    random = torch.Generator().manual_seed(1)
    kv = PagedKV(heads, DIM, key=name, page_size=PAGE, dtype=torch.bfloat16)
    for n in (tokens - 1, 1) if writes else (tokens,):  # a call of one token seals full pages
        kv.append(*(torch.randn(1, heads, n, DIM, generator=random).bfloat16() for _ in range(2)))
    return kv, [torch.randn(1, h, own, DIM, generator=random).bfloat16() for h in (heads * group, heads, heads)]


class Even(runner.Machine):
    """Splits a row's columns evenly: its first and last warps do not get fewer (kvc_call.raw_ends). So all have the
    same number of pages, and what is done once for eight pages is counted for eight."""

    def _run(self, name, argument, *launch):
        (found,) = re.finditer(re.escape(struct.pack("<qqq", 8, 1, 1)) + rb"([\1-\10])\0{7}", argument)
        super()._run(name, argument[: found.start(1)] + b"\0" + argument[found.end(1) :], *launch)


def blocks(name: str, pages: int, group: int, traced: bool = False, writes: bool = False) -> list[runner.Block]:
    """The first block of a launch with one run over all pages. The heads fill the multiprocessor, whether it holds two
    or three blocks at a time."""
    kv, step = layer(name, pages * PAGE, group, writes=writes)
    machine = Even("kvc_attend.*", processors=1, most=1, traced=traced)
    kv.op = lambda *args, **options: machine.call("attend", *args, **options)
    kv.attend(*step)
    grid = next(grid for kernel, grid in machine.launches if kernel.startswith("kvc_attend"))
    assert grid == (HEADS, 1, 1), f"expected one run of pages per head, got grid {grid}"
    assert not writes or len(machine.launches) == 1, machine.launches
    return machine.blocks


def measured(name: str, group: int) -> tuple[float, float, float, float]:
    """Warp instructions per page, and other ones per warp; cycles per instruction of a single warp; other
    instructions per warp if the block writes the token."""
    found, alone = [], 0.0
    for pages in (32, 64):
        ran = blocks(name, pages, group, traced=pages == 32)
        if not found:
            traces = [w.trace for w in ran[0].warps]
            alone = sum(replay.cycles(ran[0].kernel, [x]) for x in traces) / sum(map(len, traces))
        total = sum(w.executed for b in ran for w in b.warps)
        found.append((pages, total, sum(len(b.warps) for b in ran)))
    (a, first, warps), (z, second, same) = found
    assert warps == same, "expected the same warps at both lengths"
    each = (second - first) / (z - a)
    writing = sum(w.executed for b in blocks(name, a, group, writes=True) for w in b.warps)
    return each, (first - each * a) / warps, alone, (writing - each * a) / warps


def joined(name: str, group: int) -> tuple[float, float]:
    """Instructions per warp of the block that merges runs, in total and per run: the difference for the block of the
    last run between finishing last and finishing first."""
    counted = []
    for processors in (16, 32):
        last = []
        for backwards in (False, True):
            kv, step = layer(name, (4 * processors - 2) * PAGE, group, heads=1)
            machine = runner.Machine("kvc_attend.*", processors=processors, backwards=backwards, counters=1)
            kv.op = lambda *args, machine=machine, **options: machine.call("attend", *args, **options)
            kv.attend(*step)
            block = machine.blocks[0 if backwards else -1]
            last.append(sum(w.executed for w in block.warps) / len(block.warps))
        counted.append((len(machine.blocks), last[0] - last[1]))
    (few, less), (many, more) = counted
    each = (more - less) / (many - few)
    return less - few * each, each


def prefill(name: str) -> tuple[float, float, float, float, float]:
    """For a block of 128 rows and a page: warp instructions, MMAs among them, bytes through shared memory, bytes of
    codes from memory, modelled TFLOP/s."""
    counted = []
    for pages in (4, 12):
        kv, step = layer(name, pages * PAGE, 4, own=32)
        machine = runner.Machine("kvc_prefill.*", processors=1, most=1)
        kv.op = lambda *args, machine=machine, **options: machine.call("attend", *args, **options)
        kv.attend(*step)
        (block,) = machine.blocks
        total, mma, shared = 0, 0, 0
        codes = sum(32 * sectors for w in block.warps for size, sectors in w.loads if size == 16)
        for i, n in runner.counts([block]).items():
            x = block.kernel.code[i]
            total, mma = total + n, mma + n * (x.name == "HMMA")
            if x.name in ("LDS", "STS"):
                shared += 32 * n * (16 if "128" in x.modifiers else 8 if "64" in x.modifiers else 4)
        counted.append((total, mma, shared, codes))
    total, mma, shared, codes = ((z - a) / 8 for a, z in zip(*counted, strict=True))
    cycles = max(total / (SCHEDULERS * RATE), mma * 8 / SCHEDULERS, shared / 128) + EXPOSED
    return total, mma, shared, codes, 4 * 128 * PAGE * DIM / cycles * CLOCK * CORES / 1e12


def chosen(name: str, group: int, sequences: int, tokens: int = 32768, heads: int = 8) -> int:
    """The number of runs that the host selects for a row, from the call's launch, which is not executed."""
    kv = PagedKV(heads, DIM, key=name, page_size=PAGE, dtype=torch.bfloat16, batch=sequences)
    blocks: list[int] = []
    one = [torch.zeros(sequences, h, 1, DIM, dtype=torch.bfloat16) for h in (heads * group, heads, heads)]
    kv.append(*one[1:])
    kv.page_store.table.reserve(tokens)

    def note(kernel, argument, size, grid, threads, shared):
        blocks.extend([grid[0]] * kernel.startswith(b"kvc_attend"))
        return 1

    kv.op = runner.cuda_twin.Twin(launcher=runner.LAUNCHER(note), processors=CORES).attend
    kv.attend(*one)
    (all_of_them,) = blocks
    return all_of_them // (sequences * heads)


def share(
    name: str, size: int, counted: tuple[float, float, float], join: tuple[float, float], sequences: int, runs: int,
    tokens: int = 32768, heads: int = 8,
) -> float:  # fmt: skip
    """% of HBM bandwidth by the model above, which is that of launch.cu with the counted instructions."""
    each, ends, alone = counted
    resident = 3 if name in ("int4", "int2") else 2
    pages, slots, all_blocks = tokens // PAGE, CORES * resident, sequences * heads * runs
    last = -(-(all_blocks % slots) // CORES)
    waves = all_blocks // slots * max(resident / RATE, alone) + (last > 0) * max(last / RATE, alone)
    raw, parts = 4 if resident == 3 else 2, 4 * runs  # raw: columns that the first and the last part have less
    relief = 0 if parts < 3 or pages < parts else min(raw, (pages - parts) // (parts - 2))  # kvc_ends_of
    cycles = waves * (-(-(pages + 2 * relief) // parts) * each + ends)
    if runs > 1:
        cycles += (join[0] + join[1] * runs) * alone
    moved = sequences * heads * pages * size
    return 100 * moved / HBM / (max(cycles / CLOCK, moved / HBM) + LAUNCH)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", default=",".join(BUDGETS))
    parser.add_argument("--groups", default="4,8", help="of decode; none: prefill alone")
    wanted = parser.parse_args()
    if why := runner.missing():
        print(f"gpu-budget: {why} (PyPI: nvidia-cuda-nvdisasm; nvcc: CUDA 13)")
        return 1
    missed = 0
    print(f"{'format':10} {'GQA':>3}  {'counted':>8} {'budget':>7}  {'ends':>6} {'budget':>6}  {'alone':>5}  "
          f"{'HBM, B=8':>9} {'wanted':>6} {'runs':>4}  {'B=1':>4} {'wanted':>6} {'runs':>4} (best)"
          "   of 32K tokens, modelled")  # fmt: skip
    for name in wanted.formats.split(","):
        budget, eight, one = BUDGETS[name]
        code = formats.resolve(name, torch.bfloat16)
        size = _C.page_bytes(code, code, DIM, DIM, PAGE)
        for group in map(int, filter(None, wanted.groups.split(","))):
            *counted, writing = each, _, alone, _ = measured(name, group)
            join = joined(name, group)
            runs = [chosen(name, group, sequences) for sequences in (8, 1)]
            many, single = (share(name, size, counted, join, n, r) for n, r in zip((8, 1), runs, strict=True))
            best = max(range(1, 65), key=lambda r: share(name, size, counted, join, 1, r))
            bad = each > budget or writing > ENDS or many < eight or single < one
            missed += bad
            print(f"{name:10} {group:3}  {each:8.0f} {budget:7}  {writing:6.0f} {ENDS:6}  {alone:5.1f}  {many:8.0f}% "
                  f"{eight:5}% {runs[0]:4}  {single:3.0f}% {one:5}% {runs[1]:4} "
                  f"({share(name, size, counted, join, 1, best):.0f}% at {best}){'   missed' if bad else ''}",
                  flush=True)  # fmt: skip
    print("\nprefill: of a block of 128 rows and a page")
    print(f"{'format':10} {'counted':>8} {'MMAs':>6} {'shared bytes':>12} {'bytes of codes':>14} {'TFLOP/s':>8} "
          f"{'wanted':>6}   modelled")  # fmt: skip
    for name in wanted.formats.split(","):
        total, mma, shared, codes, rate = prefill(name)
        code = formats.resolve(name, torch.bfloat16)
        bad = rate < PREFILL or codes > _C.page_bytes(code, code, DIM, DIM, PAGE)
        missed += bad
        print(f"{name:10} {total:8.0f} {mma:6.0f} {shared:12.0f} {codes:14.0f} {rate:8.0f} {PREFILL:6}"
              f"{'   missed' if bad else ''}", flush=True)  # fmt: skip
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
