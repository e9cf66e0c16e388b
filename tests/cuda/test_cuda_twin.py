"""The host twin of the GPU: its MMAs compared with the fragment tables of the PTX ISA (9.7.14.5: m16n8k16, m16n8k32),
and the faults that it must detect."""

import ctypes
import os
import subprocess
import sys

import cuda_twin
import numpy as np
import pytest

PATHS = {"PYTHONPATH": os.pathsep.join(x for x in sys.path if x)}
GROUP, THREAD = np.arange(32) >> 2, np.arange(32) & 3
"""groupID and threadID_in_group of each lane, as PTX names them."""


def a_place(elements, i):
    """(row, column) of A's element a_i in every lane; elements per register: 2 (k16) or 4 (k32)."""
    row = np.where((i // elements) % 2 == 0, GROUP, GROUP + 8)
    return row, THREAD * elements + i % elements + (4 * elements if i >= 2 * elements else 0)


def b_place(elements, i):
    return THREAD * elements + i % elements + (4 * elements if i >= elements else 0), GROUP


def c_place(i):
    return (GROUP if i < 2 else GROUP + 8), THREAD * 2 + (i & 1)


def probe(what, a, b, d):
    pointers = [x.ctypes.data_as(ctypes.c_void_p) for x in (a, b, d)]
    assert cuda_twin.library().probe(what, *pointers) == 0


@pytest.mark.parametrize("what", [0, 1], ids=["f16", "bf16"])
def test_mma_follows_the_fragment_tables(what):
    rng = np.random.default_rng(what)
    A, B = rng.integers(-8, 9, (16, 16)).astype(np.float32), rng.integers(-8, 9, (16, 8)).astype(np.float32)
    C = rng.integers(-99, 99, (16, 8)).astype(np.float32)

    def bits(x):
        return x.astype(np.float16).view(np.uint16).astype(np.uint32) if what == 0 else x.view(np.uint32) >> 16

    a, b = np.zeros((32, 4), np.uint32), np.zeros((32, 2), np.uint32)
    d = np.zeros((32, 4), C.dtype)
    for i in range(8):
        a[:, i // 2] |= bits(np.ascontiguousarray(A[a_place(2, i)])) << np.uint32(16 * (i % 2))
    for i in range(4):
        b[:, i // 2] |= bits(np.ascontiguousarray(B[b_place(2, i)])) << np.uint32(16 * (i % 2))
    for i in range(4):
        d[:, i] = C[c_place(i)]
    probe(what, a, b, d)
    want = A @ B + C
    for i in range(4):
        np.testing.assert_array_equal(d[:, i], want[c_place(i)])


@pytest.mark.parametrize(
    "x,n,there,want",
    [
        (2.0**-24, 16, 0, 2.0**-20),  # subnormals are used
        (2.0**-12 * (1 + 2.0**-10), 1, 0, 2.0**-12 * (1 + 2.0**-10)),
        (2.0**-24, 16, 2, 2),  # each is below the precision kept next to 2
        (-(2.0**-22), 1, 2, 2 - 2.0**-22),
        (3 * 2.0**-24, 8, 2, 2 + 2.0**-20),  # truncated, not rounded
    ],
)
def test_mma_truncates_as_tensor_cores_do(x, n, there, want):
    """For n products x * 1 and an accumulator, all in lane 0's row and column."""
    a, b, d = np.zeros((32, 4), np.uint32), np.zeros((32, 2), np.uint32), np.zeros((32, 4), np.float32)
    half, one = (int(np.array(v, np.float16).view(np.uint16)) for v in (x, 1))
    for k in range(n):
        lane, register, shift = k % 8 // 2, 2 * (k // 8), np.uint32(16 * (k % 2))
        a[lane, register] |= np.uint32(half) << shift
        b[lane, k // 8] |= np.uint32(one) << shift
    d[0, 0] = there
    probe(0, a, b, d)
    assert d[0, 0] == np.float32(want)


def test_bytes_and_halves():
    """Bytes selected from two words; pairs of fp16 subtracted and widened."""
    halves = np.random.default_rng(2).integers(-99, 99, (32, 8)).astype(np.float16)
    a, d = halves.view(np.uint32).copy(), np.zeros((32, 4), np.uint32)
    probe(2, a, np.zeros((32, 2), np.uint32), d)
    x, y = a[:, 0], a[:, 1]
    byte = [x >> np.uint32(8 * i) & np.uint32(255) for i in range(4)] + [
        y >> np.uint32(8 * i) & np.uint32(255) for i in range(4)
    ]
    want = byte[0] | byte[5] << np.uint32(8) | byte[2] << np.uint32(16) | byte[7] << np.uint32(24)
    np.testing.assert_array_equal(d[:, 0], want)
    np.testing.assert_array_equal(d[:, 1].copy().view(np.float16).reshape(32, 2), halves[:, :2] - halves[:, 2:4])
    np.testing.assert_array_equal(d[:, 2:].copy().view(np.float32), halves[:, :2].astype(np.float32))


def test_small_floats_are_exact():
    """All codes of both fp8 formats as fp16: e4m3 by the bit operations of sm_80 is 2^-8 of its value."""
    import torch

    codes = np.arange(256, dtype=np.uint8)
    for half in range(2):
        a, d = np.zeros((32, 4), np.uint32), np.zeros((32, 4), np.uint32)
        a[:, 0] = codes[128 * half : 128 * half + 128].view(np.uint32)
        probe(4, a, np.zeros((32, 2), np.uint32), d)
        part = torch.from_numpy(codes[128 * half : 128 * half + 128].copy())
        for columns, dtype, unit in ((slice(0, 2), torch.float8_e4m3fn, 256), (slice(2, 4), torch.float8_e5m2, 1)):
            got = np.ascontiguousarray(d[:, columns]).view(np.float16).ravel().astype(np.float32) * unit
            want = part.view(dtype).float().numpy()
            real = np.isfinite(want)
            np.testing.assert_array_equal(got[real], want[real])


FAULTS = {
    10: "16 of 32 lanes",
    11: "diverge",
    12: "passed by returning",
    13: "out of bounds|use-after-poison",
    15: "another stream",
}


def test_faults_are_caught(tmp_path):
    """Each fault ends its process: children of one that has imported torch."""
    code = """if True:
        import os, sys
        import numpy as np, test_cuda_twin as t
        for what in sys.argv[2:]:
            if os.fork() == 0:
                os.dup2(os.open(os.path.join(sys.argv[1], what), os.O_CREAT | os.O_WRONLY), 2)
                t.probe(int(what), *(np.zeros((32, n), np.uint32) for n in (4, 2, 4)))
                os._exit(0)
            print(os.wait()[1])"""
    cuda_twin.library()
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path, *map(str, FAULTS)],
        env={**os.environ, **PATHS},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "0" not in done.stdout.split() and len(done.stdout.split()) == len(FAULTS)
    for what, word in FAULTS.items():
        said = (tmp_path / str(what)).read_text()
        assert any(part in said for part in word.split("|")), said


def test_launcher_of_an_earlier_call_is_not_used():
    """It is a Python object, freed with its call."""
    launched = []
    launcher = cuda_twin.LAUNCHER(lambda *_: launched.append(1) or 1)
    cuda_twin.library().twin_set_launcher(launcher)
    probe(14, np.zeros((32, 4), np.uint32), np.zeros((32, 2), np.uint32), np.zeros((32, 4), np.uint32))
    assert not launched


def test_shared_memory_starts_as_nan():
    d = np.zeros((32, 4), np.uint32)
    probe(14, np.zeros((32, 4), np.uint32), np.zeros((32, 2), np.uint32), d)
    assert (d[:, 0] == 0xFFFFFFFF).all()


@pytest.mark.parametrize("on", [True, False])
def test_poison_of_own_pages(on):
    """KVCOMPRESS_POISON: NaN where a call's own page has no token, and nowhere else in its workspace."""
    code = """if True:
        import cuda_twin, torch
        rooms = []
        class Zeros(cuda_twin.Guarded):
            def __init__(self, shape, dtype, fill=0xAB):
                super().__init__(shape, dtype, fill)
                self.tensor.zero_()
                rooms.append(self.tensor)
        cuda_twin.Guarded = Zeros
        none, x = torch.empty(0), torch.ones(1, 1, 3, 32)
        table, rows = torch.full((1, 1, 0), -1), torch.zeros(1, 1, 2, dtype=torch.int64)
        cuda_twin.Twin().attend(x, x, x, torch.empty(0, dtype=torch.uint8), table, rows, none.int(), none.bool(), none,
                                torch.empty(0, 2, dtype=torch.int64), 0, 16, 0, 0, 1.0, 0.0)
        room = rooms[-1].view(torch.int32)
        ones = int((room == torch.ones(1).view(torch.int32)).sum())
        print(ones, int((room == -1).sum()), len(room) - ones)"""
    environment = {name: x for name, x in os.environ.items() if name != "KVCOMPRESS_POISON"}
    environment |= {"KVCOMPRESS_POISON": "1", **PATHS} if on else PATHS
    cuda_twin.library()
    done = subprocess.run([sys.executable, "-c", code], cwd=cuda_twin.ROOT / "tests/support", capture_output=True,
                          text=True, check=True, env=environment)  # fmt: skip
    own, poisoned, rest = map(int, done.stdout.split())
    assert own == 2 * 3 * 32 and poisoned == (2 * 13 * 32 if on else 0) and rest >= 2 * 13 * 32
