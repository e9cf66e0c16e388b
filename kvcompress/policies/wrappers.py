"""Wrappers of policies: budgets by head or layer, protected spans, smaller formats for low scores, chains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .. import checks, formats
from ..ops import share
from ..quantization.mixed_precision import pair
from .base import Policy, StoredTokens

_ATTRIBUTES = (
    "budget", "sinks", "recent", "slack", "needs_attention", "window", "heads", "needs_rope", "needs_outputs", "uneven",
    "positions", "clusters", "ladder", "shares",
)  # fmt: skip


class Wrapper(Policy):
    """Base class of wrappers: behaves as `policy`, except for what a subclass overrides."""

    def __init__(self, policy: Policy) -> None:
        if not isinstance(policy, Policy):
            raise TypeError(f"{type(self).__name__}: expected a policy, got {type(policy).__name__}")
        self.policy = policy
        for name in _ATTRIBUTES:
            setattr(self, name, getattr(policy, name))

    def limit(self, real: int, layer: int, layers: int) -> int:
        return self.policy.limit(real, layer, layers)

    def budgets(self, stored: StoredTokens) -> Tensor:
        return self.policy.budgets(stored)

    def score(self, stored: StoredTokens) -> Tensor:
        return self.policy.score(stored)

    def protected(self, stored: StoredTokens) -> Tensor | None:
        return self.policy.protected(stored)

    def decay_of(self, queries: int) -> float:
        return self.policy.decay_of(queries)

    def bind(self, model: Any) -> Policy:
        self.policy.bind(model)
        return self

    def describe(self) -> str:
        return f"{type(self).__name__}({self.policy!r})"

    __repr__ = describe


class AdaKV(Wrapper):
    """Distributes the budget of a layer over its heads, by score (Feng et al., arXiv 2407.11550).

    Keeps the H * budget best tokens of all heads together, and at least floor * budget tokens of each head.
    """

    heads = "each"

    def __init__(self, policy: Policy, floor: float = 0.2) -> None:
        super().__init__(policy)
        if policy.heads == "shared":
            raise ValueError(f"AdaKV: expected a policy that scores each head, got {policy!r} with heads='shared'")
        self.floor, self.uneven = checks.number("AdaKV: floor", floor, 0, 1), True

    def budgets(self, stored: StoredTokens) -> Tensor:
        """The number of tokens of each head among the best of the layer; these are also the best of their head."""
        return self._dealt(stored, self.score(stored))

    def keep(self, stored: StoredTokens) -> Tensor:
        score = self.score(stored)
        return stored.best(score, self._dealt(stored, score), self.sinks, self.recent, self.protected(stored))

    def _dealt(self, stored: StoredTokens, score: Tensor) -> Tensor:
        limit = self.policy.budgets(stored)
        floor = (limit[:, 0].double() * self.floor).floor().long()
        protected, real = self.protected(stored), stored.real[:, None, None]
        ends = (stored.line_positions < self.sinks) | (stored.line_positions >= real - self.recent)
        ends = (ends if protected is None else ends | protected).expand(-1, stored.heads, -1)
        score = score.cpu().float().expand(-1, stored.heads, -1)
        return share(score.contiguous(), stored.slots.contiguous(), ends.contiguous(), limit.sum(1), floor)


class PyramidBudget(Wrapper):
    """Larger budgets for lower layers, linear in the layer (PyramidKV, Cai et al., arXiv 2406.02069).

    ratio: budget of the first layer / budget of the last; the mean is the policy's budget.
    """

    def __init__(self, policy: Policy, ratio: float = 4.0) -> None:
        super().__init__(policy)
        self.ratio = checks.number("PyramidBudget: ratio", ratio, 1)

    def limit(self, real: int, layer: int, layers: int) -> int:
        mean = self.policy.limit(real, layer, layers)
        last = 2 / (1 + self.ratio)
        factor = 1.0 if layers < 2 else last * (self.ratio + (1 - self.ratio) * layer / (layers - 1))
        return max(round(mean * factor), self.sinks + self.recent + 1)

    def budgets(self, stored: StoredTokens) -> Tensor:
        return Policy.budgets(self, stored)


class Protect(Wrapper):
    """Never evicts the tokens of given spans, such as a system prompt (arXiv 2510.00231).

    spans: (begin, end) positions, padding not counted; end is exclusive.
    """

    def __init__(self, policy: Policy, spans: Sequence[tuple[int, int]]) -> None:
        super().__init__(policy)
        pairs = [
            checks.listed("Protect: spans", x, "(begin, end)") for x in checks.listed("Protect: spans", spans, "spans")
        ]
        if any(len(x) != 2 for x in pairs):
            raise ValueError(f"Protect: spans: expected (begin, end) each, got {spans}")
        self.spans = [(checks.integer("Protect: span", a, 0), checks.integer("Protect: span", b, a)) for a, b in pairs]

    def protected(self, stored: StoredTokens) -> Tensor | None:
        protected = self.policy.protected(stored)
        for a, b in self.spans:
            span = (stored.positions >= a) & (stored.positions < b)
            protected = span if protected is None else protected | span
        return protected


class Demote(Wrapper):
    """Re-encodes pages with low scores in smaller formats.

    Each eviction ranks the sealed pages of a head by the mean score of their remaining tokens. The pages with the best
    scores get the first format of the ladder, the next ones the second, and so on. Pages only ever become smaller.
    Sinks, open pages and the newest page_size tokens do not change. `stats()["rewritten"]` counts rewritten tokens.
    Source: fewer bits for less important tokens as in MiKV (arXiv 2402.18096), but by page.

    Args:
        policy: the policy that evicts and scores tokens.
        ladder: formats ("int8", or K/V formats as "int8/int4"), each no larger than the one before; "raw" only first.
        shares: share of the pages for each format. Default: equal shares.
    """

    def __init__(
        self, policy: Policy, ladder: Sequence[str] = ("raw", "int8", "int4", "int2"),
        shares: Sequence[float] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(policy)
        ladder = checks.listed("Demote: ladder", ladder, "formats")
        shares = (1.0,) * len(ladder) if shares is None else tuple(checks.listed("Demote: shares", shares, "numbers"))
        if len(shares) != len(ladder) or not ladder or any(not x > 0 for x in shares):
            raise ValueError(f"Demote: shares: expected {len(ladder)} numbers above 0, one per format, got {shares}")
        self.ladder, self.shares = tuple(pair(x, "Demote: ladder") for x in ladder), shares
        for name in (name for names in self.ladder for name in names):
            if name not in formats.NAMES:
                raise ValueError(f"Demote: ladder: expected formats out of {', '.join(formats.NAMES)}, got {name!r}")
        for above, below in zip(self.ladder, self.ladder[1:], strict=False):
            for a, b in zip(above, below, strict=True):
                if formats.bits(b) > formats.bits(a) or b == "raw":
                    raise ValueError(f"Demote: ladder: expected formats, largest first, got {a!r} before {b!r}")


class Watch(Wrapper):
    """Keeps a summary of evicted keys, from which `evicted_attention()` estimates the attention they would receive.
    Source: the mean of exp(q . k) over normally distributed keys, as Expected Attention (arXiv 2510.00636) computes it
    over normally distributed queries.

    clusters: clusters of evicted keys per head, each a count, a mean and a variance by dim: 8 * Dk + 4 bytes. Evictions
        read the evicted keys.
    """

    def __init__(self, policy: Policy, clusters: int = 16) -> None:
        super().__init__(policy)
        self.clusters = checks.integer("Watch: clusters", clusters, 1)


class Chain(Wrapper):
    """Applies policies in order; each chooses among the tokens that those before it keep. The budget of the last one
    decides when to evict.

    At most one of them may accumulate attention.
    """

    def __init__(self, *policies: Policy) -> None:
        if not policies:
            raise ValueError("Chain: expected at least one policy, got none")
        super().__init__(policies[-1])
        if sum(p.needs_attention for p in policies) > 1:
            raise ValueError("Chain: expected at most one policy that accumulates attention (H2O), got more")
        self.policies = policies
        for name in ("needs_attention", "window", "sinks", "needs_rope", "needs_outputs"):
            setattr(self, name, max(getattr(p, name) for p in policies))
        self.uneven = any(p.heads == "each" for p in policies)  # heads may then keep different numbers of tokens

    def bind(self, model: Any) -> Policy:
        for policy in self.policies:
            policy.bind(model)
        return self

    def decay_of(self, queries: int) -> float:
        return next((p.decay_of(queries) for p in self.policies if p.needs_attention), 1.0)

    def keep(self, stored: StoredTokens) -> Tensor:
        keep = stored.live
        for policy in self.policies:
            keep = policy.keep(stored) & keep
            stored = stored.narrowed(keep)
        return keep
