"""Reading, scoring and evicting the tokens of a PageStore by index, the order in which the table stores them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from .. import ops
from ..store.device_memory import sent
from ..store.page_store import PageStore
from ..store.sequence import slots_of

_PART = 8192  # tokens of a head to decode at a time


def read(store: PageStore, count: int | None = None, start: int = 0) -> tuple[Tensor, Tensor]:
    """Dequantized K and V by index, float32 on the layer's device: of `count` tokens (None: all) from index `start`
    on."""
    slots = slots_of(store.table)
    index = torch.arange(-start, slots.shape[2] - start, dtype=torch.int32, device="cpu")
    index = index.expand(slots.shape).contiguous()
    count = slots.shape[2] - start if count is None else count
    k, v = store.read(sent(index, store.device), count, store.no_aux)
    return (torch.cat([k, v], -1), k) if store.latent else (k, v)


def _parts(store: PageStore, side: int) -> Iterator[Tensor]:
    """K or V by index in pieces of _PART tokens; zero where there is no token."""
    live = sent(slots_of(store.table) >= 0, store.device)[..., None]
    for start in range(0, live.shape[2], _PART):
        part = live[:, :, start : start + _PART]
        yield read(store, part.shape[2], start)[side] * part


def measure(store: PageStore, kind: int) -> Tensor:
    """`ops.score_tokens` for each stored token: [B, H, N] by index."""
    if store.as_given and not store.mirror and not store.latent:
        return ops.score_tokens(
            *store.views(), store.num_kv_heads, store.head_dim, store.value_dim, store.table.longest,
            store.page_size, store.sinks, kind,
        )  # fmt: skip
    # Without the op: padded head dims, a calibration, latents, or pages on a device, which has no such kernel.
    if kind < 2:
        return torch.cat([x.norm(dim=-1) for x in _parts(store, kind)], 2).cpu()
    mean = torch.stack([normalize(x, dim=-1).sum(2, keepdim=True) for x in _parts(store, 0)]).sum(0)
    return torch.cat([cosine_similarity(x, mean, dim=-1) for x in _parts(store, 0)], 2).cpu()


def by_index(store: PageStore, keep: Any) -> Tensor:
    """bool [B, 1 or H, N] by index, from keep [B, seen] or [B, H, seen] by slot."""
    H = store.num_kv_heads
    if not isinstance(keep, Tensor):
        raise TypeError(f"evict: keep: expected a bool tensor, got {type(keep).__name__}")
    if keep.dim() not in (2, 3) or keep.shape[0] != store.batch or keep.shape[-1] != store.seen:
        raise ValueError(f"evict: keep: expected bool [B, seen] or [B, H, seen], got {list(keep.shape)}")
    keep = keep.bool().cpu()
    keep = keep[:, None] if keep.dim() == 2 else keep
    if keep.shape[1] not in (1, H):
        raise ValueError(f"evict: keep: expected {H} heads, got {keep.shape[1]}")
    slots = slots_of(store.table).long()
    heads = max(keep.shape[1], slots.shape[1])
    slots, keep = slots.expand(-1, heads, -1), keep.expand(-1, heads, -1)
    return (keep.gather(2, slots.clamp(min=0)) & (slots >= 0)).contiguous()


def drop(
    store: PageStore, keep: Tensor, formats: Tensor | None = None, agree: Callable[[bool], None] | None = None
) -> bool:
    """Evicts the stored tokens where keep, bool [B, 1 or H, N] by index, is False: plan, copy, commit. formats: int32
    [B, 1 or H, P], new formats of sealed pages; -1: no change. agree: called with whether anything would change; may
    raise. Returns False if nothing changes."""
    table, planned = store.table, None
    try:
        planned = table.plan_evict(keep.numpy(), None if formats is None else formats.numpy())
        if agree:
            agree(planned is not None)
        if planned is None:
            return False
        moves, heads = planned
        if len(moves):
            ops.compact(
                store.views()[0], sent(moves, store.device), store.num_kv_heads, heads,
                *store.page_dims, store.page_size, store.sinks,
            )  # fmt: skip
    except BaseException as error:
        if planned is not None or not isinstance(error, Exception):
            table.rollback()
        raise
    table.commit()
    return True
