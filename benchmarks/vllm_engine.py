"""vLLM with and without kvcompress, on the shipped model: benchmarks/vllm_engine.py

The number of tokens that fit, as reported by vLLM (requests of max_model_len, all their blocks); CPU time of prefill
and of decode steps for long and short requests; and the overhead of kvcompress's Python code: metadata of a step, a
layer's forward outside of the op."""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from vllm_common import ENGINES, apart, arguments, conditions, prompts, start

MIB = 256
SHAPES = ((8, 3800), (32, 1000))
LENGTHS = (4096, 32768)


def timed(what: Any, name: str) -> list[float]:
    """Records the seconds of each call of the attribute from now on."""
    call, times = getattr(what, name), []

    def wrapped(*args: Any, **keywords: Any) -> Any:
        begin = time.perf_counter()
        result = call(*args, **keywords)
        times.append(time.perf_counter() - begin)
        return result

    setattr(what, name, wrapped)
    return times


def steps(llm: Any, requests: int, context: int, count: int) -> tuple[float, list[float], list[int]]:
    """CPU seconds of the prefill, and of each step that decodes all requests; number of requests decoded."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    # prefilled at the same time
    ahead = requests * context // engine.vllm_config.scheduler_config.max_num_batched_tokens
    sampling = SamplingParams(temperature=0, max_tokens=count + 8 + ahead, ignore_eos=True)
    for i, prompt in enumerate(prompts(llm, requests, context)):
        engine.add_request(f"{requests}.{i}", prompt, sampling)
    begin, answered = time.process_time(), set()
    while len(answered) < requests:
        answered |= {x.request_id for x in engine.step() if x.outputs[0].token_ids}
    prefill, times, decoded = time.process_time() - begin, [], []
    for _ in range(count):
        begin = time.process_time()
        decoded.append(len(engine.step()))
        times.append(time.process_time() - begin)
    while engine.has_unfinished_requests():
        engine.step()
    return prefill, times, decoded


def overhead(llm: Any, count: int) -> dict[str, float]:
    """Microseconds of Python for 32 requests: metadata of a step, and a layer's code around the op."""
    from kvcompress.vllm import backend, residual

    builds = [timed(x, "build") for x in (backend.Builder, residual.ResidualBuilder)]
    layers, ops = timed(backend.Impl, "forward"), timed(backend.ops, "attend_varlen")
    for times in (*builds, layers, ops):
        times.clear()
    steps(llm, 32, 200, count)
    outside = [x - y for x, y in zip(layers, ops, strict=True)]
    return {
        "metadata_us": sum(1e6 * statistics.median(x) for x in builds if x),
        "layer_us": 1e6 * statistics.median(outside),
    }


def measure(name: str, count: int) -> dict[str, Any]:
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    llm = start(name, MIB)
    engine, found = llm.llm_engine, {}
    blocks = engine.engine_core.engine_core.scheduler.kv_cache_config
    for requests, context in SHAPES:
        prefill, times, _ = steps(llm, requests, context, count)
        found[f"{requests} x {context}"] = {"prefill_s": prefill, "step_ms": 1e3 * statistics.median(times)}
    if "additional_config" in ENGINES[name]:
        found |= overhead(llm, count)
    for length in LENGTHS:  # blocks are what they are; a request may be this long
        engine.vllm_config.model_config.max_model_len = length
        found[f"tokens {length}"] = int(length * get_max_concurrency_for_kv_cache_config(engine.vllm_config, blocks))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--engines", nargs="+", default=[*ENGINES], choices=[*ENGINES])
    options = arguments(parser, measure)
    print(f"{conditions()}; {MIB} MiB")
    shapes = [f"{requests} x {context}" for requests, context in SHAPES]
    heads = [f"tokens, {n}" for n in LENGTHS] + [f"{x}: step ms | prefill s" for x in shapes]
    print(f"| | {' | '.join(heads)} | metadata us | layer us |\n|{'---|' * (5 + 2 * len(shapes))}")
    base = None
    for name in options.engines:
        found = apart(measure, name, options.steps)
        base = base or found
        cells = [f"{found[f'tokens {n}']:,} ({found[f'tokens {n}'] / base[f'tokens {n}']:.2f}x)" for n in LENGTHS]
        for x in shapes:
            step = found[x]["step_ms"]
            cells += [f"{step:.1f} ({step / base[x]['step_ms']:.2f}x)", f"{found[x]['prefill_s']:.1f}"]
        cells += [f"{found[x]:.0f}" if x in found else "-" for x in ("metadata_us", "layer_us")]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
