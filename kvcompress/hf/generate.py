"""patch_generate(model): every `generate` of a model with a KVCache, no call site changed."""

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
    """`model.generate` with a new KVCache for each call that brings no cache and asks for none.

    Knows its model weakly, and in a deep copy of the model its copy.
    """

    def __init__(self, model: Any, patch: Patch) -> None:
        self.model, self.patch = weakref.ref(model), patch
        functools.update_wrapper(self, type(model).generate)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self.model()
        if model is None:
            raise RuntimeError(
                "patch_generate: expected the patched model, got none: it was freed; call model.generate"
            )
        cache, kwargs = None, {k: v for k, v in kwargs.items() if v is not None or k not in _CACHES}
        if _wants_default(model, args, kwargs):
            cache = kwargs[CACHE_ARGUMENT] = KVCache.from_dict(model.config, self.patch.options).bind(model)
            if _asked(model, args, kwargs, "cache_implementation"):
                kwargs["cache_implementation"] = None  # next to a cache it is an error
        out = type(model).generate(model, *args, **kwargs)
        if cache is not None:
            cache.check()  # the host has waited for each token
            self.patch.calls += 1
            self.patch.last = cache.stats()
        return out

    def __deepcopy__(self, memo: dict) -> Any:
        model: Any = self.model()
        twin = memo.get(id(model))
        return self if twin is None else _Generate(twin, Patch(self.patch.options))


def _wants_default(model: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Would this call of generate() make a DynamicCache?"""
    if kwargs.keys() & _CACHES or kwargs.get("custom_generate") is not None:
        return False
    made = _asked(model, args, kwargs, "cache_implementation") in (
        None,
        "dynamic",
        "hybrid",
    )  # "hybrid": Gemma's, unset
    return made and _asked(model, args, kwargs, "use_cache") is not False


def _asked(model: Any, args: tuple, kwargs: dict[str, Any], name: str) -> Any:
    """What generate() takes for an option: an argument, or what a generation config says, the model's last."""
    given = kwargs.get("generation_config") or next((a for a in args if isinstance(a, GenerationConfig)), None)
    said = (getattr(config, name, None) for config in (given, model.generation_config))
    return kwargs[name] if name in kwargs else next((x for x in said if x is not None), None)


class Patch:
    """What `patch_generate` did. `undo()`, or the end of a `with` block, takes it back.

    options: arguments of the caches that it makes; calls: how many it made; last: `stats()` of the newest at the end of
    its call, None before.
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

    def undo(self) -> None:
        """The model's own `generate` and attention again. Patches of one model are undone newest first."""
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
        self.undo()

    def __repr__(self) -> str:
        state = "on" if self._model and self._model() is not None else "undone"
        return f"Patch({self.options['key']!r}, {self.options['value']!r}, {state}, {self.calls} calls)"


def patch_generate(model: Any, *args: Any, fused: bool = True, **options: Any) -> Patch:
    """Makes every `model.generate(...)` use a new `KVCache(model.config, *args, **options)`: pipelines, trainers and
    evaluation harnesses need no other change.

    For good, or for a block: `with patch_generate(model, "int4"): ...`. Calls that bring a cache of their own
    (`past_key_values=` or `cache=`, `cache_implementation=`) or want none (`use_cache=False`) are left as they are.

    Args:
        model: a transformers model, or one with a PEFT adapter.
        fused: also `kvcompress.enable(model)`; the report is in the result's `report`.
        args, options: KVCache's, after the config.

    Raises:
        TypeError, ValueError: as KVCache and `enable` do; the model is then as it was.
    """
    inner = backend.base_model("patch_generate", model)
    patch = Patch(KVCache(inner.config, *args, **options).to_dict())
    patch.apply(inner, fused)
    return patch
