"""Writes docs/speculation.md from what benchmarks/speculation.py measured; part of `make docs`."""

import json
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
HEAD = """# Speculative decoding
Made by `make docs` from the results of `benchmarks/speculation.py`.

Tutorials say that a quantized cache costs 0.3 to 1.5 accepted tokens. Measured on the shipped models: {windows} passages
of a book, {context:,} tokens each, go on by {new} tokens, greedily, fused, on {threads} thread of an {cpu}. *Accepted*:
new tokens per forward pass of the model (1 without drafts), with the 95% interval of the mean over passages; in brackets
against raw pages on the same passages. *Speed-up*: against the same cache without drafts, at the draft length (2, 4, 8)
that is best for the format. The assistant is the other shipped model, as large as the model itself: look at what is
accepted, not at its speed.
"""


def number(mean: float, half: float, sign: str = "") -> str:
    return f"{mean:{sign}.2f} ± {half:.2f}"


def table(rows: list[dict], kind: str) -> list[str]:
    lines = ["| cache | " + " | ".join(f"accepted, {n} drafts" for n in (2, 4, 8)) + " | best | speed-up | ms/token |"]
    lines.append("|---" * 7 + "|")
    formats = list(dict.fromkeys(r["format"] for r in rows))
    for name in formats:
        own = {int(r["method"].split()[1]): r for r in rows if r["format"] == name and r["method"].startswith(kind)}
        cells = []
        for r in own.values():
            against = "" if name == "raw" else f" ({number(*r['against_raw'], sign='+')})"
            cells.append(number(*r["accepted"]) + against)
        best = min(own, key=lambda n: own[n]["ms_per_token"])
        label = "DynamicCache" if name == "dynamic" else f"`{name}`"
        speed = number(*own[best]["speed_up"])
        lines.append(f"| {label} | {' | '.join(cells)} | {best} | {speed} | {own[best]['ms_per_token']:.2f} |")
    return lines


def page(text: Callable[[dict], str]) -> str:
    found = json.loads((RESULTS / "speculation.json").read_text())
    machine = found["machine"]
    head = HEAD.format(windows=found["windows"], context=found["context"], new=found["new"], **machine)
    parts = [head, text(found)]
    for model in dict.fromkeys(r["model"] for r in found["rows"]):
        rows = [r for r in found["rows"] if r["model"] == model]
        for kind, what in (("lookup", "prompt lookup"), ("assistant", "an assistant")):
            parts.append(f"## `{model}`, {what}\n" + "\n".join(table(rows, kind)) + "\n")
    return "\n".join(parts)
