"""IndexedPagedLayer: a layer whose model chooses tokens by an indexer, as long as it chooses all."""

from __future__ import annotations

from typing import Any

import torch

from .forward_pass import ForwardPass
from .layer import PagedLayer


class IndexedPagedLayer(PagedLayer):
    """A paged layer of latents of a model with an indexer (DeepSeek-V3.2, GLM-5). Up to `most` slots the model attends
    to all of them, whatever the indexer says: its keys are not kept. ValueError at the first slot after that."""

    def __init__(self, forward_pass: ForwardPass, options: dict[str, Any], most: int) -> None:
        super().__init__(forward_pass, options)
        self.most = most
        self.given = 0  # slots that the model masks in this call: a policy may evict before the indexer asks

    def _twin(self, forward_pass: ForwardPass) -> IndexedPagedLayer:
        return type(self)(forward_pass, self.options, self.most)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See PagedLayer.update."""
        slots = self.get_seq_length() + key_states.shape[2]
        if slots > self.most:
            raise ValueError(
                f"KVCache: expected at most {self.most} slots, the index_topk of this model's config, got {slots}: "
                "beyond them the model attends to the tokens that its indexer chooses, whose keys this cache does not "
                "keep; start again with transformers' DynamicCache, or with fewer tokens"
            )
        self.given = self.get_mask_sizes(key_states.shape[2])[0]
        return super().update(key_states, value_states, *args, **kwargs)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Keys [B, slots, D] for the indexer, which chooses as many as there are: zeros will do."""
        B, _, D = indexer_key_states.shape
        return indexer_key_states.new_zeros(1, 1, 1).expand(B, self.given, D)
