"""Writes docs/speed.md and its pictures from what benchmarks/attention.py, benchmarks/peers/run.py and
benchmarks/codecs.py measured; part of `make docs`."""

from __future__ import annotations

import json
from pathlib import Path

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
REFERENCE = "attention/amd-epyc-family-26"  # the machine that the tables are of
HEAD = """# Speed of attention on a CPU
Made by `make docs` from the results of `make bench` and `make bench-peers`, on an {cpu} ({isa}), {threads} threads,
8 KV heads of 128 dims, pages of 64 tokens, bf16 queries. `read`: what a plain streaming kernel of as many threads reads
in the same minutes, {read:.1f} GB/s at 32K. Every call reads other pages than the one before. Medians of {rounds}
interleaved calls. The figures of one run go together; the machine's memory is shared with others: a fraction above 1
says that it was faster in a call's minutes than in the limit's.
"""
ORDER = ("raw bf16", "int8", "fp8_e4m3", "int4", "int4_asym", "int2")


def table(head: list[str], lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *lines]) + "\n"


def of(cells: list[dict], what: str) -> list[dict]:
    return [c for c in cells if c["what"] == what]


def rows(cell: dict) -> dict[str, dict]:
    return {r["name"]: r for r in cell["rows"]}


def decode(cells: list[dict]) -> str:
    lines = []
    for cell in of(cells, "decode"):
        r = rows(cell)
        shape = f"{cell['S']:,} x {cell['B']}, GQA {cell['G']}, {cell['isa']}, {cell['threads']}"
        lines.append([shape, *(f"{r[n]['ms']:.2f} ({r[n]['of read']:.2f})" for n in ORDER),
                      f"{r['sdpa bf16 folded']['ms']:.2f}" if "sdpa bf16 folded" in r else "-"])  # fmt: skip
    head = ["tokens x sequences, level, threads", *(f"`{n}`" for n in ORDER), "torch SDPA bf16, heads folded by hand"]
    return (
        "## Decode\nms (fraction of the read bandwidth). Smaller pages are faster, in proportion to their bytes where\n"
        "memory is waited for; eight query heads to a KV head, AVX2 alone and one thread are bound by arithmetic.\n\n"
        + table(head, lines)
    )


def others(cells: list[dict]) -> str:
    (cell,) = of(cells, "all formats")
    r = rows(cell)
    bits = {8: "int8", 4: "int4", 2: "int2"}
    lines = []
    for name, row in r.items():
        if name == "read":
            continue
        tuned = next((bits[b] for b in bits if str(b) in name.replace("g32", "").replace("e4m3", "")), "raw bf16")
        speed = "-" if name in (*bits.values(), "raw bf16") else f"{r[tuned]['ms'] / row['ms']:.2f} of `{tuned}`"
        lines.append([f"`{name}`", f"{row['ms']:.2f}", f"{row['of read']:.2f}", f"{row['vs raw']:.2f}", speed])
    head = ["32K tokens", "ms", "of read", "time / raw bf16", "speed"]
    return "## All formats\n" + table(head, lines)


def chunks(cells: list[dict]) -> str:
    lines = []
    for what in ("verify", "chunk"):
        for cell in of(cells, what):
            for T in dict.fromkeys(row["T"] for row in cell["rows"]):
                r = {row["name"]: row for row in cell["rows"] if row["T"] == T}
                names = ("raw", "int8", "fp8_e4m3", "int4", "int2")
                added = {n: r[f"{n} with mass"]["mass overhead"] for n in names}
                ours = [f"{r[n]['ms']:.2f} ({added[n]:+.0%})" for n in names]
                lines.append([f"{T}", *ours, f"{r['sdpa bf16']['ms']:.1f}"])
    head = ["new tokens", "`raw`", "`int8`", "`fp8_e4m3`", "`int4`", "`int2`", "torch SDPA bf16"]
    return (
        "## Chunks\nNew tokens behind 4,096, stored and attended in one call, ms (what accumulating it adds).\n\n"
        + table(head, lines)
    )


def mass(cells: list[dict]) -> str:
    lines = [[f"{cell['S']:,}", *(f"{row['overhead']:+.1%}" for row in cell["rows"])] for cell in of(cells, "mass")]
    (cell,) = of(cells, "step")
    step = cell["rows"][0]
    return (
        "## Accumulated attention (H2O), and a step\nWhat asking for it adds to a decode step:\n\n"
        + table(["tokens", "`raw`", "`int8`", "`int4`"], lines)
        + f"\nUnder transformers a layer's step (`update` and the attention function, {cell['S']} tokens, one thread) "
        f"takes {1e3 * step['ms']:.1f} us: {step['op us']:.1f} for the op (torch's dispatch and the kernels), "
        f"{step['overhead us']:.1f} around it.\n"
    )


def peers(found: dict) -> str:
    names = {"8K": "8K", "32K": "32K", "8x4K": "8 x 4K", "chunk": "512 at 4K"}
    systems = list(dict.fromkeys((c["system"], c["config"]) for c in found["cells"]))
    ms = {(c["shape"], c["system"], c["config"]): c["ms"] for c in found["cells"]}
    lines = []
    for system, config in systems:
        cells = []
        for shape in names:
            t = ms.get((shape, system, config))
            cells.append(f"{t:.2f}" if t else "-")
        lines.append([f"{system} {config}", *cells])
    best = {shape: min(t for (s, system, _), t in ms.items() if s == shape and system not in ("kvcompress",))
            for shape in names}  # fmt: skip
    for name in ("int8", "int4"):
        ours = (f"{best[shape] / ms[shape, 'kvcompress', name]:.1f}x" for shape in names)
        lines.append([f"**the best of the others / `{name}`**", *ours])
    return (
        f"## Beside other systems\n`make bench-peers`: the same shapes, in turn, lowest median of {found['rounds']} "
        "rounds, ms. One copy of the data, so that 8K lies in the last cache. The best of the others at any precision "
        "is the comparison.\n\n"
        + table(["", *(f"{n} tokens" if n != "512 at 4K" else "chunk of " + n for n in names.values())], lines)
    )


TUNED = ("int8", "fp8_e4m3", "int4")


def codecs(found: dict) -> str:
    lines, slow, near = [], [], []
    for name, dtype in dict.fromkeys((c["format"], c["dtype"]) for c in found["cells"]):
        r = {c["what"]: c for c in found["cells"] if (c["format"], c["dtype"]) == (name, dtype)}
        faster = []
        for other in [what.removesuffix(" quantize") for what in r if what.endswith(" quantize")]:
            append = r["append"]["fraction"] / r[f"{other} quantize"]["fraction"]
            read = r["read"]["fraction"] / r[f"{other} dequantize"]["fraction"]
            faster.append(f"{other}: {append:.1f} / {read:.1f}")
            if name in TUNED and other == "torch":
                near += [f"`{name}` {dtype} {x} {n:.1f}" for x, n in (("append", append), ("read", read)) if n < 10]
        if name in TUNED:
            slow += [
                f"`{name}` {dtype} {x} {r[x]['fraction']:.2f}" for x in ("append", "read") if r[x]["fraction"] < 0.6
            ]
        speeds = [f"{r[what]['GB/s']:.1f} ({r[what]['fraction']:.2f})" for what in ("append", "read", "append new")]
        lines.append([f"`{name}`, {dtype}", *speeds, "; ".join(faster) or "-"])
    fresh = next(c["fraction"] for c in found["cells"] if c["what"] == "fresh")
    return (
        f"## Codecs\n`make bench-codecs`: {found['megabytes']} MB of dense K and V to sealed pages and back, "
        f"{found['machine']['threads']} threads: GB/s of dense bytes (fraction of a memcpy of the same bytes, in the "
        "same rounds). *New*: to memory that is new from the system, of which a plain copy fills "
        f"{fresh:.2f}. Then how many times as fast as others we append / read: the same arithmetic in torch ops "
        "(`torch`), libraries that offer something alike.\n\n"
        + table(["", "append", "read", "append, new", "times as fast as"], lines)
        + "\nAimed at and missed here. At least 0.6 of memcpy for these three: "
        + ("; ".join(slow) or "none")
        + ". At least 10 times torch: "
        + ("; ".join(near) or "none")
        + ". Where torch's own pass reaches a tenth of memcpy or more, ten times it is more than memory gives.\n"
    )


def pictures(cells: list[dict]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    lengths = [c for c in cells if c["what"] == "length" or (c["what"] == "decode" and c["S"] in (8192, 32768)
               and (c["B"], c["G"], c["threads"]) == (1, 4, 2) and c["isa"] != "avx2")]  # fmt: skip
    lengths.sort(key=lambda c: c["S"])
    for name in ("raw bf16", "int8", "fp8_e4m3", "int4", "int2", "sdpa bf16 folded"):
        points = [(c["S"], rows(c)[name]["ms"]) for c in lengths if name in rows(c)]
        style = "--" if name.startswith("sdpa") else "-"
        left.loglog(*zip(*points, strict=True), style, marker="o", markersize=3, label=name)
    left.set(xlabel="tokens", ylabel="ms a decode step", title="32 query, 8 KV heads of 128, 2 threads, cold")
    left.grid(alpha=0.3, which="both")
    left.legend(fontsize=8)
    (cell,) = of(cells, "all formats")
    r = rows(cell)
    limit = r["read"]["GB/s"]
    for name, row in r.items():
        if name != "read":
            right.plot(row["MB"], row["ms"], "o", color="C0")
            at = {"fp8_e5m2": (-44, -2), "int8": (5, 4), "int4_token": (-52, -3), "int4_g32": (5, -6), "int4": (5, -8),
                  "nvfp4": (-30, 3), "fp8_e4m3": (5, -9)}.get(name, (5, 2))  # fmt: skip
            right.annotate(name, (row["MB"], row["ms"]), fontsize=7, xytext=at, textcoords="offset points")
    most = max(row["MB"] for name, row in r.items() if name != "read")
    right.plot([0, most], [0, most / limit], color="grey", linewidth=1, label=f"read at {limit:.0f} GB/s")
    right.set(xlabel="MB read", ylabel="ms", title="All formats, 32K tokens: time against bytes")
    right.set_xlim(0, most * 1.15)
    right.set_ylim(0)
    right.grid(alpha=0.3)
    right.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(DOCS / "speed.png", dpi=110)


def page() -> str:
    found = json.loads((RESULTS / f"{REFERENCE}.json").read_text())
    cells, machine = found["cells"], found["machine"]
    first = rows(of(cells, "decode")[0])
    text = HEAD.format(**machine, read=first["read"]["GB/s"], rounds=found["rounds"])
    parts = [
        text,
        decode(cells),
        "![Time against length and bytes](speed.png)\n",
        others(cells),
        chunks(cells),
        mass(cells),
    ]
    pictures(cells)
    parts += [
        part(json.loads((RESULTS / name).read_text()))
        for name, part in (("peers.json", peers), ("codecs.json", codecs))
    ]
    return "\n".join(parts)
