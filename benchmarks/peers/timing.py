"""Shared by the scripts of this folder, which run in different virtual environments; requires only numpy."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

# B, query heads, KV heads, head dim, tokens, query tokens (the last ones, causal)
SHAPES = {
    "8K": (1, 32, 8, 128, 8192, 1),
    "32K": (1, 32, 8, 128, 32768, 1),
    "8x4K": (8, 32, 8, 128, 4096, 1),
    "chunk": (1, 32, 8, 128, 4096, 512),
    "latent": (1, 128, 1, 576, 8192, 1),  # V is the first LATENT dims of K
}
LATENT = 512


def report(system: str, config: str, megabytes: float, call: Callable[[], object], seconds: float = 1.5) -> None:
    """Prints a JSON line: median and minimum of `call` in ms, over about this many seconds."""
    call()
    times: list[float] = []
    while (sum(times) < seconds and len(times) < 200) or len(times) < 7:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    times.sort()
    ms = 1e3 * times[len(times) // 2]
    print(
        json.dumps({"system": system, "config": config, "ms": ms, "min_ms": 1e3 * times[0], "MB": megabytes}),
        flush=True,
    )


def arguments() -> tuple[tuple[int, ...], int]:
    """(shape, threads) from the command line."""
    return SHAPES[sys.argv[1]], int(sys.argv[2])
