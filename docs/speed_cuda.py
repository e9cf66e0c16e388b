"""Draws docs/cuda-speed.png from what `benchmarks/attention.py --device cuda` measured, where that was run; part of
`make docs`."""

from __future__ import annotations

import json
from pathlib import Path

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
OURS = ("raw", "int8", "fp8_e4m3", "int8/int4", "int4", "int2")
PEERS = {"flash": "torch, flash", "cudnn": "torch, cuDNN", "flex": "FlexAttention"}


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
    for name in (*OURS, *PEERS):
        points = sorted(
            (row["S"], row["us"] / 1e3) for row in rows if (row["name"], row["B"], row["D"]) == (name, B, D)
        )
        if points:
            style = "--" if name in PEERS else "-"
            left.loglog(*zip(*points, strict=True), style, marker="o", markersize=3, label=PEERS.get(name, name))
    left.set(xlabel="tokens", ylabel="ms a decode step", title=f"{found['device']}, {B} sequences, 8 KV heads of {D}")
    left.grid(alpha=0.3, which="both")
    left.legend(fontsize=8)
    for name in OURS:
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


def write() -> None:
    measured = RESULTS / "attention-cuda.json"
    if measured.exists():
        picture(json.loads(measured.read_text()), DOCS / "cuda-speed.png")
