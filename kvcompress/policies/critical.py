"""CriticalKV: scores by the effect of a token on the layer's output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import checks
from .base import Policy, StoredTokens
from .wrappers import Wrapper


class CriticalKV(Wrapper):
    """Keeps the tokens with the highest scores for a part of the budget, and those with the highest score * |W_o v|_1
    for the rest (Feng et al., arXiv 2502.03805).

    `bind(model)` reads W_o, the model's output projection; |W_o v|_1 is the mean over the query heads of a KV head.
    An eviction costs Hq * Dv * hidden multiply-adds per token.

    Args:
        policy: a policy with scores of at least 0.
        first: share of the budget selected by score alone.
        epsilon: added to scores in the second part.
    """

    def __init__(self, policy: Policy, first: float = 0.5, epsilon: float = 1e-4) -> None:
        super().__init__(policy)
        self.needs_outputs = True
        self.first, self.epsilon = checks.number("CriticalKV: first", first, 0, 1), epsilon
        self.outputs: list[Tensor] = []  # W_o of each paged layer, [hidden, Hq * Dv]

    def bind(self, model: Any) -> Policy:
        from ..hf.modules import paged_attention_modules

        self.outputs = [module.o_proj.weight.detach() for module in paged_attention_modules(model)]
        return super().bind(model)

    def effect(self, stored: StoredTokens) -> Tensor:
        """float32 [B, H, N]: |W_o v|_1."""
        if len(self.outputs) != stored.layers:
            raise ValueError(
                f"CriticalKV: expected the output projections of {stored.layers} layers, got {len(self.outputs)}: call "
                "policy.bind(model), or cache.bind(model) for a loaded cache"
            )
        values = stored.values()
        H, D = values.shape[1], values.shape[3]
        by_head = self.outputs[stored.layer].to(values.device).float().unflatten(1, (H, -1, D))  # [hidden, H, G, D]
        result = values.new_zeros(values.shape[:3])
        for h in range(H):
            for g in range(by_head.shape[2]):  # N x hidden at a time
                result[:, h] += (values[:, h] @ by_head[:, h, g].T).abs().sum(-1)
        return (result / by_head.shape[2]).cpu()

    def score(self, stored: StoredTokens) -> Tensor:
        score, budgets = self.policy.score(stored).cpu().float(), (self.policy.budgets(stored) * self.first).long()
        chosen = stored.best(score, budgets, self.sinks, self.recent, self.protected(stored))
        return ((score + self.epsilon) * self.effect(stored)).masked_fill(chosen, torch.finfo(torch.float32).max)
