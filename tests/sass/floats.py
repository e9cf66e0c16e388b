"""Floating point, conversions, tensor cores. MUFU is exact here, while hardware is off by an ulp or two; the
products of an MMA are summed in float64 and rounded once to float32."""

import numpy as np
from instructions import Fault, U, combine, handles, low, signed

FUNCTIONS = {
    "RCP": lambda v: 1 / v, "EX2": np.exp2, "LG2": np.log2, "RSQ": lambda v: 1 / np.sqrt(v), "SQRT": np.sqrt,
    "TANH": np.tanh,
}  # fmt: skip


def _odd_sum(a, b):
    """a + b in float64, rounded to odd if inexact: a second rounding to float32 then gives the correctly rounded
    sum."""
    total = a + b
    rest = total - a
    error = (a - (total - rest)) + (b - rest)
    even = (error != 0) & np.isfinite(total) & (total.view(np.int64) & 1 == 0)
    return np.where(even, np.nextafter(total, np.copysign(np.inf, error)), total) if even.any() else total


def _larger(a, b):
    return np.abs(a) > np.abs(b)


def _rounded(value, modifiers):
    """Rounds to float32: to nearest, down, up or toward zero."""
    near = value.astype(np.float32)
    for way, towards, beyond in (("RM", -np.inf, np.greater), ("RP", np.inf, np.less), ("RZ", 0, _larger)):
        if way in modifiers:
            near = np.where(beyond(near, value), np.nextafter(near, np.float32(towards)), near)
    return near


def _flushed(x, value):
    """Flushes subnormal numbers to 0, if .FTZ is set."""
    return np.where(np.abs(value) < 2.0**-126, np.copysign(0, value), value) if "FTZ" in x.modifiers else value


def _put(w, x, value):
    w.write(x, np.ascontiguousarray(value, np.float32).view(U))


@handles("FADD", "UFADD", knows="FTZ")
def fadd(w, x):
    a, b = (_flushed(x, w.real(y)) for y in x.operands[1:3])
    _put(w, x.operands[0], _flushed(x, a + b))


@handles("FMUL", "UFMUL", knows="FTZ RM RP RZ")
def fmul(w, x):
    a, b = (_flushed(x, w.real(y)).astype(np.float64) for y in x.operands[1:3])
    _put(w, x.operands[0], _flushed(x, _rounded(a * b, x.modifiers)))


@handles("FFMA", "UFFMA", knows="RM RP RZ SAT")
def ffma(w, x):
    a, b, c = (w.real(y).astype(np.float64) for y in x.operands[1:4])
    value = _rounded(_odd_sum(a * b, c), x.modifiers)
    _put(w, x.operands[0], np.clip(np.nan_to_num(value), 0, 1) if "SAT" in x.modifiers else value)


@handles("FMNMX", "FMNMX3", knows="NAN")
def fmnmx(w, x):
    numbers = [w.real(y) for y in x.operands[1:-1]]
    least, most = (np.minimum, np.maximum) if "NAN" in x.modifiers else (np.fmin, np.fmax)
    _put(w, x.operands[0], np.where(w.predicate(x.operands[-1]), least.reduce(numbers), most.reduce(numbers)))


@handles("FSEL", "UFSEL")
def fsel(w, x):
    o = x.operands
    _put(w, o[0], w.choose(o[3], lambda: w.real(o[1]), lambda: w.real(o[2])))


ORDERED = " ".join(f"{kind} {kind}U" for kind in ("LT", "LE", "GT", "GE", "EQ", "NE")) + " NUM NAN"


def _compared(kind, a, b):
    none = np.isnan(a) | np.isnan(b)
    ordered = {"LT": a < b, "LE": a <= b, "GT": a > b, "GE": a >= b, "EQ": a == b, "NE": (a != b) & ~none}
    result = none if kind == "NAN" else ~none if kind == "NUM" else ordered[kind[:2]]
    return result | none if len(kind) == 3 and kind.endswith("U") else result  # true if one is NaN


@handles("FSETP", "UFSETP", knows=f"{ORDERED} AND OR XOR FTZ")
def fsetp(w, x):
    a, b = (_flushed(x, w.real(y)) for y in x.operands[2:4])
    w.compare(x, _compared(x.modifiers[0], a, b), x.operands[4])


@handles("FSET", knows=f"BF {ORDERED} AND OR XOR FTZ")
def fset(w, x):
    """The result of a comparison as 1 or 0."""
    o, m = x.operands, x.modifiers
    if m[0] != "BF":
        raise Fault("unsupported instruction: FSET with an integer result")
    result = _compared(m[1], *(_flushed(x, w.real(y)) for y in o[1:3]))
    _put(w, o[0], combine(m, result, w.predicate(o[3])))


@handles("FCHK")
def fchk(w, x):
    """Whether a division needs the slow path: exponents near the limits."""
    numerator, divisor = (w.real(y).astype(np.float64) for y in x.operands[1:3])
    a, b = np.frexp(numerator)[1], np.frexp(divisor)[1]
    odd = ~np.isfinite(numerator) | ~np.isfinite(divisor) | (divisor == 0)
    w.set(x.operands[0], odd | (b < -124) | (b > 126) | (a - b > 126) | (a - b < -125) | (a < -100))


@handles("MUFU", knows=" ".join(FUNCTIONS))
def mufu(w, x):
    kind = next((k for k in x.modifiers if k in FUNCTIONS), None)
    if kind is None:
        raise Fault("unsupported function of MUFU")
    _put(w, x.operands[0], FUNCTIONS[kind](w.real(x.operands[1]).astype(np.float64)))


@handles("I2F", "I2FP", "UI2F", "UI2FP", knows="F32 U8 U16 U32 S32 U64 S64 RM RP RZ")
def i2f(w, x):
    m = x.modifiers
    if "U64" in m or "S64" in m:
        wide = w.wide(x.operands[1])
        value = (wide if "U64" in m else wide.view(np.int64)).astype(np.longdouble)  # at least 64 bits
        _put(w, x.operands[0], _rounded(value, m))
        return
    value = w.value(x.operands[1])
    value = value & U(0xFFFF) if "U16" in m else value & U(255) if "U8" in m else value if "U32" in m else signed(value)
    _put(w, x.operands[0], _rounded(value.astype(np.float64), m))


@handles("F2I", "UF2I", knows="TRUNC NTZ FTZ U32 U64")
def f2i(w, x):
    value = w.real(x.operands[1]).astype(np.float64)
    value = np.trunc(value) if "TRUNC" in x.modifiers else np.rint(value)
    value = np.nan_to_num(value, nan=0, posinf=2.0**80, neginf=-(2.0**80))
    if "U64" in x.modifiers:
        w.write_wide(x.operands[0], np.clip(value, 0, 2.0**64 - 2048).astype(np.uint64))
    elif "U32" in x.modifiers:
        w.write(x.operands[0], low(np.clip(value, 0, 2**32 - 1).astype(np.int64)))
    else:
        w.write(x.operands[0], low(np.clip(value, -(2**31), 2**31 - 1).astype(np.int64)))


def _bf16(x):
    bits = np.ascontiguousarray(x, np.float32).view(U)
    return np.where(np.isnan(x), U(0x7FFF), bits + U(0x7FFF) + (bits >> U(16) & U(1)) >> U(16))


def _half(bits):
    return np.ascontiguousarray((bits & U(0xFFFF)).astype(np.uint16)).view(np.float16)


def _bits(x):
    return np.ascontiguousarray(x).astype(np.float16).view(np.uint16).astype(U)


@handles("F2FP", knows="F16 BF16 F32 PACK_AB UNPACK_B E4M3")
def f2fp(w, x):
    o, m = x.operands, x.modifiers
    if "UNPACK_B" not in m:
        high, lower = w.real(o[1]), w.real(o[2])
        w.write(o[0], _bf16(lower) | _bf16(high) << U(16) if "BF16" in m else _bits(lower) | _bits(high) << U(16))
        return
    if "E4M3" not in m:
        raise Fault("unsupported conversion")
    value, out = w.value(o[1]), np.zeros(32, U)
    for i in range(2):
        code = (value >> U(8 * i) & U(255)).astype(np.int64)
        e, mantissa = code >> 3 & 15, code & 7
        number = np.where(e == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (e - 10.0))
        number = np.where(code & 127 == 127, np.nan, number) * np.where(code & 128, -1.0, 1.0)
        out |= _bits(number) << U(16 * i)
    w.write(o[0], out)


def _pair(w, x, bf16=False):
    """The two halves of an operand of HADD2, HMUL2, HFMA2, as float64."""
    plain = type(x)(x.text.lstrip("-"), x.kind, x.index, bank=x.bank, terms=x.terms)
    bits = w.raw(plain)
    if bf16:
        halves = [(x << U(16)).view(np.float32).astype(np.float64) for x in (bits, bits >> U(16))]
    else:
        halves = [_half(bits).astype(np.float64), _half(bits >> U(16)).astype(np.float64)]
    if "H0_H0" in x.part:
        halves[1] = halves[0]
    if "H1_H1" in x.part:
        halves[0] = halves[1]
    if x.absolute:
        halves = [np.abs(h) for h in halves]
    return [-h for h in halves] if x.minus else halves


def _half_operands(w, operands):
    """Operands after the result. An immediate pair consists of two numbers, the upper one first."""
    out, rest = [], [x for x in operands if x.kind not in ("P", "UP")]
    while rest:
        x = rest.pop(0)
        if x.kind == "number" and "x" not in x.text:
            both = [-float(y.text.lstrip("-+")) if y.minus else float(y.text.lstrip("-+")) for y in (x, rest.pop(0))]
            out.append([np.full(32, both[1]), np.full(32, both[0])])
        else:
            out.append(_pair(w, x))
    return out


@handles("HADD2", "HMUL2", "HFMA2", knows="F32 MMA")
def half2(w, x):
    o, m = x.operands, x.modifiers
    if "F32" in m:  # one half to float32
        _put(w, o[0], _pair(w, o[-1])[0])
        return
    terms = _half_operands(w, o[1:])
    out = np.zeros(32, U)
    for i in range(2):
        a, b = terms[0][i], terms[1][i]
        value = a + b if x.name == "HADD2" else a * b if x.name == "HMUL2" else a * b + terms[2][i]
        out |= _bits(value) << U(16 * i)
    w.write(o[0], out)


@handles("HMNMX2", "VHMNMX", knows="BF16_V2 NAN")
def hmnmx2(w, x):
    """Minimum or maximum of two or three, by the last operand."""
    bf16, nan = "BF16_V2" in x.modifiers, "NAN" in x.modifiers
    terms = [_pair(w, y, bf16) for y in x.operands[1:-1]] if bf16 else _half_operands(w, x.operands[1:-1])
    least, out = w.predicate(x.operands[-1]), np.zeros(32, U)
    smaller, larger = (np.minimum, np.maximum) if nan else (np.fmin, np.fmax)
    for i in range(2):
        each = [term[i] for term in terms]
        value = np.where(least, smaller.reduce(each), larger.reduce(each))
        bits = _bf16(value.astype(np.float32)) if bf16 else np.where(np.isnan(value), U(0x7FFF), _bits(value))
        out |= bits << U(16 * i)
    w.write(x.operands[0], out)


# ---------------------------------------------------------------- tensor cores: fragments as in the PTX ISA

G, T = np.arange(32) // 4, np.arange(32) % 4


def _product(w, x, each, convert):
    """A B, [16, 8], with `each` elements per register. C and D are laid out as in `_add`."""
    a, b = np.zeros((16, 8 * each)), np.zeros((8 * each, 8))
    for i in range(4):
        values = convert(w.register(x.operands[1].next(i)), 0)
        for k in range(each):
            a[G + 8 * (i & 1), each * (T + 4 * (i >> 1)) + k] = values[:, k]
    for i in range(2):
        values = convert(w.register(x.operands[2].next(i)), 1)
        for k in range(each):
            b[each * (T + 4 * i) + k, G] = values[:, k]
    return a @ b


def _places(d):
    return [d[G + 8 * (i >> 1), 2 * T + (i & 1)] for i in range(4)]


@handles("HMMA", knows="16816 F32 BF16")
def hmma(w, x):
    w.whole()
    if x.modifiers[:2] != ("16816", "F32"):
        raise Fault("unsupported shape of HMMA")

    def convert(word, side):
        pairs = np.ascontiguousarray(word).view(np.uint16).reshape(32, 2)
        return (pairs.astype(U) << U(16)).view(np.float32) if "BF16" in x.modifiers else pairs.view(np.float16)

    c = [np.ascontiguousarray(w.register(x.operands[3].next(i))).view(np.float32) for i in range(4)]
    sums = [p + q for p, q in zip(_places(_product(w, x, 2, convert)), c, strict=True)]
    for i in range(4):
        _put(w, x.operands[0].next(i), sums[i])


@handles("IMMA", knows="16832 U8 S8")
def imma(w, x):
    w.whole()
    if x.modifiers[0] != "16832":
        raise Fault("unsupported shape of IMMA")
    types = [m for m in x.modifiers if m in ("U8", "S8")]

    def convert(word, side):
        data = np.ascontiguousarray(word).view(np.uint8).reshape(32, 4)
        return data.view(np.int8) if types[side] == "S8" else data

    c = [signed(w.register(x.operands[3].next(i))) for i in range(4)]
    sums = [low(p.astype(np.int64) + q) for p, q in zip(_places(_product(w, x, 4, convert)), c, strict=True)]
    for i in range(4):
        w.write(x.operands[0].next(i), sums[i])
