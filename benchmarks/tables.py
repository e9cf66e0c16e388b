"""Measures every table of the tutorials on the shipped models and writes docs/evaluation-tables.md. Resumable.

python benchmarks/tables.py [--out DIR] [--windows N] [--table NAME ...]
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from transformers import logging
from tutorial_tables import TABLES, Comparison, run_table

from kvcompress.tools.evaluation import evaluate
from kvcompress.tools.evaluation.suite import load_model

ROOT = Path(__file__).parents[1]
MODELS = ("books-tiny", "books-tiny-bias")
# hqq:2 fails on prompts whose length is odd.
PEERS = ("int8", "fp8_e4m3", "int8/int4", "int4", "hf-fp8", "hqq:8", "hqq:4", "quanto:4", "quanto:2")


def markdown(head: list[str], lines: list[list[str]]) -> str:
    rows = ["| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *lines]]
    return "\n".join(rows)


def section(found: list[Comparison]) -> str:
    """One table with a column per model."""
    first = found[0]
    models = [comparison.about["model"].rsplit("/", 1)[-1] for comparison in found]
    lines = []
    for i, (label, strategy, claimed, _) in enumerate(first.lines):
        lines.append([label, f"`{strategy}`", claimed, *(comparison.lines[i][3] for comparison in found)])
    body = markdown(["", "strategy", "claimed", *models], lines) if lines else "Nothing of it can be measured yet."
    left = [f"{label} ({why})" for label, why in first.left_out.items()]
    waits = f"\n\nLeft out: {'; '.join(left)}." if left else ""
    return f"## {first.title}\n{body}{waits}\n\n*Why they differ:* {first.why}\n"


def peers(model_name: str, out: Path, windows: int) -> str:
    """KVCaches and transformers' own quantized caches, on one model, by the same code."""
    model, tokenizer = load_model(ROOT / "assets" / model_name, None)
    result = evaluate(
        model, ROOT / "assets/text/wikitext2-test.txt", PEERS, tokenizer=tokenizer, windows=windows,
        tasks=("needles", "instructions"), samples=3, out=out / model_name / "peers", skip_unavailable=True,
    )  # fmt: skip
    lines = []
    for r in result.rows:
        lines.append([
            f"`{r['strategy']}`", f"{r['bytes_per_token']:,.0f}", f"{r['ratio']:.2f}x",
            f"{r['kl']:.1e} ({r['kl_low']:.0e}-{r['kl_high']:.0e})", f"{r['top1']:.3f}",
            f"{r['ppl'] - r['ppl_reference']:+.3f}", f"{r['accept']:.3f}", f"{r['accuracy_outside']:.3f}",
            f"{r['decode_ratio']:.2f}",
        ])  # fmt: skip
    head = ["", "bytes/token", "ratio", "KL (95%)", "top-1", "dPPL", "accept", "tasks", "x time"]
    left = "".join(f"\n\nLeft out: `{name}` ({why})." for name, why in result.skipped.items())
    return f"### {model_name}\n{markdown(head, lines)}{left}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--table", nargs="+", default=list(TABLES), choices=list(TABLES))
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(os.cpu_count() or 1)
    found: dict[str, list[Comparison]] = {name: [] for name in args.table}
    for model_name in MODELS:
        model, tokenizer = load_model(ROOT / "assets" / model_name, None)
        for name in args.table:
            folder = args.out / model_name
            text = ROOT / "assets/text/wikitext2-test.txt"
            table = run_table(name, model, text, tokenizer=tokenizer, out=folder, windows=args.windows)
            (folder / f"table-{name}.json").write_text(json.dumps(table.to_dict(), indent=1))
            print(f"{table}\n")
            found[name].append(table)
    text = ["# The tables of the tutorials, claimed and measured", "Made by `make tables` on the shipped toy models, "
            f"WikiText-2 test, {args.windows} windows, context 2,048 unless a row says otherwise, 256 tokens scored a "
            "window through the cache. How: [evaluation](evaluation.md).\n"]  # fmt: skip
    text += [section(tables) for tables in found.values()]
    text += ["## Comparison with transformers' quantized caches", "Same code, same windows; tasks: needles and "
             "instructions, 3 contexts each. Bytes are the total size of each cache after 2,048 tokens.\n"]  # fmt: skip
    text += [peers(name, args.out, args.windows) for name in MODELS]
    (ROOT / "docs" / "evaluation-tables.md").write_text("\n".join(text))


if __name__ == "__main__":
    main()
