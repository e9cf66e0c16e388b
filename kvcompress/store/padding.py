"""Pads: the padding slots of each row, as runs, of which there are few even in long sequences."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad


class Pads:
    """Runs [start, end) of padding for each row, in ascending order."""

    def __init__(self, batch: int) -> None:
        self.runs: list[list[tuple[int, int]]] = [[] for _ in range(batch)]

    def append(self, seen: int, own: torch.Tensor) -> None:
        """Adds slots seen .. seen + T - 1; own: bool [B, T], False at padding."""
        edges = pad((~own).int(), (1, 1)).diff()
        starts, ends = ((edges == edge).nonzero().tolist() for edge in (1, -1))
        for (b, start), (_, end) in zip(starts, ends, strict=True):
            runs = self.runs[b]
            if runs and runs[-1][1] == seen + start:
                runs[-1] = (runs[-1][0], seen + end)
            else:
                runs.append((seen + start, seen + end))

    def crop(self, seen: int) -> None:
        """Removes slots from `seen` on."""
        self.runs = [[(a, min(b, seen)) for a, b in runs if a < seen] for runs in self.runs]

    def select(self, index: Sequence[int]) -> None:
        """Row i becomes old row index[i]."""
        self.runs = [list(self.runs[i]) for i in index]

    def count(self, row: int) -> int:
        """Number of padding slots of a row."""
        return sum(b - a for a, b in self.runs[row])

    def first(self, row: int) -> int:
        """Slot of the first token of a row."""
        runs = self.runs[row]
        return runs[0][1] if runs and runs[0][0] == 0 else 0

    def positions(self, row: int, slots: torch.Tensor) -> torch.Tensor:
        """Number of tokens of the row before each slot, int64."""
        slots = slots.long()
        result = slots.clone()
        for a, b in self.runs[row]:
            result -= (slots - a).clamp(0, b - a)
        return result

    def real(self, seen: int, start: int = 0) -> torch.Tensor:
        """bool [B, seen - start] for slots from `start` on, False at padding."""
        real = torch.ones(len(self.runs), seen - start, dtype=torch.bool, device="cpu")
        for row, runs in zip(real, self.runs, strict=True):
            for a, b in runs:
                row[max(0, a - start) : max(0, b - start)] = False
        return real
