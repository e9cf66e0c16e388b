"""Writes docs/speed.md and its pictures from what benchmarks/attention.py, benchmarks/peers/run.py and
benchmarks/codecs.py measured; part of `make docs`."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
REFERENCE = "amd-epyc-family-25"  # the machine that the tables are of
NAMES = {
    "amd-epyc-family-25": "Zen 4",
    "amd-epyc-family-26": "Zen 5",
    # By its caches (64 KB of L1I, 480 MB of L3): the host hides brand and model.
    "intel-r-xeon-r-processor-family-6-model-167": "Granite Rapids",
}  # the others are called by their file
HEAD = """# Speed of attention on a CPU
Made by `make docs` from the results of `make bench` and `make bench-peers`, on an {cpu} ({name}, {isa}), {threads}
threads, 8 KV heads of 128 dims, pages of 64 tokens, bf16 queries. Medians of {rounds} calls. Before each call a plain
streaming kernel reads 256 MB on the same threads ({read:.1f} GB/s at 32K), so that neither data nor code is in a CPU
cache, as after reading a layer's weights. torch's dispatch and the setup of the op then take the same time at every
length, which matters most for short contexts. Fractions are relative to the read bandwidth in the same quartile of
rounds.
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
                      f"{r['sdpa bf16 folded']['ms']:.2f}" if "sdpa bf16 folded" in r else "-",
                      f"{r['read']['GB/s']:.0f}"])  # fmt: skip
    head = ["tokens x sequences, level, threads", *(f"`{n}`" for n in ORDER), "torch SDPA bf16, heads folded manually",
            "memory, GB/s"]  # fmt: skip
    return (
        "## Decode\nms (fraction of the read bandwidth). Smaller pages are faster, in proportion to their bytes where\n"
        "memory is the bottleneck; with eight query heads per KV head, with AVX2, or with one thread, arithmetic is.\n"
        "The memory bandwidth of two cores depends on the load of the host; where it is twice as high, formats of\n"
        "8 bits and fewer are bound by arithmetic too.\n\n" + table(head, lines)
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
                added = {n: r[f"{n} with accumulated attention"]["overhead"] for n in names}
                ours = [f"{r[n]['ms']:.2f} ({added[n]:+.0%})" for n in names]
                lines.append([f"{T}", *ours, f"{r['sdpa bf16']['ms']:.1f}"])
    head = ["new tokens", "`raw`", "`int8`", "`fp8_e4m3`", "`int4`", "`int2`", "torch SDPA bf16"]
    return "## Chunks\nms for new tokens after 4,096, in one call (added by accumulated attention).\n\n" + table(
        head, lines
    )


def accumulated(cells: list[dict]) -> str:
    lines = [
        [f"{cell['S']:,}", *(f"{row['overhead']:+.1%}" for row in cell["rows"])] for cell in of(cells, "accumulated")
    ]
    (cell,) = of(cells, "step")
    step = cell["rows"][0]
    return (
        "## Accumulated attention (H2O), and a step\nTime added to a decode step:\n\n"
        + table(["tokens", "`raw`", "`int8`", "`int4`"], lines)
        + f"\nUnder transformers a layer's step (`update` and the attention function, {cell['S']} tokens, one thread) "
        f"takes {1e3 * step['ms']:.1f} us: {step['op us']:.1f} for the op (torch's dispatch and the kernels), "
        f"{step['overhead us']:.1f} around it.\n"
    )


def peers(found: dict) -> str:
    names = {"8K": "8K", "32K": "32K", "8x4K": "8 x 4K", "chunk": "512 at 4K"}
    systems = list(dict.fromkeys((c["system"], c["config"]) for c in found["cells"] if c["shape"] in names))
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
        lines.append([f"**fastest other system / `{name}`**", *ours])
    machine = NAMES.get(found["machine"], found["machine"])
    return f"On a {machine}, {found['threads']} threads, {found['rounds']} rounds:\n\n" + table(
        ["", *(f"{n} tokens" if n != "512 at 4K" else "chunk of " + n for n in names.values())], lines
    )


def all_peers() -> str:
    found = [json.loads(path.read_text()) for path in sorted((RESULTS / "peers").glob("*.json"))]
    return (
        "## Comparison with other systems\n`make bench-peers`: the same shapes, alternating, lowest median "
        "of all rounds, ms. There is a single copy of the data, so 8K tokens (on some machines all lengths) fit in the "
        "last-level cache. Ratios are relative to the fastest of the others at any precision.\n\n"
        + "\n".join(peers(x) for x in found)
    )


def latent_peers(found: dict) -> str:
    cells = found["cells"]
    ours = {c["config"]: c["ms"] for c in cells if c["system"] == "kvcompress"}
    lines = [[f"{c['system']} {c['config']}", f"{c['MB']:.1f}", f"{c['ms']:.2f}",
              *(f"{c['ms'] / ours[name]:.1f}x" for name in ("raw", "int8", "int4"))] for c in cells]  # fmt: skip
    _, heads, _, dim, tokens, _ = cells[0]["sizes"]
    return (
        f"Latents (MLA), on a {NAMES.get(found['machine'], found['machine'])}, {found['threads']} threads, lowest "
        f"median of {found['rounds']} rounds: {heads} query heads on one KV head of {dim} dims, whose first 512 are V, "
        f"{tokens:,} tokens. ggml as used by llama.cpp: V is a view of K. kvcompress stores the rotary part in `int8` "
        "(with `raw`: in bf16). OpenVINO and ONNX Runtime do not support it.\n\n"
        + table(["", "MB", "ms", "`raw` is faster", "`int8`", "`int4`"], lines)
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
        f"## Codecs\n`make bench-codecs`, on a Zen 5: {found['megabytes']} MB of dense K and V to sealed pages and "
        f"back, {found['machine']['threads']} threads: GB/s of dense bytes (fraction of a memcpy of the same bytes, in "
        "the same rounds). *New*: to newly allocated memory, for which a plain copy reaches "
        f"{fresh:.2f}. The last column is the speed of append / read relative to the same arithmetic in torch ops "
        "(`torch`), and to libraries with similar functions.\n\n"
        + table(["", "append", "read", "append, new", "times as fast as"], lines)
        + "\nTargets that were missed. At least 0.6 of memcpy for these three: "
        + ("; ".join(slow) or "none")
        + ". At least 10 times torch: "
        + ("; ".join(near) or "none")
        + ". If torch reaches a tenth of memcpy or more, ten times its speed exceeds the memory bandwidth.\n"
    )


def pictures(cells: list[dict]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    lengths = [c for c in cells if c["what"] == "length" or (c["what"] == "decode" and c["S"] in (8192, 32768)
               and (c["B"], c["G"], c["threads"]) == (1, 4, 2) and c["isa"] not in ("avx2", "avxvnni"))]  # fmt: skip
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


def wide(cells: list[dict]) -> str:
    parts, narrow = [], "of 128's"
    for cell in of(cells, "wide"):
        r = {name: row for name, row in rows(cell).items() if name != "read"}
        lines = [[f"`{name}`", f"{row['ms']:.2f}", f"{row['GB/s']:.1f}", f"{row[narrow]:.2f}"]
                 for name, row in r.items()]  # fmt: skip
        parts.append(
            f"## Wide heads\nThe same bytes in heads of 128 and of 512 dims, {cell['S']:,} tokens, GQA {cell['G']}.\n\n"
            + table(["format x head dim", "ms", "GB/s", "relative to heads of 128"], lines)
        )
    return "\n".join(parts)


def latents(cells: list[dict]) -> str:
    parts = []
    for cell in of(cells, "latent"):
        r = rows(cell)
        vnni, bf16 = r["VNNI"]["GMAC/s"], r["BF16"]["GMAC/s"]
        lines = []
        for name, row in r.items():
            if "x transformers" in row:
                counted = "GMAC/s" in row
                lines.append([f"`{name}`", f"{row['ms']:.1f}", f"{row['x transformers']:.0f}x",
                              f"{row['GMAC/s']:.0f}" if counted else "-",
                              *(f"{row[of]:.2f}" if of in row else "-" for of in ("of VNNI", "of BF16"))])  # fmt: skip
        parts.append(
            f"## Latents (MLA)\n{cell['G']} query heads on latents of 512 + 64 dims, {cell['S']:,} tokens, one layer's "
            f"decode step; latent / rotary part. transformers expands the context: {r['transformers']['ms']:.0f} ms. "
            "*Absorbed*: including the projections of q and of the output. This machine performs "
            f"{vnni:.0f} G 8-bit multiply-adds per second (VNNI) and {bf16:.0f} G in bf16, measured in the same run. "
            "`raw` and `fp8` use bf16, the others 8 bits.\n\n"
            + table(["", "ms", "faster than transformers", "GMAC/s", "of VNNI", "of BF16"], lines)
        )
    return "\n".join(parts)


def path(cells: list[dict]) -> str:
    found = of(cells, "path")
    if not found:
        return ""
    layers = [{name: row for name, row in rows(cell).items() if "op ms" in row} for cell in found]
    lines = [[f"{cell['S']:,}", *(f"{row['op ms']:.2f} / {row['ms']:.2f}" for row in r.values())]
             for cell, r in zip(found, layers, strict=True)]  # fmt: skip
    python = statistics.median(row["ms"] - row["op ms"] for r in layers for row in r.values())
    return (
        "## Step of a model's layer\nms of the op alone / of `KVCache.update` and the attention function, pages of a "
        f"growing pool. Python adds\nabout {python:.2f} ms at every length, as its code is not in the CPU's caches "
        "here.\n\n" + table(["tokens", *(f"`{name}`" for name in layers[0])], lines)
    )


def few_bits(cells: list[dict]) -> str:
    """Formats of few bits, calibrated or not, over int4 and cal2 over int2, in a layer's whole step."""
    lines = []
    for cell in of(cells, "few bits"):
        r = {name: row for name, row in rows(cell).items() if "op ms" in row}
        over = {name: row["ms"] / r["int2" if name == "cal2" else "int4"]["ms"] for name, row in r.items()}
        lines.append([cell["isa"], *(f"{row['op ms']:.2f} / {row['ms']:.2f}"
                                     + ("" if name in ("int4", "int2") else f" ({over[name]:.2f}x)")
                                     for name, row in r.items())])  # fmt: skip
    if not lines:
        return ""
    return (
        "## Formats of few bits\nThe same for 32,768 tokens and 4 query heads per KV head: ms of the op alone / of a "
        "layer's step (relative to `int4`;\n`cal2` relative to `int2`). With a calibration, q, K, V and the output are "
        "mapped between bases.\n\n" + table(["level", *(f"`{name}`" for name in r)], lines)
    )


def machines() -> str:
    """The same cells on every CPU that was measured."""
    names = [name for name in ORDER if name != "int4_asym"]
    lines = []
    for file in sorted((RESULTS / "attention").glob("*.json")):
        cells = json.loads(file.read_text())["cells"]
        for cell in of(cells, "decode") + of(cells, "levels") + of(cells, "warm"):
            narrow = cell["isa"] in ("avx2", "avxvnni")
            if cell["B"] > 1 or (cell["what"] == "decode" and (narrow or cell["threads"] == 1)):
                continue
            shown = []
            for row in map(rows(cell).get, names):
                row = row or {}
                cycles = f"{row['cycles']:.0f}" if "cycles" in row else ""
                share = f"({row['of read']:.2f})" if "of read" in row else ""
                shown.append(f"{cycles} {share}".strip() or "-")
            where = "in cache" if cell["what"] == "warm" else "cold"
            shape = f"{cell['S']:,}, {where}, GQA {cell['G']}, {cell['isa']}, {cell['threads']}"
            read = rows(cell).get("read")
            memory = f"{read['GB/s']:.0f}" if read and cell["what"] != "warm" else ""
            lines.append([NAMES.get(file.stem, file.stem), shape, *shown, memory])
    return (
        "## Comparison of machines\nCore cycles per token and KV head (fraction of the read bandwidth). Cycles are "
        "comparable between machines; fractions\nwithout cycles are from an earlier measurement with torch's code in "
        "the caches.\n\n" + table(["CPU", "tokens, level, threads", *(f"`{n}`" for n in names), "memory, GB/s"], lines)
    )


def page() -> str:
    """The text alone."""
    found = json.loads((RESULTS / "attention" / f"{REFERENCE}.json").read_text())
    cells, machine = found["cells"], found["machine"]
    read = rows(of(cells, "decode")[0])["read"]["GB/s"]
    parts = [
        HEAD.format(**machine, name=NAMES[REFERENCE], read=read, rounds=found["rounds"]),
        decode(cells),
        "![Time against length and bytes](speed.png)\n",
        others(cells),
        chunks(cells),
        accumulated(cells),
        wide(cells),
        latents(cells),
        path(cells),
        few_bits(cells),
        machines(),
        all_peers(),
    ]
    parts += [
        part(json.loads((RESULTS / name).read_text()))
        for name, part in (("peers_latent.json", latent_peers), ("codecs.json", codecs))
    ]
    return "\n".join(part for part in parts if part)


def write() -> None:
    found = json.loads((RESULTS / "attention" / f"{REFERENCE}.json").read_text())
    pictures(found["cells"])
    (DOCS / "speed.md").write_text(page())
