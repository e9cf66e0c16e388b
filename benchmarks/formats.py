"""Measures every page format, and transformers' caches, on the shipped models: benchmarks/results/formats.json.

    python benchmarks/formats.py [--windows N] [--out DIR] [--only FORMAT ..] [--models NAME ..]
        [--outliers 0 8] [--samples N]

Resumable; then: make docs. --only, --models and --outliers replace these rows and keep the others. Models derived from
the first one to show one effect (attention sinks; one KV head of 128 dims for eight query heads) have fewer rows.

On WikiText-2 test and a book, with the unmodified models and with injected outliers of K; everything is read through
the cache. Calibrations are measured on other texts of both kinds. Pass keys and needles are hidden in the book.
`sealed_bits`: bits per quantized element, all metadata included; `held_bits`: of everything in the cache."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import oscar
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from transformers import PreTrainedModel, logging

from kvcompress import _C, formats
from kvcompress.hf import format_check
from kvcompress.hf.calibrate import calibrate
from kvcompress.tools.evaluation import caches, evaluate, inject_outliers
from kvcompress.tools.evaluation.data import as_batch, bos_of, load_ids, vocabulary
from kvcompress.tools.evaluation.suite import load_model
from kvcompress.tools.strategy import Strategy

ROOT = Path(__file__).parents[1]
MODELS = ("books-tiny", "books-tiny-bias", "books-tiny-sinks", "books-tiny-gqa8")
TEXTS = {"wikitext2": "wikitext2-test.txt", "book": "book.txt"}
PAIRS = ("int8/int4", "fp8_e4m3/int4", "int4/int2", "int8/kivi2", "kivi4/int4", "int4+guard", "int2+guard")
ONE_SIDE = ("int8", "fp8_e4m3", "int4", "int4_token", "nvfp4", "int2", "kivi2")  # each for K only, and for V only
MIXED = ("int4+spans:int8@0.2,int4", "int4+residual_length:128")
BY_CHANNEL = ("quanto:4+axis_key:-1", "quanto:2+axis_key:-1")  # the axis of keys as in KIVI
HQQ_ROWS = ("hqq:4+axis_key:0+axis_value:0", "hqq:2+axis_key:0+axis_value:0")
PEERS = ("quanto:4", "quanto:2", "hqq:8", "hqq:4", "hqq:2", "hf-fp8", *BY_CHANNEL, *HQQ_ROWS)
OUTLIERS = (0, 8)
CALIBRATED = (*formats.CALIBRATED, "int4/cal2")
MAPPED = ("int4_lloyd+calibration", "int3+calibration")  # formats that need no calibration, measured with one
CALIBRATION = ("wikitext2-valid.txt", "story.txt")  # texts of both kinds, not used for testing or training
METHODS = ("kivi2", "kivi4", "kvarn2", "kvarn4", "kvquant2", "kvquant3", "oscar2", "quarot2", "quarot3", "quarot4",
           "turboquant3", "turboquant4")  # fmt: skip
PUBLISHED = tuple(f"fake:{name}" for name in METHODS)
MEASURED = {**dict.fromkeys(CALIBRATED + MAPPED, calibrate), "fake:oscar2": oscar.rotations}
RETRIEVED = ("int4", "int3", "int3+calibration", "kivi2", "int2", *formats.CALIBRATED, "fake:turboquant3",
             "fake:oscar2")  # fmt: skip
TASKS = {"tasks": ("passkey", "needles"), "windows": 1, "scored": 32}


def quantized_bits(model: PreTrainedModel, strategy: Strategy, ids: torch.Tensor) -> dict[str, float]:
    """sealed_bits and held_bits for ids [1, T], and the error of K (`hf.format_check`)."""
    with torch.inference_mode(), caches.attention_for(model, strategy):
        cache = caches.open_cache(model, strategy)
        for part in ids.split(2048, 1):  # full pages are quantized by the second call
            model(part, past_key_values=cache, logits_to_keep=1)
        text = caches.text_config(model.config)
        dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        elements = 2 * text.num_hidden_layers * text.num_key_value_heads * dim * ids.shape[1]
        found = {"held_bits": 8 * caches.held_bytes(cache) / elements}
        if strategy.kind == "hf":
            inside = [
                t for layer in cache.layers for x in (layer._quantized_keys, layer._quantized_values)
                for t in caches._storages(x)
            ]  # fmt: skip
            found["sealed_bits"] = 8 * sum(t.untyped_storage().nbytes() for t in inside) / elements
        elif strategy.kind == "fake":
            found["sealed_bits"] = cache.sealed_bits()
        elif strategy.kind == "kvcompress" and not strategy.to_dict().keys() - {"head", "calibration"}:
            both = [name if name != "raw" else "raw_f32" for name in (strategy.head.split("/") * 2)[:2]]
            sides = (_C.side_bytes(formats.CODES[name], i == 0, dim, 64) for i, name in enumerate(both))
            found["sealed_bits"] = 8 * sum(sides) / (2 * 64 * dim)
    return found


def noise(model: PreTrainedModel, key: str, ids: torch.Tensor) -> float:
    """That of the worst head."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    with torch.inference_mode(), caches.attention_for(model, Strategy("dynamic")):
        model(ids[:, :512], past_key_values=cache, logits_to_keep=1)
    return max(float(format_check.noise(layer.keys, key).max()) for layer in cache.layers)


FEWER = {"int8", "fp8_e4m3", "int4", "int4_lloyd", "int3", "kivi4", "kivi2", "int2", "cal2", *MAPPED, "quanto:4",
         "quanto:4+axis_key:-1", *(f"fake:{x}" for x in METHODS if not x.startswith("kv"))}  # fmt: skip


def strategies(model: str = MODELS[0]) -> list[str]:
    """The strategies of a model, in the order of its rows."""
    if model not in MODELS[:2]:
        return [x for x in strategies() if x in FEWER]
    sides = [pair for name in ONE_SIDE for pair in (f"{name}/raw", f"raw/{name}")]
    fake = ("fake:int4@tensor", "fake:int4@token", "fake:int4@channel", "fake:int8@tensor")
    return [*formats.NAMES, *CALIBRATED, *MAPPED, *PAIRS, *MIXED, *sides, *PEERS, *PUBLISHED, *fake]


def folder_of(name: str) -> Path:
    """The folder of a shipped model, or of one trained by `benchmarks/train/train.py` (see docs/benchmarks.md)."""
    shipped = ROOT / "assets" / name
    return shipped if shipped.exists() else ROOT / "build" / "train" / name / "model"


def one_model(
    name: str, outliers: int, wanted: list[str], windows: int, samples: int, out: Path
) -> list[dict[str, Any]]:
    model, tokenizer = load_model(folder_of(name), None)
    if outliers:
        inject_outliers(model, scale=float(outliers))
    out.mkdir(parents=True, exist_ok=True)
    files = {}
    for measure in {MEASURED[x] for x in wanted if x in MEASURED}:
        files[measure] = out / f"{name}-{outliers}-{measure.__name__}.kvcal"
        ids = [load_ids(ROOT / "assets/text" / file, tokenizer, vocabulary(model)) for file in CALIBRATION]
        measure(model, ids, tokens=sum(map(len, ids))).save(files[measure])

    def named(strategy: str) -> str:
        if strategy not in MEASURED:
            return strategy
        return f"{strategy.removesuffix('+calibration')}+calibration:{files[MEASURED[strategy]]}"

    of = {str(Strategy(named(x))): x for x in wanted} | {"dynamic": "dynamic"}
    common = {"tokenizer": tokenizer, "cost": False, "skip_unavailable": True}
    texts = {
        label: evaluate(
            model,
            ROOT / "assets/text" / file,
            [named(x) for x in wanted],
            out=out / f"{name}-{outliers}-{label}",
            windows=windows,
            **common,
        )
        for label, file in TEXTS.items()
    }
    for label, found in texts.items():
        print(f"{name}, outliers x{outliers or 1}, {label}\n{found}\n", flush=True)
    right = {}
    if not outliers and (asked := [named(x) for x in wanted if x in RETRIEVED]):
        found = evaluate(model, ROOT / "assets/text/book.txt", asked, out=out / f"{name}-tasks-{samples}",
                         samples=samples, **common, **TASKS)  # fmt: skip
        right = {row["strategy"]: row["tasks"] for row in found.rows}
    ids = bos_of(model, tokenizer) + load_ids(ROOT / "assets/text/wikitext2-test.txt", tokenizer, vocabulary(model))
    batch = as_batch(ids[: 2048 + 32], model.device)
    rows = []
    for i, row in enumerate(texts["wikitext2"].rows):
        strategy = Strategy(row["strategy"])
        made: dict[str, Any] = {"strategy": of[row["strategy"]], "model": name, "outliers": outliers,
                                "windows": windows}  # fmt: skip
        if row["strategy"] in right:
            made["retrieval"] = {task: x["outside"] for task, x in right[row["strategy"]].items()}
            made["contexts"] = samples
        made |= quantized_bits(model, strategy, batch)
        if made["strategy"] in formats.NAMES and strategy.head != "raw":
            made["noise"] = noise(model, strategy.head, batch)
        measured = {
            label: {k: x for k, x in found.rows[i].items() if k != "strategy"} for label, found in texts.items()
        }
        rows.append(made | measured)  # the strategy contains a file name of this run
    return rows


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Plots quality against bits, and K only next to V only, one column per model."""
    figure = Figure(figsize=(14, 10), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, height_ratios=(3, 2))
    for i, name in enumerate(MODELS[:2]):
        found = {r["strategy"]: r for r in rows if r["model"] == name and not r["outliers"]}
        axis = figure.add_subplot(grid[0, i])
        for strategy, r in found.items():
            paper, theirs = strategy in PUBLISHED, strategy in PUBLISHED or strategy in PEERS
            if "sealed_bits" not in r or (
                not theirs and strategy not in (*formats.NAMES[1:], *formats.CALIBRATED, *MAPPED)
            ):
                continue
            x, y = r["sealed_bits"], (r["wikitext2"]["kl"] + r["book"]["kl"]) / 2
            axis.plot(x, y, "s" if paper else "^" if theirs else "o", color="#d1622b" if theirs else "#1f6fb2",
                      fillstyle="none" if paper else "full")  # fmt: skip
            label = strategy.replace("+axis_key:-1", " by channel").replace("+axis_key:0+axis_value:0", " axis 0")
            label = label.removeprefix("fake:")
            side = {"xytext": (6, -3), "ha": "left"} if theirs else {"xytext": (-6, -3), "ha": "right"}
            axis.annotate(label, (x, y), fontsize=7, textcoords="offset points", **side)
        axis.set(yscale="log", xlabel="bits an element, all counted", ylabel="KL, nats",
                 title=f"{name}: quality against size (triangles: transformers; squares: papers)")  # fmt: skip
        axis.margins(0.14, 0.08)
        axis.spines[["top", "right"]].set_visible(False)
        axis = figure.add_subplot(grid[1, i])
        for offset, side, colour in ((-0.2, "{}/raw", "#1f6fb2"), (0.2, "raw/{}", "#2a9d8f")):
            kl = [found[side.format(f)]["wikitext2"]["kl"] for f in ONE_SIDE]
            label = "K alone" if offset < 0 else "V alone"
            axis.bar([j + offset for j in range(len(ONE_SIDE))], kl, 0.4, color=colour, label=label)
        axis.set_xticks(range(len(ONE_SIDE)), ONE_SIDE)
        axis.set(yscale="log", ylabel="KL, nats, WikiText-2", title=f"{name}: which side is the more sensitive?")
        axis.legend(frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8, help="contexts of each retrieval task")
    parser.add_argument("--only", nargs="+", metavar="FORMAT")
    there = [name for name in MODELS if folder_of(name).exists()]
    parser.add_argument("--models", nargs="+", default=there, choices=MODELS, help="those that are there, unless given")
    parser.add_argument("--outliers", type=int, nargs="+", default=OUTLIERS, choices=OUTLIERS)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "formats")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    target = ROOT / "benchmarks" / "results" / "formats.json"
    order, keys = ["dynamic", *strategies()], ("outliers", "model", "strategy")
    about = {"context": 2048, "scored": 256, "library": _C.__version__}
    rows: list[dict[str, Any]] = json.loads(target.read_text())["rows"]
    for outliers, name in itertools.product(args.outliers, args.models):
        found = one_model(name, outliers, args.only or strategies(name), args.windows, args.samples, args.out)
        before = {tuple(row[k] for k in keys): row for row in rows}
        for row in found:
            old = before.pop(tuple(row[k] for k in keys), {})
            row.update({k: old[k] for k in ("retrieval", "contexts") if k in old and "retrieval" not in row})
        rows = [*before.values(), *found]
        rows.sort(key=lambda r: (r["outliers"], MODELS.index(r["model"]), order.index(r["strategy"])))
        target.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    plot(rows, ROOT / "docs" / "formats.png")


if __name__ == "__main__":
    main()
