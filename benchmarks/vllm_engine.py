"""vLLM with kvcompress and without, on the shipped model: tokens that fit, CPU time of decode steps.

Tokens as vLLM reports them: requests of 4,096 tokens that fit, with all their blocks.

`.venv-vllm/bin/python benchmarks/vllm_engine.py` (`make vllm` makes that environment). An engine a process, one thread;
CPU time, so that what else runs on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENGINES = {
    "vLLM bf16": {},
    "vLLM fp8": {"kv_cache_dtype": "fp8"},
    "int8": {"additional_config": {"kvcompress": "int8"}},
    "int8/int4": {"additional_config": {"kvcompress": "int8/int4"}, "block_size": 512},
    "int4": {"additional_config": {"kvcompress": "int4"}, "block_size": 256},
}


def measure(name: str, requests: int, context: int, steps: int) -> dict[str, float]:
    """In this process."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    import torch
    from vllm import LLM, SamplingParams
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    torch.set_num_threads(1)
    options = {"block_size": 128, **ENGINES[name]}
    llm = LLM(
        str(ROOT / "assets" / "books-tiny"), dtype="bfloat16", enforce_eager=True, max_model_len=4096,
        max_num_batched_tokens=4096, max_num_seqs=64, enable_prefix_caching=False, kv_cache_memory_bytes=256 << 20,
        **options,
    )  # fmt: skip
    engine = llm.llm_engine
    blocks = engine.engine_core.engine_core.scheduler.kv_cache_config
    text = (ROOT / "assets" / "text" / "book.txt").read_text()
    ids = llm.get_tokenizer().encode(text[: 8 * (context + 500 * requests)], add_special_tokens=False)
    sampling = SamplingParams(temperature=0, max_tokens=steps + 8, ignore_eos=True)
    for i in range(requests):
        engine.add_request(str(i), {"prompt_token_ids": ids[500 * i :][:context]}, sampling)
    begin, answered = time.process_time(), set()
    while len(answered) < requests:
        answered |= {x.request_id for x in engine.step() if x.outputs[0].token_ids}
    prefill, times = time.process_time() - begin, []
    for _ in range(steps):
        begin = time.process_time()
        engine.step()
        times.append(time.process_time() - begin)
    return {
        "tokens": int(4096 * get_max_concurrency_for_kv_cache_config(engine.vllm_config, blocks)),
        "prefill_s": prefill,
        "step_ms": statistics.median(times) * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--context", type=int, default=3800)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--engines", nargs="+", default=[*ENGINES], choices=[*ENGINES])
    parser.add_argument("--one", choices=[*ENGINES], help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "vllm.json")
    a = parser.parse_args()
    if a.one:
        print("RESULT " + json.dumps(measure(a.one, a.requests, a.context, a.steps)), flush=True)
        return
    found = {}
    for name in a.engines:
        command = [sys.executable, __file__, "--one", name]
        for option in ("requests", "context", "steps"):
            command += [f"--{option}", str(getattr(a, option))]
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
        line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT ")), None)
        if line is None:
            raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
        found[name] = json.loads(line[7:])
        print(name, found[name], flush=True)
    machine = {"machine": platform.processor() or platform.machine(), "threads": 1}
    shape = {"requests": a.requests, "context": a.context, "steps": a.steps}
    a.out.write_text(json.dumps({**machine, **shape, "engines": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
