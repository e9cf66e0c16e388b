"""What fits on a device: weights, requests, batch, context."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .models import Model
from .size import Recipe, exact, shared_prefix

WEIGHT_BITS = (16, 8, 4)
FORMATS = ("raw", "int8", "int8/int4", "int4", "int2")
_MOST = 2**27  # tokens; beyond what positions go to


def recipe_of(text: str, **options: Any) -> Recipe:
    """A `Recipe` of the text "int8/int4" (K / V formats); options of `Recipe`."""
    key, _, value = text.partition("/")
    return Recipe(key, value, **options)


def held(model: Model, recipe: Recipe, tokens: int, batch: int = 1) -> int:
    """Bytes of `batch` sequences of `tokens` while tokens are generated (after a step, not after the prompt)."""
    return exact(model, recipe, tokens, batch, prompt=max(1, tokens - 1)).bytes


def weights(model: Model, bits: float) -> int:
    """Bytes of the weights at `bits` a parameter, scales of weight formats not counted. Raises ValueError where the
    config does not tell how many parameters there are."""
    if model.parameters is None:
        raise ValueError(
            f"plan: {model.name}: expected the number of parameters (--parameters), the config does not tell"
        )
    return round(model.parameters * bits / 8)


def most_requests(model: Model, recipe: Recipe, tokens: int, room: int, prefix: int = 0) -> int:
    """Sequences of `tokens` that fit in `room` bytes, the first `prefix` tokens of each in common and stored once."""

    def need(n: int) -> int:
        if prefix:
            return shared_prefix(model, recipe, tokens, prefix, n)[0]
        return held(model, recipe, tokens, n)

    return _largest(lambda n: need(n) <= room, 2**24)


def most_tokens(model: Model, recipe: Recipe, room: int, batch: int = 1) -> int:
    """Longest context of `batch` sequences that fits in `room` bytes."""
    return _largest(lambda n: held(model, recipe, n, batch) <= room, _MOST)


def _largest(fits: Any, most: int) -> int:
    """The largest n up to `most` with fits(n), 0 if none; fits is true up to somewhere and false from there."""
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
    """One precision of the weights with one format of the cache on a device.

    weights, room, request: bytes: of the weights, left for caches, of one request; requests: how many fit; context: the
    longest of one request; fits: the batch that was asked for fits.
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
    """Every precision of the weights (bits a parameter) with every format of the cache, on `usable` bytes, for `batch`
    requests of `tokens`, of which the first `prefix` are shared. Raises ValueError as `weights` does."""
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
    """What would make it fit, where nothing does: smaller weights, fewer tokens, more devices. Figures in each."""
    best = min(found, key=lambda c: c.weights + c.request * batch)
    from .units import show_gb

    need = best.weights + held(model, recipe_of(best.format), tokens, batch)
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
