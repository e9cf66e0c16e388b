"""What instructions share: the table of handlers, lanes, faults."""

import numpy as np

np.seterr(all="ignore")
U = np.uint32
ALL = U(0xFFFFFFFF)
LANES = np.arange(32, dtype=U)
HANDLERS: dict = {}


class Fault(Exception):
    """What a GPU would leave undefined, or what is not known of it."""


def handles(*names: str, knows: str | None = ""):
    """Runs the instructions of these names; knows: their modifiers, any if None."""

    def put(function):
        for name in names:
            HANDLERS[name] = function, None if knows is None else frozenset(knows.split())
        return function

    return put


def handler(x):
    """Who runs an instruction. One that is not known is a Fault, and so is a modifier, which may mean another thing."""
    function, knows = HANDLERS.get(x.key) or HANDLERS.get(x.name) or (None, None)
    if function is None:
        raise Fault("unknown instruction")
    if knows is not None and (strange := [m for m in x.modifiers if m not in knows]):
        raise Fault(f"unknown modifier: {', '.join(strange)}")
    return function


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
