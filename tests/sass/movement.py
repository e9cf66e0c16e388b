"""Branches, and operations across the lanes of a warp."""

import numpy as np
from instructions import LANES, Fault, U, handles


@handles("NOP", "YIELD", "ENDCOLLECTIVE", "ERRBAR", "CGAERRBAR", "MEMBAR", knows=None)
def nothing(w, x):
    """These only affect timing and ordering."""


@handles("BSSY", knows="RECONVERGENT RELIABLE")
def bssy(w, x):
    """These lanes will wait for each other at the matching BSYNC."""
    np.copyto(w.together[x.operands[0].text], w.lanes(w.active), where=w.active)


@handles("BREAK", knows="RELIABLE")
def leave(w, x):
    """Other lanes no longer wait for these."""
    w.together[x.operands[0].text] &= ~w.lanes(w.active)
    w.release()


@handles("WARPSYNC", "BAR", "BSYNC", knows="ALL COLLECTIVE EXCLUSIVE SYNC DEFER_BLOCKING RECONVERGENT RELIABLE")
def wait(w, x):
    """Waits for all lanes; a BSYNC, for those that passed its BSSY together."""
    if "COLLECTIVE" in x.modifiers:
        raise Fault("unsupported instruction: a collective WARPSYNC, which is for diverged lanes")
    w.pc[w.active] -= 1
    w.waiting |= w.active
    w.release()


@handles("EXIT")
def end(w, x):
    """Only lanes whose predicate operand is set exit."""
    if w.copies:
        raise Fault("the kernel ends before an asynchronous copy was waited for")
    ends = w.active
    for p in x.operands:
        ends = ends & w.predicate(p)
    w.done |= ends
    w.release()


@handles("BRA", knows="DIV CONV U")
def bra(w, x):
    if {"DIV", "CONV"} & set(x.modifiers):  # taken if not all lanes are active, to reconverge; or if they are
        wait(w, x)
        return
    taken = w.active
    for p in x.operands[:-1]:
        taken = taken & w.predicate(p)
    w.jump(x.operands[-1], taken)


@handles("BRX", "BRXU")
def brx(w, x):
    base = w.kernel.code[int(w.pc[w.active][0]) - 1].address + 16
    target = w.register(x.operands[0]).astype(np.int64) + base + sum(w.value(o).view(np.int32) for o in x.operands[1:])
    for i in np.flatnonzero(w.active):
        w.pc[i] = w.kernel.addresses[int(target[i])]


@handles("CALL", knows="REL NOINC")
def call(w, x):
    w.jump(x.operands[0], w.active)


@handles("RET", knows="REL NODEC")
def ret(w, x):
    target = w.register(x.operands[0]).astype(np.int64)
    for i in np.flatnonzero(w.active):
        w.pc[i] = w.kernel.addresses[int(target[i])]


@handles("SHFL", knows="BFLY IDX UP DOWN")
def shfl(w, x):
    w.whole()
    there, to, value, lane, within = x.operands
    if (w.value(within)[w.active] != (0 if "UP" in x.modifiers else 31)).any():
        raise Fault("unsupported instruction: a shuffle within segments of a warp")
    other = w.value(lane).astype(np.int64)
    kinds = {"BFLY": LANES ^ other, "IDX": other & 31, "UP": LANES - other, "DOWN": LANES + other}
    source = next(v for k, v in kinds.items() if k in x.modifiers).astype(np.int64)
    inside = (source >= 0) & (source < 32)
    given = np.where(inside, source, LANES).astype(int)
    w.write(to, w.value(value)[given], w.bits(value)[given])
    w.set(there, inside)


@handles("MOVM", knows="16 MT88")
def movm(w, x):
    """Transposes: lane 4g + t has elements 2t, 2t + 1 of row g, and gets those of column g."""
    w.whole()
    matrix = np.ascontiguousarray(w.register(x.operands[1])).view(np.uint16).reshape(8, 8)
    w.write(x.operands[0], np.ascontiguousarray(matrix.T).reshape(-1).view(U))


@handles("VOTE", "VOTEU", knows="ANY ALL")
def vote(w, x):
    last = w.predicate(x.operands[-1])
    result = (last & w.active).any() if "ANY" in x.modifiers else last[w.active].all()
    to = x.operands[0]
    if to.kind in ("R", "UR"):
        w.write(to, np.full(32, sum(1 << int(i) for i in np.flatnonzero(last & w.active)), U))
        to = x.operands[1]
    w.set(to, np.full(32, result))


@handles("ELECT")
def elect(w, x):
    """Elects the first of the requested lanes, which must be all lanes that have not exited."""
    w.whole()
    first = int(np.flatnonzero(w.active)[0])
    w.set(x.operands[0], np.arange(32) == first)
    w.write(x.operands[1], np.full(32, first, U))


@handles("REDUX", "CREDUX", knows="OR AND SUM MAX MIN")
def redux(w, x):
    value = w.value(x.operands[1])[w.active]
    kinds = {
        "OR": np.bitwise_or.reduce,
        "AND": np.bitwise_and.reduce,
        "SUM": np.add.reduce,
        "MAX": np.max,
        "MIN": np.min,
    }
    kind = next((m for m in x.modifiers if m in kinds), "OR")
    w.write(x.operands[0], np.full(32, kinds[kind](value), U))


@handles("S2R", "S2UR")
def s2r(w, x):
    w.write(x.operands[0], w.block.special(x.operands[1].text, w))


@handles("CS2R", knows="32")
def cs2r(w, x):
    w.write(x.operands[0], np.zeros(32, U))
    if "32" not in x.modifiers:
        w.write(x.operands[0].next(1), np.zeros(32, U))


@handles("R2UR", knows="BROADCAST")
def r2ur(w, x):
    """Values remain separate for each lane, so a loop over the lanes ends after one iteration."""
    o = x.operands
    if o[0].kind in ("P", "UP"):
        w.set(o[0], np.zeros(32, bool))
        o = o[1:]
    w.write(o[0], w.value(o[1]))
