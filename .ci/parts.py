"""The parts of `.ci/parts` in the order in which this commit runs them: `python3 .ci/parts.py [COMMITS]`.

Commits take turns: one begins where the hour of the one before it ends, so that every part runs in every few commits.
COMMITS is their number so far; of a shallow clone, which cannot tell, the commit's hash is taken instead.
"""

import subprocess
import sys
from pathlib import Path

TABLE = Path(__file__).with_name("parts")
HOUR = 60  # about what is left of 75 minutes when `make test` is done


def parts():
    """(minutes, tools, command) of each line."""
    lines = [line.split("\t") for line in TABLE.read_text().splitlines() if line and not line.startswith("#")]
    return [(int(minutes), tools, command) for minutes, tools, command in lines]


def order(commits):
    table, at, first = parts(), commits * HOUR, 0
    at %= sum(minutes for minutes, _, _ in table)
    while at >= table[first][0]:
        at -= table[first][0]
        first += 1
    return table[first:] + table[:first]


def git(*arguments):
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()


def number():
    if git("rev-parse", "--is-shallow-repository") == "true":
        return int(git("rev-parse", "HEAD")[:8], 16)
    return int(git("rev-list", "--count", "HEAD"))


if __name__ == "__main__":
    for part in order(int(sys.argv[1]) if sys.argv[1:] else number()):
        print(*part, sep="\t")
