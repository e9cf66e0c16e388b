"""AccumulatedAttention: the last queries of a layer and the attention that its tokens received, for its policy.

Both stay on the layer's device until the policy evicts or the table changes, so that no step synchronizes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..policies import Policy
from ..store.page_store import PageStore

DRAFT = 64
"""Maximum number of tokens of a call that may be a draft, a part of which a crop may remove."""


class AccumulatedAttention:
    """Collects queries and attention of each call, once a crop can no longer remove its tokens."""

    def __init__(self, store: PageStore, policy: Policy) -> None:
        self.store, self.policy = store, policy
        self.attention: dict[str, Any] = {}  # scale, window and softcap of the queries
        # A call that a crop may remove: queries, received attention (None: to be computed), T, its `attention`.
        self.pending: tuple[Tensor, Tensor | None, int, dict[str, Any]] | None = None
        self.sum: Tensor | None = None  # [B, H, N] by index: received since the table's scores were updated,
        self.decay = 1.0  # by which those scores are multiplied
        self.queries: list[Tensor] = []  # [B, Hq, n, Dk] each: together at least the last `window`
        self.queries_after_first = 0  # number of queries in all but the first tensor
        self.window: Tensor | None = None  # [B, H, N] by index: from all queries from slot `window_start` on
        self.window_start = self.end = 0  # end: number of slots after the last call

    def clone(self, store: PageStore) -> AccumulatedAttention:
        """A copy for a copy of the layer."""
        twin = copy.copy(self)
        twin.store, twin.queries = store, list(self.queries)
        return twin

    def to(self, device: torch.device) -> None:
        """Moves its tensors to `device`; the sum must be flushed before."""
        self.queries = [x.to(device) for x in self.queries]
        self.window = None if self.window is None else self.window.to(device)
        if self.pending:
            q, received, T, how = self.pending
            self.pending = q.to(device), None if received is None else received.to(device), T, how

    # ------------------------------------------------------------------ collecting

    def on_attended(self, q: Tensor, received: Tensor, attention: dict[str, Any]) -> None:
        """Queries q [B, Hq, T, Dk], NaN at padding, have attended; received: the attention of each token by index,
        [B, H, N], or N = 0."""
        T, w = q.shape[2], self.policy.window
        self.end = self.store.seen
        if w or self.policy.needs_attention:
            self.pending = q[:, :, T - w :].clone() if w and max(w, DRAFT) < T else q, received, T, attention

    def process_pending(self, attention_of: Callable[..., Tensor]) -> None:
        """Accepts the pending call. attention_of: `Eviction.attention_of` of this layer."""
        if self.pending is None:
            return
        q, received, T, self.attention = self.pending
        self._joined(*(x for x in (received, self.sum, self.window) if x is not None))
        if received is None:  # if this raises, the call stays pending
            received = attention_of(q, **self.attention)
        self.pending = None
        if self.policy.needs_attention:
            # `received` of a call includes its padding, which is not stored
            self.add(received[:, :, : self.store.table.longest].contiguous(), self.policy.decay_of(T))
        if self.policy.window:
            if self.queries:
                self.queries_after_first += q.shape[2]
            self.queries.append(q)
            while self.queries_after_first >= self.policy.window:
                del self.queries[0]
                self.queries_after_first -= self.queries[0].shape[2]
            if T == 1 and received.shape[2]:
                if self.window is None:
                    self.window, self.window_start = received, self.store.seen - 1
                else:
                    self.window = _wide(self.window, received).add_(received)
            else:
                self.window = None

    def add(self, received: Tensor, decay: float) -> None:
        """Scores become decay * scores + received [B, H, N] by index."""
        if not self.store.mirror:
            self.store.table.observe(received.numpy(), decay)
        elif self.sum is None:
            self.sum, self.decay = received, decay
        else:
            self.sum, self.decay = _wide(self.sum, received).mul_(decay).add_(received), self.decay * decay

    def _joined(self, *made: Tensor) -> None:
        """Orders work of other streams on these tensors before what this thread queues next."""
        if self.store.mirror:
            self.store.mirror.arena.joined()
            for x in made:
                self.store.mirror.arena.copy_stream.used(x)

    def flush_scores(self) -> None:
        """Updates the scores in the table. Synchronizes with the device."""
        if self.sum is not None:
            self._joined(self.sum)
            self.store.table.observe(self.sum.cpu().numpy(), self.decay)
            self.sum = None

    # ------------------------------------------------------------------ events of the layer

    def on_cropped(self, seen: int) -> None:
        """Slots from `seen` on were removed. Of a pending call, the remaining queries stay pending, and their attention
        is computed again."""
        pending, self.pending, self.window = self.pending, None, None
        taken = self.end - (pending[2] if pending else 0)  # slot after the last of `queries`
        if pending and (n := seen - taken) > 0 and pending[0].shape[2] == pending[2]:
            q, received, _, how = pending
            unknown = None if received is None or self.policy.needs_attention else received[:, :, :0]
            self.pending, self.end = (q[:, :, :n], unknown, n, how), seen
        elif self.queries:
            q = torch.cat(self.queries, 2)
            q = q[:, :, : max(0, q.shape[2] - max(0, taken - seen))]
            self.queries, self.queries_after_first, self.end = [q] if q.shape[2] else [], 0, seen

    def on_selected(self, index: Tensor) -> None:
        """Row i is now the old row index[i]."""
        self.window = None
        self.queries = [x[index.to(x.device)] for x in self.queries]
        if self.pending:
            q, received, T, how = self.pending
            self.pending = (
                q[index.to(q.device)],
                None if received is None else received[index.to(received.device)],
                T,
                how,
            )

    def on_restored(self, queries: Sequence[Tensor]) -> None:
        """The empty layer was filled with tokens; `queries` are its last ones."""
        self.queries, self.end = [x.to(self.store.device) for x in queries], self.store.seen

    # ------------------------------------------------------------------ reading

    def last(self, n: int) -> Tensor:
        """The last n queries, or fewer if there were fewer: [B, Hq, n, Dk], NaN at padding."""
        return torch.cat(self.queries, 2)[:, :, -n:]


def _wide(x: Tensor, like: Tensor) -> Tensor:
    """A copy of x [.., n], zero-padded to the last dim of `like`."""
    return pad(x, (0, like.shape[-1] - x.shape[-1]))
