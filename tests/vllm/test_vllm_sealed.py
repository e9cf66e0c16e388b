"""What lies in sealed pages (vllm/sealed.py), beside a scheduler that knows; needs no vLLM.

The model does what vLLM 0.32 does to blocks and lengths: prompts in pieces, drafts of which some are rejected,
preemption, answers computed again in pieces or found in the prefix cache, blocks that change hands. It keeps, by
request, how far the pages were sealed since it runs, and which pages of the memory are sealed."""

import random

import pytest
import torch

from kvcompress.vllm.sealed import Sealed

PAGE, BLOCK, BLOCKS, DRAFTS = 64, 128, 14, 3


class Request:
    def __init__(self, content, prompt):
        self.content, self.prompt, self.tokens = content, prompt, prompt  # tokens: prompt and answer so far
        self.stop()

    def stop(self):
        self.blocks, self.residual, self.computed, self.sealed, self.answers = [], None, 0, None, False


class Model:
    def __init__(self, seed, least):
        self.random, self.least, self.tracker = random.Random(seed), least, Sealed(DRAFTS)
        self.free, self.cached, self.sealed_pages = list(range(BLOCKS)), {}, set()
        self.waiting, self.running, self.seen = [], [], {"hit": 0, "preempted": 0, "rejected": 0, "again": 0}

    def take(self):
        block = self.free.pop(self.random.randrange(len(self.free)))
        self.cached = {key: b for key, b in self.cached.items() if b != block}
        self.sealed_pages -= {block * 2, block * 2 + 1}
        return block

    def release(self, request):
        self.free += {*request.blocks, request.residual} - {b for r in self.running for b in r.blocks}
        request.stop()

    def start(self, request):
        hits = []
        while (b := self.cached.get((request.content, len(hits)))) is not None and BLOCK * (
            len(hits) + 1
        ) < request.tokens:
            hits.append(b)
        self.free = [b for b in self.free if b not in hits]
        if len(self.free) < 2:
            self.free += {*hits} - {b for r in self.running for b in r.blocks}
            return False
        request.blocks, request.residual, request.computed = hits, self.take(), len(hits) * BLOCK
        self.seen["hit"] += len(hits) > 0
        if self.least > 1 + DRAFTS:
            assert all({2 * b, 2 * b + 1} <= self.sealed_pages for b in hits), "a hit on pages that are not sealed"
        self.running.append(request)
        return True

    def row(self, request):
        """(new tokens, drafts) of the next step, and the blocks for them; None if there is no room."""
        left = request.tokens - request.computed
        again = left > 1
        new = left
        if again and left > self.least:
            new = self.random.randint(self.least, left)
            new = left if 0 < left - new < self.least else new
        drafts = self.random.randint(0, DRAFTS) if request.answers else 0
        while len(request.blocks) * BLOCK < request.computed + new + drafts:
            if not self.free:
                return None
            request.blocks.append(self.take())
        self.seen["again"] += again and request.computed >= request.prompt
        return new + drafts, drafts

    def step(self):
        rows = []
        for request in list(self.running):
            if request not in self.running:
                continue
            while (row := self.row(request)) is None:
                last = self.running.pop()
                rows = [x for x in rows if x[0] is not last]
                self.release(last)
                self.waiting.insert(0, last)
                self.seen["preempted"] += 1
                if last is request:
                    break
            if row:
                rows.append((request, *row))
        for request, new, drafts in rows:  # what will be full and sure after this step can be found from now on
            for i in range((request.computed + new - drafts) // BLOCK):
                self.cached.setdefault((request.content, i), request.blocks[i])
        self.check(rows)
        for request, new, drafts in rows:
            accepted = self.random.randint(0, drafts)
            self.seen["rejected"] += accepted < drafts
            request.computed += new - drafts + accepted
            if request.computed >= request.tokens:
                request.tokens, request.answers = request.computed + 1, True
        for request in [r for r in self.running if r.tokens - r.prompt > 400]:
            self.running.remove(request)
            self.release(request)

    def check(self, rows):
        if not rows:
            return
        pages = torch.zeros(len(rows), 64, dtype=torch.int32)
        for b, (request, *_) in enumerate(rows):
            table = [2 * x + i for x in request.blocks for i in (0, 1)]
            pages[b, : len(table)] = torch.tensor(table)
        got = self.tracker.step(
            [r.residual for r, *_ in rows], pages, [r.computed + n for r, n, _ in rows], [n for _, n, _ in rows],
            [r.computed < r.prompt for r, *_ in rows],
        )  # fmt: skip
        for (request, new, drafts), sealed, said in zip(rows, *(x.tolist() for x in got), strict=True):
            first = request.sealed is None
            assert sealed == (request.computed // PAGE * PAGE if first else request.sealed)
            late = not first and 1 < new <= 1 + DRAFTS and request.computed >= request.prompt  # may be taken for drafts
            assert said == drafts or (late and drafts == 0 and said == new - 1)
            request.sealed = max(sealed, (request.computed + new - said) // PAGE * PAGE)
            self.sealed_pages |= {2 * request.blocks[i // 2] + i % 2 for i in range(request.sealed // PAGE)}


@pytest.mark.parametrize("least", [1, 2 + DRAFTS])  # tokens of a piece; of 2 to 4 an answer's may be taken for drafts
@pytest.mark.parametrize("seed", range(8))
def test_lives(seed, least):
    model = Model(seed, least)
    for _ in range(1500):
        if len(model.waiting) < 2 and model.random.random() < 0.1:
            content = model.random.randrange(3)
            model.waiting.append(Request(content, [40, 130, 300][content]))
        while model.waiting and len(model.running) < 5 and model.random.random() < 0.5:
            if not model.start(model.waiting[0]):
                break
            del model.waiting[0]
        model.step()
    assert all(n > 3 for n in model.seen.values()), model.seen
