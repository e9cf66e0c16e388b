"""A compiled decode step compared with an eager one. benchmarks/results/compile.json.

    python benchmarks/compile.py [--threads N]

One token at a time after 1,024 tokens, on the shipped model in fp32: DynamicCache and StaticCache, and KVCache, eager
and with torch.compile(fullgraph=True) and inductor. Medians of 64 steps, with interleaved caches."""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from common import machine, save

from kvcompress import KVCache, enable

ROOT, CONTEXT, STEPS = Path(__file__).parents[1], 1024, 64
SLOTS = CONTEXT + 2 * STEPS


def load(fused: bool) -> Any:
    model = hf.AutoModelForCausalLM.from_pretrained(ROOT / "assets" / "books-tiny", dtype=torch.float32).eval()
    if fused:
        enable(model, verbose=False)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    hf.logging.set_verbosity_error()
    theirs, ours = load(False), load(True)
    compiled = {id(m): torch.compile(m, fullgraph=True) for m in (theirs, ours)}
    cases: dict[str, tuple[Any, Any, Any]] = {
        "DynamicCache, eager": (theirs, theirs, hf.DynamicCache(config=theirs.config)),
        "StaticCache, compiled": (theirs, compiled[id(theirs)], hf.StaticCache(theirs.config, max_cache_len=SLOTS)),
    }
    for key in ("raw", "int8", "int4"):
        cases[f"{key}, eager"] = (ours, ours, KVCache(ours.config, key))
        cases[f"{key}, compiled"] = (ours, compiled[id(ours)], KVCache(ours.config, key, max_length=SLOTS))
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(2, 4096, (1, CONTEXT), generator=generator)
    tokens = torch.randint(2, 4096, (2 * STEPS, 1, 1), generator=generator)
    times: dict[str, list[float]] = {name: [] for name in cases}
    with torch.no_grad():
        for model, _, cache in cases.values():
            model(prompt, past_key_values=cache)
        for i in range(STEPS + 8):  # the first ones compile
            for name, (_, step, cache) in cases.items():
                start = time.perf_counter()
                step(tokens[i], past_key_values=cache)
                times[name].append(time.perf_counter() - start)
    rows = {name: 1e3 * statistics.median(seconds[8:]) for name, seconds in times.items()}
    for name, ms in rows.items():
        print(f"{name:24} {ms:6.2f} ms a token")
    print(save("compile", {"machine": machine(), "context": CONTEXT, "ms": rows}))


if __name__ == "__main__":
    main()
