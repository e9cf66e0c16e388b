"""Calls that are recorded once, with their arguments, and run again, as CUDA graphs do: what changes lies in tensors."""

import pytest
import torch
from cuda_twin import Twin
from test_attend import error

from kvcompress import PagedKV, ops

ROOM = 4
"""Seals that a recorded call has room for."""


def replayed(kv, fixed, T):
    """The host's part of a step, before the run: what is new goes to where the call reads it."""
    table = kv._table
    fixed["seen"].fill_(table.seen)
    seals = table.plan(T, None)
    fixed["seals"].fill_(-1)[: len(seals)] = torch.from_numpy(seals)
    for name in ("entries", "rows", "slots"):
        new = torch.from_numpy(getattr(table, name))
        assert fixed[name].shape == new.shape
        fixed[name].copy_(new)


@pytest.mark.parametrize("key,value,page_size", [("int8", "int4", 64), ("kivi4", "nvfp4", 16), ("raw", "raw", 64)])
@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("op", ["twin", "attend_step"])
def test_replay(key, value, page_size, T, op):
    """One recorded call of T tokens, run over and over: through seals, after a crop, an eviction, other appends, and from
    an empty layer on. What it stores and gives equals a layer's that is asked anew each time."""
    layers = [PagedKV(2, 32, key=key, value=value, batch=2, page_size=page_size) for _ in range(2)]
    far, near = layers
    generator = torch.Generator().manual_seed(1)

    def draw(n):
        return [torch.randn(2, h, n, 32, generator=generator) for h in (4, 2, 2)]

    far._pool.unref(far._pool.alloc(8 << 20))  # the arena is recorded too: it must be long enough
    for kv in layers:
        kv._table.reserve(400)
    first = draw(page_size - 2)
    for kv in layers:
        kv.append(*first[1:])
    arena = far._pool.arena
    fixed = {name: torch.from_numpy(getattr(far._table, name).copy()) for name in ("entries", "rows", "slots")}
    fixed |= {"seals": torch.full((ROOM, 2), -1), "seen": torch.zeros(1, dtype=torch.int64)}
    qkv = draw(T)
    call = (*qkv, torch.from_numpy(arena), fixed["entries"], fixed["rows"], fixed["slots"], far._no_mask, far._no_aux,
            fixed["seals"], fixed["seen"], page_size, far.sinks, 0, far._scale, 0.0, 0, far._formats)  # fmt: skip
    twin = Twin()
    run = twin.record(*call) if op == "twin" else lambda: ops.attend_step(*call)

    def step(n):
        for _ in range(n):
            new = draw(T)
            for x, y in zip(qkv, new, strict=True):
                x.copy_(y)
            replayed(far, fixed, T)
            out = run()[0].transpose(1, 2)
            far._table.commit()
            assert twin.flags == 0
            want = near.attend(*new)[0]
            assert error(out, want.double()) <= (1e-5 if key == "raw" or op != "twin" else 2e-2)
        for a, b in zip(far.dense(), near.dense(), strict=True):
            assert torch.equal(a, b)

    def both(act):
        for kv in layers:
            act(kv)

    step(page_size // T + 3)  # over a seal
    both(lambda kv: kv.crop(kv.seen - 5))
    step(3)
    more = draw(page_size + 7)
    both(lambda kv: kv.append(*more[1:]))
    step(2)
    both(lambda kv: kv.reset())
    step(2)
    assert far._pool.arena.ctypes.data == arena.ctypes.data and far._pool.extent == len(arena)
