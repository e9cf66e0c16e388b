"""Encoders as nvcc makes them, run by the emulator (sass/): the golden bytes, and those that the CPU stores."""

import sys
from pathlib import Path

import cuda_twin
import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sass"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "golden"))
import make
import runner
from test_cuda_codec import CODE, GOLDEN, NAMES

WHY = runner.missing()
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(cuda_twin.DEVICE != "cpu", reason="the twin's"),
    pytest.mark.skipif(WHY is not None, reason=str(WHY)),
]


@pytest.mark.parametrize("name", NAMES)
def test_rows_equal_the_golden_vectors(name, D=64):
    machine = runner.Machine()
    codes, scales = machine.call("quantize", torch.from_numpy(make.rows(D, D)), CODE[name])
    np.testing.assert_array_equal(codes.numpy(), GOLDEN[f"{name}_{D}_codes"])
    want = GOLDEN[f"{name}_{D}_scales"]
    np.testing.assert_array_equal(scales.view(torch.uint8).numpy().ravel(), want.view(np.uint8).ravel())
    values = machine.call("dequantize", codes, scales, CODE[name]).view(torch.int32).numpy().view(np.uint32)
    np.testing.assert_array_equal(values[:, :32], GOLDEN[f"{name}_{D}_values"])
    assert {block.kernel.name for block in machine.blocks} == {"kvc_quantize_kernel", "kvc_dequantize_kernel"}
