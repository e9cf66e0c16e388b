"""Writes docs/cuda-speed.md and draws docs/cuda-speed.png from what `benchmarks/gpu.py` measured, where that was run;
part of `make docs`."""

from __future__ import annotations

import json
from pathlib import Path

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
FORMATS = ("raw", "int8", "fp8_e4m3", "int8/int4", "int4", "int2")
PEERS = {"flash": "torch, flash", "cudnn": "torch, cuDNN", "flex": "FlexAttention", "flashinfer": "FlashInfer",
         "flashinfer fp8": "FlashInfer, fp8"}  # fmt: skip


def picture(found: dict, path: Path, D: int = 128, B: int = 8) -> None:
    """Left: time of a decode step against the tokens, one shape. Right: the fraction of the read bandwidth, all."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in found["rows"] if "us" in row and row["T"] == 1]
    if not rows:  # errors alone
        return
    B = B if any(row["B"] == B for row in rows) else max(row["B"] for row in rows)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    for name in (*FORMATS, *PEERS):
        points = sorted(
            (row["S"], row["us"] / 1e3) for row in rows if (row["name"], row["B"], row["D"]) == (name, B, D)
        )
        if points:
            style = "--" if name in PEERS else "-"
            left.loglog(*zip(*points, strict=True), style, marker="o", markersize=3, label=PEERS.get(name, name))
    left.set(xlabel="tokens", ylabel="ms a decode step", title=f"{found['device']}, {B} sequences, 8 KV heads of {D}")
    left.grid(alpha=0.3, which="both")
    left.legend(fontsize=8)
    for name in FORMATS:
        points = sorted((row["us"] / 1e3, row["of read"]) for row in rows if row["name"] == name)
        right.semilogx(*zip(*points, strict=True), marker="o", markersize=3, linewidth=0.7, label=name)
    right.axhline(1, color="grey", linewidth=1)
    right.set(xlabel="ms a decode step", ylabel="of the read bandwidth", title="All shapes")
    right.set_ylim(0)
    right.grid(alpha=0.3)
    right.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


HEAD = """# Speed on a GPU
Made by `make docs` from the results of `python benchmarks/gpu.py` in `benchmarks/results`. {device}, torch {torch},
CUDA {cuda}; calls in CUDA graphs, medians of 30, each on different memory than the call before; 32 query heads on 8 KV
heads of 128 dims, bf16.

## Attention of a decode step
Microseconds, and the share of the bandwidth of a plain read of memory in the same run ({read:.0f} GB/s). Other systems
read bf16, except for FlashInfer's fp8 (0.6.13, pages of 64 tokens). x: not run.

"""


def decode(rows: list[dict]) -> str:
    """A table of shapes by names."""
    names = [*FORMATS, "flash", "cudnn", "flashinfer", "flashinfer fp8"]
    found = {(row["B"], row["S"], row["name"]): row for row in rows if (row["D"], row["T"]) == (128, 1) and "us" in row}
    lines = [
        f"| sequences x tokens | {' | '.join(PEERS.get(name, name) for name in names)} |",
        "|---" * (len(names) + 1) + "|",
    ]
    for B, S in sorted({key[:2] for key in found}):
        cells = [found.get((B, S, name)) for name in names]
        said = (f"{row['us']:.0f} ({100 * row['of read']:.0f}%)" if row else "x" for row in cells)
        lines.append(f"| {B} x {S:,} | {' | '.join(said)} |")
    steps = sorted({(B, S) for B, S, name in found if name.endswith(" step")})
    kinds = [name for name in FORMATS if f"{name} step" in {key[2] for key in found}]
    if not steps:
        return "\n".join(lines)
    lines += ["", "The same with a new token per sequence, written by a separate launch before attention "
              "(measured before decision 167, with the kernel that serves all kinds of writes):", "",
              f"| sequences x tokens | {' | '.join(kinds)} |", "|---" * (len(kinds) + 1) + "|"]  # fmt: skip
    for B, S in steps:
        said = (
            f"{found[B, S, f'{name} step']['us']:.0f}" if (B, S, f"{name} step") in found else "x" for name in kinds
        )
        lines.append(f"| {B} x {S:,} | {' | '.join(said)} |")
    return "\n".join(lines)


def long_calls(rows: list[dict]) -> str:
    lines = ["| | TFLOP/s |", "|---|---|"]
    lines += [
        f"| {row['name'].replace(' ours', ' kvcompress')} | {row['TFLOP/s']:.0f} |"
        for row in rows
        if row["T"] > 1 and "us" in row and row["name"] != "read"
    ]
    return "\n".join(lines)


def generated(found: dict) -> str:
    lines = ["| cache | MB | first token, ms | ms per token | relative to transformers' |", "|---|---|---|---|---|"]
    lines += [f"| {name} | {row['MB']:,.0f} | {row['first ms']:,.0f} | {row['ms']:.1f} | {row['of dynamic']:.2f} |"
              for name, row in found["rows"].items()]  # fmt: skip
    about = (f"{found['layers']} layers of Llama 3.1 8B's shape, a prompt of {found['prompt']:,} tokens, "
             f"{found['tokens']} new tokens, {found['turns']} measured turns.")  # fmt: skip
    return about + "\n\n" + "\n".join(lines)


def page(found: dict) -> str:
    rows = found["rows"]
    read = max(row["GB/s"] for row in rows if row["name"] == "read")
    parts = [HEAD.format(read=read, **{key: found[key] for key in ("device", "torch", "cuda")}) + decode(rows),
             "## Long calls\n2,048 tokens over 32,768 of one sequence: the kernels of kvcompress and of torch, and a "
             "whole layer with\ntorch's kernels (the default; and each separately) and with those of kvcompress.\n\n"
             + long_calls(rows)]  # fmt: skip
    for name, title in (
        ("generate-cuda", "`generate`, uncompiled"),
        ("generate-compiled-cuda", "`generate`, compiled to CUDA graphs"),
    ):
        path = RESULTS / f"{name}.json"
        if path.exists():
            parts.append(f"## {title}\n{generated(json.loads(path.read_text()))}")
    return "\n\n".join(parts) + "\n"


def write() -> None:
    measured = RESULTS / "attention-cuda.json"
    if measured.exists():
        found = json.loads(measured.read_text())
        picture(found, DOCS / "cuda-speed.png")
        (DOCS / "cuda-speed.md").write_text(page(found))
