"""R-KV: by attention, less what other tokens say again."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from .. import checks
from .attention import SnapKV
from .base import StoredTokens


class RKV(SnapKV):
    """Keeps what is attended to and not redundant, for long chains of thought (Cai et al., 2505.24133).

    score = weight * importance - (1 - weight) * redundancy: importance is the attention of the last `window` queries,
    the largest among `kernel` neighbours; redundancy the softmax over the tokens of a token's mean cosine to the other
    keys, where only cosines above `similar` count, and the newest of the keys like a key does not count against it.
    """

    def __init__(
        self, budget: int | float, window: int = 8, kernel: int = 7, sinks: int = 0, *, weight: float = 0.1,
        similar: float = 0.5, slack: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(budget, window, kernel, sinks, slack=slack)
        self.weight, self.similar = checks.number("RKV: weight", weight, 0, 1), similar

    def score(self, stored: StoredTokens) -> Tensor:
        importance = stored.smoothed(stored.window_attention(self.window), self.kernel, self.window, largest=True)
        importance = importance / importance.sum(-1, keepdim=True).clamp(min=1e-30)
        return self.weight * importance - (1 - self.weight) * self._redundancy(stored)

    def _redundancy(self, stored: StoredTokens) -> Tensor:
        unit = normalize(stored.keys(), dim=-1)
        lives, positions = stored.live.to(unit.device), stored.positions.to(unit.device)
        mean = unit.new_zeros(unit.shape[:3])
        for b in range(unit.shape[0]):
            for h in range(unit.shape[1]):  # N x N at a time
                live = lives[b, h]
                rows, position = unit[b, h][live], positions[b, h][live]
                cosine = (rows @ rows.T).fill_diagonal_(0)
                like = cosine > self.similar
                cosine = cosine * like
                youngest = torch.where(like, position[:, None], -1).max(0)  # of those like each key
                cosine[youngest.indices, torch.arange(len(rows), device=rows.device)] *= youngest.values < 0
                mean[b, h][live] = cosine.mean(1)
        return mean.masked_fill(~lives, -torch.inf).softmax(-1).cpu()
