"""Tensor parallel: a layer's heads spread over the ranks of a torch.distributed group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def place(name: str, group: Any) -> tuple[int, int]:
    """(this rank, ranks) of a group; ValueError, for what `name` says, without an initialized torch.distributed."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(f"{name}: expected torch.distributed to be initialized, got none; init_process_group first")
    return dist.get_rank(group), dist.get_world_size(group)


def split_heads(*tensors: Tensor, group: Any = None) -> list[Tensor]:
    """This rank's heads of each tensor [B, H, ...]: [B, H / ranks, ...], a view.

    Queries [B, Hq, T, D] and keys and values [B, H, T, D] of all heads become those of a layer that this rank attends
    with, as `PagedKV(H // ranks, D)`; a GQA group stays on one rank.

    Raises ValueError without an initialized torch.distributed, and where the ranks do not divide H.
    Source: Shoeybi et al. 2019 (Megatron-LM), section 3.
    """
    rank, ranks = place("split_heads", group)
    for i, x in enumerate(tensors):
        if x.dim() < 2 or x.shape[1] % ranks:
            raise ValueError(
                f"split_heads: tensor {i}: expected [B, H, ...] with H a multiple of the {ranks} ranks, got "
                f"{list(x.shape)}; a group of fewer ranks holds whole KV heads"
            )
    return [x.chunk(ranks, 1)[rank] for x in tensors]


def join_heads(x: Tensor, group: Any = None) -> Tensor:
    """The heads of all ranks: this rank's x [B, h, ...], of one shape and dtype everywhere -> [B, h * ranks, ...].

    Raises ValueError without an initialized torch.distributed; RuntimeError where another rank has failed.
    """
    _, ranks = place("join_heads", group)
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(ranks)]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, 1)
