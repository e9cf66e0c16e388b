"""kvcompress: a small and fast key/value cache for transformers.

Names are loaded when they are used: `import kvcompress` needs neither torch nor transformers.
"""

# ruff: noqa: F401
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what the names below are, for type checkers and editors
    from . import evaluation, formats, ops, plan, plot, policies, schemes, strategy
    from ._C import __version__
    from .caches import attention, cache
    from .caches.cache import KVCache
    from .caches.recipes import CombinedCache, H2OCache, SlidingWindowCache, StreamingLLMCache
    from .cli import bench, info
    from .evaluation import evaluate, inspect
    from .memory.tiers import Tiers
    from .models import backend
    from .models.backend import enable
    from .models.diagnosis import doctor
    from .models.patching import patch_generate
    from .numbers import metrics
    from .numbers.blocks import pack_pages
    from .numbers.quantized import QuantizedTensor, quantize
    from .ops import merge_states
    from .pages import layer, show
    from .pages.heads import join_heads, split_heads
    from .pages.layer import PagedKV
    from .pages.parallel import ShardedKV
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
    from .serving.batch import Batch
    from .serving.kvzip import KVzip
    from .serving.prefix import PrefixCache
    from .strategy import Strategy

_POLICIES = (
    "AdaKV", "Chain", "CriticalKV", "Demote", "ExpectedAttention", "H2O", "KNorm", "KeyDiff", "Protect",
    "PyramidBudget", "RKV", "Random", "ScoreOnly", "SlidingWindow", "SnapKV", "StreamingLLM", "TOVA", "Watch",
)  # fmt: skip
_HOME = {
    "KVCache": "caches.cache",
    "H2OCache": "caches.recipes",
    "StreamingLLMCache": "caches.recipes",
    "SlidingWindowCache": "caches.recipes",
    "CombinedCache": "caches.recipes",
    "PagedKV": "pages.layer",
    "ShardedKV": "pages.parallel",
    "join_heads": "pages.heads",
    "split_heads": "pages.heads",
    "Tiers": "memory.tiers",
    "Batch": "serving.batch",
    "PrefixCache": "serving.prefix",
    "KVzip": "serving.kvzip",
    "enable": "models.backend",
    "doctor": "models.diagnosis",
    "patch_generate": "models.patching",
    **dict.fromkeys(_POLICIES, "policies"),
    "quantize": "numbers.quantized",
    "QuantizedTensor": "numbers.quantized",
    "pack_pages": "numbers.blocks",
    "merge_states": "ops",
    "Strategy": "strategy",
    "evaluate": "evaluation",
    "inspect": "evaluation",
}
_MODULES = {
    **{name: name for name in ("evaluation", "formats", "ops", "plan", "plot", "policies", "schemes", "strategy")},
    "attention": "caches.attention",
    "backend": "models.backend",
    "bench": "cli.bench",
    "cache": "caches.cache",
    "info": "cli.info",
    "layer": "pages.layer",
    "metrics": "numbers.metrics",
    "show": "pages.show",
}

_HF = ("caches.attention", "caches.cache", "models.", "serving.")  # what needs transformers, by how it begins

__all__ = [*_HOME, "formats", "__version__"]


def __getattr__(name: str) -> Any:
    if _HOME.get(name, _MODULES.get(name, "")).startswith(_HF):
        importlib.import_module("kvcompress.models.versions").check(importlib.import_module("transformers").__version__)
    if name in _HOME:
        value = getattr(importlib.import_module(f"kvcompress.{_HOME[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"kvcompress.{_MODULES[name]}")
    elif name == "__version__":
        value = importlib.import_module("kvcompress._C").__version__
    else:
        raise AttributeError(f"module 'kvcompress' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
