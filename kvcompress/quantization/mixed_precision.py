"""Mixed precision: formats for K and V, by position in the sequence, and by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import formats

Pair = tuple[str, str]
_STEP_UP = {2: "int4", 4: "int8"}


def pair(text: Any, what: str) -> Pair:
    """("int8", "int4") from "int8/int4" or from that pair; ("int8", "int8") from "int8"."""
    parts = text.split("/") if isinstance(text, str) else text
    if isinstance(parts, Sequence) and 1 <= len(parts) <= 2 and all(isinstance(part, str) for part in parts):
        return parts[0], parts[-1]
    raise ValueError(f"{what}: expected a format, or K/V formats as 'int8/int4', got {text!r}")


def _number(text: str) -> float:
    return int(text) if text.lstrip("-").isdecimal() else float(text)


def read_spans(text: str) -> list[tuple[float, float | None, str]]:
    """[(0, 0.2, "int8"), (0.2, None, "int4/int2")] from "int8@0.2,int4/int2": formats with their ends."""
    rows: list[tuple[float, float | None, str]] = []
    at: float = 0
    for part in text.split(","):
        names, given, end = part.partition("@")
        try:
            rows.append((at, _number(end) if given else None, names))
        except ValueError:
            raise ValueError(f"spans: expected FORMAT@END,.. such as int8@0.2,int4, got {text!r}") from None
        at = rows[-1][1] or 0
    return rows


def write_spans(spans: Any) -> str:
    """The inverse of `read_spans`."""
    return ",".join(
        "/".join(dict.fromkeys(pair(names, "spans"))) + ("" if end is None else f"@{end}") for _, end, names in spans
    )


def read_layers(text: str) -> dict[int, str]:
    """{0: "int8", -1: "int8/int4"} from "0=int8,-1=int8/int4"."""
    found: dict[int, str] = {}
    for part in text.split(","):
        layer, equals, names = part.partition("=")
        if not equals or not layer.lstrip("-").isdecimal() or int(layer) in found:
            raise ValueError(
                f"per_layer: expected LAYER=FORMAT,.. with each layer once, such as 0=int8,-1=int8, got {text!r}"
            )
        found[int(layer)] = names
    return found


def write_layers(layers: Mapping[int, Any]) -> str:
    """The inverse of `read_layers`."""
    return ",".join(f"{i}={'/'.join(dict.fromkeys(pair(names, 'per_layer')))}" for i, names in sorted(layers.items()))


class Spans:
    """Formats by position: [(start, end, format), ...], from 0 on without gaps.

    Args:
        start, end: token positions in a row (padding not counted) if all are integers, else fractions of `tokens`. The
            last end may be None. Later tokens get the layer's format. A page takes the format of its first token.
        format: "int8", or formats of K and V, "int8/int4".
        tokens: length that fractions refer to. Default: length of the first call (the prompt).

    Raises ValueError for gaps, overlaps, and fractions outside of 0 to 1.
    """

    def __init__(self, spans: Any, tokens: int | None = None) -> None:
        if tokens is not None and (not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1):
            raise ValueError(f"span_tokens: expected an integer of at least 1, got {tokens!r}")
        self.tokens = tokens
        self.rows: list[tuple[float, Pair]] = []
        if not isinstance(spans, Sequence) or isinstance(spans, str) or not spans:
            raise ValueError(f"spans: expected a list of (start, end, format), got {spans!r}")
        at: float = 0
        for row in spans:
            if not isinstance(row, Sequence) or isinstance(row, str) or len(row) != 3:
                raise ValueError(f"spans: expected (start, end, format), got {row!r}")
            start, end, names = row
            end = float("inf") if end is None else end
            numbers = all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in (start, end))
            if not numbers or start != at or not end > start:
                raise ValueError(f"spans: expected a span from {at:g} to a larger end, got {row!r}")
            self.rows.append((end, pair(names, "spans")))
            at = end
        bounds = [end for end, _ in self.rows if end != float("inf")]
        self.fractions = any(isinstance(x, float) for x in bounds)
        if self.fractions and bounds[-1] > 1:
            raise ValueError(f"spans: expected fractions from 0 to 1, or integers (tokens), got {bounds}")

    def formats(self) -> list[Pair]:
        """All (K, V) formats of the spans."""
        return [names for _, names in self.rows]

    def resolve(self, first_call: int) -> list[tuple[int, Pair]]:
        """[(end in tokens, formats)] for a first call of `first_call` tokens, in ascending order."""
        whole = (self.tokens or first_call) if self.fractions else 1
        found: list[tuple[int, Pair]] = []
        for end, names in self.rows:
            tokens = round(min(end * whole, 2**62))
            if tokens > (found[-1][0] if found else 0):
                found.append((tokens, names))
        return found


def by_layer(overrides: Any, layers: Sequence[int]) -> dict[int, dict[str, Any]]:
    """{layer: arguments of PagedKV} from {layer: format | K/V formats | dict}. layers: the paged layers; negative
    numbers count from the last of them.

    Raises ValueError for layers that are not paged or given twice, and for unknown arguments.
    """
    if not isinstance(overrides, Mapping):
        raise TypeError(f"per_layer: expected a dict {{layer: format}}, got {type(overrides).__name__}")
    found: dict[int, dict[str, Any]] = {}
    known = ("key", "value", "sinks", "residual_length", "page_size", "spans", "span_tokens", "policy")
    for layer, given in overrides.items():
        number = isinstance(layer, int) and not isinstance(layer, bool)
        index = layers[layer] if number and -len(layers) <= layer < 0 else layer
        if not number or index not in layers or index in found:
            raise ValueError(f"per_layer: expected each paged layer ({list(layers)}) at most once, got {layer!r}")
        if isinstance(given, Mapping):
            options = {"spans": None, **given} if {"key", "value"} & set(given) else dict(given)
            if unknown := sorted(set(options) - set(known)):
                raise ValueError(f"per_layer: {layer}: expected options out of {list(known)}, got {unknown}")
        else:
            options = {**dict(zip(("key", "value"), pair(given, f"per_layer: {layer}"), strict=True)), "spans": None}
        found[index] = options
    return found


def _changed(options: Mapping[str, Any], change: Callable[[Pair], Pair]) -> dict[str, Any]:
    """The arguments of PagedKV with `change` applied to all formats, including spans."""
    key, value = change((options["key"], options["value"]))
    spans = options.get("spans")
    if spans is not None:
        pairs = zip(spans, Spans(spans).formats(), strict=True)
        spans = [(start, end, change(names)) for (start, end, _), names in pairs]
    return {**options, "key": key, "value": value, "spans": spans}


def guard_rails(options: Mapping[str, Any], up: bool) -> dict[str, Any]:
    """The arguments of PagedKV with `guard=True`: raises ValueError if K has fewer bits than V; with `up`, formats of 4
    bits and below are replaced by the next larger one."""

    def guarded(names: Pair) -> Pair:
        key, value = names
        if formats.bits(key) < formats.bits(value):
            raise ValueError(
                f"KVCache: guard: expected K in at least the bits of V, got key={key!r}, value={value!r}; "
                "K is the more sensitive of the two: swap them, or pass guard=False"
            )
        return _STEP_UP.get(formats.bits(key), key), _STEP_UP.get(formats.bits(value), value)

    changed = _changed(options, guarded)
    return changed if up else dict(options)


def rope_part(options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of PagedKV for latent attention (MLA), where V is the rotary part of K: few dims that all heads
    use, so it gets at least 8 bits."""
    return _changed(options, lambda names: (names[0], names[1] if formats.bits(names[1]) >= 8 else "int8"))
