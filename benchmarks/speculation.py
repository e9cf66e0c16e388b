"""Acceptance of drafts with quantized caches. benchmarks/results/speculation.json.

    python benchmarks/speculation.py [--windows N] [--threads N]    # about ten minutes; then: make docs

Both shipped models continue N passages of a book, 1,024 tokens each, by 128 tokens, greedily: without drafts, with
prompt lookup, and with the other shipped model as the assistant (as large as the model itself, which shows in the
times). Acceptance length: new tokens per forward pass of the model. Comparisons are paired: the same passage with a
format and with raw pages."""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from common import machine, save

from kvcompress import KVCache, enable
from kvcompress.tools.evaluation.data import load_ids
from kvcompress.tools.evaluation.suite import load_model

ROOT = Path(__file__).parents[1]
MODELS = {"books-tiny": "books-tiny-bias", "books-tiny-bias": "books-tiny"}  # and their assistants
FORMATS = ("dynamic", "raw", "int8", "fp8_e4m3", "int4", "int4_token", "int2")
LENGTHS, CONTEXT, NEW = (2, 4, 8), 1024, 128


def interval(x: list[float]) -> list[float]:
    """[mean, half width of its 95% interval] over passages (Student's t, its expansion in 1/degrees of freedom)."""
    f = len(x) - 1
    t = 1.960 + 2.372 / f + 2.823 / f**2
    return [statistics.mean(x), t * statistics.stdev(x) / math.sqrt(len(x))]


def methods(assistant: Any) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {"none": {}}
    for n in LENGTHS:
        found[f"lookup {n}"] = {"prompt_lookup_num_tokens": n}
        found[f"assistant {n}"] = {"assistant_model": assistant, "drafts": n}
    return found


def run(model: Any, ids: torch.Tensor, key: str, method: dict[str, Any]) -> tuple[float, float]:
    """(tokens per forward pass, seconds) of a continuation; the context is in the cache before the clock starts."""
    cache = hf.DynamicCache(config=model.config) if key == "dynamic" else KVCache(model.config, key)
    options = dict(method)
    if drafts := options.pop("drafts", None):
        config = options["assistant_model"].generation_config
        config.num_assistant_tokens, config.num_assistant_tokens_schedule = drafts, "constant"
        config.assistant_confidence_threshold = 0.0
    calls = 0

    def count(*args: Any) -> None:
        nonlocal calls
        calls += 1

    with torch.no_grad():
        model(ids[:, :-1], past_key_values=cache)
        hook = model.register_forward_pre_hook(count)
        start = time.perf_counter()
        out = model.generate(
            ids, past_key_values=cache, do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW, eos_token_id=None,
            attention_mask=torch.ones_like(ids), pad_token_id=0, **options,
        )  # fmt: skip
        seconds = time.perf_counter() - start
        hook.remove()
    return (out.shape[1] - ids.shape[1]) / calls, seconds


def measure(name: str, windows: int) -> list[dict[str, Any]]:
    (model, tokenizer), (assistant, _) = (load_model(ROOT / "assets" / x, None) for x in (name, MODELS[name]))
    enable(model, verbose=False)
    ids = load_ids(ROOT / "assets" / "text" / "book.txt", tokenizer, model.config.vocab_size)
    step = (len(ids) - CONTEXT - NEW) // windows
    texts = [torch.as_tensor(ids[i * step : i * step + CONTEXT])[None] for i in range(windows)]
    got: dict[tuple[str, str], list[tuple[float, float]]] = {}
    ways = methods(assistant)
    for i, text in enumerate(texts):
        for way, options in ways.items():
            for key in FORMATS:
                got.setdefault((way, key), []).append(run(model, text, key, options))
        print(f"{name}: {i + 1} of {windows}", flush=True)
    rows = []
    for (way, key), runs in got.items():
        accepted, seconds = zip(*runs, strict=True)
        base, plain = got[way, "raw"], got["none", key]
        rows.append({
            "model": name, "method": way, "format": key, "accepted": interval(list(accepted)),
            "against_raw": interval([a - b for a, (b, _) in zip(accepted, base, strict=True)]),
            "ms_per_token": 1e3 * statistics.median(seconds) / NEW,
            "speed_up": interval([p / s for s, (_, p) in zip(seconds, plain, strict=True)]),
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(options.threads)
    hf.logging.set_verbosity_error()
    rows = [row for name in MODELS for row in measure(name, options.windows)]
    print(save("speculation", {"machine": machine(), "context": CONTEXT, "new": NEW, "windows": options.windows,
                               "rows": rows}))  # fmt: skip


if __name__ == "__main__":
    main()
