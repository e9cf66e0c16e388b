"""Models by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def from_hub(kind: Any, name: str | Path, **options: Any) -> Any:
    """kind.from_pretrained(name), from a folder or the hub. Raises ValueError if neither has it or the hub cannot be
    reached, OSError if files are missing in a folder."""
    there = Path(name).exists()
    if there or not str(name).startswith((".", "/", "~")):
        try:
            return kind.from_pretrained(name, **options)
        except OSError:
            if there:
                raise
    raise ValueError(f"model: expected a folder, or a name on the hub and access to it, got {str(name)!r}")
