"""Quality after eviction: KL and retrieval by budget, for every policy, on the shipped models. Writes
benchmarks/results/budgets.json (read by the docs, `kvcompress plan` and `kvcompress plot budget`). Quality only, so
other jobs may run at the same time.

    python benchmarks/budgets.py [--windows N] [--samples N] [--context N]"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from transformers import logging

import kvcompress
from kvcompress import _C

ROOT = Path(__file__).parent.parent
SHARES = (10, 20, 30, 50, 75)
TASKS = ("needles", "recall")


def strategies(context: int) -> dict[str, tuple[str, int]]:
    """{strategy: (policy, percent of the context)}."""
    found = {"raw": ("all tokens", 100), "int8": ("all tokens, int8", 100), "int4": ("all tokens, int4", 100)}
    for share in SHARES:
        found[f"raw+h2o:{share}%"] = ("H2O", share)
        found[f"raw+window:{context * share // 100 - 4}"] = ("sinks and window", share)
        found[f"raw+random:{share}%"] = ("random", share)
        found[f"int8+h2o:{share}%"] = ("H2O on int8", share)
    for share in (30, 50):
        found[f"raw+snapkv:{share}%"] = ("SnapKV", share)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in (("context", 1024), ("windows", 3), ("samples", 3)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "budgets.json")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    wanted, rows = strategies(args.context), []
    for model in ("books-tiny", "books-tiny-bias"):
        result = kvcompress.evaluate(
            ROOT / "assets" / model, ROOT / "assets" / "text" / "book.txt", list(wanted), tasks=TASKS, cost=False,
            context=args.context, windows=args.windows, samples=args.samples, out=ROOT / "results" / "budgets" / model,
        )  # fmt: skip
        for row in result.rows:
            if row["strategy"] in wanted:
                policy, share = wanted[row["strategy"]]
                few = {name: row[name] for name in ("strategy", "kl", "kl_low", "kl_high", "top1", "accuracy_outside",
                                                    "accuracy_inside")}  # fmt: skip
                tasks = {name: [x["outside"], x["inside"]] for name, x in row["tasks"].items()}
                rows.append({"model": model, "policy": policy, "share": share, **few, "tasks": tasks})
    about = {"context": args.context, "windows": args.windows, "samples": args.samples, "library": _C.__version__}
    args.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1))
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
