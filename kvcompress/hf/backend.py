"""enable(model): makes a model attend through kvcompress."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ..store.device_memory import usable
from . import attention
from .compiled_generate import Stepped
from .configs import chosen, misfit, reads_others, text_config
from .latent import absorb, unabsorbed
from .layer_options import is_paged

_MEASURING = "kvcompress_measuring"
_observers: dict[int, Callable[..., None]] = {}  # by id of the module, of models in `observing`


@dataclass
class Report:
    """Result of `enable`.

    model: class of the model; fused: attention reads compressed pages directly (a KVCache works without it too, but
    decodes its layers at every step); layers: number of layers of each type; notes: limitations, one sentence each.
    """

    model: str
    fused: bool
    layers: dict[str, int]
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        state = "on" if self.fused else "NOT on"
        kinds = ", ".join(f"{n} {kind}" for kind, n in self.layers.items())
        first = f"kvcompress: {self.model}: fused attention {state} ({kinds})"
        return "\n".join([first, *(f"  - {note}" for note in self.notes)])

    def __repr__(self) -> str:  # one line, as an interactive prompt shows it below the printed report
        return f"Report({self.model}: fused attention {'on' if self.fused else 'NOT on'})"


def base_model(who: str, model: Any) -> PreTrainedModel:
    """The transformers model itself, or the base model of a PEFT model. Raises TypeError for anything else, ValueError
    for adapters that replace the cache (prefix tuning)."""
    inner = model
    kind: Any = getattr(getattr(model, "active_peft_config", None), "peft_type", "")
    if kind in ("PREFIX_TUNING", "CARTRIDGE"):
        raise ValueError(
            f"{who}: model: expected an adapter that does not replace the cache, got PEFT's {kind.value}, which always "
            "uses a DynamicCache of its own; use the base model with a cache that holds the prefix instead: "
            "KVCache.from_cache(model.get_prompt(batch_size), model.config) (docs/huggingface.md, PEFT)"
        )
    if not isinstance(model, PreTrainedModel) and callable(getattr(model, "get_base_model", None)):
        inner = model.get_base_model()
    if not isinstance(inner, PreTrainedModel):
        raise TypeError(f"{who}: model: expected a transformers model, got {type(model).__name__}")
    return inner


def select(model: PreTrainedModel, text: Any, implementation: str) -> None:
    """Sets the attention implementation of the text decoder only; vision and audio towers keep theirs."""
    for name in model.config.sub_configs:
        if getattr(model.config, name, None) is text:
            return model.set_attn_implementation({name: implementation})
    decoders = (x for x in model.modules() if isinstance(x, PreTrainedModel) and x.config is text)
    next(decoders, model).set_attn_implementation(implementation)  # the model, or a nested one (Qwen-Omni)


@contextmanager
def attending(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Context manager: the text decoder uses another attention implementation."""
    text = text_config(model.config)
    before = text._attn_implementation
    select(model, text, implementation)
    try:
        yield
    finally:
        select(model, text, before)


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Context manager: the model is in eval mode (no dropout)."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:  # `model.train()` would also switch modules that were in eval mode before
            module.training = True


@contextmanager
def observing(model: PreTrainedModel, observe: Callable[..., None]) -> Iterator[None]:
    """Context manager: the model is in eval mode, and each attention call of its text decoder first calls
    `observe(module, q, k, v, options)`, with tensors [B, heads, T, D] and the keyword arguments of the call."""

    modules = [id(module) for module in model.modules()]
    _observers.update(dict.fromkeys(modules, observe))
    AttentionInterface.register(_MEASURING, _measured)
    AttentionMaskInterface.register(_MEASURING, sdpa_mask)
    try:
        with attending(model, _MEASURING), evaluating(model):
            yield
    finally:
        for module in modules:
            _observers.pop(module, None)


def _measured(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
    _observers[id(module)](module, *(x.detach() for x in (query, key, value)), options)
    return attention.kvcompress_attention_forward(module, query, key, value, mask, **options)


def enable(model: PreTrainedModel, *, verbose: bool = True) -> Report:
    """Makes `model` attend to the compressed pages directly when its cache is a `KVCache`. With other caches, or none,
    its results do not change. `model.set_attn_implementation("sdpa")` reverts it.

    An unsupported model is not changed, and the report says why. Decode steps that `generate` compiles (on a GPU, with
    `KVCache(max_length=...)`) then run inside `KVCache.step`.

    Args:
        model: a transformers model, or a PEFT model.
        verbose: print the report.

    Returns: a `Report`.

    Raises:
        TypeError: not a transformers or PEFT model.
        ValueError: not a decoder-only language model; PEFT prefix tuning.
    """
    model = base_model("enable", model)
    text = text_config(model.config)
    types, given = get_layer_types_and_kwargs(text)
    unfit = misfit(text)
    if unfit is None:
        absorb(model)
        attention.register()
        select(model, text, attention.NAME)
        model.__dict__["get_compiled_call"] = Stepped(model)
    fused, notes = unfit is None and text._attn_implementation == attention.NAME, []
    if unfit:
        notes.append(f"{unfit}; the model is not changed")
    elif not fused:
        notes.append(f"{type(model).__name__} does not use transformers' attention interface: decoded at every step")
    shared = sum(reads_others(text, i) for i in range(len(types)))
    own = sum(not is_paged(*x) for x in zip(types, given, text.per_layer_config, strict=False)) - shared
    if own:
        notes.append(f"{own} of {len(types)} layers keep transformers' own cache; doctor(model) lists them and why")
    if shared:
        notes.append(f"{shared} of {len(types)} layers attend to K and V of the others, which are stored once")
    if "indexed_attention" in types and chosen(text):
        notes.append(
            f"{types.count('indexed_attention')} of {len(types)} layers select tokens with an indexer: supported up to "
            f"{chosen(text):,} slots (index_topk), which are all attended to; an error beyond"
        )
    if fused and getattr(text, "kv_lora_rank", None):
        why = unabsorbed(model)
        notes.append(  # compiled: static_layer.FEW
            "latent attention (MLA): "
            + (why or "absorbed, compiled in calls of up to 16 tokens on the CPU; long calls, where that is cheaper, "
               "and other compiled ones expand latents")
        )  # fmt: skip
        fused = not why
    reason = usable(model.device)
    if reason:
        notes.append(f"the model is on {model.device} ({reason}): a KVCache needs it on the CPU")
    report = Report(type(model).__name__, fused, dict(Counter(types)), notes)
    if verbose:
        print(report)
    return report
