"""Whether quality loss grows with the context. benchmarks/results/lengths.json and docs/lengths.png.

    python benchmarks/lengths.py [--windows N] [--out DIR] # resumable; then: make docs

KL through the cache at 512 to 3,840 tokens of context, and the error of attention alone, |out - exact| / |exact| in
float64 on the models' own q, K, V, up to 16,384 tokens (four texts of 4,096, the models' limit, concatenated)."""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from transformers import AttentionInterface, PreTrainedModel, logging
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvcompress import _C, PagedKV
from kvcompress.tools.evaluation import evaluate
from kvcompress.tools.evaluation.data import as_batch, load_ids
from kvcompress.tools.evaluation.suite import load_model

ROOT = Path(__file__).parents[1]
MODELS = ("books-tiny", "books-tiny-bias")
FORMATS = ("int8", "fp8_e4m3", "int4", "int4_token", "nvfp4", "int2", "kivi2")
CONTEXTS, STORED, QUERIES = (512, 1024, 2048, 3840), (512, 1024, 2048, 4096, 8192, 16384), 32


def captured(model: PreTrainedModel, windows: list[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    """For each layer q [1, Hq, QUERIES, D] of the last window, and K, V [1, H, all windows, D], after RoPE."""
    seen: dict[int, list[tuple[torch.Tensor, ...]]] = defaultdict(list)

    def note(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen[module.layer_idx].append((q[:, :, -QUERIES:], k, v))
        return sdpa_attention_forward(module, q, k, v, *args, **kwargs)

    AttentionInterface.register("capture", note)
    model.set_attn_implementation("capture")
    with torch.inference_mode():
        for window in windows:
            model(window, use_cache=False, logits_to_keep=1)
    model.set_attn_implementation("sdpa")
    found = []
    for parts in seen.values():
        found.append((parts[-1][0], torch.cat([p[1] for p in parts], 2), torch.cat([p[2] for p in parts], 2)))
    return found


def attention_error(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, name: str) -> float:
    """|out - exact| / |exact| when k and v are stored in format `name` and the last page is sealed too."""
    kv = PagedKV(k.shape[1], k.shape[3], key=name, sinks=0)
    kv.append(k, v)
    kv.append(k[:, :, :1], v[:, :, :1])
    kv.crop(k.shape[2])
    outs = []
    for K, V in (kv.dense(), (k, v)):
        K, V = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (K, V))
        outs.append((q.double() @ K.mT / k.shape[3] ** 0.5).softmax(-1) @ V)
    return float((outs[0] - outs[1]).norm() / outs[1].norm())


def plot(found: dict[str, Any], path: Path) -> None:
    figure = Figure(figsize=(12, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, len(MODELS), sharex=True)
    for column, model in zip(axes.T, MODELS, strict=True):
        for axis, kind, label in zip(column, ("kl", "attention"), ("KL, nats", "attention error"), strict=True):
            for name, marker in zip(FORMATS, "osvD^Px", strict=True):
                points = found[model][kind][name]
                axis.plot([int(n) for n in points], points.values(), marker=marker, label=name, markersize=5)
            axis.set(xscale="log", yscale="log", ylabel=label, title=f"{model}: {label.split(',')[0]}")
            axis.set_xticks(STORED, [f"{n:,}" for n in STORED], rotation=30)
            axis.minorticks_off()
            axis.spines[["top", "right"]].set_visible(False)
        column[-1].set_xlabel("tokens in the cache")
    axes[0, -1].legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "lengths")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(os.cpu_count() or 1)
    found: dict[str, Any] = {"about": {"windows": args.windows, "library": _C.__version__, "queries": QUERIES}}
    text = ROOT / "assets/text/wikitext2-test.txt"
    for model_name in MODELS:
        model, tokenizer = load_model(ROOT / "assets" / model_name, None)
        kl: dict[str, dict[int, float]] = {name: {} for name in FORMATS}
        for context in CONTEXTS:
            common = {"tokenizer": tokenizer, "windows": args.windows, "cost": False, "context": context}
            result = evaluate(model, text, FORMATS, out=args.out / f"{model_name}-{context}", **common)
            for row in result.rows[1:]:
                kl[row["strategy"]][context] = row["kl"]
        ids = load_ids(text, tokenizer, 4096)
        layers = captured(model, [as_batch(ids[i * 4096 : (i + 1) * 4096], model.device) for i in range(4)])
        error = {
            name: {n: statistics.median(attention_error(q, k[:, :, -n:], v[:, :, -n:], name) for q, k, v in layers)
                   for n in STORED}
            for name in FORMATS
        }  # fmt: skip
        found[model_name] = {"kl": kl, "attention": error}
        print(model_name, json.dumps(found[model_name], indent=1), flush=True)
    (ROOT / "benchmarks/results/lengths.json").write_text(json.dumps(found, indent=1) + "\n")
    plot(found, ROOT / "docs" / "lengths.png")


if __name__ == "__main__":
    main()
