"""Demotion: re-encodes pages with low scores in smaller formats (`policies.Demote`)."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import formats
from ..policies import Policy, StoredTokens
from ..store.page_store import PageStore


def page_scores(store: PageStore, score: Tensor, keep: Tensor, columns: int) -> Tensor:
    """Mean score of the kept tokens of each page: float64 [B, h, P]; -inf for a page without any."""
    index = torch.arange(keep.shape[2], device="cpu")
    column = torch.where(index < store.sinks, 0, 1 + (index - store.sinks).clamp(min=0) // store.page_size)
    column = column.expand(keep.shape)
    shape = (*keep.shape[:2], columns)
    total = torch.zeros(shape, dtype=torch.float64, device="cpu").scatter_add_(
        2, column, score.double().masked_fill(~keep, 0)
    )
    count = torch.zeros(shape, dtype=torch.float64, device="cpu").scatter_add_(2, column, keep.double())
    return torch.where(count > 0, total / count.clamp(min=1), -torch.inf)


def rungs(value: Tensor, may: Tensor, shares: tuple[float, ...]) -> Tensor:
    """Index of each page in the ladder, int64 [B, h, P]: 0 for the best `shares[0]` of the pages that `may` change, 1
    for the next ones, and so on."""
    order = value.masked_fill(~may, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(
        -1, order, torch.arange(order.shape[-1], device="cpu").expand(order.shape).contiguous()
    )
    ends = torch.tensor(shares, dtype=torch.float64, device="cpu").cumsum(0)
    return (rank[..., None] * ends[-1] >= ends[:-1] * may.sum(-1)[..., None, None]).sum(-1)


def plan(store: PageStore, policy: Policy, stored: StoredTokens, keep: Tensor) -> Tensor:
    """New format of each page, K format << 8 | V format, or -1 for no change: int32 [B, h, P], with h of keep [B, h,
    N].

    Pages of the newest `page_size` slots do not change, so that a crop can remove the last tokens.
    """
    table, heads = store.table, keep.shape[1]
    entries = torch.from_numpy(table.entries).expand(-1, heads, -1)
    score = policy.score(stored).cpu()
    score = score.mean(1, keepdim=True) if heads == 1 else score.expand(-1, heads, -1)
    value = page_scores(store, score, keep, entries.shape[2])
    young = keep & (stored.slots[:, :heads] >= store.seen - store.page_size)
    fresh = page_scores(store, young, keep, entries.shape[2]) > 0
    bits = torch.tensor([row["bits"] for row in formats.TABLE], device="cpu")
    key, val = (bits[(entries >> shift & 255).clamp(0, len(bits) - 1)] for shift in (8, 0))
    own = [formats.resolve(name, store.dtype) for name in ("raw", store.key, store.value)]
    still_open = (formats.pair_of(entries) == own[0] << 8 | own[0]) & (own[1:] != [own[0]] * 2)
    may = (value > -torch.inf) & ~fresh & ~still_open
    may[..., 0] = False  # sinks
    rung = rungs(value, may, policy.shares)
    codes = torch.tensor([[formats.resolve(x, store.dtype) for x in names] for names in policy.ladder], device="cpu")
    to = codes[rung]
    smaller = (bits[to[..., 0]] <= key) & (bits[to[..., 1]] <= val) & (bits[to].sum(-1) < key + val)
    return torch.where(may & smaller, to[..., 0] << 8 | to[..., 1], -1).int()
