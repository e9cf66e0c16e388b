"""Writes docs/formats.md from the format table and the results of benchmarks/formats.py and lengths.py, and
docs/speculation.md, docs/speed.md, docs/plan.md, docs/faq.md; docs/cuda-speed.png if there are results of a GPU; and
kvcompress/tools/plan/measured.json."""

import itertools
import json
from pathlib import Path

import latents
import planning
import speculation
import speed
import speed_cuda

from kvcompress import formats
from kvcompress.tools.plan import evidence

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
MODELS = {
    "books-tiny": "plain keys",
    "books-tiny-bias": "biased keys, as Qwen2's",
    "books-tiny-sinks": "attention sinks",
    "books-tiny-gqa8": "eight query heads, one KV head of 128 dims",
}
HEAD = """# Formats
Made by `make docs` from `csrc/core/formats.def` and from the results of `make formats`.

A format name selects that format for K and V of every layer, with 4 raw sinks and a raw open page. `key=` and
`value=` select them separately; `"int8/int4"` is short for K in `int8` and V in `int4`. `raw` is the model's dtype.
Formats can also differ by position and by layer:

```python
from kvcompress import KVCache
from transformers import AutoConfig

config = AutoConfig.from_pretrained("assets/books-tiny")
KVCache(config, key="int8", value="int4")
KVCache(config, "int4", spans=[(0, 0.2, "int8"), (0.2, 1, "int4")])  # fractions of the prompt, or tokens
KVCache(config, "int4", per_layer={0: "int8", -1: "int8/int4"})
KVCache(config, "int4", guard=True)  # K in at least the bits of V; first and last layer in 8 bits
KVCache(config, "int4", strict=True)  # an error, not a warning, where the model's K breaks the format
```

## Which format to use
- **8 bits:** `int8` loses almost nothing.
- **4 bits:** `int4`. It rotates rows, which spreads outliers, and subtracts the mean key of each page, which removes
  biases of K. `int4_lloyd` has the same size and a lower error: its levels fit a Gaussian (Lloyd-Max), each row uses
  the best of three step sizes, and its gain preserves the row's length. `kivi4` for K (`kivi4/int4`, same size) is as
  good as `int4`, and better where K has outlier channels. `int4_token`, `int4_asym`, `nvfp4` and `mxfp4` correspond
  to formats of other engines; they do not suit biased keys, and warn about them.
- **3 bits:** `int3`, as `int4_lloyd` with 8 levels (head dims are padded to a multiple of 32).
- **2 bits:** give K more bits (`int4/int2`), use `guard=True`, or calibrate (`cal2`).

The pages of `int4`, `int4_lloyd`, `int3`, `int2`, `cal2`, `kivi4` and `kivi2` have statistics over the page, so
tokens cannot be moved out of them without requantization (*page-bound* below); this matters to
[eviction](eviction.md).

**Calibrated formats: `cal2`.** `kvcompress calibrate MODEL --text FILE -o model.kvcal` reads up to 16,384 tokens
(repeat `--text` for texts of several kinds, which are read in equal parts) and writes a linear map of K and one of V
for each layer and KV head: principal axes, weighted by how much an error in stored K or V changes the attention
output, given the queries and the output projection. `KVCache(config, "cal2", calibration="model.kvcal")` applies the
maps to K and V before they are stored, and to q and the output once per call; attention is unchanged up to rounding
(in bfloat16, of the mapped rows). `cal2` uses 4 bits for a quarter of the axes, 2 bits for half of them and none for
the last quarter. It has the size of `int2` and uses its kernels.

Other formats accept a calibration too (`int4_lloyd`, `int3`, ...). Their axes are scaled to minimize the quantization
error, and on a CPU the codes of a row are chosen one after another, each compensating for the errors of the previous
ones (error feedback: Babai's nearest plane algorithm, which GPTQ uses for weights). Pages keep their size and
kernels; writing takes longer. On a GPU each number is rounded to the nearest code. A calibration makes formats nearly
insensitive to outliers of K. Calibrate on text similar to what will be cached.

A calibration file belongs to one model. The config is checked when the cache is created. The weights of each layer
are checked at its first call if `enable(model)` was called; without it, a cache never sees the weights, and another
model of the same config goes unnoticed. `cache.bind(model)` checks all weights at once, with or without `enable`,
where q, k and v have separate projections; `patch_generate` does so before the first token. (For a model loaded in
float16, calibrate in float16.) Another model raises ValueError, and so does `cal2` without a file.
`KVCache.load(path, config, calibration=)` needs the file that the saved cache used. Not supported: `cal2` in vLLM; a
calibration with `group=`, latent attention, `positions="cache"`, or tensor parallelism (the heads of a rank are not
those of the file); layers with a sliding window.

**When the keys do not suit the format.** The first call of 64 tokens or more is checked before anything is stored:
the error that quantization adds to K must not exceed a quarter of the variation of K over the tokens. (A mean that
all keys share does not count, since it changes all scores equally.) Otherwise a warning names the layers, or, with
`strict=True`, ValueError is raised. The column *K noise* shows the worst head of the shipped models.

## All
"""
MATRIX_TAIL = """
*Effective* bits per element include all metadata of a page of 64 tokens at head dim 128. Tokens of *movable* formats
can be moved to another page without requantization; *page-bound* ones cannot, because the metadata of K (a centroid,
channel scales) belongs to the page. `python -m kvcompress formats` (`--json`) prints this table.
Every format is supported by the attention op at every kernel level, with identical bytes. Head dims of up to 576 are
supported; dims that a format does not take are padded, and the padding is counted.
"""


def kl(row: dict) -> str:
    return f"{row['kl']:.1e} ({row['kl_low']:.0e}-{row['kl_high']:.0e})"


def dppl(row: dict) -> str:
    return f"{row['ppl'] - row['ppl_reference']:+.2f} ({row['dppl_low']:+.2f} to {row['dppl_high']:+.2f})"


def table(head: list[str], lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *lines])


def measured(found: dict) -> str:
    """A table per model: quality without and with outliers in K."""
    about, parts = found["about"], []
    windows = " or ".join(map(str, sorted({r["windows"] for r in found["rows"]})))
    parts.append(
        f"## Measured\n`make formats`: toy models ([what they are](benchmarks.md)), {windows} windows each of "
        f"WikiText-2 test and a book, {about['context']:,} tokens compressed, {about['scored']} scored after them "
        "with the cache. KL in nats per token with 95% intervals. *held* counts everything in the cache after the "
        "context (raw fp32 pages are a large part of a short one), *sealed* only the quantized part. *outliers*: RoPE "
        "pairs of K scaled by 8, of Q by 1/8. Rows `fake:` are analysis only: values are rounded but not packed.\n"
    )
    for model, what in MODELS.items():
        rows = {(r["strategy"], r["outliers"]): r for r in found["rows"] if r["model"] == model}
        lines = []
        for (strategy, outliers), r in rows.items():
            if outliers or strategy == "dynamic" or "raw/" in strategy or "/raw" in strategy:
                continue
            texts, torture = (r["wikitext2"], r["book"]), rows[strategy, 8]
            lines.append([
                f"`{strategy}`", f"{r['sealed_bits']:.2f}" if "sealed_bits" in r else "-",
                "-" if strategy.startswith("fake") else f"{r['held_bits']:.2f}",
                *map(kl, texts), " / ".join(f"{x['top1']:.3f}" for x in texts), *map(dppl, texts),
                kl(torture["wikitext2"]), f"{torture['book']['kl']:.1e}", f"{torture['wikitext2']['top1']:.3f}",
                f"{r['noise']:.3f}" if "noise" in r else "-",
            ])  # fmt: skip
        head = ["", "sealed bits", "held bits", "KL, WikiText-2", "KL, book", "top-1, both", "dPPL, WikiText-2",
                "dPPL, book", "outliers: KL", "KL, book", "top-1", "K noise"]  # fmt: skip
        base = rows["dynamic", 0]["wikitext2"]["ppl"]
        parts.append(f"### `{model}`: {what} (PPL {base:.1f} on WikiText-2)\n{table(head, lines)}\n")
    return "\n".join(parts)


AIMS = (
    ("int4_lloyd", "int4", 0.6), ("int4_lloyd+calibration", "int4", 0.6), ("int4_lloyd", "fake:turboquant4", 1),
    ("int4_lloyd+calibration", "fake:turboquant4", 1), ("int3", "fake:turboquant3", 1),
    ("int3+calibration", "fake:turboquant3", 1), ("int3+calibration", "fake:quarot3", 0.6),
    ("int3+calibration", "int3", 0.6), ("cal2", "int2", 0.5), ("int4_lloyd+calibration", "quanto:4+axis_key:-1", 0.67),
)  # fmt: skip
TEXTS = ("wikitext2", "book")
FORMAT_OF = {4: "int4_lloyd", 3: "int3"}


def shares(found: dict) -> str:
    """Ratios of KL between formats, with targets."""
    rows = {(r["model"], r["outliers"], r["strategy"]): r for r in found["rows"]}
    lines = []
    for name, other, aim in AIMS:
        cells = []
        for model in MODELS:
            for outliers in (0, 8):
                a, b = rows.get((model, outliers, name)), rows.get((model, outliers, other))
                if a and b and a["windows"] == b["windows"]:
                    cells.append(" / ".join(f"{a[x]['kl'] / b[x]['kl']:.2f}" for x in TEXTS))
        if len(cells) == 2 * len(MODELS):
            bits = [rows[next(iter(MODELS)), 0, x]["sealed_bits"] for x in (name, other)]
            of, by = (x.removeprefix("fake:") for x in (name, other))
            lines.append([f"`{of}` / `{by}`", f"{bits[0]:.2f} / {bits[1]:.2f}", *cells, f"{aim:g}"])
    if not lines:
        return ""
    head = ["ratio of KL", "bits", *(f"{model}{x}" for model in MODELS for x in ("", ", outliers")), "target"]
    return (
        "### Ratios\nWikiText-2 / book. Calibrated on equal parts of `assets/text/wikitext2-valid.txt` and `story.txt` "
        "(`kvcompress calibrate MODEL --text assets/text/wikitext2-valid.txt --text assets/text/story.txt`): "
        "neither the models' training data nor the texts of this page include them. The target with outliers at 2 bits "
        "was 0.35.\n\n" + table(head, lines) + "\n"
    )


def searched(found: dict) -> str:
    """Encodings of 3 and 4 bits that did not become formats."""
    rows = {(r["bits"], r["way"], r["model"], r["outliers"]): r for r in found["rows"]}
    columns = [x for x in itertools.product(MODELS, (0, 8)) if any(k[2:] == x for k in rows)]
    lines = []
    for bits, way in dict.fromkeys(k[:2] for k in rows):
        name = {"int4": "`int4`", "format": f"`{FORMAT_OF[bits]}`"}.get(way, way)
        cells = [rows.get((bits, way, *x)) for x in columns]
        lines.append([str(bits), name, *(" / ".join(f"{r[t]:.1e}" for t in TEXTS) if r else "-" for r in cells)])
    windows = " or ".join(map(str, sorted({r["windows"] for r in found["rows"]})))
    head = ["bits", "", *(f"{model}, outliers" if n else model for model, n in columns)]
    return (
        "### What was tried at 3 and 4 bits\n`benchmarks/few_bits.py`: values are rounded but not packed. KL, "
        f"WikiText-2 / book, {windows} windows of 2,048 tokens, 128 scored. *3 steps* is the format itself, computed "
        "with torch. The mean of V takes a quarter of a bit if stored per page; per head, from a calibration, it takes "
        "none. Bits per axis are in calibrated coordinates, and minimize the error of a Gaussian, weighted by its "
        "effect on scores and output.\n\n"
        + table(head, lines) + "\n"
    )  # fmt: skip


def retrieved(found: dict) -> str:
    """Retrieval of pass keys and needles."""
    names = [r["strategy"] for r in found["rows"] if r["model"] == next(iter(MODELS)) and not r["outliers"]]
    rows = {(r["model"], r["strategy"]): r for r in found["rows"] if not r["outliers"]}
    lines = []
    for name in names:
        found_in = [rows.get((model, name), {}) for model in MODELS]
        cells = [" / ".join(f"{x:.2f}" for x in row.get("retrieval", {}).values()) or "-" for row in found_in]
        contexts = sorted({row.get("contexts", 8) for row in found_in if "retrieval" in row})
        if any(x != "-" for x in cells):
            lines.append([f"`{name}`", " or ".join(map(str, contexts)), *cells])
    head = ["pass key / needles", "contexts", *MODELS]
    return (
        "### Retrieval at few bits\nA pass key of five digits and one of eight secret words, hidden in 2,048 tokens of "
        "the book (one question per context, and eight): the share of questions with all tokens correct, asked after "
        "the context was compressed. `dynamic` is raw.\n\n" + table(head, lines) + "\n"
    )


def sides(found: dict) -> str:
    """K alone, V alone: the figure and a table."""
    parts = [
        "## K or V\nKL with only one side in the format and the other one raw. Tutorials state that K is more "
        "sensitive. This is correct, particularly if K has a bias or outliers that the format does not remove; for "
        "rotated, centred pages both are similar.\n\n"
        "![Quality against bits; K alone and V alone](formats.png)\n"
    ]
    head, lines = ["model"], []
    for model in MODELS:
        for outliers in (0, 8):
            rows = {
                r["strategy"]: r["wikitext2"]["kl"]
                for r in found["rows"]
                if r["model"] == model and r["outliers"] == outliers
            }
            names = [s.removesuffix("/raw") for s in rows if s.endswith("/raw")]
            if not names:
                continue
            head = ["K alone / V alone", *(f"`{name}`" for name in names)]
            label = model + (", outliers" if outliers else "")
            lines.append([label, *(f"{rows[name + '/raw']:.1e} / {rows['raw/' + name]:.1e}" for name in names)])
    return "\n".join([*parts, table(head, lines) + "\n"])


def peers(found: dict) -> str:
    """Quantized caches of transformers beside formats of similar size."""
    lines = []
    for model in MODELS:
        rows = {r["strategy"]: r for r in found["rows"] if r["model"] == model and not r["outliers"]}
        for name, r in rows.items():
            if ":" not in name or "sealed_bits" not in r or "spans" in name or name.startswith("fake"):
                continue
            fewer = [x for x in ("int8", "int4", "int2") if rows[x]["sealed_bits"] <= r["sealed_bits"]]
            ours = rows[fewer[0]]
            mine = [
                x for x in rows.values() if ":" not in x["strategy"] and x.get("sealed_bits", 99) <= r["sealed_bits"]
            ]
            best = min(mine, key=lambda x: x["wikitext2"]["kl"])
            cells = []
            for x in (r, ours, best):
                cells.append(f"{x['sealed_bits']:.2f} / {x['held_bits']:.2f}")
                cells.append(f"{x['wikitext2']['kl']:.1e} / {x['book']['kl']:.1e}")
            chosen = f"`{best['strategy']}`" if best is not ours else "the same"
            lines.append([model, f"`{name}`", *cells[:2], f"`{fewer[0]}`", *cells[2:4], chosen, *cells[4:]])
    head = ["model", "transformers", "bits, sealed / held", "KL, WikiText-2 / book", "kvcompress", "bits", "KL",
            "lowest KL", "bits", "KL"]  # fmt: skip
    return (
        "## Comparison with transformers' quantized caches\nThe same run: groups of 64, along rows (the default of "
        "quanto, and transformers' recommendation for HQQ, axis 1), and with the other axes (keys by channel for "
        "quanto). The column *kvcompress* is the one of `int8`, `int4`, `int2` with at most as many sealed bits, "
        "*lowest KL* the format of all rows above with the lowest KL on WikiText-2 and at most as many bits. The "
        "models are fp32, and so are transformers' scales and shifts; with a bf16 model they take half a bit less. "
        "*Held* includes raw tokens: up to 128 in transformers' caches (32 when this was measured); 64 to 128 and the "
        "sinks in kvcompress.\n\n" + table(head, lines) + "\n"
    )


def published(found: dict) -> str:
    """Published methods, simulated by rounding, beside formats of similar size."""
    head = [
        "model",
        "method",
        "bits",
        "KL, WikiText-2 / book",
        "outliers: KL",
        "kvcompress",
        "bits",
        "KL",
        "outliers: KL",
    ]
    lines = []
    for model in MODELS:
        rows = {(r["strategy"], r["outliers"]): r for r in found["rows"] if r["model"] == model}
        for (name, outliers), r in rows.items():
            if outliers or not name.startswith("fake:") or "@" in name:
                continue
            fewer = [x for x in ("int4_lloyd", "int4", "int3", "cal2", "int2")
                     if rows[x, 0]["sealed_bits"] <= r["sealed_bits"] + 1 / 8] or ["cal2", "int2"]  # fmt: skip
            for i, ours in enumerate(fewer[:1] if fewer[0] != "cal2" else fewer):
                cells = [f"`{name.removeprefix('fake:')}`", f"{r['sealed_bits']:.2f}", *both(rows, name)]
                bits = f"{rows[ours, 0]['sealed_bits']:.2f}"
                lines.append([model, *(cells if i == 0 else [""] * 4), f"`{ours}`", bits, *both(rows, ours)])
    if not lines:
        return ""
    return (
        "## Comparison with published methods\nValues are rounded as in the papers and their code "
        "(`kvcompress.tools.evaluation.published`) and used in full precision, with the same raw sinks and newest page "
        "as here. All metadata is counted, for the model's head dims. `quarot`: rotated, range per token, clipped "
        "to 0.95. `kivi`: ranges of 32 tokens or channels. `turboquant`: MSE, K and V. `kvarn`: tiles of 128 or 64 "
        "tokens. `kvquant`: 1% outliers, K after RoPE, without Fisher weights, levels and ranges fitted to the "
        "prompt itself. `oscar`: rotations measured on the calibration texts of `cal2`. The format beside a method has "
        "at most an eighth of a bit more: K's centroid at heads of 64.\n\n" + table(head, lines) + "\n"
    )


def both(rows: dict, name: str) -> list[str]:
    """KL on both texts, without and with outliers."""
    return [f"{rows[name, x]['wikitext2']['kl']:.1e} / {rows[name, x]['book']['kl']:.1e}" for x in (0, 8)]


def lengths(found: dict) -> str:
    """KL and attention error by context length."""
    parts = [
        "## By context length\n`benchmarks/lengths.py`: does the error grow with the context? Tutorials claim this "
        "(INT4 at 512 to 16,384 tokens: PPL +0.05 to +0.52, without a source). KL does not grow over the lengths that "
        "the models support, and neither does the error of attention, up to 4,096 tokens. For longer contexts of "
        "several concatenated texts it grows by a quarter at most, for formats that do not subtract a mean.\n\n"
        "![KL and attention error](lengths.png)\n"
    ]
    for model in filter(found.__contains__, MODELS):
        for kind, label in (("kl", "KL, WikiText-2"), ("attention", "attention error")):
            rows = found[model][kind]
            contexts = list(next(iter(rows.values())))
            lines = [[f"`{name}`", *(f"{row[n]:.1e}" for n in contexts)] for name, row in rows.items()]
            parts.append(table([f"{model}, {label}", *(f"{int(n):,}" for n in contexts)], lines) + "\n")
    return "\n".join(parts)


def formats_page() -> str:
    text = [HEAD + formats.support_matrix(), MATRIX_TAIL]
    made = {
        "formats": (measured, shares, retrieved, sides, peers, published),
        "few_bits": (searched,),
        "formats_latent": (latents.section,),
        "lengths": (lengths,),
    }
    for name, parts in made.items():
        found = json.loads((RESULTS / f"{name}.json").read_text())
        text += [page for part in parts if (page := part(found))]
    return "\n".join(text)


if __name__ == "__main__":
    (DOCS / "formats.md").write_text(formats_page())
    (DOCS / "speculation.md").write_text(speculation.page())
    speed.write()
    speed_cuda.write()
    evidence.write(RESULTS)
    planning.write()
