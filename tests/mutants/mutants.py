"""Mutants: small changes of the core, one at a time, each compiled and run with the C harness, which must fail.

    python tests/mutants/mutants.py [--n 300] [--seed 1] [--only FILE] [--listed]

Which ones are tried is a matter of hashes of file, line and change: an edit elsewhere leaves the others where they are.
A mutant that does not compile, or whose object code is the original's, is none. Nor is one of prefetches alone, whose
only effect is speed: what stands in a function named fetch_* or ahead_*, in a statement that calls fetch_* or
__builtin_prefetch (its condition included), or in an argument that says how far `ahead` is fetched.

Those that the plain harness lets through meet it once more under AddressSanitizer and UBSan. What survives is listed in
survivors.txt, with what is known of it: explanations stay there from run to run. "equivalent:" begins that of one that
no test can tell. --listed tries only those that the list has.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from record import record  # noqa: E402

CORE = "csrc/core"
FILES = ["codec/codec", "codec/codec_page", "attend/attend", "attend/attend_check", "attend/attend_work",
         "attend/attend_mass", "attend/attend_write", "memory/pool", "table/table_evict", "table/table_evict_plan",
         "evict/compact"]  # fmt: skip
LIST = Path(__file__).parent / "survivors.txt"
CC = os.environ.get("CC", "cc")
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-g0", "-O1", "-ffp-contract=off", "-pthread", "-w"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
SWAPS = {
    "relational": {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="},
    "arithmetic": {"+": "-", "-": "+", "*": "/", "/": "*", "%": "*", "+=": "-=", "-=": "+=", "|": "&", "<<": ">>"},
    "logical": {"&&": "||", "||": "&&"},
}


@dataclass(frozen=True)
class Mutant:
    file: str
    line: int  # from 1
    column: int
    old: str
    new: str
    kind: str
    text: str  # the line as it was, without spaces around
    again: int = 0  # equal ones before it in the file

    def key(self) -> str:
        before = self.text[: max(0, self.column)].count(self.old)
        again = f" again {self.again}" if self.again else ""
        return f"{Path(self.file).name}.c | {self.text} | {self.kind}: {self.old} -> {self.new} #{before}{again}"


PROSE = r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|^#(?:\\\n|[^\n])*"
FETCH = [
    r"^static [^\n;{}]*\b(?:fetch|ahead)_\w+\([^;{}]*\)\n\{.*?^\}",
    r"^ +(?:if \([^;{}]*\) )?(?:fetch_\w+|__builtin_prefetch)\([^;{}]*\);",
    r"[^,;(]*\? 0 : ahead\b|[^,;(]*\? ahead_\w+\([^()]*\) : 0\b|\bahead = 0\b",
]


def blank(source: str) -> str:
    """Comments, strings, preprocessor lines and prefetches as spaces; nothing moves."""
    for pattern in (PROSE, *FETCH):
        source = re.sub(pattern, lambda m: re.sub(r"[^\n]", " ", m.group()), source, flags=re.S | re.M)
    return source


def candidates(file: str) -> list[Mutant]:
    source = (ROOT / CORE / f"{file}.c").read_text()
    found = []
    for number, (line, full) in enumerate(zip(blank(source).splitlines(), source.splitlines(), strict=True), 1):
        text, indent = full.strip(), len(full) - len(full.lstrip())

        def add(at: int, old: str, new: str, kind: str) -> None:
            found.append(Mutant(file, number, at - indent, old, new, kind, text))  # noqa: B023

        if not line.startswith(" "):
            continue  # declarations
        for kind, swap in SWAPS.items():
            for m in re.finditer(r"(?<= )([<>=!+\-*/%|&]+)(?= )", line):
                if m.group() in swap:
                    add(m.start(), m.group(), swap[m.group()], kind)
        for m in re.finditer(r"(?<![\w.])(\d+)(?![\w.])", line):
            add(m.start(), m.group(), str(int(m.group()) + 1), "constant")
        for m in re.finditer(r"!(?=[\w(])", line):
            add(m.start(), "!", "", "negation")
        m = re.fullmatch(r" +(?! )((?!return|case|default|goto|else)[^{}]*?(\(|=|\+\+|--)[^{}]*;)\s*", line)
        if m and not re.match(r"(const )?(static )?\w+ [*\w]+(\[.*\])?( =|;|,|\[)", m.group(1)):
            add(m.start(1), full[m.start(1) : m.end(1)], ";", "dropped")
    times: Counter[str] = Counter()
    for i, mutant in enumerate(found):
        found[i] = replace(mutant, again=times[mutant.key()])
        times[mutant.key()] += 1
    return found


def drawn(pool: list[Mutant], seed: int) -> list[Mutant]:
    return sorted(pool, key=lambda m: hashlib.sha256(f"{seed} {m.key()}".encode()).digest())


def apply(m: Mutant) -> str:
    lines = (ROOT / CORE / f"{m.file}.c").read_text().splitlines(keepends=True)
    line = lines[m.line - 1]
    at = m.column + len(line) - len(line.lstrip())
    assert line.startswith(m.old, at), m
    lines[m.line - 1] = line[:at] + m.new + line[at + len(m.old) :]
    return "".join(lines)


class Bench:
    """Objects of the whole harness, of which one is exchanged for a mutant's."""

    def __init__(self, name: str, options: list[str]) -> None:
        self.folder, self.options = ROOT / "build" / "mutants" / name, options
        make = ["make", "-s", "-j2", "-f", "tests/c/Makefile", f"OUT={self.folder}",
                "OPTIONS=-O2 -g0 -DKVC_AMX_MODEL " + " ".join(options), "WARN=-w"]  # fmt: skip
        subprocess.run(make, cwd=ROOT, check=True)
        self.original: dict[str, bytes] = {}

    def compile(self, file: str, source: str | None) -> bytes | None:
        """The object code of <file>.c of the core with other text."""
        unit, tree = self.unit(file), self.folder / "tree"
        for part in ((tree / CORE / file).parent, tree / "tests/c"):
            part.mkdir(parents=True, exist_ok=True)
        text = source if source is not None else (ROOT / CORE / f"{file}.c").read_text()
        (tree / CORE / f"{file}.c").write_text(text)
        if unit.startswith("tests/"):
            (tree / unit).write_text((ROOT / unit).read_text())
        out = self.folder / "mutant.o"
        command = [
            CC,
            *FLAGS,
            *self.options,
            "-iquote",
            ROOT / CORE,
            "-iquote",
            (ROOT / CORE / file).parent,
            "-iquote",
            ROOT / "tests/c",
            "-c",
            unit,
            "-o",
            out,
        ]
        if subprocess.run(command, cwd=tree, capture_output=True, check=False).returncode:
            return None
        return out.read_bytes()

    def unit(self, file: str) -> str:
        return "tests/c/test_pool.c" if file == "memory/pool" else f"{CORE}/{file}.c"

    def same(self, file: str, code: bytes) -> bool:
        if file not in self.original:
            self.original[file] = self.compile(file, None) or b""
        return code == self.original[file]

    def killed(self, file: str, code: bytes, seconds: int) -> bool:
        """Does the harness fail, or take more than so many seconds of CPU (others may be at work) in a process?"""
        (self.folder / "mutant.o").write_bytes(code)
        replaced = self.folder / self.unit(file).replace(".c", ".o")
        objects = [p for p in self.folder.glob("*/**/*.o") if p != replaced and p.name != "test_threads.o"]
        objects = [p for p in objects if p != self.folder / CORE / "memory/pool.o"]
        program = self.folder / "mutant"
        subprocess.run(
            [CC, *self.options, "-pthread", *objects, self.folder / "mutant.o", "-lm", "-o", program], check=True
        )
        limit = (seconds, seconds)
        child = subprocess.Popen(
            [program],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, limit),
        )
        try:
            if child.wait(timeout=40 * seconds):
                return True
            return child.communicate(timeout=seconds)[0] != b"ok\n"
        except subprocess.TimeoutExpired:
            return True
        finally:
            try:
                os.killpg(child.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            child.communicate()


def explanations() -> dict[str, str]:
    known, key = {}, ""
    for line in LIST.read_text().splitlines() if LIST.exists() else []:
        if line.startswith("    "):
            known[key] = line.strip()
        elif line.strip() and not line.startswith("#"):
            key = line
    return known


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=300)
    parser.add_argument("--minutes", type=float, default=1e9, help="no new mutant after so many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="a file of FILES")
    parser.add_argument("--listed", action="store_true")
    args = parser.parse_args()
    known = explanations()
    pool = drawn([m for file in ([args.only] if args.only else FILES) for m in candidates(file)], args.seed)
    if args.listed:
        pool = [m for m in pool if m.key() in known]
    plain, sanitized, begin = Bench("plain", []), None, time.monotonic()
    for file in ("codec/codec", "memory/pool"):
        assert not plain.killed(file, plain.compile(file, None) or b"", 15), "the harness fails without a mutant"
    survivors, tried, kinds, none, by_sanitizer = [], 0, Counter(), 0, 0
    for mutant in pool:
        if tried == args.n or time.monotonic() - begin > 60 * args.minutes:
            break
        code = plain.compile(mutant.file, apply(mutant))
        if code is None or plain.same(mutant.file, code):
            none += 1
            continue
        tried += 1
        kinds[mutant.kind] += 1
        if plain.killed(mutant.file, code, 15):
            continue
        if not sanitized:
            sanitized = Bench("sanitized", SANITIZE)
            whole = sanitized.compile("codec/codec", None) or b""
            assert not sanitized.killed("codec/codec", whole, 60), "the harness fails under sanitizers without a mutant"
        code = sanitized.compile(mutant.file, apply(mutant))
        if code is not None and sanitized.killed(mutant.file, code, 60):
            by_sanitizer += 1
            continue
        survivors.append(mutant)
        print(f"{tried}: {CORE}/{mutant.file}.c:{mutant.line}: {mutant.key()}", flush=True)
    whole = args.only is None and tried == args.n and not args.listed
    head = f"""# Mutants that the C harness does not kill, of {tried} (seed {args.seed}): make mutants writes this list,
# and keeps what is said of each. file | line | change, and which of its kind in the line
"""
    body = [f"\n{key}\n    {known.get(key, 'unexplained')}\n" for key in sorted(m.key() for m in survivors)]
    if whole:
        LIST.write_text(head + "".join(body))
    equivalent = sum(known.get(m.key(), "").startswith("equivalent:") for m in survivors)
    unexplained = sum(m.key() not in known for m in survivors)
    killed = tried - len(survivors)
    figures = {
        "mutants": tried,
        "killed": killed,
        "killed_by_sanitizers_alone": by_sanitizer,
        "survivors": len(survivors),
        "equivalent": equivalent,
        "unexplained": unexplained,
        "percent": round(100 * killed / tried, 1),
        "percent_without_equivalent": round(100 * killed / (tried - equivalent), 1),
        "not_mutants": none,
    }
    if whole and tried == 300:
        record("mutants", "make mutants", **figures, **{f"kind_{k}": n for k, n in sorted(kinds.items())})
    else:
        print(figures)
    return int(killed < 0.9 * tried or unexplained > 0)


if __name__ == "__main__":
    sys.exit(main())
