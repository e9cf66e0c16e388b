"""Figures of the tools around the tests, one flat JSON file a tool: benchmarks/results/reliability/<tool>.json.

python tests/record.py TOOL COMMAND name=value ...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "reliability"


def record(tool: str, command: str, **figures: object) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{tool}.json").write_text(json.dumps({"command": command, **figures}, indent=2) + "\n")
    print(f"{tool}:", ", ".join(f"{name} {value}" for name, value in figures.items()))


def number(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    record(sys.argv[1], sys.argv[2], **{k: number(v) for k, v in (pair.split("=", 1) for pair in sys.argv[3:])})
