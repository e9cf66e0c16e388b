"""IndexedPagedLayer: a layer whose model chooses tokens by an indexer, as long as it chooses all."""

from __future__ import annotations

from typing import Any

import torch

from .layer import PagedLayer


class IndexedPagedLayer(PagedLayer):
    """A paged layer of latents of a model with an indexer (DeepSeek-V3.2, GLM-5). Up to `max_slots` slots the indexer
    selects all of them, so its keys are not stored; beyond, ValueError."""

    given = 0  # slots of the mask of this call; a policy may evict before `update_indexer`

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See PagedLayer.update."""
        slots = self.get_seq_length() + key_states.shape[2]
        if slots > self.max_slots:
            raise ValueError(
                f"KVCache: expected at most {self.max_slots} slots, the config's index_topk, got {slots}: "
                "beyond that, the model's indexer selects tokens, and its keys are not stored here; use transformers' "
                "DynamicCache, or fewer tokens"
            )
        self.given = self.get_mask_sizes(key_states.shape[2])[0]
        return super().update(key_states, value_states, *args, **kwargs)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Keys [B, slots, D] for the indexer: zeros, since it selects all slots."""
        B, _, D = indexer_key_states.shape
        return indexer_key_states.new_zeros(1, 1, 1).expand(B, self.given, D)
