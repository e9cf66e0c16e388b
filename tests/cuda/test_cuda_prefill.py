"""Long calls, whose kernels decode pages once for 64 query rows and more (prefill.cuh), compared with float64
attention over the stored values, and with the CPU's bytes."""

import ctypes

import pytest
import torch
from cuda_twin import DEVICE, Twin
from test_attend import BOUND, check, data, run
from test_cuda_attend import Store, formats_of

TYPES = {torch.float16: 1e-3, torch.bfloat16: 5e-3}
LAUNCHED = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
)


def store(key, value, dtype, processors=1, **options):
    wanted = formats_of(key, value, "raw", dtype=dtype)
    twin = Twin(formats=wanted, processors=processors)
    return Store(key, value, dtype=dtype, twin=twin, **options)


def bound(dtype, *names):
    return TYPES[dtype] + max(0 if name == "raw" else BOUND[name] for name in names)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("key", ["raw", "int8", "fp8_e4m3", "fp8_e5m2", "int4", "int2"])
def test_every_format(key, dtype):
    """64 and 128 rows per block, pages that are not full, own pages longer than a span."""
    check(run(store(key, key, dtype, D=64, H=1), [150, 1, 70, 33], 2, dtype=dtype), bound(dtype, key))


@pytest.mark.parametrize("group,own", [(1, 130), (4, 20), pytest.param(8, 9, marks=pytest.mark.full), (3, 50)])
@pytest.mark.parametrize("key,value", [("raw", "raw"), ("int8", "int4"), ("int2", "fp8_e4m3")])
def test_groups_on_heads_of_128(key, value, group, own):
    """A block's rows are those of several tokens, and may end within one; pages of two formats, one of them rotated."""
    dtype = torch.bfloat16
    check(run(store(key, value, dtype, D=128, H=1), [4 + 128, own], group, dtype=dtype), bound(dtype, key, value))


@pytest.mark.parametrize("options", [{"window": 40}, {"window": -48}, {"softcap": 2.0},
                                     {"s_aux": torch.tensor([1.0, -2.0])}])  # fmt: skip
@pytest.mark.parametrize("key", ["int8", "int4"])
def test_masks_and_caps(key, options):
    dtype = torch.float16
    check(run(store(key, key, dtype, D=64, H=1), [150, 1, 40], 2, dtype=dtype, **options), bound(dtype, key))


@pytest.mark.parametrize("key", ["raw", "int4"])
def test_padding(key):
    lengths, dtype = [100, 1, 40], torch.float16
    mask = torch.ones(3, sum(lengths), dtype=torch.bool)
    mask[1, :37], mask[2, :101], mask[2, 105:111] = False, False, False
    check(run(store(key, key, dtype, B=3, D=64, H=1), lengths, 2, mask=mask, dtype=dtype), bound(dtype, key))


@pytest.mark.parametrize("page_size,sinks", [(16, 20), (48, 0), (128, 4)])
def test_page_borders(page_size, sinks):
    """Pages shorter than a span, and of several spans; the page of sinks."""
    of = store("int8", "int8", torch.float16, D=64, H=1, page_size=page_size, sinks=sinks)
    # a call that seals pages left raw by others differs from attention over decoded pages
    lengths = [sinks + 2 * page_size, 130]
    check(run(of, lengths, 2, dtype=torch.float16), bound(torch.float16, "int8"))


def test_runs_of_columns():
    """Runs merged by the last block, and outliers in V and K."""
    dtype = torch.float16
    for outliers in (True, "v"):
        results = run(store("int4", "int8", dtype, 8, D=64, H=1), [300, 40], 2, dtype=dtype, outliers=outliers)
        check(results, bound(dtype, "int4"))


@pytest.mark.parametrize("scale", [-0.2, 0.0])
def test_scales_of_any_sign(scale):
    of = store("int8", "int4", torch.float16, D=64, H=1)
    of.scale = scale
    assert len(list(run(of, [90, 40], 2, dtype=torch.float16))) == 2  # each compared with the CPU


def test_nan_in_a_query():
    """NaN in a query gives NaN in its row only."""
    of, dtype = store("int4", "int4", torch.float16, D=64, H=1), torch.float16
    q, k, v = data(1, 2, 80, 64, 1, dtype), data(1, 1, 80, 64, 2, dtype), data(1, 1, 80, 64, 3, dtype)
    q[0, 1, 70, 3] = torch.nan
    out, lse = of.step(q, k, v)
    assert out[0, 1, 70].isnan().all() and lse[0, 1, 70].isnan()
    out[0, 1, 70], lse[0, 1, 70] = 0, 0
    assert out.isfinite().all() and lse.isfinite().all()


def test_accumulated_attention_equals_the_cpus():
    of, dtype = store("int8", "int8", torch.float16, D=64, H=1), torch.float16
    for T in (100, 40):
        q, k, v = data(1, 2, T, 64, T, dtype), data(1, 1, T, 64, T + 1, dtype), data(1, 1, T, 64, T + 2, dtype)
        of.step(q, k, v, attention_width=of.table.seen + T)
        torch.testing.assert_close(of.accumulated[0], of.want[2], rtol=2e-2, atol=2e-3)


@pytest.mark.skipif(DEVICE != "cpu", reason="looks at the twin's launches")
@pytest.mark.parametrize("key,dtype,D,Dv,T,long", [
    ("int8", torch.float16, 64, 64, 32, True),
    ("int8", torch.float16, 128, 128, 32, True),
    ("int8", torch.float16, 64, 64, 31, False),  # 62 rows
    ("int8", torch.float32, 64, 64, 32, False),
    ("int8", torch.float16, 80, 80, 32, False),
    ("int8", torch.float16, 128, 64, 32, False),
    ("nvfp4", torch.float16, 64, 64, 32, False),
])  # fmt: skip
def test_which_kernels_handle_a_call(key, dtype, D, Dv, T, long):
    """These kernels take long calls of supported formats and heads; others use those of decode."""
    names = []

    @LAUNCHED
    def note(name, *_):
        names.append(name.decode())
        return 0  # the twin runs it

    of = store(key, key, dtype, D=D, Dv=Dv, H=1)
    of.twin.launcher = note
    check(run(of, [T], 2, dtype=dtype), 1e-2 if key == "int8" else 3e-2)
    assert any(name.startswith("kvc_prefill") for name in names) == long
    assert any(name.startswith("kvc_attend") for name in names) != long
