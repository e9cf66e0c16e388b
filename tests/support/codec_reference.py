"""An independent NumPy implementation of the stored formats, from their formulas and the comments in page.h."""

import numpy as np

from kvcompress import _C

FORMATS = {f["name"]: f for f in _C.formats()}
CODE = {name: f["code"] for name, f in FORMATS.items()}
F = np.float32

# name: (bits, coding, group size in dims (0: all), statistics of K's metadata); duplicated on purpose
SPEC = {
    "raw_f32": (32, "raw", 0, "token"),
    "raw_f16": (16, "raw", 0, "token"),
    "raw_bf16": (16, "raw", 0, "token"),
    "int8": (8, "int", 0, "token"),
    "fp8_e4m3": (8, "e4m3", 0, "token"),
    "int4": (4, "mid", 0, "centred"),
    "int8_asym": (8, "uint", 0, "token"),
    "fp8_e5m2": (8, "e5m2", 0, "token"),
    "int2": (2, "mid", 0, "centred"),
    "int4_token": (4, "int", 0, "token"),
    "int4_g32": (4, "uint", 32, "token"),
    "int4_asym": (4, "uint", 0, "token"),
    "int2_asym": (2, "uint", 0, "token"),
    "kivi4": (4, "uint", 0, "channel"),
    "kivi2": (2, "uint", 0, "channel"),
    "nvfp4": (4, "e2m1", 16, "token"),
    "mxfp4": (4, "e2m1", 32, "token"),
    "int4_lloyd": (4, "lloyd", 0, "centred"),
    "cal2": (2, "spread", 0, "centred"),
    "int3": (3, "mid", 0, "centred"),
}
QUANTIZED = tuple(name for name in SPEC if not name.startswith("raw"))


def meta_dtype(name: str) -> type:
    """Dtype of an element of the metadata."""
    return np.uint8 if SPEC[name][1] == "e2m1" else np.float16


def planes(name: str, D: int) -> int:
    """Metadata elements per token (on the V side)."""
    _, coding, group, _ = SPEC[name]
    return (D // group if group else 1) * (2 if coding == "uint" else 1)


def float_table(exponent: int, mantissa: int, bias: int) -> np.ndarray:
    """float64 magnitudes of the codes of a small float, by definition."""
    c = np.arange(2 ** (exponent + mantissa))
    e, m = c >> mantissa, (c & (2**mantissa - 1)) / 2.0**mantissa
    return np.where(e == 0, m * 2.0 ** (1 - bias), (1 + m) * 2.0 ** (e - float(bias)))


LLOYD = {4: (6, 18, 31, 44, 58, 75, 96, 127)}  # and their negatives
E5M2 = float_table(5, 2, 15)[:0x7C]  # the other codes are Inf and NaN
E2M1 = float_table(2, 1, 1)


def e4m3_table() -> np.ndarray:
    """float64 values of the 256 codes, by definition (OCP E4M3: bias 7, 0x7f is NaN)."""
    c = np.arange(256)
    e, m = c >> 3 & 15, (c & 7).astype(float)
    value = np.where(e == 0, m / 8 * 2.0**-6, (1 + m / 8) * 2.0 ** (e - 7.0))
    return np.where(c & 0x7F == 0x7F, np.nan, np.where(c < 128, value, -value))


TABLE = e4m3_table()


def nearest(x: np.ndarray, grid: np.ndarray, sign: int) -> np.ndarray:
    """Nearest code of `grid` to each |fp32|, ties to the even code, saturating; `sign` is set if x is negative."""
    a = np.minimum(np.abs(x.astype(np.float64)), grid[-1])
    high = np.searchsorted(grid, a).clip(0, len(grid) - 1)
    low = np.maximum(high - 1, 0)
    down, up = a - grid[low], grid[high] - a
    code = np.where((down < up) | ((down == up) & (low % 2 == 0)), low, high)
    return (code | np.where(np.signbit(x), sign, 0)).astype(np.uint8)


def ref_e4m3(x: np.ndarray) -> np.ndarray:
    return nearest(x, TABLE[:0x7F], 128)


def ref_scale(x: np.ndarray) -> np.ndarray:
    """fp32 to the stored fp16: never Inf or 0."""
    return np.maximum(np.minimum(x, F(65504)).astype(np.float16), np.float16(2.0**-24))


def tree_sum(x: np.ndarray) -> np.ndarray:
    """fp32 [n, D] -> [n]: 16 lane-strided partial sums, then a tree."""
    p = np.zeros((len(x), 16), F)
    for i in range(0, x.shape[1], 16):
        p = p + x[:, i : i + 16]
    for h in (8, 4, 2, 1):
        p = p[:, :h] + p[:, h : 2 * h]
    return p[:, 0]


def ref_rotate(x: np.ndarray) -> np.ndarray:
    """Hadamard transform in blocks of the largest power of two that divides D."""
    D = x.shape[1]
    block = D & -D
    y = x.reshape(-1, block)
    h = 1
    while h < block:
        z = y.reshape(len(y), block // (2 * h), 2, h)
        y = np.stack((z[:, :, 0] + z[:, :, 1], z[:, :, 0] - z[:, :, 1]), 2).reshape(-1, block)
        h *= 2
    return (y * F(1 / np.sqrt(block))).reshape(x.shape)


FINE = 21 / 64  # step of the 4-bit codes of "spread", relative to that of the 2-bit codes


def ref_spread(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`ref_group` for cal2: 4 bits for the first quarter of the dims, 2 for the next half, none for the rest, whose
    places hold the low digits."""
    D = x.shape[1]
    used = D - D // 4
    bits = np.where(np.arange(D) < D // 4, 4, 2)[:used]
    step, half = np.where(bits == 4, F(FINE), F(1)).astype(F), 2.0 ** (bits - 1)
    a = np.abs(x[:, :used]).max(1)
    zero = a < F(2.0**-100)
    z = x[:, :used] * (F(1) / np.where(zero, F(1), a))[:, None]
    lanes = lambda y: np.pad(y.astype(F), ((0, 0), (0, -used % 16)))  # noqa: E731
    squares = tree_sum(lanes(z * z))
    r = np.where(zero, F(1), np.sqrt(squares / F(used)))
    q = np.clip(np.floor(z * (F(1) / (step * r[:, None]))), -half, half - 1)
    level = ((q + 0.5) * step).astype(F)
    scales = ref_scale(np.sqrt(squares / np.where(zero, F(1), tree_sum(lanes(level * level)))) * a)
    code = (q + half).astype(np.uint8)
    codes = np.concatenate((np.where(bits == 4, code >> 2, code), code[:, : D // 4] & 3), 1).astype(np.uint8)
    return np.where(zero[:, None], np.uint8(2), codes), np.where(zero, np.float16(0), scales)[:, None]


def ref_nearest_levels(y: np.ndarray, coding: str, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Rotated rows in units of the step: levels (fp32), and codes minus half their number."""
    half = 2 ** (bits - 1)
    if coding == "mid":
        q = np.clip(np.floor(y), -half, half - 1)
        return q + F(0.5), q
    grid = np.array([-v for v in LLOYD[bits][::-1]] + list(LLOYD[bits]), F)
    at = np.searchsorted((grid[half + 1 :] + grid[half:-1]) / 2, np.abs(y))  # ties toward 0
    at = np.where(y < 0, half - 1 - at, half + at)
    return grid[at], at - half


def ref_group(x: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """fp32 [n, D], one group per row -> codes uint8 [n, D], metadata [n, 1 or 2]. Every step in fp32."""
    bits, coding, group, _ = SPEC[name]
    if coding == "spread":
        return ref_spread(x)
    D, a = x.shape[1], np.abs(x).max(1)
    rotated = coding in ("mid", "lloyd")
    zero = a < F(2.0**-100) if rotated else a == 0
    safe = np.where(zero, F(1), a)
    if rotated:
        half = 2 ** (bits - 1)
        z = ref_rotate(x * (F(1) / safe)[:, None])
        r = np.sqrt(tree_sum(z * z) / F(D))
        r[zero] = 1
        step = F(1) / F(47) if coding == "lloyd" else F({4: 0.33, 3: 0.58, 2: 1}[bits])
        newer = coding == "lloyd" or bits == 3
        num, den, q = np.zeros(len(x), F), np.ones(len(x), F), np.zeros(x.shape)
        for factor in (1, 0.875, 1.125)[: 3 if newer else 1]:  # the step whose levels are most parallel to the row
            y = z * (F(1) / (step * r * F(factor)))[:, None]
            level, at = ref_nearest_levels(y, coding, bits)
            more, total = tree_sum(z * level), tree_sum(level * level)
            better = more * more * den > num * num * total
            num, den = np.where(better, more, num), np.where(better, total, den)
            q = np.where(better[:, None], at, q)
        gain = num / den
        if newer:  # preserves the row's projection onto itself
            gain = np.minimum(tree_sum(z * z) / np.where(zero, F(1), num), F(1.125) * gain)
        scales = ref_scale(gain * a)
        codes, none = (q + half).astype(np.uint8), half
    elif coding == "uint":
        top = F(2**bits - 1)
        low = np.clip(x.min(1), -65504, 65504).astype(np.float16)
        span = x.max(1) - low.astype(F)
        scales = np.where(span > 0, ref_scale(np.where(span > 0, span, F(1)) / top), np.float16(0))
        inverse = np.where(span > 0, F(1) / np.where(span > 0, scales, np.float16(1)).astype(F), F(0))
        codes = np.rint(np.clip((x - low.astype(F)[:, None]) * inverse[:, None], 0, top)).astype(np.uint8)
        return codes, np.stack((scales, low), 1)
    elif coding == "e2m1":
        if group == 16:
            scales = np.where(zero, 0, np.maximum(ref_e4m3(safe / F(6)), 1)).astype(np.uint8)
            inverse = F(1) / np.where(zero, 1, TABLE[scales]).astype(F)
        else:
            exponent = np.frexp(a.astype(np.float64))[1] - 1  # floor(log2), also of denormals
            scales = np.where(zero, 1, np.clip(exponent - 2 + 127, 1, 254)).astype(np.uint8)
            inverse = (2.0 ** (127.0 - scales)).astype(F)
        codes = nearest(x * inverse[:, None], E2M1, 8)
        if group == 16:
            codes = np.where(zero[:, None], np.where(np.signbit(x), 8, 0).astype(np.uint8), codes)
        return codes, scales[:, None]
    else:
        top = {"e4m3": 448, "e5m2": 57344, "int": 2 ** (bits - 1) - 1}[coding]
        scales = ref_scale(safe / F(top))
        y = x * (F(1) / scales.astype(F))[:, None]
        none = 0
        if coding == "int":
            codes, none = (np.clip(np.rint(y), -top, top) + 2 ** (bits - 1)).astype(np.uint8), 2 ** (bits - 1)
        else:
            codes = ref_e4m3(y) if coding == "e4m3" else nearest(y, E5M2, 128)
    if coding == "e5m2":  # a zero keeps its sign
        return np.where(zero[:, None], np.where(np.signbit(x), 128, 0).astype(np.uint8), codes), \
            np.where(zero, np.float16(0), scales)[:, None]  # fmt: skip
    codes = np.where(zero[:, None], np.uint8(none), codes)
    return codes, np.where(zero, np.float16(0), scales)[:, None]


def ref_quantize(x: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """fp32 [n, D] -> codes uint8 [n, D] (one per byte), metadata [n, planes]."""
    group = SPEC[name][2] or x.shape[1]
    codes, meta = ref_group(x.reshape(-1, group), name)
    return codes.reshape(x.shape), meta.reshape(len(x), -1)


def unpack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Packed codes to one code per byte: byte j holds dims j, D*bits/8 + j, .., lowest bits first."""
    if bits == 8:
        return codes
    if bits == 3:  # rows of 2 bits, then of 1
        low, high = np.split(codes, [codes.shape[-1] * 2 // 3], -1)
        return unpack(low, 2) | unpack(high, 1) << 2
    return np.concatenate([codes >> shift & (2**bits - 1) for shift in range(0, 8, bits)], -1)


def meta_values(meta: np.ndarray, name: str) -> np.ndarray:
    """float64 values of stored metadata."""
    if SPEC[name][1] != "e2m1":
        return meta.view(np.float16).astype(np.float64)
    return TABLE[meta] if SPEC[name][2] == 16 else 2.0 ** (meta.astype(np.float64) - 127)


def ref_levels(codes: np.ndarray, name: str) -> np.ndarray:
    """float64 levels of codes."""
    bits, coding, _, _ = SPEC[name]
    if coding in ("int", "mid", "uint", "spread"):
        return codes - {"int": 2.0 ** (bits - 1), "uint": 0.0}.get(coding, (2.0**bits - 1) / 2)
    if coding == "lloyd":
        half = 2 ** (bits - 1)
        magnitudes = np.array(LLOYD[bits], float)
        return np.where(codes < half, -magnitudes[(half - 1 - codes) % half], magnitudes[codes % half])
    grid = {"e4m3": TABLE[:128], "e5m2": np.append(E5M2, [np.nan] * 4), "e2m1": E2M1}[coding]
    magnitude = codes & (2 ** (bits - 1) - 1)
    return grid[magnitude] * np.where(codes >> (bits - 1), -1.0, 1.0)


def ref_values(codes: np.ndarray, meta: np.ndarray, name: str) -> np.ndarray:
    """float64 values of codes [n, D] (one per byte) with metadata [n, planes], without the centroid."""
    _, coding, group, _ = SPEC[name]
    n, D = codes.shape
    m = meta_values(meta, name).reshape(n, D // (group or D), -1)
    x = ref_levels(codes, name).reshape(n, D // (group or D), -1) * m[:, :, :1]
    x = (x + m[:, :, 1:2] if coding == "uint" else x).reshape(n, D)
    if coding == "spread":
        high, low = x[:, : D // 4], x[:, D - D // 4 :]
        return np.concatenate((FINE * (4 * high + low), x[:, D // 4 : D - D // 4], 0 * low), 1)
    if coding not in ("mid", "lloyd"):
        return x
    H = np.ones((1, 1))
    while len(H) < (D & -D):
        H = np.block([[H, H], [H, -H]])
    return (x.reshape(-1, len(H)) @ H / np.sqrt(len(H))).reshape(n, D)


def ref_channels(x: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """K of a page with metadata per channel: fp32 [size, D] -> codes [size, D], (scale, zero point) fp16 [2, D]."""
    codes, meta = ref_group(np.ascontiguousarray(x.T), name)
    return codes.T, meta.T


def extreme_rows(rng: np.random.Generator, n: int, D: int) -> np.ndarray:
    """fp32 rows of every magnitude, including outliers, zeros, denormals and constants."""
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
    """Codes or raw bits [size, D] of K and V, and their metadata bytes, by page.h."""
    tiles, metas, at = [], [], 0
    for name, D, is_key in ((key, dims[0], True), (value, dims[1], False)):
        bits = SPEC[name][0]
        if bits == 3:
            tiles.append(three_bits(page[at : at + size * D * 3 // 8], D, is_key))
            at += -(-size * D * 3 // 8 // 64) * 64
            continue
        per = 32 // bits
        section = size * D * bits // 8
        words = page[at : at + section].view("<u4").reshape(size // 16, -1, 16 if is_key else D)
        at += -(-section // 64) * 64
        out = np.empty((size, D), np.uint32)
        for t in range(size):
            for d in range(D):
                run, lane, period = (d, t % 16, D) if is_key else (t % 16, d, 16)
                if bits < 8:  # byte i, plane p = p*(period*bits/8) + 4j + i
                    plane, rest = divmod(run, period * bits // 8)
                    j, shift = rest // 4, 8 * (rest % 4) + bits * plane
                else:
                    j, shift = run // per, run % per * bits
                out[t, d] = words[t // 16, j, lane] >> np.uint32(shift) & np.uint32(2**bits - 1)
        tiles.append(out)
    for name, D, is_key in ((key, dims[0], True), (value, dims[1], False)):
        n = meta_bytes(name, is_key, D, size)
        metas.append(page[at : at + n])
        at += -(-n // 64) * 64
    assert at == len(page)
    return tiles + metas


def three_bits(section: np.ndarray, D: int, is_key: bool) -> np.ndarray:
    """Codes [size, D] of tiles of 3 bits: a tile of the low 2 bits, followed by half as many bytes with the high
    bits."""
    tiles = section.reshape(-1, 6 * D)
    low, high = tiles[:, : 4 * D], tiles[:, 4 * D :]
    high = np.concatenate((high & 0x55, high >> 1 & 0x55), 1)  # as a tile of 2-bit codes would have them
    out = np.empty((len(tiles), 16, D), np.uint32)
    for t in range(16):
        for d in range(D):
            plane, rest = divmod(d, D // 4) if is_key else divmod(t, 4)
            byte = 4 * (rest // 4 * 16 + t) + rest % 4 if is_key else 4 * d + rest
            out[:, t, d] = low[:, byte] >> 2 * plane & 3 | (high[:, byte] >> 2 * plane & 1) << 2
    return out.reshape(-1, D)


def meta_bytes(name: str, is_key: bool, D: int, size: int) -> int:
    """Bytes of metadata of one side of a page."""
    _, coding, _, keys = SPEC[name]
    if coding == "raw":
        return 0
    by_token = planes(name, D) * np.dtype(meta_dtype(name)).itemsize * size
    if not is_key or keys == "token":
        return by_token
    return 4 * D if keys == "channel" else by_token + 2 * D


def ref_side(x: np.ndarray, name: str, is_key: bool) -> tuple[np.ndarray, np.ndarray]:
    """One side of a page, fp32 [size, D]: codes [size, D] and the bytes of its metadata."""
    keys, mean = SPEC[name][3] if is_key else "token", np.zeros(0, np.float16)
    if keys == "channel":
        codes, meta = ref_channels(x, name)
        return codes, np.ascontiguousarray(meta).view(np.uint8).ravel()
    if keys == "centred":  # subtract the mean as stored, summed over tokens in ascending order
        total = np.zeros(x.shape[1], F)
        for row in x:
            total = total + row
        mean = np.clip(total / F(len(x)), -65504, 65504).astype(np.float16)
        x = x - mean.astype(F)
    codes, meta = ref_quantize(x, name)
    return codes, np.concatenate((np.ascontiguousarray(meta.T).view(np.uint8).ravel(), mean.view(np.uint8)))
