"""Load test of vLLM's server: python examples/vllm/load.py --format int8 --clients 64 --seconds 300

Starts its own server on loopback with the shipped model. Each client requests one completion after another through the
OpenAI API, as a stream; a tenth of the requests are cancelled in mid-stream. Exits with 1 if an answer was lost, or if
a request or a block of the cache is still in use at the end. The server's memory is printed: that of vLLM 0.32 grows by
2 MiB per second under such a load with its own cache too (--format vllm).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path

import openai
import psutil
from serve import command

ROOT = Path(__file__).resolve().parents[2]
BOOKS = str(ROOT / "assets" / "books-tiny")


def metrics(port: int) -> dict[str, float]:
    """Metrics summed over labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    found: Counter[str] = Counter()
    for name, value in re.findall(r"^(vllm:\w+)(?:{[^}]*})? (\S+)$", text, re.MULTILINE):
        found[name] += float(value)
    return found


def resident(pid: int) -> float:
    """Memory of a process and its children in MiB."""
    process = psutil.Process(pid)
    return sum(x.memory_info().rss for x in [process, *process.children(recursive=True)]) / 2**20


async def client(api: openai.AsyncOpenAI, seed: int, until: float, text: str, ended: Counter[str]) -> None:
    """Random prompts; half of them share a prefix."""
    dice = random.Random(seed)
    while time.monotonic() < until:
        at, most, gone = dice.randrange(len(text) - 4000), dice.randrange(16, 100), dice.random() < 0.1
        prompt = text[:1000] * (dice.random() < 0.5) + text[at : at + dice.randrange(50, 3000)]
        try:
            stream = await api.completions.create(
                model=BOOKS, prompt=prompt, max_tokens=most, temperature=0, stream=True,
                stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
            )  # fmt: skip
            tokens, reason = 0, None
            async for event in stream:
                if gone and event.choices:
                    break
                reason = event.choices[0].finish_reason if event.choices and event.choices[0].finish_reason else reason
                tokens = event.usage.completion_tokens if event.usage else tokens
            await stream.close()
            ended["gone" if gone else "answered" if (reason, tokens) == ("length", most) else f"{reason}"] += 1
            ended["tokens"] += tokens
        except openai.OpenAIError as error:
            ended[f"{type(error).__name__}: {error}"] += 1


async def load(port: int, pid: int, args: argparse.Namespace) -> tuple[Counter[str], list[float]]:
    api = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=600)
    text = (ROOT / "assets" / "text" / "book.txt").read_text()
    ended: Counter[str] = Counter()
    until, memory = time.monotonic() + args.seconds, []

    async def look() -> None:
        while time.monotonic() < until:
            await asyncio.sleep(args.seconds / 20)
            memory.append(resident(pid))

    await asyncio.gather(look(), *(client(api, i, until, text, ended) for i in range(args.clients)))
    return ended, memory


def settled(port: int, seconds: float = 30) -> dict[str, float]:
    """The metrics, once no request is running or waiting."""
    end = time.monotonic() + seconds
    while True:
        now = metrics(port)
        stays = now["vllm:num_requests_running"] + now["vllm:num_requests_waiting"] + now["vllm:kv_cache_usage_perc"]
        if not stays or time.monotonic() > end:
            return now
        time.sleep(0.2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", default="int8", help="a format of kvcompress; vllm: vLLM's own cache")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--mib", type=int, default=32, help="size of the cache; small, so that requests are preempted")
    args = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = command(
        BOOKS, None if args.format == "vllm" else args.format, "--host", "127.0.0.1", "--port", str(port),
        "--kv-cache-memory-bytes", str(args.mib << 20), "--max-num-seqs", "64", "--max-model-len", "2048",
        "--enforce-eager", "--disable-uvicorn-access-log",
    )  # fmt: skip
    path = os.pathsep.join(x for x in (str(ROOT), os.environ.get("PYTHONPATH")) if x)
    with subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": path}, stdout=sys.stderr) as server:
        try:
            while True:  # until it listens
                if server.poll() is not None:
                    raise SystemExit("the server has not started")
                try:
                    metrics(port)
                    break
                except OSError:
                    time.sleep(0.5)
            ended, memory = asyncio.run(load(port, server.pid, args))
            last = settled(port)
        finally:
            server.terminate()
    tokens, good, gone = (ended.pop(x, 0) for x in ("tokens", "answered", "gone"))
    grown = sum(memory[-3:]) / 3 - sum(memory[5:8]) / 3  # arenas and allocators warm up
    print(
        f"{good} answers and {tokens} tokens for {args.clients} clients in {args.seconds:.0f} s; "
        f"lost: {dict(ended) or 0}"
    )
    print(
        f"{gone} requests dropped in mid-stream; {last['vllm:num_preemptions_total']:.0f} preemptions; "
        f"{last['vllm:prefix_cache_hits_total']:.0f} tokens of prompts from prefixes"
    )
    stays = [last[f"vllm:{x}"] for x in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")]
    print(f"at the end {stays[0]:.0f} run, {stays[1]:.0f} wait, {stays[2]:.1%} of the cache in use")
    print(f"resident memory in MiB: {', '.join(f'{x:.0f}' for x in memory)}: grown by {grown:.1f}")
    return int(bool(ended or not good or not gone or any(stays)))


if __name__ == "__main__":
    sys.exit(main())
