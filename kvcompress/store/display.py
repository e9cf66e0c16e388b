"""Display of a cache: its pages, a map of them, HTML for notebooks."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np

from .. import formats

COLOURS = {"raw": "#8a8f98", 32: "#8a8f98", 16: "#8a8f98", 8: "#2f7fc1", 4: "#2a9d8f", 2: "#e0902f"}
"""Colours of pages, by the bits of their codes."""
SINK, OPEN = "#3b3f46", "#c9ccd1"
# Of the parts of `stats()`:
PARTS = {"sealed": "#2f7fc1", "open": OPEN, "sinks": SINK, "tables": "#e0902f", "slack": "#c0396b", "other": "#7b4fa3"}
_LINES = 24  # rows of a map in HTML


def bits_of(name: str) -> float:
    """Bits per code of a format; for "int8/int4" the mean."""
    parts = name.split("/")
    return sum(map(formats.bits, parts)) / len(parts)


def colour_of(page: dict[str, Any]) -> str:
    """The colour of a page from `pages`."""
    if page["kind"] in ("sink", "open"):
        return SINK if page["kind"] == "sink" else OPEN
    bits = bits_of(page["format"])
    return COLOURS.get(int(bits), "#7b4fa3")  # K and V of different bits


def pages(cache: Any) -> list[dict[str, Any]]:
    """The pages of a KVCache or PagedKV, in sequence order, as a list of dicts.

    Keys: layer; row: of the batch; head: None for all heads, or a head if heads keep different tokens; column; kind:
    "sink", "open" or "sealed"; format: "int8", or "int8/int4" for K/V; tokens: number of stored tokens; shared: whether
    another cache or row uses the page too.
    """
    found: list[dict[str, Any]] = []
    for index, store in stores(cache):
        table, raw = store.table, formats.resolve("raw", store.dtype)
        heads = table.rows.shape[1]
        for b, h, column in np.argwhere(table.entries >= 0).tolist():
            entry = int(table.entries[b, h, column])
            key, value = entry >> 8 & 255, entry & 255
            n, first = int(table.rows[b, h, 0]), 0 if column == 0 else store.sinks + (column - 1) * store.page_size
            room = store.sinks if column == 0 else store.page_size
            tokens = max(0, min(n - first, room))
            if table.slots.size:
                tokens = int((table.slots[b, h, first : first + tokens] >= 0).sum())
            is_raw = (key, value) == (raw, raw)
            kind = "sink" if column == 0 else "open" if is_raw and store.codes != (raw, raw) else "sealed"
            name = "/".join(dict.fromkeys((formats.name_of(key), formats.name_of(value))))
            refs = store.pool.refs(formats.offset_of(entry))
            found.append({"layer": index, "row": b, "head": h if heads > 1 else None, "column": column, "kind": kind,
                          "format": name, "tokens": tokens, "shared": refs > 1})  # fmt: skip
    return found


def stores(cache: Any) -> list[tuple[int, Any]]:
    """(layer, PageStore) of the non-empty paged layers of a KVCache, or of a PagedKV."""
    if not hasattr(cache, "layers"):
        return [(0, cache.page_store)]
    found = []
    for index, layer in enumerate(cache.layers):
        if getattr(layer, "store", None) is not None and layer.is_initialized:
            layer.commit()
            found.append((index, layer.store.page_store))
    return found


def _bytes(n: float) -> str:
    return f"{n / 1e9:.2f} GB" if n >= 1e9 else f"{n / 1e6:.2f} MB" if n >= 1e6 else f"{n / 1e3:.1f} kB"


def stats_html(stats: dict[str, Any]) -> str:
    """`stats()` (sizes in bytes) as HTML: a table and a bar chart of its parts."""
    parts = {name: n for name, n in stats["parts"].items() if n}
    total = sum(parts.values()) or 1
    bar = "".join(
        f'<span title="{name}: {n:,} bytes" style="display:inline-block;height:14px;width:{100 * n / total:.2f}%;'
        f'background:{PARTS[name]}"></span>' for name, n in parts.items()
    )  # fmt: skip
    key = " ".join(
        f'<span style="color:{PARTS[name]}">&#9632;</span>&nbsp;{name}&nbsp;{_bytes(n)}' for name, n in parts.items()
    )
    row = "".join(
        f"<td style='padding:2px 12px'><b>{escape(value)}</b><br><small>{name}</small></td>"
        for name, value in (
            ("held", _bytes(stats["bytes"])), ("smaller than DynamicCache", f"{stats['ratio']:.2f}x"),
            ("smaller than the kept tokens", f"{stats['ratio_kept']:.2f}x"),
            ("bytes per token", f"{stats['bytes_per_token']:,.0f}"), ("seen", f"{stats['seen']:,}"),
            ("kept", f"{stats['kept']:,}"),
        )
    )  # fmt: skip
    return (f"<div><table><tr>{row}</tr></table><div style='width:480px;white-space:nowrap;font-size:0'>{bar}</div>"
            f"<small>{key}</small></div>")  # fmt: skip


def map_html(cache: Any) -> str:
    """The pages of a cache as HTML: a line of cells per layer and row (and per head if heads differ)."""
    lines: dict[tuple, list[str]] = {}
    for page in pages(cache):
        said = f"{page['kind']} {page['format']}, {page['tokens']} tokens" + (", shared" if page["shared"] else "")
        edge = "outline:1px solid #c0396b;" if page["shared"] else ""
        lines.setdefault((page["layer"], page["row"], page["head"]), []).append(
            f'<span title="{escape(said)}" style="display:inline-block;width:7px;height:9px;margin:1px;{edge}'
            f'background:{colour_of(page)}"></span>'
        )
    shown = []
    for (layer, row, head), cells in list(lines.items())[:_LINES]:
        label = f"layer {layer}, row {row}" + ("" if head is None else f", head {head}")
        more = f" and {len(cells) - 64} more" if len(cells) > 64 else ""
        shown.append(f"<tr><td><small>{label}</small></td><td style='text-align:left'>{''.join(cells[:64])}"
                     f"<small>{more}</small></td></tr>")  # fmt: skip
    if len(lines) > _LINES:
        shown.append(f"<tr><td colspan=2><small>and {len(lines) - _LINES} more</small></td></tr>")
    return f"<table style='line-height:1'>{''.join(shown)}</table>"
