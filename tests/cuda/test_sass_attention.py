"""Attention and a step's token as nvcc makes them, run by the emulator (sass/): against attention in float64 on what is
stored, and the twin. Every kernel of decode, for sm_90 with most shapes, for the other architectures with fewer."""

import functools

import cuda_twin
import numpy as np
import pytest
import runner
import torch

from kvcompress import _C, PagedKV

BOUND = {"raw": 1e-2, "int8": 5e-3, "fp8_e4m3": 5e-3, "int4": 2e-2, "int2": 2e-2}
SET = {"raw": "raw", "int8": "int8", "fp8_e4m3": "fp8", "int4": "int4", "int2": "int2"}
ARCHS = ["80", "90", "100", "120"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def decoded(kernel, arch, key, value=None, tokens=150, group=4, processors=1, dtype=torch.float16, shift=0, launches=1):
    """A decode step in machine code, by this kernel: attention in float64 on what is stored, within the format's bound,
    and the twin's; it also writes the token as the twin does. q lies `shift` elements behind what 16 bytes divide."""
    random, heads, dim = torch.Generator().manual_seed(tokens), 2, int(kernel.rsplit("_", 1)[-1].replace("wide", "320"))
    layers = [PagedKV(heads, dim, key=key, value=value, page_size=64, dtype=dtype, pool=_C.Pool()) for _ in range(2)]
    k, v = (torch.randn(1, heads, tokens, dim, generator=random).to(dtype) for _ in range(2))
    step = [torch.randn(1, h, 1, dim, generator=random).to(dtype) for h in (group * heads, heads, heads)]
    room = torch.zeros(step[0].numel() + shift, dtype=dtype)
    step[0] = room[shift:].view(step[0].shape).copy_(step[0])
    machine = runner.Machine("kvc_attend.*", arch, processors=processors, counters=heads)
    calls = lambda *args, **options: machine.call("attend", *args, **options)  # noqa: E731
    results = []
    for kv, op in zip(layers, (calls, cuda_twin.Twin(processors=processors, counters=heads).attend), strict=True):
        kv.append(k[:, :, 1:], v[:, :, 1:])
        kv.append(k[:, :, :1], v[:, :, :1])  # seals what is full: the step has nothing to seal
        kv.op = op
        results.append(kv.attend(*step)[0].double())
    assert {block.kernel.name for block in machine.blocks} == {kernel} and len(machine.launches) == launches
    assert len(machine.blocks) > heads * (processors > 1)  # runs, where there are multiprocessors for them
    assert np.array_equal(*(kv.page_store.pool.arena for kv in layers))
    K, V = (x.double().repeat_interleave(group, 1) for x in layers[0].dense())
    scores = torch.softmax(step[0].double() @ K.transpose(2, 3) * dim**-0.5, -1)
    got, twin, want = *results, (scores @ V).view(results[0].shape)
    bound = BOUND.get(key, 2e-2) + {torch.float16: 0, torch.bfloat16: 8e-3}[dtype]
    bound *= max(1.0, float(want.abs().max()))
    assert (got - want).abs().max() <= bound and (got - twin).abs().max() <= bound


@pytest.mark.parametrize("name,tokens,group,arch", [
    *((name, 150, 4, arch) for name in BOUND for arch in ARCHS), *((name, 64, 8, "90") for name in BOUND),
    ("int2", 64 * 39 + 7, 8, "80"), ("int2", 64 * 39 + 7, 8, "90"), ("fp8_e4m3", 150, 4, "86"),
    ("fp8_e4m3", 150, 4, "89"), ("int2", 150, 4, "89"),
])  # fmt: skip
def test_decode_in_machine_code(name, tokens, group, arch):
    """The last: pages of 2 bits, eight at a time and what is left of them."""
    decoded(f"kvc_attend_{SET[name]}_128", arch, name, tokens=tokens, group=group)


@pytest.mark.parametrize("dim,arch", [(64, "80"), (64, "90"), (256, "90"), (256, "120")])
@pytest.mark.parametrize("name", BOUND)
def test_heads_of_other_dims(name, dim, arch):
    decoded(f"kvc_attend_{SET[name]}_{dim}", arch, name)


@pytest.mark.parametrize("arch", ["80", "90"])
@pytest.mark.parametrize("kernel,key,value", [
    ("ints_128", "int8", "int4"), ("ints_128", "int2", "int4"), ("ints_64", "int4", "int2"),
    ("ints_256", "int8", "int2"), ("any_128", "kivi4", "kivi4"), ("any_128", "int3", "nvfp4"),
    ("any_64", "mxfp4", "int4_g32"), ("any_256", "cal2", "int8"), ("wide", "int8", "int4"),
])  # fmt: skip
def test_other_formats_and_wide_heads(kernel, key, value, arch):
    """Kernels of several integer formats, of all formats, of heads of more than 256 dims (of which fewer tokens)."""
    more = {"tokens": 70, "group": 1, "launches": 2} if kernel == "wide" else {"tokens": 70}
    decoded(f"kvc_attend_{kernel}", arch, key, value, **more)


@pytest.mark.parametrize("dtype,shift", [(torch.bfloat16, 0), (torch.float16, 1)])
def test_queries_in_machine_code(dtype, shift):
    """Rotated by tensor cores, of bf16; row by row where they do not lie in pieces of 16 bytes."""
    decoded("kvc_attend_int4_128", "90", "int4", dtype=dtype, shift=shift)


@pytest.mark.parametrize("name", ["raw", "int4"])
def test_runs_are_made_one_by_the_block_that_comes_last(name):
    decoded(f"kvc_attend_{name}_128", "90", name, tokens=64 * 12, processors=6)


@pytest.mark.parametrize("name,processors,dtype,dim,arch", [
    *((name, 3 if name == "int4" else 1, dtype, 128, "90") for name in BOUND for dtype in DTYPES[1:]),
    ("int8", 1, torch.float16, 64, "90"), ("int4", 1, torch.bfloat16, 64, "80"), ("int8", 1, torch.float16, 128, "80"),
    ("fp8_e4m3", 1, torch.float16, 128, "100"), ("int2", 1, torch.bfloat16, 128, "120"),
])  # fmt: skip
def test_prefill_in_machine_code(name, processors, dtype, dim, arch):
    """64 rows a block over pages, the call's own tokens last, which not all rows see."""
    random, heads, tokens, own = torch.Generator().manual_seed(5), 1, 150, 40
    layers = [PagedKV(heads, dim, key=name, page_size=64, dtype=dtype) for _ in range(2)]
    k, v = (torch.randn(1, heads, tokens, dim, generator=random).to(dtype) for _ in range(2))
    step = [torch.randn(1, h, own, dim, generator=random).to(dtype) for h in (2 * heads, heads, heads)]
    machine = runner.Machine("kvc_prefill.*", arch, processors=processors)
    calls = lambda *args, **options: machine.call("attend", *args, **options)  # noqa: E731
    results = []
    for kv, op in zip(layers, (calls, cuda_twin.Twin(processors=processors).attend), strict=True):
        kv.append(k, v)
        kv.op = op
        results.append(kv.attend(*step)[0].double())
    assert {block.kernel.name for block in machine.blocks} == {f"kvc_prefill_{dim}"}
    K, V = (x.double().repeat_interleave(2, 1) for x in layers[0].dense())
    scores = step[0].double() @ K.transpose(2, 3) * dim**-0.5
    scores += torch.full((own, tokens + own), -torch.inf).triu(tokens + 1)
    want = torch.softmax(scores, -1) @ V
    bound = {torch.float16: 0, torch.bfloat16: 8e-3}[dtype] + (1e-3 if name == "raw" else BOUND[name])
    assert (results[0] - want).abs().max() <= bound and (results[0] - results[1]).abs().max() <= bound


@pytest.mark.parametrize("dtype,arch", list(zip(DTYPES * 2, ["90"] * 3 + ["80", "100", "120"], strict=True)))
def test_tokens_in_machine_code(dtype, arch):
    """Steps of decode, of which some fill a page, with room for seals, so that a launch writes: the bytes that the twin
    writes, by 400 instructions a warp."""
    random, machine = torch.Generator().manual_seed(6), runner.Machine("kvc_token.*", arch)
    layers = [PagedKV(2, 48, key="int8", page_size=16, batch=2, dtype=dtype, pool=_C.Pool()) for _ in range(2)]
    none, twin = torch.full((1, 2), -1), cuda_twin.Twin()
    for kv, call in zip(layers, (functools.partial(machine.call, "attend"), twin.attend), strict=True):
        kv.op = lambda *x, call=call: call(*x[:9], x[9] if len(x[9]) else none, *x[10:])
    for T in (15, *[1] * 20):
        step = [torch.randn(2, h, T, 48, generator=random).to(dtype) for h in (4, 2, 2)]
        got, want = (kv.attend(*step)[0] for kv in layers)
        arenas = [kv.page_store.pool.arena for kv in layers]
        assert torch.equal(got, want) and np.array_equal(*arenas)
    warps = [w for b in machine.blocks for w in b.warps]
    assert len(machine.blocks) == 20 * 8 and max(w.executed for w in warps) <= (450 if arch == "100" else 400)
    assert len({i for w in warps for i in w.counts}) <= 500  # different ones, which are to be fetched
