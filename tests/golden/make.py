"""Golden vectors of the codecs: the bytes that every instruction set level and every device must produce.

    python tests/golden/make.py              writes codec.npz next to this file
    python tests/golden/make.py --check      fails if this build's bytes differ from it
    python tests/golden/make.py --digest N   prints a hash of the bytes for N rounds of random extreme input

Inputs come from an integer generator and exact powers of two, so they are the same everywhere. Change the file only
when a format changes, and say so in CHANGELOG.md: old pages can then no longer be read."""

import hashlib
import sys
from pathlib import Path

import numpy as np

PATH = Path(__file__).with_name("codec.npz")
DIMS = (16, 32, 48, 64, 128, 256)
PAGES = (
    ("int8", "fp8_e4m3", 48, 16),
    ("fp8_e4m3", "int8", 64, 32),
    ("int4", "int4", 32, 64),
    ("int8", "int4", 64, 32),
    ("raw_f32", "int8", 16, 16),
    ("int4", "raw_f16", 32, 32),
    ("int2", "int2", 64, 64),
    ("int8_asym", "fp8_e5m2", 48, 32),
    ("int4_token", "int4_asym", 64, 16),
    ("int4_g32", "int2_asym", 96, 32),
    ("kivi4", "kivi4", 48, 32),
    ("kivi2", "kivi2", 64, 64),
    ("nvfp4", "mxfp4", 64, 32),
    ("mxfp4", "nvfp4", 96, 16),
    ("int4_lloyd", "int4_lloyd", 48, 32),
    ("cal2", "cal2", 48, 32),
    ("int3", "int3", 96, 32),
)


def uniform(seed: int, n: int) -> np.ndarray:
    """uint32 [n] from a linear congruential generator, upper 16 bits of two steps each."""
    out, x = np.empty(n, np.uint32), seed & 0xFFFFFFFF
    for i in range(n):
        x = (1664525 * x + 1013904223) & 0xFFFFFFFF
        high = x >> 16
        x = (1664525 * x + 1013904223) & 0xFFFFFFFF
        out[i] = (high << 16) | (x >> 16)
    return out


def bells(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """fp32 numbers of variance about 1: the sum of the four bytes, centered; exact in fp32."""
    u = uniform(seed, int(np.prod(shape)))
    total = sum((u >> s & 255).astype(np.int32) for s in (0, 8, 16, 24)) - 510
    return (total.astype(np.float32) / np.float32(128)).reshape(shape)


def rows(seed: int, D: int) -> np.ndarray:
    """fp32 [20, D]: ordinary rows, and all extremes of a scale."""
    x = bells(seed, (20, D))
    scale = np.float32(2.0) ** np.array([0, 10, -20, 60, -90, -120], np.float32)
    x[:6] *= scale[:, None]
    x[6] = 0
    x[7] = -0.0
    x[8] = np.float32(1.5)
    x[9] = np.where(np.arange(D) % 2, -65504, 65504)
    x[10, D // 3] = 1e30
    x[11, D - 1] = -3.4e38
    x[12] = (uniform(seed + 1, D) % 4096).view(np.int32) * np.float32(2.0**-149)  # denormals
    x[13] = 0
    x[13, 5] = np.float32(-(2.0**-149))
    x[14] = (np.arange(D) - D // 2) + np.float32(0.5)  # ties of a grid with step 1
    x[14, 0] = 127
    x[15] = x[15] * np.float32(2.0**-30) + np.float32(2.0**-24)
    x[16, ::2] = 448
    x[17] = np.float32(2.0) ** -(np.arange(D) % 24).astype(np.float32)
    x[18] *= np.float32(1e-3)
    x[18, 7] = 1000
    x[19] = np.where(x[19] > 0, np.float32(3e38), np.float32(-3e38))
    return x


def page_tokens(key: str, value: str, D: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """K and V [1, 2, size, D] of a row of PAGES."""
    k, v = bells(7, (1, 2, size, D)), bells(8, (1, 2, size, D))
    k += np.arange(D, dtype=np.float32) / 4  # a centroid
    return (k.astype(np.float16), v.astype(np.float16)) if "raw_f16" in (key, value) else (k, v)


def quantized() -> list[str]:
    """Names of all formats except the raw ones."""
    from kvcompress import _C

    return [f["name"] for f in _C.formats() if not f["name"].startswith("raw_")]


def arrays() -> dict[str, np.ndarray]:
    """Everything that is compared: name -> bytes, from the imported build."""
    from kvcompress import _C

    code = {f["name"]: f["code"] for f in _C.formats()}
    out = {}
    multiple = {f["name"]: f["dim_multiple"] for f in _C.formats()}
    for name in quantized():
        for D in DIMS:
            if D % multiple[name]:
                continue
            codes, scales = _C.quantize(rows(D, D), code[name])
            out[f"{name}_{D}_codes"] = codes
            out[f"{name}_{D}_scales"] = scales if scales.dtype == np.uint8 else scales.view(np.uint16)
            out[f"{name}_{D}_values"] = _C.dequantize(codes, scales, code[name]).view(np.uint32)[:, :32]
    for key, value, D, size in PAGES:
        k, v = page_tokens(key, value, D, size)
        out[f"page_{key}_{value}_{D}_{size}"] = _C.pack(k, v, code[key], code[value], size)
    return out


def digest(rounds: int) -> str:
    """Hash over random shapes, strides and numbers of every magnitude: levels that differ in one bit give another
    hash."""
    from kvcompress import _C

    rng, total = np.random.default_rng(2024), hashlib.sha256()
    code = {f["name"]: f["code"] for f in _C.formats()}
    multiple = {f["name"]: f["dim_multiple"] for f in _C.formats()}
    for _ in range(rounds):
        D = int(rng.choice((32, 64, 96, 128, 160, 256)))
        n = int(rng.integers(1, 70))
        x = rng.standard_normal((n, D)) * 2.0 ** rng.integers(-149, 120, (n, 1))
        wide = rng.random(n) < 0.3  # different magnitudes within a row
        x[wide] *= 2.0 ** rng.integers(-40, 8, (int(wide.sum()), D))
        x = np.clip(x, -3e38, 3e38).astype(np.float32)
        x[rng.random((n, D)) < 0.05] *= 0
        x[rng.random(n) < 0.1] = -0.0
        names = [name for name in quantized() if D % multiple[name] == 0]
        for name in names:
            for part in _C.quantize(x, code[name]):
                total.update(np.ascontiguousarray(part).tobytes())
        if rng.random() < 0.5:
            x = np.clip(x, -65504, 65504).astype(np.float16)
        k = np.resize(x, (1, 32, 2, D)).transpose(0, 2, 1, 3)[:, :1]  # every second row
        v = np.ascontiguousarray(k[..., ::-1])[:, :, ::-1]  # reversed rows
        for name in names:
            total.update(_C.pack(k, v, code[name], code[name], 32).tobytes())
    return total.hexdigest()


def main() -> int:
    if "--digest" in sys.argv:
        print(digest(int(sys.argv[-1])))
        return 0
    now = arrays()
    if "--check" not in sys.argv:
        np.savez_compressed(PATH, **now)
        return 0
    golden = np.load(PATH)
    wrong = sorted(set(golden.files) ^ set(now))
    wrong += [name for name in golden.files if name in now and not np.array_equal(golden[name], now[name])]
    if wrong:
        print("differ from the golden vectors:", ", ".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
