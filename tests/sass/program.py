"""Reads a kernel's machine code from a cubin: instructions as printed by nvdisasm, source lines, encoded control
bits, constants. nvdisasm is in PyPI's nvidia-cuda-nvdisasm."""

import re
import shutil
import struct
import subprocess
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

BIN = [str(p) for p in Path(sysconfig.get_paths()["purelib"]).glob("nvidia/*/bin")]


def tool(name: str) -> str | None:
    found = shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin:/usr/local/bin")
    return found or shutil.which(name, path=":".join(BIN))


@dataclass(frozen=True)
class Operand:
    """A register, predicate, constant, address, label or number of an instruction."""

    text: str
    kind: str  # R, UR, P, UP, const, address, label, number, name
    index: int = -1  # of a register or predicate; -1: RZ or PT
    minus: bool = False
    invert: bool = False
    absolute: bool = False
    part: str = ""  # .H1, .B0, ..
    bank: int = 0
    terms: tuple = ()  # of an address: operands and numbers

    def next(self, i: int) -> "Operand":
        """The i-th register after this one."""
        return self if i == 0 or self.index < 0 else Operand(self.text, self.kind, self.index + i)


@dataclass
class Instruction:
    address: int
    text: str
    name: str
    modifiers: tuple[str, ...]
    behind: str  # operands, after the name
    guard: Operand | None
    lines: tuple = ()  # (file, line), innermost first
    control: tuple = ()  # stall, yield, write barrier, read barrier, barriers waited for
    handler: Callable | None = None  # set when it first runs

    @property
    def key(self) -> str:
        """The name under which a handler of register pairs is found."""
        return f"{self.name}.64" if {"64", "S64", "U64"} & set(self.modifiers) else self.name

    @cached_property
    def operands(self) -> list[Operand]:
        """Parsed on first use: most of a large kernel never runs."""
        found = [operand(x) for x in _split(self.behind.replace(".reuse", ""))]
        if self.name in ("BRX", "BRXU") and found:  # "R4 -0x210": a register and an offset
            return [operand(x) for x in found[0].text.split()]
        return [operand(self.behind.split()[0])] if self.name == "RET" else found

    @property
    def opcode(self) -> str:
        return ".".join((self.name, *self.modifiers))


def _split(text: str) -> list[str]:
    out, depth = [""], 0
    for c in text:
        depth += (c in "[(") - (c in "])")
        if c == "," and depth == 0:
            out.append("")
        else:
            out[-1] += c
    return [x.strip() for x in out if x.strip()]


def _terms(text: str) -> tuple:
    parts = re.findall(r"(-?)\s*([^+\-]+)", text)
    return tuple(operand(sign + part.strip()) for sign, part in parts)


def operand(text: str) -> Operand:
    minus, rest = text.startswith("-"), text.lstrip("-")
    invert = rest.startswith(("~", "!"))
    rest = rest.lstrip("~!")
    absolute = rest.startswith("|")
    rest = rest.strip("|")
    flags = {"minus": minus, "invert": invert, "absolute": absolute}
    if m := re.fullmatch(r"(U?)(R|P)(\d+|Z|T)((?:\.[\w]+)*)\|?((?:\.[\w]+)*)", rest):
        index = -1 if m[3] in "ZT" else int(m[3])
        return Operand(text, m[1] + m[2], index, part=m[4] + m[5], **flags)
    if m := re.fullmatch(r"c\[(0x[0-9a-f]+)\]\[(.*)\]((?:\.\w+)*)", rest):
        return Operand(text, "const", bank=int(m[1], 16), terms=_terms(m[2]), part=m[3], **flags)
    if m := re.fullmatch(r"(?:desc\[\w+\])?\[(.*)\]", rest):
        return Operand(text, "address", terms=_terms(m[1]))
    if m := re.search(r"`\((.*?)\)", rest):
        return Operand(m[1], "label")
    if re.fullmatch(r"(0x[0-9a-f]+|\d+(\.\d*)?(e[+-]?\d+)?|\+?(INF|QNAN|SNAN)|\.\d+)", rest, re.IGNORECASE):
        return Operand(rest, "number", **flags)
    return Operand(text, "name")


def parse(address: int, text: str) -> Instruction:
    text = re.sub(r"\(\*.*?\*\)", "", text).strip()
    guard = re.match(r"@(!?U?P\w+)\s+(.*)", text)
    head, _, behind = (guard[2] if guard else text).partition(" ")
    name, *modifiers = head.split(".")
    return Instruction(address, text, name, tuple(modifiers), behind, operand(guard[1]) if guard else None)


class Elf:
    """Sections of a cubin by name."""

    def __init__(self, path: Path):
        data = path.read_bytes()
        at, size, count, names = struct.unpack_from("<Q", data, 40)[0], *struct.unpack_from("<HHH", data, 58)
        headers = [struct.unpack_from("<IIQQQQIIQQ", data, at + size * i) for i in range(count)]
        strings = headers[names][4]
        self.sections = {}
        for h in headers:
            end = data.index(b"\0", strings + h[0])
            self.sections[data[strings + h[0] : end].decode()] = data[h[4] : h[4] + h[5]] if h[1] != 8 else b""


@dataclass
class Kernel:
    name: str
    code: list[Instruction]
    labels: dict[str, int]
    constants: bytes  # bank 2..4, as in the code
    parameters: tuple[int, int]  # offset and size in bank 0
    reserved: int = 0  # bytes at the start of shared memory that are reserved for the system

    @cached_property
    def multiplies(self) -> bool:
        """Whether the kernel uses tensor cores."""
        return any(x.name in ("HMMA", "IMMA") for x in self.code)

    @cached_property
    def addresses(self) -> dict[int, int]:
        return {x.address: i for i, x in enumerate(self.code)}


def _parameters(info: bytes) -> tuple[int, int]:
    """EIATTR_PARAM_CBANK of .nv.info.<kernel>: offset and size of the parameters in constant bank 0."""
    at = 0
    while at + 4 <= len(info):
        kind, what, value = struct.unpack_from("<BBH", info, at)
        at += 4
        if kind != 4:
            continue
        if what == 0x0A:
            return struct.unpack_from("<HH", info, at + 4)
        at += value
    raise ValueError("expected EIATTR_PARAM_CBANK in the cubin, got none")


def load(cubin: Path, name: str, arch: int) -> Kernel:
    """The kernel `name` of a cubin that was compiled with -lineinfo."""
    listing = subprocess.run(
        [tool("nvdisasm"), "-g", "-c", str(cubin)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    elf = Elf(cubin)
    code, labels, lines, inside, after_line = [], {}, [], False, False
    for line in listing:
        if m := re.match(r"\s*\.section\s+(\S+?),", line):
            inside = m[1] == f".text.{name}"
        if not inside:
            continue
        if m := re.match(r'\s*//## File "([^"]+)", line (\d+)', line):
            lines = [*lines, (m[1].split("/")[-1], int(m[2]))] if after_line else [(m[1].split("/")[-1], int(m[2]))]
            after_line = True
        elif m := re.match(r"(\.L_x_\d+|[\w.$]+):\s*$", line):
            labels[m[1]] = len(code)
        elif m := re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", line):
            code.append(parse(int(m[1], 16), m[2]))
            code[-1].lines = tuple(lines)
            after_line = False
    text = elf.sections[f".text.{name}"]
    for x in code:
        bits = int.from_bytes(text[x.address + 8 : x.address + 16], "little") >> 41
        x.control = bits & 15, bits >> 4 & 1, bits >> 5 & 7, bits >> 8 & 7, bits >> 11 & 63
    constants = next((v for k, v in elf.sections.items() if re.fullmatch(rf"\.nv\.constant[24]\.{name}", k)), b"")
    parameters = _parameters(elf.sections[f".nv.info.{name}"])
    return Kernel(name, code, labels, constants, parameters, 1024 if arch >= 90 else 0)
