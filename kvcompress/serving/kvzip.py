"""KVzip: query-agnostic compression of a prefix for reuse (Kim et al., arXiv 2505.23416)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .. import checks
from ..hf.backend import observing
from ..hf.cache import KVCache
from ..hf.configs import CACHE_ARGUMENT
from ..hf.layer import PagedLayer
from ..layer_store import all_or_nothing
from ..policies.base import check_budget

_OVERLAP = 8  # tokens before a chunk that are repeated, so that the model knows where to continue


def _received(q: Tensor, k: Tensor, scale: float, begin: int, end: int, sinks: int) -> Tensor:
    """q [B, Hq, T, D] of the repetition of tokens begin .. end - 1, k [B, H, seen + T, D]: softmax over sinks, chunk
    and repetition, then for each token of the chunk the maximum over the queries of its group, [B, H, end - begin]."""
    B, H, T = q.shape[0], k.shape[1], q.shape[2]
    keys = torch.cat([k[:, :, : min(sinks, begin)], k[:, :, begin:end], k[:, :, k.shape[2] - T :]], 2).float()
    n = keys.shape[2] - T
    s = q.float().reshape(B, H, -1, T, q.shape[3]) @ keys[:, :, None].transpose(3, 4) * scale
    slots = torch.arange(n + T, device=q.device)
    later = slots > slots[n:, None]
    p = s.masked_fill(later, -torch.inf).softmax(-1)
    return p[..., n - (end - begin) : n].amax((2, 3))


class KVzip:
    """Compresses a prefix once, for any later question: keeps the tokens that the model needs to repeat the prefix.

    Runs a second pass in which the model repeats the prefix, chunk by chunk, with a dense copy of the cache. The score
    of a token is the maximum attention it receives in this pass; the best tokens of all layers and heads are kept.
    Source: Kim et al., arXiv 2505.23416.

    Args:
        budget: share of the prefix to keep, over all layers and heads (float), or mean number of tokens per head (int).
        prompt: token ids of the request to repeat ("Repeat the previous context exactly:").
        chunk: number of tokens to repeat at a time.
    """

    def __init__(self, budget: int | float = 0.3, prompt: Sequence[int] = (), *, chunk: int = 2048) -> None:
        self.budget = check_budget("KVzip", budget)
        self.prompt = [checks.integer("KVzip: prompt", x, 0) for x in checks.as_tensor(prompt).tolist()]
        self.chunk = checks.integer("KVzip: chunk", chunk, 1)

    @torch.no_grad()
    def scores(self, model: PreTrainedModel, cache: KVCache, ids: Tensor) -> dict[int, Tensor]:
        """Scores of the tokens of the prefix ids [B, seen] by layer: float32 [B, H, seen]. Raises ValueError for
        sliding-window layers, padding, or a cache that does not hold exactly the tokens of ids."""
        ids = checks.as_tensor(ids)
        layers: dict[int, Any] = {i: x for i, x in enumerate(cache.layers) if isinstance(x, PagedLayer)}
        seen = cache.get_seq_length()
        whole = all(
            x.is_initialized and not x.is_sliding and x.store.page_store.kept_tokens == seen * x.store.batch
            for x in layers.values()
        )
        if (
            not layers
            or list(ids.shape[1:]) != [seen]
            or not whole
            or any(len(ids) != x.store.batch for x in layers.values())
        ):
            raise ValueError(
                f"KVzip: expected a cache that holds exactly the tokens of ids {list(ids.shape)}, without padding, in "
                f"full-attention layers, got {cache!r}"
            )
        found = {
            i: torch.zeros(x.store.batch, x.store.num_kv_heads, seen, dtype=torch.float32, device="cpu")
            for i, x in layers.items()
        }
        sinks = max(x.store.sinks for x in layers.values())
        prompt = torch.tensor(self.prompt, dtype=ids.dtype, device=ids.device).expand(len(ids), -1)
        begin = end = 0

        def observe(module: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> None:
            if module.layer_idx in found:
                scale = options.get("scaling") or q.shape[3] ** -0.5
                found[module.layer_idx][:, :, begin:end] = _received(q, k, scale, begin, end, sinks)

        with observing(model, observe):
            for begin in range(0, seen, self.chunk):
                end = min(begin + self.chunk, seen)
                before = ids[:, max(0, begin - _OVERLAP) : begin]
                dense = cache.to_dynamic_cache()
                model(torch.cat([prompt, before, ids[:, begin:end]], 1), **{CACHE_ARGUMENT: dense}, logits_to_keep=1)
        return found

    def compress(self, model: PreTrainedModel, cache: KVCache, ids: Tensor) -> KVCache:
        """Evicts tokens of the prefix ids [B, seen], which must be all that `cache` holds; returns the cache. On an
        error no layer changes. The kept tokens are copied before the old pages are freed: MemoryError if the pool's
        limit has no room for both."""
        scores = self.scores(model, cache, ids)
        heads = sum(x.shape[1] for x in scores.values())
        seen = cache.get_seq_length()
        each = min(self.budget, seen) if isinstance(self.budget, int) else self.budget * seen
        for layer, x in scores.items():
            x[:, :, : cache.layers[layer].store.sinks] = torch.inf  # type: ignore[union-attr]
        flat = torch.cat([x.flatten(1) for x in scores.values()], 1)
        best = flat.topk(max(1, round(heads * each)), 1).indices
        keep = torch.zeros_like(flat, dtype=torch.bool).scatter_(1, best, True) | (flat == torch.inf)
        layers: list[Any] = [cache.layers[i] for i in scores]
        parts = keep.split([x.shape[1] * seen for x in scores.values()], 1)
        with all_or_nothing([layer.store for layer in layers]):
            for layer, x, part in zip(layers, scores.values(), parts, strict=True):
                layer.change("evict", part.unflatten(1, (x.shape[1], seen)))
        return cache
