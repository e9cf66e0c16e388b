"""The emulator of machine code (sass/): faults planted in small programs, which it must find, and what instructions
come to. Kernels as nvcc makes them: test_sass_attention.py, test_sass_codec.py."""

import ctypes

import cuda_twin
import numpy as np
import program
import pytest
import replay
from machine import Block, Fault

pytestmark = pytest.mark.skipif(cuda_twin.DEVICE != "cpu", reason="the twin's")


def run(text, threads=32, argument=b"", regions=(), shared=256, parameters=(0x210, 64)):
    """A program as nvdisasm would print it."""
    lines, labels, code = [x.strip() for x in text.strip().splitlines()], {}, []
    for line in lines:
        if line.endswith(":"):
            labels[line[:-1]] = len(code)
        else:
            code.append(program.parse(16 * len(code), line))
    kernel = program.Kernel("planted", code, labels, b"", parameters)
    return Block(kernel, argument, (0, 0, 0), (1, 1, 1), threads, shared, regions).run()


START = """S2R R0, SR_TID.X
    IMAD.SHL.U32 R1, R0, 0x4, RZ
"""
FAULTS = {
    "uninitialized register": START + "STS [R1], R9",
    "the stored value": START + "IADD3 R3, R9, R0, RZ\nSTS [R1], R3",
    "value depends": START + "LOP3.LUT R9, R9, 0xfffffffd, RZ, 0xc0, !PT\n"
    "LOP3.LUT R3, R9, 0x3, RZ, 0xc0, !PT\nSTS [R1], R3",
    "value depends on": START + "STL [RZ], R9\nLDL R3, [RZ]\nSTS [R1], R3",
    "stored value depends on an": START + "PRMT R3, R0, 0x7610, R9\nSTS [R1], R3",
    "the address": START + "LDS R2, [R9]",
    "misaligned: 16 bytes": START + "LDS.128 R4, [R1]",
    "out of bounds: 4 bytes at 0x100 of 256": START + "STS [R1+0x90], RZ",
    "out of bounds: 4 bytes at 0x10": "MOV R2, 0x10\nMOV R3, RZ\nLDG.E R4, desc[UR4][R2.64]",
    "unsupported instruction": START + "WGMMA R2, R3",
    "a race: write": START + "STS [RZ], R0",
    "a race: read": START + "ISETP.GE.AND P0, PT, R0, 0x20, PT\n@!P0 STS [RZ], R0\n@P0 LDS R2, [RZ]",
    "unsupported modifier: 8": START + "MOVM.8.MT88 R2, R0",
    "unsupported modifier: XORSIGN": START + "HMNMX2.XORSIGN R2, R0, R1, PT",
    "unsupported modifier: CEIL": START + "F2I.CEIL R2, R0",
    "segments of a warp": START + "SHFL.BFLY PT, R2, R0, 0x1, 0xf1f",
    "LEA.HI of a negated": START + "LEA.HI R2, -R0, R1, R1, 0x1",
    "a move that may": START + "IMAD.MOV.U32 R2, RZ, RZ, -R0",
    "lose a sign": START + "MOV R0, R0\nHMMA.16816.F32 R4, R4, R8, R4",
    "lanes of a warp wait at different": START + "ISETP.EQ.AND P0, PT, R0, RZ, PT\n@P0 BRA `(.L)\nWARPSYNC.ALL\n.L:\n"
    "BAR.SYNC 0x0",
    "lanes diverge": START + "ISETP.EQ.AND P0, PT, R0, RZ, PT\n@P0 EXIT\n@!P0 BRA `(.L)\nNOP\n.L:\n"
    "ISETP.GE.AND P1, PT, R0, 0x5, PT\n@P1 SHFL.IDX PT, R2, R0, RZ, 0x1f",
    "returned without reaching": START + "ISETP.GE.AND P0, PT, R0, 0x20, PT\n@P0 EXIT\nBAR.SYNC 0x0",
}  # fmt: skip


@pytest.mark.parametrize("word", FAULTS)
def test_faults_are_found(word):
    with pytest.raises(Fault) as caught:
        run(FAULTS[word] + "\nEXIT", threads=64)
    assert any(part in str(caught.value) for part in word.split("|")), caught.value


def test_without_the_fault_it_runs():
    """A barrier between a write and another warp's read; each warp's own bytes."""
    run(START + "STS [R1], R0\nBAR.SYNC 0x0\nLDS R2, [RZ]\nEXIT", threads=64)


def test_uninitialized_bits_of_a_partly_written_register():
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


def test_asynchronous_copies_complete_when_waited_for():
    """The first of two groups, behind which memory changes: a copy is what was there when its group was waited for."""
    memory = np.arange(32, dtype=np.uint32)
    at, regions = memory.ctypes.data, [(memory.ctypes.data, memory.nbytes)]
    run(COPY + "LDGDEPBAR\nDEPBAR.LE SB0, 0x1\n" + SUM, argument=bytes(ctypes.c_uint64(at)), regions=regions)
    assert (memory == 2 * np.arange(32)).all()
    for word, rest in {
        "before the asynchronous copy to it": "DEPBAR.LE SB0, 0x1\n" + SUM,
        "before an asynchronous copy": "EXIT",
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


def stored(text, words, parameters=(0x210, 64), behind=b""):
    """What a program of 32 lanes leaves in R4.., of each lane `words` (a power of two)."""
    out = np.zeros((32, words), np.uint32)
    at = out.ctypes.data
    constant = "c[0x0][%#x]"
    start = f"""S2R R0, SR_TID.X
        MOV R2, {constant % parameters[0]}
        MOV R3, {constant % (parameters[0] + 4)}
        IMAD.WIDE.U32 R2, R0, {4 * words:#x}, R2
        """
    width = {1: "", 2: ".64", 4: ".128"}[words]
    end = f"\nSTG.E{width} desc[UR4][R2.64], R4\nEXIT"
    run(
        start + text + end,
        argument=bytes(ctypes.c_uint64(at)) + behind,
        regions=[(at, out.nbytes)],
        parameters=parameters,
    )
    return out


def test_pairs_of_registers():
    """Integers of 64 bits as sm_120 has them: a carry, a sign, what is chosen and compared."""
    lanes = np.arange(32, dtype=np.int64)
    text = """MOV.64 R8, 0xfffffffffffffff0
        MOV R10, R0
        MOV R11, RZ
        """
    total = stored(text + "IADD.64 R4, R8, R10\nIADD.64 R6, -R10, 0x5", 4).view(np.int64)
    assert (total == np.stack([lanes - 16, 5 - lanes], 1)).all()
    most = "IMNMX.S64 PT, PT, R4, R8, R10, !PT, !PT\nIMNMX.U64 PT, PT, R6, R8, R10, !PT, !PT"
    assert (stored(text + most, 4).view(np.int64) == np.stack([lanes, 0 * lanes - 16], 1)).all()
    chosen = """ISETP.GT.S64.AND P0, PT, R10, R8, PT
        ISETP.GT.U64.OR P1, PT, R10, 0x7, !P0
        SEL.64 R4, R8, 0x1, P0
        SEL.64 R6, R10, RZ, P1"""
    assert (stored(text + chosen, 4).view(np.int64) == np.stack([0 * lanes - 16, lanes * (lanes > 7)], 1)).all()
    for bad in ("IADD.64 R4, P0, R8, R10", "IMNMX.S64 PT, PT, R4, R8, R10, PT, P0"):
        with pytest.raises(Fault, match="64-bit operation with a carry"):
            run(START + bad + "\nEXIT")


def test_uninitialized_half_of_a_register_pair():
    """Moves keep apart which half was written."""
    moved = "MOV R8, R0\nMOV.64 R10, R8\nISETP.EQ.AND P0, PT, R0, R0, PT\nSEL.64 R12, R10, RZ, P0\n"
    run(START + moved + "STS [R1], R12\nEXIT")
    for half in ("R11", "R13"):
        with pytest.raises(Fault, match="the stored value"):
            run(START + moved + f"STS [R1], {half}\nEXIT")


def test_minima_of_halves():
    """What sm_100 and 120 make of the larger of two numbers of 16 bits (a scale that must not be 0)."""
    text = "LEA R8, R0, 0x80000, 0x10\n" + "\n".join(
        f"VIMNMX.{kind} R{4 + i}, R8, 0x80000001, {'!' * larger}PT"
        for i, (kind, larger) in enumerate([("U16x2", 1), ("U16x2", 0), ("S16x2", 1), ("U32", 1)])
    )
    lanes = np.arange(32)
    got = stored(text, 4).view(np.uint16).reshape(32, 4, 2)
    assert (got[:, 0] == np.stack([lanes * 0 + 1, lanes * 0 + 0x8000], 1)).all()
    assert (got[:, 1] == np.stack([lanes * 0, 8 + lanes], 1)).all()
    assert (got[:, 2] == np.stack([lanes * 0 + 1, 8 + lanes], 1)).all()
    assert (got[:, 3] == [1, 0x8000]).all()


def test_a_distance_backwards_carries():
    """b - 2 a in two words, of a = 0 too: what is negated is ~x + 1."""
    text = """MOV R8, 0x10
        LEA R4, P0, -R0, R8, 0x1
        IMAD.X R5, RZ, RZ, ~RZ, P0"""
    assert (stored(text, 2).view(np.int64)[:, 0] == 16 - 2 * np.arange(32)).all()


def test_integers_become_floats_in_a_direction():
    text = """IADD3 R8, R0, 0x7fffff81, RZ
        MOV R9, 0x1
        I2F.U32.RP R4, R8
        I2FP.F32.U32.RZ R5, R8
        I2F.U64.RP R6, R8
        I2F.S64 R7, R8"""
    number = np.arange(32) + 0x7FFFFF81
    got, near = stored(text, 4).view(np.float32).astype(np.float64), (number + 2**32).astype(np.float32)
    assert (got[:, 0] == -(-number // 128 * 128)).all() and (got[:, 1] == number // 128 * 128).all()
    assert (got[:, 2] == -(-(number + 2**32) // 512 * 512)).all() and (got[:, 3] == near).all()


def test_products_and_sums_are_rounded_once():
    """1 + 2^-23 + 2^-24 - 2^-70 is less than half way to the next number, which float64 does not know."""
    numbers = [np.float32(x).view(np.uint32) for x in ((2**23 + 1) * 2.0**-35, (2**23 - 1) * 2.0**-35, 1 + 2.0**-23)]
    text = "".join(f"MOV R{8 + i}, {int(x):#x}\n" for i, x in enumerate(numbers))
    kinds = "FFMA R4, R8, R9, R10\nFFMA.RM R5, R8, R9, R10\nFFMA.RP R6, R8, R9, R10\nFMUL.RZ R7, -R10, R10"
    found = stored(text + kinds, 4).view(np.float32)
    assert (found == np.float32([1 + 2.0**-23, 1 + 2.0**-23, 1 + 2.0**-22, -1 - 2.0**-22])).all()
    text = """MOV R8, 0x400000
        FMUL.FTZ R4, R8, 4
        FMUL R5, R8, 4
        FSET.BF.GT.AND R6, R8, RZ, PT
        FSET.BF.LT.OR R7, R8, RZ, !PT"""
    assert (stored(text, 4).view(np.float32) == np.float32([0, 2.0**-125, 1, 0])).all()


def test_lanes_meet_where_they_branch_if_all_are_there():
    """BRA.CONV of sm_80: what it jumps over is for lanes that are not all there."""
    text = """ISETP.GE.AND P0, PT, R0, 0x5, PT
        MOV R4, RZ
        @P0 BRA `(.late)
        MOV R4, 0x1
        .late:
        BRA.CONV ~URZ, `(.all)
        MOV R4, 0x7
        .all:
        IADD3 R4, R4, R0, RZ"""
    assert (stored(text, 1)[:, 0] == np.arange(32) + (np.arange(32) < 5)).all()


def test_where_a_launch_finds_its_sizes():
    """From sm_100 on they lie before the parameters."""
    for parameters, size in (((0x210, 64), 0x0), ((0x380, 64), 0x360)):
        assert (stored(f"LDCU UR6, c[0x0][{size:#x}]\nMOV R4, UR6", 1, parameters) == 32).all()


def test_diverged_lanes_reconverge_at_bsync():
    """The way of some lanes lies behind the place where all meet, as compilers put what is rare."""
    text = """ISETP.GE.AND P0, PT, R0, 0x5, PT
        ISETP.EQ.AND P1, PT, R0, 0x3, PT
        MOV R4, R0
        BSSY B0, `(.all)
        @!P0 BRA `(.rare)
        {}.all:
        BSYNC B0
        .then:
        SHFL.IDX PT, R4, R4, RZ, 0x1f
        BRA `(.end)
        .rare:
        IADD3 R4, R4, 0x64, RZ
        {}BRA `(.all)
        .end:
        NOP"""
    assert (stored(text.format("", ""), 1) == 100).all()
    with pytest.raises(Fault, match="diverge"):
        stored(text.replace("BSYNC B0", "NOP").format("", ""), 1)
    leaves = "@P1 BREAK B0\n        @P1 EXIT\n        "
    assert (stored(text.format("", leaves), 1).ravel() == np.where(np.arange(32) == 3, 0, 100)).all()
    with pytest.raises(Fault, match="different instructions"):  # one waits elsewhere for all, who wait for it
        stored(text.format("", "@P1 WARPSYNC.ALL\n        "), 1)


def test_exit_of_some_lanes():
    """Both its guard and its operand must hold."""
    text = """ISETP.GE.AND P0, PT, R0, 0x5, PT
        ISETP.GE.AND P1, PT, R0, 0x9, PT
        MOV R4, 0x7
        @P0 EXIT !P1"""
    assert (stored(text, 1).ravel() == np.where(np.arange(32) // 9 == 0, 7 * (np.arange(32) < 5), 7)).all()


def test_generic_addresses():
    """Of a parameter, of local and of shared memory, as LD and ST take them; where each architecture keeps them."""
    text = """{}
        LD.E R4, desc[UR4][R8.64+{}]
        S2R R11, SR_SWINHI
        IMAD.SHL.U32 R10, R0, 0x4, RZ
        ST.E desc[UR4][R10.64], R0
        LDS R5, [R10]
        IADD3 R12, P0, R1, c[0x0][{}], RZ
        IADD3.X R13, RZ, c[0x0][{}], RZ, P0, !PT
        STL [R1], R10
        LD.E R6, desc[UR4][R12.64]
        ST.E desc[UR4][R12.64], R5
        LDL R7, [R1]"""
    for at, constants, offset, local in ((0x160, 0x40, 0x160, 0x20), (0x210, 0x198, 0, 0x20), (0x380, 0x348, 0, 0x2F8)):
        begin = f"MOV R1, 0x40\nMOV R8, c[0x0][{constants:#x}]\nMOV R9, c[0x0][{constants + 4:#x}]"
        got = stored(text.format(begin, f"{offset + 8:#x}", f"{local:#x}", f"{local + 4:#x}"), 4, (at, 64), b"abcdefgh")
        lanes = np.arange(32)
        assert (got == np.stack([lanes * 0 + 0x64636261, lanes, 4 * lanes, lanes], 1)).all()
    bad = "MOV R8, c[0x0][0x198]\nMOV R9, c[0x0][0x19c]\n"
    for then in ("ST.E desc[UR4][R8.64], RZ", "LD.E R4, desc[UR4][R8.64+0x1000]"):
        with pytest.raises(Fault, match="out of bounds: .* of constants"):
            run(bad + then + "\nEXIT")
