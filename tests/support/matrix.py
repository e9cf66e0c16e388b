"""The composition matrix: compatible features, rows that cover them, and a run of a row against `matrix_reference`.

    KVCOMPRESS_ISA=avx2 python tests/support/matrix.py 2 # the rows of pairs (3: of triples) of a level

An axis is a feature of the cache; a row has a value of each. `RULES` lists the rejected combinations; all others must
work. `run(row)` drives a cache of two layers as a model does (update, mask, attention function) and after every call
compares the results with float64 attention over what the reference decodes from the pages' bytes."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from far import FAR
from far_kernels import FarCopyThread, a_device
from matrix_pages import poison
from matrix_reference import Model, Spec
from matrix_rows import CHUNK, DIMS, HEADS, LAYERS, POLICIES, TYPES, VOCAB, WINDOW, Row, hash_of, rows
from transformers import masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvcompress import _C, KVCache, PrefixCache, Tiers, policies
from kvcompress.eviction.accumulated_attention import DRAFT


def prompt_length(row: Row) -> int:
    return 2 * int(row.page) + 30 if row.prefix == "none" else 3 * int(row.page) + 10


def policy_of(row: Row) -> Any:
    if row.policy == "none":
        return None
    # A prefix with evicted tokens cannot be shared, so eviction starts with the answer.
    n, slack = (prompt_length(row) + 3, 3) if row.prefix == "hit" else (40, 7)
    made = POLICIES[row.policy](n, slack)
    if row.positions == "cache":
        made = policies.StreamingLLM(4, n - 4, positions="cache", slack=slack)
    return made


def config_of(row: Row) -> Any:
    H, G = HEADS[row.heads]
    common = {
        "hidden_size": 32 * H * G, "intermediate_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": H * G,
        "num_key_value_heads": H, "head_dim": DIMS[row.dim][0], "vocab_size": VOCAB,
    }  # fmt: skip
    kinds = {"full": "full_attention", "sliding": "sliding_attention", "chunked": "chunked_attention"}
    types = [kinds[row.layer], *["full_attention"] * (LAYERS - 1)]
    if row.layer == "chunked":
        config: Any = hf.Llama4TextConfig(**common, layer_types=types, attention_chunk_size=CHUNK)
    elif row.layer == "sliding":
        config = hf.Qwen2Config(**common, layer_types=types, sliding_window=WINDOW, use_sliding_window=True)
    else:
        config = hf.LlamaConfig(**common)
    config._attn_implementation = row.attention
    return config


def options_of(row: Row) -> dict[str, Any]:
    opening = {"page": {}, "recent": {"residual_length": 20}, "direct": {"residual_length": 0}}[row.open]
    fixed = {"max_length": prompt_length(row) + 2 * int(row.page) + 80} if row.store == "fixed" else {}
    return {
        "key": row.key, "value": row.value, "page_size": int(row.page), "policy": policy_of(row), **opening, **fixed,
    }  # fmt: skip


# ---------------------------------------------------------------- driving it


class Driver:
    """A cache and its reference. K and V are functions of the tokens: equal prefixes have equal pages."""

    def __init__(self, row: Row, folder: Path, level: str | None = None) -> None:
        self.row, self.folder, self.config = row, folder, config_of(row)
        self.dtype, (self.H, self.G), (self.Dk, self.Dv) = TYPES[row.dtype], HEADS[row.heads], DIMS[row.dim]
        self.generator = torch.Generator().manual_seed(hash_of(row))
        self.device = FAR if row.device == "cuda" else torch.device("cpu")
        self.attention = ALL_ATTENTION_FUNCTIONS[row.attention]
        self.module = torch.nn.Module().eval()
        self.module.is_causal, self.module.num_key_value_groups = True, self.G  # type: ignore[assignment]
        content = torch.randn(LAYERS, VOCAB, self.H, self.Dk + self.Dv, generator=self.generator)
        self.content = content * (0.5 + torch.rand(LAYERS, VOCAB, 1, 1, generator=self.generator))
        self.place = 0.3 * torch.randn(LAYERS, 800, self.H, self.Dk + self.Dv, generator=self.generator)
        self.tiers: Any = None
        policy = policy_of(row)
        self.spec = Spec(
            self.H, self.G, self.Dk, self.Dv, self.dtype, int(row.page), row.policy, policy, row.key, row.value,
            recent={"page": 0, "recent": 20, "direct": -1}[row.open], pads_stored=row.attention == "sdpa",
            moved=row.positions == "cache", draft=row.mode == "draft",
            unsealed=row.policy != "none" and row.attention == "sdpa",
        )  # fmt: skip

    def tokens(self, rows: int, n: int) -> torch.Tensor:
        return torch.randint(0, VOCAB, (rows, n), generator=self.generator)

    def pair(self, layer: int, tokens: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.content[layer][tokens] + self.place[layer, start : start + tokens.shape[1]]
        x = x.transpose(1, 2).to(self.dtype)
        return x[..., : self.Dk].contiguous(), x[..., self.Dk :].contiguous()

    def masks(self, cache: KVCache, tokens: torch.Tensor, mask: torch.Tensor | None) -> dict[int, Any]:
        """The mask of each layer, as models create them."""
        made = {}
        for layer in range(LAYERS):
            kind = ["full", self.row.layer][layer == 0]
            make = {
                "full": masking_utils.create_causal_mask, "sliding": masking_utils.create_sliding_window_causal_mask,
                "chunked": masking_utils.create_chunked_causal_mask,
            }[kind]  # fmt: skip
            made[layer] = make(
                config=self.config, inputs_embeds=torch.empty(*tokens.shape, 1, dtype=self.dtype, device=self.device),
                attention_mask=None if mask is None else mask.to(self.device), past_key_values=cache,
                position_ids=None,
            )  # fmt: skip
        return made

    def call(self, cache: KVCache, model: Model, tokens: torch.Tensor, own: torch.Tensor | None = None) -> None:
        """A forward pass: own is bool [B, T], False at padding. Compares everything."""
        start, T = model.seen, tokens.shape[1]
        if model.drafts:  # deferred work of the last call, without rejected drafts
            for layer in cache.layers:
                layer.get_mask_sizes(1)
            model.end(cache)
        model.drafts = getattr(cache.layers[-1], "recording", False) and T <= DRAFT
        real = torch.ones_like(tokens, dtype=torch.bool) if own is None else own
        whole = torch.cat([model.real, real], 1)
        masks = self.masks(cache, tokens, whole.long() if not bool(whole.all()) else None)
        model.begin(real)
        shared, after = cache.forward_pass, {}

        def done() -> None:
            """Everything after attention: evictions, and pages that are offloaded."""
            after[shared.at] = model.lines(shared.at, cache.layers[shared.at])
            type(shared).done(shared)

        shared.done = done
        for layer in range(LAYERS):
            q = torch.randn(len(tokens), self.H * self.G, T, self.Dk, generator=self.generator).to(self.dtype)
            k, v = self.pair(layer, tokens, start)
            before = model.read(layer, cache.layers[layer], start)
            poison(cache.layers[layer])
            there = [x.to(self.device) for x in (q, k, v)]
            keys, values = cache.update(*there[1:], layer)
            window = {"sliding": WINDOW, "chunked": 0}.get(self.row.layer) if layer == 0 else None
            out = self.attention(
                self.module, there[0], keys, values, masks[layer], scaling=self.Dk**-0.5, dropout=0.0,
                sliding_window=window,
            )[0].cpu()  # fmt: skip
            model.attended(layer, before, after[layer], q, k, v, out.transpose(1, 2))
        del shared.done
        model.end(cache)

    # ------------------------------------------------------------------ offloaded pages

    def rest(self, cache: KVCache) -> KVCache:
        """Actions of the row's tier between calls."""
        if self.row.tier == "suspended":
            cache.suspend(self.folder / "waiting.kvc" if self.generator.initial_seed() % 2 else None)
            cache.resume()
        if self.row.tier == "saved":
            cache.save(self.folder / "saved.kvc")
            cache = KVCache.load(self.folder / "saved.kvc", self.config).to(self.device)
        return cache

    def use_tier(self, cache: KVCache) -> KVCache:
        if self.row.tier in ("host", "file"):
            self.tiers = Tiers(host_bytes=None if self.row.tier == "host" else 0, file_bytes=None,
                               copier=FarCopyThread() if self.device == FAR else None)  # fmt: skip
            cache.use_tiers(self.tiers, resident=0, unit=1)
        return cache

    def opened(self) -> tuple[KVCache, Model, torch.Tensor]:
        """(the cache, its reference, the remaining prompt)."""
        rows = 1 if self.row.policy != "none" and self.row.attention == "sdpa" else 2  # a batch requires our attention
        prompt, model = self.tokens(rows, prompt_length(self.row)), Model(self.spec, LAYERS, rows, self.kinds())
        options = options_of(self.row)
        if self.row.prefix == "none":
            return self.use_tier(KVCache(self.config, **options)), model, prompt
        prefix = PrefixCache(self.config, salt="matrix", **options)
        first, other = prefix.new(), Model(self.spec, LAYERS, rows, self.kinds())
        self.call(first, other, prompt)
        asked = prompt.clone()
        asked[:, -20:] = (asked[:, -20:] + 1) % VOCAB
        kept = prefix.commit(first, prompt)
        cache = prefix.open(asked)
        found = cache.get_seq_length()
        assert 0 < found <= kept and prefix.stats()["hits"] == rows, (found, kept, prefix.stats())
        del first
        model.opened([self.pair(i, asked[:, :found], 0) for i in range(LAYERS)])
        self.prefix = prefix
        return self.use_tier(cache), model, asked[:, found:]

    def kinds(self) -> list[tuple[str, int]]:
        size = {"full": 0, "sliding": WINDOW, "chunked": CHUNK}[self.row.layer]
        return [(self.row.layer, size), *[("full", 0)] * (LAYERS - 1)]

    def run(self) -> None:
        cache, model, prompt = self.opened()
        B, mode, own = len(prompt), self.row.mode, None
        if self.row.padding == "left":
            own = torch.arange(prompt.shape[1]) >= torch.tensor([[0], [23]])[:B]
        cuts = [0, 11, 40, prompt.shape[1]] if mode == "chunked" and prompt.shape[1] > 40 else [0, prompt.shape[1]]
        for a, b in itertools.pairwise(cuts):
            self.call(cache, model, prompt[:, a:b], None if own is None else own[:, a:b])
        cache = self.rest(cache)
        self.steps(cache, model, 2)
        cache = self.use_tier(self.rest(cache))
        getattr(self, f"_{mode}")(cache, model)
        if self.row.padding == "second turn":
            n = int(self.row.page) + 9
            turn = torch.arange(n) >= torch.arange(0, 7 * model.rows, 7)[:, None]
            self.call(cache, model, self.tokens(model.rows, n), turn)
        cache = self.rest(cache)
        self.steps(cache, model, 3)
        if (
            self.row.tier in ("host", "file")
            and self.row.mode not in ("beams", "rows", "copies")
            and self.row.policy == "none"
        ):
            assert self.tiers.stats()["puts"] > 0
        cache.pool.check()

    def steps(self, cache: KVCache, model: Model, n: int) -> None:
        for _ in range(n):
            self.call(cache, model, self.tokens(model.rows, 1))

    # ------------------------------------------------------------------ ways to generate

    def _decode(self, cache: KVCache, model: Model) -> None:
        self.steps(cache, model, 12)

    _chunked = _decode

    def _draft(self, cache: KVCache, model: Model) -> None:
        cache.activate_past_recording()
        for accepted in (0, 4, 1, 5, 2, 0, 3):
            self.call(cache, model, self.tokens(model.rows, 6))
            cache.crop(accepted - 5)
            model.crop(accepted - 5)

    def _turns(self, cache: KVCache, model: Model) -> None:
        self.call(cache, model, self.tokens(model.rows, int(self.row.page) + 5))
        self.steps(cache, model, 3)

    def _beams(self, cache: KVCache, model: Model) -> None:
        cache.batch_repeat_interleave(2)
        model.select([b // 2 for b in range(2 * model.rows)])
        for _ in range(5):
            self.steps(cache, model, 1)
            index = torch.randint(0, model.rows, (model.rows,), generator=self.generator)
            cache.reorder_cache(index.to(self.device))
            model.select(index.tolist())

    def _copies(self, cache: KVCache, model: Model) -> None:
        twin, shadow = copy.deepcopy(cache), model.copied()
        self.steps(cache, model, 3)
        self.steps(twin, shadow, 4)
        self.steps(cache, model, 2)

    def _rows(self, cache: KVCache, model: Model) -> None:
        cache.batch_select_indices(torch.tensor([1, 0, 1]).to(self.device))
        model.select([1, 0, 1])
        self.steps(cache, model, 3)


def run(row: Row) -> None:
    """Runs a row on this process's kernel level; AssertionError if it differs from the reference."""
    assert row.level == _C.isa()
    device = a_device() if row.device == "cuda" else contextlib.nullcontext()
    with tempfile.TemporaryDirectory() as folder, device:
        Driver(row, Path(folder)).run()


def refuse(row: Row, where: str) -> None:
    """Performs a rejected combination up to the point where it must fail: creating the cache, its prefix ("new",
    "prefix"), or, if the combination is only known later, announcing drafts ("record") or the first call ("call")."""
    if where == "prefix":
        PrefixCache(config_of(row), **options_of(row))
    else:
        cache = KVCache(config_of(row), **options_of(row))
        if where == "record":
            cache.activate_past_recording()
        if where == "call":
            H, (Dk, Dv) = HEADS[row.heads][0], DIMS[row.dim]
            cache.update(
                torch.randn(1, H, 3, Dk).to(TYPES[row.dtype]), torch.randn(1, H, 3, Dv).to(TYPES[row.dtype]), 0
            )


# ---------------------------------------------------------------- running all rows


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_all(chosen: list[Row]) -> dict[str, str]:
    """{row as text: "" or the failure} for the rows of this process's level."""
    found = {}
    with one_thread():
        for row in chosen:
            try:
                run(row)
                found["|".join(row)] = ""
            except Exception as error:
                found["|".join(row)] = f"{type(error).__name__}: {error}"[:300]
    return found


def run_level(level: str, strength: int) -> dict[str, str]:
    """`run_all` for the rows of a level, in a separate process."""
    done = subprocess.run(
        [sys.executable, __file__, str(strength)], env={**os.environ, "KVCOMPRESS_ISA": level}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":  # the rows of this level
    warnings.simplefilter("ignore")  # about K that does not suit a format
    print(json.dumps(run_all([row for row in rows(int(sys.argv[1])) if row.level == _C.isa()])))
