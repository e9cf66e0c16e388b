"""Context parallel: the tokens of a layer spread over the ranks of a torch.distributed group.

Every rank runs the model on all tokens and makes the same calls; each keeps the pages of its own slots alone, attends
to those, and the partial results are joined by their lse (as `ops.merge_states` does), in two all-reduces a call
whose size is that of the output. What other ranks hold are pads here: they take slots and no memory.

Tensor parallel needs nothing of this: a layer holds the heads that its rank computes.
"""

from __future__ import annotations

import contextlib
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
from ..merge_states import finished, safe_top, weighed
from ..policies import Policy, StoredTokens
from ..store.padding import Pads
from ..store.serialize import LOST
from .tensor_parallel import place

_FAILED = 2**62
_ELSEWHERE = "ShardedKV: expected a call that goes well on each rank, got an error (no memory, perhaps) on another one"


class _Agreed(MemoryError):
    """An error that all ranks know of."""


class Ranks:
    """What the ranks of a group tell each other about one layer on `device`."""

    def __init__(self, group: Any, rank: int, count: int, device: torch.device) -> None:
        self.group, self.rank, self.count, self.device = group, rank, count, device
        self.own: Tensor | None = None  # bool [B, T]: real tokens of the call under way, on whatever rank
        self.agreed = False  # the ranks know of each other that the call under way is well so far

    def op(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The attention op on this rank's pages, then joined."""
        *state, s_aux, seals, seen, page_size, sinks, window, scale, softcap, attention_width, used = rest
        if q.shape[2] == 0:
            result = ops.attend(q, k, v, *rest)
            self.agree(result[1])
            return result
        if attention_width and q.device.type != "cpu":
            raise ValueError(
                f"ShardedKV: return_attention: expected False for a layer that ranks share on {q.device}, got True"
            )
        how = seen, page_size, sinks, window, scale, softcap
        out, lse, attention = ops.attend(
            q.float(), k, v, *state, q.new_empty(0, dtype=torch.float32), seals, *how, 0, used
        )
        out, lse = self._joined(out, lse, s_aux, q.dtype)
        if attention_width:
            asks = lse if self.own is None or not k.shape[2] else lse.masked_fill(~self.own[:, None], torch.inf)
            asked = q.float(), k, v, *state, asks.contiguous(), seals, *how, attention_width
            attention = self.together(lambda: ops.accumulate_attention(*asked))
        return out, lse, attention

    def agree(self, lse: Tensor, failed: bool = False) -> Tensor:
        """The largest lse over the ranks; MemoryError on all if the call has failed on one."""
        both = torch.cat([lse.flatten(), lse.new_full((1,), float(failed))])
        self.agreed = True
        dist.all_reduce(both, dist.ReduceOp.MAX, self.group)
        if both[-1] > 0 and not failed:
            raise MemoryError(_ELSEWHERE)
        return both[:-1].view_as(lse)

    def most(self, n: int) -> int:
        """The largest n of all ranks; _Agreed on all if one of them says _FAILED."""
        largest = torch.tensor(int(n), device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, self.group)
        if largest == _FAILED:
            raise _Agreed(_ELSEWHERE)
        return int(largest)

    def together(self, act: Callable[[], Any]) -> Any:
        """What act() gives. If memory ends on one rank, it says so in place of the `most` that the others come to next,
        and all raise."""
        try:
            result = act()
        except _Agreed:
            raise
        except LOST as error:
            with contextlib.suppress(_Agreed):
                self.most(_FAILED)
            raise _Agreed(str(error)) from error
        self.most(0)
        return result

    def _joined(self, out: Tensor, lse: Tensor, s_aux: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """out [B, T, Hq, Dv] and lse [B, Hq, T] over all ranks, the same on each."""
        safe = safe_top(self.agree(lse)).transpose(1, 2)
        both = weighed(out, lse.transpose(1, 2), safe)
        dist.all_reduce(both, dist.ReduceOp.SUM, self.group)
        out, lse = finished(both, safe, dtype, s_aux)
        return out, lse.transpose(1, 2).contiguous()

    def gathered(self, x: Tensor, fill: Any) -> tuple[Tensor, slice]:
        """x [B, H, N, ...] of all ranks one after the other, and where our own lies; N differs, `fill` fills up."""
        width = self.most(x.shape[2])
        mine = x.new_full((*x.shape[:2], width, *x.shape[3:]), fill)
        mine[:, :, : x.shape[2]] = x
        parts = [torch.empty_like(mine) for _ in range(self.count)]
        dist.all_gather(parts, mine, self.group)
        start = self.rank * width
        return torch.cat(parts, 2), slice(start, start + x.shape[2])


class ShardedKV(PagedKV):
    """A `PagedKV` whose tokens are spread over `group`: slot s lies on rank (s // stripe) % ranks.

    Takes the arguments of `PagedKV`, and

        group: a torch.distributed process group (gloo on CPUs); the default group if None.
        stripe: slots in a row that one rank holds; page_size if None.

    All ranks must make the same calls with the same tensors, and get the same results. `attend`, `append`, `dense`,
    `crop`, `select`, `repeat`, `reset` and copies work as on one rank; `stats()`, `kept_heads()` and the attention of
    `attend(return_attention=True)`, which is against the lse of all tokens, are of this rank's tokens. Each rank keeps
    `sinks` first tokens and an open page of its own.

    policy: chooses among the tokens of all ranks, each of which drops its own; then the first rank alone has `sinks`.

    Raises ValueError without an initialized torch.distributed, for policies on a GPU, and for those that ask the last
    queries, rotate keys or re-encode pages; RuntimeError where another rank has failed (or the group times out): a
    call has then stored nothing, unless it was about to evict. What goes wrong on one rank before the results are
    joined (no memory, NaN in its tokens) is an error on all, and on all nothing is stored: its own error there,
    MemoryError on the others.
    Source: partial softmax results joined over devices, as in ring attention (Liu et al. 2023) and FlashDecoding.
    """

    def __init__(self, *args: Any, group: Any = None, stripe: int | None = None, **options: Any) -> None:
        rank, ranks = place("ShardedKV", group)
        policy: Policy | None = options.pop("policy", None)
        if policy is not None:
            if policy.window or policy.needs_rope or policy.clusters or policy.ladder or policy.positions == "cache":
                raise ValueError(
                    f"ShardedKV: policy: expected one that goes by positions, attention so far, keys and values, got "
                    f"{policy!r}; it works under tensor parallel"
                )
            device = torch.device(options.get("device", "cpu"))
            if device.type != "cpu":
                raise ValueError(
                    f"ShardedKV: policy: expected a layer on the CPU for one that ranks share, got {device}; it works "
                    "on a device under tensor parallel"
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
            dist.all_reduce(x, dist.ReduceOp.SUM, self.ranks.group)  # what a rank does not hold is zero
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
        assert isinstance(twin, ShardedKV)
        twin.pads = self.pads.clone()
        return twin


class ShardedEviction(Eviction):
    """A policy over the tokens of all ranks. Every rank chooses among all of them, alike, and drops what it holds;
    ranks tell each other slots and scores, when a row is over its budget."""

    ranks: Ranks

    def on_appended(self, T: int, own: Tensor | None) -> None:
        super().on_appended(T, self.ranks.own)  # what other ranks store is no pad

    def on_attended(self, q: Tensor, lse: Tensor, received: Tensor, **attention: Any) -> None:
        super().on_attended(q, lse, received[:, :, : self.store.table.longest].contiguous(), **attention)

    def live(self) -> Tensor:
        live = super().live().clone()
        dist.all_reduce(live, dist.ReduceOp.SUM, self.ranks.group)
        return live

    def evict_rows(self, over: list[bool]) -> None:
        self.ranks.together(lambda: super(ShardedEviction, self).evict_rows(over))

    def keep(self, stored: StoredTokens) -> Tensor:
        # Ranks may differ in whether their heads hold the same, if heads choose, or were evicted apart by hand.
        shared = self.policy.heads == "shared" and not self.ranks.most(stored.line_slots.shape[1] > 1)
        lines = (stored.line_slots, stored.line_positions) if shared else (stored.slots, stored.positions)
        (slots, own), (positions, _) = (self.ranks.gathered(x, -1) for x in lines)
        scores = None if stored.scores is None else self.ranks.gathered(stored.scores, 0)[0]
        source = _Everywhere(self, stored)
        everywhere = StoredTokens(slots, positions, stored.heads, stored.real, scores, self.layer, self.layers, source)
        return self.policy.keep(everywhere)[:, :, own]

    def evict(self, keep: Tensor, formats: Tensor | None) -> bool:
        told: list[int] = []  # does any rank lose tokens?

        def agree(planned: bool) -> None:
            told.append(self.ranks.most(planned))

        self.ranks.together(lambda: tokens.drop(self.store, keep, formats, agree))
        return bool(told[0])

    def there(self) -> Tensor | None:
        there = super().there()
        if there is None:
            return None
        # Every head for itself: those of other ranks may differ.
        wide = there.expand(-1, self.store.num_kv_heads, -1).to(torch.uint8).contiguous()
        dist.all_reduce(wide, dist.ReduceOp.MAX, self.ranks.group)
        return wide.bool()


class _Everywhere:
    """What `StoredTokens` asks for, of all ranks' tokens."""

    def __init__(self, evict: ShardedEviction, stored: StoredTokens) -> None:
        self.evict, self.stored = evict, stored

    def read(self) -> tuple[Tensor, Tensor]:
        k, v = (self.evict.ranks.gathered(x, 0)[0] for x in self.evict.read())
        return k, v

    def measure(self, kind: int) -> Tensor:
        if kind == 2:
            raise ValueError("ShardedKV: expected a policy that no mean of keys decides, got one; leave the group out")
        return self.evict.ranks.gathered(self.evict.measure(kind), 0)[0]

    def means(self, positions: Tensor, real: Tensor) -> Tensor:
        return self.evict.ranks.gathered(self.stored.mean_scores(), 0)[0]


def paged(*args: Any, group: Any = None, **options: Any) -> PagedKV:
    """A layer's pages: on this rank alone, or spread over `group`."""
    return PagedKV(*args, **options) if group is None else ShardedKV(*args, group=group, **options)
