"""Continuous batching: who runs, who waits, who is sent away for a while; one thread, one forward pass after another.

Every pass takes one token of each sequence that is past its prompt, and up to `chunk` tokens of the prompts. A sequence
is admitted when what the planner counts for it, and for what the others are about to need, fits beside what the pool
holds; when memory ends, prefixes that nobody uses go first, then the sequence that came last waits in host memory.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from kvcompress import _C, Batch, KVCache, PrefixCache, enable
from kvcompress.tools import plan

_number = itertools.count()


@dataclass(eq=False)
class Request:
    """tell(kind, value) is called from the engine's thread: "token" with an id; at last "end" with `summary()`, or
    "error" with a text. calls: tokens that each pass took, the ones that a prefix had first."""

    prompt: list[int]
    most: int
    tell: Callable[[str, Any], None]
    number: int = field(default_factory=lambda: next(_number))
    made: list[int] = field(default_factory=list)
    cache: KVCache | None = None
    fed: int = 0
    suspended: bool = False
    preempted: int = 0
    calls: list[int] = field(default_factory=list)
    born: float = field(default_factory=time.monotonic)

    def ids(self) -> list[int]:
        return self.prompt + self.made

    def summary(self, reason: str) -> dict[str, Any]:
        return {"reason": reason, "ids": self.made, "calls": self.calls, "preempted": self.preempted}


class Engine:
    """Serves a transformers model whose layers are all of full attention, greedily, from `arena` bytes of pages.

    formats: key and value format, as for KVCache; options: page_size, sinks, residual_length. chunk:
    tokens of prompts that a pass takes. meter: `Meter` of metrics.py. `start()` and `stop()` run it in a thread of
    its own.
    """

    def __init__(
        self, model: Any, arena: int, *formats: str, meter: Any, chunk: int = 256, ends: Sequence[int] = (),
        **options: Any,
    ) -> None:  # fmt: skip
        enable(model, verbose=False)
        self.model, self.arena, self.chunk, self.meter, self.ends = model, arena, chunk, meter, set(ends)
        self.pool = _C.Pool(arena)
        self.prefix = PrefixCache(model.config, *formats, pool=self.pool, **options)
        key, value = (*formats, "")[:2] if formats else ("int8", "")
        recipe, shape = plan.Recipe(key, value, **options), plan.read(model)
        self.page, self.sinks, self.sealing = recipe.page_size, recipe.sinks, {key, value or key} != {"raw"}

        @lru_cache(65536)
        def pages(tokens: int, first: int) -> int:
            """Bytes of the pages of a sequence, by the planner: its first call had `first` tokens."""
            if tokens < 1:
                return 0
            parts = plan.exact(shape, recipe, tokens, prompt=min(first, tokens)).parts
            return parts["sealed"] + parts["open"] + parts["sinks"]

        self.pages = pages
        self.limit = arena  # bytes in use up to which the pool has found room
        self.full = False  # the head of the line has been found not to fit
        self.waiting: deque[Request] = deque()  # those that were sent away first
        self.running: list[Request] = []
        self._new: list[Request] = []
        self._gone: set[Request] = set()
        self._wake = threading.Condition()
        self._open = True
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ------------------------------------------------------------------ called from anywhere

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        with self._wake:
            self._open = False
            self._wake.notify()
        self._thread.join()

    def submit(self, prompt: list[int], most: int, tell: Callable[[str, Any], None]) -> Request:
        """ValueError for what can never run; else the request will end, with "end" or "error"."""
        total, longest = len(prompt) + most, self.model.config.max_position_embeddings
        if not prompt or most < 1 or total > longest:
            raise ValueError(
                f"expected a prompt and max_tokens of at least 1, together up to {longest} tokens, got {len(prompt)} "
                f"and {most}"
            )
        if not all(isinstance(i, int) and 0 <= i < self.model.config.vocab_size for i in prompt):
            raise ValueError(f"expected token ids of 0 to {self.model.config.vocab_size - 1}, got others")
        if self.pages(total, self.chunk) + self._spare() > self.arena:
            raise ValueError(f"expected a request whose pages fit in {self.arena:,} bytes, got one of {total} tokens")
        request = Request(prompt, most, tell)
        with self._wake:
            if not self._open:
                raise ValueError("expected a server that runs, got one that stops")
            self._new.append(request)
            self._wake.notify()
        return request

    def cancel(self, request: Request) -> None:
        """Its pages are free before the next pass. Nothing happens to one that has ended."""
        with self._wake:
            self._gone.add(request)
            self._wake.notify()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while self._open:
            with self._wake:
                self._wake.wait_for(lambda: not self._open or self._new or self._gone or self.waiting or self.running)
            try:
                self.step()
            except Exception as error:  # one bad pass must not end the service
                for request in list(self.running):
                    self._fail(request, f"{type(error).__name__}: {error}")
            self.meter.look(self)
        for request in [*self.running, *self.waiting, *self._new]:
            self._fail(request, "the server stops")

    def step(self) -> None:
        """Lets go who is cancelled, admits who fits, then one forward pass."""
        with self._wake:
            self.waiting.extend(self._new)
            gone, self._gone, self._new = self._gone, set(), []
        for request in gone:
            self._leave(request, "cancelled")
        self._admit()
        counts = self._counts()
        while self._need(counts) > self._free() and self._make_room(self._need(counts) - self._free()):
            counts = self._counts()
        while counts:
            try:
                self._pass(counts)
                return
            except MemoryError as error:  # slabs have edges that the planner does not foresee
                self.limit = min(self.limit, self.pool.stats()["used"])
                if not self._make_room(self.pages(self.page, self.page)):
                    self._fail(next(iter(counts)), str(error))
                counts = self._counts()

    def _counts(self) -> dict[Request, int]:
        """Tokens that each running request brings to the next pass."""
        counts, room = {}, self.chunk
        for request in self.running:
            left = len(request.prompt) + len(request.made) - request.fed
            if n := min(left, room) if left > 1 else 1:
                counts[request] = n
                room -= n if left > 1 else 0
        return counts

    def _pass(self, counts: dict[Request, int]) -> None:
        start = time.monotonic()
        batch = Batch([request.cache for request in counts], list(counts.values()))  # type: ignore[misc]
        ids = [i for request, n in counts.items() for i in request.ids()[request.fed : request.fed + n]]
        with torch.inference_mode():
            logits = self.model(
                torch.tensor([ids]), position_ids=batch.positions, past_key_values=batch, logits_to_keep=batch.last
            ).logits[0]
        best = logits.argmax(-1).tolist()
        self.meter.passed(time.monotonic() - start, len(ids))
        for (request, n), token in zip(counts.items(), best, strict=True):
            request.fed += n
            request.calls.append(n)
            if request.fed == len(request.prompt) + len(request.made):
                self._emit(request, token)

    def _emit(self, request: Request, token: int) -> None:
        if not request.made:
            self.meter.first.observe(time.monotonic() - request.born)
            self.prefix.commit(request.cache, request.prompt)  # type: ignore[arg-type]
        request.made.append(token)
        self.meter.tokens.inc()
        request.tell("token", token)
        if token in self.ends or len(request.made) == request.most:
            self.prefix.commit(request.cache, request.ids())  # type: ignore[arg-type]
            self._leave(request, "stop" if token in self.ends else "length")

    def _leave(self, request: Request, reason: str) -> None:
        """It is over: whatever it holds is free."""
        for line in (self.running, self.waiting):
            if request in line:
                line.remove(request)
                request.cache = None
                self.limit, self.full = self.arena, False
                self.meter.ended.labels(reason).inc()
                request.tell("end", request.summary(reason))

    def _fail(self, request: Request, text: str) -> None:
        for line in (self.running, self.waiting):
            if request in line:
                line.remove(request)
        request.cache = None
        self.limit, self.full = self.arena, False
        self.meter.ended.labels("error").inc()
        request.tell("error", text)

    # ------------------------------------------------------------------ memory

    def _spare(self) -> int:
        """What a sequence may take on the way from one page to the next: where pages are sealed, the one that it seals
        stays until the new one is there."""
        return self.pages(self.page, self.page) if self.sealing else 0

    def _free(self) -> int:
        return self.limit - self.pool.stats()["used"]

    def _growth(self, request: Request, n: int) -> int:
        """Bytes that n more tokens of it take at most, by the planner."""
        first, ends = request.calls[0] if request.calls else n, (request.fed, request.fed + n)
        if request.fed and len({(t - 1 - self.sinks) // self.page for t in ends}) == 1:
            return 0  # all of them go to the page that is open
        now, then = (self.pages(t, first) for t in ends)
        return max(0, then - now) + self._spare()

    def _need(self, counts: dict[Request, int]) -> int:
        return sum(self._growth(request, n) for request, n in counts.items())

    def _admit(self) -> None:
        """In the order of the line, as long as they fit: with their prompt and a page more, beside the rest of the
        prompts of those that run, and a page more of each. Who does not fit is asked again when somebody has left."""
        while self.waiting and not (self.full and self.running):
            request = self.waiting[0]
            cache = request.cache if request.suspended else self.prefix.open(request.ids())
            assert cache is not None
            held = 0 if request.suspended else cache.get_seq_length()
            want = self.pages(len(request.ids()) + self.page, self.chunk) - self.pages(held, held) + self._spare()
            want += sum(self._growth(r, max(1, len(r.ids()) - r.fed) + self.page) for r in self.running)
            while want > self._free() and self._trim(want - self._free()):
                pass
            self.full = want > self._free()
            if self.full and self.running:
                return
            self.waiting.popleft()
            self.running.append(request)
            if request.suspended:
                try:
                    cache.resume()
                except MemoryError as error:
                    self._back(request)
                    if not self.running:
                        self._fail(request, str(error))
                    return
                request.suspended = False
            else:
                request.cache, request.fed = cache, held
                request.calls = [held] if held else []

    def _trim(self, bytes: int) -> bool:
        """Lets go prefixes of so many bytes. False where there are none, or all are pinned."""
        before = self.prefix.stats()["bytes"]
        self.prefix.trim(max(0, before - bytes))
        return self.prefix.stats()["bytes"] < before

    def _back(self, request: Request) -> None:
        """To the head of the line, until somebody leaves."""
        self.running.remove(request)
        self.waiting.appendleft(request)
        self.full = True

    def _make_room(self, short: int) -> bool:
        """Frees memory: prefixes, else the sequence that came last. False where only one is left."""
        if self._trim(short):
            return True
        if len(self.running) < 2:
            return False
        request = self.running[-1]
        request.cache.suspend()  # type: ignore[union-attr]
        request.suspended, request.preempted = True, request.preempted + 1
        self._back(request)
        self.meter.preempted.inc()
        return True
