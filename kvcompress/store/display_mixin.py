"""HTML and plots of caches, for notebooks."""

from __future__ import annotations

from collections import Counter
from html import escape
from pathlib import Path
from typing import Any

from .display import map_html, pages, stats_html


class Stats(dict):
    """The dict that `stats()` returns; notebooks show it as a table."""

    def _repr_html_(self) -> str:
        return stats_html(self)


class DisplayMixin:
    """`plot` and HTML of a cache; for KVCache and PagedKV."""

    def pages(self) -> list[dict[str, Any]]:
        """The pages in sequence order, one dict each: layer, row, head (None: all), column, kind, format, tokens,
        shared; see `kvcompress.store.display.pages`."""
        return pages(self)

    def plot(self, path: str | Path | None = None) -> Any:
        """Plots the pages, one row per layer and one cell per page, coloured by format. Saved to `path` if given.
        Returns a matplotlib Figure. Raises ImportError without matplotlib."""
        from ..tools.plot import page_map

        return page_map(self, path)

    def _repr_html_(self) -> str:
        count = Counter(page["kind"] for page in self.pages())
        said = ", ".join(f"{n} {kind}" for kind, n in count.items()) or "empty"
        title = escape(repr(self).partition("(")[0])
        return f"<div><b>{title}</b> <small>pages: {said}</small>{stats_html(self.stats())}{map_html(self)}</div>"  # type: ignore
