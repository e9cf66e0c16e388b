"""Records results of the tools around the tests, one flat JSON file per tool:
benchmarks/results/reliability/<tool>.json, with the date (UTC) and the commit ("+": with uncommitted changes).

    python tests/support/record.py TOOL COMMAND name=value ..."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks" / "results" / "reliability"
LEFT = (
    "benchmarks/results/reliability",
    "tests/fuzz/log.jsonl",
)  # written by tools that ran before; does not affect what is tested


def git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:  # git is not available
        return None
    return None if done.returncode else done.stdout.strip()


def commit() -> str:
    name = git("rev-parse", "--short", "HEAD")
    changed = git("status", "--porcelain", "--", ".", *(f":!{path}" for path in LEFT))
    return "unknown" if name is None else name + ("+" if changed else "")


def record(tool: str, command: str, **figures: object) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    day = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    made = {"command": command, "date": day, "commit": commit()}
    (FOLDER / f"{tool}.json").write_text(json.dumps({**made, **figures}, indent=2) + "\n")
    print(f"{tool}:", ", ".join(f"{name} {value}" for name, value in figures.items()))


def number(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    record(sys.argv[1], sys.argv[2], **{k: number(v) for k, v in (pair.split("=", 1) for pair in sys.argv[3:])})
