"""kvcompress: a compressed key/value cache for transformers.

Names are loaded when they are used: `import kvcompress` needs neither torch nor transformers.
"""

# ruff: noqa: F401
from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what the names below are, for type checkers and editors
    from . import formats, ops, policies
    from ._C import Pool, __version__
    from .hf.backend import enable
    from .hf.cache import KVCache
    from .hf.doctor import doctor
    from .hf.generate import patch_generate
    from .hf.recipes import H2OCache, StreamingLLMCache
    from .layer import PagedKV
    from .offload.tiers import Tiers
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
    from .quantization.tensor import QuantizedTensor, quantize
    from .serving.batch import Batch
    from .serving.kvzip import KVzip
    from .serving.prefix import PrefixCache
    from .tools.evaluation import evaluate, inspect

_POLICIES = (
    "AdaKV", "Chain", "CriticalKV", "Demote", "ExpectedAttention", "H2O", "KNorm", "KeyDiff", "Protect",
    "PyramidBudget", "RKV", "Random", "ScoreOnly", "SlidingWindow", "SnapKV", "StreamingLLM", "TOVA", "Watch",
)  # fmt: skip
_MODULE_OF = {
    "KVCache": "hf.cache",
    "H2OCache": "hf.recipes",
    "StreamingLLMCache": "hf.recipes",
    "PagedKV": "layer",
    "enable": "hf.backend",
    "patch_generate": "hf.generate",
    "doctor": "hf.doctor",
    **dict.fromkeys(_POLICIES, "policies"),
    "Batch": "serving.batch",
    "PrefixCache": "serving.prefix",
    "KVzip": "serving.kvzip",
    "Tiers": "offload.tiers",
    "Pool": "_C",
    "quantize": "quantization.tensor",
    "QuantizedTensor": "quantization.tensor",
    "evaluate": "tools.evaluation",
    "inspect": "tools.evaluation",
    "__version__": "_C",
}
_MODULES = ("formats", "ops", "policies")
_HF = ("hf.", "serving.")  # what needs transformers, by how it begins

__all__ = [*_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"kvcompress.{name}")
    if name == "_C" and importlib.util.find_spec("kvcompress._C") is None:
        raise ImportError(
            f"kvcompress: expected the built extension, got source that is not built in {__path__[0]}; run `make "
            "build` there, or start Python in another folder to use what pip installed"
        )
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'kvcompress' has no attribute {name!r}")
    if _MODULE_OF[name].startswith(_HF):
        importlib.import_module("kvcompress.hf.versions").check(importlib.import_module("transformers").__version__)
    value = getattr(importlib.import_module(f"kvcompress.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
