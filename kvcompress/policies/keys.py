"""KNorm and KeyDiff: scores from keys only. Random: random scores."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Policy, StoredTokens


class KNorm(Policy):
    """Keeps the tokens with the smallest key norms, which tend to receive more attention (Devoto et al., arXiv
    2406.11430).

    budget, sinks, recent, slack: as in `policies.Policy`.
    """

    def score(self, stored: StoredTokens) -> Tensor:
        return -stored.key_norms()


class KeyDiff(Policy):
    """Keeps the tokens whose keys have the lowest cosine similarity to the mean key (Park et al., arXiv 2504.15364).

    budget, sinks, recent, slack: as in `policies.Policy`.
    """

    def score(self, stored: StoredTokens) -> Tensor:
        return -stored.key_cosines()


def _mixed(x: Tensor) -> Tensor:
    """Hash of integers to integers below 2^24."""
    for shift, factor in ((16, 0x45D9F3B), (16, 0x45D9F3B), (16, 1)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return x & 0xFFFFFF


class Random(Policy):
    """Keeps random tokens, as a baseline (no paper). Depends on `seed`, layer, head and positions only, not on the
    batch.

    seed: int. budget, sinks, recent, slack: as in `policies.Policy`.
    """

    def __init__(self, budget: int | float, seed: int = 0, sinks: int = 0, recent: int = 0, **options) -> None:
        super().__init__(budget, sinks=sinks, recent=recent, **options)
        self.seed = seed

    def score(self, stored: StoredTokens) -> Tensor:
        head = (
            torch.arange(stored.slots.shape[1], device="cpu")[None, :, None] + 1009 * stored.layer + 100003 * self.seed
        )
        return _mixed(stored.positions + _mixed(head)).float()
