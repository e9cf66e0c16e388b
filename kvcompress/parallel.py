"""Context parallel: the tokens of a layer spread over the ranks of a torch.distributed group.

Every rank runs the model on all tokens and makes the same calls; each keeps the pages of its own slots alone, attends
to those, and the partial results are joined by their lse (as `kvcompress.merge_states` does), in two all-reduces a call
whose size is that of the output. What other ranks hold are pads here: they take slots and no memory.

Tensor parallel needs nothing of this: a layer holds the heads that its rank computes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import ops
from .joining import finished, safe_top, weighed
from .layer import PagedKV
from .pads import Pads

_NONE = torch.empty(0)


class ShardedKV(PagedKV):
    """A `PagedKV` whose tokens are spread over `group`: slot s lies on rank (s // stripe) % ranks.

    Takes the arguments of `PagedKV`, and

        group: a torch.distributed process group (gloo on CPUs); the default group if None.
        stripe: slots in a row that one rank holds; page_size if None.

    All ranks must make the same calls with the same tensors, and get the same results. `attend`, `append`, `dense`,
    `crop`, `select`, `repeat`, `reset` and copies work as on one rank; `stats()` counts this rank's bytes. Each rank
    keeps `sinks` first tokens and an open page of its own.

    Raises ValueError without an initialized torch.distributed, with a policy (which would need scores of all ranks),
    and for attention mass; RuntimeError, and then has stored nothing, where another rank is gone (or the group's
    timeout is over).
    Source: partial softmax results joined over devices, as in ring attention (Liu et al. 2023) and FlashDecoding.
    """

    def __init__(self, *args: Any, group: Any = None, stripe: int | None = None, **options: Any) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(
                "ShardedKV: wanted torch.distributed to be initialized, got none; init_process_group first"
            )
        if options.get("policy") is not None:
            raise ValueError(
                f"ShardedKV: wanted no policy, got {options['policy']!r}: a rank does not know the others' scores; "
                "policies work under tensor parallel"
            )
        super().__init__(*args, **options)
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self.stripe = self.page_size if stripe is None else stripe
        if self.stripe < 1:
            raise ValueError(f"ShardedKV: stripe: wanted a positive number of slots, got {stripe}")
        self.pads = Pads(self.batch)

    # ------------------------------------------------------------------ work

    def _op(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The attention op on this rank's pages, then joined."""
        *state, s_aux, seals, seen, page_size, sinks, window, scale, softcap, mass_width, used = rest
        if mass_width:
            raise ValueError("ShardedKV: wanted no attention mass, got mass=True: it is of one rank's tokens alone")
        if q.shape[2] == 0:
            return ops.attend(q, k, v, *rest)
        out, lse, mass = ops.attend(
            q.float(), k, v, *state, _NONE, seals, seen, page_size, sinks, window, scale, softcap, 0, used
        )
        return *self._joined(out, lse, s_aux, q.dtype), mass

    def _joined(self, out: Tensor, lse: Tensor, s_aux: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """out [B, T, Hq, Dv] and lse [B, Hq, T] over all ranks, the same on each."""
        top = lse.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, self.group)
        safe = safe_top(top)
        both = weighed(out, lse, safe)
        dist.all_reduce(both, dist.ReduceOp.SUM, self.group)
        return finished(both, safe, s_aux, dtype)

    def _step(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        base, T = self.seen, k.shape[2]
        here = (torch.arange(base, base + T) // self.stripe % self.ranks == self.rank).expand(self.batch, T)
        local = here if mask is None else here & mask
        result = super()._step(q, k, v, local.contiguous(), *rest)
        if mask is not None:
            self.pads.append(base, mask)
        return result

    def dense(self, start: int = 0) -> tuple[Tensor, Tensor]:
        """As `PagedKV.dense`, of all ranks' tokens."""
        pair = super().dense(start)
        for x in pair:
            dist.all_reduce(x, dist.ReduceOp.SUM, self.group)  # what a rank does not hold is zero
        return pair

    # ------------------------------------------------------------------ rows and slots

    def real(self) -> Tensor:
        return self.pads.real(self.seen)

    def signature(self) -> bytes | None:
        return str(self.pads.runs).encode()

    def crop(self, seen: int) -> None:
        super().crop(seen)
        self.pads.crop(seen)

    def select(self, index: Any) -> None:
        rows = torch.as_tensor(index).tolist()
        super().select(index)
        self.pads.select(rows)

    def reset(self, batch: int | None = None) -> None:
        super().reset(batch)
        self.pads = Pads(self.batch)

    def clone(self) -> ShardedKV:
        twin = super().clone()
        assert isinstance(twin, ShardedKV)
        twin.pads = self.pads.clone()
        return twin


def paged(*args: Any, group: Any = None, **options: Any) -> PagedKV:
    """A layer's pages: on this rank alone, or spread over `group`."""
    return PagedKV(*args, **options) if group is None else ShardedKV(*args, group=group, **options)
