"""Keeping: what a layer holds, slot by slot, and what a policy makes of it: the part of PagedKV that evicts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from . import checks
from .eviction import Eviction, Kept

if TYPE_CHECKING:
    pass


class Keeping:
    """Slots, positions, evictions of a PagedKV."""

    _table: Any
    num_kv_heads: int
    sinks: int
    page_size: int
    device: torch.device
    eviction: Eviction | None

    @property
    def seen(self) -> int:
        """Slots so far, pads included."""
        return self._table.seen

    @property
    def batch(self) -> int:
        """Rows (sequences)."""
        return self._table.batch

    def _follow(self, q: torch.Tensor, T: int, mask: torch.Tensor | None, paid: torch.Tensor, **attention: Any) -> None:
        """What a policy wants done after an append of T slots, of which q attended and paid."""
        evict = self.eviction
        assert evict is not None
        evict.appended(T, mask)
        if q.shape[2]:
            if mask is not None:
                q = q.masked_fill(~mask[:, None, :, None], torch.nan)  # pads ask nothing: see `mass` of the op
            evict.attended(q, paid, **attention)
        if not evict.deferred:
            evict.run()

    def observe(self, weights: torch.Tensor) -> None:
        """Attention from outside, for a policy that gathers it (H2O): weights [B, Hq, T, seen] by slot, as eager
        attention gives them; each call that is observed counts once."""
        checks.tensor("weights", weights, "[B, Hq, T, seen]", self.device)
        evict = self.eviction
        if evict is None or not evict.policy.needs_mass:
            raise ValueError("observe: wanted a layer with a policy that gathers attention (H2O), got another")
        B, H, Hq = self.batch, self.num_kv_heads, weights.shape[1]
        if weights.shape[0] != B or Hq % H or weights.shape[3] != self.seen:
            raise ValueError(
                f"observe: weights: wanted [{B}, a multiple of {H}, T, {self.seen}], got {list(weights.shape)}"
            )
        mass = weights.float().sum(2).reshape(B, H, Hq // H, -1).sum(2)
        slots = evict.slots().expand(B, H, -1).long()
        evict.policy.observe(
            evict.scores()[:, :, : slots.shape[2]], mass.gather(2, slots.clamp(min=0)), weights.shape[2]
        )

    def evict(self, keep: torch.Tensor | None = None) -> None:
        """Evicts now. keep: bool [B, seen], or [B, H, seen] for each head, False at the slots to drop; None: what the
        policy says, if it is due. The first `sinks` tokens of a row must be kept. Memory of pages that empty goes back
        at once."""
        if keep is None:
            if self.eviction is None:
                raise ValueError("evict: wanted keep, or a layer with a policy, got neither")
            self.eviction.run()
            return
        evict = self.eviction or Eviction.bare(self)  # type: ignore[arg-type]
        H = self.num_kv_heads
        if keep.dim() not in (2, 3) or keep.shape[0] != self.batch or keep.shape[-1] != self.seen:
            raise ValueError(f"evict: keep: wanted bool [B, seen] or [B, H, seen], got {list(keep.shape)}")
        wide = keep.bool()[:, None] if keep.dim() == 2 else keep.bool()
        if wide.shape[1] not in (1, H):
            raise ValueError(f"evict: keep: wanted {H} heads, got {wide.shape[1]}")
        slots = evict.slots().long()
        heads = max(wide.shape[1], slots.shape[1])
        slots, wide = slots.expand(-1, heads, -1), wide.expand(-1, heads, -1)
        evict.drop((wide.gather(2, slots.clamp(min=0)) & (slots >= 0)).contiguous())

    def kept_heads(self) -> Kept:
        """Slots, positions and scores of the kept tokens, by row and head, in the order of the sequence."""
        evict = self.eviction or Eviction.bare(self)  # type: ignore[arg-type]
        return evict.kept()

    def kept(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """(slots, positions): for each row the slots of the stored tokens and their positions, int64 [N_row].

        A position is the slot minus the row's first slot: the RoPE position of the token, for rows without
        pads or with pads on the left.
        """
        rows, sidecar = self._table.rows, self._table.slots
        slots, positions = [], []
        for b in range(self.batch):
            if rows.shape[1] > 1:
                raise ValueError("kept: wanted heads that keep the same tokens, got heads that differ; see kept_heads")
            n, first = (int(x) for x in rows[b, 0])
            row = np.arange(first, first + n) if sidecar.size == 0 else sidecar[b, 0, :n].astype(np.int64)
            row = np.sort(row[row >= 0])
            slots.append(torch.from_numpy(row))
            positions.append(torch.from_numpy(row - first))
        return slots, positions

    def real(self) -> torch.Tensor:
        """bool [B, seen]: True at slots of tokens, evicted ones included, False at pads."""
        if self.eviction:
            return self.eviction.pads.real(self.seen)
        real = torch.zeros(self.batch, self.seen, dtype=torch.bool)
        for row, slots in zip(real, self.kept()[0], strict=True):
            row[slots] = True
        return real

    def signature(self) -> bytes | None:
        """Equal for two layers with the same `seen` only if they store the same slots; None if it cannot
        tell."""
        if self.eviction:
            return str(self.eviction.pads.runs).encode()
        return self._table.rows.tobytes() if self._table.slots.size == 0 else None

    def page_starts(self) -> list[int]:
        """For each row the slot of the first token of the page that is being filled; `seen` if none is."""
        rows, sidecar, starts = self._table.rows, self._table.slots, []
        if rows.shape[1] > 1:
            raise ValueError("page_starts: wanted heads that keep the same tokens, got heads that differ")
        for b in range(self.batch):
            n, first = (int(x) for x in rows[b, 0])
            at = self.sinks + max(0, n - self.sinks) // self.page_size * self.page_size
            if at >= n:
                starts.append(self.seen)
            else:
                starts.append(int(sidecar[b, 0, at]) if sidecar.size else first + at)
        return starts
