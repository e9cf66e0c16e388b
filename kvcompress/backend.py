"""enable(model): selects the fused attention."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from . import attention
from .cache import text_config


@dataclass
class Report:
    """What `enable` did. fused: attention reads the pages; otherwise a KVCache still works, decoded at every
    step."""

    model: str
    fused: bool
    layers: dict[str, int]
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        state = "on" if self.fused else "NOT on: layers are decoded at every step"
        kinds = ", ".join(f"{n} {kind}" for kind, n in self.layers.items())
        first = f"kvcompress: {self.model}: fused attention {state} ({kinds})"
        return "\n".join([first, *(f"  - {note}" for note in self.notes)])


def _select(model: PreTrainedModel, text: Any) -> None:
    """Sets the implementation of the text decoder alone: a vision or audio tower keeps its own."""
    if text is model.config:
        return model.set_attn_implementation(attention.NAME)
    for name in model.config.sub_configs:
        if getattr(model.config, name, None) is text:
            return model.set_attn_implementation({name: attention.NAME})
    raise ValueError(
        f"enable: wanted a text config among {sorted(model.config.sub_configs)}, got {type(text).__name__}"
    )


def enable(model: PreTrainedModel, *, verbose: bool = True) -> Report:
    """Makes `model` attend through kvcompress when its cache is a `KVCache`. Returns a report, printed if
    `verbose`.

    With other caches, or none, the model computes what it did before. Undo with
    `model.set_attn_implementation("sdpa")`.

    Raises:
        TypeError: not a transformers model.
        ValueError: not a decoder-only language model.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"enable: model: wanted a transformers model, got {type(model).__name__}")
    text = text_config(model.config)
    attention.register()
    _select(model, text)
    types, _ = get_layer_types_and_kwargs(text)
    fused, notes = text._attn_implementation == attention.NAME, []
    if not fused:
        notes.append(f"{type(model).__name__} does not use transformers' attention interface")
    own = sum(kind != "full_attention" for kind in types)
    if own:
        notes.append(f"{own} of {len(types)} layers are not full attention: they stay transformers' own")
    if getattr(text, "kv_lora_rank", None):
        notes.append("latent attention (MLA) expands what is cached before attention: decoded at every step")
    if model.device.type != "cpu":
        notes.append(f"the model is on {model.device}: a KVCache needs it on the CPU")
    report = Report(type(model).__name__, fused, dict(Counter(types)), notes)
    if verbose:
        print(report)
    return report
