"""Mutation testing: small changes of the core, one at a time, each compiled and run with the C harness, which must
fail.

    python tests/mutants/mutants.py [--n 300] [--seed 1] [--only FILE] [--listed] [--jobs N]

Mutants are selected by hashes of file, line and change, so that edits elsewhere do not change the selection. Mutants
that do not compile, or have the object code of the original, do not count. Neither do changes of prefetches, which
affect only speed: code in functions named fetch_* or ahead_*, in statements that call fetch_* or __builtin_prefetch
(including their conditions), or in arguments for the prefetch distance `ahead`.

Mutants that the plain harness does not detect run again with AddressSanitizer and UBSan. Survivors are listed in
survivors.txt with explanations, which are kept from run to run. "equivalent:" marks those that no test can detect.
--listed tries only the mutants in the list."""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))
from record import record  # noqa: E402

CORE = "csrc/core"
FILES = ["codec/codec", "codec/codec_page", "attend/attend", "attend/attend_check", "attend/page_access",
         "attend/attend_work", "attend/attend_workspace", "attend/attend_latent", "attend/attend_order",
         "attend/attend_accumulated",
         "attend/attend_write", "memory/pool", "memory/space", "memory/units", "table/table_evict",
         "table/table_evict_plan", "table/table_restore", "evict/compact", "evict/choose", "evict/keep",
         "evict/score_tokens", "codec/quantize", "codec/granular", "kernels/scalar_codec", "kernels/scalar_attend",
         "kernels/rows.h"]  # fmt: skip
# Files that are compiled as part of others. Changes of a header apply to one level only, which the others must match.
UNITS = {"memory/pool": "tests/c/test_pool.c", "kernels/rows.h": f"{CORE}/kernels/scalar_codec.c"}
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
    text: str  # the original line, stripped
    again: int = 0  # number of equal lines before it in the file

    def key(self) -> str:
        before = self.text[: max(0, self.column)].count(self.old)
        again = f" again {self.again}" if self.again else ""
        return f"{path(self.file).name} | {self.text} | {self.kind}: {self.old} -> {self.new} #{before}{again}"


PROSE = r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|^#(?:\\\n|[^\n])*"
FETCH = [
    r"^static [^\n;{}]*\b(?:fetch|ahead)_\w+\([^;{}]*\)\n\{.*?^\}",
    r"^ +(?:if \([^;{}]*\) )?(?:fetch_\w+|__builtin_prefetch)\([^;{}]*\);",
    r"[^,;(]*\? 0 : ahead\b|[^,;(]*\? ahead_\w+\([^()]*\) : 0\b|\bahead = 0\b",
]


def blank(source: str) -> str:
    """Replaces comments, strings, preprocessor lines and prefetches by spaces of the same length."""
    for pattern in (PROSE, *FETCH):
        source = re.sub(pattern, lambda m: re.sub(r"[^\n]", " ", m.group()), source, flags=re.S | re.M)
    return source


def path(file: str) -> Path:
    return Path(CORE, file if file.endswith(".h") else f"{file}.c")


def candidates(file: str) -> list[Mutant]:
    source = (ROOT / path(file)).read_text()
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
    lines = (ROOT / path(m.file)).read_text().splitlines(keepends=True)
    line = lines[m.line - 1]
    at = m.column + len(line) - len(line.lstrip())
    assert line.startswith(m.old, at), m
    lines[m.line - 1] = line[:at] + m.new + line[at + len(m.old) :]
    return "".join(lines)


class Bench:
    """Objects of the whole harness, one of which is replaced by a mutant's. Each thread has a folder for that."""

    def __init__(self, name: str, options: list[str], seconds: int) -> None:
        self.folder, self.options, self.seconds = ROOT / "build" / "mutants" / name, options, seconds
        make = ["make", "-s", "-j2", "-f", "tests/c/Makefile", f"OUT={self.folder}",
                "OPTIONS=-O2 -g0 -DKVC_AMX_MODEL " + " ".join(options), "WARN=-w"]  # fmt: skip
        subprocess.run(make, cwd=ROOT, check=True)
        self.original = {file: self.compile(file, None) for file in FILES}
        for file in ("codec/codec", "memory/pool"):
            assert not self.killed(file, self.original[file]), f"the {name} harness fails without a mutant"

    def desk(self) -> Path:
        return self.folder / threading.current_thread().name

    def compile(self, file: str, source: str | None) -> bytes:
        """The object code of a file of the core with modified text; empty if it does not compile."""
        unit, tree, out = self.unit(file), self.desk() / "tree", self.desk() / "mutant.o"
        shutil.rmtree(tree, ignore_errors=True)
        for part in {unit, str(path(file))}:
            (tree / part).parent.mkdir(parents=True, exist_ok=True)
            (tree / part).write_text((ROOT / part).read_text())
        if source is not None:
            (tree / path(file)).write_text(source)
        places = [ROOT / CORE, (ROOT / CORE / file).parent, ROOT / "tests/c"]
        quotes = [part for place in places for part in ("-iquote", place)]
        command = [CC, *FLAGS, *self.options, *quotes, "-c", unit, "-o", out]
        failed = subprocess.run(command, cwd=tree, capture_output=True, check=False).returncode
        return b"" if failed else out.read_bytes()

    def unit(self, file: str) -> str:
        return UNITS.get(file, str(path(file)))

    def killed(self, file: str, code: bytes) -> bool:
        """Whether the harness fails, or takes more than this many seconds of CPU time in a process."""
        own, program = self.desk() / "mutant.o", self.desk() / "mutant"
        own.write_bytes(code)
        left_out = {self.folder / self.unit(file).replace(".c", ".o"), self.folder / CORE / "memory/pool.o",
                    self.folder / "tests/c/test_threads.o"}  # fmt: skip
        objects = {p for part in ("csrc", "tests") for p in (self.folder / part).glob("**/*.o")} - left_out
        subprocess.run([CC, *self.options, "-pthread", *sorted(objects), own, "-lm", "-o", program], check=True)
        child = subprocess.Popen(
            ["bash", "-c", f'ulimit -t {self.seconds}; exec "$0"', program],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            if child.wait(timeout=40 * self.seconds):
                return True
            return child.communicate(timeout=self.seconds)[0] != b"ok\n"
        except subprocess.TimeoutExpired:
            return True
        finally:
            try:
                os.killpg(child.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            child.communicate()


class Trial:
    def __init__(self) -> None:
        self.plain = Bench("plain", [], 10)
        self.lock = threading.Lock()

    @functools.cached_property
    def sanitized(self) -> Bench:
        return Bench("sanitized", SANITIZE, 60)

    def verdict(self, mutant: Mutant) -> str:
        source = apply(mutant)
        code = self.plain.compile(mutant.file, source)
        if code in (b"", self.plain.original[mutant.file]):
            return "none"
        if self.plain.killed(mutant.file, code):
            return "killed"
        with self.lock:
            sanitized = self.sanitized
        code = sanitized.compile(mutant.file, source)
        return "killed by sanitizers" if code and sanitized.killed(mutant.file, code) else "survived"


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
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    pool = drawn([m for file in ([args.only] if args.only else FILES) for m in candidates(file)], args.seed)
    if args.listed:
        listed = explanations()
        pool = [m for m in pool if m.key() in listed]
    tried, survivors, begin = Counter(), [], time.monotonic()
    kinds: Counter[str] = Counter()
    trial = Trial()
    with ThreadPoolExecutor(args.jobs) as threads:
        for mutant, verdict in zip(pool, threads.map(trial.verdict, pool), strict=True):
            tried[verdict] += 1
            if verdict != "none":
                kinds[mutant.kind] += 1
            if verdict == "survived":
                survivors.append(mutant)
                print(f"{kinds.total()}: {path(mutant.file)}:{mutant.line}: {mutant.key()}", flush=True)
            if kinds.total() == args.n or time.monotonic() - begin > 60 * args.minutes:
                break
        threads.shutdown(wait=False, cancel_futures=True)
    n, known = kinds.total(), explanations()
    whole = (args.only, args.listed, args.seed, n) == (None, False, 1, 300)
    head = f"""# Mutants that the C harness does not kill, of {n}: make mutants writes this list,
# and keeps what is said of each. file | line | change, and which of its kind in the line
"""
    body = [f"\n{key}\n    {known.get(key, 'unexplained')}\n" for key in sorted(m.key() for m in survivors)]
    if whole:
        LIST.write_text(head + "".join(body))
    equivalent = sum(known.get(m.key(), "").startswith("equivalent:") for m in survivors)
    unexplained = sum(known.get(m.key(), "unexplained") == "unexplained" for m in survivors)
    killed = n - len(survivors)
    figures = {
        "mutants": n,
        "killed": killed,
        "killed_by_sanitizers_alone": tried["killed by sanitizers"],
        "survivors": len(survivors),
        "equivalent": equivalent,
        "unexplained": unexplained,
        "percent": round(100 * killed / n, 1),
        "percent_without_equivalent": round(100 * killed / (n - equivalent), 1),
        "not_mutants": tried["none"],
    }
    if whole:
        record("mutants", "make mutants", **figures, **{f"kind_{kind}": times for kind, times in sorted(kinds.items())})
    else:
        print(figures)
    return int(killed < 0.9 * n or unexplained > 0)


if __name__ == "__main__":
    sys.exit(main())
