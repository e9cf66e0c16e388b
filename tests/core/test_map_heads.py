"""map_heads: rows multiplied by a matrix per head, compared with float64; the same bytes on every level."""

import hashlib

import levels
import pytest
import torch

from kvcompress import ops

NONE = torch.empty(0)


def data(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype,bound", [(torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("B,Hq,H,T,D", [(1, 8, 2, 1, 128), (2, 3, 3, 1, 40), (2, 6, 2, 7, 16), (1, 4, 1, 33, 576)])
def test_against_float64(dtype, bound, B, Hq, H, T, D):
    x, by = data(B, T, Hq, D).to(dtype).transpose(1, 2), data(H, D, D, seed=1)
    want = (x.double().unflatten(1, (H, -1)) @ by.double()[:, None]).flatten(1, 2)
    for like in (dtype, torch.float32):
        got = ops.map_heads(x, by, NONE.to(like))
        assert got.shape == x.shape and got.dtype == like and got.is_contiguous()
        assert float((got - want).norm() / want.norm()) < (bound if like == dtype else 1e-6)


def test_rows_do_not_depend_on_their_neighbours():
    x, by = data(2, 6, 9, 72), data(2, 72, 72, seed=1)
    whole = ops.map_heads(x, by, NONE)
    assert all(torch.equal(whole[:, :, t : t + 1], ops.map_heads(x[:, :, t : t + 1], by, NONE)) for t in range(9))
    assert ops.map_heads(x[:, :, :0], by, NONE).shape == (2, 6, 0, 72)


def digest() -> str:
    total = hashlib.sha256()
    for D in (8, 16, 40, 64, 128, 160):
        for T in (1, 4, 6):
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                x = data(2, 4, T, D, seed=D + T).to(dtype)
                total.update(ops.map_heads(x, data(2, D, D, seed=D), x).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def test_levels_give_the_same_bytes():
    said = levels.on_each(digest)
    assert len(set(said.values())) == 1, said


@pytest.mark.parametrize("error,match,x,by,like", [
    (ValueError, "x: expected 4 dimensions, got 3", data(2, 3, 8), data(2, 8, 8), NONE),
    (ValueError, r"by: expected \[H, D, D\] of rows of 8, got \[2, 8, 9\]", data(1, 2, 3, 8), data(2, 8, 9), NONE),
    (ValueError, "divides 3 heads, got 2", data(1, 3, 3, 8), data(2, 8, 8), NONE),
    (ValueError, "divides 3 heads, got 0", data(1, 3, 3, 8), data(0, 8, 8), NONE),
    (ValueError, r"x: .*last dimension with stride 1", data(1, 2, 8, 3).mT, data(2, 8, 8), NONE),
    (ValueError, r"by: expected a contiguous tensor", data(1, 2, 3, 8), data(2, 8, 8).mT, NONE),
    (ValueError, "1 to 576 dims, got 577", data(1, 1, 1, 577), data(1, 577, 577), NONE),
    (TypeError, "by: expected float32, got float16", data(1, 2, 3, 8), data(2, 8, 8).half(), NONE),
    (TypeError, "x: expected float32, float16, bfloat16", data(1, 2, 3, 8).double(), data(2, 8, 8), NONE),
    (TypeError, "like: expected float32", data(1, 2, 3, 8), data(2, 8, 8), NONE.long()),
])  # fmt: skip
def test_bad_inputs(error, match, x, by, like):
    with pytest.raises(error, match=match):
        ops.map_heads(x, by, like)
