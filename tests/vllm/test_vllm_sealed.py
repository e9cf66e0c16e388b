"""Contents of sealed pages: builder and forward of the backend with a simulated scheduler.

The scheduler handles blocks and lengths as vLLM 0.32 does: chunked prompts, drafts of which some are rejected,
preemption, answers recomputed in chunks or found in the prefix cache (even in the step in which another request
computes them), reused blocks. Attention must equal that over the given tokens, and all pages that can be found must
hold the bytes of their tokens."""

import importlib.util
import random
from collections import Counter
from types import SimpleNamespace as Some

import pytest
import torch
from test_varlen import reference
from test_vllm_settings import config

from kvcompress import formats, ops

if not importlib.util.find_spec("vllm.config"):
    pytest.skip("vLLM is not installed: make vllm, then make test-vllm", allow_module_level=True)
from kvcompress.vllm import backend, residual
from kvcompress.vllm.settings import Settings

PAGE, BLOCK, BLOCKS, D = 64, 128, 14, 32
PROMPTS = [140, 200, 300]
ANSWER = 400
TOKENS = torch.randn(3, 1024, 2, 1, D, generator=torch.Generator().manual_seed(5))
"""K and V of each content's tokens, by place. A draft that is rejected is the negative of what is there."""


class Layer:
    """The backend's part, for the blocks of one layer."""

    def __init__(self, drafts, monkeypatch):
        said = config("int4", torch.float32, block_size=BLOCK, drafts=drafts)
        said.compilation_config = Some(static_forward_context={})
        said.cache_config.num_gpu_blocks, said.cache_config.kv_cache_size_tokens = BLOCKS, None
        monkeypatch.setattr(backend, "get_current_vllm_config", lambda: said)
        monkeypatch.setattr(Settings, "check_block", lambda *_: None)  # residual blocks are in separate memory here
        self.impl = backend.Impl(1, D, D**-0.5, num_kv_heads=1)
        spec = Some(num_kv_heads=1, head_size=D, head_size_v=D)
        self.builder = backend.Builder(spec, ["layer"], said, torch.device("cpu"))
        shape, int4 = Settings.of(said).geometry(1, D), formats.CODES["int4"]
        self.cache = torch.full((BLOCKS, 2 * shape.page_bytes), 255, dtype=torch.uint8)
        (self.name,) = layers = said.compilation_config.static_forward_context
        pages = Settings.of(said).residual_pages
        layers[self.name].kv_cache = torch.full((BLOCKS, pages * shape.residual_bytes), 255, dtype=torch.uint8)
        self.context = Some(no_compile_layers=layers, attn_metadata={})
        monkeypatch.setattr(backend, "get_forward_context", lambda: self.context)
        k, v = (TOKENS[:, :, i].transpose(1, 2).contiguous() for i in (0, 1))
        self.packed = ops.pack(k, v, int4, int4, PAGE)[:, :, 0]  # [contents, pages, bytes]

    def page(self, blocks, i):
        return self.cache[blocks[i // 2]].view(2, -1)[i % 2]

    def step(self, rows):
        """rows: (request, new tokens, drafts, accepted ones)."""
        ends = [r.computed + new for r, new, *_ in rows]
        starts = torch.tensor([0, *(new for _, new, *_ in rows)]).cumsum(0).int()
        pages = torch.zeros(len(rows), 32, dtype=torch.int32)
        for b, (request, *_) in enumerate(rows):
            table = [2 * x + i for x in request.blocks for i in (0, 1)]
            pages[b, : len(table)] = torch.tensor(table)
        given = []
        for (request, new, drafts, accepted), end in zip(rows, ends, strict=True):
            given.append(TOKENS[request.content, :end].clone())
            given[-1][end - drafts + accepted :] *= -1
            assert end - new == request.computed
        k, v = (torch.cat([x[len(x) - n[1] :, i] for x, n in zip(given, rows, strict=True)]) for i in (0, 1))
        cam = Some(
            query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=torch.tensor(ends).int(), num_reqs=len(rows),
            causal=True, max_query_len=int(starts.diff().max()), block_table_tensor=pages,
            is_prefilling=torch.tensor([r.computed < r.prompt for r, *_ in rows]),
        )  # fmt: skip
        table = torch.tensor([[r.residual] for r, *_ in rows]).int()
        cam_of_residual = Some(block_table_tensor=table, num_reqs=len(rows))
        self.context.attn_metadata[self.name] = residual.ResidualBuilder.build(None, 0, cam_of_residual)
        q, out = torch.randn(len(k), 1, D), torch.zeros(len(k), 1, D)
        self.impl.forward(None, q, k, v, self.cache.view(2 * BLOCKS, 1, PAGE, -1), self.builder.build(0, cam), out)
        for b, tokens in enumerate(given):
            at = slice(max(int(starts[b]), int(starts[b + 1]) - 8), int(starts[b + 1]))
            wanted = reference(q[at], tokens[:, 0], tokens[:, 1])
            assert float((out[at].double() - wanted).abs().max()) < 0.35

    def check(self, request):
        for i in range(request.computed // PAGE):
            assert torch.equal(self.page(request.blocks, i), self.packed[request.content, i]), "found, and not sealed"


class Request:
    def __init__(self, content):
        self.content, self.prompt = content, PROMPTS[content]
        self.tokens = self.prompt  # prompt and answer so far
        self.stop()

    def stop(self):
        self.blocks, self.residual, self.computed, self.answers = [], None, 0, False


class Scheduler:
    def __init__(self, seed, drafts, layer, seen):
        self.random, self.drafts, self.layer, self.seen = random.Random(seed), drafts, layer, seen
        self.free, self.cached, self.new = list(range(BLOCKS)), {}, set()
        self.waiting, self.running = [], []

    def take(self):
        block = self.free.pop(self.random.randrange(len(self.free)))
        self.cached = {key: b for key, b in self.cached.items() if b != block}
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
        self.seen["hit at once"] += bool(self.new & {*hits})
        self.running.append(request)
        return True

    def row(self, request):
        """(new tokens, drafts, accepted ones) of the next step; None if there are no blocks."""
        left = request.tokens - request.computed
        new = left if self.random.random() < 0.3 else self.random.randint(1, left)
        if self.random.random() < 0.5:  # the remaining token budget of a step
            new = min(new, self.random.randint(1, 1 + self.drafts))
        drafts = self.random.randint(0, self.drafts) if request.answers else 0
        while len(request.blocks) * BLOCK < request.computed + new + drafts:
            if not self.free:
                return None
            request.blocks.append(self.take())
        again = left > 1 and request.computed >= request.prompt
        self.seen["again"] += again
        self.seen["short"] += again and 1 < new <= 1 + self.drafts
        return new + drafts, drafts, self.random.randint(0, drafts)

    def publish(self, request, new, drafts, accepted):
        """Pages that will certainly be full after this step can be found from now on."""
        for i in range((request.computed + new - drafts) // BLOCK):
            if self.cached.setdefault((request.content, i), request.blocks[i]) == request.blocks[i]:
                self.new |= {request.blocks[i]} if BLOCK * (i + 1) > request.computed else set()

    def step(self):
        rows, self.new, preempted = [], set(), self.seen["preempted"]
        for request in list(self.running):
            while request in self.running and (row := self.row(request)) is None:
                self.release(last := self.running.pop())
                self.waiting.insert(0, last)
                self.seen["preempted"] += 1
            if request in self.running:
                rows.append((request, *row))
                self.publish(*rows[-1])
        while self.waiting and len(self.running) < 5 and preempted == self.seen["preempted"]:
            if self.random.random() < 0.2 or not self.start(self.waiting[0]):
                break
            request = self.waiting.pop(0)
            if row := self.row(request):
                rows.append((request, *row))
                self.publish(*rows[-1])
        if rows:
            self.layer.step(rows)
        for request, new, drafts, accepted in rows:
            self.seen["rejected"] += accepted < drafts
            request.computed += new - drafts + accepted
            if request.computed >= request.tokens:
                request.tokens, request.answers = request.computed + 1, True
            self.layer.check(request)
        for request in [r for r in self.running if r.tokens - r.prompt > ANSWER]:
            self.running.remove(request)
            self.release(request)


@pytest.mark.parametrize("drafts", [3, 62])
def test_lives(drafts, monkeypatch):
    seen = Counter()
    for seed in range(4):
        scheduler = Scheduler(seed, drafts, Layer(drafts, monkeypatch), seen)
        for _ in range(250):
            if len(scheduler.waiting) < 2 and scheduler.random.random() < 0.1:
                content = scheduler.random.randrange(3)
                scheduler.waiting += [Request(content) for _ in range(scheduler.random.randint(1, 2))]
            scheduler.step()
    assert all(seen[x] > 1 for x in ("hit", "hit at once", "preempted", "rejected", "again", "short")), seen
