"""Keeping: what a layer holds, slot by slot, and what a policy makes of it: the part of PagedKV that evicts."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .. import checks, formats
from ..store.device_memory import sent
from ..store.display import Stats
from ..store.sequence import Kept, slots_of
from ..store.window import Ring
from .eviction import Eviction

if TYPE_CHECKING:
    from ..offload.prefetch import Away

_HERE: contextlib.nullcontext = contextlib.nullcontext()


class Keeping:
    """Slots, positions, evictions of a PagedKV."""

    _table: Any
    _pool: Any
    num_kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    sinks: int
    page_size: int
    device: torch.device
    eviction: Eviction | None
    key: str
    value: str
    codes: tuple[int, int]
    away: Away | None
    ring: Ring | None
    _op: Any
    _views: Any
    _formats: int

    @property
    def seen(self) -> int:
        """Slots so far, pads included."""
        return self._table.seen

    @property
    def batch(self) -> int:
        """Rows (sequences)."""
        return self._table.batch

    def _follow(
        self,
        q: torch.Tensor,
        T: int,
        mask: torch.Tensor | None,
        lse: torch.Tensor,
        paid: torch.Tensor,
        **attention: Any,
    ) -> None:
        """What a policy wants done after an append of T slots, of which q attended and paid."""
        evict = self.eviction
        assert evict is not None
        evict.appended(T, mask)
        if q.shape[2]:
            if mask is not None:  # pads ask nothing: see `mass` of the op
                q = q.masked_fill(~sent(mask, q.device)[:, None, :, None], torch.nan)
            evict.attended(q, lse, paid, **attention)
        if not evict.deferred:
            evict.follow()

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
        slots = evict.slots().expand(B, H, -1).long().to(mass.device)
        paid = mass.gather(2, slots.clamp(min=0)).contiguous()
        evict.observed.add(paid, evict.policy.fade(weights.shape[2]))

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
        if not isinstance(keep, torch.Tensor):
            raise TypeError(f"evict: keep: wanted a bool tensor, got {type(keep).__name__}")
        if keep.dim() not in (2, 3) or keep.shape[0] != self.batch or keep.shape[-1] != self.seen:
            raise ValueError(f"evict: keep: wanted bool [B, seen] or [B, H, seen], got {list(keep.shape)}")
        keep = keep.bool().cpu()
        wide = keep[:, None] if keep.dim() == 2 else keep
        if wide.shape[1] not in (1, H):
            raise ValueError(f"evict: keep: wanted {H} heads, got {wide.shape[1]}")
        slots = evict.slots().long()
        heads = max(wide.shape[1], slots.shape[1])
        slots, wide = slots.expand(-1, heads, -1), wide.expand(-1, heads, -1)
        evict.drop((wide.gather(2, slots.clamp(min=0)) & (slots >= 0)).contiguous())
        self.eviction = evict  # which knows what pads are, from now on

    def regret(self) -> torch.Tensor:
        """float32 [B], experimental: the part of the newest query's attention, mean over its heads, that evicted tokens
        would have had, estimated. Needs a policy that remembers them: `policies.Watch`."""
        if self.eviction is None or self.eviction.gone is None:
            raise ValueError("regret: wanted a policy that remembers what went (policies.Watch), got none")
        return self.eviction.gone.regret()

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
        pads = self.ring.pads if self.ring else None
        slots, positions = [], []
        for b in range(self.batch):
            if rows.shape[1] > 1:
                raise ValueError("kept: wanted heads that keep the same tokens, got heads that differ; see kept_heads")
            n, first = (int(x) for x in rows[b, 0])
            row = np.arange(first, first + n) if sidecar.size == 0 else sidecar[b, 0, :n].astype(np.int64)
            row = np.sort(row[row >= 0])
            slots.append(torch.from_numpy(row))
            positions.append(pads.positions(b, slots[-1]) if pads else torch.from_numpy(row - first))
        return slots, positions

    def real(self) -> torch.Tensor:
        """bool [B, seen]: True at slots of tokens, evicted ones included, False at pads."""
        if follower := self.eviction or self.ring:
            return follower.pads.real(self.seen)
        real = torch.zeros(self.batch, self.seen, dtype=torch.bool, device="cpu")
        for row, slots in zip(real, self.kept()[0], strict=True):
            row[slots] = True
        return real

    def signature(self) -> bytes | None:
        """Equal for two layers with the same `seen` only if they store the same slots; None if it cannot
        tell."""
        if follower := self.eviction or self.ring:
            return str(follower.pads.runs).encode()
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

    # ------------------------------------------------------------------ pages that go and come

    def plain_row(self, b: int) -> tuple[int, int] | None:
        """(first slot, tokens) of row b if it holds all slots from the first on; None where tokens are missing."""
        table = self._table
        if table.rows.shape[1] > 1 or table.slots.size:
            return None
        n, first = (int(x) for x in table.rows[b, 0])
        return (first, n) if first + n == self.seen else None

    def sealed_columns(self, b: int, start: int = 1) -> int:
        """Full pages of row b, from the first on, in the formats that they are to have; those before column `start` are
        taken to be."""
        n, entries = int(self._table.rows[b, 0, 0]), self._table.entries[b, 0]
        for column in range(start, 1 + max(0, n - self.sinks) // self.page_size):
            if formats.pair_of(int(entries[column])) != self.sealed_format(column):
                return column - 1
        return max(0, n - self.sinks) // self.page_size

    def slots(self) -> np.ndarray:
        """int32 [B, 1 or H, N] by index, -1 where no token is."""
        return slots_of(self._table).numpy()

    def sealed_format(self, column: int) -> int:
        """What a page at `column` is sealed in: K format << 8 | V format."""
        first = self.sinks + (column - 1) * self.page_size
        key, value = next(((k, v) for end, k, v in self._table.spans if first < end), self.codes)
        return key << 8 | value

    def _present(self) -> Any:
        """While an op reads the pages: those of another tier are there."""
        return self.away.present() if self.away else _HERE

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, s_aux: torch.Tensor,
        seals: torch.Tensor, seen: int, window: int, scale: float, softcap: float, width: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """The op, on pages that are fetched where they are away, or stay there."""
        if self.away and self.away.stays(q.shape[2], k.shape[2], window, width):
            from ..offload import in_place

            return in_place.attend(self, q, k, v, mask, s_aux, seals, seen, scale, softcap)  # type: ignore[arg-type]

        def op() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            return self._op(
                q, k, v, *self._views(), mask, s_aux, seals, seen, self.page_size, self.sinks, window, scale, softcap,
                width, self._formats,
            )  # fmt: skip

        if not self.away:
            return op()
        with self._present():
            return op()

    def _followers(self) -> list[Eviction | Ring]:
        """What follows the table."""
        return [x for x in (self.eviction, self.ring) if x]

    def _home(self) -> None:
        """Before the table changes: pages of another tier, and what a device has summed, are back."""
        if self.away:
            self.away.home()
        if self.eviction:
            self.eviction.settle()

    def take_over(
        self, entries: np.ndarray, rows: np.ndarray, slots: np.ndarray | None, scores: np.ndarray | None, seen: int
    ) -> None:
        """An empty layer takes over pages of its pool, as `_C.Table` has them; their references pass to it."""
        self._table.restore(entries, rows, slots, scores, seen)
        if self.eviction:
            self.eviction.restored()

    # ------------------------------------------------------------------ figures

    @property
    def kept_tokens(self) -> int:
        """Stored tokens, over all rows."""
        return self._table.stats()["kept"]

    def real_tokens(self) -> int:
        """Tokens that came, over all rows: stored ones and those that a policy has dropped."""
        return int(self.eviction.real().sum()) if self.eviction else self.kept_tokens

    def parts(self) -> dict[str, int]:
        """Bytes of this layer's pages (sealed, open, sinks) and tables; without the slack of its pool."""
        s = self._table.stats()
        names = {"sealed": "sealed", "open": "open", "sinks": "sink", "tables": "table"}
        return {part: s[f"{name}_bytes"] for part, name in names.items()}

    def token_bytes(self) -> int:
        """Bytes of one token, K and V of all heads, dense in the layer's dtype."""
        return self.num_kv_heads * (self.head_dim + self.value_dim) * self.dtype.itemsize

    def stats(self) -> dict[str, Any]:
        """What the layer holds.

        seen: slots; kept: stored tokens over all rows; bytes: of everything held, slack of the pool included (a shared
        pool's slack is counted whole); bytes_per_token: bytes / kept; ratio: dense bytes of the kept tokens in the
        layer's dtype / bytes; ratio_seen: of all tokens that came, evicted ones too; rewritten: tokens that evictions
        wrote anew (see docs/eviction.md); parts: bytes of sealed, open and sink pages, tables, and slack.
        """
        pool, kept = self._pool.stats(), self.kept_tokens
        parts = {**self.parts(), "slack": pool["resident"] - pool["used"]}
        total = sum(parts.values())
        return Stats(
            seen=self.seen, kept=kept, bytes=total, bytes_per_token=total / kept if kept else 0.0,
            ratio=kept * self.token_bytes() / total, ratio_seen=self.real_tokens() * self.token_bytes() / total,
            rewritten=self._table.stats()["rewritten"], parts=parts,
        )  # fmt: skip

    def __repr__(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.value_dim else f"{self.head_dim}/{self.value_dim}"
        s = self.stats()
        return (
            f"PagedKV({self.num_kv_heads} heads x {dims}, key={self.key!r}, value={self.value!r}, "
            f"{str(self.dtype).removeprefix('torch.')}, batch {self.batch}, seen {s['seen']}, "
            f"kept {s['kept']}, {s['bytes']:,} bytes)"
        )
