"""R-KV: scores by attention and redundancy."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from .. import checks
from .attention import SnapKV
from .base import StoredTokens


class RKV(SnapKV):
    """Keeps tokens with much attention and little redundancy, for long chains of thought (Cai et al., arXiv
    2505.24133).

    score = weight * importance - (1 - weight) * redundancy. importance: attention of the last `window` queries,
    max-pooled over `kernel` tokens. redundancy: softmax over tokens of the mean cosine similarity to the other keys;
    only similarities above `similar` count, and that to the newest similar key does not.

    Args:
        budget, sinks, slack: as in `policies.Policy`.
        window, kernel: as in SnapKV.
        weight: weight of importance, 0 to 1.
        similar: cosine similarity from which keys count as similar.

    An eviction compares all pairs of keys of a head.
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
                youngest = torch.where(like, position[:, None], -1).max(0)  # newest similar token of each key
                cosine[youngest.indices, torch.arange(len(rows), device=rows.device)] *= youngest.values < 0
                mean[b, h][live] = cosine.mean(1)
        return mean.masked_fill(~lives, -torch.inf).softmax(-1).cpu()
