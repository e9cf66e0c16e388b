"""Tensor parallel: the heads of a layer sharded over the ranks of a torch.distributed group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def place(name: str, group: Any) -> tuple[int, int]:
    """(rank, world size) of a group. Raises ValueError, starting with `name`, without initialized torch.distributed."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(f"{name}: expected torch.distributed to be initialized; call init_process_group first")
    return dist.get_rank(group), dist.get_world_size(group)


def split_heads(*tensors: Tensor, group: Any = None) -> list[Tensor]:
    """This rank's heads of each tensor [B, H, ...], a view [B, H / ranks, ...].

    For queries [B, Hq, T, D], and keys and values [B, H, T, D] of all heads, and a layer `PagedKV(H // ranks, D)` on
    each rank. The query heads of a GQA group stay on one rank.

    Raises ValueError if torch.distributed is not initialized, or H is not a multiple of the number of ranks.
    Source: Shoeybi et al. 2019 (Megatron-LM), section 3.
    """
    rank, ranks = place("split_heads", group)
    for i, x in enumerate(tensors):
        if x.dim() < 2 or x.shape[1] % ranks:
            raise ValueError(
                f"split_heads: tensor {i}: expected [B, H, ...] with H a multiple of the {ranks} ranks, got "
                f"{list(x.shape)}; use a group with fewer ranks"
            )
    return [x.chunk(ranks, 1)[rank] for x in tensors]


def join_heads(x: Tensor, group: Any = None) -> Tensor:
    """Gathers the heads of all ranks: x [B, h, ...], of the same shape and dtype on all ranks, to [B, h * ranks, ...].

    Raises ValueError if torch.distributed is not initialized; RuntimeError if another rank has failed.
    """
    _, ranks = place("join_heads", group)
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(ranks)]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, 1)
