"""plan(): size, fit and recommendations for a model on a device, as a report."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from ... import _C
from .choices import Choice, floor_of, recommend, regime
from .fit import FORMATS, WEIGHT_BITS, Cell, cells, held, remedies
from .models import OURS, Model, read
from .size import exact, formula, recipe_of, shared_prefix
from .units import read_device, read_tokens, show_bytes, show_gb


@dataclass
class Plan:
    """Result of `plan`; `print` shows it, `to_dict` returns it as JSON.

    memory, usable: bytes of the device, and of these for weights and caches (0: no device given); cells: combinations
    of weight precision and format; remedies: suggestions if nothing fits; choices: recommendations, best first;
    attention: {kind: bytes of one uncompressed request, if the model had this attention}.
    """

    model: Model
    context: int
    batch: int
    memory: int
    usable: int
    bandwidth: float | None
    prefix: int
    workload: str
    quality: str | float
    request: dict[str, int]
    cells: list[Cell]
    remedies: list[str]
    choices: list[Choice]
    attention: dict[str, int]
    shared: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        """True if anything fits, or no device was given."""
        return not self.memory or any(cell.fits for cell in self.cells)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-serializable dict; sizes are in bytes, lengths in tokens."""
        m = self.model
        full = [layer for layer in m.layers if layer.kind == "full_attention"]
        return {
            "model": {"name": m.name, "source": m.source, "layers": len(m.layers), "full_attention": len(full),
                      "attention": m.attention, "parameters": m.parameters, "trained": m.trained},
            "context": self.context, "batch": self.batch, "workload": self.workload, "quality": self.quality,
            "regime": regime(self.context),
            "device": {"memory": self.memory, "usable": self.usable, "GB/s": self.bandwidth} if self.memory else None,
            "formula": round(formula(m, self.context)), "request": self.request, "attention": self.attention,
            "fits": self.fits, "cells": [cell.to_dict() for cell in self.cells], "remedies": self.remedies,
            "prefix": self.shared, "choices": [choice.to_dict() for choice in self.choices], "notes": self.notes,
        }  # fmt: skip

    def _formula(self) -> str:
        m, first = self.model, self.model.layers[0]
        same = all((x.elements, x.kind) == (first.elements, "full_attention") for x in m.layers)
        total = show_bytes(formula(m, self.context))
        if same and first.key_dim == first.value_dim:
            return (f"2 x {len(m.layers)} layers x {first.heads} KV heads x {first.key_dim} dims x {self.context:,} "
                    f"tokens x {m.element} bytes = {total}")  # fmt: skip
        windows = formula(m, self.context, windows=True)
        cut = f"; with windows {show_bytes(windows)}" if windows < formula(m, self.context) else ""
        per_token = sum(x.elements for x in m.layers) * m.element
        return f"{per_token:,} bytes a token in {len(m.layers)} layers x {self.context:,} tokens = {total}{cut}"

    def _model_lines(self) -> list[str]:
        m = self.model
        first = next((x for x in m.layers if x.kind == "full_attention"), m.layers[0])
        empty = sum(not x.heads for x in m.layers)
        other = [x for x in m.layers if x.heads and x.kind not in OURS and not x.paged(self.context)]
        parameters = f", {m.parameters / 1e9:.2f} G parameters" if m.parameters else ""
        dims = f"{first.key_dim}" if first.key_dim == first.value_dim else f"{first.key_dim} + {first.value_dim}"
        lines = [
            f"{m.name}: {len(m.layers)} layers, {m.query_heads} query and {first.heads} KV heads of {dims} dims "
            f"({m.attention}){parameters}" + (f"; {m.source}" if m.source else "")
        ]
        if empty:
            lines.append(f"  layers without K and V (linear attention, or no attention): {empty}")
        if other:
            kinds, topk = ", ".join(sorted({x.kind for x in other})), max(x.topk for x in other)
            why = f"a KVCache supports up to {topk:,} slots (index_topk), so this is a DynamicCache" if topk else \
                "kept by transformers"  # fmt: skip
            lines.append(f"  layers of type {kinds}: {len(other)}; {why}, uncompressed")
        lines.append(f"KV cache of one request: {self._formula()}")
        compared = ", ".join(f"{name} {show_gb(n)}" for name, n in self.attention.items())
        lines.append(f"  with other attention variants: {compared}")
        held_ = ", ".join(f"{name} {show_gb(n)}" for name, n in self.request.items())
        lines.append(f"  in kvcompress, including scales, raw pages and tables: {held_}")
        return lines

    def _device_lines(self) -> list[str]:
        lines = [
            f"Device: {show_bytes(self.memory)}, {show_gb(self.usable)} usable for weights and caches; "
            f"{self.batch} request{'s' * (self.batch > 1)} of {self.context:,} tokens"
        ]
        names = list(dict.fromkeys(cell.format for cell in self.cells))
        lines.append(f"  {'weights':24}" + "".join(f"{name:>16}" for name in names))
        for bits in dict.fromkeys(cell.bits for cell in self.cells):
            row = [cell for cell in self.cells if cell.bits == bits]
            head = f"{bits:g} bits, {show_gb(row[0].weights)}"
            if row[0].room <= 0:
                lines.append(f"  {head:24}do not fit: {show_gb(-row[0].room)} over")
                continue
            shown = "".join(f"{f'{c.requests} ({_k(c.context)})':>16}" for c in row)
            lines.append(f"  {head:24}{shown}   {show_gb(row[0].room)} left")
        short: dict[float, list[str]] = {}
        for c in self.cells:
            if c.room > 0 and not c.fits:
                short.setdefault(c.bits, []).append(c.format)
        said = [
            f"{bits:g}-bit weights" + ("" if len(x) == len(names) else f" and {', '.join(x)}")
            for bits, x in short.items()
        ]
        few = f"; fewer than requested with {'; '.join(said)}" if said else ""
        lines.append(f"  requests that fit (longest context of a single request){few}")
        if not self.fits:
            lines += ["Nothing fits. To make it fit:", *(f"  - {text}" for text in self.remedies)]
        return lines

    def __str__(self) -> str:
        lines = self._model_lines()
        if self.memory:
            lines += self._device_lines()
        if self.shared:
            s = self.shared
            lines.append(
                f"Shared prefix of {s['tokens']:,} tokens, {s['requests']} requests of {s['format']}: "
                f"{show_gb(s['bytes'])} instead of {show_gb(s['apart'])}, {s['apart'] / s['bytes']:.2f}x"
            )
        lines.append(
            f"Choice for {self.context:,} tokens ({regime(self.context)} context), workload {self.workload}, quality "
            f"{self.quality} (KL up to {floor_of(self.quality):.0e}):"
        )
        for choice in self.choices:
            lines.append(f"  {choice.role}: {choice.strategy}")
            lines += [f"    - {reason}" for reason in choice.why]
        lines.append(f"  in Python: kvcompress.KVCache.from_dict(model.config, {self.choices[0].options})")
        lines += [f"Note: {note}" for note in self.notes]
        return "\n".join(lines)


def _k(tokens: int) -> str:
    return f"{tokens / 1024:.0f}K" if tokens >= 10_240 else f"{tokens:,}"


def _notes(
    model: Model, tokens: int, memory: int, bandwidth: float | None, gpu: Any, reserve: float, chosen: Choice
) -> list[str]:
    notes = []
    if model.trained and tokens > model.trained:
        notes.append(f"{tokens:,} tokens are beyond the {model.trained:,} that the model was trained for")
    if memory:
        notes.append(f"GB is 10^9 bytes, GiB 2^30; {gpu} is read as {memory:,} bytes; {reserve:.0%} are left to "
                     "activations, workspace and fragments (--reserve)")  # fmt: skip
    if any(layer.kind == "linear_attention" for layer in model.layers):
        notes.append("states of linear-attention layers are not counted (they do not grow with the context)")
    if bandwidth:
        step = chosen.bytes / bandwidth / 1e6
        raw = exact(model, "raw", tokens).bytes / bandwidth / 1e6
        notes.append(
            f"reading the cache of one request takes {step:.2f} ms a token at least ({raw:.2f} raw), "
            f"at the device's {bandwidth:,.0f} GB/s"
        )
    return notes


def _given(model: Model, weight_bits: tuple[float, ...], parameters: float | None) -> Model:
    """The model, with `parameters` if given. Raises ValueError for numbers out of range."""
    count = 1 if parameters is None else parameters
    if not all(0 < bits < math.inf for bits in weight_bits) or not 1 <= count < math.inf:
        raise ValueError(
            f"plan: expected weights of more than 0 bits and at least one parameter, got {weight_bits} and {parameters}"
        )
    return model if parameters is None else replace(model, parameters=int(parameters))


def plan(
    config: Any, *, gpu: str | int | None = None, context: str | int | None = None, batch: int = 1,
    weight_bits: tuple[float, ...] = WEIGHT_BITS, formats: tuple[str, ...] = FORMATS, parameters: float | None = None,
    prefix: str | int = 0, requests: int = 16, workload: str = "auto", quality: str | float = "high",
    drafts: bool = False, reserve: float = 0.1, page_size: int = 64, isa: str | None = None,
) -> Plan:  # fmt: skip
    """Computes the size of a model's caches, what fits on a device, and which format to use.

    Args:
        config: argument of `models.read`: a name in its table, a config.json or its folder, a dict, a transformers
            config or model.
        gpu: memory ("80GB": 10^9 bytes each, "80GiB": 2^30) or name of the device. None: plan without a device.
        context: tokens per request, such as 4096 or "32k" (x 1024). Default: the model's maximum.
        batch: number of concurrent requests.
        weight_bits, formats: bits per parameter, and cache formats ("int8", K/V as "int8/int4"), to consider.
        parameters: number of parameters. Default: from the config.
        prefix: number of first tokens shared by all requests, as `context`; requests: number of requests for its
            savings.
        workload, quality, drafts, isa: see `recommend`. Default of isa: this CPU's.
        reserve: share of the memory for everything else.
        page_size: tokens per page.

    Returns a `Plan`, with sizes in bytes. Raises ValueError for invalid arguments.
    """
    model = _given(read(config), weight_bits, parameters)
    tokens = read_tokens(context if context is not None else model.trained or 4096)
    prefix = read_tokens(prefix, "prefix") if prefix not in (0, "0") else 0
    if batch < 1 or requests < 1 or not 0 <= prefix <= tokens or not 0 <= reserve < 1:
        raise ValueError(
            "plan: expected a batch and requests of at least 1, a prefix up to the context and a reserve from 0 to 1, "
            f"got {batch}, {requests}, {prefix}, {reserve}"
        )
    isa = _C.isa() if isa is None else isa
    memory, bandwidth = read_device(gpu) if gpu is not None else (0, None)
    usable = round(memory * (1 - reserve))
    recipes = [recipe_of(text, page_size=page_size) for text in formats]
    found = cells(model, recipes, weight_bits, usable, tokens, batch, prefix) if memory else []
    choices = recommend(model, tokens, workload=workload, quality=quality, drafts=drafts, isa=isa)
    name, shared = choices[0].strategy.partition("+")[0], None
    if prefix:
        once, apart = shared_prefix(model, recipe_of(name, page_size=page_size), tokens, prefix, requests)
        shared = {"tokens": prefix, "requests": requests, "format": name, "bytes": once, "apart": apart}
    kinds = {kind: model.with_attention(kind) for kind in ("MHA", "MQA", "MLA")}
    compared = {model.attention: model, **{kind: other for kind, other in kinds.items() if kind != model.attention}}
    made = Plan(
        model, tokens, batch, memory, usable, bandwidth, prefix, workload, quality,
        {str(r): held(model, r, tokens) for r in recipes}, found, [], choices,
        {kind: round(formula(other, tokens)) for kind, other in compared.items()}, shared,
        _notes(model, tokens, memory, bandwidth, gpu, reserve, choices[0]),
    )  # fmt: skip
    if not made.fits:
        made.remedies = remedies(model, found, usable, memory, tokens, batch)
    return made
