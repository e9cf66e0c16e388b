"""Compiled `generate` on a GPU: runs each decode step of a compiled model in its cache's `step()`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from . import static_layer
from .cache import KVCache
from .configs import CACHE_ARGUMENT


class Stepped:
    """Replacement of a model's `get_compiled_call`. On a GPU, only decode steps with a KVCache are compiled."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = weakref.ref(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Callable:
        model: Any = self.model()
        if model is None:
            raise RuntimeError("kvcompress: the model of this shallow copy was deleted; call enable(model) on the copy")
        compiled = type(model).get_compiled_call(model, *args, **kwargs)
        return compiled if compiled == model.__call__ else partial(_call, model, compiled)

    def __reduce__(self) -> tuple:  # a copy, or a pickle, of a model has one for the new model
        return Stepped, (self.model(),)


def _call(model: Any, compiled: Callable, *args: Any, **kwargs: Any) -> Any:
    """A call of `generate`: compiled if it is a decode step that `KVCache.step` supports, which sees all tokens."""
    cache = kwargs.get(CACHE_ARGUMENT)
    if not isinstance(cache, KVCache) or not cache.needs_step(model.device):
        return compiled(*args, **kwargs)
    tokens = next((x for x in (kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if x is not None), None)
    dense = kwargs.get("output_attentions") or model.config.output_attentions or model.training
    one = tokens is not None and tokens.shape[1] == 1
    if dense or not one or not static_layer.steps_over(cache, kwargs.get("attention_mask")):
        return model(*args, **kwargs)
    with cache.step():
        return compiled(*args, **kwargs)
