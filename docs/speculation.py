"""Writes docs/speculation.md from what benchmarks/speculation.py measured; part of `make docs`."""

import json
import textwrap
from pathlib import Path

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
HEAD = """# Speculative decoding
Made by `make docs` from the results of `benchmarks/speculation.py`.

Tutorials say that a quantized cache costs 0.3 to 1.5 accepted tokens. Measured on the shipped models: {windows}
passages of a book, {context:,} tokens each, continued by {new} tokens with greedy decoding and fused attention, on
{threads} thread of an {cpu}. *Accepted*: new tokens per forward pass of the model (1 without drafts), with the 95%
interval of the mean over passages; in brackets the difference from raw pages on the same passages. *Speed-up*: relative
to the same cache without drafts, at the draft length (2, 4, 8) that is best for the format. The assistant is the other
shipped model, which is as large as the model itself, so only its acceptance is meaningful, not its speed.
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
    truth = f"""**Results.** `int8`, `fp8_e4m3` and `int4` have no measurable effect on acceptance here: the largest
        difference is {told(good)}, and the interval excludes zero for {zero}. Drafts are verified with the *same*
        cache, so the cache matters only where it changes the model's output; different texts are then compared, which
        widens the intervals. Differences of the claimed size occur with formats that do not suit the keys, at the
        limit of what this number of passages can show: {told(worst)}. Per-token 4-bit quantization of biased keys is
        common in tutorials; `KVCache` warns about it."""
    length = """**The best draft length** depends on the time of a pass over n + 1 tokens relative to a single token,
        and hardly on the format. With models this small, Python dominates, and drafts gain little or lose time with any
        cache. They are faster when reading weights and pages dominates. Smaller pages also make single tokens
        faster, so the *ratio* can fall while every time improves: compare ms/token."""
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
