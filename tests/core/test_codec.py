"""Codecs compared with references that share no code with them: formulas, and page words by index arithmetic."""

import ctypes
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from codec_reference import (
    CODE,
    E2M1,
    E5M2,
    FORMATS,
    QUANTIZED,
    SPEC,
    TABLE,
    F,
    extreme_rows,
    meta_dtype,
    nearest,
    page_fields,
    planes,
    ref_e4m3,
    ref_quantize,
    ref_scale,
    ref_side,
    ref_values,
    unpack,
)

from kvcompress import _C

ROOT = Path(__file__).resolve().parents[2]
MAKE = ROOT / "tests" / "golden" / "make.py"


# ------------------------------------------------------------------ rows


def test_the_table_is_the_one_that_was_meant() -> None:
    assert list(FORMATS) == list(SPEC) and [f["code"] for f in FORMATS.values()] == list(range(len(SPEC)))
    for name, (bits, coding, group, keys) in SPEC.items():
        f = FORMATS[name]
        assert (f["bits"], f["group"], f["keys"], f["rotated"]) == (bits, group, keys, coding in ("mid", "lloyd"))


@pytest.mark.parametrize("D", (16, 32, 48, 64, 80, 128, 240, 256, 512, 576))
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantize_equals_the_formulas(name: str, D: int) -> None:
    if D % FORMATS[name]["dim_multiple"]:
        with pytest.raises(ValueError, match="head dim"):
            _C.quantize(np.ones((1, D), F), CODE[name])
        return
    x = extreme_rows(np.random.default_rng(D), 200, D)
    codes, scales = _C.quantize(x, CODE[name])
    bits, P = FORMATS[name]["bits"], planes(name, D)
    assert codes.shape == (200, D * bits // 8) and codes.dtype == np.uint8 and scales.dtype == meta_dtype(name)
    assert scales.shape == ((200,) if P == 1 else (200, P))
    with np.errstate(all="ignore"):
        want, want_scales = ref_quantize(x, name)
    np.testing.assert_array_equal(
        scales.reshape(200, P).view(np.uint8), np.ascontiguousarray(want_scales).view(np.uint8)
    )
    np.testing.assert_array_equal(unpack(codes, bits), want)
    got = _C.dequantize(codes, scales, CODE[name])
    exact = ref_values(want, want_scales, name)
    assert got.dtype == F and got.shape == x.shape
    if FORMATS[name]["rotated"] or FORMATS[name]["calibrated"]:  # the sums fit 24 bits; only the last product rounds
        np.testing.assert_allclose(got, exact, rtol=2e-7, atol=0)
    elif SPEC[name][1] == "uint":  # one product and one sum, each rounded
        np.testing.assert_allclose(got, exact, rtol=1e-6, atol=1e-6 * np.abs(exact).max(1, keepdims=True).max())
    else:
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(got, exact.astype(F))
    assert not got[(x == 0).all(1)].any()


# research figures for Gaussian rows of 128: the best case after rotation
SNR = (
    ("int8", 43.5, 44.1),
    ("int8_asym", 43.4, 46),
    ("fp8_e4m3", 31.5, 32.1),
    ("fp8_e5m2", 25.3, 26.0),
    ("int4", 19.3, 19.9),
    ("int4_lloyd", 20.7, 21.0),
    ("int4_token", 18.3, 18.9),
    ("int4_asym", 18.5, 20.5),
    ("int4_g32", 21.8, 22.4),
    ("int3", 14.1, 14.7),
    ("int2", 9.0, 9.6),
    ("cal2", 4.9, 5.2),  # if all dims are alike: without a quarter of them 6 dB at most
    ("int2_asym", 5.7, 6.3),
    ("nvfp4", 19, 22),
    ("mxfp4", 17, 20),
)


@pytest.mark.parametrize("name,low,high", SNR)
def test_signal_to_noise(name: str, low: float, high: float) -> None:
    x = np.random.default_rng(1).standard_normal((2000, 128)).astype(F)
    y = _C.dequantize(*_C.quantize(x, CODE[name]), CODE[name])
    snr = 10 * np.log10((x.astype(float) ** 2).sum() / ((x - y).astype(float) ** 2).sum())
    assert low <= snr <= high


@pytest.mark.parametrize("name", QUANTIZED)
def test_half_input_equals_its_float(name: str) -> None:
    x = np.arange(65536, dtype=np.uint16).view(np.float16)
    x = x[np.isfinite(x)].reshape(-1, 64)
    for got, want in zip(_C.quantize(x, CODE[name]), _C.quantize(x.astype(F), CODE[name]), strict=True):
        np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


def test_e4m3_decodes_all_codes_and_rounds_at_every_boundary() -> None:
    one = np.ones(16, np.float16)
    got = _C.dequantize(np.arange(256, dtype=np.uint8).reshape(16, 16), one, CODE["fp8_e4m3"]).ravel()
    np.testing.assert_array_equal(got, TABLE.astype(F))
    ties = ((TABLE[:0x7E] + TABLE[1:0x7F]) / 2).astype(F)  # exact in fp32
    x = np.concatenate((ties, np.nextafter(ties, F(0)), np.nextafter(ties, F(500)), TABLE[:0x7F].astype(F)))
    x = np.resize(np.concatenate((x, -x)), (70, 15))
    rows = np.concatenate((np.full((70, 1), 448, F), x), 1)  # the scale is 1
    codes, scales = _C.quantize(rows, CODE["fp8_e4m3"])
    assert (scales == 1).all()
    np.testing.assert_array_equal(codes, ref_e4m3(rows))


@pytest.mark.parametrize("name, grid", [("fp8_e5m2", E5M2), ("mxfp4", E2M1)])
def test_other_small_floats_at_every_boundary(name: str, grid: np.ndarray) -> None:
    ties = ((grid[:-1] + grid[1:]) / 2).astype(F)
    x = np.concatenate((ties, np.nextafter(ties, F(0)), np.nextafter(ties, F(1e6)), grid.astype(F)))
    x = np.concatenate((x, -x))
    per = 31
    rows = np.concatenate((np.full((-(-len(x) // per), 1), grid[-1], F), np.resize(x, (-(-len(x) // per), per))), 1)
    codes, scales = _C.quantize(rows, CODE[name])
    assert (scales == (1 if name == "fp8_e5m2" else 127)).all()
    bits = FORMATS[name]["bits"]
    np.testing.assert_array_equal(unpack(codes, bits), nearest(rows, grid, 1 << (bits - 1)))
    np.testing.assert_array_equal(_C.dequantize(codes, scales, CODE[name]), ref_values(unpack(codes, bits),
                                  scales.reshape(-1, 1), name).astype(F))  # fmt: skip


def test_scales_round_to_even_and_never_leave_fp16() -> None:
    rng = np.random.default_rng(3)
    any_size, subnormal = 2.0 ** rng.uniform(-140, 127, 4000), rng.integers(1, 4096, 500) * 127 * 2.0**-25
    a = np.concatenate((any_size, subnormal, 127 * (65504 + rng.uniform(-40, 40, 200)))).astype(F)
    x = np.zeros((len(a), 16), F)
    x[:, 3] = a
    scales = _C.quantize(x, CODE["int8"])[1]
    np.testing.assert_array_equal(scales, ref_scale(a / F(127)))
    assert scales.min() > 0 and np.isfinite(scales).all()


# ------------------------------------------------------------------ pages

PAIRS = (
    ("raw_f32", "raw_f32"),
    ("raw_f16", "raw_f16"),
    ("int8", "fp8_e4m3"),
    ("fp8_e4m3", "int4"),
    ("int4", "int4"),
    ("int4", "int8"),
    ("raw_f32", "int4"),
    ("int2", "int2"),
    ("int2_asym", "int4_g32"),
    ("kivi4", "kivi4"),
    ("kivi2", "kivi2"),
    ("nvfp4", "mxfp4"),
    ("mxfp4", "nvfp4"),
    ("int4_lloyd", "int4_lloyd"),
    ("cal2", "cal2"),
    ("int3", "int3"),
    ("int4_g32", "int4_token"),
    ("int8_asym", "fp8_e5m2"),
)


@pytest.mark.parametrize("size", (16, 64))
@pytest.mark.parametrize("key,value", PAIRS)
def test_pages_are_laid_out_as_page_h_says(key: str, value: str, size: int) -> None:
    rng, B, H, dims = np.random.default_rng(5), 2, 2, (64, 32)
    half = "raw_f16" in (key, value)
    k, v = (rng.standard_normal((B, H, 2 * size, D)).astype(np.float16 if half else F) for D in dims)
    k += rng.standard_normal((1, 1, 1, dims[0])).astype(k.dtype) * 3
    k = k.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3)  # strided as models produce it
    pages = _C.pack(k, v, CODE[key], CODE[value], size)
    assert pages.shape == (B, 2, H, _C.page_bytes(CODE[key], CODE[value], *dims, size))
    for b, p, h in ((0, 0, 0), (1, 1, 1), (0, 1, 0)):
        k_bits, v_bits, k_meta, v_meta = page_fields(pages[b, p, h].copy(), key, value, dims, size)
        k_page, v_page = (x[b, h, p * size : (p + 1) * size] for x in (k, v))
        for name, bits, meta, x in ((key, k_bits, k_meta, k_page), (value, v_bits, v_meta, v_page)):
            if name.startswith("raw"):
                np.testing.assert_array_equal(bits, np.ascontiguousarray(x).view(f"<u{x.itemsize}"))
                continue
            codes, want_meta = ref_side(x.astype(F), name, x is k_page)
            np.testing.assert_array_equal(bits, codes)
            np.testing.assert_array_equal(meta, want_meta)


def test_equal_pages_have_equal_bytes_and_saturated_centroids_stay_finite() -> None:
    x = np.full((1, 1, 32, 32), 3e38, F)
    x[..., 1::2] = -3e38
    first, second = (_C.pack(x, x, CODE["int4"], CODE["int4"], 16).ravel() for _ in range(2))
    np.testing.assert_array_equal(first, second)
    pages = _C.pack(x, x, CODE["int4"], CODE["int4"], 16)
    assert pages[0, 0, 0].tobytes() == pages[0, 1, 0].tobytes()
    meta = page_fields(pages[0, 0, 0].copy(), "int4", "int4", (32, 32), 16)[2].view(np.float16)
    np.testing.assert_array_equal(np.abs(meta), 65504)
    for name in ("kivi4", "kivi2", "int4_asym"):  # codes and metadata are finite for any input
        kept = _C.pack(x, x, CODE[name], CODE[name], 16)[0, 0, 0]
        for part in page_fields(kept.copy(), name, name, (32, 32), 16)[2:]:
            assert np.isfinite(part.view(np.float16)).all()


# ------------------------------------------------------------------ every level, every floating-point setting


def run_make(isa: str, *arguments: str) -> str:
    env = {**os.environ, "KVCOMPRESS_ISA": isa, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, str(MAKE), *arguments]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("isa", _C.isa_available())
def test_golden_vectors(isa: str) -> None:
    run_make(isa, "--check")


def test_levels_give_the_same_bytes() -> None:
    digests = {isa: run_make(isa, "--digest", "500") for isa in _C.isa_available()}
    assert len(set(digests.values())) == 1, digests


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="sets MXCSR")
@pytest.mark.parametrize("name", QUANTIZED)
def test_bytes_do_not_depend_on_the_rounding_mode_or_flushing(name: str) -> None:
    torch = pytest.importorskip("torch")
    libm = ctypes.CDLL("libm.so.6")
    x = extreme_rows(np.random.default_rng(9), 96, 64)
    x[90:93] *= F(3e38) / np.abs(x[90:93]).max(1, keepdims=True)  # 1 / absmax is subnormal
    k = x[:64].reshape(1, 1, 64, 64)

    def encode() -> list[bytes]:
        return [a.tobytes() for a in (*_C.quantize(x, CODE[name]), _C.pack(k, k, CODE[name], CODE[name], 64))]

    want = encode()
    try:
        assert torch.set_flush_denormal(True)
        flushed = encode()
        assert not (np.array([2.0**-149], F) * F(4))[0]  # denormals were flushed, and still are
        libm.fesetround(0x800)  # round upward
        upward = encode()
    finally:
        libm.fesetround(0)
        torch.set_flush_denormal(False)
    assert flushed == want and upward == want


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf))
@pytest.mark.parametrize("dtype", (np.float32, np.float16))
def test_nan_and_inf_are_rejected(bad: float, dtype: type) -> None:
    x = np.ones((2, 3, 32, 32), dtype)
    y = x.copy()
    y[1, 2, 17, 31] = bad
    for name in QUANTIZED:
        with pytest.raises(ValueError, match="NaN or Inf in row 177"):
            _C.quantize(y, CODE[name])
        for k, v, which in ((y, x, "k"), (x, y, "v")):
            with pytest.raises(ValueError, match=f"{which}: .*NaN or Inf at sequence 1, head 2, token 17"):
                _C.pack(k, v, CODE[name], CODE[name], 16)
    x[:] = np.finfo(dtype).max
    _C.quantize(x, CODE["int8"])  # the largest finite number is accepted


def test_wrong_formats_and_sizes_are_rejected() -> None:
    x = np.ones((1, 1, 32, 32), F)
    for code, message in ((CODE["raw_f32"], "quantized"), (99, "format"), (-1, "format")):
        with pytest.raises(ValueError, match=message):
            _C.quantize(x, code)
    for size in (0, 8, 24, 272, 64):
        with pytest.raises(ValueError, match="page"):
            _C.pack(x, x, CODE["int8"], CODE["int8"], size)
    with pytest.raises(TypeError, match="float16"):
        _C.pack(x, x, CODE["raw_f16"], CODE["int8"], 16)
