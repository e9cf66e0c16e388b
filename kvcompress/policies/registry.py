"""Policies in strategy strings: NAME:BUDGET, with the budget in tokens or, with %, as a share of the tokens so far; and
wrappers, from the innermost to the outermost:

    pyramid:RATIO                     PyramidBudget
    chain:NAME@BUDGET,..              Chain: these policies first, then the main one
    protect:BEGIN-END,..              Protect
    demote:FORMATS["@"SHARE],..       Demote; FORMATS as "int8" or "int8/int4"
    watch:CLUSTERS                    Watch
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from .attention import TOVA, SnapKV
from .base import Policy
from .critical import CriticalKV
from .expected import ExpectedAttention
from .h2o import H2O, ScoreOnly
from .keys import KeyDiff, KNorm, Random
from .rkv import RKV
from .windows import SlidingWindow, StreamingLLM
from .wrappers import AdaKV, Chain, Demote, Protect, PyramidBudget, Watch

_MAKERS: dict[str, Callable[..., Policy]] = {
    "h2o": H2O,
    "h2o_sum": lambda budget, **options: H2O(budget, score="sum", **options),
    "ada_h2o": lambda budget, **options: AdaKV(H2O(budget, **options)),
    "score": ScoreOnly,
    "tova": TOVA,
    "snapkv": SnapKV,
    "rkv": RKV,
    "knorm": KNorm,
    "keydiff": KeyDiff,
    "random": Random,
    "expected": ExpectedAttention,
    "critical_h2o": lambda budget, **options: CriticalKV(H2O(budget, **options)),
    "critical_snapkv": lambda budget, **options: CriticalKV(SnapKV(budget, **options)),
}
NAMES = ("window", *_MAKERS)
_RECENT = ("h2o", "h2o_sum", "ada_h2o", "critical_h2o", "knorm", "keydiff", "random")


def _spans(text: str) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b in (span.split("-") for span in text.split(","))]


def _rungs(text: str) -> tuple[list[str], list[float]]:
    parts = [rung.partition("@") for rung in text.split(",")]
    return [formats for formats, _, _ in parts], [float(share or 1) for _, _, share in parts]


def _first(text: str, sinks: int) -> list[Policy]:
    return [
        make(name, check(name, budget), sinks, 0) for name, _, budget in (x.partition("@") for x in text.split(","))
    ]


_AROUND: dict[str, tuple[str, Callable[[Policy, str], Policy]]] = {
    "pyramid": ("a ratio of at least 1", lambda policy, text: PyramidBudget(policy, float(text))),
    "chain": (
        f"NAME@BUDGET,.. of {', '.join(NAMES)}", lambda policy, text: Chain(*_first(text, policy.sinks), policy)
    ),
    "protect": ("BEGIN-END,.. in tokens", lambda policy, text: Protect(policy, _spans(text))),
    "demote": ('formats, largest first: FORMATS["@"SHARE],..', lambda policy, text: Demote(policy, *_rungs(text))),
    "watch": ("at least 1 cluster", lambda policy, text: Watch(policy, int(text))),
}  # fmt: skip
AROUND = tuple(_AROUND)


def check(name: str, budget: Any) -> str:
    """The budget of policy `name`, or the argument of wrapper `name`, as text. Raises ValueError if it is invalid."""
    if name in _AROUND:
        expected, build = _AROUND[name]
        try:
            build(KNorm(1, sinks=0), str(budget))
        except (ValueError, IndexError) as error:
            raise ValueError(f"strategy: {name}: expected {expected}, got {budget!r} ({error})") from None
        return str(budget)
    if name not in NAMES:
        raise ValueError(f"strategy: expected one of the policies {', '.join(NAMES)}, got {name!r}")
    text = str(budget)
    if not re.fullmatch(r"[1-9]\d*%?" if name != "window" else r"[1-9]\d*", text) or (
        text.endswith("%") and int(text[:-1]) > 100
    ):
        kinds = "tokens" if name == "window" else "tokens or a share up to 100%"
        raise ValueError(f"strategy: {name}: expected {kinds}, got {text!r}")
    return text


def around(policy: Policy, given: dict[str, str]) -> Policy:
    """The policy in the wrappers given by name."""
    for name, (_, build) in _AROUND.items():
        if name in given:
            policy = build(policy, given[name])
    return policy


def make(name: str, budget: str, sinks: int, recent: int) -> Policy:
    """The policy `name`. With `recent`, a budget in tokens does not include the recent tokens and sinks."""
    if name == "window":
        return StreamingLLM(sinks, int(budget)) if sinks else SlidingWindow(int(budget))
    share = budget.endswith("%")
    amount: int | float = int(budget[:-1]) / 100 if share else int(budget)
    options: dict[str, Any] = {"sinks": sinks}
    if recent:
        if name not in _RECENT:
            raise ValueError(f"strategy: {name}: expected no recent tokens, got residual_length:{recent}")
        options["recent"] = recent
        amount = amount if share else amount + sinks + recent
    return _MAKERS[name](amount, **options)
