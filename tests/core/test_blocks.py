"""pack_pages: blocks quantized by another engine, read back from our pages."""

import math

import pytest
import torch
from codec_reference import CODE

from kvcompress import _C, ops
from kvcompress.quantization.pack import pack_pages

FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def blocks(name, n=6, size=16, H=3, D=32):
    """Every finite code, and random ones."""
    if name == "int8":
        codes = torch.arange(-128, 128, dtype=torch.int8)
    else:
        codes = torch.arange(256, dtype=torch.uint8).view(FP8[name])
        codes = codes[codes.float().isfinite()]
    picked = torch.cat([torch.arange(len(codes)), torch.randint(0, len(codes), (n * size * H * D - len(codes),))])
    return codes.view(torch.uint8)[picked].reshape(n, size, H, D).view(codes.dtype)


def read(pages, key, value, tokens, size, dims):
    """k, v [1, H, tokens, D] float32 of one sequence's pages, by the read op."""
    H, bytes_ = pages.shape[2], pages.shape[3]
    entries = [(p * H * bytes_ // 64) << 16 | CODE[key] << 8 | CODE[value] for p in range(pages.shape[1])]
    table, rows = torch.tensor([[[-1, *entries]]]), torch.tensor([[[tokens, 0]]])
    return ops.read(torch.empty(0), pages.flatten(), table, rows, torch.empty(0).int(), H, *dims, tokens, size, 0)


def as_rows(x):
    """[blocks, size, H, ...] -> [1, H, tokens, ...]."""
    return x.flatten(0, 1).transpose(0, 1).unsqueeze(0)


SCALES = {
    "tensor": lambda n, size, H: 0.25,
    "head": lambda n, size, H: torch.rand(H).half(),
    "block": lambda n, size, H: torch.rand(n, 1, 1).half(),
    "token": lambda n, size, H: torch.rand(n, size, 1).half(),
    "token_head": lambda n, size, H: torch.rand(n, size, H).half(),
}


@pytest.mark.parametrize("size", (None, 32, 48))
@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("key,value", [("int8", "fp8_e4m3"), ("fp8_e4m3", "int8"), ("fp8_e5m2", "fp8_e5m2")])
def test_pages_hold_the_values_of_the_blocks(key, value, kind, size):
    k, v = blocks(key), blocks(value, D=48)
    k_scale, v_scale = (SCALES[kind](*k.shape[:3]) for _ in "kv")
    pages = pack_pages(k, v, k_scale, v_scale, page_size=size)
    assert pages.shape == (1, 96 // (size or 16), 3, _C.page_bytes(CODE[key], CODE[value], 32, 48, size or 16))
    got = read(pages, key, value, 96, size or 16, (32, 48))
    for y, x, scale in zip(got, (k, v), (k_scale, v_scale), strict=True):
        scale = torch.as_tensor(scale, dtype=torch.float32).expand(x.shape[:3]).unsqueeze(3)
        assert torch.equal(y, as_rows(x.float() * scale))


def test_they_are_the_pages_that_pack_makes():
    x = torch.randn(1, 3, 96, 32)
    codes, scales = ops.quantize(x, "int8")
    block = (codes ^ 0x80).view(torch.int8)[0].transpose(0, 1).reshape(6, 16, 3, 32)
    scale = scales[0].transpose(0, 1).reshape(6, 16, 3)
    want = ops.pack(x, x, CODE["int8"], CODE["int8"], 32)
    assert torch.equal(pack_pages(block, block, scale, scale, page_size=32), want)


def test_bits_in_uint8_and_strided_blocks():
    k = blocks("fp8_e4m3")
    want = pack_pages(k, k, 1.0, 1.0)
    bits = k.view(torch.uint8)
    assert torch.equal(pack_pages(bits, bits, 1.0, 1.0, key="fp8_e4m3", value="fp8_e4m3"), want)
    heads_first = bits.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3).view(k.dtype)
    assert torch.equal(pack_pages(heads_first, k, 1.0, 1.0), want)


def test_scales_as_a_pair():
    k_scale, v_scale = torch.rand(2, 16, 3).half() + 0.5, 0.25
    assert torch.equal(pack_pages(K, K + 5, (k_scale, v_scale)), pack_pages(K, K + 5, k_scale, v_scale))


def test_a_scale_is_rounded_to_float16():
    k = blocks("int8")
    got, _ = read(pack_pages(k, k, 0.1, 1.0), "int8", "int8", 96, 16, (32, 32))
    assert torch.equal(got, as_rows(k.float() * torch.tensor(0.1).half().float()))
    assert ((got - as_rows(k.float() * 0.1)).abs() <= got.abs() * 2.0**-10).all()


K = torch.zeros(2, 16, 3, 32, dtype=torch.int8)
NAN8 = torch.full((2, 16, 3, 32), 0x7F, dtype=torch.uint8)


@pytest.mark.parametrize("error,text,call", [
    (TypeError, "k_blocks: expected a torch tensor, got list", lambda: pack_pages([1], K, 1, 1)),
    (TypeError, "expected k_scale and v_scale, or a tuple of both, got int", lambda: pack_pages(K, K, 1)),
    (TypeError, "page_size: expected an int, got str", lambda: pack_pages(K, K, 1, 1, page_size="32")),
    (TypeError, "k_blocks: expected int8", lambda: pack_pages(K.float(), K, 1, 1)),
    (TypeError, "uint8 blocks and their format", lambda: pack_pages(NAN8, K, 1, 1)),
    (TypeError, "got torch.int8 and fp8_e4m3", lambda: pack_pages(K, K, 1, 1, key="fp8_e4m3")),
    (TypeError, "and int4", lambda: pack_pages(K, NAN8, 1, 1, value="int4")),
    (ValueError, "v_blocks: expected \\[num_blocks", lambda: pack_pages(K, K[0], 1, 1)),
    (ValueError, "not empty", lambda: pack_pages(K[:0], K, 1, 1)),
    (ValueError, "one shape", lambda: pack_pages(K, K[:1], 1, 1)),
    (ValueError, "k_scale: expected a number or a tensor that broadcasts to .* = \\[2, 16, 3\\]",
     lambda: pack_pages(K, K, torch.ones(2), 1)),
    (ValueError, "scales of at least 0 .* got -1", lambda: pack_pages(K, K, -1, 1)),
    (ValueError, "got nan", lambda: pack_pages(K, K, 1, math.nan)),
    (ValueError, "got 1e-10", lambda: pack_pages(K, K, 1e-10, 1)),
    (ValueError, "got 1e\\+06", lambda: pack_pages(K, K, 1, 1e6)),
    (ValueError, "finite codes", lambda: pack_pages(K, NAN8, 1, 1, value="fp8_e4m3")),
    (ValueError, "v: .* sequence 0, head 0, token 0", lambda: pack_pages(K, NAN8, 1, 1, value="fp8_e5m2")),
    (ValueError, "page_size", lambda: pack_pages(K, K, 1, 1, page_size=24)),
    (ValueError, "divisor of T", lambda: pack_pages(K, K, 1, 1, page_size=64)),
    (ValueError, "head dim", lambda: pack_pages(K[..., :8], K, 1, 1)),
])  # fmt: skip
def test_bad_blocks(error, text, call):
    with pytest.raises(error, match=text):
        call()


def test_pack_codes_refuses_invalid_arguments():
    codes, scales = torch.zeros(1, 1, 16, 32, dtype=torch.uint8), torch.ones(1, 1, 16).half()
    int8 = CODE["int8"]
    for error, text, args in (
        (ValueError, "fp8_e4m3 or fp8_e5m2, got int4", (codes, codes, scales, scales, CODE["int4"], int8, 16)),
        (ValueError, "got int8_asym", (codes, codes, scales, scales, int8, CODE["int8_asym"], 16)),
        (ValueError, "scales of at least 0", (codes, codes, scales, -scales, int8, int8, 16)),
        (ValueError, "scales of at least 0", (codes, codes, scales * math.inf, scales, int8, int8, 16)),
        (ValueError, "one shape", (codes, codes, scales[..., :8].contiguous(), scales, int8, int8, 16)),
        (TypeError, "scales: expected float16", (codes, codes, scales.float(), scales, int8, int8, 16)),
        (TypeError, "k: expected uint8", (codes.int(), codes, scales, scales, int8, int8, 16)),
        (ValueError, "stride 1", (codes.repeat(1, 1, 1, 2)[..., ::2], codes, scales, scales, int8, int8, 16)),
        (ValueError, "format codes", (codes, codes, scales, scales, 99, int8, 16)),
    ):  # fmt: skip
        with pytest.raises(error, match=text):
            ops.pack_codes(*args)
