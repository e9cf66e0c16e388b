"""kvcompress: a small and fast key/value cache for transformers.

Names are loaded when they are used: `import kvcompress` needs neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import Any

_POLICIES = (
    "AdaKV", "Chain", "H2O", "KNorm", "KeyDiff", "Protect", "PyramidBudget", "RKV", "Random", "ScoreOnly",
    "SlidingWindow", "SnapKV", "StreamingLLM", "TOVA",
)  # fmt: skip
_HOME = {
    "KVCache": "cache",
    "PagedKV": "layer",
    "enable": "backend",
    "doctor": "diagnosis",
    "patch_generate": "patching",
    "H2OCache": "recipes",
    "StreamingLLMCache": "recipes",
    "SlidingWindowCache": "recipes",
    "CombinedCache": "recipes",
    **dict.fromkeys(_POLICIES, "policies"),
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
    "cache",
    "evaluation",
    "formats",
    "layer",
    "metrics",
    "ops",
    "policies",
    "schemes",
    "strategy",
)

_HF = ("attention", "backend", "cache", "diagnosis", "patching")  # what needs transformers

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
