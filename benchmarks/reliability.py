"""What the library was tested with, in numbers: docs/reliability.md.

    make reliability        # counts what can be counted, and writes the page from benchmarks/results/reliability/*.json

Every tool leaves its figures there: `<tool>.json`, numbers by name, "command", which makes them anew, "date" and
"commit" of the run.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from record import FOLDER, record  # noqa: E402

PAGE = ROOT / "docs" / "reliability.md"
HEAD = """# Reliability
Made by `make reliability`: what can be counted is counted, the rest is what each tool left when it last ran, with the
command that runs it again, the day (UTC) and the commit (`+`: with changes since it; `-`: from before this was noted).
A bug that a tool finds becomes a test of the suite.

"""


def counted() -> dict[str, int]:
    """Tests and assertions, by their sources and by pytest."""
    python = sorted((ROOT / "tests").rglob("*.py"))
    asserts = sum(isinstance(x, (ast.Assert,)) for path in python for x in ast.walk(ast.parse(path.read_text())))
    raises = sum(path.read_text().count("pytest.raises(") for path in python)
    in_c = [path.read_text() for path in (ROOT / "tests" / "c").glob("*.c")]
    c = sum(len(re.findall(r"\b(?:CHECK|OK|FAILS)\w*\(", text)) for text in in_c)
    found = {}
    for name, mark in (("tests of every commit", "not full and not soak"), ("tests in all", "full or not full")):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", mark, "tests"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        found[name] = int(re.search(r"^(\d+)(?:/\d+)? tests", done.stdout.splitlines()[-1])[1])  # type: ignore[index]
    return {**found, "files of tests": sum(path.name.startswith("test_") for path in python),
            "assertions in Python": asserts + raises, "assertions in C": c}  # fmt: skip


def page(found: dict[str, dict]) -> str:
    lines = ["| tool | when | what | figure |", "|---|---|---|---|"]
    for tool, numbers in found.items():
        about = {"date": "-", "commit": ""} | numbers
        first = f"{tool}: `{about['command']}` | {about['date']} {about['commit']}".rstrip()
        for i, (name, x) in enumerate((k, v) for k, v in numbers.items() if k not in ("command", "date", "commit")):
            shown = f"{x:,}" if isinstance(x, (int, float)) else str(x)
            lines.append(f"| {' | ' if i else first} | {name.replace('_', ' ')} | {shown} |")
    return HEAD + "\n".join(lines) + "\n" + TAIL


TAIL = """
- **tests**: float64 or eager references that share no code with what they test; properties and state machines.
- **matrix**: rows over formats of K and V, policy, positions, page size, open page, heads, dims, padding, ways to
  generate, prefixes, tiers, windows, attention, fixed length, kernel level and dtype, in which every two (soak: three)
  values that go together stand together; each beside a reference that decodes the pages' bytes by itself. `make matrix`
  writes what goes together to `docs/support.md`.
- **faults**: the n-th allocation fails, for every n; a full disk, one that nobody may write, Ctrl-C at many places, a
  full pool, a fork. Then: the right error, nothing lost, and what comes next equals a run without the fault.
- **planted**: bugs put into the sources one at a time; do the tests of that layer fail?
"""


def main() -> None:
    record("tests", "make reliability", **counted())
    found = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
    PAGE.write_text(page(found))
    print(PAGE.read_text())


if __name__ == "__main__":
    main()
