"""Eviction policies for `PagedKV(policy=...)` and `KVCache(config, policy=...)`. See docs/eviction.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .attention import TOVA, SnapKV
from .base import Policy, StoredTokens
from .critical import CriticalKV
from .expected import ExpectedAttention
from .h2o import H2O, ScoreOnly
from .keys import KeyDiff, KNorm, Random
from .rkv import RKV
from .windows import SlidingWindow, StreamingLLM
from .wrappers import AdaKV, Chain, Demote, Protect, PyramidBudget, Watch


def from_dict(given: Mapping[str, Any]) -> Policy:
    """The policy that `Policy.to_dict` described. Raises ValueError for a class that is not in this module."""

    def policy(x: Any) -> Any:
        return from_dict(x) if isinstance(x, Mapping) else x

    if not isinstance(given, Mapping):
        raise TypeError(f"from_dict: expected a dict from Policy.to_dict, got {type(given).__name__}")
    name = given.get("policy")
    kind = globals().get(name) if name in __all__ else None
    if not (isinstance(kind, type) and issubclass(kind, Policy)) or set(given) - {"policy", "args", "options"}:
        raise ValueError(f"from_dict: expected a dict from Policy.to_dict, got {dict(given)}")
    options = {key: policy(x) for key, x in given.get("options", {}).items()}
    return kind(*(policy(x) for x in given.get("args", ())), **options)


__all__ = [
    "H2O",
    "RKV",
    "TOVA",
    "AdaKV",
    "Chain",
    "CriticalKV",
    "Demote",
    "ExpectedAttention",
    "KNorm",
    "KeyDiff",
    "Policy",
    "Protect",
    "PyramidBudget",
    "Random",
    "ScoreOnly",
    "SlidingWindow",
    "SnapKV",
    "StoredTokens",
    "StreamingLLM",
    "Watch",
    "from_dict",
]
