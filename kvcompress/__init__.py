"""kvcompress: a small and fast key/value cache for transformers.

Names are loaded when they are used: `import kvcompress` needs neither torch nor transformers.
"""

# ruff: noqa: F401
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what the names below are, for type checkers and editors
    from . import (
        attention,
        backend,
        bench,
        cache,
        evaluation,
        formats,
        info,
        layer,
        metrics,
        ops,
        plan,
        plot,
        policies,
        schemes,
        show,
        strategy,
    )
    from ._C import __version__
    from .backend import enable
    from .batch import Batch
    from .blocks import pack_pages
    from .cache import KVCache
    from .diagnosis import doctor
    from .evaluation import evaluate, inspect
    from .kvzip import KVzip
    from .layer import PagedKV
    from .ops import merge_states
    from .parallel import ShardedKV
    from .patching import patch_generate
    from .policies import (
        H2O,
        RKV,
        TOVA,
        AdaKV,
        Chain,
        CriticalKV,
        Demote,
        ExpectedAttention,
        KeyDiff,
        KNorm,
        Protect,
        PyramidBudget,
        Random,
        ScoreOnly,
        SlidingWindow,
        SnapKV,
        StreamingLLM,
        Watch,
    )  # fmt: skip
    from .prefix import PrefixCache
    from .quantized import QuantizedTensor, quantize
    from .recipes import CombinedCache, H2OCache, SlidingWindowCache, StreamingLLMCache
    from .strategy import Strategy
    from .tiers import Tiers

_POLICIES = (
    "AdaKV", "Chain", "CriticalKV", "Demote", "ExpectedAttention", "H2O", "KNorm", "KeyDiff", "Protect",
    "PyramidBudget", "RKV", "Random", "ScoreOnly", "SlidingWindow", "SnapKV", "StreamingLLM", "TOVA", "Watch",
)  # fmt: skip
_HOME = {
    "KVCache": "cache",
    "Batch": "batch",
    "PagedKV": "layer",
    "PrefixCache": "prefix",
    "Tiers": "tiers",
    "enable": "backend",
    "doctor": "diagnosis",
    "patch_generate": "patching",
    "H2OCache": "recipes",
    "StreamingLLMCache": "recipes",
    "SlidingWindowCache": "recipes",
    "CombinedCache": "recipes",
    **dict.fromkeys(_POLICIES, "policies"),
    "KVzip": "kvzip",
    "quantize": "quantized",
    "QuantizedTensor": "quantized",
    "pack_pages": "blocks",
    "merge_states": "ops",
    "ShardedKV": "parallel",
    "Strategy": "strategy",
    "evaluate": "evaluation",
    "inspect": "evaluation",
}
_MODULES = (
    "attention",
    "backend",
    "bench",
    "cache",
    "evaluation",
    "formats",
    "info",
    "layer",
    "metrics",
    "ops",
    "plan",
    "plot",
    "policies",
    "schemes",
    "show",
    "strategy",
)

_HF = ("attention", "backend", "batch", "cache", "diagnosis", "kvzip", "patching", "prefix")  # what needs transformers

__all__ = [*_HOME, "formats", "__version__"]


def __getattr__(name: str) -> Any:
    if _HOME.get(name, name) in _HF:
        importlib.import_module("kvcompress.versions").check(importlib.import_module("transformers").__version__)
    if name in _HOME:
        value = getattr(importlib.import_module(f"kvcompress.{_HOME[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"kvcompress.{name}")
    elif name == "__version__":
        value = importlib.import_module("kvcompress._C").__version__
    else:
        raise AttributeError(f"module 'kvcompress' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
