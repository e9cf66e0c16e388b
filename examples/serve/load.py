"""Chats on the server, for a while: python examples/serve/load.py --chats 8 --seconds 30 --arena 8 --format raw

Starts a server of its own on loopback (never another), lets so many chats talk to it at once, kills clients in
mid-stream, and then compares each answer with the model run alone, without any cache. Exits with 1 if a request was
lost, an answer is off by more than `--bound`, a killed client's pages stay, or the server's memory grows.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

HERE = Path(__file__).parent
BOOK = HERE.parents[1] / "assets" / "text" / "book.txt"
KILLED = """import socket, sys, time
s = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
body = sys.argv[2].encode()
s.sendall(b"POST /v1/completions HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(body) + body)
got = b""
while got.count(b"data:") < 2:
    part = s.recv(4096)
    if not part:
        sys.exit(1)
    got += part
print("streams", flush=True)
time.sleep(600)
"""


def stream(port: int, prompt: list[int] | str, most: int) -> Iterator[dict[str, Any]]:
    """The events of a request."""
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        line.request("POST", "/v1/completions", json.dumps({"prompt": prompt, "max_tokens": most, "stream": True}))
        answer = line.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {answer.read().decode()}")
        for row in answer:
            if row.startswith(b"data: {"):
                yield json.loads(row[6:])
    finally:
        line.close()


def ask(port: int, prompt: list[int] | str, most: int) -> dict[str, Any]:
    """The last event's `kvcompress` part; RuntimeError where the streamed ids are others, or there is none."""
    ids: list[int] = []
    for event in stream(port, prompt, most):
        if "error" in event:
            raise RuntimeError(event["error"]["message"])
        ids += event["choices"][0]["ids"]
        if "kvcompress" in event:
            if ids != event["kvcompress"]["ids"]:
                raise RuntimeError("the stream has other tokens than the summary")
            return event["kvcompress"]
    raise RuntimeError("the stream broke off")


def metrics(port: int) -> dict[str, float]:
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    line.request("GET", "/metrics")
    text = line.getresponse().read().decode()
    line.close()
    return {name: float(value) for name, value in re.findall(r"^([a-z_]+(?:{[^}]*})?) (\S+)$", text, re.MULTILINE)}


def killed_in_mid_stream(port: int, prompt: list[int], most: int) -> None:
    """A client that streams is killed with SIGKILL."""
    body = json.dumps({"prompt": prompt, "max_tokens": most, "stream": True})
    client = subprocess.Popen([sys.executable, "-c", KILLED, str(port), body], stdout=subprocess.PIPE)
    assert client.stdout is not None
    if not client.stdout.readline():
        raise RuntimeError("a client that was to be killed got no stream")
    os.kill(client.pid, signal.SIGKILL)
    client.wait()
    client.stdout.close()


def chat(port: int, seed: int, book: list[int], until: float, longest: int, done: list[Any]) -> None:
    """Turns of one chat: each begins with all that was said; a new chat when it gets long."""
    dice = random.Random(seed)
    said: list[int] = []
    while time.monotonic() < until:
        if not said:
            said = book[:200] if dice.random() < 0.5 else []  # half of the chats have the same system prompt
        at = dice.randrange(len(book) - 200)
        said = said + book[at : at + dice.randrange(5, 200)]
        most = dice.randrange(8, 64)
        try:
            end = ask(port, said, most)
            done.append((list(said), end))
            said = said + end["ids"]
        except (OSError, RuntimeError, http.client.HTTPException) as error:
            done.append((list(said), {"reason": f"{type(error).__name__}: {error}"}))
            said = []
        if len(said) > longest:
            said = []


def misses(model: Any, prompt: list[int], made: list[int]) -> list[float]:
    """For each token that was made, by how much the model alone, in one call without a cache, prefers another one."""
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor([prompt + made[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
    return (logits.amax(-1) - logits.gather(1, torch.tensor(made)[:, None])[:, 0]).tolist()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--longest", type=int, default=1200, help="tokens of a chat before a new one begins")
    parser.add_argument("--arena", type=int, default=8, help="MiB of pages")
    parser.add_argument("--format", default="raw")
    parser.add_argument("--bound", type=float, default=1e-3, help="logits that a token may be behind the model's own")
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    command = [sys.executable, str(HERE), "--port", "0", "--arena", str(args.arena), "--format", args.format,
               "--no-end", "--threads", str(args.threads)]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = urlparse(server.stdout.readline()).port
            if not port:
                raise RuntimeError("the server has not started")
            return _load(args, port)
        finally:
            server.terminate()


def _load(args: argparse.Namespace, port: int) -> int:
    import torch
    import transformers

    books = HERE.parents[1] / "assets" / "books-tiny"
    book = transformers.AutoTokenizer.from_pretrained(books)(BOOK.read_text()).input_ids
    done: list[list[Any]] = [[] for _ in range(args.chats)]
    until = time.monotonic() + args.seconds
    threads = [threading.Thread(target=chat, args=(port, i, book, until, args.longest, done[i]))
               for i in range(args.chats)]  # fmt: skip
    for thread in threads:
        thread.start()
    memory, kills, start = [], 0, time.monotonic()
    while time.monotonic() < until:
        time.sleep(min(args.seconds / 20, max(0.0, until - time.monotonic())))
        memory.append(metrics(port)["process_resident_memory_bytes"] / 2**20)
        if kills < 10 and time.monotonic() < until:
            killed_in_mid_stream(port, book[kills * 100 : kills * 100 + 300], 600)
            kills += 1
    for thread in threads:
        thread.join()
    seconds, end = time.monotonic() - start, time.monotonic() + 20
    while (last := metrics(port))["kvcompress_running"] + last["kvcompress_waiting"] and time.monotonic() < end:
        time.sleep(0.1)

    requests = [x for own in done for x in own]
    lost = [end["reason"] for _, end in requests if end["reason"] not in ("length", "stop")]
    cancelled = last.get('kvcompress_requests_total{reason="cancelled"}', 0)
    stays = last["kvcompress_used_bytes"] - last["kvcompress_prefix_bytes"]
    settled = memory[len(memory) // 4 :]  # arenas and allocators warm up
    grown = sum(settled[-3:]) / 3 - sum(settled[:3]) / 3
    print(f"{len(requests)} requests of {args.chats} chats in {seconds:.0f} s, {len(lost)} lost {lost[:3]}")
    print(f"{last['kvcompress_tokens_total']:.0f} tokens, {last['kvcompress_tokens_total'] / seconds:.0f} a second; "
          f"{sum(end.get('preempted', 0) > 0 for _, end in requests)} requests preempted, "
          f"{last['kvcompress_preemptions_total']:.0f} times; "
          f"{last['kvcompress_prefix_saved_tokens']:.0f} tokens of prompts saved by prefixes")  # fmt: skip
    print(f"{kills} clients killed in mid-stream, {cancelled:.0f} requests cancelled, {stays:.0f} bytes in use "
          "beside prefixes at the end")  # fmt: skip
    print(f"resident memory of the server in MiB: {', '.join(f'{x:.0f}' for x in memory)}: grown by {grown:.1f}",
          flush=True)  # fmt: skip

    torch.set_num_threads(args.threads or torch.get_num_threads())
    model = transformers.AutoModelForCausalLM.from_pretrained(books, dtype="float32").eval()
    gaps = [gap for prompt, end in requests if "ids" in end for gap in misses(model, prompt, end["ids"])]
    print(f"{len(gaps)} tokens: {sum(gap == 0 for gap in gaps)} are the choice of the model alone, the others miss it "
          f"by at most {max(gaps, default=0):.2g} of a logit")  # fmt: skip
    bad = lost or max(gaps, default=0) > args.bound or cancelled < kills or stays or grown > 16
    return int(bool(bad or not gaps))


if __name__ == "__main__":
    sys.exit(main())
