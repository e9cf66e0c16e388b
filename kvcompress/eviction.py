"""Eviction: a policy at work in one layer. What PagedKV calls when it has one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize, pad

from . import demotion, ops
from .pads import Pads
from .policies import Policy, Stored
from .positions import MovedSinks, own_sinks
from .regret import Gone
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
        self.sinks, self.rope = None, rope
        if policy.needs_rope and rope is None:
            raise ValueError(
                f"PagedKV: policy: {policy!r} wants rope= (frequencies of the model's RoPE), which a KVCache finds"
            )
        if policy.positions == "cache":
            if rope is None or policy.sinks != store.sinks or store._fill[0]:
                raise ValueError(
                    "PagedKV: policy: positions='cache' wants rope= (frequencies of the model's RoPE, which a KVCache "
                    f"finds itself): wanted sinks= as the policy has ({policy.sinks}), a head dim that pages take as "
                    f"it is, got sinks={store.sinks}, head dim {store.head_dim} in pages of "
                    f"{store.head_dim + store._fill[0]}; take positions='original', or another key format"
                )
            self.sinks = MovedSinks(rope)
        self.store, self.policy, self.layer, self.layers = store, policy, layer, layers
        self.deferred = False
        self.late = False  # an eviction found no memory: the next call begins with it
        self.version = -1  # of the table that `score_view` is of
        if policy.needs_mass:
            store._table.keep_scores(True)
        self.reset()

    @classmethod
    def bare(cls, store: PagedKV) -> Eviction:
        """For a layer without a policy, of which nothing was dropped yet: pads are the slots that it does not store."""
        made = cls(store, Policy(1 << 40, sinks=0))
        if store.ring:
            made.pads = store.ring.pads.clone()
            return made
        slots = made.slots()[:, 0].long()
        real = torch.zeros(store.batch, store.seen + 1, dtype=torch.bool)
        real.scatter_(1, slots.masked_fill(slots < 0, store.seen), True)
        made.pads.append(0, real[:, :-1])
        return made

    def reset(self) -> None:
        """The layer is empty."""
        self.pads, self.count = Pads(self.store.batch), 0
        if self.sinks:
            self.sinks.reset()
        self.room = 0  # tokens until a row can be over its budget
        self.attention: dict[str, Any] = {}  # how queries attend
        self.pending: tuple[Tensor, Tensor, int, dict[str, Any]] | None = None  # of a call that may still be undone
        self._forget_queries()
        self.gone = None
        if self.policy.clusters:
            self.gone = Gone(self.store, self.policy.clusters)

    def _forget_queries(self) -> None:
        self.queries: list[Tensor] = []  # [B, Hq, n, Dk]: together the last `window`, or a few more
        self.paid: Tensor | None = None  # [B, H, N] by index: by all queries from slot `paid_from` on
        self.paid_from = 0

    def clone(self, store: PagedKV) -> Eviction:
        """The same for a copy of the layer."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.sinks = self.sinks.clone() if self.sinks else None
        twin.gone = self.gone.clone() if self.gone else None
        twin.store, twin.pads, twin.queries, twin.version = store, self.pads.clone(), list(self.queries), -1
        return twin

    # ------------------------------------------------------------------ what happens to the layer

    def wants_mass(self, T: int) -> bool:
        """Must the attention of a call of T tokens say what it pays? For policies that ask for the last queries'
        attention that is cheaper, token by token just before an eviction, than asking them again."""
        return self.policy.needs_mass or (T == 1 and max(1, self.room) <= self.policy.window)

    def appended(self, T: int, own: Tensor | None) -> None:
        """T slots have been appended; own: bool [B, T], False at pads."""
        self._observe()
        if own is not None:
            self.pads.append(self.store.seen - T, own)
        self.room -= T

    def attended(self, q: Tensor, lse: Tensor, mass: Tensor, **attention: Any) -> None:
        """q [B, Hq, T, Dk], NaN at pads, has been attended with: lse [B, Hq, T]; it paid mass [B, H, N] by index (or
        N = 0)."""
        T, w = q.shape[2], self.policy.window
        if self.gone:
            self.gone.asked(q, lse, **attention)
        self.pending = q[:, :, T - w :].clone() if w and w < T else q, mass, T, attention
        if not self.deferred:
            self._observe()

    def _observe(self) -> None:
        """What a call has left for the policy is taken up."""
        if self.pending is None:
            return
        (q, mass, T, self.attention), self.pending = self.pending, None
        if self.policy.needs_mass:
            self.store._table.observe(mass.numpy(), self.policy.fade(T))
        if self.policy.window:
            self.queries.append(q)
            while sum(x.shape[2] for x in self.queries[1:]) >= self.policy.window:
                del self.queries[0]
            if T == 1 and mass.shape[2]:
                if self.paid is None:
                    self.paid, self.paid_from = mass, self.store.seen - 1
                else:
                    self.paid = pad(self.paid, (0, mass.shape[2] - self.paid.shape[2])).add_(mass)
            else:
                self.paid = None

    def cropped(self, seen: int) -> None:
        """Slots from `seen` on are forgotten."""
        self.pads.crop(seen)
        self.pending = self.paid = None
        if seen == 0:
            self._forget_queries()
            self.count = 0
            if self.gone:
                self.gone = Gone(self.store, self.policy.clusters)
        if self.sinks and seen == 0:
            self.sinks.reset()
        self.room = 0

    def selected(self, index: np.ndarray) -> None:
        """Row i is old row index[i]."""
        self.pads.select(index.tolist())
        if self.sinks:
            self.sinks.select(index.tolist())
        self.room, self.paid = 0, None
        if self.gone:
            self.gone.select(torch.from_numpy(index))
        self.queries = [x[torch.from_numpy(index)] for x in self.queries]

    def restored(self) -> None:
        """The layer has taken over tokens; pads are those before a row's first one."""
        rows = self.store._table.rows
        self.pads.runs = [[(0, int(first))] if first else [] for first in rows[:, 0, 1]]
        self.room, self.paid = 0, None

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
            self,
        )  # fmt: skip

    def read(self, first: int | None = None) -> tuple[Tensor, Tensor]:
        """K and V by index, of all tokens or the first few."""
        store, slots = self.store, self.slots()
        arena, entries, rows, _ = store._views()
        index = torch.arange(slots.shape[2], dtype=torch.int32).expand(slots.shape).contiguous()
        k, v = ops.read(
            torch.empty(0), arena, entries, rows, index, store.num_kv_heads, store.head_dim + store._fill[0],
            store.value_dim + store._fill[1], slots.shape[2] if first is None else first, store.page_size, store.sinks,
        )  # fmt: skip
        return store._cut(k, 0), store._cut(v, 1)

    def measure(self, kind: int) -> Tensor:
        """A number for each stored token, [B, H, N] by index: see `ops.score_tokens`."""
        store = self.store
        if not any(store._fill):
            return ops.score_tokens(
                *store._views(), store.num_kv_heads, store.head_dim, store.value_dim, store._table.longest,
                store.page_size, store.sinks, kind,
            )  # fmt: skip
        x, live = self.read()[kind == 1], (self.slots() >= 0)[..., None]  # pages hold more than the row
        if kind < 2:
            return (x * live).norm(dim=-1)
        unit = normalize(x, dim=-1) * live
        return cosine_similarity(unit, unit.sum(2, keepdim=True), dim=-1)

    def asked(self, queries: int) -> tuple[Tensor, Tensor, float]:
        """See `Stored.queries`."""
        q = torch.cat(self.queries, 2)[:, :, -queries:, : self.store.head_dim].float()
        slots = torch.arange(self.store.seen - q.shape[2], self.store.seen)
        positions = torch.stack([self.pads.positions(b, slots) for b in range(self.store.batch)])
        return q, positions, self.attention["scale"]

    def mass(self, queries: int) -> Tensor:
        """See `Stored.mass`."""
        if self.paid is not None and self.paid_from == self.store.seen - queries:
            return self.paid
        return attention_mass(self.store, torch.cat(self.queries, 2)[:, :, -queries:], **self.attention)

    # ------------------------------------------------------------------ evicting

    def live(self) -> Tensor:
        """int64 [B]: tokens of each row, over all heads."""
        return torch.from_numpy(self.store._table.live)

    def keep(self, stored: Stored) -> Tensor:
        """bool [B, 1 or H, N] by index: what the policy wants to stay."""
        return self.policy.keep(stored, ops.select)

    def changes(self, anything: bool) -> bool:
        """Is anything to be done, here or where the other tokens are?"""
        return anything

    def due(self) -> Tensor | None:
        """bool [B]: the rows that are over their budget by `slack`; None if there are none. Budgets never fall."""
        store = self.store
        if self.room > 0:
            return None
        slack = self.policy.slack or store.page_size
        limit = self.policy.limit(self.real(), self.layer, self.layers)
        over = self.live() - store.num_kv_heads * (limit + slack)
        self.room = -(int(over.max()) // store.num_kv_heads)
        if self.room > self.policy.window:  # the budget has grown with the sequence
            self.paid = None
        return over >= 0 if bool((over >= 0).any()) else None

    def run(self) -> bool:
        """Evicts where it is due; True if it has."""
        self._observe()
        due = self.due()
        if due is None:
            return False
        if self.policy.window and not self.queries:
            raise ValueError(
                f"{type(self.policy).__name__}: wanted the last queries, got none: tokens were appended without "
                "attention; attend through the layer (kvcompress.enable(model))"
            )
        stored = self.stored()
        keep = self.keep(stored)
        uniform = self.store._table.rows.shape[1] == 1
        if keep.shape[1] == 1 and not uniform:
            keep = keep.expand(stored.slots.shape)
        # Sinks of the table stay, and rows that are not over their budget stay as they are.
        index = torch.arange(keep.shape[2])
        keep = (keep | (index < self.store.sinks) | ~due[:, None, None]) & stored.live[:, : keep.shape[1]]
        keep = keep.contiguous()
        formats = demotion.plan(self.store, self.policy, stored, keep) if self.policy.ladder else None
        if formats is not None:
            formats.masked_fill_(~due[:, None, None], -1)
        same = bool((keep == stored.live[:, : keep.shape[1]]).all()) and (formats is None or bool((formats < 0).all()))
        if not self.changes(not same):
            self.room = self.policy.slack or self.store.page_size  # all that is over the budget is protected
            return False
        self.drop(keep, formats)
        self.due()
        return True

    def follow(self) -> bool:
        """`run` after tokens were stored, which cannot fail any more: without memory it is put off until `catch_up`."""
        try:
            return self.run()
        except MemoryError:
            self.late, self.room = True, 0
            return True

    def catch_up(self) -> None:
        """Before a call: the eviction that was put off. MemoryError, and nothing done, if there is still no memory."""
        if self.late:
            self.run()
            self.late = False

    def drop(self, keep: Tensor, formats: Tensor | None = None) -> None:
        """keep: bool [B, 1 or H, N] by index; formats: see `demotion.plan`."""
        lost = self.gone.about_to_go(self, keep) if self.gone else None
        if self.sinks and self.store.sinks:
            own_sinks(self.store)
        evict(self.store, keep, formats)
        if self.gone and lost:
            self.gone.add(lost)
        self.count += 1
        self.room, self.paid = 0, None
        if self.sinks and self.store.sinks:
            gone = self.real() - torch.from_numpy(self.store._table.live) // self.store.num_kv_heads
            self.sinks.move(self.store, gone.tolist(), self.read(self.store.sinks)[0])

    def most(self) -> int:
        """Tokens that the fullest row holds, mean over its heads."""
        return -(-int(self.live().max()) // self.store.num_kv_heads)

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
        k, v = (x.to(self.store.dtype) for x in self.read())
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


def evict(store: PagedKV, keep: Tensor, formats: Tensor | None = None) -> None:
    """Drops the stored tokens of `store` where keep, bool [B, 1 or H, N] by index, is False: plan, copy, commit.
    formats: int32 [B, 1 or H, P], what closed pages are written anew in; -1: as they are."""
    table, moves = store._table, None
    try:
        moves, heads = table.plan_evict(keep.numpy(), None if formats is None else formats.numpy())
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
