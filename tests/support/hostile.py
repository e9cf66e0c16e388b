"""Random invalid calls of the ops: arguments that share memory with each other and with the arena, index arrays whose
entries are valid individually but not together, and arrays that another thread changes during the call. They must
be rejected or answered, without accesses out of bounds (run under ASan: `make asan`, `make fuzz`), and the memory
around the arena must not change.

    python tests/support/hostile.py aliasing|together|changing -max_total_time=SECONDS"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from test_ops import CALLS

from kvcompress import _C, formats

Call = tuple[str, list[Any]]
NAMES = [row["name"] for row in formats.TABLE]
GUARD = 4096


def written(name: str) -> list[int]:
    """Tensor arguments that the op writes, by its schema."""
    arguments = getattr(torch.ops.kvcompress, name).default._schema.arguments
    return [i for i, x in enumerate(arguments) if x.alias_info is not None and x.alias_info.is_write]


def attempt(name: str, args: list[Any]) -> bool:
    """True if the op accepted it. Exceptions other than ValueError and TypeError propagate."""
    try:
        getattr(torch.ops.kvcompress, name)(*args)
    except RuntimeError as error:
        if not str(error).startswith(("kvcompress.ValueError", "kvcompress.TypeError")):
            raise
        return False
    return True


def moved(x: torch.Tensor, home: torch.Tensor, at: int) -> torch.Tensor:
    """x as a view of `home` (uint8, 1-D) at byte `at`, with its contents copied there; strides are not kept."""
    flat = x.contiguous()
    view = home[at : at + flat.numel() * flat.element_size()].view(flat.dtype).view(flat.shape)
    view.copy_(flat)
    return view


def arena_in_guards(arena: torch.Tensor, extra: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(whole block, the arena within it with `extra` more bytes); the guards contain 0x5a."""
    whole = torch.full((2 * GUARD + len(arena) + extra,), 0x5A, dtype=torch.uint8)
    inside = whole[GUARD : GUARD + len(arena) + extra]
    inside[: len(arena)] = arena
    return whole, inside


def aliasing(rng: np.random.Generator) -> Call:
    """A valid call with some tensors moved into one block of memory with others, at random distances."""
    name = str(rng.choice(list(CALLS)))
    args = list(CALLS[name]())
    tensors = [i for i, x in enumerate(args) if isinstance(x, torch.Tensor) and x.numel() and x.device.type == "cpu"]
    block = torch.zeros(1 << 21, dtype=torch.uint8)
    at = 0
    for i in tensors:
        if rng.random() < 0.6:
            size = args[i].numel() * args[i].element_size()
            back = int(rng.integers(0, max(at, 1) + 1)) if rng.random() < 0.7 else 0
            begin = max(0, (at - back) // 64 * 64)
            args[i] = moved(args[i], block, begin)
            at = max(at, begin + size)
    return name, args


def entries(rng: np.random.Generator, heads: int, dim: int, page: int, size: int, n: int) -> list[int]:
    """Entries whose pages are within `size` bytes. Each is valid; pages may overlap, formats may differ."""
    found = []
    while len(found) < n:
        key, value = (formats.CODES[str(x)] for x in rng.choice(NAMES, 2))
        if rng.random() < 0.5:
            value = key
        try:
            bytes_ = heads * _C.page_bytes(key, value, dim, dim, page)
        except ValueError:
            continue
        if bytes_ <= size:
            found.append(int(rng.integers(0, (size - bytes_) // 64 + 1)) << 16 | key << 8 | value)
    return found


def together(rng: np.random.Generator) -> Call:
    """compact, attend, read, score_tokens or an engine's ops with indices that are valid individually."""
    if rng.random() < 0.4:
        return engine(rng)
    heads, dim, page = int(rng.choice([1, 2])), int(rng.choice([32, 64, 256])), int(rng.choice([16, 32]))
    sinks, size = int(rng.choice([0, 0, 4])), int(rng.choice([1 << 14, 1 << 17]))
    arena = torch.from_numpy(rng.integers(0, 256, size, dtype=np.uint8))
    own = int(rng.choice([1, heads]))
    known = entries(rng, heads if own == 1 else 1, dim, page, size, int(rng.integers(1, 5)))
    pick = lambda: known[rng.integers(len(known))]  # noqa: E731
    what = rng.integers(4)
    if what == 0:
        n = int(rng.choice([1, 3, 20, 300, 1000]))
        layout = 16 if sinks and rng.random() < 0.2 else page
        lines = np.sort(rng.integers(0, rng.integers(1, 4), n)) if rng.random() < 0.8 else rng.integers(0, 3, n)
        one_to = pick()
        rows = [
            [int(line), pick(), int(rng.integers(layout)), one_to if rng.random() < 0.7 else pick(),
             int(i % layout if rng.random() < 0.7 else rng.integers(layout)), layout]
            for i, line in enumerate(lines)
        ]  # fmt: skip
        return "compact", [arena, torch.tensor(rows), heads, own, dim, dim, page, sinks]
    B, columns = int(rng.integers(1, 3)), int(rng.integers(2, 6))
    table = torch.tensor([pick() for _ in range(B * own * columns)]).view(B, own, columns)
    most = (columns - 1) * page
    rows_ = torch.stack([torch.from_numpy(rng.integers(0, most + 1, (B, own))), torch.zeros(B, own).long()], -1)
    slots = torch.empty(0, dtype=torch.int32)
    if rng.random() < 0.5:
        slots = torch.from_numpy(rng.integers(-1, most, (B, own, most + page)).astype(np.int32))
    tail = [heads, dim, dim, int(rng.choice([0, 7, most])), page, sinks]
    if what == 1:
        return "read", [torch.empty(0, dtype=torch.float16), arena, table, rows_, slots, *tail]
    if what == 2:
        return "score_tokens", [arena, table, rows_, slots, *tail, int(rng.integers(3))]
    T = int(rng.choice([0, 1, page, page + 3]))
    q, k, v = (torch.randn(B, h, T, dim) for h in (2 * heads, heads, heads))
    seals = torch.tensor([[pick(), pick()] for _ in range(int(rng.integers(0, 4)))], dtype=torch.int64).view(-1, 2)
    mask = torch.from_numpy(rng.random((B, T)) < 0.7) if rng.random() < 0.5 else torch.empty(0, dtype=torch.bool)
    seen = int(rows_[..., 0].max())
    return "attend", [q, k, v, arena, table, rows_, slots, mask, torch.empty(0), seals, seen, page, sinks, 0, 0.1, 0.0,
                      int(rng.choice([0, seen + T])), 0]  # fmt: skip


def engine(rng: np.random.Generator) -> Call:
    """attend_varlen or store_tokens with random combinations of blocks and lengths that are mostly in range."""
    heads, dim, page, pages = (int(rng.choice(x)) for x in ([1, 2], [32, 64], [16, 64], [1, 2]))
    name = str(rng.choice(NAMES)) if rng.random() < 0.8 else "int8"
    name = "raw" if name.startswith("raw") else name
    shape = formats.page_geometry(name, heads, dim, dtype=torch.float32, page_size=page)
    code, blocks, B = formats.resolve(name, torch.float32), int(rng.integers(1, 9)), int(rng.integers(1, 5))
    room = lambda n, size: torch.from_numpy(rng.integers(0, 256, (n, size), dtype=np.uint8))  # noqa: E731
    cache, ints = room(blocks, pages * shape.page_bytes), lambda x: torch.from_numpy(np.asarray(x, np.int32))
    if rng.random() < 0.3:
        T = int(rng.integers(0, 2 * page))
        slots = torch.from_numpy(rng.integers(-1, blocks * pages * page + (rng.random() < 0.2), T))
        k, v = torch.randn(2, T, heads, dim)
        return "store_tokens", [k, v, cache, slots, ints([]), code << 8 | code, pages * page, page]
    width, new = int(rng.integers(1, 4)), rng.choice([0, 1, 3, page, page + 3], B)
    most = width * pages * page
    before = np.maximum(0, rng.integers(0, most + 1, B) - new)
    residual, rings = torch.empty(0, dtype=torch.uint8), ints(np.empty((0, 0)))
    if shape.residual_bytes:
        residual, rings = room(blocks, shape.residual_bytes), ints(rng.permutation(blocks)[:B, None])
        rings = rings if len(rings) == B else ints(rng.integers(0, blocks, (B, 1)))
    sealed = drafts = ints([])
    if shape.residual_bytes and rng.random() < 0.3:
        sealed, drafts = ints(before // page * page), ints(rng.integers(0, 3, B))
    table = rng.permuted(np.arange(max(blocks, B * width)))[: B * width].reshape(B, width) % blocks
    if rng.random() < 0.3:
        table = rng.integers(-1, blocks + 1, (B, width))
    q, k, v = (torch.randn(int(new.sum()), h, dim) for h in (2 * heads, heads, heads))
    out, lse = torch.empty_like(q), torch.empty(2 * heads, len(q))
    flags = torch.zeros(B, dtype=torch.int32) if rng.random() < 0.8 else ints([])
    return "attend_varlen", [
        q, k, v, cache, ints(table), residual, rings, ints(np.r_[0, new.cumsum()]), ints(before + new), sealed, drafts,
        torch.empty(0), out, lse, flags, code << 8 | code, pages * page, page, page, int(rng.choice([0, 5, -16])), 0.1,
        0.0,
    ]  # fmt: skip


class Changing:
    """A thread that repeatedly overwrites integer arrays with wrong values and restores them, by NumPy copies that run
    without the GIL."""

    def __init__(self, pairs: list[tuple[np.ndarray, np.ndarray]]) -> None:
        self.copies, self.over = [], False
        for there, wrong in pairs:
            times = 64 * (1 + (1 << 14) // there.size)
            turns = np.repeat([True, False] * 32, times // 64).reshape(-1, *[1] * there.ndim)
            self.copies.append((
                np.lib.stride_tricks.as_strided(there, (times, *there.shape), (0, *there.strides)),
                np.where(turns, wrong, there).astype(there.dtype),
            ))  # fmt: skip

    @classmethod
    def of(cls, name: str, args: list[Any], rng: np.random.Generator) -> Changing:
        """All tensors that the op only reads."""
        kept, kinds, pairs = written(name), (torch.int32, torch.int64), []
        for i, x in enumerate(args):
            if i not in kept and isinstance(x, torch.Tensor) and x.dtype in kinds and 0 < x.numel() < 4096:
                right = x.numpy()
                wrong = np.roll(right, int(rng.integers(right.size)))
                if rng.random() < 0.5:
                    wrong = np.where(rng.random(right.shape) < 0.5, right, rng.choice([-1, 0, 3, 64, 2**30]))
                pairs.append((right, wrong))
        return cls(pairs)

    def __enter__(self) -> None:
        self.interval, self.began = sys.getswitchinterval(), threading.Event()
        sys.setswitchinterval(1e-5)
        self.thread = threading.Thread(target=self.work)
        self.thread.start()
        self.began.wait()

    def work(self) -> None:
        while not self.over:
            for to, numbers in self.copies:
                np.copyto(to, numbers)
            self.began.set()

    def __exit__(self, *exc: object) -> None:
        self.over = True
        self.thread.join()
        sys.setswitchinterval(self.interval)


KINDS: dict[str, Callable[[np.random.Generator], Call]] = {
    "aliasing": aliasing,
    "together": together,
    "changing": together,
}


def one(kind: str, seed: int) -> bool:
    """One call of this kind, between guards; True if it was accepted."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    name, args = KINDS[kind](rng)
    guards = None
    if kind != "aliasing":
        where = next(i for i, x in enumerate(args) if isinstance(x, torch.Tensor) and x.dtype == torch.uint8)
        arena = args[where]
        whole, inside = arena_in_guards(arena.flatten(), 0)
        args[where] = inside.view(arena.shape)
        guards = whole[:GUARD], whole[-GUARD:]
    if kind == "changing":
        with Changing.of(name, args, rng):
            taken = any([attempt(name, args) for _ in range(20)])
    else:
        taken = attempt(name, args)
    assert guards is None or all(bool((x == 0x5A).all()) for x in guards), f"{kind} {seed}: {name} wrote past the arena"
    assert _C.handles_live() == 0
    return taken


if __name__ == "__main__":  # a fuzz target: takes seconds like libFuzzer, prints its count at the end
    begin, seconds = time.time(), next(int(x.split("=")[1]) for x in sys.argv if x.startswith("-max_total_time="))
    calls = taken = 0
    while time.time() < begin + seconds:
        taken += one(sys.argv[1], int(begin) * 100_000 + calls)  # different calls in each run
        calls += 1
    print(f"{taken} of them were taken\nstat::number_of_executed_units: {calls}")
