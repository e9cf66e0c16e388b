"""Counts the instructions of the NEON levels' attention kernels per page with qemu-user, and compares them with a
budget: `make aarch64-budget`.

A page has 64 tokens of 128 dims; there are four query rows per KV head (GQA 4). The count is what a second page adds to
scores and sums. The budget is derived from the multiply-adds: sdot does 16 byte products and usmmla 32 (for two limbs
of q and of the weights), fmla 4 of fp32, bfmmla 16 of bf16. Cycles are those of the executed instructions as one
straight run on llvm-mca's Neoverse V2, with pages in L1. Exits with 1 if a budget is exceeded."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile

TOKENS, DIM, ROWS = 64, 128, 4
FIRST_MCA = 18
MACS = 2 * TOKENS * DIM * ROWS  # scores and sums
BITS = {"int8": 8, "fp8_e4m3": 8, "int4": 4, "int2": 2, "raw_bf16": 16}
FLOATS = ("fp8_e4m3", "raw_bf16")
AT_ONCE = {"neon": (16, 4), "dotprod": (16, 4), "i8mm": (32, 16)}  # products per instruction of bytes, of floats
BUDGETS = {"dotprod": {"int8": 1.35, "fp8_e4m3": 1.35}, "i8mm": {"int8": 1.5}}
GHZ, WANTED_GB = 2.8, 15  # Neoverse V2 in Graviton4, per core
BRANCHES = ("b", "b.", "cbz", "cbnz", "tbz", "tbnz", "bl", "blr", "br", "ret")


def trace(program: str, level: str, name: str, calls: int) -> list[int]:
    """Addresses of all executed instructions."""
    with tempfile.NamedTemporaryFile("r") as log:
        qemu = ["qemu-aarch64", "-cpu", "max", "-singlestep", "-d", "exec,nochain", "-D", log.name]
        subprocess.run([*qemu, program, level, name, str(calls)], check=True)
        return [int(line.split("/")[1], 16) for line in log if line.startswith("Trace")]


def listing(program: str) -> tuple[dict[int, str], dict[int, str]]:
    """{address: instruction}, {address: function that starts there}."""
    out = subprocess.run(["aarch64-linux-gnu-objdump", "-d", "--no-show-raw-insn", program], capture_output=True,
                         text=True, check=True).stdout  # fmt: skip
    code, begins = {}, {}
    for line in out.splitlines():
        at, colon, text = line.partition(":\t")
        if colon:
            code[int(at, 16)] = text.split("//")[0].split("<")[0].replace("\t", " ").strip()
        elif line.endswith(">:"):
            begins[int(line.split()[0], 16)] = line.split("<")[1][:-2]
    return code, begins


def cycles(page: list[str], mca: str) -> float:
    """Cycles of a sequence of instructions, with perfect branch prediction and known data addresses."""
    straight = [x for x in page if x.split()[0].split(".")[0] not in (*BRANCHES, "adrp", "adr")]
    done = subprocess.run([mca, "-mtriple=aarch64", "-mcpu=neoverse-v2", "-iterations=1", "-all-views=false",
                           "-summary-view"], input="\n".join(straight), capture_output=True, text=True,
                          check=True)  # fmt: skip
    return next(float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("Total Cycles"))


def check_mca(mca: str) -> None:
    version = subprocess.run([mca, "--version"], capture_output=True, text=True, check=True).stdout
    major = int(re.search(r"LLVM version (\d+)", version).group(1))
    if major < FIRST_MCA:
        sys.exit(f"expected --mca of LLVM {FIRST_MCA} or later, which knows Neoverse V2, got LLVM {major} ({mca}): "
                 "apt-get install llvm-19, or leave it out with make MCA= aarch64-budget")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", help="one_page, compiled for aarch64")
    parser.add_argument("--mca", help=f"llvm-mca of LLVM {FIRST_MCA} or later, for cycles")
    options = parser.parse_args()
    if options.mca:
        check_mca(options.mca)
    code, begins = listing(options.program)
    missed = False
    print(
        "| level | format | instructions | products | ratio | budget | cycles, V2 | GB/s a core |\n" + "|---" * 8 + "|"
    )
    for level in ("neon", "dotprod", "i8mm"):
        for name, bits in BITS.items():
            if (level, name) == ("dotprod", "raw_bf16"):
                continue  # as on neon
            once, twice = (trace(options.program, level, name, n) for n in (1, 2))
            entry = next(x for x in twice if begins.get(x, "").endswith(f"_qk_{name}"))
            start, count = twice.index(entry, twice.index(entry) + 1), len(twice) - len(once)
            needed = MACS // AT_ONCE[level][1] if name in FLOATS else 2 * MACS // AT_ONCE[level][0]
            budget, ratio = BUDGETS.get(level, {}).get(name), count / needed
            row = [level, name, f"{count:,}", f"{needed:,}", f"{ratio:.2f}", budget or ""]
            missed |= bool(budget and ratio > budget)
            if options.mca:
                took = cycles([code[x] for x in twice[start : start + count]], options.mca)
                speed = 2 * TOKENS * DIM * bits / 8 / took * GHZ
                row += [f"{took:,.0f}", f"{speed:.1f}"]
            print("| " + " | ".join(map(str, row)) + " |", flush=True)
    sys.exit(missed)


if __name__ == "__main__":
    main()
