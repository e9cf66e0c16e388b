"""Sealed files whose numbers differ from what `save` writes, and the memory that a process requests when it loads
them.

    python tests/support/asked_files.py TURNS                the named ones, then TURNS random ones
    python tests/support/asked_files.py -max_total_time=S    random ones for S seconds: a fuzz target

Exits with 1 if loading a file, or using the cache before it gets new tokens, requests more than four times the file's
size plus 1 MB, or raises an unexpected exception."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import asked
import numpy as np
import torch
from hostile_files import Change, Layers, Options, Parts, drawn, edited, part
from transformers import LlamaConfig

import kvcompress
from kvcompress import _C, KVCache
from kvcompress.policies import Watch

CONFIG = LlamaConfig(
    hidden_size=64, num_attention_heads=2, num_key_value_heads=2, head_dim=32, num_hidden_layers=2, vocab_size=50
)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "int4": {"key": "int4"}, "fixed": {"max_length": 256},
    "snapkv": {"policy": kvcompress.SnapKV(budget=40)}, "h2o": {"policy": kvcompress.H2O(budget=40)},
    "watch": {"policy": Watch(kvcompress.KNorm(budget=40), 4)}, "streaming": {"policy": kvcompress.StreamingLLM(32)},
    "endless": {"policy": kvcompress.StreamingLLM(4, 32, positions="cache")},
}  # fmt: skip
FOLDER = Path(tempfile.mkdtemp(prefix="kvcompress-files-"))
NO_BYTES = np.uint64(_C.gather(_C.Pool(1 << 20), np.empty((0, 2), np.int64), np.empty(0, np.uint8))).tobytes()


def sources() -> dict[str, Path]:
    """Files as `save` writes them."""
    found = {}
    for name, options in OPTIONS.items():
        cache = KVCache(CONFIG, page_size=16, **options)
        for T in (70, 3):
            for layer in cache.layers:
                q, k, v = torch.randn(3, 1, 2, T, 32)
                layer.fit(k, v)
                layer.store.attend(q, k, v)
                layer.changed()
            for layer in cache.layers:
                layer.evict()
        found[name] = FOLDER / f"{name}.kvc"
        cache.save(found[name])
    return found


# ---------------------------------------------------------------- defects


def as_saved(options: Options, layers: Layers, parts: Parts) -> None:
    pass


def empty(options: Options, layers: Layers, parts: Parts) -> None:
    layers[:] = [{"kind": "paged"}] * 2
    parts.clear()


def fixed_for_ever(options: Options, layers: Layers, parts: Parts) -> None:
    empty(options, layers, parts)
    options["max_length"] = 2**31 - 1


def many_clusters(options: Options, layers: Layers, parts: Parts) -> None:
    empty(options, layers, parts)
    knorm = {"policy": "KNorm", "args": [40], "options": {}}
    options["policy"] = {"policy": "Watch", "args": [knorm, 2**30], "options": {}}


def rows_without_bytes(options: Options, layers: Layers, parts: Parts) -> None:
    for i in range(2):
        parts[f"{i}.entries"] = part("I64", (1 << 24, 1, 0))


def bare_rows(n: int) -> Change:
    """Rows that take 24 bytes each and hold nothing."""

    def change(options: Options, layers: Layers, parts: Parts) -> None:
        for i in range(2):
            parts[f"{i}.entries"] = part("I64", (n, 1, 1), np.full(n, -1, np.int64).tobytes())
            parts[f"{i}.rows"] = part("I64", (n, 1, 2), bytes(16 * n))
            parts[f"{i}.pages"] = part("U8", (0,))
            parts[f"{i}.checksum"] = part("I64", (1,), NO_BYTES)
            if layers[i]["eviction"]:
                layers[i]["eviction"]["pads"] = [[]] * n

    return change


def seen_and_not_stored(options: Options, layers: Layers, parts: Parts) -> None:
    bare_rows(1)(options, layers, parts)
    for layer in layers:
        layer["seen"] = 60_000_000


def wide_heads(options: Options, layers: Layers, parts: Parts) -> None:
    for layer in layers:
        layer |= {"heads": 1 << 16, "key_dim": 4096, "value_dim": 4096}


def one_page_again_and_again(options: Options, layers: Layers, parts: Parts) -> None:
    n = 30_000
    for i, layer in enumerate(layers):
        rows = np.frombuffer(parts[f"{i}.rows"].data().tobytes(), np.int64).reshape(1, -1, 2) + np.array([16 * n, 0])
        entries = np.frombuffer(parts[f"{i}.entries"].data().tobytes(), np.int64).reshape(1, rows.shape[1], -1)
        more = np.concatenate([entries[..., :2], np.repeat(entries[..., 1:2], n, 2), entries[..., 2:]], 2)
        layer["seen"] += 16 * n
        parts[f"{i}.entries"] = part("I64", more.shape, more.tobytes())
        parts[f"{i}.rows"] = part("I64", rows.shape, rows.tobytes())


def long_lists(options: Options, layers: Layers, parts: Parts) -> None:
    layers[0]["more"] = [[]] * 300_000


def long_text(options: Options, layers: Layers, parts: Parts) -> None:
    layers[0]["more"] = "x" * 3_000_000


def many_parts(options: Options, layers: Layers, parts: Parts) -> None:
    for i in range(20_000):
        parts[f"{i}.other"] = part("U8", (0,))


NAMED = {
    "256 bare rows": bare_rows(256), "40,000 bare rows": bare_rows(40_000),
    **{x.__name__: x for x in (
        as_saved, empty, fixed_for_ever, many_clusters, rows_without_bytes, seen_and_not_stored, wide_heads,
        one_page_again_and_again, long_lists, long_text, many_parts,
    )},
}  # fmt: skip
REFUSED = one_page_again_and_again, fixed_for_ever, rows_without_bytes, wide_heads, long_lists, long_text, many_parts


# ---------------------------------------------------------------- requests


def look(cache: KVCache) -> None:
    """Calls everything that needs no new token and returns no K or V."""
    cache.stats(), repr(cache), cache.to_dict()
    for layer in cache.layers:
        if layer.is_initialized:
            layer.store.signature(), layer.store.kept_heads(), layer.store.page_store.parts()
    cache.crop(-1)
    cache.batch_select_indices(torch.tensor([0]))
    cache.reset()


def attempt(what: str, source: Path, change: Change) -> bool:
    """Whether the file is accepted. SystemExit if it requests too much."""
    path = FOLDER / "hostile.kvc"
    edited(source, path, change)
    size = path.stat().st_size
    made, most = asked.peak(lambda: KVCache.load(path, CONFIG))
    after, said = 0, made
    if isinstance(made, KVCache):
        most += made.pool.stats()["used"]
        said, after = asked.peak(lambda: look(made))
    if not isinstance(said, (type(None), ValueError, MemoryError)):
        raise said
    for which, got in (("loading", most), ("before new tokens", after)):
        if got > 4 * size + (1 << 20):
            raise SystemExit(f"{what}: {which} asked for {got:,} bytes of {size:,}: {made!r}")
    return isinstance(made, KVCache)


def main() -> None:
    torch.set_num_threads(1)
    saved = sources()
    KVCache.load(saved["plain"], CONFIG)  # initialize what is created only once
    seconds = [int(x.split("=")[1]) for x in sys.argv if x.startswith("-max_total_time=")]
    end, first = (time.time() + seconds[0], int(time.time()) * 100_000) if seconds else (0.0, 0)
    taken = turn = 0
    if not seconds:
        for name, source in saved.items():
            for what, change in NAMED.items():
                if attempt(f"{name}, {what}", source, change) and change in REFUSED:
                    raise SystemExit(f"{name}, {what}: expected a ValueError, got a cache")
    names = sorted(saved)
    while time.time() < end if seconds else turn < int(sys.argv[1]):
        seed = first + turn
        taken += attempt(f"seed {seed}", saved[names[seed % len(names)]], drawn(np.random.default_rng(seed)))
        turn += 1
    print(f"{taken} of them were taken\nstat::number_of_executed_units: {turn}")


if __name__ == "__main__":
    if not asked.counts():
        os.execve(sys.executable, [sys.executable, *sys.argv], asked.environment())
    main()
