"""Attention over latents (MLA): q has Dk + Dv dims, and the values are K. Compared with float64 over the stored
values."""

import itertools
import math

import levels
import pytest
import torch
from test_attend import BOUND, NO_SEALS, NONE, Store, data, error

from kvcompress import formats, ops

ROWS = [x for x in list(BOUND)[3:] if x not in formats.CALIBRATED]  # formats for latents


def reference(store, q, k, v, scale, s_aux=None, window=0, softcap=0.0):
    """float64, over the stored tokens and the call's own k and v unrounded; K and V of a token concatenated."""
    K, V = (x.double() for x in store.dense())
    T, S = k.shape[2], store.table.seen
    real = torch.from_numpy(store.real)
    if T:
        own = real[:, None, S - T :, None]
        K[:, :, S - T :], V[:, :, S - T :] = torch.where(own, k.double(), 0.0), torch.where(own, v.double(), 0.0)
    s = q.double() @ torch.cat([K, V], 3).transpose(2, 3) * scale
    s = softcap * torch.tanh(s / softcap) if softcap else s
    at = torch.arange(S)
    sees = at[None] <= at[S - q.shape[2] :, None]
    if window:
        sees = sees & (at[None] > at[S - q.shape[2] :, None] - window)
    sees = sees[None, None] & real[:, None, None]
    s = s.masked_fill(~sees, -torch.inf)
    lse = torch.logsumexp(s, -1)
    total = lse if s_aux is None else torch.logaddexp(lse, s_aux.double()[None, :, None])
    p = torch.exp(s - torch.where(total.isinf(), 0.0, total)[..., None]).masked_fill(~sees, 0.0)
    return p @ K, lse


def drive(store, lengths, heads, dtype=torch.float32, mask=None, loud=True, sharp=1, attend=ops.attend, **options):
    """Calls of these lengths: the op's out, lse and accumulated attention, and the reference's. sharp: factor for q.
    attend: the op, or a function with its signature."""
    start, scale = 0, 1 / math.sqrt(store.D + store.Dv)
    for i, T in enumerate(lengths):
        store.poison()
        q = sharp * data(store.B, heads, T, store.D + store.Dv, 3 * i, dtype)
        k, v = (data(store.B, 1, T, D, 3 * i + j, dtype, loud) for j, D in ((1, store.D), (2, store.Dv)))
        own = None if mask is None else mask[:, start : start + T].contiguous()
        seen, aux = store.table.seen, options.get("s_aux")
        seals = torch.from_numpy(store.table.plan(T, None if own is None else own.numpy()))
        out, lse, accumulated = attend(
            q, k, v, *store.tensors(), NONE.bool() if own is None else own, NONE if aux is None else aux, seals, seen,
            *store.geometry, options.get("window", 0), scale, options.get("softcap", 0.0), start + T,
        )  # fmt: skip
        store.table.commit()
        new = torch.ones(store.B, T, dtype=torch.bool) if own is None else own
        store.real = torch.cat([torch.from_numpy(store.real), new], 1).numpy()
        yield out.transpose(1, 2), lse, accumulated, *reference(store, q, k, v, scale, **options)
        start += T


def check(results, bound):
    for out, lse, accumulated, want, want_lse in results:
        assert out.shape == want.shape and error(out, want) <= bound
        there = ~torch.isinf(want_lse)
        assert torch.equal(torch.isinf(lse), ~there) and (lse.double() - want_lse)[there].abs().max() <= 20 * max(
            bound, 1e-5
        )
        paid = there.sum(dim=(1, 2)).double()  # the weights of a query sum to 1
        assert (accumulated.sum(dim=(1, 2)).double() - paid).abs().max() <= 20 * max(bound, 1e-4) * max(1.0, paid.max())


@pytest.mark.parametrize("Dk, Dv, heads", [(512, 64, 20), (128, 32, 5)])
@pytest.mark.parametrize("key", ["raw", *ROWS])
def test_latents_in_every_format(key, Dk, Dv, heads):
    value = "raw" if key == "raw" else "int8"
    bound = BOUND["raw_f32" if key == "raw" else key]
    check(drive(Store(key, value, H=1, D=Dk, Dv=Dv), [150, 1, 6, 70, 1], heads), bound)


@pytest.mark.parametrize("value", ["raw", *ROWS])
def test_rotary_parts_in_every_format(value):
    check(drive(Store("int8", value, H=1, D=96, Dv=64), [200, 1, 3], 9), max(5e-3, BOUND.get(value, 0.0)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("key", ["raw", "int8", "int4", "fp8_e4m3"])
def test_half_precision(key, dtype):
    store = Store(key, "raw" if key == "raw" else "int8", H=1, D=512, Dv=64, dtype=dtype)
    check(drive(store, [140, 1, 5], 16, dtype, loud=False), 1e-2)


@pytest.mark.parametrize("key", ["raw", "int8", "int4"])
def test_many_pages_and_heads(key):
    """More than 64 pages: split into runs, with 8-bit p and q where precise enough."""
    store = Store(key, "raw" if key == "raw" else "int8", H=1, D=512, Dv=64, page_size=16)
    check(drive(store, [300] * 4 + [1], 16, loud=False), BOUND["raw_f32" if key == "raw" else key])


@pytest.mark.parametrize(
    "key, sharp",
    [("int8", 1), ("int4", 10), *(pytest.param(key, sharp, marks=pytest.mark.full) for key, sharp in
     [("int8", 10), ("int4", 1), *itertools.product(("int4_lloyd", "int2"), (1, 10))])],
)  # fmt: skip
def test_many_pages_of_half_precision(key, sharp):
    """8-bit p: odd numbers of heads, dims that are not multiples of 64. sharp: one token gets almost all the weight."""
    store = Store(key, "int8", H=1, D=144, Dv=48, page_size=16, dtype=torch.bfloat16)
    calls = list(drive(store, [1200, 1, 2], 21, torch.bfloat16, loud=False, sharp=sharp))
    check(calls[1:], 4e-3 if key == "int8" else 1e-2)


@pytest.mark.parametrize("key", ["int8", "int4"])
def test_pages_of_a_part_of_weights_and_a_half(key):
    """Pages of 48 tokens, whose weights have separate steps for 32 and 16 tokens, in blocks of 64 and 16 dims."""
    store = Store(key, "int8", H=1, D=144, Dv=48, page_size=48, dtype=torch.bfloat16)
    calls = list(drive(store, [320] * 10 + [1, 2], 5, torch.bfloat16, loud=False))
    check(calls[-2:], 4e-3 if key == "int8" else 1e-2)


@pytest.mark.parametrize("options", [{"window": 70}, {"softcap": 5.0}, {"s_aux": torch.linspace(-2, 2, 9)}])
def test_attention_options(options):
    check(drive(Store("int8", "int8", H=1, D=128, Dv=32), [100, 1, 40], 9, **options), 5e-3)


@pytest.mark.parametrize("key", ["raw", "int4"])
def test_pads_and_rows_of_their_own(key):
    mask = torch.ones(3, 161, dtype=torch.bool)
    mask[1, :40] = False
    mask[2, :158] = False
    store = Store(key, "raw" if key == "raw" else "int8", B=3, H=1, D=128, Dv=32)
    check(drive(store, [160, 1], 7, mask=mask), BOUND["raw_f32" if key == "raw" else key])


@pytest.mark.parametrize("page_size, sinks", [(16, 0), (32, 20), (256, 4)])
def test_page_sizes_and_sinks(page_size, sinks):
    store = Store("int8", "int8", H=1, D=64, Dv=16, page_size=page_size, sinks=sinks)
    check(drive(store, [300, 1, 17], 6), 5e-3)


def test_a_query_of_another_width_is_refused():
    store = Store("int8", "int8", H=1, D=64, Dv=16)
    store.table.plan(1)
    q, k, v = torch.zeros(1, 4, 1, 72), torch.zeros(1, 1, 1, 64), torch.zeros(1, 1, 1, 16)
    with pytest.raises(ValueError, match="q: .* 64 in dimension 3"):
        ops.attend(q, k, v, *store.tensors(), NONE.bool(), NONE, NO_SEALS, 0, *store.geometry, 0, 1.0, 0.0)
    store.table.rollback()


FIRST = ("scalar", "avx2", "neon")  # what the others build on


@pytest.mark.parametrize(
    "level", [pytest.param(x, marks=[] if x in FIRST else pytest.mark.full) for x in levels.OTHERS]
)
def test_every_level(level):
    """All of the above that is short, on every level."""
    names = "every_format and 128-32 or rotary_parts or other_pages"
    if level != "scalar":  # takes minutes
        names += " or test_half_precision"
    assert levels.on(level, levels.failures, __file__, names) == ""


def test_formats_that_are_tested_are_all():
    assert {row["name"] for row in formats.TABLE if row["bits"] <= 8} == {*ROWS, *formats.CALIBRATED}


@pytest.mark.parametrize("key,value", [("cal2", "int8"), ("int8", "cal2")])
def test_latents_in_digits_are_refused(key, value):
    with pytest.raises(ValueError, match="a format with a scale per row for latents, got cal2"):
        list(drive(Store(key, value, H=1, D=96, Dv=64), [200, 1, 3], 9))
