"""A short benchmark on this machine: decode steps of one attention layer, for each format and context length."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from ... import _C
from ... import formats as table
from ...layer import PagedKV
from ..regression import break_even, fit

FORMATS = ("raw", "int8", "fp8_e4m3", "int4", "int2")


def _filled(name: str, tokens: int, heads: int, dim: int) -> PagedKV:
    store = PagedKV(heads, dim, key=name, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    for at in range(0, tokens, 4096):
        x = torch.randn(2, 1, heads, min(4096, tokens - at), dim, generator=generator).bfloat16()
        store.append(x[0], x[1])
    return store


def bench(
    formats: Sequence[str] = FORMATS, lengths: Sequence[int] = (1024, 4096, 16384), *, heads: int = 8, group: int = 4,
    dim: int = 128, rounds: int = 21, progress: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Times decode steps of one layer, in ms: medians of `rounds` calls; each round runs all formats.

    Args:
        formats: names of page formats. lengths: numbers of tokens in the cache. heads: KV heads; group: query heads per
            KV head; dim: head dim, up to 576. rounds: timed calls per format and length. progress: show a progress bar.

    Returns {"machine", "shape", "rows": [{"format", "tokens", "ms", "p10_ms", "p90_ms", "bytes"}], "lines": {format:
    {"ms", "ms_per_token", "break_even"}}}; lines: intercept and slope of a linear fit of the medians, and the number of
    tokens from which the format is faster than raw. CPU caches are warm; for cold ones see benchmarks/attention.py.
    Raises ValueError for unknown formats and values out of range.
    """
    from tqdm import tqdm

    if rounds < 5 or not lengths or min(lengths) < 64:
        raise ValueError(f"bench: expected at least 5 rounds and lengths of at least 64, got {rounds}, {list(lengths)}")
    if unknown := sorted({*formats} - {"raw", *table.NAMES}):
        raise ValueError(f"bench: formats: expected names among {', '.join(table.NAMES)}, got {', '.join(unknown)}")
    rows: list[dict[str, Any]] = []
    bar = tqdm(total=len(lengths) * rounds, desc="bench", unit="round", disable=not progress)
    for tokens in lengths:
        stores = {name: _filled(name, tokens, heads, dim) for name in formats}
        q = torch.randn(1, heads * group, 1, dim, generator=torch.Generator().manual_seed(1)).bfloat16()
        times: dict[str, list[float]] = {name: [] for name in formats}
        for store in stores.values():
            store.attend(q)
        for turn in range(rounds):
            order = list(stores) if turn % 2 else list(reversed(stores))
            for name in order:
                start = time.perf_counter()
                stores[name].attend(q)
                times[name].append(1e3 * (time.perf_counter() - start))
            bar.update()
        for name, found in times.items():
            tenth = statistics.quantiles(found, n=10, method="inclusive")
            rows.append({"format": name, "tokens": tokens, "ms": statistics.median(found), "p10_ms": tenth[0],
                         "p90_ms": tenth[-1], "bytes": stores[name].stats()["bytes"]})  # fmt: skip
    bar.close()
    lines: dict[str, Any] = {}
    fits = {name: fit([(r["tokens"], r["ms"]) for r in rows if r["format"] == name]) for name in formats}
    for name, line in fits.items():
        even = break_even(fits["raw"], line) if "raw" in fits and len(lengths) > 1 else None
        lines[name] = {"ms": line[0], "ms_per_token": line[1], "break_even": even}
    machine = {
        "isa": _C.isa(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "kvcompress": _C.__version__,
    }
    shape = {"kv_heads": heads, "query_heads": heads * group, "dim": dim, "rounds": rounds}
    return {"machine": machine, "shape": shape, "rows": rows, "lines": lines}


def show(found: dict[str, Any]) -> str:
    """The result of `bench` as a text table, in ms."""
    from ..evaluation.report import grid

    lengths = sorted({row["tokens"] for row in found["rows"]})
    cells = {(row["format"], row["tokens"]): row for row in found["rows"]}
    lines = []
    for name in found["lines"]:
        some = [cells[name, n] for n in lengths]
        even = found["lines"][name]["break_even"]
        known = name != "raw" and "raw" in found["lines"] and len(lengths) > 1
        said = "-" if not known else "never" if even is None else f"{even:,.0f}"
        lines.append([name, *(f"{c['ms']:.3f} ({c['p10_ms']:.3f}-{c['p90_ms']:.3f})" for c in some), said])
    m, s = found["machine"], found["shape"]
    head = (
        f"{m['isa']}, {m['threads']} threads; {s['query_heads']} query and {s['kv_heads']} KV heads of {s['dim']}, bf16"
    )
    table = grid(["ms a step", *(f"{n:,} tokens" for n in lengths), "faster than raw from"], lines)
    return f"{head}; medians of {s['rounds']} (10th-90th percentile)\n{table}"
