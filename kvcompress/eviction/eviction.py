"""Eviction: applies a policy to one layer. Called by PagedKV."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import ops
from ..policies import Policy, StoredTokens
from ..policies.base import check_latent
from ..store.device_memory import sent
from ..store.padding import Pads
from ..store.page_store import AttendOp, Offload, PageStore
from ..store.sequence import Kept, slots_of
from ..store.serialize import LOST, runs_of
from . import demotion, tokens
from .accumulated_attention import DRAFT, AccumulatedAttention
from .evicted_attention import EvictedAttention
from .positions import MovedSinks, own_sinks


class Eviction:
    """Tracks the tokens of each row, collects what the policy needs (queries, attention), and evicts when a row exceeds
    its budget. Plans on the host, for pages on any device.

    deferred: evict only in `evict_over_budget()` instead of after every append.
    """

    def __init__(
        self, store: PageStore, policy: Policy, layer: int = 0, layers: int = 1, rope: Tensor | None = None,
        op: AttendOp = ops.attend,
    ) -> None:  # fmt: skip
        self.rope = None if rope is None else rope.to(store.device)
        if store.latent:
            check_latent(policy)
        if policy.needs_rope and rope is None:
            raise ValueError(
                f"PagedKV: policy: {policy!r}: expected rope=, the frequencies of the model's RoPE, got none; a "
                "KVCache passes it"
            )
        if policy.positions == "cache" and (
            rope is None or policy.sinks != store.sinks or store.fill[0] or store.basis
        ):
            raise ValueError(
                "PagedKV: policy: positions='cache': expected rope= (frequencies of the model's RoPE; a KVCache "
                f"passes it), sinks={policy.sinks} as in the policy, a head dim that pages store without padding, "
                f"and no calibration, got sinks={store.sinks}, {store.fill[0]} dims of padding; use "
                "positions='original' or another format"
            )
        self.store, self.policy, self.layer, self.layers = store, policy, layer, layers
        self.op: AttendOp = op
        self.offload: Offload | None = None  # offloaded pages of the layer
        self.deferred = False
        self.overdue = False  # the next call starts with an eviction: one ran out of memory, or waits for a crop
        if policy.needs_attention:
            store.table.keep_scores(True)
        self.reset()

    @classmethod
    def bare(cls, store: PageStore, pads: Pads | None, op: AttendOp) -> Eviction:
        """For a layer without a policy that has evicted nothing yet. pads: its padding; None: all slots that are not
        stored."""
        made = cls(store, Policy(1 << 40, sinks=0), op=op)
        if pads:
            made.pads = copy.deepcopy(pads)
        else:
            made.pads.append(0, store.is_stored()[:, 0])
        return made

    def reset(self) -> None:
        """The layer is empty again."""
        self.pads, self.count = Pads(self.store.batch), 0
        self.sinks = MovedSinks() if self.policy.positions == "cache" and self.store.sinks else None
        self.room = self.last = 0  # room: tokens until a row can exceed its budget; last: tokens of the last call
        self.accumulated = AccumulatedAttention(self.store, self.policy)
        self.evicted = EvictedAttention(self.store, self.policy.clusters) if self.policy.clusters else None

    def clone(self, store: PageStore) -> Eviction:
        """A copy for a copy of the layer."""
        twin = copy.copy(self)
        twin.sinks, twin.evicted, twin.offload = copy.copy(self.sinks), copy.copy(self.evicted), None
        twin.store, twin.pads, twin.accumulated = store, copy.deepcopy(self.pads), self.accumulated.clone(store)
        return twin

    # ------------------------------------------------------------------ events of the layer

    def wants_attention(self, T: int) -> bool:
        """True if a call of T tokens must return its attention. For policies with a `window`, that is cheaper in the
        steps just before an eviction than computing it again."""
        return self.policy.needs_attention or (T == 1 and max(1, self.room) <= self.policy.window)

    def on_appended(self, T: int, own: Tensor | None) -> None:
        """T slots were appended; own: bool [B, T], False at padding."""
        self.accumulated.process_pending(self.attention_of)
        if own is not None:
            self.pads.append(self.store.seen - T, own)
        self.room, self.last = self.room - T, T

    def defers(self, drafts: bool) -> bool:
        """True if the eviction after this call waits for the next one, because a crop may reject its tokens (drafts of
        speculative decoding)."""
        self.overdue = self.overdue or (drafts and self.last <= DRAFT)
        return self.overdue

    def on_attended(self, q: Tensor, lse: Tensor, received: Tensor, **attention: Any) -> None:
        """Queries q [B, Hq, T, Dk], NaN at padding, have attended with lse [B, Hq, T]; received: the attention of each
        token by index, [B, H, N], or N = 0."""
        if self.evicted:
            self.evicted.on_attended(q, lse, **attention)
        self.accumulated.on_attended(q, received, attention)
        if not self.deferred:
            self.accumulated.process_pending(self.attention_of)

    def observe(self, weights: Tensor) -> None:
        """See PagedKV.observe."""
        store = self.store
        B, H, Hq = store.batch, store.num_kv_heads, weights.shape[1]
        if weights.shape[0] != B or Hq % H or weights.shape[3] != store.seen:
            raise ValueError(
                f"observe: weights: expected [{B}, a multiple of {H}, T, {store.seen}], got {list(weights.shape)}"
            )
        received = weights.float().sum(2).reshape(B, H, Hq // H, -1).sum(2)
        slots = self.slots().expand(B, H, -1).long().to(received.device)
        received = received.gather(2, slots.clamp(min=0)).contiguous()
        self.accumulated.add(received, self.policy.decay_of(weights.shape[2]))

    def to(self, device: torch.device) -> None:
        """Moves its tensors to `device`."""
        self.rope = None if self.rope is None else self.rope.to(device)
        if self.sinks:
            self.sinks.to(device)
        self.accumulated.to(device)

    def attention_of(self, q: Tensor, *, scale: float | None = None, window: int = 0, softcap: float = 0.0) -> Tensor:
        """Attention of each stored token from q [B, Hq, T, Dk], the queries of the last T slots, summed over queries
        (NaN queries, of padding, do not count) and the query heads of a KV head: float32 [B, H, N] by index."""
        store = self.store
        with self.present():
            return store.attend(
                self.op, store.query(q), *store.empties(), store.no_mask, store.no_aux, store.no_seals, store.seen,
                window, store.scale if scale is None else scale, softcap, store.table.longest,
            )[2]  # fmt: skip

    def present(self) -> contextlib.AbstractContextManager[None]:
        """Context manager to read pages: offloaded pages are fetched."""
        return self.offload.present() if self.offload else contextlib.nullcontext()

    def onload(self) -> None:
        """Before pages change: moves offloaded pages back to the pool and updates the scores."""
        if self.offload:
            self.offload.onload()
        self.flush_scores()

    def flush_scores(self) -> None:
        """Updates the scores in the table. Called before the table changes or its scores are read."""
        self.accumulated.flush_scores()

    def on_cropped(self, seen: int) -> None:
        """Slots from `seen` on were removed."""
        if seen == 0:
            self.reset()
        self.pads.crop(seen)
        self.accumulated.on_cropped(seen)
        self.room = 0

    def on_selected(self, index: np.ndarray) -> None:
        """Row i is now the old row index[i]."""
        self.pads.select(index.tolist())
        if self.sinks:
            self.sinks.select(index.tolist())
        self.room = 0
        self.accumulated.on_selected(torch.from_numpy(index))
        if self.evicted:
            self.evicted.select(torch.from_numpy(index))

    def on_restored(self, queries: Sequence[Tensor] = ()) -> None:
        """The layer was filled with tokens; `queries` are its last. Slots before a row's first token are padding."""
        self.reset()
        self.pads.runs = [[(0, int(first))] if first else [] for first in self.store.table.rows[:, 0, 1]]
        self.accumulated.on_restored(queries)

    # ------------------------------------------------------------------ what is stored

    def real(self) -> Tensor:
        """Number of tokens of each row so far, evicted ones included: int64 [B]."""
        return torch.tensor([self.store.seen - self.pads.count(b) for b in range(self.store.batch)], device="cpu")

    def scores(self) -> Tensor:
        """Scores by index: float32 [B, H, capacity], a view of the table's memory."""
        self.flush_scores()
        scores = torch.from_numpy(self.store.table.scores)  # 1-D while it is empty
        return scores.reshape(self.store.batch, self.store.num_kv_heads, scores.shape[-1])

    def slots(self) -> Tensor:
        """Slots by index: int32 [B, 1 or H, N]; -1: no token."""
        return slots_of(self.store.table)

    def stored(self) -> StoredTokens:
        """The tokens as the policy sees them."""
        runs = [(b, *run) for b, row in enumerate(self.pads.runs) for run in row]
        slots, positions = self.store.table.tokens(np.array(runs, np.int64).reshape(-1, 3))
        scores = self.scores()[:, :, : slots.shape[2]] if self.policy.needs_attention else None
        return StoredTokens(
            torch.from_numpy(slots), torch.from_numpy(positions), self.store.num_kv_heads, self.real(), scores,
            self.layer, self.layers, self,
        )  # fmt: skip

    def read(self, count: int | None = None, start: int = 0) -> tuple[Tensor, Tensor]:
        """See `tokens.read`."""
        return tokens.read(self.store, count, start)

    def measure(self, kind: int) -> Tensor:
        """See `tokens.measure`."""
        return tokens.measure(self.store, kind)

    def means(self, positions: Tensor, real: Tensor) -> Tensor:
        """See `StoredTokens.mean_scores`."""
        return torch.from_numpy(self.store.table.means(positions.numpy(), real.numpy()))

    def last_queries(self, queries: int) -> tuple[Tensor, Tensor, float]:
        """See `StoredTokens.queries`."""
        q = self.accumulated.last(queries).float()
        slots = torch.arange(self.store.seen - q.shape[2], self.store.seen, device="cpu")
        positions = torch.stack([self.pads.positions(b, slots) for b in range(self.store.batch)])
        return q, positions.to(q.device), self.accumulated.attention["scale"]

    def window_attention(self, queries: int) -> Tensor:
        """See `StoredTokens.window_attention`."""
        collected = self.accumulated
        received = collected.window
        if received is None or collected.window_start != self.store.seen - queries:
            received = self.attention_of(collected.last(queries), **collected.attention)
        return received.cpu()

    # ------------------------------------------------------------------ files

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """(JSON-serializable dict, tensors): the state outside of the table."""
        seen = self.accumulated
        seen.process_pending(self.attention_of)
        plain: dict[str, Any] = {"pads": self.pads.runs, "count": self.count, "attention": seen.attention}
        plain |= {"overdue": True} if self.overdue else {}
        tensors = {"queries": torch.cat(seen.queries, 2).cpu()} if seen.queries else {}
        if self.evicted:
            tensors |= self.evicted.state()
        if self.sinks:
            plain["moved"], keys = self.sinks.state()
            tensors |= keys
        return plain, tensors

    def restore(self, plain: dict[str, Any], tensors: dict[str, Any]) -> None:
        """Restores what `state` returned, after the table. Raises ValueError, KeyError or TypeError for other data."""
        store = self.store
        queries = [tensors["queries"][..., : store.query_dim]] if "queries" in tensors else []
        if any(x.dim() != 4 or x.shape[0] != store.batch for x in queries):
            raise ValueError(f"expected queries of {store.batch} rows, got {list(queries[0].shape)}")
        self.on_restored(queries)
        self.pads.runs, self.count = runs_of(store, plain), int(plain["count"])
        self.overdue = bool(plain.get("overdue"))
        how: dict[str, Any] = {name: x if x is None else float(x) for name, x in plain["attention"].items()}
        if "window" in how:
            how["window"] = int(how["window"])
        self.accumulated.attention = how
        if self.evicted:
            self.evicted.restore(tensors)
        if self.sinks:
            self.sinks.restore(store, plain.get("moved", {}), tensors)

    # ------------------------------------------------------------------ evicting

    def live(self) -> Tensor:
        """Number of stored tokens of each row, summed over heads: int64 [B]."""
        return torch.from_numpy(self.store.table.live)

    def keep(self, stored: StoredTokens) -> Tensor:
        """The tokens that the policy keeps: bool [B, 1 or H, N] by index."""
        return self.policy.keep(stored).cpu()

    def evict(self, keep: Tensor, formats: Tensor | None) -> bool:
        """Evicts the tokens where keep is False. Returns False if nothing changes, on any rank."""
        return tokens.drop(self.store, keep, formats)

    def rows_over_budget(self) -> list[bool] | None:
        """For each row, whether it exceeds its budget by `slack`; None if no row does. Budgets never decrease."""
        if self.room > 0:
            return None
        store, policy, H = self.store, self.policy, self.store.num_kv_heads
        slack = policy.slack or store.page_size
        limits = [policy.limit(n, self.layer, self.layers) for n in self.real().tolist()]
        over = [live - H * (limit + slack) for live, limit in zip(self.live().tolist(), limits, strict=True)]
        self.room = -(max(over) // H)
        if self.room > policy.window:  # the budget grew with the sequence
            self.accumulated.window = None
        return [x >= 0 for x in over] if max(over) >= 0 else None

    def evict_over_budget(self) -> None:
        """Evicts from all rows that exceed their budget by the policy's slack."""
        self.accumulated.process_pending(self.attention_of)
        over = self.rows_over_budget()
        if over is None:
            return
        if self.policy.window and not self.accumulated.queries:
            raise ValueError(
                f"{type(self.policy).__name__}: expected the last queries, got none, as tokens were appended without "
                "attention; attend through the layer (kvcompress.enable(model))"
            )
        self.evict_rows(over)

    def evict_rows(self, over: list[bool]) -> None:
        """Evicts from the rows where `over` is True."""
        store, policy = self.store, self.policy
        self.onload()
        stored = self.stored()
        keep = self.keep(stored)
        heads = max(keep.shape[1], stored.line_slots.shape[1])
        keep = keep.expand(-1, heads, -1).clone(memory_format=torch.contiguous_format)
        keep[:, :, : store.sinks] = True  # the table never evicts its sinks
        others = ~torch.tensor(over, device="cpu")
        keep[others] = True
        formats = None
        if policy.ladder:
            formats = demotion.plan(store, policy, stored, keep & (stored.line_slots >= 0))
            formats[others] = -1
        if self.drop(keep, formats):
            self.rows_over_budget()
        else:
            self.room = policy.slack or store.page_size  # all tokens over the budget are protected

    def evict_or_defer(self) -> None:
        """`evict_over_budget` after a call has stored its tokens and must not raise: on one of the errors in LOST the
        eviction is left to `evict_deferred`."""
        try:
            self.evict_over_budget()
        except LOST:
            self.overdue, self.room = True, 0

    def evict_deferred(self) -> None:
        """Runs an overdue eviction, before a call. If it fails again, raises one of LOST and changes nothing."""
        if self.overdue:
            self.evict_over_budget()
            self.overdue = False

    def drop(self, keep: Tensor, formats: Tensor | None = None) -> bool:
        """Evicts all tokens but keep: bool [B, 1 or H, N] by index; formats: see `demotion.plan`. Returns False if that
        changes nothing."""
        self.onload()
        lost = self.evicted.about_to_evict(self.read()[0], self.slots(), keep) if self.evicted else None
        if self.sinks:
            own_sinks(self.store)
        if not self.evict(keep, formats):
            return False
        if self.evicted and lost:
            self.evicted.add(lost)
        self.count += 1
        self.room, self.accumulated.window = 0, None
        if self.sinks and self.rope is not None:
            evicted = self.real() - self.live() // self.store.num_kv_heads
            self.sinks.move(self.store, self.rope, evicted.tolist(), self.read(self.store.sinks)[0])
        return True

    def longest_row(self) -> int:
        """Number of tokens of the row with the most, mean over its heads."""
        return -(-int(self.live().max()) // self.store.num_kv_heads)

    def in_order(self) -> tuple[Tensor, ...]:
        """K, V [B, H, kept, D] in the layer's dtype, in sequence order. Raises ValueError unless all rows and heads
        store the same number of tokens."""
        slots = self.slots()
        counts = (slots >= 0).sum(-1)
        count = int(counts[0, 0])
        if bool((counts != count).any()):
            raise ValueError(
                "kvcompress: expected the same number of tokens in all rows and heads, for attention outside of the "
                "cache, got different numbers; call kvcompress.enable(model)"
            )
        place = slots.argsort(-1).argsort(-1).int() - (slots.shape[2] - count)  # those without a token come first
        with self.present():
            found = self.store.read(sent(place.clamp(min=-1), self.store.device), count, self.store.no_aux)
        return tuple(x.to(self.store.dtype) for x in found)

    def not_evicted(self) -> Tensor | None:
        """bool [B, 1 or H, seen]: False at slots of evicted tokens; None if nothing has been evicted."""
        if not self.count:
            return None
        return self.store.is_stored() | ~self.pads.real(self.store.seen)[:, None]

    def kept(self) -> Kept:
        """The stored tokens, in sequence order."""
        stored = self.stored()
        found = Kept([], [], None if stored.scores is None else [])
        for b, row in enumerate(stored.slots):
            order = [x.argsort()[int((x < 0).sum()) :] for x in row]
            found.slots.append([x[at].long() for x, at in zip(row, order, strict=True)])
            found.positions.append([x[at] for x, at in zip(stored.positions[b], order, strict=True)])
            if found.scores is not None and stored.scores is not None:
                found.scores.append([x[at] for x, at in zip(stored.scores[b], order, strict=True)])
        return found
