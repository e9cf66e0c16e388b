"""Size of a cache in bytes: the usual formula, and the exact size, page by page. Does not need torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from ... import _C, formats
from .models import Layer, Model

_UNIT, _LARGE, _SYSTEM_PAGE, _SLAB_SLOTS = (
    2**14,
    2**20,
    4096,
    16,
)  # of pools in shared address space: csrc/core/memory/units.c


def formula(model: Model, tokens: int, batch: int = 1, element: float | None = None, *, windows: bool = False) -> float:
    """Bytes by the usual formula, 2 * B * L * H * D * S * bytes, for any K and V dims.

    tokens: S, of each of `batch` sequences; element: bytes per element (default: the model's dtype); windows: count at
    most a layer's window, which the formula ignores.
    """
    element = model.element if element is None else element
    total = 0.0
    for layer in model.layers:
        kept = min(tokens, layer.window) if windows and layer.window else tokens
        total += layer.elements * kept * element
    return batch * total


@dataclass(frozen=True)
class Recipe:
    """The options of a KVCache that determine its size; names as in KVCache.

    per_layer: {layer: (K format, V format)}; budget: tokens that a policy keeps of each sequence (0: all); scores:
    whether the policy accumulates attention (H2O: one score per token and head); ragged: whether heads keep different
    tokens.
    """

    key: str = "int8"
    value: str = ""
    page_size: int = 64
    sinks: int = 4
    residual_length: int | None = None
    per_layer: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    budget: int = 0
    scores: bool = False
    ragged: bool = False

    def pair(self, layer: int) -> tuple[str, str]:
        """(K format, V format) of a layer."""
        return self.per_layer.get(layer, (self.key, self.value or self.key))

    def __str__(self) -> str:
        return "/".join(dict.fromkeys((self.key, self.value or self.key)))


def recipe_of(given: Recipe | str, **options: Any) -> Recipe:
    """`given`; or for K/V formats such as "int8" or "int8/int4", the Recipe with these and `options`."""
    if isinstance(given, Recipe):
        return given
    key, _, value = given.partition("/")
    return Recipe(key, value, **options)


@dataclass
class Size:
    """Bytes by part, as in `KVCache.stats()["parts"]`, and the number of tokens kept of each sequence."""

    parts: dict[str, int]
    kept: int

    @property
    def bytes(self) -> int:
        """All of them."""
        return sum(self.parts.values())


@cache
def _table_struct() -> int:
    """Bytes of an empty table, without its arrays."""
    code = formats.raw("bfloat16")
    table = _C.Table(_C.Pool(shared=True), heads=1, key_dim=64, value_dim=64, batch=1, raw=code, key=code, value=code)
    return table.stats()["table_bytes"] - (4 + 2) * 8


def _dtype(element: int) -> str:
    return "float32" if element == 4 else "bfloat16"


@cache
def _page(key: int, value: int, dims: tuple[int, int], tokens: int) -> int:
    """Bytes of a page of one head."""
    fill = [d + -d % max(formats.TABLE[c]["dim_multiple"] for c in (key, value)) for d in dims]
    return formats.page_bytes(key, value, fill[0], fill[1], tokens)


def _columns(tokens: int, prompt: int, sinks: int, page: int) -> int:
    """Capacity in columns of a table after `prompt` tokens in one call and the rest one by one, by doubling."""
    columns = 4
    for n in (prompt, tokens):
        needed = 1 + (1 + (n - 1 - sinks) // page if n > sinks else 0)
        while columns < needed:
            columns = max(needed, 2 * columns) if n == prompt else 2 * columns
    return columns


class _Pool:
    """The resident part of slabs: slots by size, and freed slots kept for the next page."""

    def __init__(self) -> None:
        self.live: Counter[int] = Counter()
        self.hot: Counter[int] = Counter()

    def slack(self) -> int:
        """Bytes that are resident but not used."""
        total = 0
        for size, live in self.live.items():
            touched, slabs = live + self.hot[size], 0
            total -= live * size
            most = -(-size * _SLAB_SLOTS // _LARGE) * _LARGE
            while touched:  # slabs double, up to 1 MiB or 16 slots
                units = -(-min(size * max(slabs, 1), most) // _UNIT)
                slots = (1 << (units - 1).bit_length()) * _UNIT // size
                count = touched // slots if slabs * size >= most and touched > slots else 1
                used = min(touched, slots)
                total += count * (-(-used * size // _SYSTEM_PAGE) * _SYSTEM_PAGE)
                touched, slabs = touched - count * used, slabs + count * slots
        return total


def _sealed_pages(recipe: Recipe, full: int, prompt: int, tokens: int) -> int:
    """How many of `full` filled pages are sealed, after a long call and then single steps."""
    at_once = prompt - max(recipe.page_size, recipe.residual_length or 0)
    later = tokens - 1 - (recipe.residual_length or 0) if tokens > prompt else 0
    return min(full, max(0, max(at_once, later) - recipe.sinks) // recipe.page_size)


def _open_pages(recipe: Recipe, prompt: int, tokens: int) -> int:
    stored = max(0, tokens - recipe.sinks)
    return -(-stored // recipe.page_size) - _sealed_pages(recipe, stored // recipe.page_size, prompt, tokens)


def _waiting(recipe: Recipe, prompt: int, tokens: int) -> bool:
    """True if a step has sealed a raw page whose memory is kept for the next one."""
    page, first = recipe.page_size, max(prompt, tokens - recipe.page_size)
    full = tokens // page
    if tokens == prompt or _sealed_pages(recipe, full, prompt, tokens) == _sealed_pages(recipe, full, prompt, prompt):
        return False
    if (recipe.residual_length or 0) % page == 0:  # the sealing step allocated another page before
        return True
    most = max(_open_pages(recipe, prompt, t) for t in range(first, tokens + 1))
    return most > _open_pages(recipe, prompt, tokens)


def _paged(
    layer: Layer, pair: tuple[str, str], layers: int, recipe: Recipe, tokens: int, batch: int, prompt: int,
    element: int, pool: _Pool, resident: int,
) -> dict[str, int]:  # fmt: skip
    """Bytes by part of `layers` full-attention layers; offloaded: sealed pages except those of the `resident` newest
    tokens."""
    heads, dims = layer.heads, (layer.key_dim, layer.value_dim)
    raw = formats.resolve("raw", _dtype(element))
    codes = formats.resolve(pair[0], _dtype(element)), formats.resolve(pair[1], _dtype(element))
    sinks, page = recipe.sinks, recipe.page_size
    # An entry of a uniform table is the page of all heads; of a ragged table, of one head.
    together, lines = (1, batch * heads) if recipe.ragged else (heads, batch)
    sink = together * _page(raw, raw, dims, -(-sinks // 16) * 16) if sinks else 0
    open_ = together * _page(raw, raw, dims, page)
    closed = together * _page(*codes, dims, page)
    pages = -(-max(0, tokens - sinks) // page)
    sealed = pages if codes == (raw, raw) else _sealed_pages(recipe, max(0, tokens - sinks) // page, prompt, tokens)
    for size, count in ((sink, 1), (closed, sealed), (open_, pages - sealed)):
        if size and count:
            pool.live[size] += layers * lines * count
    if codes != (raw, raw) and _waiting(recipe, prompt, tokens):
        whole = open_ % _SYSTEM_PAGE == 0  # then all but one are returned to the system
        pool.hot[open_] = 1 if whole else layers * lines + pool.hot[open_]
    tables = _table_struct() + lines * (_columns(tokens, prompt, sinks, page) + 2) * 8
    if recipe.budget:  # slots of the kept tokens, and scores, with their capacity
        tables += (lines * 4 + (batch * heads * 4 if recipe.scores else 0)) * (tokens + tokens // 2)
    offloaded = min(sealed, max(0, tokens - resident - sinks) // page)
    return {
        "sealed": layers * lines * (sealed - offloaded) * closed,
        "offloaded": layers * lines * offloaded * closed,
        "open": layers * lines * (pages - sealed) * open_,
        "sinks": layers * lines * sink,
        "tables": layers * tables,
    }


def _window_page(layer: Layer, page: int) -> int:
    """Page size of a layer with a window (hf/layer_options.py); 0 if the layer keeps transformers' own cache."""
    chunked = layer.kind == "chunked_attention"
    kinds = ("sliding_attention", "chunked_attention")
    if layer.kind not in kinds or layer.window < 2 or (chunked and layer.window % 16):
        return 0
    most = min(page, max(16, layer.window // 8 // 16 * 16))
    return next(p for p in range(most, 15, -16) if not chunked or layer.window % p == 0)


def _dropped(layer: Layer, page: int, seen: int, last: int) -> int:
    """Number of pages freed from the front after a call of `last` tokens."""
    back = seen - min(last, page)
    first = back // layer.window * layer.window if layer.kind == "chunked_attention" else back - layer.window + 1
    return max(0, first) // page


def _windowed(
    layer: Layer, pair: tuple[str, str], layers: int, recipe: Recipe, tokens: int, batch: int, prompt: int,
    element: int, pool: _Pool,
) -> dict[str, int]:  # fmt: skip
    """Bytes by part of `layers` layers with a window."""
    page, dims = recipe.page_size, (layer.key_dim, layer.value_dim)
    raw = formats.resolve("raw", _dtype(element))
    codes = formats.resolve(pair[0], _dtype(element)), formats.resolve(pair[1], _dtype(element))
    open_, closed = layer.heads * _page(raw, raw, dims, page), layer.heads * _page(*codes, dims, page)

    def pages(seen: int) -> int:
        return -(-seen // page)

    def sealed(seen: int) -> int:
        return pages(seen) if codes == (raw, raw) else _sealed_pages(recipe, seen // page, prompt, seen)

    freed, at_first = _dropped(layer, page, tokens, prompt if tokens == prompt else 1), sealed(prompt)
    held, still_open = sealed(tokens) - freed, pages(tokens) - sealed(tokens)
    for size, count in ((closed, held), (open_, still_open)):
        pool.live[size] += layers * batch * count
    # Freed pages are kept for the next ones: after the first call those of one layer, later one of each.
    later = freed > _dropped(layer, page, prompt, prompt)
    waiting = batch * max(at_first - held, layers * later)
    pool.hot[closed] = max(pool.hot[closed], waiting if closed % _SYSTEM_PAGE else int(later))
    if codes != (raw, raw) and _waiting(recipe, prompt, tokens):
        pool.hot[open_] = 1 if open_ % _SYSTEM_PAGE == 0 else layers * batch + pool.hot[open_]
    columns = max(4, 1 + pages(prompt))
    for seen in range(prompt + 1, min(tokens, prompt + layer.window + 4 * page) + 1):
        before = _dropped(layer, page, seen - 1, prompt if seen - 1 == prompt else 1)
        while columns < 1 + pages(seen) - before:
            columns *= 2
    return {
        "sealed": layers * batch * held * closed,
        "open": layers * batch * still_open * open_,
        "tables": layers * (_table_struct() + batch * (columns + 2) * 8),
    }


def exact(
    model: Model, recipe: Recipe | str = "int8", tokens: int = 4096, batch: int = 1, prompt: int | None = None,
    resident: int | None = None,
) -> Size:  # fmt: skip
    """Size of a KVCache after `tokens` tokens of each of `batch` sequences, exact to the byte without a budget. With a
    budget, the size just before an eviction, without the slack of a long first call.

    Args:
        model: a `Model`.
        tokens, batch: tokens per sequence, number of sequences.
        recipe: a `Recipe`, or formats such as "int8" or "int8/int4".
        prompt: tokens of the first call; the rest follow one by one. Default: all tokens.
        resident: with tiers, number of newest tokens that are not offloaded (`KVCache.use_tiers`); all other sealed
            pages are. Adds the parts "offloaded" (bytes in the tiers) and "stages" (buffers for fetching, in the pool).

    Layers of other kinds have the size of transformers' caches (a sliding-window layer stores its first call whole,
    until the second). States of linear attention are not counted. Raises ValueError for unknown formats, unsupported
    dims, and counts out of range.
    """
    recipe = recipe_of(recipe)
    for what, n in (("tokens", tokens), ("batch", batch)):
        if n < 1:
            raise ValueError(f"size: {what}: expected at least 1, got {n}")
    if resident is not None and resident < 0:
        raise ValueError(f"size: resident: expected at least 0 tokens, got {resident}")
    prompt = tokens if prompt is None else min(prompt, tokens)
    kept = min(tokens, recipe.budget + recipe.page_size - 1) if recipe.budget else tokens
    parts = Counter(dict.fromkeys(("sealed", "offloaded", "open", "sinks", "tables", "slack", "other"), 0))
    pool, stages = _Pool(), list[int]()
    groups = Counter((layer, recipe.pair(index)) for index, layer in enumerate(model.layers))
    for (layer, pair), count in groups.items():
        if layer.paged(tokens):
            if model.latent:  # the rotary part of K gets at least 8 bits
                bits = formats.TABLE[formats.resolve(pair[1], _dtype(model.element))]["bits"]
                pair = pair[0], pair[1] if bits >= 8 else "int8"
            own = _paged(layer, pair, count, recipe, kept, batch, min(prompt, kept), model.element, pool,
                         kept if resident is None else resident)  # fmt: skip
            stages += [own["offloaded"] // count] * count if own["offloaded"] else []
            parts.update(own)
        elif page := _window_page(layer, recipe.page_size):
            inside = replace(recipe, sinks=0, budget=0, page_size=page)
            parts.update(_windowed(layer, pair, count, inside, tokens, batch, prompt, model.element, pool))
        elif layer.heads:
            held = min(tokens, layer.window) if layer.window and tokens > prompt else tokens
            parts["other"] += count * batch * layer.elements * held * model.element
    parts["slack"] = pool.slack()
    if resident is None:
        del parts["offloaded"]
    else:  # two buffers, with capacity to grow
        parts["stages"] = min(2, len(stages)) * -(-(max(stages, default=0) * 5 // 4) // 64) * 64
    return Size(dict(parts), kept)


def shared_prefix(model: Model, recipe: Recipe | str, tokens: int, prefix: int, requests: int) -> tuple[int, int]:
    """(bytes of `requests` sequences of `tokens` tokens that share the first `prefix`, bytes without sharing). Only
    full sealed pages of full-attention layers are shared; the rest of the prefix is copied. model, recipe: as in
    `exact`. Raises ValueError for a prefix or requests out of range."""
    if not 0 <= prefix <= tokens or requests < 1:
        raise ValueError(f"shared: expected 0 to {tokens} tokens and at least 1 request, got {prefix} and {requests}")
    recipe = recipe_of(recipe)
    one = exact(model, recipe, tokens)
    pages = max(0, prefix - recipe.sinks) // recipe.page_size
    closed = pages * recipe.page_size
    once = 0
    if closed:
        parts = exact(model, recipe, min(tokens, recipe.sinks + closed + recipe.page_size)).parts
        once = min(one.parts["sealed"], parts["sealed"])
    return one.bytes * requests - once * (requests - 1), one.bytes * requests
