"""Models by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def from_hub(kind: Any, name: str | Path, **options: Any) -> Any:
    """kind.from_pretrained(name): of a folder, or of the hub. ValueError where neither has it, or the hub is out of
    reach; OSError for a folder that lacks something."""
    there = Path(name).exists()
    if there or not str(name).startswith((".", "/", "~")):
        try:
            return kind.from_pretrained(name, **options)
        except OSError:
            if there:
                raise
    raise ValueError(f"model: expected a folder, or a name on the hub and a way to it, got {str(name)!r}")
