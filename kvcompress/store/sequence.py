"""Slots of what a table stores, and of what a policy keeps; rows of several tables."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import checks


class Kept(NamedTuple):
    """The kept tokens of a layer, by row and KV head, in the order of the sequence: slots and positions int64 [N_bh],
    scores float32 [N_bh] (None where the policy gathers none)."""

    slots: list[list[Tensor]]
    positions: list[list[Tensor]]
    scores: list[list[Tensor]] | None


def slots_of(table: Any) -> Tensor:
    """int32 [B, 1 or H, N] by index, -1 where no token is."""
    rows = torch.from_numpy(table.rows)
    n = rows[:, :, 0]
    index = torch.arange(int(n.max()) if n.numel() else 0, dtype=torch.int32, device="cpu")
    plain = table.slots.size == 0
    slots = rows[:, :, 1:].int() + index if plain else torch.from_numpy(table.slots)[:, :, : len(index)]
    return torch.where(index < n[:, :, None], slots, -1)


def copies(batch: int, n: Any) -> np.ndarray:
    """The index that takes every row of a batch n times, copies side by side."""
    return np.repeat(np.arange(batch), checks.integer("n", n, 1, 2**24 // batch))
