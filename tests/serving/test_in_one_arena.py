"""Requests that share an arena, as a server runs them on `Batch` and `PrefixCache`: prompts in chunks next to decode
steps, prefixes of earlier turns, sequences suspended to host memory when the pool is full, cancelled requests. No
answer changes, and nothing leaks."""

import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import transformers as hf

from kvcompress import _C, Batch, KVCache, PrefixCache, enable

BOOKS = Path(__file__).parents[2] / "assets" / "books-tiny"
CHUNK = 256


@pytest.fixture(autouse=True)
def one_thread():
    """Small matrix products on several threads take ten times as long if other processes run."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model():
    made = hf.AutoModelForCausalLM.from_pretrained(BOOKS, dtype=torch.float32).eval()
    enable(made, verbose=False)
    return made


@dataclass(eq=False)
class Request:
    """calls: number of tokens of each pass; those from a prefix come first."""

    prompt: list[int]
    most: int
    made: list[int] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    cache: KVCache | None = None
    suspended: bool = False
    suspensions: int = 0

    @property
    def ids(self):
        return self.prompt + self.made

    @property
    def left(self):
        return len(self.ids) - sum(self.calls)


class Requests:
    """Greedy decoding, oldest request first. If the pool is full, prefixes are evicted, then the youngest request is
    suspended until another one leaves."""

    def __init__(self, model, arena, key, **options):
        self.model, self.arena, self.pool = model, arena, _C.Pool(arena)
        self.prefix = PrefixCache(model.config, key, pool=self.pool, **options)
        self.running, self.waiting = [], []
        self.full = False  # nobody comes in until somebody has left
        self.compacted = False

    def submit(self, prompt, most):
        self.waiting.append(Request(prompt, most))
        return self.waiting[-1]

    def leave(self, request):
        (self.running if request in self.running else self.waiting).remove(request)
        request.cache, self.full = None, False

    def used(self):
        return self.pool.stats()["used"]

    def admit(self):
        """The sequence suspended first; one that does not fit yet blocks those after it."""
        while self.waiting and not (self.full and self.running):
            request = self.waiting[0]
            if request.suspended:
                try:
                    request.cache.resume()
                except MemoryError:
                    assert self.running, "one sequence alone fits"
                    self.full = True
                    return
                request.suspended = False
            else:
                request.cache = self.prefix.open(request.ids)
                request.calls = [n] if (n := request.cache.get_seq_length()) else []
            self.running.append(self.waiting.pop(0))

    def make_room(self):
        before = self.prefix.stats()["bytes"]
        self.prefix.trim(before // 2)
        if self.prefix.stats()["bytes"] < before:
            return
        if len(self.running) == 1:  # its pages lie scattered over the slabs of sizes: they come back side by side
            assert not self.compacted, "one sequence alone fits"
            self.running[0].cache.suspend()
            self.running[0].cache.resume()
            self.compacted = True
            return
        youngest = self.running.pop()
        youngest.cache.suspend()
        youngest.suspended, youngest.suspensions, self.full = True, youngest.suspensions + 1, True
        self.waiting.insert(0, youngest)

    def step(self):
        """A pass over all that run: one token of each past its prompt, CHUNK tokens of prompts. Those that ended."""
        self.admit()
        while self.running:
            counts, room = {}, CHUNK
            for request in self.running:
                n = min(request.left, room) if request.left > 1 else 1
                room -= n if request.left > 1 else 0
                if n:
                    counts[request] = n
            ids = [i for r, n in counts.items() for i in r.ids[sum(r.calls) : sum(r.calls) + n]]
            batch = Batch([r.cache for r in counts], list(counts.values()))
            try:
                with torch.inference_mode():
                    logits = self.model(
                        torch.tensor([ids]), position_ids=batch.positions, past_key_values=batch,
                        logits_to_keep=batch.last,
                    ).logits[0]  # fmt: skip
            except MemoryError:
                self.make_room()
                continue
            self.compacted = False
            self.pool.check()
            assert self.used() <= self.arena
            return self.take(counts, logits.argmax(-1).tolist())
        return []

    def take(self, counts, best):
        ended = []
        for (request, n), token in zip(counts.items(), best, strict=True):
            request.calls.append(n)
            if request.left:
                continue
            if not request.made:
                self.prefix.commit(request.cache, request.prompt)
            request.made.append(token)
            if len(request.made) == request.most:
                self.prefix.commit(request.cache, request.ids)
                self.leave(request)
                ended.append(request)
        return ended

    def run(self):
        while self.running or self.waiting:
            yield from self.step()

    def nothing_left(self):
        """Only prefixes hold pages, and they can be let go."""
        assert not self.running and not self.waiting
        assert self.used() == self.prefix.stats()["bytes"] <= self.arena
        self.prefix.trim(0)
        assert self.used() == 0
        self.pool.check()


def behind(model, request):
    """For each token, by how much the model without a cache prefers another one."""
    made = torch.tensor(request.made)
    with torch.inference_mode():
        ids = torch.tensor([request.prompt + request.made[:-1]])
        logits = model(ids, use_cache=False).logits[0, len(request.prompt) - 1 :]
    return (logits.amax(-1) - logits.gather(1, made[:, None])[:, 0]).max().item()


def behind_alone(model, request, key, **options):
    """The same for a sequence alone that was cut into the same calls."""
    cache, at, worst = KVCache(model.config, key, **options), 0, 0.0
    for n in request.calls:
        with torch.no_grad():
            logits = model(torch.tensor([request.ids[at : at + n]]), past_key_values=cache).logits[0, -1]
        at += n
        if at >= len(request.prompt):
            worst = max(worst, float(logits.max() - logits[request.ids[at]]))
    assert at == len(request.ids) - 1
    return worst


def chats(requests, turns, most, done):
    """Six of them, which all begin alike, each turn with all that was said before."""
    dice = {i: random.Random(i) for i in range(6)}

    def ask(chat, said):
        said = said + [dice[chat].randrange(2, 4000) for _ in range(dice[chat].randrange(3, 60))]
        whose[requests.submit(said, most)] = chat

    whose, left = {}, dict.fromkeys(range(6), turns - 1)
    for i in range(6):
        ask(i, [11 + i % 800 for i in range(150)])
    for request in requests.run():
        done.append(request)
        if left[chat := whose[request]]:
            left[chat] -= 1
            ask(chat, request.ids)


@pytest.mark.parametrize(
    ("key", "arena", "bound", "uncompressed"),
    [pytest.param("raw", 5, 1e-4, 1e-3, marks=pytest.mark.full), ("int8", 3, 0.25, 1.0)],
)
def test_chats_in_little_memory(model, key, arena, bound, uncompressed):
    done, requests = [], Requests(model, arena << 20, key)
    chats(requests, 2, 30, done)
    assert len(done) == 12 and all(len(r.made) == 30 for r in done)
    assert max(behind(model, r) for r in done) <= uncompressed
    suspended = sorted(done, key=lambda r: -r.suspensions)[:2]
    assert suspended[0].suspensions
    assert max(behind_alone(model, r, key) for r in suspended) <= bound
    assert requests.prefix.stats()["saved_tokens"] >= 6 * 128  # second turns find the pages of the first ones
    requests.nothing_left()


@pytest.mark.parametrize(
    ("key", "bound"), [("raw", 1e-4), ("int8", 0.25), pytest.param("int4", 0.5, marks=pytest.mark.full)]
)
def test_sequences_that_outgrow_the_arena(model, key, bound):
    """All six are admitted, and grow beyond it: the youngest wait on the host and give what they give alone."""
    requests = Requests(model, 2 << 20, key, page_size=16)
    asked = [requests.submit([5 + i] * (20 + i), 40) for i in range(6)]
    assert sum(1 for _ in requests.run()) == 6 and all(len(r.made) == 40 for r in asked)
    suspended = [r for r in asked if r.suspensions]
    assert suspended
    assert max(behind_alone(model, r, key, page_size=16) for r in suspended[:2]) <= bound
    requests.nothing_left()


@pytest.mark.parametrize("when", ["prompt", "decode", "suspended"])
def test_cancelled_requests_give_their_pages_back(model, when):
    requests = Requests(model, 4 << 20, "raw", page_size=16)
    stays = requests.submit([5] * 40, 40)
    goes = requests.submit([6] * {"prompt": 500, "decode": 60, "suspended": 200}[when], 300)
    if when == "suspended":
        goes = [requests.submit([7 + i] * 150, 40) for i in range(4)][-1]
    while not {
        "prompt": goes.calls and not goes.made, "decode": len(goes.made) > 3, "suspended": goes.suspended
    }[when]:  # fmt: skip
        requests.step()
    before, held = requests.used(), not goes.suspended
    requests.leave(goes)
    assert (requests.used() < before) == held  # before the next pass
    others = {*requests.running, *requests.waiting}
    assert others == set(requests.run())
    assert len(stays.made) == 40 and behind(model, stays) <= 1e-3
    requests.nothing_left()


@pytest.mark.soak
@pytest.mark.parametrize(("key", "arena", "bound"), [("raw", 16, 1e-3), ("int8", 8, 1.0)])
def test_five_minutes(model, key, arena, bound):
    """Conversations in turn, a tenth of them cancelled: resident memory stays flat, and answers are right."""

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

    requests, memory, count, end = Requests(model, arena << 20, key), [], 0, time.monotonic() + 300
    dice = random.Random(0)
    while time.monotonic() < end:
        done = []
        for i in range(40):
            said = [11 + i % 800 for i in range(200)] * (i % 2) + [dice.randrange(2, 4000) for _ in range(100)]
            requests.submit(said, dice.randrange(8, 64))
        while requests.running or requests.waiting:
            done += requests.step()
            if requests.running and dice.random() < 0.01:
                requests.leave(dice.choice(requests.running))
        assert max(behind(model, r) for r in dice.sample(done, 5)) <= bound
        memory.append(resident())
        count += len(done)
    requests.nothing_left()
    settled = memory[len(memory) // 4 :]
    print(f"{count} requests, resident MiB {settled[0]:.0f} to {settled[-1]:.0f}")
    assert settled[-1] - settled[0] < 16
