"""Writes docs/speculation.md from what benchmarks/speculation.py measured; part of `make docs`."""

import json
import textwrap
from pathlib import Path

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
HEAD = """# Speculative decoding
Made by `make docs` from the results of `benchmarks/speculation.py`.

Tutorials say that a quantized cache costs 0.3 to 1.5 accepted tokens. Measured on the shipped models: {windows}
passages of a book, {context:,} tokens each, go on by {new} tokens, greedily, fused, on {threads} thread of an {cpu}.
*Accepted*: new tokens per forward pass of the model (1 without drafts), with the 95% interval of the mean over
passages; in brackets against raw pages on the same passages. *Speed-up*: against the same cache without drafts, at the
draft length (2, 4, 8) that is best for the format. The assistant is the other shipped model, as large as the model
itself: look at what is accepted, not at its speed.
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


def verdict(found: dict) -> str:
    """What the rows say of the claim; computed, so that it cannot differ from them."""

    def lowest(names: tuple[str, ...]) -> dict:
        return min((r for r in found["rows"] if r["format"] in names), key=lambda r: r["against_raw"][0])

    def lost(names: tuple[str, ...]) -> list[dict]:
        return [r for r in found["rows"] if r["format"] in names and sum(r["against_raw"]) < 0]

    def told(row: dict) -> str:
        return f"{number(*row['against_raw'], sign='+')} (`{row['format']}`, `{row['model']}`, {row['method']} drafts)"

    good, worst = lowest(("int8", "fp8_e4m3", "int4")), lowest(("int4_token", "int2"))
    clear = lost(("int8", "fp8_e4m3", "int4"))
    zero = "none of them" if not clear else f"{len(clear)} of them"
    truth = f"""**What is true.** `int8`, `fp8_e4m3` and `int4` cost nothing that these passages show: the largest
        difference is {told(good)}, and the interval leaves out zero for {zero}. Drafts are checked against what the
        *same* cache says, so a cache is felt only where it changes what the model says, and then one text is compared
        with another, which widens the intervals. Differences of the claimed size appear where a format breaks the
        keys, at the edge of what so many passages can tell: {told(worst)}. Per-token 4 bits on biased keys is what
        tutorials build, and what `KVCache` warns of."""
    length = """**The best length** is set by what a pass over n + 1 tokens costs against one over a single token,
        hardly by the format. On models this small that is Python: drafts gain little or lose, with any cache. They pay
        where reading weights and pages takes the time; smaller pages make the single token cheaper too, so the *ratio*
        can fall while every number improves: compare ms/token."""
    return "\n\n".join(textwrap.fill(" ".join(x.split()), 118) for x in (truth, length)) + "\n"


def page() -> str:
    found = json.loads((RESULTS / "speculation.json").read_text())
    machine = found["machine"]
    head = HEAD.format(windows=found["windows"], context=found["context"], new=found["new"], **machine)
    parts = [head, verdict(found)]
    for model in dict.fromkeys(r["model"] for r in found["rows"]):
        rows = [r for r in found["rows"] if r["model"] == model]
        for kind, what in (("lookup", "prompt lookup"), ("assistant", "an assistant")):
            parts.append(f"## `{model}`, {what}\n" + "\n".join(table(rows, kind)) + "\n")
    return "\n".join(parts)
