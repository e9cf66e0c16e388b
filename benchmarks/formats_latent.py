"""Measures page formats of latents (MLA), with separate formats for the rotary part:
benchmarks/results/formats_latent.json.

    python benchmarks/formats_latent.py [--model FOLDER] [--windows N]    # resumable; then: make docs

On WikiText-2 test and a book that was not used for training; everything is read through the cache, as in
`formats.py`."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from formats import ROOT, TEXTS
from transformers import logging

from kvcompress import _C
from kvcompress.tools.evaluation import evaluate
from kvcompress.tools.evaluation.suite import load_model

LATENT = ("int8", "fp8_e4m3", "int4", "int2")
ROTARY = ("raw", "int8", "fp8_e4m3")  # at least 8 bits, as in KVCache
STRATEGIES = ["raw", "raw/int8", "raw/fp8_e4m3", *(f"{name}/{rotary}" for name in LATENT for rotary in ROTARY)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "assets" / "books-tiny-latent")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "formats_latent")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(os.cpu_count() or 1)
    model, tokenizer = load_model(args.model, None)
    texts = {
        label: evaluate(
            model,
            ROOT / "assets/text" / file,
            STRATEGIES,
            out=args.out / label,
            tokenizer=tokenizer,
            windows=args.windows,
            cost=False,
        ).rows
        for label, file in TEXTS.items()
    }
    named = {label: {row["strategy"]: row for row in found} for label, found in texts.items()}
    rows = []
    for name in STRATEGIES:
        # one name if both parts have the same format, as evaluate writes it
        one = "/".join(dict.fromkeys(name.split("/")))
        rows.append({"strategy": name, **{label: found[one] for label, found in named.items()}})
        print(name, *(f"{found[one]['kl']:.2e}" for found in named.values()), flush=True)
    config = model.config
    about = {
        "windows": args.windows, "context": 2048, "scored": 256, "library": _C.__version__,
        "latent": config.kv_lora_rank, "rotary": config.qk_rope_head_dim,
    }  # fmt: skip
    target = ROOT / "benchmarks" / "results" / "formats_latent.json"
    target.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
