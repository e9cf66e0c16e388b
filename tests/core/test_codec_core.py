"""C functions of the codec that only the attention op uses (parts of pages, conversions)."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from codec_reference import CODE, FORMATS, SPEC, TABLE, F, page_fields, planes, ref_e4m3, ref_quantize, ref_values

from kvcompress import _C

SOURCE = Path(__file__).resolve().parents[2] / "csrc" / "core"
HARNESS = r"""
#include "codec/codec.h"
#include "base/floats.h"
#include "kernels/kernels.h"
static const kvc_kernels kernels = {.encode = kvc_scalar_encode, .rotate = kvc_scalar_rotate};
const kvc_kernels *kvc_kernels_get(void) { return &kernels; }
#define EACH(name, from, to, f)                \
    void name(const from *x, int64_t n, to *y) \
    {                                          \
        for (int64_t i = 0; i < n; i++)        \
            y[i] = f(x[i]);                    \
    }
EACH(f16_to_f32, uint16_t, float, kvc_f16_to_f32)
EACH(f32_to_f16, float, uint16_t, kvc_f32_to_f16)
EACH(f32_to_bf16, float, uint16_t, kvc_f32_to_bf16)
EACH(f32_to_e4m3, float, uint8_t, kvc_f32_to_e4m3)
void store(int format, int key, int64_t D, int64_t size, uint8_t *tiles, uint8_t *meta, int64_t t0,
           int64_t n, const void *src, int64_t stride, int dtype, float *scratch)
{
    kvc_side side = {format, key, D, size, tiles, meta};
    kvc_store_rows(&side, t0, n, src, stride, (kvc_dtype)dtype, scratch);
}
void decode(int format, int key, int64_t D, int64_t size, uint8_t *tiles, uint8_t *meta, int64_t t0,
            int64_t n, float *rows)
{
    kvc_side side = {format, key, D, size, tiles, meta};
    kvc_decode(&side, t0, n, rows);
}
"""
SOURCES = ("codec/codec.c", "codec/cells.c", "codec/format.c", "base/status.c", "kernels/scalar_codec.c")


@pytest.fixture(scope="session")
def core(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The codec's C functions, in a small library built for the tests."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("codec")
    (folder / "harness.c").write_text(HARNESS)
    flags = ["-std=c11", "-O1", "-ffp-contract=off", "-shared", "-fPIC", f"-I{SOURCE}"]
    files = [str(folder / "harness.c"), *(str(SOURCE / name) for name in SOURCES)]
    subprocess.run([*compiler.split(), *flags, *files, "-lm", "-o", str(folder / "core.so")], check=True)
    return ctypes.CDLL(str(folder / "core.so"))


def p(x: np.ndarray, offset: int = 0) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.ctypes.data + offset)


def i64(x: int) -> ctypes.c_int64:
    return ctypes.c_int64(x)


def test_small_floats_convert_as_ieee_says(core: ctypes.CDLL) -> None:
    h = np.arange(65536, dtype=np.uint16)
    wide = np.empty(65536, F)
    core.f16_to_f32(p(h), i64(65536), p(wide))
    np.testing.assert_array_equal(wide, h.view(np.float16).astype(F))
    rng = np.random.default_rng(4)
    ties = (wide[:0x7C00].astype(float) + np.append(wide[1:0x7C00], 65536).astype(float)) / 2
    anything = rng.integers(0, 2**32, 200_000, dtype=np.uint32).view(F)
    x = np.concatenate((ties.astype(F), anything[~np.isnan(anything)], TABLE[:127].astype(F)))
    special = np.array([np.inf, -np.inf, np.nan], F)
    x = np.concatenate((x, np.nextafter(x, F(0)), np.nextafter(x, F(np.inf)), -x, special))
    number = ~np.isnan(x)
    out = np.empty(len(x), np.uint16)
    with np.errstate(over="ignore"):
        core.f32_to_f16(p(x), i64(len(x)), p(out))
        np.testing.assert_array_equal(out[number], x.astype(np.float16).view(np.uint16)[number])
    assert np.isnan(out.view(np.float16)[~number]).all()
    core.f32_to_bf16(p(x), i64(len(x)), p(out))
    u = x.view(np.uint32).astype(np.uint64)
    np.testing.assert_array_equal(out[number], ((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16)[number])
    assert np.isnan((out[~number].astype(np.uint32) << 16).view(F)).all()
    codes = np.empty(len(x), np.uint8)
    core.f32_to_e4m3(p(x), i64(len(x)), p(codes))
    np.testing.assert_array_equal(codes[number], ref_e4m3(x[number]))


# K of formats with statistics over tokens, and words with several tokens, are only written as whole pages.
SIDES = [(n, key) for n, (bits, _, _, keys) in SPEC.items() for key in (0, 1) if keys == "token" and (key or bits >= 8)]


@pytest.mark.parametrize("name,key", SIDES)
def test_rows_stored_in_any_order_give_the_page(core: ctypes.CDLL, name: str, key: int) -> None:
    rng, D, size, bits = np.random.default_rng(6), 64, 64, FORMATS[name]["bits"]
    raw = name.startswith("raw")
    dtype = {"raw_f16": 1, "raw_bf16": 2}.get(name, 0)
    x = rng.standard_normal((size, D + 5)).astype(F)  # row stride larger than D
    x = {0: x, 1: x.astype(np.float16), 2: (x.view(np.uint32) >> 16).astype(np.uint16)}[dtype]
    tiles = rng.integers(0, 256, size * D * bits // 8 + 64, dtype=np.uint8)
    meta = rng.integers(0, 256, 2 * max(1, planes(name, D)) * size + 64, dtype=np.uint8)
    tail, meta_tail = tiles[-64:].copy(), meta[-64:].copy()
    scratch = np.empty(size * D + 4096, F)
    values = (x.astype(np.uint32) << 16).view(F) if dtype == 2 else x.astype(F)
    want = values[:, :D]
    if not raw:
        codes, scales = ref_quantize(np.ascontiguousarray(want), name)
        want = ref_values(codes, scales, name)
    got, done, cuts = np.empty((size, D), F), [], [0, 1, 4, 9, 16, 32, 39, 41, 47, 62, 64]
    for piece in rng.permutation(len(cuts) - 1):
        t0, n = cuts[piece], cuts[piece + 1] - cuts[piece]
        core.store(
            CODE[name],
            key,
            i64(D),
            i64(size),
            p(tiles),
            p(meta),
            i64(t0),
            i64(n),
            p(x, t0 * (D + 5) * x.itemsize),
            i64(D + 5),
            dtype,
            p(scratch),
        )
        done += range(t0, t0 + n)
        core.decode(CODE[name], key, i64(D), i64(size), p(tiles), p(meta), i64(0), i64(size), p(got))
        np.testing.assert_allclose(got[done], want[done], rtol=1e-6, atol=1e-6)
    assert (tiles[-64:] == tail).all() and (meta[-64:] == meta_tail).all()


def test_decode_adds_the_centroid(core: ctypes.CDLL) -> None:
    rng, D, size = np.random.default_rng(8), 128, 32
    k = (rng.standard_normal((1, 1, size, D)) + 20 * rng.standard_normal(D)).astype(F)
    page = _C.pack(k, k, CODE["int4"], CODE["int8"], size)[0, 0, 0].copy()
    bits, _, meta, _ = page_fields(page, "int4", "int8", (D, D), size)
    half = meta.view(np.float16)
    want = ref_values(bits, half[:size, None], "int4") + half[size:]
    got = np.empty((size, D), F)
    at = size * D // 2 + size * D  # after the K tiles and V tiles
    core.decode(CODE["int4"], 1, i64(D), i64(size), p(page), p(page, at), i64(0), i64(size), p(got))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    k = k[0, 0].astype(float)
    assert 10 * np.log10(((k - k.mean(0)) ** 2).sum() / ((got - k) ** 2).sum()) > 19
