"""Whole pages: every way to write them gives the same bytes on every level, and the same values back."""

import hashlib

import levels
import pytest
import torch

from kvcompress import PagedKV, formats

DIMS = (48, 64, 256, 512, 576)  # 48 does not fill 16-bit words evenly; 48 and 576 are rotated in blocks
QUANTIZED = [name for name in formats.NAMES if name != "raw"]


def taken(name: str) -> list[int]:
    multiple = formats.TABLE[formats.resolve(name, torch.float32)]["dim_multiple"]
    return [D for D in DIMS if D % multiple == 0]


def data(D: int, T: int, dtype: torch.dtype) -> torch.Tensor:
    """k, v [2, B, H, T, D] with zeros of both signs, a row of zeros, tiny and large rows."""
    x = torch.randn(2, 1, 2, T, D, generator=torch.Generator().manual_seed(D))
    x[..., 3::7, :] *= 2.0**-12
    x[..., 5::7, :] *= 2.0**8
    x[..., 9, :] = 0
    x[..., 11, ::3] = -0.0
    x[..., 12, :] = x[..., 12, :].abs()
    x[..., 12, 1::5], x[..., 12, 2::5] = -0.0, 0.0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", QUANTIZED)
def test_a_page_sealed_from_raw_is_the_page_written_at_once(name, dtype):
    for D in taken(name):
        k, v = data(D, 132, dtype)
        slow, fast = (PagedKV(2, D, key=name, dtype=dtype) for _ in range(2))
        for t in range(132):
            slow.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        fast.append(k, v)
        token = k[:, :, :1] * 0, v[:, :, :1] * 0
        slow.append(*token)
        fast.append(*token)
        for a, b in zip(slow.dense(), fast.dense(), strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def digest() -> str:
    total = hashlib.sha256()
    for name in QUANTIZED:
        for D in taken(name):
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                k, v = data(D, 140, dtype)  # a sealed page and two raw ones
                layer = PagedKV(2, D, key=name, dtype=dtype)
                layer.append(k, v)
                for x in layer.dense():
                    total.update(x.contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def test_read_gives_the_same_values_on_every_level():
    found = levels.on_each(digest)
    assert len(set(found.values())) == 1, found


@pytest.mark.parametrize("name", ["raw", "int8", "int4"])
def test_long_calls_that_write_past_the_caches_store_what_short_ones_do(name):
    k, v = torch.randn(2, 1, 2, 8260, 128)
    long, short = (PagedKV(2, 128, key=name) for _ in range(2))
    long.append(k, v)
    for t in range(0, 8260, 236):
        short.append(k[:, :, t : t + 236], v[:, :, t : t + 236])
    for a, b in zip(long.dense(), short.dense(), strict=True):
        assert torch.equal(a, b)
