"""The stored formats written a second time, from their formulas and from page.h's text, in NumPy."""

import numpy as np

from kvcompress import _C

FORMATS = {f["name"]: f for f in _C.formats()}
CODE = {name: f["code"] for name, f in FORMATS.items()}
F = np.float32


def e4m3_table() -> np.ndarray:
    """float64 value of each of the 256 codes, from the definition (OCP E4M3: bias 7, 0x7f is NaN)."""
    c = np.arange(256)
    e, m = c >> 3 & 15, (c & 7).astype(float)
    value = np.where(e == 0, m / 8 * 2.0**-6, (1 + m / 8) * 2.0 ** (e - 7.0))
    return np.where(c & 0x7F == 0x7F, np.nan, np.where(c < 128, value, -value))


TABLE = e4m3_table()


def ref_e4m3(x: np.ndarray) -> np.ndarray:
    """Nearest code to each fp32 number, ties to the even code, saturating."""
    grid = TABLE[:0x7F]
    a = np.minimum(np.abs(x.astype(np.float64)), 448)
    high = np.searchsorted(grid, a).clip(0, 0x7E)
    low = np.maximum(high - 1, 0)
    down, up = a - grid[low], grid[high] - a
    code = np.where((down < up) | ((down == up) & (low % 2 == 0)), low, high)
    return (code | np.where(np.signbit(x), 128, 0)).astype(np.uint8)


def ref_scale(x: np.ndarray) -> np.ndarray:
    """fp32 to the fp16 that is stored: never Inf, never 0."""
    return np.maximum(np.minimum(x, F(65504)).astype(np.float16), np.float16(2.0**-24))


def tree_sum(x: np.ndarray) -> np.ndarray:
    """fp32 [n, D] -> [n]: 16 lane-strided partials, then the tree."""
    p = np.zeros((len(x), 16), F)
    for i in range(0, x.shape[1], 16):
        p = p + x[:, i : i + 16]
    for h in (8, 4, 2, 1):
        p = p[:, :h] + p[:, h : 2 * h]
    return p[:, 0]


def ref_rotate(x: np.ndarray) -> np.ndarray:
    n, D = x.shape
    h = 1
    while h < D:
        y = x.reshape(n, D // (2 * h), 2, h)
        x = np.stack((y[:, :, 0] + y[:, :, 1], y[:, :, 0] - y[:, :, 1]), 2).reshape(n, D)
        h *= 2
    return x * F(1 / np.sqrt(D))


def ref_quantize(x: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """fp32 [n, D] -> codes uint8 [n, D] (one a byte), scales fp16 [n]; every step in fp32."""
    D = x.shape[1]
    a = np.abs(x).max(1)
    zero = a < F(2.0**-100) if name == "int4" else a == 0
    safe = np.where(zero, F(1), a)
    if name == "int4":
        z = ref_rotate(x * (F(1) / safe)[:, None])
        r = np.sqrt(tree_sum(z * z) / F(D))
        r[zero] = 1
        q = np.clip(np.floor(z * (F(1) / (F(0.33) * r))[:, None]), -8, 7)
        level = q + F(0.5)
        scales = ref_scale(tree_sum(z * level) / tree_sum(level * level) * a)
        codes, none = (q + 8).astype(np.uint8), 8
    else:
        scales = ref_scale(safe / F(127 if name == "int8" else 448))
        y = x * (F(1) / scales.astype(F))[:, None]
        codes = (np.clip(np.rint(y), -127, 127) + 128).astype(np.uint8) if name == "int8" else ref_e4m3(y)
        none = 128 if name == "int8" else 0
    return np.where(zero[:, None], np.uint8(none), codes), np.where(zero, np.float16(0), scales)


def unpack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Rows of packed codes to one code a byte."""
    return codes if bits == 8 else np.concatenate((codes & 15, codes >> 4), -1)


def ref_values(codes: np.ndarray, scales: np.ndarray, name: str) -> np.ndarray:
    """float64 values of codes (one a byte), without centroid."""
    s = scales.astype(np.float64)[..., None]
    if name == "int8":
        return (codes.astype(np.float64) - 128) * s
    if name == "fp8_e4m3":
        return TABLE[codes] * s
    H = np.ones((1, 1))
    while len(H) < codes.shape[-1]:
        H = np.block([[H, H], [H, -H]])
    return (codes - 7.5) * s @ H / np.sqrt(len(H))


def extreme_rows(rng: np.random.Generator, n: int, D: int) -> np.ndarray:
    """fp32 rows of every magnitude, some with outliers, zeros, denormals, constants."""
    x = rng.standard_normal((n, D)) * 2.0 ** rng.integers(-60, 100, (n, 1))
    x[::7] *= 2.0 ** rng.integers(-30, 5, (len(x[::7]), D))
    x[1::11, rng.integers(D)] = 1e30
    x = x.astype(F)
    x[2::13] = 0
    x[3::17] = F(2.0**-149) * rng.integers(0, 9, (len(x[3::17]), D))
    x[4::19] = F(0.7)
    x[5::23] = 65504
    return x


def page_fields(page: np.ndarray, key: str, value: str, dims: tuple[int, int], size: int) -> list[np.ndarray]:
    """Elements [size, D] (codes, raw bits) of K and of V, metadata of K and of V (uint16), by page.h."""
    tiles, metas, at = [], [], 0
    for name, D, is_key in ((key, dims[0], True), (value, dims[1], False)):
        bits = FORMATS[name]["bits"]
        per = 32 // bits
        section = size * D * bits // 8
        words = page[at : at + section].view("<u4").reshape(size // 16, -1, 16 if is_key else D)
        at += -(-section // 64) * 64
        out = np.empty((size, D), np.uint32)
        for t in range(size):
            for d in range(D):
                run, lane, period = (d, t % 16, D) if is_key else (t % 16, d, 16)
                if bits == 4:  # byte i, plane p = p*(period/2) + 4j + i
                    plane, rest = divmod(run, period // 2)
                    j, shift = rest // 4, 8 * (rest % 4) + 4 * plane
                else:
                    j, shift = run // per, run % per * bits
                out[t, d] = words[t // 16, j, lane] >> np.uint32(shift) & np.uint32(2**bits - 1)
        tiles.append(out)
    for name, D, is_key in ((key, dims[0], True), (value, dims[1], False)):
        n = FORMATS[name]["token_meta"] * size + (FORMATS[name]["key_dim_meta"] * D if is_key else 0)
        metas.append(page[at : at + n].view("<u2"))
        at += -(-n // 64) * 64
    assert at == len(page)
    return tiles + metas
