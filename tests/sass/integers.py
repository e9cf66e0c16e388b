"""Integer instructions, comparisons and predicates, also for uniform registers (names with U)."""

import numpy as np
from instructions import ALL, Fault, U, handles, low, lut, signed

COMPARE = {
    "LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal, "EQ": np.equal, "NE": np.not_equal,
}  # fmt: skip

NUMBERS = {"U32": U, "U16x2": np.uint16, "S16x2": np.int16}
"""Types of minima and maxima by modifier: unsigned, or two halves of a register; signed by default."""


def _predicates(x, start):
    """The predicates from operand `start` on, and the index of the first other operand."""
    i = start
    while x.operands[i].kind in ("P", "UP"):
        i += 1
    return x.operands[start:i], i


def _moves(w, to, source):
    """If a sign bit has to be set in several registers of an MMA operand (0x800f800f four times), ptxas 12.4
    generates moves that lose it or negate an integer; 12.5 and later do not. Kernels without MMAs may move a
    register to itself: half of a pair that does not change."""
    same = to.index == source.index >= 0 and w.kernel.multiplies
    if to.kind == source.kind == "R" and (source.minus or same):
        raise Fault("a move that may lose a sign bit (a bug of ptxas 12.4)")


@handles("MOV", "UMOV")
def mov(w, x):
    _moves(w, *x.operands[:2])
    w.write(x.operands[0], w.value(x.operands[1]), w.bits(x.operands[1]))


@handles("IMAD", "UIMAD", knows="MOV U32 WIDE HI X IADD SHL")
def imad(w, x):
    o, m = x.operands, x.modifiers
    if m[:1] == ("MOV",):
        if m[1:] == ("U32",):  # without .U32: a negated integer
            _moves(w, o[0], o[3])
        w.write(o[0], w.value(o[3]), w.bits(o[3]))
        return
    carries, i = _predicates(x, 1)
    a, b = w.value(o[i]), w.value(o[i + 1])
    unsigned = "U32" in m
    if "WIDE" in m or "HI" in m:
        product = (a.astype(np.uint64) * b.astype(np.uint64)) if unsigned else (signed(a) * signed(b)).view(np.uint64)
        total = product + w.wide(o[i + 2])
        if "X" in m:
            total = total + w.predicate(o[i + 3]).astype(np.uint64)
        if "HI" in m:
            w.write(o[0], (total >> np.uint64(32)).astype(U))
        else:
            w.write_wide(o[0], total)
        if carries:
            w.set(carries[0], total < product)
        return
    total = a * b + w.value(o[i + 2])
    w.write(o[0], total + w.predicate(o[i + 3]).astype(U) if "X" in m else total)


@handles("IADD3", "UIADD3", knows="X")
def iadd3(w, x):
    carries, i = _predicates(x, 1)
    total = np.zeros(32, np.uint64)
    for term in x.operands[i : i + 3]:
        if term.minus and carries and term.kind != "number":  # a carry of ~x + 1
            total += (~w.raw(term)).astype(np.uint64) + np.uint64(1)
        else:
            total += w.value(term).astype(np.uint64)
    for term in x.operands[i + 3 :]:
        total += w.predicate(term).astype(np.uint64)
    w.write(x.operands[0], low(total))
    for n, p in enumerate(carries):
        w.set(p, total >> np.uint64(32) > n)


@handles("IADD")
def iadd(w, x):
    w.write(x.operands[0], w.value(x.operands[1]) + w.value(x.operands[2]))


@handles("VIADD", "UVIADD")
def viadd(w, x):
    w.write(x.operands[0], w.value(x.operands[1]) + w.value(x.operands[2]))


@handles("VIMNMX", "VIMNMX3", "VIADDMNMX", "IMNMX", "UVIMNMX", knows="U32 S32 U16x2 S16x2")
def minmax(w, x):
    o = [x.operands[0], *x.operands[_predicates(x, 1)[1] :]]
    first, rest = (w.value(o[1]) + w.value(o[2]), o[3:]) if x.name == "VIADDMNMX" else (w.value(o[1]), o[2:])
    kind = next((kind for m, kind in NUMBERS.items() if m in x.modifiers), np.int32)
    if x.name == "VIADDMNMX" and np.dtype(kind).itemsize < 4:
        raise Fault("unsupported instruction: VIADDMNMX of 16-bit halves")
    numbers = [np.ascontiguousarray(a).view(kind) for a in (first, *map(w.value, rest[:-1]))]
    least = w.predicate(rest[-1])
    w.write(o[0], np.where(least, *(f.reduce(numbers).view(U) for f in (np.minimum, np.maximum))))


@handles("ISETP", "UISETP", knows=f"{' '.join(COMPARE)} AND OR XOR U32 EX")
def isetp(w, x):
    o, m = x.operands, x.modifiers
    a, b = w.value(o[2]), w.value(o[3])
    if "U32" not in m:
        a, b = signed(a), signed(b)
    result = COMPARE[m[0]](a, b)
    if "EX" in m:  # the high words; the last operand is the comparison of the low ones
        below = w.predicate(o[5])
        result = (a != b) | below if m[0] == "NE" else (a == b) & below if m[0] == "EQ" else \
            COMPARE[m[0][0] + "T"](a, b) | ((a == b) & below)  # fmt: skip
    w.compare(x, result, o[4])


@handles("LOP3", "ULOP3", knows="LUT")
def lop3(w, x):
    o = x.operands
    test, i = (o[0], 1) if o[0].kind in ("P", "UP") else (None, 0)
    table, inputs = int(o[i + 4].text, 0), [w.value(y) for y in o[i + 1 : i + 4]]
    result, bits = lut(table, *inputs, np.zeros(32, U)), np.full(32, ALL)
    if w.unset.any():  # keeps bits that do not depend on uninitialized ones
        unset = [~w.bits(y) for y in o[i + 1 : i + 4]]
        for n in range(1, 8):
            flipped = [v ^ u if n >> k & 1 else v for k, (v, u) in enumerate(zip(inputs, unset, strict=True))]
            bits &= ~(lut(table, *flipped, np.zeros(32, U)) ^ result)
    w.write(o[i], result, bits)
    w.unset = (bits != ALL) & (result & bits == 0)
    if test is not None:
        other = w.predicate(o[i + 5])
        w.set(test, (result != 0) | other)


@handles("PLOP3", "UPLOP3", knows="LUT")
def plop3(w, x):
    o = x.operands
    values, unset = [], []
    for y in o[2:5]:
        w.unset = np.zeros(32, bool)
        values.append(w.predicate(y))
        unset.append(w.unset)
    for to, table in zip(o[:2], o[5:7], strict=True):
        result = lut(int(table.text, 0), *values, np.zeros(32, bool))
        w.unset = np.zeros(32, bool)
        for n in range(1, 8):  # does the result depend on uninitialized predicates?
            flipped = [v ^ (u & bool(n >> i & 1)) for i, (v, u) in enumerate(zip(values, unset, strict=True))]
            w.unset |= lut(int(table.text, 0), *flipped, np.zeros(32, bool)) != result
        w.set(to, result)


@handles("SHF", "USHF", knows="L R W HI U32 S32 U64 S64")
def shf(w, x):
    o, m = x.operands, x.modifiers
    lower, shift, upper = w.value(o[1]), w.value(o[2]).astype(np.int64), w.value(o[3])
    kind = next((k for k in m if k in ("U32", "S32", "U64", "S64")), "U32")
    shift = shift & (63 if "64" in kind else 31) if "W" in m else np.minimum(shift, 64)
    pair = lower.astype(np.uint64) | upper.astype(np.uint64) << np.uint64(32)
    s = np.minimum(shift, 63).astype(np.uint64)
    if "R" in m:
        if "64" not in kind and "HI" in m:  # only the upper word
            value = signed(upper) >> np.minimum(shift, 31) if kind == "S32" else \
                np.where(shift > 31, 0, upper.astype(np.int64) >> np.minimum(shift, 31))  # fmt: skip
            w.write(o[0], low(value))
            return
        value = (pair.view(np.int64) >> s.astype(np.int64)).view(np.uint64) if kind == "S64" else \
            np.where(shift > 63, np.uint64(0), pair >> s)  # fmt: skip
    else:
        value = np.where(shift > 63, np.uint64(0), pair << s)
    w.write(o[0], (value >> np.uint64(32)).astype(U) if "HI" in m else low(value))


@handles("LEA", "ULEA", knows="HI SX32 X")
def lea(w, x):
    o, m = x.operands, x.modifiers
    carries, i = _predicates(x, 1)
    if "HI" in m and o[i].minus:
        raise Fault("unsupported instruction: LEA.HI of a negated operand")
    if "HI" in m and "SX32" in m:
        a, b, shift, rest = signed(w.value(o[i])), w.value(o[i + 1]), int(o[i + 2].text, 0), o[i + 3 :]
        base = low(a >> (32 - shift))
    elif "HI" in m:
        pair = w.value(o[i]).astype(np.uint64) | w.value(o[i + 2]).astype(np.uint64) << np.uint64(32)
        b, shift, rest = w.value(o[i + 1]), int(o[i + 3].text, 0), o[i + 4 :]
        base = low(pair >> np.uint64(32 - shift))
    else:
        b, shift, rest = w.value(o[i + 1]), int(o[i + 2].text, 0), []
        base = low(w.raw(o[i]).astype(np.uint64) << np.uint64(shift))
        base = ~base if o[i].minus else base  # 1 is added below, which carries if the number is 0
    total = base.astype(np.uint64) + b.astype(np.uint64) + np.uint64(o[i].minus)
    if "X" in m and rest:
        total += w.predicate(rest[0]).astype(np.uint64)
    w.write(o[0], low(total))
    if carries:
        w.set(carries[0], total >> np.uint64(32) != 0)


@handles("SEL", "USEL")
def sel(w, x):
    o = x.operands
    w.write(o[0], w.choose(o[3], lambda: w.value(o[1]), lambda: w.value(o[2])))


@handles("IABS")
def iabs(w, x):
    w.write(x.operands[0], low(np.abs(signed(w.value(x.operands[1])))))


@handles("PRMT", "UPRMT")
def prmt(w, x):
    o = x.operands
    select = w.value(o[2])
    bits = np.where(w.unset, U(0), ALL)
    w.write(o[0], _permuted(w.value(o[1]), w.value(o[3]), select), bits & _permuted(w.bits(o[1]), w.bits(o[3]), select))


def _permuted(a, b, select):
    data = np.stack([v >> U(8 * i) & U(255) for v in (a, b) for i in range(4)])
    out = np.zeros(32, U)
    for i in range(4):
        which = select >> U(4 * i) & U(15)
        byte = data[(which & U(7)).astype(int), np.arange(32)]
        out |= np.where(which & U(8), np.where(byte & U(128), U(255), U(0)), byte) << U(8 * i)
    return out


@handles("FLO", "UFLO", knows="U32")
def flo(w, x):
    if "U32" not in x.modifiers:
        raise Fault("unsupported instruction: FLO of a signed integer")
    lengths = [int(v).bit_length() - 1 for v in w.value(x.operands[1])]
    w.write(x.operands[0], low(np.array(lengths, np.int64)))


@handles("POPC", "UPOPC")
def popc(w, x):
    w.write(x.operands[0], np.array([int(v).bit_count() for v in w.value(x.operands[1])], U))


@handles("BREV", "UBREV")
def brev(w, x):
    w.write(x.operands[0], np.array([int(f"{int(v):032b}"[::-1], 2) for v in w.value(x.operands[1])], U))


@handles("BMSK", "UBMSK")
def bmsk(w, x):
    at, n = (w.value(y).astype(np.uint64) for y in x.operands[1:3])
    w.write(x.operands[0], low(((np.uint64(1) << np.minimum(n, np.uint64(32))) - np.uint64(1)) << at))


@handles("SGXT", "USGXT", knows="U32")
def sgxt(w, x):
    value, bits = signed(w.value(x.operands[1])), w.value(x.operands[2]).astype(np.int64)
    if "U32" in x.modifiers:
        w.write(x.operands[0], low(value & ((1 << bits) - 1)))
        return
    w.write(x.operands[0], low(value << (64 - bits) >> (64 - bits)))


@handles("P2R", "UP2UR")
def p2r(w, x):
    o = x.operands
    out, bits, mask = w.value(o[2]).copy(), w.bits(o[2]).copy(), int(o[3].text, 0)
    kind = "UP" if x.name == "UP2UR" else "P"
    for i in range(7):
        if mask >> i & 1:
            out = np.where(w.predicates[kind][i], out | U(1 << i), out & ~U(1 << i))
            bits = np.where(w.known[kind][i], bits | U(1 << i), bits & ~U(1 << i))
    w.write(o[0], out, bits)


@handles("R2P")
def r2p(w, x):
    value, bits, mask = w.value(x.operands[1]), w.bits(x.operands[1]), int(x.operands[2].text, 0)
    for i in range(7):
        if mask >> i & 1:
            np.copyto(w.predicates["P"][i], value >> U(i) & U(1) != 0, where=w.active)
            np.copyto(w.known["P"][i], bits >> U(i) & U(1) != 0, where=w.active)
