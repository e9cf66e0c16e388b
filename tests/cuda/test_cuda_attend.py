"""CUDA's attention, run on the host: the accuracy tests of the CPU op, with the same float64 reference over the stored
values; the stored bytes must equal the CPU's."""

import math

import pytest
import test_attend as cpu
import torch
from cuda_twin import ENTRY, FINITE, ROWS, STAGE, Twin
from test_attend import BOUND, FEW, NO_SEALS, NONE, check, data, reference, run

from kvcompress import formats, ops


class Store(cpu.Store):
    """Like the CPU's, but calls go to CUDA's kernels; the CPU op does the same on a copy, and the pages must be
    equal."""

    def __init__(self, *args, twin=None, **options):
        super().__init__(*args, **options)
        self.twin, self.scale = twin or Twin(), 1 / math.sqrt(self.D)

    def step(self, q, k, v, mask=None, s_aux=None, window=0, softcap=0.0, attention_width=0):
        T = k.shape[2]
        seen = self.table.seen
        seals = torch.from_numpy(self.table.plan(T, None if mask is None else mask.numpy()))
        none = torch.empty(0)
        arena, table, rows, slots = self.tensors()
        ours = arena.clone()
        rest = [table, rows, slots, none.bool() if mask is None else mask, none if s_aux is None else s_aux, seals,
                seen, *self.geometry, window, self.scale, softcap, attention_width]  # fmt: skip
        out, lse, *self.accumulated = self.twin.attend(q, k, v, ours, *rest)
        assert self.twin.flags == 0
        self.want = ops.attend(q, k, v, arena, *rest)
        assert torch.equal(ours, arena)
        if q.numel() and not q.isnan().any() and bool(self.want[0].any()):
            assert cpu.error(out, self.want[0].double()) <= 2e-2
        self.table.commit()
        real = torch.ones(self.B, T, dtype=torch.bool) if mask is None else mask
        self.real = torch.cat([torch.from_numpy(self.real), real], 1).numpy()
        return out.transpose(1, 2), lse


def full(x):
    """A parameter of the full tier."""
    return pytest.param(x, marks=pytest.mark.full)


def formats_of(*names, dtype=torch.float32):
    return sum(1 << code for code in {formats.resolve(name, dtype) for name in names})


@pytest.mark.parametrize(
    "scale,softcap", [(-0.2, 3.0), *(pytest.param(x, 0.0, marks=pytest.mark.full) for x in (-0.2, 0.0))]
)
def test_scales_of_any_sign(scale, softcap):
    """Unless scales are negative, the largest score belongs to the largest product."""
    store = Store("int4", "int2", D=64, H=1, twin=Twin(formats=formats_of("int4", "int2")))
    store.scale = scale
    assert len(list(run(store, [70, 1, 3], 4, softcap=softcap))) == 3


@pytest.mark.parametrize("outliers", [full(False), True])
@pytest.mark.parametrize("D", [full(32), 64, full(128)])
@pytest.mark.parametrize(
    "key", [x if x in ("raw_f32", *FEW) else full(x) for x in BOUND if x not in ("raw_f16", "raw_bf16")]
)
def test_error_bounds(key, D, outliers):
    name = "raw" if key.startswith("raw") else key
    twin = Twin(formats=formats_of(name), order=int(outliers))
    check(run(Store(name, name, D=D, H=1, twin=twin), [140, 1, 1, 40], 4, outliers=outliers), BOUND[key])


@pytest.mark.parametrize("key", ["int8", "fp8_e4m3", "int4", "int2", "nvfp4"])
@pytest.mark.parametrize("D", [full(16), 48, full(80), full(192), 256])
def test_other_head_dims(key, D):
    check(run(Store(key, key, D=D, H=1, twin=Twin(formats=formats_of(key))), [100, 1, 3], 2, outliers=True), BOUND[key])


@pytest.mark.parametrize(
    "key,value",
    [
        ("int8", "nvfp4"),
        pytest.param("kivi4", "int4", marks=pytest.mark.full),
        pytest.param("int2", "raw", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("dtype", [full(torch.float32), full(torch.float16), torch.bfloat16])
def test_wide_heads_and_any_format(key, value, dtype):
    """Queries in every form, 256 dims: exceeds the shared memory of a block, unless raw pages are staged."""
    store = Store(key, value, dtype=dtype, H=1, D=256)
    check(
        run(store, [90, 1, 3], 2, dtype=dtype),
        max(BOUND.get(key, 0), BOUND.get(value, 0)) + {2: 1e-2, 4: 0}[dtype.itemsize],
    )


@pytest.mark.parametrize(
    "key, value",
    [
        ("int8", "int2"),
        ("kivi2", "int4"),
        ("nvfp4", "raw"),
        ("int4", "kivi4"),
        ("raw", "mxfp4"),
        ("int4_lloyd", "int4_lloyd"),
    ],
)
@pytest.mark.parametrize("page_size", [full(16), 48, full(128)])
def test_pairs_of_formats(key, value, page_size):
    store = Store(key, value, H=1, D=64, Dv=32, page_size=page_size)
    bound = max(BOUND.get(key, 1e-5), BOUND.get(value, 1e-5))
    check(run(store, [150, 1, 12, 1], 3, outliers=True, window=120, softcap=20.0), bound)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("key", ["raw", "int8", "fp8_e4m3", "fp8_e5m2", "int4", "int2", "kivi2"])
def test_half_models(key, dtype):
    store = Store(key, key, dtype=dtype, H=1, D=64)
    bound = {torch.float16: 1e-3, torch.bfloat16: 5e-3}[dtype] + (0 if key == "raw" else BOUND[key])
    check(run(store, [130, 1, 5, 1], 2, dtype=dtype), bound)


@pytest.mark.parametrize("key,little", [
    ("int4", 0), ("int4", 4e-33), ("int2", 2e-32), ("int4", 1e-18), ("int8", 0), ("fp8_e4m3", 1e-30), ("nvfp4", 0),
])  # fmt: skip
def test_padding_tokens_with_k_and_v_of_zero(key, little):
    """Models whose padding embeds as zeros, or nearly: such tokens set no unit that other tokens' sums would
    overflow."""
    store = Store(key, key, D=32, page_size=16, twin=Twin(formats=formats_of(key)))
    check(run(store, [68], 2), BOUND[key])
    for i in range(20):
        q, k, v = (data(1, h, 1, 32, i + h) * (1 if i % 3 else little) for h in (4, 2, 2))
        out, lse = store.step(q, k, v)
        check([(out, lse, *reference(store, q, k, v))], BOUND[key])


@pytest.mark.parametrize("key,value,D,page_size,shared,options", [
    ("int8", "int8", 128, 64, 228, {}), ("int8", "int8", 64, 96, 228, {"window": 700}),
    ("int8", "int4", 128, 32, 228, {}), ("raw", "raw", 128, 64, 228, {}), ("raw", "raw", 64, 64, 164, {}),
    ("fp8_e4m3", "fp8_e4m3", 256, 64, 228, {}), ("fp8_e5m2", "fp8_e5m2", 128, 64, 100, {}),
    ("raw", "raw", 128, 64, 100, {}), ("int8", "int8", 128, 48, 228, {}),
])  # fmt: skip
@pytest.mark.parametrize("order", [2026, 2027])
def test_pages_loaded_by_asynchronous_copies(key, value, D, page_size, shared, options, order):
    """Pages of multiples of 32 tokens that all rows see, if two blocks fit a multiprocessor: copied once each. Copies
    complete as late as possible, and as early as possible."""
    dtype, twin, T = torch.float16, Twin(shared=shared << 10, order=order), 11 * page_size + 9
    twin.formats = formats_of(*{key, value}, dtype=dtype)
    store = Store(key, value, H=2, D=D, dtype=dtype, page_size=page_size, sinks=0, twin=twin)
    q, k, v = (data(1, heads, T, D, i, dtype) for i, heads in enumerate((4, 2, 2)))
    store.step(q[:, :, :0], k, v)
    twin.copied()
    q, k, v = (data(1, heads, 1, D, 9 + i, dtype) for i, heads in enumerate((4, 2, 2)))
    out, lse = store.step(q, k, v, **options)
    check([(out, lse, *reference(store, q, k, v, **options))], max(BOUND.get(key, 0), BOUND.get(value, 0)) + 1e-3)
    copies = page_size % 32 == 0 and (key, shared) != ("raw", 100)
    pages = 11 - math.ceil((T + 1 - options.get("window", T + 1)) / page_size)
    bits = sum({"raw": 16, "int4": 4}.get(name, 8) for name in (key, value))
    page = page_size * (D * bits // 8 + (4 if key != "raw" else 0))
    assert twin.copied() in (None, 2 * pages * page if copies else 0)


@pytest.mark.parametrize("D,group,pages,page_size,processors,options,grows", [
    (128, 4, 39, 64, 1, {}, 0), (128, 8, 34, 64, 1, {"window": 900}, 6), (64, 2, 70, 64, 6, {}, -6),
    (128, 1, 9, 128, 1, {}, 0),
])  # fmt: skip
def test_pages_of_few_bits_in_groups_of_eight(D, group, pages, page_size, processors, options, grows):
    """More than eight pages per warp, and fewer; partly visible; V's scales and weights that grow or shrink by 2^12."""
    dtype = torch.float16
    twin = Twin(formats=formats_of("int2", dtype=dtype), processors=processors)
    store = Store("int2", "int2", H=1, D=D, dtype=dtype, page_size=page_size, sinks=0, twin=twin)
    for i, T in enumerate((pages * page_size + 9, 1, 3)):
        q, k, v = (data(1, heads, T, D, 3 * i + j, dtype) for j, heads in enumerate((group, 1, 1)))
        if T > 3:
            v = (v.float() * torch.exp2(torch.linspace(-grows, grows, T))[:, None]).to(dtype)
            k = (k.float() * torch.linspace(0.1, 2, T)[:, None]).to(dtype)
        q = q[:, :, -3:]
        out, lse = store.step(q, k, v, **options)
        check([(out, lse, *reference(store, q, k, v, **options))], 2e-3)


@pytest.mark.parametrize("group", [1, 16, full(3)])
@pytest.mark.parametrize("key", [full("raw"), "int8", "int4"])
def test_any_group(key, group):
    bound = BOUND["raw_f32" if key == "raw" else key]
    check(run(Store(key, key, D=32), [70, 1, 1, 17], group, seed=group), bound)


@pytest.mark.parametrize("lengths", [[1] * 5, [63, 1, 1], [64, 1], [4, 64, 1], [3, 1, 64, 64, 1], [10, 150, 1, 70, 1]])
@pytest.mark.parametrize("page_size,sinks", [(16, 0), (16, 20), (64, 4)])
def test_page_borders(lengths, page_size, sinks):
    check(run(Store("int8", "int8", H=1, D=32, page_size=page_size, sinks=sinks), lengths, 2), BOUND["int8"])


@pytest.mark.parametrize("options", [{"window": 40}, {"window": -48}, {"softcap": 2.0},
                                     {"s_aux": torch.tensor([1.0, -2.0, 5.0, 0.0])}])  # fmt: skip
@pytest.mark.parametrize("key", ["raw", "int8"])
def test_masks_and_caps(key, options):
    check(run(Store(key, key, D=32), [100, 1, 30, 1], 2, **options), BOUND["raw_f32" if key == "raw" else key])


@pytest.mark.parametrize("key", ["raw", "int8", "int4"])
def test_padding(key):
    lengths = [100, 1, 30, 1]
    mask = torch.ones(3, sum(lengths), dtype=torch.bool)
    mask[1, :37] = False
    mask[2, :101] = False
    mask[2, 105:111] = False
    check(run(Store(key, key, B=3, D=32), lengths, 2, mask=mask), BOUND["raw_f32" if key == "raw" else key])


@pytest.mark.parametrize("value", ["fp8_e4m3", "fp8_e5m2", "int8_asym"])
def test_direct_append(value):
    check(run(Store("int8", value, D=32, direct=True), [90, 1, 1, 5, 60, 1], 2), BOUND[value])


def test_long_context_is_split_and_joined():
    """Many runs, in any order of warps: bit-identical."""
    outs = []
    for order in (0, 1, 5):
        store = Store(
            "int8", "int4", H=1, D=32, twin=Twin(processors=8, order=order, formats=formats_of("int8", "int4"))
        )
        results = list(run(store, [400, 1], 1))
        check(results, BOUND["int4"])
        outs.append([x[0] for x in results])
    assert all(torch.equal(x, same[0]) for same in zip(*outs, strict=True) for x in same)


@pytest.mark.parametrize("key", ["raw", "int8", "int4", "kivi4"])
def test_accumulated_attention_equals_the_cpus(key):
    store = Store(key, key, D=32, B=2)
    mask = torch.ones(2, 100, dtype=torch.bool)
    mask[1, :20] = False
    for T in (100, 1, 9, 16):
        q, k, v = data(2, 4, T, 32, T), data(2, 2, T, 32, T + 1), data(2, 2, T, 32, T + 2)
        width = store.table.seen + T + 5
        _, lse = store.step(q, k, v, mask=mask if T == 100 else None, attention_width=width)
        torch.testing.assert_close(store.accumulated[0], store.want[2], rtol=2e-2, atol=2e-3)
        rows = torch.isfinite(lse).sum(-1).view(2, 2, 2).sum(-1).float()
        rtol = 2**-11 if 2 * T <= 32 else 2e-6  # few rows: computed from weights stored as fp16
        torch.testing.assert_close(store.accumulated[0].sum(-1), rows, rtol=rtol, atol=0)


def test_page_per_head_tables_and_slots():
    """Heads of different lengths, dead tokens, stored slots."""
    H, D, P = 2, 32, 3
    k, v, q = data(1, H, 64 * P, D, 1), data(1, H, 64 * P, D, 2), data(1, 4, 2, D, 3)
    code = formats.resolve("int8", torch.float32)
    pages = ops.pack(k, v, code, code, 64)
    size = pages.shape[3]
    entry = [[((p * H + h) * size // 64) << 16 | code << 8 | code for p in range(P)] for h in range(H)]
    table = torch.tensor([[[-1, *entry[0]], [-1, entry[1][1], entry[1][0], -1]]])
    rows = torch.tensor([[[180, 0], [100, 0]]])
    slots = torch.full((1, H, 192), -1, dtype=torch.int32)
    slots[0, 0, :180] = torch.randperm(200, generator=torch.Generator().manual_seed(1))[:180].int()
    slots[0, 1, :100] = torch.arange(50, 150)
    slots[0, :, 10:30] = -1
    none = torch.empty(1, H, 0, D)
    rest = [table, rows, slots, NONE.bool(), NONE, NO_SEALS, 220, 64, 0, 130, 0.2, 0.0, 200]
    got = Twin().attend(q, none, none, pages.flatten(), *rest)
    want = ops.attend(q, none, none, pages.flatten(), *rest)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=3e-3)
    for a, b in zip(Twin().read(k, pages.flatten(), table, rows, slots, H, D, D, 210, 64, 0),
                    ops.read(k, pages.flatten(), table, rows, slots, H, D, D, 210, 64, 0), strict=True):  # fmt: skip
        assert torch.equal(a, b)


@pytest.mark.parametrize("key", ["raw", "int8", "int4_g32"])
def test_nan_and_inf(key):
    """NaN in a query gives NaN in its rows only; in k or v it is flagged, and stored as 0."""
    store = Store(key, key, D=32)
    q, k, v = data(1, 4, 80, 32, 1), data(1, 2, 80, 32, 2), data(1, 2, 80, 32, 3)
    q[0, 1, 70, 3] = torch.nan
    out, lse = store.step(q, k, v)
    assert out[0, 1, 70].isnan().all() and lse[0, 1, 70].isnan()
    out[0, 1, 70], lse[0, 1, 70] = 0, 0
    assert out.isfinite().all() and lse.isfinite().all()
    k[0, 1, 7, 7] = torch.inf
    store.table.plan(80, None)
    store.twin.attend(q, k, v, *store.tensors(), NONE.bool(), NONE, NO_SEALS, 80, *store.geometry, 0, 1.0, 0.0)
    assert store.twin.flags == FINITE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("key,D,group", [("int4", 64, 3), ("int2", 128, 8), ("int4", 256, 4), ("int8", 128, 5)])
@pytest.mark.parametrize("scale", [0.1, full(-0.1)])
def test_queries_eight_rows_at_a_time(key, D, group, dtype, scale):
    """Equal to row by row, which is used for queries that are not 16-byte aligned: large dims, NaN in a row and Inf in
    another, several groups of eight rows, the last one not full."""
    outs = []
    for shift in (0, 1):
        store = Store(key, key, H=1, D=D, dtype=dtype, twin=Twin(formats=formats_of(key, dtype=dtype)))
        store.scale = scale
        store.step(*(data(1, heads, 150, D, j, dtype) for j, heads in enumerate((group, 1, 1))))
        q, k, v = (data(1, heads, 7, D, 3 + j, dtype) for j, heads in enumerate((group, 1, 1)))
        q[..., 5] *= 30
        q[..., 9] = 2**-20
        q[0, 1, 3, 2], q[0, 2, 6, D - 1] = torch.nan, -torch.inf
        room = torch.zeros(q.numel() + 8, dtype=dtype)
        at = room[shift : shift + q.numel()].view(q.shape)
        at.copy_(q)
        assert (at.data_ptr() % 16 == 0) is (shift == 0)
        out, lse = store.step(at, k, v)
        bad = out.isnan().any(-1)
        assert bad.sum() == 2 and bad[0, 1, 3] and bad[0, 2, 6] and torch.equal(bad, lse.isnan())
        outs.append(out[~bad].double())
        want = store.want[0].transpose(1, 2)[~bad].double()
        assert (outs[-1] - want).abs().max() <= 2 * BOUND[key] * want.abs().max()
        assert (lse - store.want[1])[~bad].abs().max() <= 2e-2
    assert (outs[0] - outs[1]).abs().max() <= {torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]


def test_nothing_is_seen():
    store = Store("int8", "int8", B=2, D=32)
    mask = torch.zeros(2, 70, dtype=torch.bool)
    mask[0] = True
    out, lse = store.step(data(2, 4, 70, 32, 1), data(2, 2, 70, 32, 2), data(2, 2, 70, 32, 3), mask=mask)
    assert not out[1].any() and (lse[1] == -torch.inf).all() and lse[0].isfinite().all()


@pytest.mark.parametrize("bad", ["entry", "none", "offset", "columns", "negative", "format"])
def test_bad_tables_are_flagged_and_harm_nothing(bad):
    store = Store("int8", "int8", D=32)
    k = data(1, 2, 200, 32, 1)
    store.step(data(1, 4, 200, 32, 0), k, k)
    arena, table, rows, slots = (x.clone() for x in store.tensors())
    twin = Twin(formats=formats_of("int4") if bad == "format" else 0)
    if bad == "entry":
        table[0, 0, 1] = (5 << 16) | (77 << 8) | 3
    if bad == "none":
        table[0, 0, 1] = -1
    if bad == "offset":
        table[0, 0, 1] = (1 << 46) << 16 | table[0, 0, 1] & 0xFFFF
    if bad == "columns":
        rows[0, 0, 0] = 10**9
    if bad == "negative":
        rows[0, 0, 0] = -5
    before = arena.clone()
    rest = [table, rows, slots, NONE.bool(), NONE, NO_SEALS, 200, 64, 4, 0, 1.0, 0.0]
    _, _, accumulated = twin.attend(data(1, 4, 1, 32, 0), k[:, :, :0], k[:, :, :0], arena, *rest, 200)
    assert bool((accumulated >= 0).all()) and bool((accumulated <= 4).all())
    if bad in ("entry", "none", "offset"):  # unreadable pages receive no attention
        assert not accumulated[0, 0, 4:68].any()
        assert accumulated[0, 0].sum().item() == pytest.approx(2, rel=2**-11)
    assert twin.flags & {"columns": ROWS, "negative": ROWS, "format": STAGE}.get(bad, ENTRY)
    assert torch.equal(arena, before)
    if bad != "format":
        twin.read(k, arena, table, rows, slots, 2, 32, 32, 200, 64, 4)
        assert twin.flags


@pytest.mark.parametrize("stored,T", [(68, 1), (30, 200)])
def test_seals_onto_their_own_page_are_flagged(stored, T):
    """For a page that was full before the call, and one that the call fills: the page stays raw and unchanged."""
    store, twin = Store("int8", "int8", D=32), Twin()
    first, k = data(1, 2, stored, 32, 1), data(1, 2, T, 32, 2)
    store.step(data(1, 4, stored, 32, 0), first, first)
    seals = torch.from_numpy(store.table.plan(T, None))
    arena, table, rows, slots = (x.clone() for x in store.tensors())
    source, sealed = seals[0].tolist()
    onto = source >> 16 << 16 | sealed & 0xFFFF
    seals[0, 1], table[table == sealed] = onto, onto
    rest = [table, rows, slots, NONE.bool(), NONE, seals, stored, *store.geometry, 0, 1.0, 0.0]
    with pytest.raises(ValueError, match="share no bytes"):
        ops.attend(data(1, 4, T, 32, 3), k, k, arena.clone(), *rest)
    twin.attend(data(1, 4, T, 32, 3), k, k, arena, *rest)
    assert twin.flags == ENTRY
    table[table == onto], rows[0, 0, 0] = source, 68
    got, _ = ops.read(k, arena, table, rows, slots, 2, 32, 32, 68, 64, 4)
    assert torch.equal(got, torch.cat([first, k], 2)[:, :, :68])


def test_attend_after_append_sees_what_is_stored():
    store = Store("int8", "int8", D=32)
    k, v, q = data(1, 2, 150, 32, 1), data(1, 2, 150, 32, 2), data(1, 4, 3, 32, 3)
    store.step(q[:, :, :0], k, v)
    none = k[:, :, :0]
    out, lse = store.step(q, none, none)
    want, want_lse = reference(store, q, none, none)
    check([(out, lse, want, want_lse)], BOUND["int8"])
