"""Observed: what the queries of a layer leave for its policy: the last of them, and the attention that they paid.

All of it stays on the layer's device until a policy decides or the table changes, so that no step waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import ops
from ..policies import Policy
from ..store.page_store import AttendOp, PageStore

DRAFT = 64
"""Tokens of a call that may be a draft: a crop may take part of it back."""


def attention_mass(
    store: PageStore, q: Tensor, op: AttendOp = ops.attend, *, scale: float | None = None, window: int = 0,
    softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    """float32 [B, H, N]: attention that q [B, Hq, T, Dk], of the last T slots, pays to each stored token by index,
    summed over queries (those that are NaN, of pads, pay nothing) and the query heads of a KV head."""
    return store.attend(
        op, store.query(q), *store.empties(), store.no_mask, store.no_aux, store.no_seals, store.seen, window,
        store.scale if scale is None else scale, softcap, store.table.longest,
    )[2]  # fmt: skip


class Observed:
    """Takes up each call's queries and what they paid, when the call can no longer be undone."""

    def __init__(self, store: PageStore, policy: Policy) -> None:
        self.store, self.policy = store, policy
        self.attention: dict[str, Any] = {}  # how queries attend
        # Of a call that may still be undone: queries, what they paid (None: to be asked), tokens, how they attended.
        self.pending: tuple[Tensor, Tensor | None, int, dict[str, Any]] | None = None
        self.sum: Tensor | None = None  # [B, H, N] by index: paid since the table's scores were brought up to date,
        self.fade = 1.0  # times which they count
        self._forget()

    def _forget(self) -> None:
        self.queries: list[Tensor] = []  # [B, Hq, n, Dk]: together the last `window`, or a few more
        self.behind = 0  # queries behind the first of these
        self.paid: Tensor | None = None  # [B, H, N] by index: by all queries from slot `paid_from` on
        self.paid_from = self.end = 0  # end: slots after the last call

    def clone(self, store: PageStore) -> Observed:
        """The same for a copy of the layer."""
        twin = object.__new__(Observed)
        twin.__dict__.update(self.__dict__)
        twin.store, twin.queries = store, list(self.queries)
        return twin

    def go(self, device: torch.device) -> None:
        """Holds its tensors there; the sum is flushed."""
        self.queries = [x.to(device) for x in self.queries]
        self.paid = None if self.paid is None else self.paid.to(device)
        if self.pending:
            q, mass, T, how = self.pending
            self.pending = q.to(device), None if mass is None else mass.to(device), T, how

    # ------------------------------------------------------------------ what comes

    def attended(self, q: Tensor, mass: Tensor, attention: dict[str, Any]) -> None:
        """q [B, Hq, T, Dk], NaN at pads, has been attended with; it paid mass [B, H, N] by index (or N = 0)."""
        T, w = q.shape[2], self.policy.window
        self.end = self.store.seen
        if w or self.policy.needs_mass:
            self.pending = q[:, :, T - w :].clone() if w and max(w, DRAFT) < T else q, mass, T, attention

    def take_up(self, attention_of: Callable[..., Tensor]) -> None:
        """What the last call has left is the policy's. attention_of: `attention_mass` of this layer."""
        if self.pending is None:
            return
        q, mass, T, self.attention = self.pending
        self._joined(*(x for x in (mass, self.sum, self.paid) if x is not None))
        if mass is None:  # may fail: then it is still to be taken up
            mass = attention_of(q, **self.attention)
        self.pending = None
        if self.policy.needs_mass:
            self.add(mass, self.policy.fade(T))
        if self.policy.window:
            if self.queries:
                self.behind += q.shape[2]
            self.queries.append(q)
            while self.behind >= self.policy.window:
                del self.queries[0]
                self.behind -= self.queries[0].shape[2]
            if T == 1 and mass.shape[2]:
                if self.paid is None:
                    self.paid, self.paid_from = mass, self.store.seen - 1
                else:
                    self.paid = _wide(self.paid, mass).add_(mass)
            else:
                self.paid = None

    def add(self, mass: Tensor, fade: float) -> None:
        """Scores become fade * scores + mass [B, H, N] by index."""
        if not self.store.mirror:
            self.store.table.observe(mass.numpy(), fade)
        elif self.sum is None:
            self.sum, self.fade = mass, fade
        else:
            self.sum, self.fade = _wide(self.sum, mass).mul_(fade).add_(mass), self.fade * fade

    def _joined(self, *made: Tensor) -> None:
        """What other streams have made is there, and lives on, for what this thread queues next."""
        if self.store.mirror:
            self.store.mirror.arena.joined()
            for x in made:
                self.store.mirror.arena.copy_stream.used(x)

    def flush_scores(self) -> None:
        """The table's scores are up to date. Waits for a device."""
        if self.sum is not None:
            self._joined(self.sum)
            self.store.table.observe(self.sum.cpu().numpy(), self.fade)
            self.sum = None

    # ------------------------------------------------------------------ what happens to the layer

    def cropped(self, seen: int) -> None:
        """Slots from `seen` on are forgotten. What stays of a call that could still be undone pays anew, alone."""
        pending, self.pending, self.paid = self.pending, None, None
        if seen == 0:
            self._forget()
        elif pending and (n := pending[2] - (self.end - seen)) > 0 and pending[0].shape[2] == pending[2]:
            q, mass, _, how = pending
            unpaid = None if mass is None or self.policy.needs_mass else mass[:, :, :0]
            self.pending, self.end = (q[:, :, :n], unpaid, n, how), seen

    def selected(self, index: Tensor) -> None:
        """Row i is old row index[i]."""
        self.paid = None
        self.queries = [x[index.to(x.device)] for x in self.queries]
        if self.pending:
            q, mass, T, how = self.pending
            self.pending = q[index.to(q.device)], None if mass is None else mass[index.to(mass.device)], T, how

    def restored(self, queries: Sequence[Tensor]) -> None:
        """The layer has taken over tokens, and these are its last queries."""
        self._forget()
        self.queries = [x.to(self.store.device) for x in queries]

    # ------------------------------------------------------------------ what is asked for

    def last(self, n: int) -> Tensor:
        """The last n queries, or all that there are: [B, Hq, n, Dk], NaN at pads."""
        return torch.cat(self.queries, 2)[:, :, -n:]

    def paid_by(self, n: int) -> Tensor | None:
        """[B, H, N] by index: what the last n queries paid, if it was noted as they did."""
        return self.paid if self.paid_from == self.store.seen - n else None


def _wide(x: Tensor, like: Tensor) -> Tensor:
    """A copy of x [.., n] with zeros up to the last dim of `like`."""
    return pad(x, (0, like.shape[-1] - x.shape[-1]))
