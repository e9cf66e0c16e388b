"""Memory requests of ops and of calls of a layer or cache, each with a limit in terms of its inputs and outputs.

python tests/support/asked_calls.py     one line per call; exits with 1 if one exceeds its limit"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import asked
import torch
from test_ops import CALLS
from transformers import LlamaConfig

from kvcompress import H2O, KVCache, PagedKV

H, G, D, N = 2, 4, 64, 20_000
CONFIG = LlamaConfig(
    hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_hidden_layers=2, vocab_size=50
)
KB, MB = 1 << 10, 1 << 20
OWN = torch.randn(2, 1, H, 1, D)  # K and V of a token
PROMPT = torch.randn(2, 1, H, 4096, D)
DENSE = 2 * H * D * 4  # bytes per token, K and V in float32
PAGES = N // 64
MARKS = 2 * H * 4 * (N // 5 + 2048)  # with a policy: a slot and a score per head and token of a long call


def size(x: Any) -> int:
    """Total bytes of the tensors in it."""
    if isinstance(x, torch.Tensor):
        return x.nbytes
    return sum(map(size, x)) if isinstance(x, (list, tuple)) else 0


def filled(key: str, policy: Any = None) -> PagedKV:
    kv = PagedKV(H, D, key=key, policy=policy)
    for _ in range(5):
        kv.attend(torch.randn(1, H * G, N // 5, D), *torch.randn(2, 1, H, N // 5, D))
    return kv


def cache_of(tokens: int) -> KVCache:
    cache = KVCache(CONFIG)
    for i in range(2):
        cache.update(*torch.randn(2, 1, H, tokens, D), i)
    return cache


# name: (setup, call, limit in bytes). The stored tokens do not count for a step.
LAYERS: dict[str, tuple[Callable[[PagedKV], Any], int]] = {
    "a token": (lambda kv: kv.append(*OWN), 64 * KB),
    "a step of attention": (lambda kv: kv.attend(torch.randn(1, H * G, 1, D), *OWN), 64 * KB),
    "4,096 tokens": (lambda kv: kv.append(*PROMPT), 64 * KB),
    "attention of 512": (
        lambda kv: kv.attend(torch.randn(1, H * G, 512, D), *PROMPT[:, :, :, :512]), 3 * 512 * H * G * D * 4,
    ),
    "dense": (lambda kv: kv.dense(), N * DENSE + 512 * KB),
    "crop": (lambda kv: kv.crop(N // 2), 64 * PAGES + 64 * KB),
    "clone": (lambda kv: kv.clone(), 64 * PAGES + 64 * KB),
    "8 beams": (lambda kv: kv.repeat(8), 8 * 64 * PAGES + 64 * KB),
    "figures": (lambda kv: (kv.page_store.parts(), kv.stats(), repr(kv)), 64 * KB),
}  # fmt: skip
CACHES: dict[str, tuple[Callable[[KVCache, Path], Any], int]] = {
    "stats": (lambda c, at: (c.stats(), repr(c)), 128 * KB),
    "save": (lambda c, at: c.save(at / "a.kvc"), 8192 * DENSE // 3 + MB),  # the pages of a layer exist twice
    "suspend": (lambda c, at: c.suspend(), 2 * 8192 * DENSE // 3 + MB),
    "to_dynamic_cache": (lambda c, at: c.to_dynamic_cache(), 3 * 8192 * DENSE + MB),
}


def main() -> None:
    torch.set_num_threads(2)
    failed = 0

    def line(what: str, act: Callable[[], Any], bound: Callable[[Any], int]) -> None:
        nonlocal failed
        made, most = asked.peak(act)
        if isinstance(made, Exception):
            raise made
        over = most > bound(made)
        failed += over
        print(f"{'MORE' if over else 'fine'}  {what}: {most:,} of {bound(made):,} bytes")

    for name, make in CALLS.items():  # workspace of two threads, inputs and outputs
        op, args = getattr(torch.ops.kvcompress, name), list(make())
        op(*[x.clone() if isinstance(x, torch.Tensor) else x for x in args])
        line(name, lambda op=op, args=args: op(*args), lambda made, args=args: 4 * (size(args) + size(made)) + 256 * KB)  # type: ignore[misc]
    for key, policy in (("int8", None), ("int4", H2O(1024))):
        first = filled(key, policy)
        for what, (call, most) in LAYERS.items():
            call(first.clone())  # creates threads and workspace
            twin, rows = first.clone(), 8 if what == "8 beams" else 4 if what == "4,096 tokens" else 1
            bound = most + (rows * MARKS if policy else 0)
            line(
                f"{key}{', H2O' if policy else ''}: {what}", lambda call=call, twin=twin: call(twin),
                lambda made, bound=bound: bound,
            )  # type: ignore[misc]  # fmt: skip
    for what, (act, most) in CACHES.items():
        cache, folder = cache_of(8192), Path(tempfile.mkdtemp())
        line(
            f"cache: {what}", lambda act=act, cache=cache, folder=folder: act(cache, folder),
            lambda made, most=most: most,
        )  # type: ignore[misc]  # fmt: skip
    sys.exit(failed > 0)


if __name__ == "__main__":
    if not asked.counts():
        os.execve(sys.executable, [sys.executable, *sys.argv], asked.environment())
    main()
