"""Speed of the codecs: dense K/V to sealed pages and back, for every format, compared with memcpy of the same dense
bytes and with the same codec in plain torch ops, all in one run.

append: PagedKV.append of a long prefill, in one call, to a new cache of a pool that keeps memory (keep_bytes). read:
PagedKV.dense() of it. For these, memcpy and all of torch's calls, memory is kept between calls; "append new" (a cache
with its own pool) and "fresh" (the same copy) include page faults of new memory. decode: one token per call; calls
without and with a page to seal.

GB/s of dense bytes; medians of interleaved calls, memcpy in every round. Threads are bound to their CPUs (otherwise two
may share one until the scheduler moves them); KVCOMPRESS_ISA selects the level. Writes
benchmarks/results/codecs.json."""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import copy_function, machine, save, spread
from torch_codecs import peers, torch_codec

from kvcompress import _C, PagedKV, formats

H, D, PAGE = 8, 128, 64
OWN_THREADS = ("memcpy", "fresh")
TUNED = ("int8", "fp8_e4m3", "int4")
Timed = Callable[[], float]


def keep_memory() -> None:
    """Makes malloc neither use mmap nor return memory, so that only first calls have page faults."""
    libc = ctypes.CDLL(None)
    for option, value in ((-4, 0), (-1, 2**31 - 1)):  # M_MMAP_MAX, M_TRIM_THRESHOLD
        libc.mallopt(option, value)


def timed(call: Callable[[], object]) -> float:
    """Seconds of a call; its result is dropped after the clock has stopped."""
    start = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - start
    del result
    return seconds


def rounds(calls: dict[str, Timed], n: int) -> dict[str, list[float]]:
    """Each call once to warm up, then all in turn, n times. Copies, which use their own threads, wait until OpenMP's
    threads, which spin for a while, have gone to sleep."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(n + 1):
        for name, call in calls.items():
            if name in OWN_THREADS:
                time.sleep(0.02)
            seconds = call()
            if i:
                times[name].append(seconds)
    return times


def append_time(name: str, k: torch.Tensor, v: torch.Tensor, pool: _C.Pool | None = None) -> float:
    layer = PagedKV(H, D, key=name, dtype=k.dtype, pool=pool)
    return timed(lambda: layer.append(k, v))


def fresh_time(copy: Callable, data: torch.Tensor, threads: int) -> float:
    block = mmap.mmap(-1, data.nbytes)
    to = torch.frombuffer(block, dtype=data.dtype)
    return timed(lambda: copy(to, data, threads))


def row(what: str, name: str, dtype: torch.dtype, seconds: list[float], dense: int, limit: float) -> dict:
    t = spread(seconds)
    speed = dense / t["ms"] / 1e6
    return {"format": name, "dtype": str(dtype).removeprefix("torch."), "what": what, **t, "GB/s": speed,
            "fraction": speed / limit}  # fmt: skip


def cell(name: str, dtype: torch.dtype, args: argparse.Namespace, copy: Callable) -> list[dict]:
    """Rows of one format: memcpy, fresh, append, read, torch's quantize and dequantize; or those of another library."""
    tokens = args.megabytes * 2**20 // (2 * H * D * dtype.itemsize)
    g = torch.Generator().manual_seed(0)
    both = torch.randn(2, 1, H, tokens, D, generator=g).to(dtype)
    k, v = both
    flat, to, dense = both.flatten(), torch.zeros(both.numel(), dtype=dtype), both.nbytes
    threads = args.threads
    calls: dict[str, Timed] = {"memcpy": lambda: timed(lambda: copy(to, flat, threads))}
    label = args.peer or "torch"
    if not args.peer:
        layer = PagedKV(H, D, key=name, dtype=dtype)
        layer.append(k, v)
        calls["fresh"] = lambda: fresh_time(copy, flat, threads)
        pool = _C.Pool(0, keep_bytes=2 * dense)
        calls["append"] = lambda: append_time(name, k, v, pool)
        calls["append new"] = lambda: append_time(name, k, v)
        calls["read"] = lambda: timed(layer.dense)
    try:
        codec = peers(dtype)[label][1]() if args.peer else torch_codec(name, D, dtype)
        if codec is not None:
            quantize, dequantize = codec
            kept = [quantize(x) for x in (k[:, :, :PAGE], v[:, :, :PAGE])]
            kept = [quantize(x) for x in (k, v)]
            calls[f"{label} quantize"] = lambda: timed(lambda: [quantize(x) for x in (k, v)])
            calls[f"{label} dequantize"] = lambda: timed(lambda: [dequantize(x) for x in kept])
    except Exception as error:
        return [{"format": name, "dtype": args.dtypes[0], "what": label, "skipped": f"{type(error).__name__}: {error}"}]
    times = rounds(calls, args.rounds)
    limit = dense / statistics.median(times["memcpy"]) / 1e9
    rows = [row(what, name, dtype, t, dense, limit) for what, t in times.items()]
    return [r for r in rows if not args.peer or r["what"] != "memcpy"]


def decode(name: str, dtype: torch.dtype, args: argparse.Namespace) -> dict:
    """One token per call over several pages: a call without and with a page to seal, and the sealing speed in GB/s."""
    layer = PagedKV(H, D, key=name, dtype=dtype)
    steps = PAGE * (4 if args.quick else 16)
    k, v = torch.randn(2, 1, H, PAGE + 4 + steps, D).to(dtype)
    layer.append(k[:, :, : PAGE + 4], v[:, :, : PAGE + 4])
    pairs = [(k[:, :, i : i + 1], v[:, :, i : i + 1]) for i in range(PAGE + 4, k.shape[2])]
    seconds = [timed(lambda p=pair: layer.append(*p)) for pair in pairs]
    seals = seconds[::PAGE]
    plain = statistics.median(s for i, s in enumerate(seconds) if i % PAGE)
    seal = statistics.median(seals) - plain
    page = 2 * PAGE * H * D * dtype.itemsize
    return {"format": name, "dtype": str(dtype).removeprefix("torch."), "what": "decode",
            "us a token": 1e6 * sum(seconds) / steps, "us plain": 1e6 * plain, "us seal": 1e6 * seal,
            "seal GB/s": page / seal / 1e9}  # fmt: skip


def show(rows: list[dict], step: dict) -> None:
    by = {r["what"]: r for r in rows}

    def cell_of(what: str, slow: str) -> str:
        r, text = by[what], f"{by[what]['GB/s']:6.2f} {by[what]['fraction']:5.2f}"
        text += f" ({r['p10_ms']:6.2f}-{r['p90_ms']:6.2f} ms)"
        return text + (f" {by[slow]['ms'] / r['ms']:6.1f}x" if slow in by else " " * 8)

    first = rows[0]
    print(f"{first['format']:<11}{first['dtype']:<9} {by['memcpy']['GB/s']:6.1f} {by['fresh']['GB/s']:6.1f} | "
          f"{cell_of('append', 'torch quantize')} {by['append new']['fraction']:4.2f} | "
          f"{cell_of('read', 'torch dequantize')} | {step['us a token']:7.1f} "
          f"{step['us seal']:7.1f} {step['seal GB/s']:6.2f}", flush=True)  # fmt: skip


def show_peer(rows: list[dict], own: list[dict]) -> None:
    """Rows of another library and of kvcompress, as fractions of the memcpy that each was timed with."""
    by = {r["what"]: r for r in own}
    for r in rows:
        if "skipped" in r:
            print(f"  {r['what']}: skipped: {r['skipped']}")
            continue
        ours = by["append" if r["what"].endswith(" quantize") else "read"]
        print(f"  {r['what']}: {r['GB/s']:.2f} GB/s, {r['fraction']:.2f} of memcpy; kvcompress is "
              f"{ours['fraction'] / r['fraction']:.1f}x as fast", flush=True)  # fmt: skip


def work(name: str, dtype: str, peer: str | None, args: argparse.Namespace) -> list[dict]:
    """The rows of one cell, from a separate process, so that threads of other libraries do not disturb other cells."""
    with tempfile.NamedTemporaryFile() as file:
        options = ["--threads", str(args.threads), "--rounds", str(args.rounds), "--megabytes", str(args.megabytes),
                   *(["--quick"] if args.quick else []), *(["--peer", peer] if peer else [])]  # fmt: skip
        # Bind threads in the worker only: bound here, its threads would share this core.
        command = [sys.executable, __file__, "--formats", name, "--dtypes", dtype, "--worker", file.name, *options]
        subprocess.run(command, check=True, env={**os.environ, "OMP_PROC_BIND": "true"})
        return json.loads(Path(file.name).read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--megabytes", type=int, default=64, help="of dense K and V together")
    parser.add_argument("--quick", action="store_true", help="5 rounds, no peers")
    parser.add_argument("--formats", nargs="*", default=[n for n in formats.NAMES if not n.startswith("raw_")])
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16", "float32"])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.rounds = min(args.rounds, 5)
    if args.worker:
        keep_memory()
        torch.set_num_threads(args.threads)
        name, dtype = args.formats[0], getattr(torch, args.dtypes[0])
        rows = cell(name, dtype, args, copy_function())
        Path(args.worker).write_text(json.dumps(rows if args.peer else [*rows, decode(name, dtype, args)]))
        return
    result: dict = {"machine": machine(), "heads": H, "head_dim": D, "megabytes": args.megabytes,
                    "load": os.getloadavg()[0], "cells": []}  # fmt: skip
    print(result["machine"], f"load {result['load']:.1f}")
    print(f"{'format':<11}{'dtype':<9} {'memcpy':>6} {'fresh':>6} | "
          f"{'append GB/s, of memcpy, p10-p90, x torch, new':<47} | "
          f"{'read GB/s, of memcpy, p10-p90, x torch':<42} | us/token us/seal GB/s", flush=True)  # fmt: skip
    for name in args.formats:
        for dtype in args.dtypes:
            own = work(name, dtype, None, args)
            show(own[:-1], own[-1])
            result["cells"] += own
            others = {} if args.quick or dtype != "bfloat16" else peers(torch.bfloat16)
            for peer in [label for label, (ours, _) in others.items() if ours == name]:
                rows = work(name, dtype, peer, args)
                show_peer(rows, own)
                result["cells"] += rows
    result["load_after"] = os.getloadavg()[0]
    level = "" if result["machine"]["isa"] == _C.isa_available()[-1] else "-" + result["machine"]["isa"]
    print("wrote", save(f"codecs{level}", result))


if __name__ == "__main__":
    main()
