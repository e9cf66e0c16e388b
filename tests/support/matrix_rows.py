"""The axes of the composition matrix, `RULES` for rejected combinations, and rows that cover the others."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any, NamedTuple

import covering
import torch
from covertable import Controller

from kvcompress import _C, formats, policies

WINDOW, CHUNK, VOCAB, LAYERS = 24, 32, 40, 2
POLICIES: dict[str, Any] = {
    "none": None,
    "StreamingLLM": lambda n, s: policies.StreamingLLM(4, n - 4, slack=s),
    "H2O": lambda n, s: policies.H2O(n, slack=s),
    "SnapKV": lambda n, s: policies.SnapKV(n, 8, 3, slack=s),
    "KNorm": lambda n, s: policies.KNorm(n, slack=s),
    "AdaKV(KeyDiff)": lambda n, s: policies.AdaKV(policies.KeyDiff(n, slack=s)),
    "Demote(KNorm)": lambda n, s: policies.Demote(policies.KNorm(n, slack=s), ("int8", "int4", "int2")),
}
LOOKS = ("H2O", "SnapKV")  # policies that use attention
TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
HEADS = {"1x1": (1, 1), "2x1": (2, 1), "2x2": (2, 2), "1x7": (1, 7), "2x4": (2, 4)}
DIMS = {str(n): (n, n) for n in (32, 48, 80, 100, 128, 256, 320)} | {"64/32": (64, 32)}
AXES: dict[str, list[str]] = {
    "key": list(formats.NAMES),
    "value": list(formats.NAMES),
    "policy": list(POLICIES),
    "positions": ["original", "cache"],
    "page": ["64", "16", "32", "128"],
    "open": ["page", "recent", "direct"],
    "heads": list(HEADS),
    "dim": list(DIMS),
    "padding": ["none", "left", "second turn"],
    "mode": ["decode", "chunked", "draft", "turns", "beams", "copies", "rows"],
    "prefix": ["none", "hit"],
    "tier": ["memory", "host", "file", "suspended", "saved"],
    "layer": ["full", "sliding", "chunked"],
    "attention": ["kvcompress", "sdpa"],
    "store": ["growing", "fixed"],
    "level": list(_C.isa_available()),
    "device": ["cpu", "cuda"],
    "dtype": list(TYPES),
}
Row = NamedTuple("Row", [(name, str) for name in AXES])  # type: ignore[misc]


class Rule(NamedTuple):
    """An incompatible combination: {axis: values}; where it is rejected (see `refuse`), and words of the error
    message."""

    values: dict[str, tuple[str, ...]]
    where: str
    says: str

    def holds(self, row: dict[str, str]) -> bool:
        return all(row.get(axis) in names for axis, names in self.values.items())


def but(axis: str, *names: str) -> tuple[str, ...]:
    return tuple(x for x in AXES[axis] if x not in names)


SOME = but("policy", "none")
BOUND = tuple(x for x in formats.NAMES if x == "raw" or formats.TABLE[formats.CODES[x]]["bits"] < 8)
WIDE = tuple(x for x in formats.NAMES if x != "raw" and formats.TABLE[formats.CODES[x]]["dim_multiple"] > 16)
MANY = tuple(x for x, (H, _) in HEADS.items() if H > 1)
RULES = [
    Rule({"open": ("direct",), "key": BOUND}, "new", "expected an 8-bit format to append without an open page"),
    Rule({"open": ("direct",), "value": BOUND}, "new", "expected an 8-bit format to append without an open page"),
    Rule({"policy": SOME, "store": ("fixed",)}, "new", "expected no policy with max_length"),
    Rule({"prefix": ("hit",), "layer": ("sliding", "chunked")}, "prefix", "expected full-attention layers"),
    Rule({"prefix": ("hit",), "policy": LOOKS}, "prefix", "expected a policy that does not use attention"),
    Rule(
        {"positions": ("cache",), "policy": ("StreamingLLM",), "layer": ("chunked",)},
        "new",
        "expected a model with plain rotary positions",
    ),
    Rule(
        {"positions": ("cache",), "policy": ("StreamingLLM",), "dim": ("100",)},
        "new",
        "a head dim that pages store without padding",
    ),
    Rule(
        {"positions": ("cache",), "policy": ("StreamingLLM",), "dim": ("48", "80"), "key": WIDE},
        "new",
        "a head dim that pages store without padding",
    ),
    Rule(
        {"policy": ("AdaKV(KeyDiff)",), "attention": ("sdpa",), "heads": MANY},
        "call",
        "whose heads keep different numbers of tokens",
    ),
    Rule({"policy": SOME[1:], "attention": ("sdpa",), "mode": ("draft",)}, "record", "leaves heads and layers with"),
    Rule({"policy": LOOKS, "attention": ("sdpa",)}, "call", "expected kvcompress attention for a policy"),
]
# Not applicable: heads too wide for a GPU, an option of one policy, prefixes without padding, padding that requires our
# attention.
# want our attention.
MEANINGLESS: list[dict[str, tuple[str, ...]]] = [
    {"dim": ("320",), "device": ("cuda",)},
    {"positions": ("cache",), "policy": but("policy", "StreamingLLM")},
    {"prefix": ("hit",), "padding": ("left",)},
    {"policy": SOME, "attention": ("sdpa",), "padding": but("padding", "none")},
    {"policy": SOME, "attention": ("sdpa",), "mode": ("beams", "rows")},
]


def refused(row: dict[str, str]) -> Rule | None:
    return next((rule for rule in RULES if rule.holds(row)), None)


def possible(row: dict[str, str]) -> bool:
    meaningless = any(all(row.get(a) in names for a, names in x.items()) for x in MEANINGLESS)
    return not meaningless and refused(row) is None


@lru_cache
def rows(strength: int = 2) -> list[Row]:
    """Rows that contain every compatible combination of `strength` values; deterministic."""
    if strength > 2:
        return [Row(**row) for row in covering.rows(AXES, strength, possible)]
    constraints = [
        {"operator": "not", "condition": {"operator": "and", "conditions": [
            {"operator": "in", "left": axis, "values": list(names)} for axis, names in values.items()
        ]}} for values in [*(rule.values for rule in RULES), *MEANINGLESS]
    ]  # fmt: skip
    made = Controller(AXES, strength=strength, constraints=constraints)
    found = [Row(**row) for row in made.make()]
    assert not made.stats["uncovered_pairs"]
    return found


def sample(n: int, seed: int, level: str) -> list[Row]:
    """n random valid rows."""
    chance, found = random.Random(seed), []
    while len(found) < n:
        row = {axis: chance.choice(names) for axis, names in AXES.items()} | {"level": level}
        if possible(row):
            found.append(Row(**row))
    return found


# ---------------------------------------------------------------- the cache of a row


def hash_of(row: Row) -> int:
    """Stable across processes."""
    import zlib

    return zlib.crc32("|".join(row).encode())


def plainest(values: dict[str, str]) -> Row:
    """A row with `values`, and for the other axes the first compatible value."""
    return Row(**{**{axis: names[0] for axis, names in AXES.items()}, "level": _C.isa(), **values})
