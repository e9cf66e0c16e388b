"""Encoders as nvcc makes them, run by the emulator (sass/): the golden bytes, and those that the CPU stores."""

import contextlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "golden"))
import make
import runner
from test_cuda_codec import CODE, GOLDEN, NAMES
from test_cuda_layer import on, state

from kvcompress import _C, PagedKV, policies


@pytest.mark.parametrize("name", NAMES)
def test_rows_equal_the_golden_vectors(name, D=64):
    machine = runner.Machine()
    codes, scales = machine.quantize(torch.from_numpy(make.rows(D, D)), CODE[name])
    np.testing.assert_array_equal(codes.numpy(), GOLDEN[f"{name}_{D}_codes"])
    want = GOLDEN[f"{name}_{D}_scales"]
    np.testing.assert_array_equal(scales.view(torch.uint8).numpy().ravel(), want.view(np.uint8).ravel())
    values = machine.dequantize(codes, scales, CODE[name]).view(torch.int32).numpy().view(np.uint32)
    np.testing.assert_array_equal(values[:, :32], GOLDEN[f"{name}_{D}_values"])
    assert {block.kernel.name for block in machine.blocks} == {"kvc_quantize_kernel", "kvc_dequantize_kernel"}


@pytest.mark.parametrize("key,value,D,size", [x for x in make.PAGES if x[0] in (*NAMES, "raw_f32")])
def test_pages_equal_the_golden_vectors(key, value, D, size):
    k, v = make.page_tokens(key, value, D, size)
    machine = runner.Machine("kvc_pack.*")
    pages = machine.pack(torch.from_numpy(k), torch.from_numpy(v), CODE[key], CODE[value], size)
    np.testing.assert_array_equal(pages.numpy(), GOLDEN[f"page_{key}_{value}_{D}_{size}"])
    assert len(machine.blocks) == 4


LIFE = "write", "list", "read", "clear", "anew", "move"


@pytest.mark.parametrize("key,value,dim,arch", [
    *(("int8", "int4", 32, arch) for arch in ("80", "90", "100", "120")), ("kivi4", "nvfp4", 32, "90"),
    ("kivi4", "nvfp4", 32, "120"), ("int2", "fp8_e4m3", 32, "90"), ("int3", "int8_asym", 32, "90"),
    ("raw", "cal2", 32, "90"), ("int8", "int4", 288, "90"), ("kivi4", "nvfp4", 288, "90"),
])  # fmt: skip
def test_what_a_layer_stores_and_reads(key, value, dim, arch):
    """Prompts, steps, tokens that are none, an eviction, read-back: the bytes that the CPU has of whole pages, of
    open ones and of pages that moved among them. Heads of more than 256 dims have kernels of their own."""
    kernels = {f"kvc_{name}_kernel" for name in LIFE}
    if dim > 256:
        kernels = {"kvc_list_kernel", *(f"kvc_{x}_wide" for x in ("write", "read_rows", "clear", "anew", "move"))}
    machine = runner.Machine("|".join(kernels), arch)
    options = {"page_size": 16, "policy": policies.KNorm(budget=28), "dtype": torch.float16}
    layers = [PagedKV(1, dim, key=key, value=value, pool=_C.Pool(), **options) for _ in range(2)]
    layers[1].page_store.steps = False  # as in test_cuda_layer.py
    random = torch.Generator().manual_seed(1)
    for i, T in enumerate((37, 1, 13)):
        q, k, v = (torch.randn(1, h, T, dim, generator=random).half() for h in (2, 1, 1))
        mask = torch.arange(T)[None] % 7 != 3 if i == 2 else None
        dense = []
        for kv, where in zip(layers, (on(machine), contextlib.nullcontext()), strict=True):
            with where:
                kv.attend(q, k, v, mask=mask)
                dense.append(kv.dense())
        assert all(torch.equal(a, b) for a, b in zip(*dense, strict=True))
        for a, b in zip(*(state(kv) for kv in layers), strict=True):
            assert np.array_equal(a, b), i
    ran = {block.kernel.name for block in machine.blocks}
    assert ran == kernels, ran
