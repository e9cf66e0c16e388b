"""The table of instruction handlers, lanes, faults."""

import numpy as np

np.seterr(all="ignore")
U = np.uint32
ALL = U(0xFFFFFFFF)
LANES = np.arange(32, dtype=U)
HANDLERS: dict = {}


class Fault(Exception):
    """Behaviour that is undefined on a GPU, or not supported by the emulator."""


def handles(*names: str, knows: str | None = ""):
    """Registers a handler for instructions of these names. knows: the supported modifiers, None for any."""

    def put(function):
        for name in names:
            HANDLERS[name] = function, None if knows is None else frozenset(knows.split())
        return function

    return put


def handler(x):
    """The handler of an instruction. An unsupported instruction or modifier is a Fault."""
    function, knows = HANDLERS.get(x.key) or HANDLERS.get(x.name) or (None, None)
    if function is None:
        raise Fault("unsupported instruction")
    if knows is not None and (strange := [m for m in x.modifiers if m not in knows]):
        raise Fault(f"unsupported modifier: {', '.join(strange)}")
    return function


def signed(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.int32).astype(np.int64)


def low(x: np.ndarray) -> np.ndarray:
    """The low 32 bits of 64-bit integers."""
    return (x.astype(np.uint64) & np.uint64(0xFFFFFFFF)).astype(U)


def combine(modifiers: tuple, x: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Combines a comparison with another predicate: .AND, .OR, .XOR."""
    return x | other if "OR" in modifiers else x ^ other if "XOR" in modifiers else x & other


def lut(table: int, a, b, c, zero):
    """Any logic function of three inputs: bit 4a + 2b + c of the table."""
    out = zero
    for n in range(8):
        if table >> n & 1:
            out = out | ((a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c))
    return out
