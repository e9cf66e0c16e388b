"""Calls of one token per row on raw open pages: bytes and results of the CPU's op, by a single launch if attention
writes the token (token.cuh), or by a few (token.cu)."""

import pytest
import torch
from cuda_twin import DEVICE, ENTRY, FINITE, LAUNCHER, PAGE, ROWS, Twin
from test_attend import NO_SEALS, NONE, check, data, error, run
from test_cuda_attend import Store, formats_of

from kvcompress import _C, formats, ops

TWIN = pytest.mark.skipif(DEVICE != "cpu", reason="launches are counted on the twin")


class Noted:
    """A twin with KVC_OPEN_RAW that records the kernels launched by its calls."""

    def __init__(self, *names, open_raw=True, **options):
        self.names = []
        launcher = LAUNCHER(lambda name, *_: self.names.append(name.decode()) or 0) if DEVICE == "cpu" else None
        self.twin = Twin(formats=formats_of(*names) | (formats.OPEN_RAW if open_raw else 0), launcher=launcher,
                         **options)  # fmt: skip

    def taken(self):
        """Kernels launched since the last call, without dims."""
        names, self.names[:] = [x.removeprefix("kvc_").rsplit("_", 1)[0] for x in self.names], []
        return names


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("D,Dv,page_size,sinks,B", [
    (64, 64, 16, 4, 1), (80, 48, 48, 0, 2), pytest.param(128, 128, 64, 20, 3, marks=pytest.mark.full),
    pytest.param(320, 512, 16, 4, 1, marks=pytest.mark.full),
])  # fmt: skip
def test_bytes_and_results(dtype, D, Dv, page_size, sinks, B):
    """Sinks, open pages, a launch that seals in the same call. The pages of each call are compared with the CPU's
    (Store.step)."""
    noted = Noted("int8", "int4")
    store = Store("int8", "int4", B=B, D=D, Dv=Dv, dtype=dtype, page_size=page_size, sinks=sinks, twin=noted.twin)
    check(run(store, [1, 1, 1, page_size + 5, *[1] * (page_size + 8), 9, 1, 1], 2, dtype=dtype), 2e-2)


def sealed_pages(store):
    return int((store.table.entries & 0xFFFF == formats.CODES["int8"] * 0x101).sum())


EVERY_COMMIT = (("int4", 64), ("raw", 64))  # nvfp4 takes 20 seconds


@pytest.mark.parametrize(
    "key,dtype,counters",
    [
        pytest.param(key, dtype, counters, marks=() if (key, counters) in EVERY_COMMIT else pytest.mark.full)
        for key, dtype in (("int4", torch.bfloat16), ("raw", torch.float16), ("nvfp4", torch.float32))
        for counters in (0, 1, 64)
    ],
)
def test_rows_split_into_runs(key, dtype, counters):
    """The run with the token's column writes it, the last run merges all; counters are 0 after each call
    (Twin.record). With too few counters, or none, the token is written by a separate launch."""
    noted = Noted(key, processors=16, counters=counters)
    store = Store(key, key, B=1, H=2, D=64, dtype=dtype, page_size=64, sinks=4, twin=noted.twin)
    list(run(store, [1500, 1], 2, dtype=dtype))
    noted.taken()
    check(run(store, [1, 1], 2, dtype=dtype), 2e-2)
    if DEVICE == "cpu":
        names = noted.taken()
        assert ["token" in names, len(names)] == ([False, 2] if counters == 64 else [True, 4])


@TWIN
def test_launches():
    """Attention only; plus the kernels that write if pages are sealed, or formats are unknown."""
    noted, other = Noted("int8"), Noted("int8", open_raw=False)
    stores = [Store("int8", "int8", H=1, D=64, page_size=16, dtype=torch.bfloat16, twin=x.twin) for x in (noted, other)]
    for store in stores:
        list(run(store, [40], 2, dtype=torch.bfloat16))
    noted.taken(), other.taken()
    seals = []
    for i in range(33):
        before = sealed_pages(stores[0])
        for store in stores:
            list(run(store, [1], 2, seed=i, dtype=torch.bfloat16))
        sealed = sealed_pages(stores[0]) > before
        seals.append(sealed)
        assert noted.taken() == ["token", "write"] * sealed + ["attend_int8"]
        assert other.taken() == ["write", "attend_int8"]
    assert 0 < sum(seals) < 4
    list(run(stores[0], [2], 2, dtype=torch.bfloat16))
    assert noted.taken()[0] == "write"


def call(store, arena, table, rows, seals=NO_SEALS, q=None, k=None):
    k, v = (data(store.B, store.H, 1, store.D, i) if k is None else k for i in (1, 2))
    q = data(store.B, store.H, 1, store.D, 3) if q is None else q
    return store.twin.attend(q, k, v, arena, table, rows, NONE.int(), NONE.bool(), NONE, seals, store.table.seen,
                             *store.geometry, 0, store.scale, 0.0)  # fmt: skip


def prepared():
    """A store of 31 tokens, with its arena, table and rows as a call with one more token finds them."""
    store = Store("int8", "int8", H=2, D=64, page_size=16, twin=Noted("int8").twin)
    list(run(store, [30, 1], 1))
    assert len(store.table.plan(1)) == 0
    arena, table, rows, _ = (x.clone() for x in store.tensors())
    return store, arena, table, rows


def test_empty_seal_pairs():
    """As in a captured call."""
    store, arena, table, rows = prepared()
    want, here = arena.clone(), arena.clone()
    results = [call(store, x, table, rows, seals=s) for x, s in
               ((want, NO_SEALS), (here, torch.full((3, 2), -1, dtype=torch.int64)))]  # fmt: skip
    assert store.twin.flags == 0 and torch.equal(want, here) and not torch.equal(want, arena)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_page_that_the_token_fills(dtype):
    """Sealed in the same call, which a table plans only for longer ones: the results of the CPU and of the general
    kernel."""
    raw, code = formats.resolve("raw", dtype), formats.CODES["int8"]
    opened, sealed = (2 * _C.page_bytes(x, x, 64, 48, 16) for x in (raw, code))
    pair = raw << 8 | raw  # the open page at 0, then the sealed one, then sinks
    table = torch.tensor([[[(opened + sealed) // 64 << 16 | pair, opened // 64 << 16 | code << 8 | code]]])
    arena = torch.full((2 * opened + sealed,), 0xFF, dtype=torch.uint8)
    seals, results = torch.tensor([[-1, -1], [pair, int(table[0, 0, 1])]]), []
    for op in (ops.attend, *(Noted("int8", open_raw=known).twin.attend for known in (True, False))):
        there, planned = arena.clone(), seals[1:] if op is ops.attend else seals  # the CPU has no room for more
        for i, (stored, T) in enumerate(((0, 4), (4, 15), (19, 1))):
            q, k, v = (data(1, h, T, d, 10 * i + h + d, dtype) for h, d in ((4, 64), (2, 64), (2, 48)))
            rows, last = torch.tensor([[[stored, 0]]]), i == 2
            now = table.clone()
            if not last:
                now[0, 0, 1] = pair
            result = op(q, k, v, there, now, rows, NONE.int(), NONE.bool(), NONE, planned if last else NO_SEALS, stored,
                        16, 4, 0, 0.1, 0.0)  # fmt: skip
        results.append((there, *result[:2]))
    (cpu, want, _), (token, out, lse), (other, same, same_lse) = results
    assert torch.equal(token, cpu) and torch.equal(other, cpu) and not torch.equal(cpu, arena)
    assert torch.equal(out, same) and torch.equal(lse, same_lse) and error(out, want.double()) <= 5e-3


ROOM = torch.full((3, 2), -1, dtype=torch.int64)
"""For seals, of which there are none: then token.cu writes."""


@pytest.mark.parametrize("seals", [NO_SEALS, ROOM])
@pytest.mark.parametrize("how", ["not raw", "none", "outside", "short"])
def test_invalid_pages_are_flagged_and_not_written(how, seals):
    """Flagged, and nothing is written."""
    store, arena, table, rows = prepared()
    before, column = arena.clone(), 1 + (31 - 4) // 16
    code = formats.CODES["int8"]
    if how == "not raw":
        table[0, 0, column] = table[0, 0, column] >> 16 << 16 | code << 8 | code
    elif how == "none":
        table[0, 0, column] = -1
    elif how == "outside":
        table[0, 0, column] += arena.numel() // 64 << 16
    else:
        table = table[:, :, :column].contiguous()
    call(store, arena, table, rows, seals=seals)
    assert store.twin.flags & {"not raw": PAGE, "none": ENTRY, "outside": ENTRY, "short": ROWS}[how]
    assert torch.equal(arena, before)


@pytest.mark.parametrize("seals", [NO_SEALS, ROOM])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_nan_and_inf(dtype, seals):
    noted = Noted("int8")
    store = Store("int8", "int8", H=1, D=64, page_size=16, dtype=dtype, twin=noted.twin)
    list(run(store, [20], 1, dtype=dtype))
    store.table.plan(1)
    k = data(1, 1, 1, 64, 1, dtype)
    clean = k.clone()
    k[..., 5], k[..., 6], clean[..., 5], clean[..., 6] = torch.nan, -torch.inf, 0, -0.0
    arenas = [store.tensors()[0].clone() for _ in range(2)]
    _, table, rows, _ = store.tensors()
    for arena, x, flag in zip(arenas, (k, clean), (FINITE, 0), strict=True):
        call(store, arena, table, rows, seals=seals, q=clean, k=x)
        assert store.twin.flags == flag
    assert torch.equal((arenas[0] & 0x7F), (arenas[1] & 0x7F))  # the sign of NaN is unspecified
