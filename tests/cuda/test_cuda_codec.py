"""CUDA's codecs, run on the host: bit-identical to the CPU."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cuda_twin import FINITE, Twin

from kvcompress import _C, ops

sys.path.insert(0, str(Path(__file__).parents[1] / "golden"))
import make

CODE = {f["name"]: f["code"] for f in _C.formats()}
MULTIPLE = {f["name"]: f["dim_multiple"] for f in _C.formats()}
GOLDEN = np.load(make.PATH)
NAMES = make.quantized()


@pytest.mark.parametrize("D", make.DIMS)
@pytest.mark.parametrize("name", NAMES)
def test_rows_equal_the_golden_vectors(name, D):
    if D % MULTIPLE[name]:
        return
    codes, scales = Twin().quantize(torch.from_numpy(make.rows(D, D)), CODE[name])
    np.testing.assert_array_equal(codes.numpy(), GOLDEN[f"{name}_{D}_codes"])
    want = GOLDEN[f"{name}_{D}_scales"]
    np.testing.assert_array_equal(scales.view(torch.uint8).numpy().ravel(), want.view(np.uint8).ravel())
    values = Twin().dequantize(codes, scales, CODE[name]).view(torch.int32).numpy().view(np.uint32)
    np.testing.assert_array_equal(values[:, :32], GOLDEN[f"{name}_{D}_values"])


@pytest.mark.parametrize("key,value,D,size", [x for x in make.PAGES if x[0] in (*NAMES, "raw_f32")])
def test_pages_equal_the_golden_vectors(key, value, D, size):
    k, v = make.page_tokens(key, value, D, size)
    pages = Twin().pack(torch.from_numpy(k), torch.from_numpy(v), CODE[key], CODE[value], size)
    np.testing.assert_array_equal(pages.numpy(), GOLDEN[f"page_{key}_{value}_{D}_{size}"])


@pytest.mark.parametrize("order", [0, 1, 5])
@pytest.mark.parametrize("seed", range(4))
def test_random_pages_equal_the_cpus(seed, order):
    """Any pair of formats, dims, page size, dtype, strides, in any order of warps and lanes."""
    rng = np.random.default_rng(seed)
    for _ in range(6):
        D, Dv = (int(rng.choice([32, 64, 96, 128, 160, 256, 320, 512, 576])) for _ in range(2))
        key, value = (CODE[str(rng.choice(NAMES))] for _ in range(2))
        size, dtype = int(rng.choice([16, 32, 64])), [torch.float32, torch.float16, torch.bfloat16][rng.integers(3)]
        x = rng.standard_normal((1, 2 * size, 2, D + Dv)) * 2.0 ** rng.integers(-12, 12, (1, 2 * size, 2, 1))
        x = torch.from_numpy(x).to(dtype).transpose(1, 2)
        k, v = x[..., :D], x[..., D:]
        got = Twin(order=order).pack(k, v, key, value, size)
        assert torch.equal(got, ops.pack(k, v, key, value, size)), (key, value, D, Dv, size, dtype)


def test_nan_and_inf_are_flagged_and_stored_as_zero():
    k = torch.randn(1, 1, 64, 64)
    k[0, 0, 5, 7], k[0, 0, 9, 1] = torch.nan, torch.inf
    twin = Twin()
    got = twin.pack(k, k, CODE["int4"], CODE["int8"], 64)
    assert twin.flags == FINITE
    clean = k.nan_to_num(0, 0, 0)
    assert torch.equal(got, ops.pack(clean, clean, CODE["int4"], CODE["int8"], 64))
