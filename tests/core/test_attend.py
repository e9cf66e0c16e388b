"""The attention op compared with float64 attention over the stored values (eager, without pages or folded scales)."""

import math

import levels
import numpy as np
import pytest
import torch

from kvcompress import _C, formats, ops

NONE, NO_SEALS = torch.empty(0), torch.empty(0, 2, dtype=torch.int64)
RAW = {torch.float32: "raw_f32", torch.float16: "raw_f16", torch.bfloat16: "raw_bf16"}
# Bounds of the design: 8 bits, and 4 and below; float formats without limbs are no worse.
BOUND = {"raw_f32": 1e-5, "raw_f16": 1e-5, "raw_bf16": 1e-5}
BOUND |= {row["name"]: 5e-3 if row["bits"] == 8 else 2e-2 for row in formats.TABLE if row["bits"] <= 8}
FEW = "int8", "fp8_e4m3", "int4", "int4_lloyd", "int2", "kivi4"  # formats with distinct kernels; the full tier runs all


class Store:
    """Pages of B sequences, driven like a layer does: plan, op, commit; remembers which slots are real."""

    def __init__(self, key, value, B=1, H=2, D=64, Dv=None, dtype=torch.float32, page_size=64, sinks=4, **options):
        self.B, self.H, self.D, self.Dv, self.dtype = B, H, D, Dv or D, dtype
        self.geometry = (page_size, sinks)
        raw = formats.resolve("raw", dtype)
        self.pool = _C.Pool()
        self.table = _C.Table(
            self.pool, heads=H, key_dim=D, value_dim=self.Dv, batch=B, page_size=page_size, sinks=sinks, raw=raw,
            key=formats.resolve(key, dtype), value=formats.resolve(value, dtype), **options,
        )  # fmt: skip
        self.real = np.zeros((B, 0), bool)

    def tensors(self):
        arena, t = self.pool.arena, self.table
        return [torch.from_numpy(x) for x in (arena, t.entries, t.rows, t.slots)]

    def poison(self):
        """Fills every byte of the pool that no page uses, and of fresh pages, with NaN: none may leak to results."""
        offset = [self.pool.alloc(1 << 16) for _ in range(4)]
        for at in offset:
            self.pool.arena[at : at + (1 << 16)] = 0xFF
        for at in offset:
            self.pool.unref(at)

    def step(self, q, k, v, mask=None, s_aux=None, window=0, softcap=0.0):
        T = k.shape[2]
        seen = self.table.seen
        seals = torch.from_numpy(self.table.plan(T, None if mask is None else mask.numpy()))
        none = torch.empty(0)
        out, lse, *self.accumulated = ops.attend(
            q, k, v, *self.tensors(), none.bool() if mask is None else mask, none if s_aux is None else s_aux, seals,
            seen, *self.geometry, window, 1 / math.sqrt(self.D), softcap,
        )  # fmt: skip
        self.table.commit()
        self.real = np.concatenate([self.real, np.ones((self.B, T), bool) if mask is None else mask.numpy()], 1)
        return out.transpose(1, 2), lse

    def dense(self):
        like = torch.empty(0, dtype=torch.float32)
        return ops.read(like, *self.tensors(), self.H, self.D, self.Dv, self.table.seen, *self.geometry)


def reference(store, q, k, v, s_aux=None, window=0, softcap=0.0):
    """float64 attention over the stored tokens, and the call's own k and v unrounded."""
    K, V = (x.double() for x in store.dense())
    T, Tq, S = k.shape[2], q.shape[2], K.shape[2]
    if T:
        real = torch.from_numpy(store.real[:, S - T :])[:, None, :, None]
        K[:, :, S - T :] = torch.where(real, k.double(), 0.0)
        V[:, :, S - T :] = torch.where(real, v.double(), 0.0)
    group = q.shape[1] // store.H
    K, V = (x.repeat_interleave(group, 1) for x in (K, V))
    s = q.double() @ K.transpose(2, 3) / math.sqrt(store.D)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    q_slot, k_slot = torch.arange(S - Tq, S)[:, None], torch.arange(S)[None]
    sees = k_slot <= q_slot
    if window > 0:
        sees &= k_slot > q_slot - window
    sees = sees[None, None]
    if window < 0:  # chunks start at a row's first token
        first = torch.from_numpy(store.real.argmax(1))[:, None, None, None]
        sees = sees & ((k_slot - first) // -window == (q_slot - first) // -window)
    sees = sees & torch.from_numpy(store.real)[:, None, None]
    s = s.masked_fill(~sees, -torch.inf)
    lse = torch.logsumexp(s, -1)
    total = lse if s_aux is None else torch.logaddexp(lse, s_aux.double()[None, :, None])
    p = torch.where(sees, torch.exp(s - torch.where(total.isinf(), 0.0, total)[..., None]), 0.0)
    return p @ V, lse


def error(got, want):
    return float((got.double() - want).norm() / want.norm())


def data(B, H, T, D, seed, dtype=torch.float32, outliers=False):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(B, H, T, D, generator=g)
    if outliers:
        x[..., 3] *= 30
        x[..., D // 2] += 20
    return x.to(dtype)


def run(store, lengths, group, seed=0, dtype=torch.float32, outliers=False, mask=None, **options):
    """Appends in calls of the given lengths; yields the op's results and the reference's for each call."""
    start = 0
    for i, T in enumerate(lengths):
        store.poison()
        q = data(store.B, store.H * group, T, store.D, seed + 3 * i, dtype)
        k = data(store.B, store.H, T, store.D, seed + 3 * i + 1, dtype, outliers is True)
        v = data(store.B, store.H, T, store.Dv, seed + 3 * i + 2, dtype, outliers == "v")
        own = None if mask is None else mask[:, start : start + T].contiguous()
        out, lse = store.step(q, k, v, mask=own, **options)
        yield (out, lse, *reference(store, q, k, v, **options))
        start += T


def check(results, bound):
    for out, lse, want, want_lse in results:
        assert error(out, want) <= bound
        nothing = torch.isinf(want_lse)
        assert torch.equal(torch.isinf(lse), nothing) and torch.all(out[nothing] == 0)
        assert (lse.double() - want_lse)[~nothing].abs().max() <= max(bound, 1e-5) * 20


@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize("D", [32, 64, 128, 256])
@pytest.mark.parametrize("key", list(BOUND)[:1] + list(BOUND)[3:])
def test_error_bounds(key, D, outliers):
    store = Store("raw" if key.startswith("raw") else key, "raw" if key.startswith("raw") else key, D=D)
    check(run(store, [200, 1, 1, 70, 1], 4, outliers=outliers), BOUND[key])


@pytest.mark.parametrize("D", [48, 80, 96, 112, 192])
@pytest.mark.parametrize("key", list(BOUND)[3:])
def test_other_head_dims(key, D):
    if D % formats.TABLE[formats.CODES[key]]["dim_multiple"]:
        with pytest.raises(ValueError, match="head dim"):
            Store(key, key, D=D)
        return
    check(run(Store(key, key, D=D), [150, 1, 20, 1], 2, outliers=True), BOUND[key])


@pytest.mark.parametrize("key, value", [("int8", "int2"), ("kivi2", "int4"), ("nvfp4", "raw"), ("int4", "kivi4"),
                                        ("raw", "mxfp4"), ("cal2", "int4"), ("int3", "int2")])  # fmt: skip
@pytest.mark.parametrize("page_size", [16, 128])
def test_pairs_of_formats(key, value, page_size):
    store = Store(key, value, D=64, Dv=32, page_size=page_size)
    bound = max(BOUND.get(key, 1e-5), BOUND.get(value, 1e-5))
    check(run(store, [300, 1, 12, 1, 1], 3, outliers=True, window=150, softcap=20.0), bound)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("key", ["raw", "int8", "fp8_e4m3", "int4", "int3", "int2", "kivi2", "cal2"])
def test_half_models(key, dtype):
    store = Store(key, key, dtype=dtype, D=64)
    bound = {torch.float16: 1e-3, torch.bfloat16: 5e-3}[dtype] + (0 if key == "raw" else BOUND[key])
    check(run(store, [130, 1, 5, 1], 2, dtype=dtype), bound)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("key", ["raw", "int8", "fp8_e4m3", "int4"])
def test_any_group(key, group):
    check(
        run(Store(key, key, D=32), [90, 1, 1, 17], group, seed=group),
        BOUND["raw_f32" if key == "raw" else key],
    )


@pytest.mark.parametrize("key,value", [("int8", "int4"), ("int4", "int8"), ("fp8_e4m3", "int8"), ("raw", "int8")])
def test_mixed_formats(key, value):
    check(run(Store(key, value, D=64, Dv=32), [150, 1, 64, 1], 2), 2e-2)


@pytest.mark.parametrize("lengths", [[1] * 5, [63, 1, 1], [64, 1], [65, 1], [4, 64, 1], [3, 1, 64, 64, 1], [68, 68, 1],
                                     [10, 200, 1, 150, 1],
                                     [300, 2, 2]])  # fmt: skip
@pytest.mark.parametrize("page_size,sinks", [(16, 0), (16, 20), (16, 70), (64, 4), (128, 1)])
def test_page_borders(lengths, page_size, sinks):
    for key in ("raw", "int8"):
        store = Store(key, key, D=32, page_size=page_size, sinks=sinks)
        check(run(store, lengths, 2), BOUND["raw_f32" if key == "raw" else key])


@pytest.mark.parametrize("options", [{"window": 40}, {"softcap": 2.0}, {"s_aux": torch.tensor([1.0, -2.0, 5.0, 0.0])},
                                     {"window": 7, "softcap": 5.0}, {"window": -40}])  # fmt: skip
@pytest.mark.parametrize("key", ["raw", "int8"])
def test_masks_and_caps(key, options):
    check(run(Store(key, key, D=32), [100, 1, 30, 1], 2, **options), BOUND["raw_f32" if key == "raw" else key])


@pytest.mark.parametrize("window", [13, -32])
@pytest.mark.parametrize("key", ["raw", "int8", "kivi4"])
def test_windows_of_padded_rows(key, window):
    """Chunks of a row start at its first token; padding inside a row requires stored slots."""
    lengths = [70, 1, 30, 1, 1]
    mask = torch.ones(3, sum(lengths), dtype=torch.bool)
    mask[1, :37] = False
    mask[2, :5] = mask[2, 80:90] = False
    store = Store(key, key, D=32, B=3, page_size=32, sinks=0)
    for out, lse, want, want_lse in run(store, lengths, 2, mask=mask, window=window):
        seen = ~torch.isinf(want_lse)
        assert torch.equal(torch.isinf(lse), ~seen) and error(out[seen], want[seen]) <= BOUND.get(key, 1e-5)


@pytest.mark.parametrize("key", ["raw", "int8", "int4"])
def test_padding(key):
    """Left padding, a call of padding only, padding inside: rows equal the same rows alone; padding sees nothing and
    contributes nothing."""
    lengths = [100, 1, 30, 1]
    mask = torch.ones(3, sum(lengths), dtype=torch.bool)
    mask[1, :37] = False
    mask[2, :101] = False
    mask[2, 105:111] = False
    store = Store(key, key, B=3, D=32)
    check(run(store, lengths, 2, mask=mask), BOUND["raw_f32" if key == "raw" else key])
    stats = store.table.stats()
    assert stats["kept"] == int(mask.sum())


@pytest.mark.parametrize("key", ["raw", "int8", "int4"])
def test_a_row_of_a_batch_equals_the_row_alone(key):
    lengths, pads = [90, 1, 1], [0, 33]
    mask = torch.ones(2, 92, dtype=torch.bool)
    mask[1, :33] = False
    batch = Store(key, key, B=2, D=32)
    results = [out for out, *_ in run(batch, lengths, 2, mask=mask)]
    for b, pad in enumerate(pads):
        alone, start = Store(key, key, D=32), 0
        for i, T in enumerate(lengths):
            skip = max(0, pad - start)
            q, k, v = (
                data(2, h, T, 32, 3 * i + j)[b : b + 1, :, skip:] for j, h in enumerate([4, 2, 2])
            )  # fmt: skip
            out, _ = alone.step(q, k, v)
            assert torch.equal(out[0], results[i][b, :, skip:])
            start += T


def test_results_do_not_depend_on_threads():
    outs = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        outs.append([x for x, *_ in run(Store("int8", "int4", H=4, D=64), [700, 1, 1], 4)])
    torch.set_num_threads(2)
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))


@pytest.mark.parametrize("outliers", [pytest.param(False, marks=pytest.mark.full), True, "v"])
@pytest.mark.parametrize("key", [pytest.param(x, marks=[] if x in FEW else pytest.mark.full) for x in list(BOUND)[3:]])
def test_long_sequences_of_small_pages(key, outliers):
    """64 columns and more: pages with little weight use 8-bit weights."""
    store = Store(key, key, D=64, page_size=16)
    check(run(store, [1100, 1, 1], 4, outliers=outliers), BOUND[key])


@pytest.mark.parametrize("key", ["int8", "fp8_e5m2", "int4", "int3", "int2", "cal2"])
def test_many_rows_over_a_long_sequence(key):
    """More rows than a vector kernel takes at once, over 64 columns and more."""
    store, (k, v) = Store(key, key, H=1, D=64), (data(1, 1, 4200, 64, seed) for seed in (7, 8))
    store.step(k[:, :, :0], k, v)
    check(run(store, [9], 2), BOUND[key])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key", ["raw", "int8", "fp8_e4m3", "int4", "int2"])
def test_blocks_of_256_rows(key, dtype):
    """A chunk of so many rows that kernels on matrix registers take 256 at once; not all of them see every page."""
    store = Store(key, key, H=16, dtype=dtype)
    check(run(store, [132, 512], 2, dtype=dtype, window=200), BOUND.get(key, 5e-3))


def test_long_context_is_split_and_joined():
    store = Store("int8", "int8", H=1, D=32)
    check(run(store, [3000, 1, 1], 2), BOUND["int8"])


def test_attend_after_append_sees_what_is_stored():
    store = Store("int8", "int8", D=32)
    k, v, q = data(1, 2, 200, 32, 1), data(1, 2, 200, 32, 2), data(1, 4, 3, 32, 3)
    store.step(q[:, :, :0], k, v)
    none = k[:, :, :0]
    out, lse = store.step(q, none, none)
    check([(out, lse, *reference(store, q, none, none))], BOUND["int8"])


@pytest.mark.parametrize("key,value,dtype", [("int8", "fp8_e4m3", "float32"), ("fp8_e5m2", "fp8_e5m2", "bfloat16")])
@pytest.mark.parametrize("sinks,lengths", [(4, [90, 1, 1, 5, 60, 1]), (0, [77, 1, 1, 1, 1, 63])])
def test_direct_append(sinks, lengths, key, value, dtype):
    """residual_length=0: tokens are appended directly to sealed pages; the appending call sees them exactly."""
    store = Store(key, value, D=32, dtype=getattr(torch, dtype), sinks=sinks, direct=True)
    check(run(store, lengths, 2, dtype=getattr(torch, dtype)), 2 * BOUND["int8"])
    assert store.table.stats()["open_bytes"] == 0


def test_page_per_head_tables():
    """A table with a row per head (each head has its own pages) gives the same results as a table of groups."""
    D, H, P = 32, 2, 3
    k, v, q = data(1, H, 64 * P, D, 1), data(1, H, 64 * P, D, 2), data(1, 4, 1, D, 3)
    code = formats.resolve("int8", torch.float32)
    pages = ops.pack(k, v, code, code, 64)
    none = torch.empty(0)
    size = pages.shape[3]

    def go(table, rows):
        return ops.attend(q, k[:, :, :0], v[:, :, :0], pages.flatten(), table, rows, none.int(), none.bool(), none,
                          torch.empty(0, 2, dtype=torch.int64), 64 * P, 64, 0, 0, 1 / math.sqrt(D), 0.0)  # fmt: skip

    group = torch.tensor([[[-1] + [((p * H * size // 64) << 16) | (code << 8) | code for p in range(P)]]])
    heads = torch.tensor([[[-1] + [(((p * H + h) * size // 64) << 16) | (code << 8) | code for p in range(P)]
                           for h in range(H)]])  # fmt: skip
    a = go(group, torch.tensor([[[64 * P, 0]]]))
    b = go(heads, torch.tensor([[[64 * P, 0]] * H]))
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


@pytest.mark.parametrize("key", ["int8", "fp8_e4m3", "int4"])
def test_pages_whose_weights_underflow(key):
    """Scores that differ by hundreds: the weights of whole pages underflow, without other effects."""
    store = Store(key, key, D=32)
    k = data(1, 2, 300, 32, 1)
    k[:, :, :100] *= 6
    store.step(data(1, 4, 1, 32, 0)[:, :, :0], k, data(1, 2, 300, 32, 2) * 1e-6)
    q, none = data(1, 4, 1, 32, 3) * 20, k[:, :, :0]
    out, lse = store.step(q, none, none)
    check([(out, lse, *reference(store, q, none, none))], BOUND[key])


@pytest.mark.parametrize("stored,T,dtype,options", [
    (150, 1, torch.float16, {}), (150, 70, torch.float32, {}), (3000, 1, torch.bfloat16, {"window": 2500}),
    (150, 20, torch.bfloat16, {"s_aux": torch.zeros(6)}), (150, 1, torch.float32, {"softcap": 3.0}),
])  # fmt: skip
@pytest.mark.parametrize("key", ["raw", "int8", "fp8_e4m3", "int4"])
def test_nan_in_q_stays_in_its_row(key, stored, T, dtype, options):
    """NaN or Inf in a row of q, or overflowing scores: NaN in out and lse of that row only."""
    k, v = data(1, 2, stored + T, 64, 1), data(1, 2, stored + T, 64, 2)
    q = data(1, 6, T, 64, 3, dtype)
    bad = q.clone()
    bad[0, 0, 0, 5], bad[0, 1, -1, 63], bad[0, 4, 0, 0] = torch.nan, torch.inf, -torch.inf
    if dtype != torch.float16 and not options.get("softcap"):  # the softcap limits any score
        bad[0, 3, -1] = 2e38 * k[0, 1, stored].sign()
    results = []
    for x in (q, bad):
        store = Store(key, key, D=64)
        store.step(x[:, :, :0], k[:, :, :stored], v[:, :, :stored])
        results.append(store.step(x, k[:, :, stored:], v[:, :, stored:], **options))
    (out, lse), (got, got_lse) = results
    nonfinite = (bad != q).any(-1)
    assert got[nonfinite].isnan().all() and got_lse[nonfinite].isnan().all()
    assert torch.equal(got[~nonfinite], out[~nonfinite]) and torch.equal(got_lse[~nonfinite], lse[~nonfinite])
    assert out.isfinite().all() and lse.isfinite().all()


@pytest.mark.parametrize("key", ["raw", "int8", "fp8_e4m3", "int4"])
def test_nan_in_q_that_sees_nothing(key):
    store, mask = Store(key, key, B=2, D=32), torch.ones(2, 200, dtype=torch.bool)
    mask[1, :90] = False
    q, k, v = data(2, 4, 200, 32, 0), data(2, 2, 200, 32, 1), data(2, 2, 200, 32, 2)
    q[1, :, :90] = torch.nan
    out, lse = store.step(q, k, v, mask=mask)
    assert not out[1, :, :90].any() and (lse[1, :, :90] == -torch.inf).all()
    assert out.isfinite().all() and lse[0].isfinite().all() and lse[1, :, 90:].isfinite().all()


@pytest.mark.parametrize("key", ["raw", "int8", "fp8_e4m3", "int4"])
def test_scores_below_all_floats_give_nan_only_alone(key):
    """Scores of -Inf have no weight; a row with no other scores is NaN, unlike a row that sees no tokens."""
    store = Store(key, key, D=32, sinks=0)
    k, v, q = data(1, 2, 64, 32, 1).abs() + 0.5, data(1, 2, 164, 32, 2), torch.full((1, 4, 1, 32), -2e38)
    none = k[:, :, :0]
    store.step(q[:, :, :0], k, v[:, :, :64])
    out, lse = store.step(q, none, none)
    assert out.isnan().all() and lse.isnan().all()
    store.step(q[:, :, :0], torch.zeros(1, 2, 100, 32), v[:, :, 64:])
    out, lse = store.step(q * 1e-30, none, none)
    check([(out, lse, *reference(store, q * 1e-30, none, none))], BOUND["raw_f32" if key == "raw" else key])
    if key == "raw":  # exact zeros for any q
        out, lse = store.step(q, none, none)
        check([(out, lse, *reference(store, q, none, none))], 1e-5)


@pytest.mark.parametrize("bad", ["entry", "none", "offset", "columns"])
def test_bad_tables_are_named(bad):
    store = Store("int8", "int8", D=32)
    k = data(1, 2, 100, 32, 1)
    store.step(data(1, 4, 1, 32, 0), k, k)
    arena, table, rows, slots = store.tensors()
    table, rows = table.clone(), rows.clone()
    if bad == "entry":
        table[0, 0, 1] = (5 << 16) | (77 << 8) | 3
    if bad == "none":
        table[0, 0, 1] = -1
    if bad == "offset":
        table[0, 0, 1] = (1 << 55) | table[0, 0, 1]
    if bad == "columns":
        rows[0, 0, 0] = 10**9
    none = torch.empty(0)
    with pytest.raises(ValueError, match={"columns": "a length", "offset": r"\(column 1\)"}.get(bad, "column 1, got")):
        ops.attend(data(1, 4, 1, 32, 0), k[:, :, :0], k[:, :, :0], arena, table, rows, slots, none.bool(), none,
                   torch.empty(0, 2, dtype=torch.int64), 100, 64, 4, 0, 1.0, 0.0)  # fmt: skip


def test_a_quantized_page_of_sinks():
    """Our tables have none, but a table made by hand may: a page of 256 tokens among pages of 16."""
    key = formats.CODES["int4_token"]
    k = torch.randn(1, 2, 256, 64)
    arena = ops.pack(k, k, key, key, 256).flatten()
    table, rows = torch.tensor([[[0 << 16 | key << 8 | key]]]), torch.tensor([[[256, 0]]])
    no = torch.empty(1, 2, 0, 64)
    out, *_ = ops.attend(torch.randn(1, 4, 1, 64), no, no, arena, table, rows, NONE.int(), NONE.bool(), NONE, NO_SEALS,
                        256, 16, 256, 0, 0.125, 0.0)  # fmt: skip
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("level", levels.OTHERS)
def test_every_level_passes_these_tests(level):
    names = "half or group or mixed or caps or padding or direct or nan or many_rows or (bounds and 64)"
    assert levels.on(level, levels.failures, __file__, names) == ""
