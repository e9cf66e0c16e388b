"""Context parallel: the tokens of a layer sharded over the ranks of a torch.distributed group.

Every rank runs the model on all tokens and makes the same calls. Each rank stores the pages of its own slots and
attends to them; partial results are merged by lse (as in `ops.merge_states`) with two all-reduces of the size of the
output per call. Tokens of other ranks are padding in the local block table: they take slots, but no memory.

Tensor parallel does not need this: each layer stores the heads that its rank computes.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .. import ops
from ..eviction import tokens
from ..eviction.eviction import Eviction
from ..layer import PagedKV
from ..merge_states import normalized, safe_top, weighted_part
from ..policies import Policy, StoredTokens
from ..store.padding import Pads
from ..store.serialize import LOST
from .tensor_parallel import place

_FAILED = 2**62
_ELSEWHERE = "ShardedKV: expected success on all ranks, got an error (possibly out of memory) on another rank"


class _Agreed(MemoryError):
    """An error that is raised on all ranks."""


class Ranks:
    """Communication between the ranks of a group about one layer on `device`."""

    def __init__(self, group: Any, rank: int, count: int, device: torch.device) -> None:
        self.group, self.rank, self.count, self.device = group, rank, count, device
        self.own: Tensor | None = None  # bool [B, T]: tokens of the current call on any rank, False at padding
        self.agreed = False  # all ranks have reported success for the current call

    def op(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The attention op on this rank's pages, merged over the ranks; equal on all of them."""
        *state, s_aux, seals, seen, page_size, sinks, window, scale, softcap, attention_width, used = rest
        if q.shape[2] == 0:
            result = ops.attend(q, k, v, *rest)
            self.agree(result[1])
            return result
        if attention_width and q.device.type != "cpu":
            raise ValueError(f"ShardedKV: return_attention: expected False for a sharded layer on {q.device}, got True")
        how = seen, page_size, sinks, window, scale, softcap
        out, lse, attention = ops.attend(
            q.float(), k, v, *state, q.new_empty(0, dtype=torch.float32), seals, *how, 0, used
        )
        safe = safe_top(self.agree(lse)).transpose(1, 2)
        both = weighted_part(out, lse.transpose(1, 2), safe)
        dist.all_reduce(both, dist.ReduceOp.SUM, self.group)
        out, lse = normalized(both, safe, q.dtype, s_aux)
        lse = lse.transpose(1, 2).contiguous()
        if attention_width:
            asks = lse if self.own is None or not k.shape[2] else lse.masked_fill(~self.own[:, None], torch.inf)
            asked = q.float(), k, v, *state, asks.contiguous(), seals, *how, attention_width
            attention = self.together(lambda: ops.accumulate_attention(*asked))
        return out, lse, attention

    def agree(self, lse: Tensor, failed: bool = False) -> Tensor:
        """The maximum of lse over ranks. Raises MemoryError on all ranks if the call has failed on one."""
        both = torch.cat([lse.flatten(), lse.new_full((1,), float(failed))])
        self.agreed = True
        dist.all_reduce(both, dist.ReduceOp.MAX, self.group)
        if both[-1] > 0 and not failed:
            raise MemoryError(_ELSEWHERE)
        return both[:-1].view_as(lse)

    def max_over_ranks(self, n: int) -> int:
        """The maximum of n over ranks. Raises _Agreed on all ranks if one passes _FAILED."""
        largest = torch.tensor(int(n), device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, self.group)
        if largest == _FAILED:
            raise _Agreed(_ELSEWHERE)
        return int(largest)

    def together(self, act: Callable[[], Any]) -> Any:
        """Returns act(). If it fails on one rank (one of LOST), all ranks raise: the failed rank passes _FAILED to the
        others' next `max_over_ranks`."""
        try:
            result = act()
        except _Agreed:
            raise
        except LOST as error:
            with contextlib.suppress(_Agreed):
                self.max_over_ranks(_FAILED)
            raise _Agreed(str(error)) from error
        self.max_over_ranks(0)
        return result

    def gathered(self, x: Tensor, fill: Any) -> tuple[Tensor, slice]:
        """x [B, H, N, ...] of all ranks, concatenated, and the slice of this rank. N may differ; `fill` is padding."""
        width = self.max_over_ranks(x.shape[2])
        mine = x.new_full((*x.shape[:2], width, *x.shape[3:]), fill)
        mine[:, :, : x.shape[2]] = x
        parts = [torch.empty_like(mine) for _ in range(self.count)]
        dist.all_gather(parts, mine, self.group)
        start = self.rank * width
        return torch.cat(parts, 2), slice(start, start + x.shape[2])


class ShardedKV(PagedKV):
    """A `PagedKV` with tokens sharded over `group`: slot s is on rank (s // stripe) % ranks.

    Args:
        args, options: those of `PagedKV`.
        group: torch.distributed process group (gloo on CPUs). Default: the default group.
        stripe: number of consecutive slots on one rank. Default: page_size.

    All ranks must make the same calls with the same tensors, and get the same results. `attend`, `append`, `dense`,
    `crop`, `select`, `repeat`, `reset` and copies work as on one rank. `stats()`, `kept_heads()` and the attention of
    `attend(return_attention=True)` (relative to the lse of all tokens) cover this rank's tokens only. Each rank has
    `sinks` first tokens and an open page of its own; with a policy, which selects among the tokens of all ranks, only
    the first rank has sinks.

    Raises:
        ValueError: torch.distributed is not initialized; a policy on a GPU, or one that needs the last queries, rotates
            keys or re-encodes pages.
        MemoryError: another rank has failed before the results were merged (out of memory, NaN in its tokens). That
            rank raises its own error; nothing is stored on any rank.
        RuntimeError: another rank has crashed, or the group timed out; nothing is stored, unless during an eviction.

    Source: merging of partial softmax results, as in ring attention (Liu et al. 2023) and FlashDecoding.
    """

    def __init__(self, *args: Any, group: Any = None, stripe: int | None = None, **options: Any) -> None:
        rank, ranks = place("ShardedKV", group)
        policy: Policy | None = options.pop("policy", None)
        if policy is not None:
            if policy.window or policy.needs_rope or policy.clusters or policy.ladder or policy.positions == "cache":
                raise ValueError(
                    f"ShardedKV: policy: expected a policy that scores by position, accumulated attention, keys or "
                    f"values, got {policy!r}; use it with tensor parallel"
                )
            device = torch.device(options.get("device", "cpu"))
            if device.type != "cpu":
                raise ValueError(
                    f"ShardedKV: policy: expected a sharded layer on the CPU, got {device}; policies on a device work "
                    "with tensor parallel"
                )
            sinks = options.get("sinks")
            options["sinks"] = (policy.sinks if sinks is None else sinks) if rank == 0 else 0
        super().__init__(*args, **options)
        self.ranks = Ranks(group, rank, ranks, self.device)
        self.op = self.ranks.op
        self.stripe = self.page_size if stripe is None else stripe
        if self.stripe < 1:
            raise ValueError(f"ShardedKV: stripe: expected a positive number of slots, got {stripe}")
        self.pads = Pads(self.batch)
        if policy is not None:
            layer, layers = options.get("layer", (0, 1))
            self.eviction = ShardedEviction(self.page_store, policy, layer, layers, op=self.op)
            self.eviction.ranks = self.ranks

    # ------------------------------------------------------------------ work

    def _step(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        base, T = self.seen, k.shape[2]
        here = torch.arange(base, base + T, device="cpu") // self.stripe % self.ranks.count == self.ranks.rank
        here = here.expand(self.batch, T)
        local = here if mask is None else here & mask
        self.ranks.own, self.ranks.agreed = mask, False
        try:
            out, lse, attention = super()._step(q, k, v, local.contiguous(), *rest)
        except Exception:
            if not self.ranks.agreed:
                self.ranks.agree(q.new_zeros(q.shape[:3], dtype=torch.float32), failed=True)
            raise
        if mask is not None:
            self.pads.append(base, mask)
        return out, lse, attention[:, :, : self.page_store.table.longest]

    def dense(self, start: int = 0) -> tuple[Tensor, Tensor]:
        """As `PagedKV.dense`, of all ranks' tokens."""
        pair = super().dense(start)
        for x in pair:
            dist.all_reduce(x, dist.ReduceOp.SUM, self.ranks.group)  # zero for tokens of other ranks
        return pair

    # ------------------------------------------------------------------ rows and slots

    def real(self) -> Tensor:
        return self.pads.real(self.seen)

    def signature(self) -> bytes | None:
        return str(self.pads.runs).encode()

    def crop(self, seen: int) -> None:
        super().crop(seen)
        self.pads.crop(seen)

    def on_selected(self, rows: np.ndarray) -> None:
        super().on_selected(rows)
        self.pads.select(rows.tolist())

    def reset(self, batch: int | None = None) -> None:
        super().reset(batch)
        self.pads = Pads(self.batch)

    def clone(self) -> ShardedKV:
        twin = super().clone()
        twin.pads = copy.deepcopy(self.pads)
        return twin


class ShardedEviction(Eviction):
    """A policy over the tokens of all ranks. When a row exceeds its budget, ranks exchange slots and scores; each makes
    the same selection and evicts its own tokens."""

    ranks: Ranks

    def on_appended(self, T: int, own: Tensor | None) -> None:
        super().on_appended(T, self.ranks.own)  # tokens on other ranks are not padding

    def on_attended(self, q: Tensor, lse: Tensor, received: Tensor, **attention: Any) -> None:
        super().on_attended(q, lse, received[:, :, : self.store.table.longest].contiguous(), **attention)

    def live(self) -> Tensor:
        live = super().live().clone()
        dist.all_reduce(live, dist.ReduceOp.SUM, self.ranks.group)
        return live

    def evict_rows(self, over: list[bool]) -> None:
        self.ranks.together(lambda: super(ShardedEviction, self).evict_rows(over))

    def keep(self, stored: StoredTokens) -> Tensor:
        # Heads may store different tokens on some ranks only, if each head selects, or after `evict(keep)`.
        shared = self.policy.heads == "shared" and not self.ranks.max_over_ranks(stored.line_slots.shape[1] > 1)
        lines = (stored.line_slots, stored.line_positions) if shared else (stored.slots, stored.positions)
        (slots, own), (positions, _) = (self.ranks.gathered(x, -1) for x in lines)
        scores = None if stored.scores is None else self.ranks.gathered(stored.scores, 0)[0]
        source = _Everywhere(self, stored)
        everywhere = StoredTokens(slots, positions, stored.heads, stored.real, scores, self.layer, self.layers, source)
        return self.policy.keep(everywhere)[:, :, own]

    def evict(self, keep: Tensor, formats: Tensor | None) -> bool:
        told: list[int] = []  # whether any rank evicts tokens

        def agree(planned: bool) -> None:
            told.append(self.ranks.max_over_ranks(planned))

        self.ranks.together(lambda: tokens.drop(self.store, keep, formats, agree))
        return bool(told[0])

    def not_evicted(self) -> Tensor | None:
        kept = super().not_evicted()
        if kept is None:
            return None
        # Separate heads, since those of other ranks may differ.
        wide = kept.expand(-1, self.store.num_kv_heads, -1).to(torch.uint8).contiguous()
        dist.all_reduce(wide, dist.ReduceOp.MAX, self.ranks.group)
        return wide.bool()


class _Everywhere:
    """The source of `StoredTokens` over the tokens of all ranks."""

    def __init__(self, evict: ShardedEviction, stored: StoredTokens) -> None:
        self.evict, self.stored = evict, stored

    def read(self) -> tuple[Tensor, ...]:
        return tuple(self.evict.ranks.gathered(x, 0)[0] for x in self.evict.read())

    def measure(self, kind: int) -> Tensor:
        if kind == 2:
            raise ValueError(
                "ShardedKV: expected a policy without the mean of all keys (KeyDiff), got one; omit group="
            )
        return self.evict.ranks.gathered(self.evict.measure(kind), 0)[0]

    def means(self, positions: Tensor, real: Tensor) -> Tensor:
        return self.evict.ranks.gathered(self.stored.mean_scores(), 0)[0]


def paged(*args: Any, group: Any = None, **options: Any) -> PagedKV:
    """A PagedKV, or a ShardedKV if `group` is given."""
    return PagedKV(*args, **options) if group is None else ShardedKV(*args, group=group, **options)
