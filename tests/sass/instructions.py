"""What instructions share: the table of handlers, lanes, faults."""

import numpy as np

np.seterr(all="ignore")
U = np.uint32
ALL = U(0xFFFFFFFF)
LANES = np.arange(32, dtype=U)
HANDLERS: dict = {}


class Fault(Exception):
    """What a GPU would leave undefined, or what is not known of it."""


def handles(*names: str):
    def put(function):
        for name in names:
            HANDLERS[name] = function
        return function

    return put


def signed(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.int32).astype(np.int64)


def low(x: np.ndarray) -> np.ndarray:
    """The low 32 bits of integers of 64."""
    return (x.astype(np.uint64) & np.uint64(0xFFFFFFFF)).astype(U)


def combine(modifiers: tuple, x: np.ndarray, other: np.ndarray) -> np.ndarray:
    """.AND, .OR, .XOR of a comparison."""
    return x | other if "OR" in modifiers else x ^ other if "XOR" in modifiers else x & other


def lut(table: int, a, b, c, zero):
    """Any logic function of three: bit 4a + 2b + c of the table."""
    out = zero
    for n in range(8):
        if table >> n & 1:
            out = out | ((a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c))
    return out
