"""Slots of stored tokens; indices of repeated rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import checks


class Kept(NamedTuple):
    """The stored tokens of a layer, as lists by row and KV head, in sequence order: slots and positions int64 [N_bh],
    scores float32 [N_bh] (None if the policy accumulates none)."""

    slots: list[list[Tensor]]
    positions: list[list[Tensor]]
    scores: list[list[Tensor]] | None


def slots_of(table: Any) -> Tensor:
    """Slots by index: int32 [B, 1 or H, N]; -1: no token."""
    rows = torch.from_numpy(table.rows)
    n = rows[:, :, 0]
    index = torch.arange(int(n.max()) if n.numel() else 0, dtype=torch.int32, device="cpu")
    plain = table.slots.size == 0
    slots = rows[:, :, 1:].int() + index if plain else torch.from_numpy(table.slots)[:, :, : len(index)]
    return torch.where(index < n[:, :, None], slots, -1)


def copies(batch: int, n: Any) -> np.ndarray:
    """The index that repeats every row of a batch n times, as torch.repeat_interleave."""
    return np.repeat(np.arange(batch), checks.integer("n", n, 1, 2**24 // batch))
