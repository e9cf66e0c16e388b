"""Slots of what a table stores."""

from __future__ import annotations

from typing import Any

import torch


def slots_of(table: Any) -> torch.Tensor:
    """int32 [B, 1 or H, N] by index, -1 where no token is."""
    rows = torch.from_numpy(table.rows)
    n = rows[:, :, 0]
    index = torch.arange(int(n.max()) if n.numel() else 0, dtype=torch.int32)
    plain = table.slots.size == 0
    slots = rows[:, :, 1:].int() + index if plain else torch.from_numpy(table.slots)[:, :, : len(index)]
    return torch.where(index < n[:, :, None], slots, -1)
