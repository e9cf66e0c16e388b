"""doctor(model): which cache and which attention each layer of a model uses, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import attention, backend
from .cache import KVCache
from .configs import misfit, reads_others, text_config
from .latent import unabsorbed
from .layer import PagedLayer
from .static_layer import FEW, StaticPagedLayer


@dataclass
class Row:
    """One layer. kind: layer type of the config; cache: kind of cache and format; attention: `fused` (reads compressed
    pages), `decoded` (dense K and V at every step) or `own` (transformers'); why: the reason, if not fused."""

    layer: int
    kind: str
    cache: str
    attention: str
    why: str = ""


@dataclass(repr=False)
class Diagnosis:
    """Result of `doctor`: a `Row` per layer. `str()` is a table, `repr()` one line."""

    model: str
    implementation: str
    rows: list[Row]

    def __str__(self) -> str:
        head = f"kvcompress: {self.model}, attention {self.implementation!r}"
        table = [("layer", "type", "cache", "attention", "why")]
        table += [(str(r.layer), r.kind, r.cache, r.attention, r.why) for r in self.rows]
        width = [max(len(row[i]) for row in table) for i in range(5)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, width, strict=True)).rstrip() for row in table]
        return "\n".join([head, *lines])

    def __repr__(self) -> str:
        fused = sum(r.attention == "fused" for r in self.rows)
        return f"Diagnosis({self.model}: attention of {fused} of {len(self.rows)} layers is fused)"


def _reason(model: Any, text: Any, types: list[str], cache: KVCache) -> tuple[str, str]:
    """("fused" or "decoded", why) for the paged layers."""
    if cache.forward_pass.config is not text:
        return "decoded", "the cache was made from a copy of the config; make it from model.config"
    if text._attn_implementation == attention.NAME:
        why = unabsorbed(model) if getattr(text, "kv_lora_rank", None) else ""
        return "decoded" if why else "fused", why
    unfit = misfit(text)
    return (
        "decoded",
        unfit or f"the model attends through {text._attn_implementation!r}: call kvcompress.enable(model)",
    )


_LIMIT = "which are all attended to; ValueError from slot {} on, where the indexer would select tokens"

_COMPILED = f"compiled calls of more than {FEW} tokens, and all of them on a GPU, expand latents"


def doctor(model: Any, cache: KVCache | str | None = None, *, verbose: bool = True) -> Diagnosis:
    """Reports for each layer of `model` which cache it uses, whether attention reads the compressed pages directly,
    and if not, why. Changes nothing.

    Args:
        model: a transformers model, or a PEFT model.
        cache: a KVCache of it, or the format of one. Default: "int8".
        verbose: print the table.

    Returns: a `Diagnosis`. Raises TypeError and ValueError as `enable` and KVCache do.
    """
    inner = backend.base_model("doctor", model)
    if not isinstance(cache, KVCache):
        cache = KVCache(inner.config, cache)
    text = text_config(inner.config)
    types, _ = backend.get_layer_types_and_kwargs(text)
    how, why = _reason(inner, text, types, cache)
    rows = []
    for index, (kind, layer) in enumerate(zip(types, cache.layers, strict=True)):
        if isinstance(layer, PagedLayer):
            names = "/".join(dict.fromkeys((layer.options["key"], layer.options["value"])))
            where = (
                " by position" if layer.options.get("spans") and not layer.window else "",
                f", up to {layer.max_slots:,} slots" if layer.max_slots else "",
                f", {'chunks' if layer.chunked else 'window'} of {layer.window}" if layer.window else "",
            )
            expands = layer.options.get("latent") and how == "fused" and isinstance(layer, StaticPagedLayer)
            reasons = why, _LIMIT.format(layer.max_slots) if layer.max_slots else "", _COMPILED if expands else ""
            rows.append(Row(index, kind, f"paged {names}{''.join(where)}", how, "; ".join(filter(None, reasons))))
        elif reads_others(text, index):
            rows.append(Row(index, kind, "an earlier layer's", how, why))
        elif kind == "dummy":
            rows.append(Row(index, kind, "none", "own", "holds no K and V"))
        else:
            small = "a window of 1 or a chunk size that is not a multiple of 16"
            what = small if kind in ("sliding_attention", "chunked_attention") else f"{kind}:"
            rows.append(Row(index, kind, type(layer).__name__, "own", f"{what} keeps transformers' own cache"))
    found = Diagnosis(type(inner).__name__, text._attn_implementation or "", rows)
    if verbose:
        print(found)
    return found
