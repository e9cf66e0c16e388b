"""Heads of more than 256 dims and latents (MLA) on CUDA's kernels, run on the host: compared with float64 over the
stored values; the stored bytes must equal the CPU's."""

import functools

import pytest
import test_attend as cpu
import torch
from cuda_twin import FINITE, Twin
from families import family
from far import FAR
from far_kernels import a_device, there
from generation import PAGE
from modes import MODES
from shadow import shadow
from test_attend import BOUND, NO_SEALS, NONE, data
from test_cuda_attend import Store, full
from test_cuda_attend import check as check_heads
from test_cuda_attend import run as run_heads
from test_latent_heads import check, drive

from kvcompress import KVCache, enable, formats, ops

ROWS = [x for x in list(BOUND)[3:] if x not in formats.CALIBRATED]


def both(twin):
    """The twin's attend; the CPU's op on a copy must produce the same pages."""

    def attend(q, k, v, arena, *rest):
        ours = arena.clone()
        got = twin.attend(q, k, v, ours, *rest)
        assert twin.flags == 0
        ops.attend(q, k, v, arena, *rest)
        assert torch.equal(ours, arena)
        return got

    return attend


def latents(key, value, **options):
    return cpu.Store(key, value, H=1, **options)


WIDE = ("int4",)  # the others differ in how rows are read, which narrow heads cover, too


@pytest.mark.parametrize(
    "key, Dk, Dv, heads",
    [*((key, 64, 16, 5) for key in ["raw", *ROWS]), *((key, 512, 64, 20) for key in WIDE),
     *(pytest.param(key, 512, 64, 20, marks=pytest.mark.full) for key in ["raw", *ROWS] if key not in WIDE)],
)  # fmt: skip
def test_latents_in_every_format(key, Dk, Dv, heads):
    store = latents(key, "raw" if key == "raw" else "int8", D=Dk, Dv=Dv)
    check(drive(store, [90, 1, 3, 1], heads, attend=both(Twin())), BOUND["raw_f32" if key == "raw" else key])


@pytest.mark.parametrize("key, value", [("raw", "raw"), ("int8", "int8"), ("int4", "raw"), ("fp8_e4m3", "int4")])
@pytest.mark.parametrize("dtype", [pytest.param(torch.float16, marks=pytest.mark.full), torch.bfloat16])
def test_latents_in_half_precision(key, value, dtype):
    store = latents(key, value, D=512, Dv=64, dtype=dtype)
    check(drive(store, [70, 1, 2], 9, dtype, loud=False, attend=both(Twin())), 1e-2)


@pytest.mark.parametrize("options", [{"window": 40}, {"window": -48}, {"softcap": 2.0},
                                     {"s_aux": torch.linspace(-2, 2, 9)}])  # fmt: skip
def test_attention_options(options):
    if options.get("window", 0) < 0:  # chunked attention, which the reference of latents does not support
        store = Store("int8", "int8", H=1, D=272, Dv=16)
        return check_heads(run_heads(store, [100, 1, 30, 1], 3, **options), BOUND["int8"])
    check(drive(latents("int8", "int8", D=96, Dv=32), [100, 1, 30, 1], 9, attend=both(Twin()), **options), 5e-3)


@pytest.mark.parametrize("key", ["raw", "int4"])
def test_pads_and_rows_of_their_own(key):
    mask = torch.ones(3, 131, dtype=torch.bool)
    mask[1, :37] = False
    mask[2, :128] = False
    store = latents(key, "raw" if key == "raw" else "int8", B=3, D=128, Dv=32)
    check(drive(store, [130, 1], 7, mask=mask, attend=both(Twin())), BOUND["raw_f32" if key == "raw" else key])


def by_length(ways, otherwise, q, *rest):
    return ways.get(q.shape[2], otherwise)(q, *rest)


def test_many_columns_are_split_and_joined():
    """Runs of columns and blocks of rows, in any order of warps: bit-identical."""
    outs = []
    for order in (0, 1, 5):
        store = latents("int8", "int8", D=64, Dv=16, page_size=16)
        ways = {280: ops.attend}, both(Twin(processors=30, order=order))  # for the short calls
        results = list(drive(store, [280, 1, 20], 20, attend=functools.partial(by_length, *ways)))
        check(results, BOUND["int8"])
        outs.append([x[0] for x in results])
    assert all(torch.equal(x, same[0]) for same in zip(*outs, strict=True) for x in same)


@pytest.mark.parametrize(
    "D, Dv",
    [
        (512, 512),
        (576, 512),
        pytest.param(320, 576, marks=pytest.mark.full),
        pytest.param(272, 16, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("key", ["raw", "int8", "int4", "kivi4", full("nvfp4"), full("fp8_e5m2"), full("int2")])
def test_wide_heads(D, Dv, key):
    """Heads with separate K and V; the accumulated attention is the CPU's."""
    store = Store(key, key, H=1, D=D, Dv=Dv)
    check_heads(run_heads(store, [80, 1, 3, 1], 2, outliers=True), BOUND["raw_f32" if key == "raw" else key])
    q, k, v = data(1, 3, 5, D, 7), data(1, 1, 5, D, 8), data(1, 1, 5, Dv, 9)
    store.step(q, k, v, attention_width=store.table.seen + 5)
    torch.testing.assert_close(store.accumulated[0], store.want[2], rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(store.accumulated[0].sum(), torch.tensor(15.0), rtol=2e-5, atol=0)


@pytest.mark.parametrize("page_size, sinks, seen", [(16, 0, 70), (64, 4, 150)])
def test_wide_pages_are_read_packed_and_scored_as_on_the_cpu(page_size, sinks, seen):
    """Bytes of pack, results of read and score_tokens; K by its mean, V in groups."""
    twin, D, Dv = Twin(), 576, 512
    store = Store("int4", "int4_g32", H=2, D=D, Dv=Dv, page_size=page_size, sinks=sinks)
    k, v = data(1, 2, seen, D, 1), data(1, 2, seen, Dv, 2)
    store.step(data(1, 2, seen, D, 0), k, v)
    arena, table, rows, slots = store.tensors()
    args = (arena, table, rows, slots, 2, D, Dv, seen, page_size, sinks)
    for ours, theirs in zip(twin.read(k, *args), ops.read(k, *args), strict=True):
        assert torch.equal(ours, theirs)
    for kind in range(3):
        want = torch.ops.kvcompress.score_tokens(*args, kind)
        torch.testing.assert_close(twin.score_tokens(*args, kind), want, rtol=1e-4, atol=1e-5)
    codes = [formats.resolve(x, torch.float32) for x in ("kivi4", "nvfp4")]
    whole = [x[:, :, : seen // page_size * page_size] for x in (k, v)]
    assert torch.equal(twin.pack(*whole, *codes, page_size), ops.pack(*whole, *codes, page_size))


@pytest.mark.parametrize("name", ["int8", "int4", "nvfp4", "int4_asym"])
def test_wide_rows_are_quantized_as_on_the_cpu(name):
    x, code = data(1, 1, 37, 576, 3)[0, 0].contiguous(), formats.resolve(name, torch.float32)
    codes, scales = Twin().quantize(x, code)
    want = ops.quantize(x, name)
    assert torch.equal(codes, want[0]) and torch.equal(
        scales.view(-1).view(torch.uint8), want[1].view(-1).view(torch.uint8)
    )
    assert torch.equal(Twin().dequantize(codes, scales, code), ops.dequantize(*want, name))


def test_nan_and_inf():
    """NaN in a query gives NaN in its rows only; in k it is flagged, and stored as 0."""
    store, twin = latents("int8", "int8", D=64, Dv=16), Twin()
    q, k, v = data(1, 4, 40, 80, 1), data(1, 1, 40, 64, 2), data(1, 1, 40, 16, 3)
    q[0, 1, 30, 70] = torch.nan
    store.table.plan(40, None)
    rest = NONE.bool(), NONE, NO_SEALS, 0, *store.geometry, 0, 0.1, 0.0, 0
    out, lse, _ = twin.attend(q, k, v, *store.tensors(), *rest)
    assert twin.flags == 0 and out[0, 30, 1].isnan().all() and lse[0, 1, 30].isnan()
    out[0, 30, 1], lse[0, 1, 30] = 0, 0
    assert out.isfinite().all() and lse.isfinite().all()
    k[0, 0, 7, 7] = torch.inf
    twin.attend(q, k, v, *store.tensors(), *rest)
    assert twin.flags == FINITE


@torch.no_grad()
@pytest.mark.parametrize("key, bound", [("raw", 1e-5), ("int8", 1e-3)])
def test_a_model_on_a_device_reads_pages_of_latents(key, bound):
    """Decode steps of DeepSeek-V3 are absorbed on the device: each call compared with attention over the decoded
    pages."""
    with a_device(), shadow() as errors:
        m = there(family("deepseek_v3"))
        assert enable(m, verbose=False).fused
        run = MODES["greedy"](m, lambda: KVCache(m.config, key, page_size=PAGE), lambda: m)
        assert all(x.store.device == FAR and x.store.page_store.latent for x in run.cache.layers)
    steps = run.outputs[0].sequences.shape[1] - 45
    assert len(errors) >= len(m.model.layers) * (steps - 1) > 0 and max(errors) < bound
