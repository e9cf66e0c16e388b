"""KNorm and KeyDiff: by the keys alone. Random: by nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Policy, StoredTokens


class KNorm(Policy):
    """Keeps keys of small norm: they get more attention (Devoto et al., 2406.11430)."""

    def score(self, stored: StoredTokens) -> Tensor:
        return -stored.key_norms()


class KeyDiff(Policy):
    """Keeps keys that are unlike the mean of all, by cosine (Park et al., 2504.15364)."""

    def score(self, stored: StoredTokens) -> Tensor:
        return -stored.key_cosines()


def _mixed(x: Tensor) -> Tensor:
    """Integers below 2^24 that look random, from integers."""
    for shift, factor in ((16, 0x45D9F3B), (16, 0x45D9F3B), (16, 1)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return x & 0xFFFFFF


class Random(Policy):
    """Keeps a random choice, for comparison. The same for the same `seed`, whatever else is in the batch."""

    def __init__(self, budget: int | float, seed: int = 0, sinks: int = 0, recent: int = 0, **options) -> None:
        super().__init__(budget, sinks=sinks, recent=recent, **options)
        self.seed = seed

    def score(self, stored: StoredTokens) -> Tensor:
        head = (
            torch.arange(stored.slots.shape[1], device="cpu")[None, :, None] + 1009 * stored.layer + 100003 * self.seed
        )
        return _mixed(stored.positions + _mixed(head)).float()
