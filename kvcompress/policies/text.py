"""Policies as text, for strategies: NAME:BUDGET, the budget in tokens or, with %, as a share of the tokens so far."""

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
from .wrappers import AdaKV

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


def check(name: str, budget: Any) -> str:
    """`budget` of policy `name` as it is written: "1024" or "5%". Raises ValueError."""
    text = str(budget)
    if not re.fullmatch(r"[1-9]\d*%?" if name != "window" else r"[1-9]\d*", text) or (
        text.endswith("%") and int(text[:-1]) > 100
    ):
        kinds = "tokens" if name == "window" else "tokens or a share up to 100%"
        raise ValueError(f"strategy: {name}: wanted {kinds}, got {text!r}")
    return text


def make(name: str, budget: str, sinks: int, recent: int) -> Policy:
    """The policy. With `recent` newest tokens protected, a budget in tokens counts what is kept beside them and the
    sinks."""
    if name == "window":
        return StreamingLLM(sinks, int(budget)) if sinks else SlidingWindow(int(budget))
    share = budget.endswith("%")
    amount: int | float = int(budget[:-1]) / 100 if share else int(budget)
    options: dict[str, Any] = {"sinks": sinks}
    if recent:
        if name not in _RECENT:
            raise ValueError(f"strategy: {name}: wanted no recent tokens, got recent:{recent}")
        options["recent"] = recent
        amount = amount if share else amount + sinks + recent
    return _MAKERS[name](amount, **options)
