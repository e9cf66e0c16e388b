"""patch_generate(model): every `model.generate` uses a KVCache, without changes to the calls."""

from __future__ import annotations

import functools
import weakref
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from . import backend
from .cache import KVCache
from .configs import CACHE_ARGUMENT, text_config

_CACHES = (CACHE_ARGUMENT, "past_key_values", "cache_params")  # names by which generate takes one


class _Generate:
    """Replacement of `model.generate`: adds a new KVCache to each call that would use a DynamicCache.

    Holds a weak reference to its model; in a deep copy of the model, to the copy.
    """

    def __init__(self, model: Any, patch: Patch) -> None:
        self.model, self.patch = weakref.ref(model), patch
        functools.update_wrapper(self, type(model).generate)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self.model()
        if model is None:
            raise RuntimeError(
                "patch_generate: expected the patched model, but it was freed; keep it, and call model.generate"
            )
        cache, kwargs = None, {k: v for k, v in kwargs.items() if v is not None or k not in _CACHES}
        if _wants_default(model, args, kwargs):
            cache = kwargs[CACHE_ARGUMENT] = KVCache.from_dict(model.config, self.patch.options).bind(model)
            if _asked(model, args, kwargs, "cache_implementation"):
                kwargs["cache_implementation"] = None  # an error together with a cache
        out = type(model).generate(model, *args, **kwargs)
        if cache is not None:
            cache.check()  # costs no extra synchronization: generate has waited for each token
            self.patch.calls += 1
            self.patch.last = cache.stats()
        return out

    def __deepcopy__(self, memo: dict) -> Any:
        model: Any = self.model()
        twin = memo.get(id(model))
        return self if twin is None else _Generate(twin, Patch(self.patch.options))


def _wants_default(model: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """True if this call of generate() would create a DynamicCache."""
    if kwargs.keys() & _CACHES or kwargs.get("custom_generate") is not None:
        return False
    made = _asked(model, args, kwargs, "cache_implementation") in (
        None,
        "dynamic",
        "hybrid",
    )  # "hybrid": Gemma's, unset
    return made and _asked(model, args, kwargs, "use_cache") is not False


def _asked(model: Any, args: tuple, kwargs: dict[str, Any], name: str) -> Any:
    """The value generate() uses for an option: the argument, else the given generation config, else the model's."""
    given = kwargs.get("generation_config") or next((a for a in args if isinstance(a, GenerationConfig)), None)
    said = (getattr(config, name, None) for config in (given, model.generation_config))
    return kwargs[name] if name in kwargs else next((x for x in said if x is not None), None)


class Patch:
    """Result of `patch_generate`. To revert it, call `remove`, or leave the `with` block.

    options: arguments of the caches; calls: number of caches created; last: `stats()` of the latest cache at the end of
    its call, or None; report: `enable`'s report, or None.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.calls, self.last = 0, None  # type: int, dict[str, Any] | None
        self.report: backend.Report | None = None
        self._model: weakref.ref | None = None
        self._before: tuple[Any, Any] = (None, None)

    def apply(self, model: PreTrainedModel, fused: bool) -> None:
        text = text_config(model.config)
        self._model = weakref.ref(model)
        self._before = (model.__dict__.get("generate"), text._attn_implementation)
        if fused:
            self.report = backend.enable(model, verbose=False)
        model.__dict__["generate"] = _Generate(model, self)

    def remove(self) -> None:
        """Restores the model's `generate` and attention. Several patches of one model are reverted in reverse order."""
        model, self._model = self._model() if self._model else None, None
        if model is None:
            return
        generate, attention = self._before
        if generate is None:
            model.__dict__.pop("generate", None)
        else:
            model.__dict__["generate"] = generate
        text = text_config(model.config)
        if self.report is not None and text._attn_implementation == backend.attention.NAME:
            backend.select(model, text, attention)

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *error: Any) -> None:
        self.remove()

    def __repr__(self) -> str:
        state = "on" if self._model and self._model() is not None else "removed"
        return f"Patch({self.options['key']!r}, {self.options['value']!r}, {state}, {self.calls} calls)"


def patch_generate(model: Any, *args: Any, fused: bool = True, **options: Any) -> Patch:
    """Makes every `model.generate(...)` use a new `KVCache(model.config, *args, **options)`. For pipelines, trainers
    and evaluation harnesses that call `generate` themselves.

    Permanent, or for a block: `with patch_generate(model, "int4"): ...`. Calls with a cache of their own
    (`past_key_values=` or `cache=`, `cache_implementation=`) or without one (`use_cache=False`) are not changed.

    Args:
        model: a transformers model, or a PEFT model.
        fused: also call `kvcompress.enable(model)`; its report is `Patch.report`.
        args, options: arguments of KVCache after the config.

    Returns: a `Patch`.

    Raises:
        TypeError, ValueError: as KVCache and `enable`; the model is then unchanged.
    """
    inner = backend.base_model("patch_generate", model)
    cache = KVCache(inner.config, *args, **options)
    # The calibration itself, since its file may be moved or replaced between calls.
    patch = Patch({**cache.to_dict(), "calibration": cache.forward_pass.calibration})
    patch.apply(inner, fused)
    return patch
