"""Which tokens stay: policies for `PagedKV(policy=...)` and `KVCache(config, policy=...)`. See docs/eviction.md."""

from .attention import TOVA, SnapKV
from .base import Policy, Stored
from .h2o import H2O, ScoreOnly
from .keys import KeyDiff, KNorm, Random
from .rkv import RKV
from .windows import SlidingWindow, StreamingLLM
from .wrappers import AdaKV, Chain, Protect, PyramidBudget

__all__ = [
    "H2O",
    "RKV",
    "TOVA",
    "AdaKV",
    "Chain",
    "KNorm",
    "KeyDiff",
    "Policy",
    "Protect",
    "PyramidBudget",
    "Random",
    "ScoreOnly",
    "SlidingWindow",
    "SnapKV",
    "Stored",
    "StreamingLLM",
]
