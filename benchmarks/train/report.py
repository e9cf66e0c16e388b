"""Quality of a trained model without compression: writes measured.json next to it and prints it.

    python benchmarks/train/report.py assets/books-tiny [--text name=file ...]

Perplexity by context length on texts not used for training, accuracy of the retrieval tasks by length, and the
statistics of `kvcompress.inspect`."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvcompress
from kvcompress.tools.evaluation import tasks

TEXT = Path(__file__).parents[2] / "assets" / "text"


def mean(rows: list[dict[str, Any]], name: str) -> float:
    return round(sum(row[name] for row in rows) / len(rows), 4)


def measure(folder: Path, texts: dict[str, Path], lengths: list[int], windows: int, samples: int) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found: dict[str, Any] = {"perplexity": {}, "accuracy": {}}
    common = {"tokenizer": tokenizer, "cost": False}
    for name, path in texts.items():
        found["perplexity"][name] = {}
        for n in lengths:
            sizes = {"context": n - 257, "scored": 256, "windows": windows, "chunk": 256}
            result = kvcompress.evaluate(model, path, [], **sizes, **common)
            found["perplexity"][name][n] = round(result.rows[0]["ppl"], 2)
    book = next(iter(texts.values()))
    for n in lengths:
        sizes = {"context": n - 96, "scored": 16, "windows": 1, "samples": samples}
        row = kvcompress.evaluate(model, book, [], tasks="all", **sizes, **common).rows[0]
        for task in tasks.TASKS:
            found["accuracy"].setdefault(task, {})[n] = round(row["tasks"][task]["outside"], 3)
    seen = kvcompress.inspect(model, book, tokenizer=tokenizer)
    for name in ("first_attention", "first_attention_max", "keys90", "overlap"):
        found[f"{name}_by_layer"] = [round(row[name], 3) for row in seen.layers if name in row]
    for kind in ("k_pre", "k", "v"):
        for name in ("absmax", "outliers", "offset"):
            by_layer: dict[int, float] = {}
            for head in seen.heads:
                if head["kind"] == kind:
                    by_layer[head["layer"]] = max(by_layer.get(head["layer"], 0.0), round(head[name], 2))
            found[f"{kind}_{name}_by_layer"] = list(by_layer.values())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--text", nargs="+", metavar="NAME=FILE", help="default: the shipped book and WikiText-2 test")
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 2048, 4096])
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    pairs = [pair.split("=", 1) for pair in args.text] if args.text else []
    texts = {name: Path(file) for name, file in pairs}
    texts = texts or {"book": TEXT / "book.txt", "wikitext2-test": TEXT / "wikitext2-test.txt"}
    for folder in args.models:
        found = measure(folder, texts, args.lengths, args.windows, args.samples)
        (folder / "measured.json").write_text(json.dumps(found, indent=1) + "\n")
        print(folder, json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
