"""Rounding of numbers to codes, at every boundary. Run in tests by `test_cast_policy.py`, and for another kernel level
by

    KVCOMPRESS_ISA=scalar python tests/support/cast_policy.py

Every encoder has the same interface here: `rows` [n, 32] fp32 in; codes [n, 32], one per byte, and float64 scales
out."""

import sys
from collections.abc import Callable

import numpy as np
import torch
from codec_reference import CODE, E2M1, E5M2, SPEC, TABLE, F, meta_values, nearest, page_fields, ref_levels, unpack

from kvcompress import _C, PagedKV, ops, quantize, schemes

Encoder = Callable[[np.ndarray, str], tuple[np.ndarray, np.ndarray]]
GRIDS = {"fp8_e4m3": TABLE[:0x7F], "fp8_e5m2": E5M2, "nvfp4": E2M1, "mxfp4": E2M1}
SYMMETRIC = ("int8", "int4_token", "fp8_e4m3", "fp8_e5m2", "nvfp4", "mxfp4")
PER_ROW = (*SYMMETRIC, "int8_asym", "int4_asym", "int2_asym", "int4_g32")
D = 32


def _rows(x: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    codes, meta = _C.quantize(x, CODE[name])
    return unpack(codes, SPEC[name][0]), meta_values(meta.reshape(len(x), -1), name)


def _page(key: bool) -> Encoder:
    def encode(x: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
        padded = np.resize(x, (-(-len(x) // 64) * 64, D))[None, None]
        codes, meta = [], []
        for page in _C.pack(padded, padded, CODE[name], CODE[name], 64)[0, :, 0]:
            fields = page_fields(page.copy(), name, name, (D, D), 64)
            codes.append(fields[0 if key else 1].astype(np.uint8))
            kept = fields[2 if key else 3]
            kept = kept if SPEC[name][1] == "e2m1" else kept.view(np.float16)
            meta.append(np.ascontiguousarray(kept.reshape(-1, 64).T))
        return np.concatenate(codes)[: len(x)], meta_values(np.concatenate(meta)[: len(x)], name)

    return encode


def _standalone(x: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    q = quantize(torch.from_numpy(x), name)
    parts = [p.reshape(len(x), -1).numpy() for p in (q.scales, q.zeros) if p is not None]
    meta = np.ascontiguousarray(np.stack(parts, -1).reshape(len(x), -1))
    return q.unpacked().reshape(x.shape).numpy(), meta_values(meta, name)


ENCODERS: dict[str, Encoder] = {"rows": _rows, "K": _page(True), "V": _page(False), "standalone": _standalone}


def boundaries(grid: np.ndarray) -> np.ndarray:
    """Levels, the midpoints between neighbours (exact in fp32), and the fp32 numbers next to each, of both signs."""
    ties = ((grid[:-1] + grid[1:]) / 2).astype(F)
    x = np.concatenate((grid.astype(F), ties))
    x = np.concatenate((x, np.nextafter(x, F(0)), np.nextafter(x, F(1e9))))
    return np.concatenate((x, -x))


def with_top(x: np.ndarray, top: float, group: int) -> np.ndarray:
    """Rows whose groups each start with `top`, so that their scale is 1."""
    per = D // group * (group - 1)
    n = -(-len(x) // per)
    body = np.resize(x, (n, D // group, group - 1))
    return np.concatenate((np.full((n, D // group, 1), top, F), body), 2).reshape(n, D)


def check_small_floats_at_every_boundary(encode: Encoder) -> None:
    for name, grid in GRIDS.items():
        x = boundaries(grid)
        rows = with_top(x[np.abs(x) <= grid[-1]], grid[-1], SPEC[name][2] or D)
        codes, scales = encode(rows, name)
        assert (scales == 1).all(), name
        np.testing.assert_array_equal(codes, nearest(rows, grid, 1 << (SPEC[name][0] - 1)), name)


def check_integers_at_every_boundary(encode: Encoder) -> None:
    for name, top in (("int8", 127), ("int4_token", 7)):
        rows = boundaries(np.arange(top + 1.0))
        rows = with_top(rows[np.abs(rows) <= top], top, D)
        codes, scales = encode(rows, name)
        assert (scales == 1).all(), name
        np.testing.assert_array_equal(codes, np.rint(rows.astype(float)) + top + 1, name)
    for name, top in (("int8_asym", 255), ("int4_asym", 15), ("int2_asym", 3), ("int4_g32", 15)):
        x = boundaries(np.arange(top + 1.0))
        rows = with_top(x[(x >= 0) & (x <= top)], top, D)
        rows[:, 1] = 0
        codes, meta = encode(rows, name)
        assert (meta == [1, 0]).all()
        np.testing.assert_array_equal(codes, np.rint(rows.astype(float)), name)


def check_zero_groups_are_exact(encode: Encoder) -> None:
    x = np.zeros((4, D), F)
    x[1] = -0.0
    x[3, :16] = 1
    for name in PER_ROW:
        codes, meta = encode(x, name)
        values = decoded(codes, meta, name)
        assert (values[:3] == 0).all() and (np.abs(values[3, 16:]) <= (0 if "_asym" not in name else 1e-3)).all(), name


def decoded(codes: np.ndarray, meta: np.ndarray, name: str) -> np.ndarray:
    """float64 values of codes with float64 scales."""
    asymmetric, groups = SPEC[name][1] == "uint", D // (SPEC[name][2] or D)
    levels, m = ref_levels(codes, name).reshape(len(codes), groups, -1), meta.reshape(len(codes), groups, -1)
    return (levels * m[:, :, :1] + (m[:, :, 1:2] if asymmetric else 0)).reshape(codes.shape)


def check_scales_that_underflow_and_denormals(encode: Encoder) -> None:
    """No scale is 0 or below the smallest one, though a subnormal scale may clip; float16 subnormals are valid."""
    sizes = F(2.0) ** np.arange(-149, -13, dtype=F)
    half = np.resize(np.arange(1, 1024, dtype=np.uint16).view(np.float16), (32, D)).astype(F)
    for name in PER_ROW:
        bits, coding, group, _ = SPEC[name]
        least = 2.0**-24 if coding != "e2m1" else 2.0**-9 if group == 16 else 2.0**-126
        for x in (np.linspace(-1, 1, D, dtype=F) * sizes[:, None], half):
            codes, meta = encode(x, name)
            m = meta.reshape(len(x), -1, 2 if coding == "uint" else 1)
            assert (m[:, :, 0] >= least).all() and np.isfinite(m).all(), name
            step, zero = (np.repeat(part, D // m.shape[1], 1) for part in (m[:, :, 0], m[:, :, -1]))
            if coding == "uint":
                clipped = np.clip(x - zero, 0, (2**bits - 1) * step) + zero
            else:
                top = {"int": 2 ** (bits - 1) - 1, "e4m3": 448, "e5m2": 57344, "e2m1": 6}[coding]
                clipped = np.clip(x, -top * step, top * step)
            gap = {"e2m1": 2, "e4m3": 32, "e5m2": 8192}.get(coding, 1)
            assert (np.abs(decoded(codes, meta, name) - clipped) <= gap / 2 * step * (1 + 1e-6)).all(), name


def check_constant_groups(encode: Encoder) -> None:
    x = np.repeat(np.array([1, -1, 0.7, -0.3, 100, 6e4], F)[:, None], D, 1)
    for name in PER_ROW:
        near = decoded(*encode(x, name), name)
        limit = np.abs(x) * {"mxfp4": 0.25, "nvfp4": 2.0**-4, "fp8_e5m2": 2.0**-8}.get(name, 2.0**-10)  # mxfp4: 8 is 6
        if name == "nvfp4":  # its scales end at 448
            limit = np.maximum(limit, np.abs(x) - 2688)
        assert (np.abs(near - x) <= limit).all() and (near == near[:, :1]).all(), name


def check_one_outlier(encode: Encoder) -> None:
    """1e30 saturates the row's scale; the other elements become 0, nothing is Inf or NaN, and other rows are
    unaffected."""
    x = np.random.default_rng(0).standard_normal((64, D)).astype(F)
    calm = x.copy()
    x[5, 7], x[9, 0] = 1e30, -1e30
    for name in PER_ROW:
        codes, meta = encode(x, name)
        calm_codes, calm_meta = encode(calm, name)
        others = [i for i in range(64) if i not in (5, 9)]
        assert np.array_equal(codes[others], calm_codes[others]) and np.array_equal(meta[others], calm_meta[others])
        near = decoded(codes, meta, name)
        assert np.isfinite(near).all() and near[5].argmax() == 7 and near[5, 7] >= 2688, name
        if SPEC[name][1] in ("int", "e4m3", "e5m2"):
            assert meta[5] == meta[9] == 65504 and near[9, 0] == -near[5, 7]
            assert (np.abs(near[5, 8:]) <= 2.5).all()  # only e5m2 still has codes for them


def check_all_codes_decode() -> None:
    """All 256 codes decode, through rows, standalone, and (the finite ones) pages of both sides."""
    every = np.arange(256, dtype=np.uint8).reshape(8, D)
    for name, finite in (("fp8_e4m3", 0x7E), ("fp8_e5m2", 0x7B)):
        e, m, bias = (4, 3, 7) if name == "fp8_e4m3" else (5, 2, 15)
        c = np.arange(256)
        exponent, mantissa = c >> m & (2**e - 1), (c & (2**m - 1)) / 2**m
        value = np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent - float(bias)))
        value = np.where(c < 128, value, -value)
        value[(c & 127) > finite] = np.nan
        if name == "fp8_e5m2":
            value[[0x7C, 0xFC]] = np.inf, -np.inf
        want = value.astype(F).reshape(8, D)
        np.testing.assert_array_equal(_C.dequantize(every, np.ones(8, np.float16), CODE[name]), want)
        row = schemes.grain(name).codes
        got = _C.dequantize_by(every[None, None], np.ones((1, 1, 8, 1), np.float16), None, *row)
        np.testing.assert_array_equal(got[0, 0], want)
        own = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[name]
        np.testing.assert_array_equal(want, torch.from_numpy(every).view(own).float().numpy())
        codes = np.resize(c[(c & 127) <= finite].astype(np.uint8), (1, 1, 64, D))
        ones = torch.ones(1, 1, 64).half()
        pages = ops.pack_codes(torch.from_numpy(codes), torch.from_numpy(codes), ones, ones, CODE[name], CODE[name], 64)
        store = pages.flatten(), torch.tensor([[[-1, CODE[name] << 8 | CODE[name]]]]), torch.tensor([[[64, 0]]])
        for read in ops.read(torch.empty(0), *store, torch.empty(0).int(), 1, D, D, 64, 64, 0):
            np.testing.assert_array_equal(read.numpy(), value.astype(F)[codes])


def check_what_is_not_finite_is_reported_and_not_stored() -> None:
    for bad in (np.nan, np.inf, -np.inf):
        for name in (*PER_ROW, "int4", "int2", "kivi4"):
            kv = PagedKV(2, D, key=name, sinks=0, page_size=16)
            k = torch.randn(1, 2, 48, D)
            kv.append(k, k)
            before, parts = [x.clone() for x in kv.dense()], kv.stats()["parts"]
            broken = k.clone()
            broken[0, 1, 17, 3] = float(bad)
            for pair in ((broken, k), (k, broken)):
                try:
                    kv.append(*pair)
                except ValueError as error:
                    assert "NaN or Inf" in str(error)
                else:
                    raise AssertionError(f"{name}: {bad} was stored")
            assert all(map(torch.equal, kv.dense(), before)) and kv.seen == kv.page_store.kept_tokens == 48
            assert all(kv.stats()["parts"][name] == parts[name] for name in ("sealed", "open", "sinks"))
            for call in (lambda: quantize(broken, name), lambda: ops.pack(broken, k, CODE[name], CODE[name], 16)):  # noqa: B023
                try:
                    call()
                except ValueError as error:
                    assert "NaN or Inf" in str(error)
                else:
                    raise AssertionError(f"{name}: {bad} was quantized")


CHECKS = {
    **{f"{f.__name__}[{who}]": lambda f=f, e=e: f(e) for f in (
        check_small_floats_at_every_boundary, check_integers_at_every_boundary, check_zero_groups_are_exact,
        check_scales_that_underflow_and_denormals, check_constant_groups, check_one_outlier,
    ) for who, e in ENCODERS.items()},
    "all codes": check_all_codes_decode,
    "not finite": check_what_is_not_finite_is_reported_and_not_stored,
}  # fmt: skip


def check_all() -> tuple[str, int]:
    for name, check in CHECKS.items():
        print(name, file=sys.stderr)
        check()
    return _C.isa(), len(CHECKS)
