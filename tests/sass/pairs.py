"""64-bit integers in register pairs: sm_120 has instructions (.64, .S64, .U64) where others need two."""

import numpy as np
from instructions import ALL, Fault, U, handles
from integers import COMPARE


def _nowhere(predicates):
    """Raises a Fault if there is a carry."""
    if any(p.index >= 0 for p in predicates):
        raise Fault("unsupported instruction: a 64-bit operation with a carry")


def _half(w, x, i):
    """Word i, and its bits that have been written."""
    if x.kind in ("R", "UR"):
        return w.value(x.next(i)), w.bits(x.next(i))
    return (w.wide(x) >> np.uint64(32 * i)).astype(U), np.full(32, ALL)


@handles("MOV.64", "UMOV.64", knows="64")
def mov(w, x):
    for i in range(2):
        w.write(x.operands[0].next(i), *_half(w, x.operands[1], i))


@handles("SEL.64", "USEL.64", knows="64")
def sel(w, x):
    o = x.operands
    for i in range(2):
        w.unset = np.zeros(32, bool)
        w.write(o[0].next(i), w.choose(o[3], lambda i=i: _half(w, o[1], i)[0], lambda i=i: _half(w, o[2], i)[0]))


@handles("IADD.64", "UIADD3.64", knows="64")
def iadd(w, x):
    to, *rest = x.operands
    _nowhere(o for o in rest if o.kind in ("P", "UP"))
    w.write_wide(to, sum((w.wide(o) for o in rest if o.kind not in ("P", "UP")), np.zeros(32, np.uint64)))


def _numbers(w, x, operands):
    return [w.wide(o).view(np.int64 if "S64" in x.modifiers else np.uint64) for o in operands]


@handles("ISETP.64", "UISETP.64", knows=f"{' '.join(COMPARE)} AND OR XOR S64 U64")
def isetp(w, x):
    w.compare(x, COMPARE[x.modifiers[0]](*_numbers(w, x, x.operands[2:4])), x.operands[4])


@handles("IMNMX.64", "UIMNMX.64", knows="S64 U64")
def minmax(w, x):
    *carries, to, first, second, least, more = x.operands
    _nowhere((*carries, more))
    a, b = _numbers(w, x, (first, second))
    w.write_wide(to, np.where(w.predicate(least), np.minimum(a, b), np.maximum(a, b)).view(np.uint64))
