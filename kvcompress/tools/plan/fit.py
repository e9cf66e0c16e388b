"""What fits on a device: weights, requests, batch, context."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .models import Model
from .size import Recipe, exact, shared_prefix
from .units import show_gb

WEIGHT_BITS = (16, 8, 4)
FORMATS = ("raw", "int8", "int8/int4", "int4", "int2")
_MOST = 2**27  # tokens; beyond the positions of any model


def held(model: Model, recipe: Recipe | str, tokens: int, batch: int = 1) -> int:
    """Bytes of `batch` sequences of `tokens` tokens during decoding (after a step, not after the prompt)."""
    return exact(model, recipe, tokens, batch, prompt=max(1, tokens - 1)).bytes


def weights(model: Model, bits: float) -> int:
    """Bytes of the weights at `bits` per parameter, without scales of weight formats. Raises ValueError if the number
    of parameters is unknown."""
    if model.parameters is None:
        raise ValueError(
            f"plan: {model.name}: expected the number of parameters (--parameters), which its config lacks"
        )
    return round(model.parameters * bits / 8)


def most_requests(model: Model, recipe: Recipe, tokens: int, room: int, prefix: int = 0) -> int:
    """Number of sequences of `tokens` tokens that fit in `room` bytes, with the first `prefix` tokens shared."""

    def fits(n: int) -> bool:
        need = shared_prefix(model, recipe, tokens, prefix, n)[0] if prefix else held(model, recipe, tokens, n)
        return need <= room

    return _largest(fits, 2**24)


def most_tokens(model: Model, recipe: Recipe, room: int) -> int:
    """Longest context in tokens of a sequence that fits in `room` bytes."""
    return _largest(lambda n: held(model, recipe, n) <= room, _MOST)


def _largest(fits: Any, most: int) -> int:
    """The largest n up to `most` with fits(n), or 0, for a monotonic fits."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@dataclass
class Cell:
    """A combination of weight precision and cache format on a device.

    weights: bytes of the weights; room: bytes left for caches; request: bytes of one request; requests: how many fit;
    context: longest context of one request in tokens; fits: whether the requested batch fits.
    """

    bits: float
    format: str
    weights: int
    room: int
    request: int
    requests: int
    context: int
    fits: bool

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)


def cells(
    model: Model, recipes: list[Recipe], bits: tuple[float, ...], usable: int, tokens: int, batch: int, prefix: int
) -> list[Cell]:
    """All combinations of weight precisions (bits per parameter) and cache formats, for `batch` requests of `tokens`
    tokens with the first `prefix` shared, in `usable` bytes. Raises ValueError as `weights`."""
    found = []
    for b in bits:
        room = usable - weights(model, b)
        for recipe in recipes:
            request = held(model, recipe, tokens)
            n = most_requests(model, recipe, tokens, room, prefix) if room > 0 else 0
            context = most_tokens(model, recipe, room) if room > 0 else 0
            found.append(Cell(b, str(recipe), usable - room, room, request, n, context, n >= batch))
    return found


def remedies(model: Model, found: list[Cell], usable: int, memory: int, tokens: int, batch: int) -> list[str]:
    """Suggestions with numbers if nothing fits: smaller weights, fewer tokens, more devices (sizes in bytes)."""
    best = min(found, key=lambda c: c.weights + c.request * batch)
    need = best.weights + held(model, best.format, tokens, batch)
    said = [
        f"{-(-need // usable)} such devices ({show_gb(need)} with {best.bits:g}-bit weights and {best.format}; "
        f"{show_gb(usable)} usable on each), or one of {show_gb(need * memory / usable)}"
    ]
    if best.room > 0 and best.context:
        said.append(f"a context of {best.context:,} tokens instead of {tokens:,} (one request, {best.format})")
    if best.room > 0 and batch > 1 and best.requests:
        said.append(f"{best.requests} requests instead of {batch} ({best.format})")
    if best.bits > 2 and best.room <= 0 and (smaller := weights(model, best.bits / 2)) < usable:
        said.append(f"weights of {best.bits / 2:g} bits: {show_gb(smaller)} instead of {show_gb(best.weights)}")
    return said
