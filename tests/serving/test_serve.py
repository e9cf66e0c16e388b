"""examples/serve: chats over HTTP against the model alone; what happens when memory ends and when clients go."""

import http.client
import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import transformers as hf

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples" / "serve"))

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

import load  # noqa: E402
import server  # noqa: E402

from kvcompress import KVCache, enable  # noqa: E402

BOOKS = ROOT / "assets" / "books-tiny"


class Running:
    """A server in a process of its own: client threads beside it would fight its thread for the interpreter."""

    def __init__(self, *options: str) -> None:
        command = [sys.executable, ROOT / "examples" / "serve", "--no-end", "--port", "0", "--threads", "1", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> "Running":
        self.port = int(self.process.stdout.readline().rsplit(":", 1)[1])
        return self

    def __exit__(self, *error) -> None:
        self.process.terminate()
        self.process.wait()
        self.process.stdout.close()

    def idle(self, seconds: float = 20) -> dict[str, float]:
        """The metrics, once nothing runs or waits."""
        end = time.monotonic() + seconds
        while True:
            numbers = load.metrics(self.port)
            if not numbers["kvcompress_running"] + numbers["kvcompress_waiting"] or time.monotonic() > end:
                return numbers
            time.sleep(0.02)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Small products on threads that wait for each other take long beside other tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def talk(port: int, seed: int, turns: int, most: int, done: list) -> None:
    """A chat whose turns begin with all that was said before; all chats begin alike."""
    dice = random.Random(seed)
    said = [11 + i % 800 for i in range(150)]
    try:
        for _ in range(turns):
            said = said + [dice.randrange(2, 4000) for _ in range(dice.randrange(3, 60))]
            end = load.ask(port, said, most)
            done.append((list(said), end))
            said = said + end["ids"]
    except Exception as error:
        done.append((said, error))


def alone(model, key: str, prompt: list[int], end: dict, **options) -> list[float]:
    """By how much a run alone, cut into the same calls, prefers another token, for each that was given."""
    cache, ids, at, gaps = KVCache(model.config, key, **options), prompt + end["ids"], 0, []
    for n in end["calls"]:
        with torch.no_grad():
            logits = model(torch.tensor([ids[at : at + n]]), past_key_values=cache).logits[0, -1]
        at += n
        if at >= len(prompt):
            gaps.append(float(logits.max() - logits[ids[at]]))
    assert len(gaps) == len(end["ids"])
    return gaps


@pytest.mark.parametrize(("key", "arena", "bound", "uncompressed"), [("raw", 8, 1e-4, 1e-3), ("int8", 5, 0.25, 1.0)])
def test_chats_in_little_memory(key, arena, bound, uncompressed):
    """8 chats at once, in an arena for a few: they wait and are sent away, none is lost. Answers are those of the model
    without a cache; of those that were sent away, two are also compared with a run alone under the same splits."""
    done: list = []
    with Running("--format", key, "--arena", str(arena)) as up:
        chats = [threading.Thread(target=talk, args=(up.port, i, 2, 40, done)) for i in range(8)]
        for chat in chats:
            chat.start()
        for chat in chats:
            chat.join()
        numbers = up.idle()
        model = hf.AutoModelForCausalLM.from_pretrained(BOOKS, dtype=torch.float32).eval()
        enable(model, verbose=False)
        assert len(done) == 16 and not [end for _, end in done if isinstance(end, Exception)], done
        gaps = [gap for prompt, end in done for gap in load.misses(model, prompt, end["ids"])]
        assert len(gaps) == 16 * 40 and max(gaps) <= uncompressed, sorted(gaps)[-5:]
        for prompt, end in sorted(done, key=lambda x: -x[1]["preempted"])[:2]:
            assert max(alone(model, key, prompt, end)) <= bound
        assert numbers['kvcompress_requests_total{reason="length"}'] == 16
        assert numbers["kvcompress_used_bytes"] == numbers["kvcompress_prefix_bytes"] <= arena << 20
        assert numbers["kvcompress_first_token_seconds_count"] == 16 and numbers["process_resident_memory_bytes"] > 0


def test_sent_away_and_back():
    """Sequences that were admitted and grow beyond the arena: the last ones wait on the host, and give what they give
    alone."""
    model = hf.AutoModelForCausalLM.from_pretrained(BOOKS, dtype=torch.float32).eval()
    for key, arena, bound in (("raw", 2, 1e-4), ("int8", 2, 0.25)):
        engine, told = server.Engine(model, arena << 20, key, meter=server.Meter(), page_size=16), {}
        prompts = [[5 + i] * (20 + i) for i in range(6)]
        for i, prompt in enumerate(prompts):
            engine.submit(prompt, 40, lambda kind, value, i=i, told=told: told.update({i: (kind, value)}))
        steps = 0
        while engine.running or engine.waiting or not steps:
            engine.step()
            engine.pool.check()
            steps += 1
            assert engine.pool.stats()["used"] <= arena << 20 and steps < 2000
        assert [told[i][0] for i in range(6)] == ["end"] * 6
        ends = [told[i][1] for i in range(6)]
        assert all(len(end["ids"]) == 40 for end in ends)
        away = [i for i in range(6) if ends[i]["preempted"]]
        assert away, key
        for i in away[:2]:
            assert max(alone(model, key, prompts[i], ends[i], page_size=16)) <= bound


def test_clients_that_go(tmp_path):
    """kill -9 of a client in mid-stream, and a client that hangs up while it waits: their pages are free."""
    with Running("--format", "raw", "--arena", "16") as up:
        for i in range(2):
            load.killed_in_mid_stream(up.port, [5 + i] * 100, 1500)
        numbers = up.idle(5)
        assert numbers['kvcompress_requests_total{reason="cancelled"}'] == 2
        assert numbers["kvcompress_used_bytes"] == numbers["kvcompress_prefix_bytes"]
        first = load.stream(up.port, [7] * 1200, 1000)
        next(first)
        second = http.client.HTTPConnection("127.0.0.1", up.port)
        second.request("POST", "/v1/completions", json.dumps({"prompt": [9] * 1700, "max_tokens": 100}))
        end = time.monotonic() + 10
        while not load.metrics(up.port)["kvcompress_waiting"] and time.monotonic() < end:
            time.sleep(0.02)
        second.close()
        while load.metrics(up.port)["kvcompress_waiting"] and time.monotonic() < end:
            time.sleep(0.02)
        assert time.monotonic() < end
        first.close()
        assert up.idle(5)['kvcompress_requests_total{reason="cancelled"}'] == 4


def test_text_and_bad_requests():
    def post(port, body) -> tuple[int, dict]:
        line = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        line.request("POST", "/v1/completions", body if isinstance(body, bytes) else json.dumps(body))
        answer = line.getresponse()
        return answer.status, json.loads(answer.read())

    with Running("--format", "int4", "--arena", "4") as up:
        tokenizer = hf.AutoTokenizer.from_pretrained(BOOKS)
        status, whole = post(up.port, {"prompt": "It was a dark night, and", "max_tokens": 12})
        assert status == 200 and whole["choices"][0]["finish_reason"] == "length"
        assert whole["choices"][0]["text"] == tokenizer.decode(whole["choices"][0]["ids"])
        events = list(load.stream(up.port, "It was a dark night, and", 12))
        assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]
        for _ in range(2):
            assert post(up.port, {"prompt": [9] * 300, "max_tokens": 2})[0] == 200
        assert up.idle()["kvcompress_prefix_saved_tokens"] >= 128  # the second finds pages of the first
        for body, text in (
            (b"{", "JSONDecodeError"),
            ({}, "prompt"),
            ({"prompt": 3}, "text or list of token ids"),
            ({"prompt": []}, "at least 1"),
            ({"prompt": [5], "max_tokens": 0}, "at least 1"),
            ({"prompt": [5000]}, "token ids of 0 to 4095"),
            ({"prompt": [5] * 100, "max_tokens": 4000}, "up to 4096 tokens"),
            ({"prompt": [5] * 2000, "max_tokens": 2000}, "pages fit in 4,194,304 bytes"),
        ):
            status, answer = post(up.port, body)
            assert status == 400 and text in answer["error"]["message"], answer
        assert up.idle()["kvcompress_used_bytes"] <= 4 << 20


@pytest.mark.soak
@pytest.mark.parametrize("options", [("raw", "16", "1e-3"), ("int8", "8", "1.0")])
def test_five_minutes(options):
    """8 chats for 5 minutes: resident memory flat, nothing lost, answers right; the figures are printed."""
    key, arena, bound = options
    command = [sys.executable, ROOT / "examples" / "serve" / "load.py", "--chats", "8", "--seconds", "300", "--format",
               key, "--arena", arena, "--bound", bound, "--threads", "1"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
