"""What goes together: runs the rows of the matrix in which every two values stand together, on every kernel level, and
writes docs/support.md from what passed.

    make matrix       # some minutes
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections import Counter

from reliability import ROOT

sys.path.insert(0, str(ROOT / "tests" / "support"))
import matrix
import matrix_rows
from record import record

PAGE = ROOT / "docs" / "support.md"
FEATURES = ("policy", "positions", "padding", "mode", "prefix", "tier", "layer", "attention", "store", "open")
WORDS = {
    "mode": "way to generate", "open": "open page", "dim": "head dim (K/V)", "heads": "KV heads x group",
    "layer": "first layer", "store": "length", "level": "kernels", "tier": "pages wait in",
}  # fmt: skip
WHEN = {
    "new": "when the cache is made", "prefix": "when the `PrefixCache` is made",
    "record": "when drafts are announced (`activate_past_recording`)", "call": "at the first call",
}  # fmt: skip
HEAD = """# What goes together
Made by `make matrix` from the rows that passed, which it runs. A row is a value of each axis; in {rows} rows every two
values that go together stand together at least once, and in each row every attention output of two layers is compared
with float64 attention over what a reference reads out of the pages' bytes, which tokens are held with what the policy's
definition says (SnapKV, AdaKV: how many, and which are protected; tests/eviction/test_policies.py has what they
choose), and what they hold with the exact keys and values. `make soak` does so for every three values. `cuda`:
the CUDA kernels compiled for the host, tensors on a device that torch takes for another (docs/cuda.md).

## Axes
"""
TAIL = """
Everything else on this page goes together, but for what means nothing (an option of one policy given to another) and a
policy before sdpa whose rows are not one prompt's (pads, beams, selected rows), where our attention is expected. A
refusal says what was expected, what was got and what to do instead, before any token is stored;
[with transformers](huggingface.md) and [memory](memory.md) say why.
"""


def said(rule: matrix_rows.Rule) -> str:
    """The refusal, word for word."""
    values = {axis: names[-1] for axis, names in rule.values.items()}
    try:
        matrix.refuse(matrix_rows.plainest(values), rule.where)
    except ValueError as error:
        return str(error)
    raise AssertionError(f"{values} is not refused")


def names_of(axis: str, names: tuple[str, ...]) -> str:
    every = matrix_rows.AXES[axis]
    left_out = [x for x in every if x not in names]
    shown = ", ".join(names) if len(left_out) > 3 or not left_out else "all but " + ", ".join(left_out)
    return f"{WORDS.get(axis, axis)}: {shown}"


def page(passed: list[matrix_rows.Row]) -> str:
    counts = Counter((axis, x) for row in passed for axis, x in row._asdict().items())
    lines = ["| axis | values (rows that passed) |", "|---|---|"]
    for axis, names in matrix_rows.AXES.items():
        lines.append(f"| {WORDS.get(axis, axis)} | {', '.join(f'{x} ({counts[axis, x]})' for x in names)} |")
    lines += ["", "## Refused", "| what | with | when | what is said |", "|---|---|---|---|"]
    for rule in matrix_rows.RULES:
        first, *rest = (names_of(axis, names) for axis, names in rule.values.items())
        lines.append(f"| {first} | {'; '.join(rest)} | {WHEN[rule.where]} | {said(rule).replace('|', chr(92) + '|')} |")
    lines += ["", "## By two", "Rows that passed with both; - where the two are refused together.", ""]
    columns = [(axis, x) for axis in FEATURES for x in matrix_rows.AXES[axis][1:]]
    pairs = Counter(
        pair for row in passed for pair in itertools.product(zip(matrix_rows.AXES, row, strict=True), repeat=2)
    )  # fmt: skip
    lines += ["| | " + " | ".join(x for _, x in columns) + " |", "|" + "---|" * (len(columns) + 1)]
    for a, x in columns:
        cells = [str(pairs[(a, x), (b, y)] or "-") if a != b else "" for b, y in columns]
        lines.append(f"| **{x}** | " + " | ".join(cells) + " |")
    return HEAD.format(rows=f"{len(passed):,}") + "\n".join(lines) + "\n" + TAIL


def main() -> None:
    start, results = time.monotonic(), {}
    for level in matrix_rows.AXES["level"]:
        results |= matrix.run_level(level, 2)
    bad = {row: text for row, text in results.items() if text}
    print(f"{len(results)} rows in {time.monotonic() - start:.0f} s, {len(bad)} failed")
    for row, text in bad.items():
        print(row, text, sep="\n    ")
    if bad:
        sys.exit(1)
    passed = [matrix_rows.Row(*row.split("|")) for row in results]
    PAGE.write_text(page(passed))
    refused = sum(len(max(rule.values.values(), key=len)) for rule in matrix_rows.RULES)
    pairs = {
        frozenset(pair) for row in passed for pair in itertools.combinations(zip(matrix_rows.AXES, row, strict=True), 2)
    }  # fmt: skip
    record(
        "matrix",
        "make matrix",
        rows=len(passed),
        pairs_of_values=len(pairs),
        axes=len(matrix_rows.AXES),
        refusals=refused,
    )
    print(json.dumps(Counter(row.level for row in passed)))


if __name__ == "__main__":
    main()
