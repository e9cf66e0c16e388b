"""Summary of this project's measurements: measured.json, generated from benchmarks/results by `make docs`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

MODELS = {"books-tiny": "plain", "books-tiny-bias": "biased"}
COMMANDS = {
    "formats": "make formats",
    "latents": "python benchmarks/formats_latent.py",
    "decode": "make bench",
    "drafts": "python benchmarks/speculation.py",
    "budgets": "python benchmarks/budgets.py",
}
"""Commands that reproduce each part."""
REFERENCE = "attention/amd-epyc-family-26"  # the machine of the timings
_PATH = Path(__file__).with_name("measured.json")


def _formats(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for row in rows:
        if (
            row["outliers"]
            or row["model"] not in MODELS
            or any(mark in row["strategy"] for mark in (":", "+", "raw", "dynamic", "hf-"))
        ):
            continue
        text = row["wikitext2"]
        kept = {"kl": text["kl"], "top1": text["top1"], "noise": row.get("noise")}
        found.setdefault(row["strategy"], {})[MODELS[row["model"]]] = kept
    return found


def _latents(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """{format of the latent: results on the worse text}, with the rotary part in 8 bits, as in a KVCache."""
    return {
        key: {"kl": max(text["kl"] for text in texts), "top1": min(text["top1"] for text in texts)}
        for row in rows
        for key, _, rotary in (row["strategy"].partition("/"),)
        for texts in ((row["wikitext2"], row["book"]),)
        if rotary == "int8"
    }


def _decode(cells: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for cell in cells:
        if cell["what"] in ("decode", "length") and cell["B"] == 1:
            rows = [row for row in cell["rows"] if "ms" in row and row["name"] != "read"]
            first = rows[0]
            found.append({name: cell[name] for name in ("S", "G", "isa", "threads")} | {
                "ms": {row["name"]: row["ms"] for row in rows},
                "MB": {row["name"]: row["MB"] for row in rows if "MB" in row},
                "read": first["GB/s"] / first["of read"],
            })  # fmt: skip
    return found


def _chunks(cells: Iterable[dict[str, Any]]) -> dict[str, float]:
    """{format: ms} for 512 new tokens after 4,096."""
    (cell,) = (c for c in cells if c["what"] == "chunk")
    return {row["name"]: row["ms"] for row in cell["rows"] if row["T"] == 512 and "accumulated" not in row["name"]}


def _drafts(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """{format: {"change": worst mean change of accepted tokens relative to `raw`, "spread", "method"}}."""
    found: dict[str, Any] = {}
    for row in rows:
        if row["method"] == "none" or row["format"] == "dynamic":
            continue
        change, spread = row["against_raw"]
        if row["format"] not in found or change < found[row["format"]]["change"]:
            found[row["format"]] = {"change": change, "spread": spread, "method": row["method"]}
    return found


def condense(results: Path) -> dict[str, Any]:
    """The contents of measured.json, from the folder of results."""

    def load(name: str) -> Any:
        return json.loads((results / f"{name}.json").read_text())

    attention = load(REFERENCE)
    return {
        "about": {"machine": attention["machine"], "formats": load("formats")["about"],
                  "budgets": load("budgets")["about"]},
        "formats": _formats(load("formats")["rows"]),
        "latents": _latents(load("formats_latent")["rows"]),
        "decode": _decode(attention["cells"]),
        "chunk": _chunks(attention["cells"]),
        "drafts": _drafts(load("speculation")["rows"]),
        "budgets": load("budgets")["rows"],
    }  # fmt: skip


def write(results: Path) -> None:
    """Makes measured.json anew."""
    _PATH.write_text(json.dumps(condense(results), indent=1) + "\n")


@cache
def measured() -> dict[str, Any]:
    """{"formats": {strategy: {"plain", "biased": {"kl" nats a token, "top1", "noise"}}}, "latents": {format of the
    latent: {"kl", "top1"}}, "decode": [{"S" tokens, "G", "isa", "threads", "ms", "MB", "read" GB/s}], "chunk",
    "drafts", "budgets", "about"}."""
    return json.loads(_PATH.read_text())


def kl(strategy: str, latent: bool = False) -> float:
    """Measured KL in nats per token: the larger one of the two shipped models, or that of the shipped model with latent
    attention. Raises KeyError if not measured."""
    if latent:
        return measured()["latents"][strategy.partition("/")[0]]["kl"]
    return max(row["kl"] for row in measured()["formats"][strategy].values())


def decode(tokens: int, isa: str) -> dict[str, Any]:
    """The measured decode step of the closest length, for kernel level `isa` if available."""
    cells = [c for c in measured()["decode"] if c["G"] == 4]
    level = "avx2" if isa in ("avx2", "avxvnni", "scalar") else "avx512bf16"
    cells = [c for c in cells if c["isa"] == level] or cells
    return min(cells, key=lambda c: abs(c["S"].bit_length() - tokens.bit_length()) * 2**40 + abs(c["S"] - tokens))


def budget(policy: str, share: int) -> dict[str, Any] | None:
    """A row of the budget curve of books-tiny, or None if not measured."""
    key = policy, share, "books-tiny"
    return next((r for r in measured()["budgets"] if (r["policy"], r["share"], r["model"]) == key), None)
