"""The emulator of machine code (sass/): faults planted in small programs, which it must find; then the decode
kernels as nvcc makes them, against attention in float64 on what is stored (full: needs nvcc and nvdisasm)."""

import ctypes
import functools
import sys
from pathlib import Path

import cuda_twin
import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sass"))
import program
import replay
import runner
from machine import Block, Fault

from kvcompress import _C, PagedKV

pytestmark = pytest.mark.skipif(cuda_twin.DEVICE != "cpu", reason="the twin's")


def run(text, threads=32, argument=b"", regions=(), shared=256):
    """A program as nvdisasm would print it."""
    lines, labels, code = [x.strip() for x in text.strip().splitlines()], {}, []
    for line in lines:
        if line.endswith(":"):
            labels[line[:-1]] = len(code)
        else:
            code.append(program.parse(16 * len(code), line))
    kernel = program.Kernel("planted", code, labels, b"", (0x210, 64))
    return Block(kernel, argument, (0, 0, 0), (1, 1, 1), threads, shared, regions).run()


START = """S2R R0, SR_TID.X
    IMAD.SHL.U32 R1, R0, 0x4, RZ
"""
FAULTS = {
    "never|nobody wrote": START + "STS [R1], R9",
    "what is stored": START + "IADD3 R3, R9, R0, RZ\nSTS [R1], R3",
    "stored depends": START + "LOP3.LUT R9, R9, 0xfffffffd, RZ, 0xc0, !PT\n"
    "LOP3.LUT R3, R9, 0x3, RZ, 0xc0, !PT\nSTS [R1], R3",
    "stored depends on": START + "STL [RZ], R9\nLDL R3, [RZ]\nSTS [R1], R3",
    "is stored": START + "PRMT R3, R0, 0x7610, R9\nSTS [R1], R3",
    "an address": START + "LDS R2, [R9]",
    "misaligned: 16 bytes": START + "LDS.128 R4, [R1]",
    "out of bounds: 4 bytes at 0x100 of 256": START + "STS [R1+0x90], RZ",
    "out of bounds: 4 bytes at 0x10": "MOV R2, 0x10\nMOV R3, RZ\nLDG.E R4, desc[UR4][R2.64]",
    "unknown instruction": START + "WGMMA R2, R3",
    "a race: write": START + "STS [RZ], R0",
    "a race: read": START + "ISETP.GE.AND P0, PT, R0, 0x20, PT\n@!P0 STS [RZ], R0\n@P0 LDS R2, [RZ]",
    "unknown shape of MOVM": START + "MOVM.8.MT88 R2, R0",
    "unknown kind of minimum": START + "HMNMX2.XORSIGN R2, R0, R1, PT",
    "a move that": START + "IMAD.MOV.U32 R2, RZ, RZ, -R0",
    "loses a sign": START + "MOV R0, R0",
    "lanes of a warp wait in different": START + "ISETP.EQ.AND P0, PT, R0, RZ, PT\n@P0 BRA `(.L)\nWARPSYNC.ALL\n.L:\n"
    "BAR.SYNC 0x0",
    "lanes of a warp diverge": START + "ISETP.EQ.AND P0, PT, R0, RZ, PT\n@P0 EXIT\n@!P0 BRA `(.L)\nNOP\n.L:\n"
    "ISETP.GE.AND P1, PT, R0, 0x5, PT\n@P1 SHFL.IDX PT, R2, R0, RZ, 0x1f",
    "passed by returning": START + "ISETP.GE.AND P0, PT, R0, 0x20, PT\n@P0 EXIT\nBAR.SYNC 0x0",
}  # fmt: skip


@pytest.mark.parametrize("word", FAULTS)
def test_faults_are_found(word):
    with pytest.raises(Fault) as caught:
        run(FAULTS[word] + "\nEXIT", threads=64)
    assert any(part in str(caught.value) for part in word.split("|")), caught.value


def test_without_the_fault_it_runs():
    """A barrier between a write and another warp's read; each warp's own bytes."""
    run(START + "STS [R1], R0\nBAR.SYNC 0x0\nLDS R2, [RZ]\nEXIT", threads=64)


def test_bits_of_a_register_that_nobody_wrote_whole():
    """Compilers keep predicates so, and spill them: what is read again was written."""
    text = """ISETP.GE.AND P0, PT, R0, 0x5, PT
        LOP3.LUT R9, R9, 0xfffffffd, RZ, 0xc0, !PT
        @P0 LOP3.LUT R9, R9, 0x2, RZ, 0xfc, !PT
        STL [RZ], R9
        LDL R8, [RZ]
        LOP3.LUT P1, RZ, R8, 0x2, RZ, 0xc0, !PT
        SEL R3, R0, R1, P1
        STS [R1], R3
        PRMT R4, R9, 0x4440, R0
        LOP3.LUT R4, R4, 0xff02, RZ, 0xc0, !PT
        STS [R1], R4
        PRMT R7, R0, 0x7610, R10
        STS.U16 [R1], R7
        EXIT"""
    run(START + text)


def test_arithmetic_reaches_memory():
    """Wide stores, carries, predicates, a loop, a shuffle; what is computed is written down by hand."""
    out = np.zeros(64, np.uint32)
    text = """S2R R0, SR_TID.X
        MOV R2, c[0x0][0x210]
        MOV R3, c[0x0][0x214]
        IMAD.WIDE.U32 R2, R0, 0x8, R2
        MOV R4, 0xffffffff
        IADD3 R5, P0, R4, R0, RZ
        IADD3.X R6, RZ, RZ, RZ, P0, !PT
        MOV R7, RZ
        .again:
        IADD3 R7, R7, 0x3, RZ
        ISETP.LT.AND P1, PT, R7, 0x1e, PT
        @P1 BRA `(.again)
        SHFL.BFLY PT, R8, R0, 0x1, 0x1f
        LOP3.LUT R8, R8, R7, RZ, 0x3c, !PT
        IADD3 R6, R6, R8, RZ
        MOV R9, R5
        MOV R8, R6
        STG.E.64 desc[UR4][R2.64], R8
        EXIT"""
    at = out.ctypes.data
    run(text, argument=bytes(ctypes.c_uint64(at)), regions=[(at, out.nbytes)])
    lanes = np.arange(32)
    assert (out[0::2] == ((lanes ^ 1) ^ 30) + (lanes > 0)).all()
    assert (out[1::2] == (lanes - 1) % 2**32).all()


COPY = (
    START
    + """MOV R2, c[0x0][0x210]
    MOV R3, c[0x0][0x214]
    IMAD.WIDE.U32 R4, R0, 0x4, R2
    LDGSTS.E [R1], desc[UR4][R4.64]
    LDGDEPBAR
"""
)
SUM = "LDS R6, [R1]\nIADD3 R6, R6, R6, RZ\nSTG.E desc[UR4][R4.64], R6\nEXIT"


def test_copies_come_when_they_are_waited_for():
    """The first of two groups, behind which memory changes: a copy is what was there when its group was waited for."""
    memory = np.arange(32, dtype=np.uint32)
    at, regions = memory.ctypes.data, [(memory.ctypes.data, memory.nbytes)]
    run(COPY + "LDGDEPBAR\nDEPBAR.LE SB0, 0x1\n" + SUM, argument=bytes(ctypes.c_uint64(at)), regions=regions)
    assert (memory == 2 * np.arange(32)).all()
    for word, rest in {
        "not waited for": "DEPBAR.LE SB0, 0x1\n" + SUM,
        "nobody waited for": "EXIT",
        "misaligned: a copy of 16 bytes": "LDGSTS.E.128 [R1+0x4], desc[UR4][R2.64]\nEXIT",
        "out of bounds: 4 bytes at 0x100": "LDGSTS.E [R1+0x90], desc[UR4][R2.64]\nEXIT",
    }.items():
        with pytest.raises(Fault, match=word):
            run(COPY + rest, argument=bytes(ctypes.c_uint64(at)), regions=regions)


def test_halves_and_transposes():
    """The larger of two, of three, the smaller; a matrix of 8 x 8 and its columns."""
    out = np.zeros(4 * 32, np.uint32)
    at = out.ctypes.data
    text = """S2R R0, SR_TID.X
        MOV R2, c[0x0][0x210]
        MOV R3, c[0x0][0x214]
        IMAD.WIDE.U32 R2, R0, 0x10, R2
        MOV R8, 0x3c004000
        MOV R9, 0x40003c00
        MOV R10, 0x44000000
        HMNMX2 R4, R8, R9, !PT
        HMNMX2 R5, R8, R9, PT
        VHMNMX R6, R8, R9, R10, !PT
        IMAD.SHL.U32 R11, R0, 0x2, RZ
        PRMT R11, R11, 0x5410, R11
        IADD3 R11, R11, 0x10000, RZ
        MOVM.16.MT88 R7, R11
        STG.E.128 desc[UR4][R2.64], R4
        EXIT"""
    run(text, argument=bytes(ctypes.c_uint64(at)), regions=[(at, out.nbytes)])
    assert (out.reshape(32, 4)[:, :3] == [0x40004000, 0x3C003C00, 0x44004000]).all()
    matrix = np.arange(64).reshape(8, 8)  # lane n has elements 2n and 2n + 1
    assert (np.ascontiguousarray(out.reshape(32, 4)[:, 3]).view(np.uint16).reshape(8, 8) == matrix.T).all()


def test_one_lane_is_elected():
    """The first of those that are wanted; lanes that diverge cannot elect."""
    out = np.zeros(32, np.uint32)
    at = out.ctypes.data
    text = """S2R R0, SR_TID.X
        MOV R2, c[0x0][0x210]
        MOV R3, c[0x0][0x214]
        IMAD.WIDE.U32 R2, R0, 0x4, R2
        ELECT P0, URZ, PT
        SEL R4, R0, 0x7, !P0
        @P0 IADD3 R4, R4, 0x9, RZ
        STG.E desc[UR4][R2.64], R4
        EXIT"""
    run(text, argument=bytes(ctypes.c_uint64(at)), regions=[(at, out.nbytes)])
    assert out.tolist() == [16, *range(1, 32)]
    split = START + "ISETP.EQ.AND P1, PT, R0, RZ, PT\n@P1 BRA `(.L)\nELECT P0, URZ, PT\n.L:\nEXIT"
    with pytest.raises(Fault, match="diverge"):
        run(split)


def test_replays_wait_as_was_encoded():
    """Additions that each take 4 cycles: warps fit into each other until the scheduler is busy. A load is waited for by
    who waits for its barrier; a branch that is taken costs its jump."""

    def kernel(*code):
        parsed = [program.parse(16 * i, text) for i, (text, _) in enumerate(code)]
        for x, (_, control) in zip(parsed, code, strict=True):
            x.control = control
        return program.Kernel("planted", parsed, {}, b"", (0x210, 64))

    add = "IADD3 R1, R1, R2, RZ", (4, 0, 7, 7, 0)
    adds, line = kernel(*[add] * 10), list(range(10))
    assert [replay.cycles(adds, [line] * warps) for warps in (1, 2, 4, 8)] == [37, 38, 40, 80]
    assert replay.cycles(adds, [[0, 5]]) == 5 + replay.JUMP
    waits = kernel(("LDG.E R1, desc[UR4][R2.64]", (1, 0, 0, 7, 0)), add, ("IADD3 R3, R1, R2, RZ", (1, 0, 7, 7, 1)))
    assert replay.cycles(waits, [[0, 1, 2]]) == replay.LATENCY["LDG"] + 1
    assert replay.cycles(waits, [[0, 1]]) == 2


# ---------------------------------------------------------------- the kernels

BOUND = {"raw": 1e-2, "int8": 5e-3, "fp8_e4m3": 5e-3, "int4": 2e-2, "int2": 2e-2}
WHY = runner.missing()


def attended(name, tokens, group, arch, dim=128, processors=1, dtype=torch.float16, shift=0):
    """(out, attention in float64 on the stored tokens) and the twin's, of a decode step in machine code, which also
    writes the token as the twin does; q lies `shift` elements behind what 16 bytes divide."""
    random = torch.Generator().manual_seed(tokens)
    heads = 2
    layers = [PagedKV(heads, dim, key=name, page_size=64, dtype=dtype, pool=_C.Pool()) for _ in range(2)]
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
        results.append(kv.attend(*step)[0])
    assert len(machine.launches) == 1 and np.array_equal(*(kv.page_store.pool.arena for kv in layers))
    blocks = [block for block in machine.blocks if block.kernel.name.startswith("kvc_attend")]
    assert len(blocks) > heads * (processors > 1)  # runs, where there are multiprocessors for them
    K, V = (x.double().repeat_interleave(group, 1) for x in layers[0].dense())
    scores = torch.softmax(step[0].double() @ K.transpose(2, 3) * dim**-0.5, -1)
    return results[0].double(), scores @ V, results[1].double()


@pytest.mark.full
@pytest.mark.skipif(WHY is not None, reason=str(WHY))
@pytest.mark.parametrize("arch", ["90"])
@pytest.mark.parametrize("name,tokens,group", [
    *((name, tokens, group) for name in BOUND for tokens, group in ((150, 4), (64, 8))), ("int2", 64 * 39 + 7, 8),
])  # fmt: skip
def test_decode_in_machine_code(name, tokens, group, arch):
    """The last: pages of 2 bits, eight at a time and what is left of them."""
    got, want, twin = attended(name, tokens, group, arch)
    want = want if got.shape == want.shape else want.transpose(1, 2)
    bound = BOUND[name] * max(1.0, float(want.abs().max()))
    assert (got - want).abs().max() <= bound and (got - twin).abs().max() <= bound


@pytest.mark.full
@pytest.mark.skipif(WHY is not None, reason=str(WHY))
@pytest.mark.parametrize("dtype,shift", [(torch.bfloat16, 0), (torch.float16, 1)])
def test_queries_in_machine_code(dtype, shift):
    """Rotated by tensor cores, of bf16; row by row where they do not lie in pieces of 16 bytes."""
    got, want, twin = attended("int4", 150, 4, "90", dtype=dtype, shift=shift)
    want = want if got.shape == want.shape else want.transpose(1, 2)
    bound = (BOUND["int4"] + (8e-3 if dtype == torch.bfloat16 else 0)) * max(1.0, float(want.abs().max()))
    assert (got - want).abs().max() <= bound and (got - twin).abs().max() <= bound


@pytest.mark.full
@pytest.mark.skipif(WHY is not None, reason=str(WHY))
@pytest.mark.parametrize("name", ["raw", "int4"])
def test_runs_are_made_one_by_the_block_that_comes_last(name):
    got, want, twin = attended(name, 64 * 12, 4, "90", processors=6)
    assert (got - want).abs().max() <= BOUND[name] and (got - twin).abs().max() <= BOUND[name]


@pytest.mark.full
@pytest.mark.skipif(WHY is not None, reason=str(WHY))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name,processors", [("raw", 1), ("int8", 1), ("fp8_e4m3", 1), ("int4", 3), ("int2", 1)])
def test_prefill_in_machine_code(name, processors, dtype):
    """64 rows a block over pages, the call's own tokens last, which not all rows see."""
    random, heads, tokens, own, dim = torch.Generator().manual_seed(5), 1, 150, 40, 128
    layers = [PagedKV(heads, dim, key=name, page_size=64, dtype=dtype) for _ in range(2)]
    k, v = (torch.randn(1, heads, tokens, dim, generator=random).to(dtype) for _ in range(2))
    step = [torch.randn(1, h, own, dim, generator=random).to(dtype) for h in (2 * heads, heads, heads)]
    machine = runner.Machine("kvc_prefill.*", "90", processors=processors)
    calls = lambda *args, **options: machine.call("attend", *args, **options)  # noqa: E731
    results = []
    for kv, op in zip(layers, (calls, cuda_twin.Twin(processors=processors).attend), strict=True):
        kv.append(k, v)
        kv.op = op
        results.append(kv.attend(*step)[0].double())
    assert {block.kernel.name for block in machine.blocks} == {"kvc_prefill_128"}
    K, V = (x.double().repeat_interleave(2, 1) for x in layers[0].dense())
    scores = step[0].double() @ K.transpose(2, 3) * dim**-0.5
    scores += torch.full((own, tokens + own), -torch.inf).triu(tokens + 1)
    want = torch.softmax(scores, -1) @ V
    bound = {torch.float16: 0, torch.bfloat16: 8e-3}[dtype] + (1e-3 if name == "raw" else BOUND[name])
    assert (results[0] - want).abs().max() <= bound and (results[0] - results[1]).abs().max() <= bound


@pytest.mark.full
@pytest.mark.skipif(WHY is not None, reason=str(WHY))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tokens_in_machine_code(dtype):
    """Steps of decode, of which some fill a page, with room for seals, so that a launch writes: the bytes that the twin
    writes, by 400 instructions a warp."""
    random, machine = torch.Generator().manual_seed(6), runner.Machine("kvc_token.*", "90")
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
    assert len(machine.blocks) == 20 * 8 and max(w.executed for w in warps) <= 400
    assert len({i for w in warps for i in w.counts}) <= 500  # different ones, which are to be fetched
