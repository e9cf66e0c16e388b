"""Eviction: a policy at work in one layer. What PagedKV calls when it has one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import ops
from .pads import Pads
from .policies import Policy, Stored
from .positions import MovedSinks
from .slots import slots_of

if TYPE_CHECKING:
    from .layer import PagedKV


class Kept(NamedTuple):
    """The kept tokens of a layer, by row and KV head, in the order of the sequence: slots and positions int64 [N_bh],
    scores float32 [N_bh] (None where the policy gathers none)."""

    slots: list[list[Tensor]]
    positions: list[list[Tensor]]
    scores: list[list[Tensor]] | None


class Eviction:
    """Counts what each row holds, gathers what the policy needs, and evicts when a row is over its budget.

    deferred: evictions wait for `run()`; else they follow every append.
    """

    def __init__(
        self, store: PagedKV, policy: Policy, layer: int = 0, layers: int = 1, rope: Tensor | None = None
    ) -> None:
        self.sinks = None
        if policy.positions == "cache":
            if rope is None or policy.sinks != store.sinks or store._fill[0]:
                raise ValueError(
                    "PagedKV: policy: positions='cache' wants rope= (frequencies of the model's RoPE, which a KVCache "
                    f"finds itself), sinks= as the policy has ({policy.sinks}), and a head dim that pages take as it is"
                )
            self.sinks = MovedSinks(rope)
        self.store, self.policy, self.layer, self.layers = store, policy, layer, layers
        self.deferred = False
        self.version = -1  # of the table that `score_view` is of
        if policy.needs_mass:
            store._table.keep_scores(True)
        self.reset()

    @classmethod
    def bare(cls, store: PagedKV) -> Eviction:
        """For a layer without a policy: pads are those before the first token."""
        made = cls(store, Policy(1, sinks=0))
        if store.ring:
            made.pads = store.ring.pads.clone()
            return made
        made.pads.runs = [[(0, int(first))] if first else [] for first in store._table.rows[:, 0, 1]]
        return made

    def reset(self) -> None:
        """The layer is empty."""
        self.pads, self.count = Pads(self.store.batch), 0
        if self.sinks:
            self.sinks.reset()
        self.live = np.zeros(self.store.batch, np.int64)  # of all heads
        self.room = 0  # tokens until a row can be over its budget
        self.queries: Tensor | None = None  # the last `window`, [B, Hq, w, Dk]
        self.attention: dict[str, Any] = {}  # how they attend
        self.pending: tuple[Tensor, Tensor, dict[str, Any]] | None = None  # of a call that may still be undone

    def clone(self, store: PagedKV) -> Eviction:
        """The same for a copy of the layer."""
        twin = object.__new__(Eviction)
        twin.__dict__.update(self.__dict__)
        twin.sinks = self.sinks.clone() if self.sinks else None
        twin.store, twin.pads, twin.live, twin.version = store, self.pads.clone(), self.live.copy(), -1
        return twin

    # ------------------------------------------------------------------ what happens to the layer

    def appended(self, T: int, own: Tensor | None) -> None:
        """T slots have been appended; own: bool [B, T], False at pads."""
        self._observe()
        if own is not None:
            self.pads.append(self.store.seen - T, own)
        real = T if own is None else own.sum(1).numpy()
        self.live += self.store.num_kv_heads * real
        self.room -= T

    def attended(self, q: Tensor, mass: Tensor, **attention: Any) -> None:
        """q [B, Hq, T, Dk], NaN at pads, has been attended with and paid mass [B, H, N] by index."""
        self.pending = q[:, :, -self.policy.window :] if self.policy.window else q, mass, attention
        self.pending_queries = q.shape[2]
        if not self.deferred:
            self._observe()

    def _observe(self) -> None:
        """What a call has left for the policy is taken up."""
        if self.pending is None:
            return
        q, mass, self.attention = self.pending
        self.pending, w = None, self.policy.window
        if w:
            old = q[:, :, :0] if self.queries is None else self.queries
            self.queries = torch.cat([old, q], 2)[:, :, -w:]
        if self.policy.needs_mass:
            self.policy.observe(self.scores()[:, :, : mass.shape[2]], mass, self.pending_queries)

    def cropped(self, seen: int) -> None:
        """Slots from `seen` on are forgotten."""
        self.pads.crop(seen)
        self.pending = None
        if seen == 0:
            self.queries, self.count = None, 0
        if self.sinks and seen == 0:
            self.sinks.reset()
        self._count()

    def selected(self, index: np.ndarray) -> None:
        """Row i is old row index[i]."""
        self.pads.select(index.tolist())
        if self.sinks:
            self.sinks.select(index.tolist())
        self.live = self.live[index]
        self.room = 0
        self.queries = None if self.queries is None else self.queries[torch.from_numpy(index)]

    def _count(self) -> None:
        table, heads = self.store._table, self.store.num_kv_heads
        n = table.rows[:, :, 0]
        if table.slots.size:
            inside = np.arange(table.slots.shape[2]) < n[:, :, None]
            n = ((table.slots >= 0) & inside).sum(2)
        self.live = n.sum(1) * (heads // n.shape[1])
        self.room = 0

    # ------------------------------------------------------------------ what is stored

    def real(self) -> Tensor:
        """int64 [B]: tokens of each row so far."""
        return torch.tensor([self.store.seen - self.pads.count(b) for b in range(self.store.batch)])

    def scores(self) -> Tensor:
        """float32 [B, H, capacity] by index; the core's memory."""
        table = self.store._table
        if self.version != table.version:
            self.version, self.score_view = table.version, torch.from_numpy(table.scores)
        return self.score_view

    def slots(self) -> Tensor:
        """int32 [B, 1 or H, N] by index, -1 where no token is."""
        return slots_of(self.store._table)

    def stored(self) -> Stored:
        """What the policy sees."""
        store = self.store
        slots = self.slots()
        positions = torch.stack([self.pads.positions(b, row) for b, row in enumerate(slots)])
        shape = (store.batch, store.num_kv_heads, slots.shape[2])
        scores = self.scores()[:, :, : shape[2]] if self.policy.needs_mass else None
        return Stored(
            slots.expand(shape), positions.expand(shape), self.real(), scores, self.layer, self.layers,
            self._read, self._mass,
        )  # fmt: skip

    def _read(self, first: int | None = None) -> tuple[Tensor, Tensor]:
        """K and V by index, of all tokens or the first few."""
        store, slots = self.store, self.slots()
        arena, entries, rows, _ = store._views()
        index = torch.arange(slots.shape[2], dtype=torch.int32).expand(slots.shape).contiguous()
        k, v = ops.read(
            torch.empty(0), arena, entries, rows, index, store.num_kv_heads, store.head_dim + store._fill[0],
            store.value_dim + store._fill[1], slots.shape[2] if first is None else first, store.page_size, store.sinks,
        )  # fmt: skip
        return store._cut(k, 0), store._cut(v, 1)

    def _mass(self, queries: int) -> Tensor:
        if self.queries is None:
            raise ValueError(
                f"{type(self.policy).__name__}: wanted the last queries, got none: tokens were appended without "
                "attention; attend through the layer (kvcompress.enable(model))"
            )
        return attention_mass(self.store, self.queries[:, :, -queries:], **self.attention)

    # ------------------------------------------------------------------ evicting

    def due(self) -> Tensor | None:
        """bool [B]: the rows that are over their budget by `slack`; None if there are none. Budgets never fall."""
        store = self.store
        if self.room > 0:
            return None
        slack = self.policy.slack or store.page_size
        limit = self.policy.limit(self.real(), self.layer, self.layers)
        over = torch.from_numpy(self.live) - store.num_kv_heads * (limit + slack)
        self.room = -(int(over.max()) // store.num_kv_heads)
        return over >= 0 if bool((over >= 0).any()) else None

    def run(self) -> bool:
        """Evicts where it is due; True if it has."""
        self._observe()
        due = self.due()
        if due is None:
            return False
        stored = self.stored()
        keep = self.policy.keep(stored, ops.select)
        uniform = self.store._table.rows.shape[1] == 1
        if keep.shape[1] == 1 and not uniform:
            keep = keep.expand(stored.slots.shape)
        # Sinks of the table stay, and rows that are not over their budget stay as they are.
        index = torch.arange(keep.shape[2])
        keep = (keep | (index < self.store.sinks) | ~due[:, None, None]) & stored.live[:, : keep.shape[1]]
        if bool((keep == stored.live[:, : keep.shape[1]]).all()):  # all that is over the budget is protected
            self.room = self.policy.slack or self.store.page_size
            return False
        self.drop(keep.contiguous())
        return True

    def drop(self, keep: Tensor) -> None:
        """keep: bool [B, 1 or H, N] by index."""
        evict(self.store, keep)
        self.count += 1
        self._count()
        if self.sinks and self.store.sinks:
            gone = self.real() - torch.from_numpy(self.live) // self.store.num_kv_heads
            self.sinks.move(self.store, gone.tolist(), self._read(self.store.sinks)[0])

    def most(self) -> int:
        """Tokens that the fullest row holds, mean over its heads."""
        return -(-int(self.live.max()) // self.store.num_kv_heads)

    def in_order(self) -> tuple[Tensor, Tensor]:
        """K, V [B, H, kept, D] in the layer's dtype, in the order of the sequence; ValueError unless all rows and heads
        hold the same number of tokens."""
        slots = self.slots().expand(-1, self.store.num_kv_heads, -1)
        counts = (slots >= 0).sum(-1)
        if bool((counts != counts.flatten()[0]).any()):
            raise ValueError(
                "kvcompress: wanted rows and heads that keep the same number of tokens, for attention outside of the "
                "cache; got others: kvcompress.enable(model)"
            )
        order = torch.where(slots < 0, -1, slots).argsort(-1)[:, :, slots.shape[2] - int(counts.flatten()[0]) :]
        k, v = (x.to(self.store.dtype) for x in self._read())
        return tuple(x.gather(2, order[..., None].expand(-1, -1, -1, x.shape[3])) for x in (k, v))  # type: ignore

    def there(self) -> Tensor | None:
        """bool [B, 1 or H, seen]: True at stored slots and at pads; None if nothing has been evicted."""
        if not self.count:
            return None
        slots = self.slots().long()
        there = (~self.pads.real(self.store.seen))[:, None].repeat(1, slots.shape[1], 1)
        width = there.shape[2]
        there = torch.cat([there, there[:, :, :1]], 2).scatter(2, slots.masked_fill(slots < 0, width), True)
        return there[:, :, :width]

    def kept(self) -> Kept:
        """What is kept, in order."""
        stored = self.stored()
        slots: list[list[Tensor]] = []
        positions: list[list[Tensor]] = []
        scores: list[list[Tensor]] = []
        for b in range(self.store.batch):
            for nest in (slots, positions, scores):
                nest.append([])
            for h in range(self.store.num_kv_heads):
                row = stored.slots[b, h]
                order = row.argsort()[int((row < 0).sum()) :]
                slots[b].append(row[order].long())
                positions[b].append(stored.positions[b, h][order])
                if stored.scores is not None:
                    scores[b].append(stored.scores[b, h][order].clone())
        return Kept(slots, positions, scores if stored.scores is not None else None)


def evict(store: PagedKV, keep: Tensor) -> None:
    """Drops the stored tokens of `store` where keep, bool [B, 1 or H, N] by index, is False: plan, copy, commit."""
    table, moves = store._table, None
    try:
        moves, heads = table.plan_evict(keep.numpy())
        if len(moves):
            ops.compact(
                store._views()[0], torch.from_numpy(moves), store.num_kv_heads, heads,
                store.head_dim + store._fill[0], store.value_dim + store._fill[1], store.page_size, store.sinks,
            )  # fmt: skip
    except BaseException as error:
        if moves is not None or not isinstance(error, Exception):
            table.rollback()
        raise
    table.commit()


def attention_mass(store: PagedKV, q: Tensor, **attention: Any) -> Tensor:
    """float32 [B, H, N]: attention that q [B, Hq, T, Dk], of the last T slots, pays to each stored token by index,
    summed over queries (those that are NaN, of pads, pay nothing) and the query heads of a KV head."""
    q = q if q.shape[3] == store.head_dim else q[..., : store.head_dim]
    return store.attend(q, mass=True, **attention)[2]
