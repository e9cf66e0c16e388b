"""Shared by the benchmarks in vLLM (`make vllm` creates the environment): engines by name, each in a separate process
with one thread. Times are CPU time of that process, so that other load on the machine matters less."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ENGINES: dict[str, dict[str, Any]] = {
    "vLLM bf16": {},
    "vLLM fp8": {"kv_cache_dtype": "fp8"},
    "int8": {"additional_config": {"kvcompress": "int8"}},
    "fp8_e4m3": {"additional_config": {"kvcompress": "fp8_e4m3"}},
    "int8/int4": {"additional_config": {"kvcompress": "int8/int4"}, "block_size": 256},
    "int4": {"additional_config": {"kvcompress": "int4"}, "block_size": 256},
}


def start(name: str, mib: float, **options: Any) -> Any:
    """The engine, with this much cache memory and the shipped model."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    import torch
    from vllm import LLM

    torch.set_num_threads(1)
    settings = {
        "dtype": "bfloat16", "enforce_eager": True, "max_model_len": 4096, "max_num_batched_tokens": 4096,
        "max_num_seqs": 64, "enable_prefix_caching": False, "block_size": 128, "disable_log_stats": False,
    }  # fmt: skip
    return LLM(
        str(ROOT / "assets" / "books-tiny"),
        kv_cache_memory_bytes=int(mib * 2**20),
        **{**settings, **ENGINES[name], **options},
    )


def prompts(llm: Any, requests: int, tokens: int) -> list[dict[str, list[int]]]:
    """Pieces of the book, each 200 tokens after the previous one."""
    text = (ROOT / "assets" / "text" / "book.txt").read_text()
    ids = llm.get_tokenizer().encode(text, add_special_tokens=False)
    return [{"prompt_token_ids": ids[200 * i % (len(ids) - tokens) :][:tokens]} for i in range(requests)]


def apart(measure: Callable[..., Any], *args: Any) -> Any:
    """Result of measure(*args) in a new process; it must be a function of the script that runs."""
    command = [
        str(ROOT / ".venv-vllm" / "bin" / "python"),
        sys.argv[0],
        "--in-process",
        json.dumps([measure.__name__, *args]),
    ]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True
    )
    line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT ")), None)
    if line is None:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    return json.loads(line[7:])


def arguments(parser: argparse.ArgumentParser, *measures: Callable[..., Any]) -> argparse.Namespace:
    """Parses the command line; does not return in the process of a measurement."""
    parser.add_argument("--in-process", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.in_process:
        name, *args = json.loads(options.in_process)
        found = next(x for x in measures if x.__name__ == name)(*args)
        print("RESULT " + json.dumps(found), flush=True)
        raise SystemExit
    return options


def conditions() -> str:
    """Conditions to print above the results."""
    from common import machine

    busy = os.getloadavg()[0]
    return f"{machine()['cpu']}, one thread, CPU time of the process; load of the machine {busy:.1f}"
