"""Throughput in vLLM when memory is short: benchmarks/vllm_pressure.py; docs/vllm-pressure.png

All requests (1,500 + 200 tokens, the shipped model) are submitted at the start; the cache has memory for a given number
of them in bf16 at a time. Generated tokens per second of CPU time, including prefills and recomputation. Memory is no
longer the bottleneck if the next larger size gives less than 1.1 times as much."""

from __future__ import annotations

import argparse
import itertools
import time
from typing import Any

from vllm_common import ROOT, apart, arguments, conditions, prompts, start

PROMPT, ANSWER = 1500, 200
BF16_BYTES = 6 * 2 * 2 * 64 * 2  # bytes per token: layers, K and V, heads, dims, bytes
NAMES = ("vLLM bf16", "vLLM fp8", "int8", "int4")


def measure(name: str, fit: int, requests: int) -> dict[str, float]:
    from vllm import SamplingParams

    blocks = -(-(PROMPT + ANSWER) // 128) * 128
    llm = start(name, fit * blocks * BF16_BYTES / 2**20, max_model_len=2048, max_num_batched_tokens=2048)
    config = llm.llm_engine.model_config.hf_config
    heads, dim = config.num_key_value_heads, config.head_dim
    assert config.num_hidden_layers * 2 * heads * dim * 2 == BF16_BYTES, "another model than the shipped one"
    asked = prompts(llm, requests, PROMPT)
    sampling = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False)
    begin = time.process_time()
    done = llm.generate(asked, sampling, use_tqdm=False)
    seconds = time.process_time() - begin
    assert all(len(x.outputs[0].token_ids) == ANSWER for x in done)
    said = {x.name: x.value for x in llm.get_metrics() if hasattr(x, "value")}
    return {"rate": requests * ANSWER / seconds, "preemptions": said["vllm:num_preemptions"]}


def enough(found: dict[int, float]) -> int | None:
    for fit, more in itertools.pairwise(sorted(found)):
        if found[more] < 1.1 * found[fit]:
            return fit
    return None


def plot(rates: dict[str, dict[int, float]]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # the engine's environment has no matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    colours = {"vLLM bf16": "#30323d", "vLLM fp8": "#d1622b", "int8": "#1f6fb2", "int4": "#2a9d8f"}
    for name, found in rates.items():
        axis.plot([*found], [*found.values()], color=colours[name], marker="o", markersize=3, label=name)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("memory, in requests of 1,700 tokens in bf16")
    axis.set_ylabel("tokens a second of CPU time")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=7, frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(ROOT / "docs" / "vllm-pressure.png", dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--fit", type=int, nargs="+", default=[3, 6, 12, 24])
    options = arguments(parser, measure)
    print(f"{conditions()}; {options.requests} requests of {PROMPT} + {ANSWER} tokens")
    print(f"| memory for | {' | '.join(NAMES)} |\n|{'---|' * (1 + len(NAMES))}")
    rates: dict[str, dict[int, float]] = {name: {} for name in NAMES}
    for fit in options.fit:
        cells = []
        for name in NAMES:
            found: dict[str, Any] = apart(measure, name, fit, options.requests)
            rates[name][fit] = rate = found["rate"]
            cells.append(f"{rate:.0f} ({rate / rates[NAMES[0]][fit]:.2f}x; {found['preemptions']:.0f} preempted)")
        print(f"| {fit} | {' | '.join(cells)} |", flush=True)
    if len(options.fit) == 1:
        return
    for name in NAMES:
        print(f"{name}: memory no longer binds from {enough(rates[name])} on")
    plot(rates)


if __name__ == "__main__":
    main()
