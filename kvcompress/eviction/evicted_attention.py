"""EvictedAttention: estimates the attention that evicted tokens would receive, from summaries of their keys.

Each KV head keeps clusters of evicted keys: count, mean and variance by dim. If the keys of a cluster are normally
distributed, a query q has sum exp(q.k) = n exp(q.mean + var(q) / 2) over them: their part of the softmax. Source: the
Gaussian moments of Expected Attention (arXiv 2510.00636), with unknown keys instead of unknown queries.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..store.page_store import PageStore

_KEY = "evicted"  # in files


class Summary(NamedTuple):
    """Clusters of evicted keys of a layer, float32: count [B, H, M], mean and sums of squares around it [B, H, M,
    Dk]."""

    count: Tensor  # type: ignore[assignment]
    mean: Tensor
    spread: Tensor

    @classmethod
    def empty(cls, batch: int, heads: int, clusters: int, dim: int) -> Summary:
        """Without keys, and without memory for them: `add` needs a `clone`."""
        zero = torch.zeros((), dtype=torch.float32, device="cpu").expand(batch, heads, clusters, dim)
        return cls(zero[..., 0], zero, zero)

    def clone(self) -> Summary:
        """An independent copy."""
        return Summary(*(x.clone(memory_format=torch.contiguous_format) for x in self))

    def add(self, b: int, h: int, keys: Tensor) -> None:
        """Adds evicted keys, float32 [n, Dk], of head h in row b: to empty clusters first, then to the nearest mean."""
        count, mean, spread = self.count[b, h], self.mean[b, h], self.spread[b, h]
        free = (count == 0).nonzero().flatten()[: len(keys)]
        if len(free):  # evenly spaced keys become the first means
            seeds = torch.linspace(0, len(keys) - 1, len(free), dtype=torch.float32, device="cpu").round().long()
            mean[free], count[free] = keys[seeds], 1.0
            rest = torch.ones(len(keys), dtype=torch.bool, device="cpu")
            rest[seeds] = False
            keys = keys[rest]
        if not len(keys):
            return
        nearest = torch.cdist(keys, mean).argmin(1)
        added = torch.zeros_like(count).index_add_(0, nearest, torch.ones(len(keys), dtype=torch.float32, device="cpu"))
        count_added = added.clamp(min=1)[:, None]
        new = torch.zeros_like(mean).index_add_(0, nearest, keys) / count_added
        within = torch.zeros_like(mean).index_add_(0, nearest, (keys - new[nearest]).square())
        total = (count + added).clamp(min=1)[:, None]
        apart = torch.where(added[:, None] > 0, new - mean, 0.0)
        spread += within + apart.square() * (count * added)[:, None] / total
        mean += apart * added[:, None] / total
        count += added

    def log_sum(self, q: Tensor, scale: float) -> Tensor:
        """Estimate of log sum exp(scale q.k) over the evicted keys, for q [B, Hq, Dk]: float32 [B, Hq]; -inf if there
        are none."""
        B, H, _, D = self.mean.shape
        q = q.reshape(B, H, -1, D).float() * scale
        variance = self.spread / self.count.clamp(min=1)[..., None]
        logit = q @ self.mean.transpose(2, 3) + q.square() @ variance.transpose(2, 3) / 2
        return (logit + self.count.log()[:, :, None]).logsumexp(-1).reshape(B, -1)


class EvictedAttention:
    """The summary of a layer's evicted keys, and the estimate for its newest query."""

    def __init__(self, store: PageStore, clusters: int) -> None:
        self.summary = Summary.empty(store.batch, store.num_kv_heads, clusters, store.query_dim)
        self.newest: tuple[Tensor, Tensor, float] | None = None  # q [B, Hq, Dk], lse [B, Hq], scale
        self.estimate = torch.zeros(store.batch, dtype=torch.float32, device="cpu")

    def select(self, index: Tensor) -> None:
        """Row i becomes old row index[i]."""
        self.estimate = self.evicted_attention()[index]
        self.summary = Summary(*(x[index] for x in self.summary))

    def state(self) -> dict[str, Tensor]:
        """The tensors to save in a file."""
        shown = {**self.summary._asdict(), "estimate": self.evicted_attention()}
        return {f"{_KEY}.{name}": x for name, x in shown.items()}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restores what `state` returned. Raises KeyError or ValueError for other data."""
        expected = {**self.summary._asdict(), "estimate": self.estimate}
        came = {name: state[f"{_KEY}.{name}"].clone() for name in expected}
        for name, x in expected.items():
            y = came[name]
            if y.shape != x.shape or y.dtype != x.dtype or not bool(y.isfinite().all()):
                raise ValueError(f"expected finite {name} of evicted keys, {list(x.shape)}, got {list(y.shape)}")
        self.estimate, self.newest = came.pop("estimate"), None
        self.summary = Summary(**came)

    def on_attended(self, q: Tensor, lse: Tensor, *, scale: float, window: int = 0, softcap: float = 0.0) -> None:
        """Queries [B, Hq, T, Dk] have attended with lse [B, Hq, T]; the last one is kept. Raises ValueError for
        attention that the estimate does not cover."""
        if window or softcap:
            raise ValueError(
                f"Watch: expected attention without window and softcap, got window {window}, softcap {softcap}"
            )
        self.newest = q[:, :, -1], lse[:, :, -1], scale

    def about_to_evict(self, keys: Tensor, slots: Tensor, keep: Tensor) -> list[tuple[int, int, Tensor]]:
        """(row, head, keys [n, Dk]) of the tokens that keep [B, 1 or H, N] evicts; keys and slots by index."""
        drop = (~keep & (slots >= 0)).expand(keys.shape[:3])
        return [(b, h, keys[b, h, drop[b, h].to(keys.device)].cpu()) for b, h in drop.any(2).nonzero().tolist()]

    def add(self, lost: list[tuple[int, int, Tensor]]) -> None:
        """Adds evicted keys. The estimate for the last query is made first, as that query has seen them."""
        self.estimate, self.summary = self.evicted_attention(), self.summary.clone()
        for b, h, keys in lost:
            self.summary.add(b, h, keys)

    def evicted_attention(self) -> Tensor:
        """Share of the newest query's attention that evicted tokens would receive, mean over query heads: float32
        [B]."""
        if self.newest is not None:
            q, lse, scale = self.newest
            self.estimate, self.newest = share(self.summary.log_sum(q.cpu(), scale), lse.cpu()).mean(1), None
        return self.estimate


def share(evicted: Tensor, kept: Tensor) -> Tensor:
    """Share of the softmax with log-sum `evicted`, next to `kept`; 0 if nothing was evicted."""
    return (evicted - torch.logaddexp(evicted, kept)).exp().nan_to_num(0.0)
