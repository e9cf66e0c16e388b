"""Runs blocks of a kernel's machine code on a simulated multiprocessor, 32 lanes at a time. Behaviour that is
undefined on a GPU is a Fault: reading an uninitialized register, a misaligned address or one outside of the call's
memory, shared memory that two warps access between two barriers if one of them writes, divergent lanes at an
instruction that all must execute. Unknown instructions are a Fault too."""

import collections
import ctypes
import struct

import floats  # noqa: F401
import integers  # noqa: F401 (registers its instructions)
import memory
import movement  # noqa: F401
import numpy as np
import pairs  # noqa: F401
from instructions import ALL, LANES, Fault, U, combine, handler
from program import Instruction, Kernel, Operand

STACK = 4096
LAUNCH = {
    0x160: {"threads": 0, "grid": 12, "stack": 0x28, "local": 0x20, "constants": 0x40, "parameters": False},
    0x210: {"threads": 0, "grid": 12, "stack": 0x28, "local": 0x20, "constants": 0x198, "parameters": True},
    0x380: {"threads": 0x360, "grid": 0x370, "stack": 0x37C, "local": 0x2F8, "constants": 0x348, "parameters": True},
}
"""By the offset of parameters in constant bank 0 (sm_80, 90, 100): the offsets of the launch sizes, of the end of
local memory, and of the generic addresses of local memory and of the bank or its parameters."""


class Warp:
    """Registers and predicates of 32 lanes, and which of them have been written. This is tracked per bit, because
    compilers keep predicates in bits of otherwise uninitialized registers."""

    def __init__(self, block: "Block", number: int):
        self.block, self.number, self.kernel = block, number, block.kernel
        self.unset = np.zeros(32, bool)  # lanes in which the instruction has read uninitialized bits
        self.known = {kind: np.ones((9, 32), bool) for kind in ("P", "UP")}
        self.registers = {kind: np.zeros((257, 32), U) for kind in ("R", "UR")}
        self.written = {kind: np.zeros((257, 32), U) for kind in ("R", "UR")}
        self.predicates = {kind: np.zeros((9, 32), bool) for kind in ("P", "UP")}
        for kind in ("R", "UR"):
            self.written[kind][-1] = ALL
        for kind in ("P", "UP"):
            self.predicates[kind][-1] = True
        self.pc, self.done = np.zeros(32, np.int64), np.zeros(32, bool)
        self.active, self.waiting = np.ones(32, bool), np.zeros(32, bool)
        self.local, self.local_written = np.zeros((32, STACK), np.uint8), np.zeros((32, STACK), np.uint8)
        self.together = collections.defaultdict(lambda: np.zeros(32, U))  # for each lane, those it waits for at BSYNC
        self.copies, self.group = [], 0  # pending asynchronous copies: (group, bytes, destination)
        self.epoch, self.executed, self.loads, self.trace = 0, 0, [], []
        self.counts = collections.Counter()

    # ------------------------------------------------------------ operands

    def register(self, x: Operand, bits: np.uint32 = ALL) -> np.ndarray:
        """The value of a register, of which only `bits` are used."""
        self.unset |= ~self.written[x.kind][x.index] & bits != 0
        return self.registers[x.kind][x.index]

    def bits(self, x: Operand) -> np.ndarray:
        """The bits of an operand that have been written."""
        return self.written[x.kind][x.index] if x.kind in ("R", "UR") else np.full(32, ALL)

    def predicate(self, x: Operand) -> np.ndarray:
        self.unset |= ~self.known[x.kind][x.index]
        value = self.predicates[x.kind][x.index]
        return ~value if x.invert else value

    def constant(self, x: Operand, words: int = 1) -> np.ndarray:
        data = self.block.constants if x.bank == 0 else self.kernel.constants
        offset = sum((self.value(t).view(np.int32).astype(np.int64) for t in x.terms), np.zeros(32, np.int64))
        if (offset[self.active] == offset[self.active][0]).all():
            return np.full((words, 32), 0, U) + np.frombuffer(data, U, words, int(offset[self.active][0]))[:, None]
        out = np.zeros((words, 32), U)
        for i in np.flatnonzero(self.active):
            out[:, i] = np.frombuffer(data, U, words, int(offset[i]))
        return out

    def raw(self, x: Operand) -> np.ndarray:
        """The bits of an operand, without its signs; a number as an integer."""
        if x.kind in ("R", "UR"):
            part = x.part.rsplit(".", 1)[-1]
            if not part or part[0] not in "HB":
                return self.register(x)
            width, at = (16, 16 * (part[1] == "1")) if part[0] == "H" else (8, 8 * int(part[1]))
            mask = U((1 << width) - 1)
            return self.register(x, mask << U(at)) >> U(at) & mask
        if x.kind == "const":
            return self.constant(x)[0]
        if x.kind == "number":
            return np.full(32, int(x.text.lstrip("-"), 0) & 0xFFFFFFFF, U)
        raise Fault(f"unsupported operand {x.text}")

    def value(self, x: Operand) -> np.ndarray:
        value = self.raw(x)
        if x.absolute:
            value = np.abs(value.view(np.int32)).view(U)
        if x.minus:
            value = U(0) - value
        return ~value if x.invert else value

    def real(self, x: Operand) -> np.ndarray:
        """An operand as float32."""
        if x.kind == "number" and "x" not in x.text:
            text = x.text.lstrip("-+").lower().replace("qnan", "nan")
            value = np.full(32, np.float32(text)).view(U)
        else:
            value = self.raw(x)
        if x.absolute:
            value = value & U(0x7FFFFFFF)
        if x.minus:
            value = value ^ U(0x80000000)
        return np.ascontiguousarray(value).view(np.float32)

    def wide(self, x: Operand) -> np.ndarray:
        """An operand as 64 bits: a register and the next one."""
        if x.kind in ("R", "UR"):
            low, high = self.register(x), self.register(x.next(1))
            value = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
        elif x.kind == "const":
            words = self.constant(x, 2).astype(np.uint64)
            value = words[0] | words[1] << np.uint64(32)
        else:
            value = np.full(32, int(x.text.lstrip("-"), 0), np.uint64)
        return np.uint64(0) - value if x.minus else value

    def write(self, x: Operand, value: np.ndarray, bits: np.ndarray | None = None):
        """bits: those that do not depend on uninitialized bits. By default all, or none for lanes that read any."""
        if x.index < 0:
            return
        bits = np.where(self.unset, U(0), ALL) if bits is None else bits
        np.copyto(self.registers[x.kind][x.index], value.view(U) if value.dtype != U else value, where=self.active)
        np.copyto(self.written[x.kind][x.index], bits, where=self.active)

    def write_wide(self, x: Operand, value: np.ndarray):
        self.write(x, (value & np.uint64(0xFFFFFFFF)).astype(U))
        self.write(x.next(1), (value >> np.uint64(32)).astype(U))

    def set(self, x: Operand, value):
        if x.index >= 0:
            np.copyto(self.predicates[x.kind][x.index], value, where=self.active)
            np.copyto(self.known[x.kind][x.index], ~self.unset, where=self.active)

    def settled(self, what: str):
        """Raises a Fault if the instruction has read uninitialized bits. Compilers speculatively compute with
        uninitialized registers, but addresses and stored values must not depend on them."""
        if (self.unset & self.active).any():
            raise Fault(f"{what} depends on an uninitialized register")

    def compare(self, x, result: np.ndarray, other: Operand):
        """Sets the predicates of a comparison, combined with another one, which may determine the result alone."""
        first, self.unset = self.unset, np.zeros(32, bool)
        second = self.predicate(other)
        if "XOR" not in x.modifiers:
            first = first & (~second if "OR" in x.modifiers else second)
        self.unset |= first
        self.set(x.operands[0], combine(x.modifiers, result, second))
        self.set(x.operands[1], combine(x.modifiers, ~result, second))

    def choose(self, which: Operand, a, b) -> np.ndarray:
        """a() where `which` is set, b() elsewhere. Uninitialized bits matter only in the selected one."""
        pick = self.predicate(which)
        unset, self.unset = self.unset, np.zeros(32, bool)
        first = a()
        unset_first, self.unset = self.unset, np.zeros(32, bool)
        second = b()
        self.unset = unset | np.where(pick, unset_first, self.unset)
        return np.where(pick, first, second)

    def lanes(self, mask: np.ndarray) -> np.uint32:
        """A mask of lanes as bits."""
        return np.packbits(mask, bitorder="little").view(U)[0]

    def whole(self):
        """Raises a Fault unless all lanes that have not exited are active."""
        if not (self.active == ~self.done).all():
            raise Fault("expected all live lanes of the warp to be active, but lanes diverge")

    # ------------------------------------------------------------ running

    def jump(self, label: Operand, mask: np.ndarray):
        self.pc[mask] = self.kernel.labels[label.text]

    def run(self) -> str:
        """Runs to the next barrier or the end."""
        while True:
            live = ~self.done
            if not live.any():
                return "done"
            ready = live & ~self.waiting
            if not ready.any():
                return self.at_barrier(live)
            at = int(self.pc[ready].min())
            here = ready & (self.pc == at)
            x = self.kernel.code[at]
            self.active, self.unset = here, np.zeros(32, bool)
            if x.guard is not None:
                self.active = here & self.predicate(x.guard)
                self.unset[:] = False  # compilers branch early on uninitialized bits if a later branch decides anyway
            self.executed += 1
            self.counts[at] += 1
            if self.block.traced:
                self.trace.append(at)
            self.pc[here] = at + 1
            if not self.active.any():
                continue
            try:
                x.handler = x.handler or handler(x)
                x.handler(self, x)
            except Fault as fault:
                raise Fault(self.where(x, str(fault))) from None

    def at_barrier(self, live: np.ndarray) -> str:
        places = {int(at) for at in self.pc[live]}
        x = self.kernel.code[min(places)]
        if len(places) > 1 or x.name != "BAR":
            raise Fault(self.where(x, "lanes of a warp wait at different instructions"))
        self.waiting[:] = False
        self.pc[live] += 1
        return "barrier"

    def release(self):
        """Resumes waiting lanes if all lanes that they wait for have arrived."""
        live = ~self.done
        for at in {int(i) for i in self.pc[self.waiting & live]}:
            x, here = self.kernel.code[at], self.waiting & (self.pc == at)
            missing = ~self.lanes(here) & self.lanes(live)
            if x.name == "BSYNC":
                here = here & (self.together[x.operands[0].text] & missing == 0)
            if x.name == "BSYNC" or (x.name != "BAR" and not missing):
                self.waiting &= ~here
                self.pc[here] = self.kernel.labels[x.operands[-1].text] if "CONV" in x.modifiers else at + 1

    def where(self, x: Instruction, what: str) -> str:
        line = ", ".join(f"{file}:{number}" for file, number in x.lines[:2])
        return f"{self.kernel.name}+{x.address:#x} {x.text} ({line}), warp {self.number}: {what}"


class Block:
    """The warps and shared memory of a block. regions: (address, bytes) of global memory that the call may access."""

    def __init__(self, kernel: Kernel, argument: bytes, at: tuple, grid: tuple, threads: int, shared: int, regions,
                 traced=False):  # fmt: skip
        self.kernel, self.at, self.grid, self.traced = kernel, at, grid, traced
        offset, size = kernel.parameters
        assert len(argument) <= size, f"expected an argument of at most {size} bytes, got {len(argument)}"
        bank = bytearray(offset + max(size, len(argument)) + 64)
        where, constants = LAUNCH[offset], (memory.CONSTANT << 56) + offset
        for at, form, *values in (
            (where["threads"], "<3I", threads, 1, 1), (where["grid"], "<3I", *grid), (where["stack"], "<I", STACK - 16),
            (where["local"], "<Q", memory.LOCAL << 56),
            (where["constants"], "<Q", constants if where["parameters"] else constants - offset),
        ):  # fmt: skip
            struct.pack_into(form, bank, at, *values)
        bank[offset : offset + len(argument)] = argument
        self.constants = bytes(bank)
        self.reserved = kernel.reserved
        self.shared = np.full(self.reserved + shared, 0xFF, np.uint8)
        self.touched, self.prefetched = memory.Touched(len(self.shared)), []
        self.coming = np.zeros(len(self.shared) // 4 + 1, bool)  # pending asynchronous copies
        self.regions = sorted(regions)
        self.views = [np.ctypeslib.as_array((ctypes.c_uint8 * n).from_address(a)) for a, n in self.regions]
        self.warps = [Warp(self, i) for i in range(threads // 32)]

    def run(self) -> "Block":
        stopped = [w.run() for w in self.warps]
        while "barrier" in stopped:
            if "done" in stopped:
                raise Fault(f"{self.kernel.name}: some warps returned without reaching a barrier")
            self.touched.clear()
            stopped = [w.run() for w in self.warps]
        return self

    def special(self, name: str, warp: Warp) -> np.ndarray:
        axes = "XYZ"
        if name == "SR_LANEID":
            return LANES.copy()
        if name.startswith("SR_TID"):
            return LANES + U(32 * warp.number) if name[-1] == "X" else np.zeros(32, U)
        if name.startswith("SR_CTAID"):
            return np.full(32, self.at[axes.index(name[-1])], U)
        if name == "SR_SWINHI":
            return np.full(32, memory.SHARED << 24, U)
        if name in ("SR_CgaCtaId", "SRZ", "SR_CLOCKLO"):
            return np.zeros(32, U)
        raise Fault(f"unsupported special register {name}")
