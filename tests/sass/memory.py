"""Loads, stores and atomics, with checks: bounds, alignment, and races on shared memory since the last barrier."""

import numpy as np
from instructions import ALL, Fault, U, handles

SHARED, LOCAL, CONSTANT = 0x61, 0x62, 0x63
"""Upper bytes of generic addresses outside of global memory."""

ORDER = "E STRONG GPU SYS CTA SM"
ACCESS = f"{ORDER} CONSTANT EF LU NA 128 64 U8 S8 U16 S16"
"""Modifiers of ordering and caching, which have no effect here, and of size."""


class Touched:
    """For each 4 bytes of shared memory, masks of the warps that have read and written them since the last barrier."""

    def __init__(self, size: int):
        self.read, self.wrote, self.atomic = (np.zeros(size // 4 + 1, np.uint32) for _ in range(3))

    def clear(self):
        for x in (self.read, self.wrote, self.atomic):
            x[:] = 0

    def note(self, warp: int, begin: int, size: int, kind: str):
        words, bit = slice(begin // 4, (begin + size - 1) // 4 + 1), np.uint32(1 << warp)
        others = ~bit
        writers = self.wrote[words] if kind == "atomic" else self.wrote[words] | self.atomic[words]
        readers = self.read[words] if kind != "read" else np.uint32(0)
        if ((writers | readers) & others).any():
            by = "write" if (writers & others).any() else "read"
            raise Fault(f"a race: {kind} of shared byte {begin:#x} without a barrier after another warp's {by}")
        {"read": self.read, "write": self.wrote, "atomic": self.atomic}[kind][words] |= bit


def address(w, x):
    """The address of each lane: the sum of registers, register pairs (.64), scaled registers and an offset."""
    total = np.zeros(32, np.uint64)
    for term in x.terms:
        if term.kind == "number":
            number = int(term.text.lstrip("-"), 0)
            total += np.uint64((-number if term.minus else number) & 0xFFFFFFFFFFFFFFFF)
        elif "64" in term.part:
            total += w.wide(type(term)(term.text, term.kind, term.index))
        else:
            scale = int(term.part.split(".X")[1]) if ".X" in term.part else 1
            value = w.register(term).astype(np.uint64) * np.uint64(scale)
            total += value
    w.settled("the address")
    return total


def region(w, at, size):
    """The host memory of the call that contains `at`, and the offset of `at` in it."""
    for (base, n), view in zip(w.block.regions, w.block.views, strict=True):
        if base <= at and at + size <= base + n:
            return view, at - base
    raise Fault(f"out of bounds: {size} bytes at {at:#x} of global memory")


def _size(modifiers):
    return next(
        (n for m, n in (("128", 16), ("64", 8), ("U8", 1), ("S8", 1), ("U16", 2), ("S16", 2)) if m in modifiers), 4
    )


def _space(x, at):
    """The address space of an access, and the address in it."""
    if x.name in ("LDS", "STS", "ATOMS"):
        return SHARED, at
    if x.name in ("LDL", "STL"):
        return LOCAL, at & 0xFFFFFF
    if x.name in ("LD", "ST", "ATOM") and at >> 56:
        return at >> 56, at & (0xFFFFFF if at >> 56 == LOCAL else 0xFFFFFFFF)
    return None, at


def _place(w, x, lane, at, size, kind):
    """(bytes, index) of one lane's access."""
    if at % size:
        raise Fault(f"misaligned: {size} bytes at {at:#x}")
    space, at = _space(x, at)
    if space == SHARED:
        if at < w.block.reserved or at + size > len(w.block.shared):
            raise Fault(f"out of bounds: {size} bytes at {at:#x} of {len(w.block.shared)} of shared memory")
        w.block.touched.note(w.number, at, size, kind)
        if w.block.coming[at // 4 : -(-(at + size) // 4)].any():
            raise Fault(f"access to shared byte {at:#x} before the asynchronous copy to it was waited for")
        return w.block.shared, at
    if space == LOCAL:
        if at + size > w.local.shape[1]:
            raise Fault(f"out of bounds: {size} bytes at {at:#x} of local memory")
        return w.local[lane], at
    if space == CONSTANT:
        if at + size > len(w.block.constants) or kind != "read":
            raise Fault(f"out of bounds: {kind} of {size} bytes at {at:#x} of constants")
        return np.frombuffer(w.block.constants, np.uint8), at
    return region(w, at, size)


@handles("LDS", "LDG", "LD", "LDL", knows=ACCESS)
def load(w, x):
    size, to = _size(x.modifiers), x.operands[0]
    source = next(o for o in x.operands if o.kind == "address")
    at, words = address(w, source), max(1, size // 4)
    out, bits = np.zeros((words, 32), U), np.full((words, 32), ALL)
    lanes = np.flatnonzero(w.active)
    for i in lanes:
        data, k = _place(w, x, i, int(at[i]), size, "read")
        if _space(x, int(at[i]))[0] == LOCAL:
            was = w.local_written[i, k : k + size]
            bits[:, i] = was.view(U) if size >= 4 else ALL if was.all() else 0
        if size >= 4:
            out[:, i] = data[k : k + size].view(U)
        else:
            value = int.from_bytes(data[k : k + size].tobytes(), "little", signed=x.modifiers[-1][0] == "S")
            out[0, i] = value & 0xFFFFFFFF
    if x.name in ("LDG", "LD"):
        sectors = {int(at[i]) // 32 for i in lanes} | {(int(at[i]) + size - 1) // 32 for i in lanes}
        w.loads.append((size, len(sectors)))
    for j in range(words):
        w.write(to.next(j), out[j], bits[j])


@handles("STS", "STG", "ST", "STL", knows=ACCESS)
def store(w, x):
    size = _size(x.modifiers)
    at = address(w, next(o for o in x.operands if o.kind == "address"))
    sources = [x.operands[-1].next(j) for j in range(max(1, size // 4))]
    stored = U((1 << 8 * min(size, 4)) - 1)  # the stored bits of a register
    values = np.stack([w.register(y, stored) if y.kind == "R" else w.value(y) for y in sources])
    bits = np.stack([w.bits(y) for y in sources])
    lanes = np.flatnonzero(w.active)
    local = [_space(x, int(at[i]))[0] == LOCAL for i in lanes]
    if not all(local):  # local memory: a spilled register, which may be uninitialized
        w.settled("the stored value")
    for i, own in zip(lanes, local, strict=True):
        data, k = _place(w, x, i, int(at[i]), size, "write")
        data[k : k + size] = np.ascontiguousarray(values[:, i]).view(np.uint8)[:size]
        if own:
            w.local_written[i, k : k + size] = np.ascontiguousarray(bits[:, i]).view(np.uint8)[:size]


@handles("ATOMS", "ATOMG", "ATOM", "RED", "REDG", knows=f"{ORDER} OR AND ADD INC EXCH MAX MIN POPC 32")
def atomic(w, x):
    what = next((m for m in x.modifiers if m in ("OR", "AND", "ADD", "INC", "EXCH", "MAX", "MIN", "POPC")), None)
    place = next(k for k, o in enumerate(x.operands) if o.kind == "address")
    to = next((o for o in x.operands[:place] if o.kind == "R"), None)
    at, old = address(w, x.operands[place]), np.zeros(32, U)
    value = np.ones(32, U) if what == "POPC" else w.value(x.operands[place + 1])
    if what is None:
        raise Fault("unsupported atomic operation")
    for i in np.flatnonzero(w.active):
        data, k = _place(w, x, i, int(at[i]), 4, "atomic")
        cell = data[k : k + 4].view(U)
        old[i], v = cell[0], value[i]
        cell[0] = {"OR": old[i] | v, "AND": old[i] & v, "EXCH": v, "MAX": max(old[i], v),
                   "MIN": min(old[i], v), "INC": U(0) if old[i] >= v else old[i] + U(1),
                   }.get(what, old[i] + v)  # fmt: skip
    if to is not None:
        w.write(to, old)


@handles("LDC", "ULDC", "LDCU", knows=ACCESS)
def load_constant(w, x):
    size = _size(x.modifiers)
    words = w.constant(x.operands[1], max(1, size // 4))
    if size < 4:
        words = words & U((1 << 8 * size) - 1)
    for j in range(len(words)):
        w.write(x.operands[0].next(j), words[j])


@handles("UBLKPF", "CCTL", knows=None)
def prefetch(w, x):
    """Prefetches to L2: only the address is checked."""
    if x.name == "UBLKPF":
        at = int(w.wide(x.operands[0].terms[0])[w.active][0])
        size = int(w.value(x.operands[1])[w.active][0])
        region(w, at, size)
        w.block.prefetched.append((at, size))


@handles("LDGSTS", knows=f"{ACCESS} BYPASS")
def copy(w, x):
    """Copies global to shared memory. The data arrives when its group is waited for."""
    size, places = _size(x.modifiers), [o for o in x.operands if o.kind == "address"]
    wide = [any("64" in term.part for term in o.terms) for o in places]
    at, to = (address(w, places[wide.index(kind)]) for kind in (True, False))
    lanes = np.flatnonzero(w.active)
    for i in lanes:
        data, k = region(w, int(at[i]), size)
        begin = int(to[i])
        if int(at[i]) % size or begin % size:
            raise Fault(f"misaligned: a copy of {size} bytes from {int(at[i]):#x} to {begin:#x}")
        if begin < w.block.reserved or begin + size > len(w.block.shared):
            raise Fault(f"out of bounds: {size} bytes at {begin:#x} of {len(w.block.shared)} of shared memory")
        w.block.touched.note(w.number, begin, size, "write")
        w.block.coming[begin // 4 : (begin + size) // 4] = True
        w.copies.append((w.group, data[k : k + size], begin))
    w.loads.append((size, len({int(at[i]) // 32 for i in lanes})))


@handles("LDGDEPBAR")
def end_of_group(w, x):
    w.group += 1


@handles("DEPBAR", knows="LE")
def wait_for_copies(w, x):
    """Waits for all groups but the last few. Other scoreboards only affect timing."""
    if len(x.operands) < 2 or x.operands[0].text != "SB0":
        return
    most = w.group - int(x.operands[1].text, 0)
    for _, data, begin in (c for c in w.copies if c[0] < most):
        w.block.shared[begin : begin + len(data)] = data
        w.block.coming[begin // 4 : (begin + len(data)) // 4] = False
    w.copies = [c for c in w.copies if c[0] >= most]
