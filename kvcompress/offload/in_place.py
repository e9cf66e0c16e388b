"""In-place attention: the CPU kernel attends to offloaded pages, the layer's device to its own pages; both results are
merged by lse."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops
from ..merge_states import join
from ..store.page_store import AttendOp
from .prefetch import LayerOffload

_NO_SLOTS = torch.empty(0, 1, 0, dtype=torch.int32, device="cpu")
_NO_MASK = torch.empty(0, dtype=torch.bool, device="cpu")
_NO_AUX = torch.empty(0, dtype=torch.float32, device="cpu")
_NO_SEALS = torch.empty(0, 2, dtype=torch.int64, device="cpu")


def attend(
    offload: LayerOffload, op: AttendOp, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, s_aux: Tensor, seals: Tensor,
    seen: int, scale: float, softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The attention op `op` without fetching offloaded pages, for queries that see all of them. Raises OSError or
    Damaged before anything changes."""
    store = offload.store
    runs = offload.runs if q.shape[2] else []
    memories = offload.prefetcher.views(offload) if runs else []
    out, lse, received = store.attend(
        op,
        q,
        k,
        v,
        mask,
        _NO_AUX.to(q.device) if runs else s_aux,
        seals,
        seen,
        0,
        scale,
        softcap,
        0,
        offload.resident_table(),
    )
    if not runs:
        return out, lse, received
    parts, end = [(out, lse.transpose(1, 2))], seen + k.shape[2]
    far, (no_k, no_v) = q.cpu(), (x[:, :, :0].cpu() for x in (k, v))  # overlaps with the GPU's part
    for run, memory in zip(runs, memories, strict=True):
        out, lse, _ = ops.attend(
            far, no_k, no_v, torch.from_numpy(memory), run.entries, run.rows, _NO_SLOTS, _NO_MASK, _NO_AUX,
            _NO_SEALS, end, store.page_size, 0, 0, scale, softcap, 0, store.formats,
        )  # fmt: skip
        parts.append((out.to(q.device), lse.to(q.device).transpose(1, 2)))
    out, lse = join(parts, q.dtype, s_aux)
    return out, lse.transpose(1, 2).contiguous(), received
