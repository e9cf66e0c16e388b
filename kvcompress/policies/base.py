"""Policy: the base class of eviction policies. StoredTokens: the tokens of a layer as a policy sees them."""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any

import torch
from torch import Tensor

from .. import _C, checks


class StoredTokens:
    """The stored tokens of a layer as a policy sees them, by index (not in sequence order).

    keys(), values(), queries() and frequencies() are on the layer's device, everything else on the CPU.

    Attributes:
        slots: int32 [B, H, N]; -1: no token.
        live: bool [B, H, N], True where there is a token.
        positions: int64 [B, H, N], number of tokens of the row before this one, padding not counted; -1: no token.
        real: int64 [B], tokens of each row so far, evicted ones included.
        scores: float32 [B, H, N], accumulated attention, or None.
        layer, layers: index of this layer, number of layers.
        line_slots, line_positions: as slots and positions, but [B, 1, N] if all heads store the same tokens.
    """

    def __init__(
        self, slots: Tensor, positions: Tensor, heads: int, real: Tensor, scores: Tensor | None, layer: int,
        layers: int, source: Any,
    ) -> None:  # fmt: skip
        self.line_slots, self.line_positions, self.heads = slots, positions, heads
        self._at = positions  # of all tokens, also after `narrowed`
        self.real, self.scores = real, scores
        self.layer, self.layers = layer, layers
        self._source = source  # an Eviction
        self._pair: tuple[Tensor, Tensor] | None = None

    @property
    def slots(self) -> Tensor:
        """int32 [B, H, N]; -1: no token."""
        return self.line_slots.expand(-1, self.heads, -1)

    @property
    def positions(self) -> Tensor:
        """int64 [B, H, N], number of tokens of the row before this one; -1: no token."""
        return self.line_positions.expand(-1, self.heads, -1)

    @property
    def live(self) -> Tensor:
        """bool [B, H, N], True where there is a token."""
        return self.slots >= 0

    def narrowed(self, keep: Tensor) -> StoredTokens:
        """A copy with only the tokens of keep [B, 1 or H, N]."""
        other = copy.copy(self)
        other.line_slots = self.line_slots.masked_fill(~keep, -1)
        other.line_positions = self.line_positions.expand(other.line_slots.shape).contiguous()
        return other

    def keys(self) -> Tensor:
        """Dequantized keys, after RoPE: float32 [B, H, N, Dk]."""
        self._pair = self._pair or self._source.read()
        return self._pair[0]

    def values(self) -> Tensor:
        """Dequantized values: float32 [B, H, N, Dv]."""
        self._pair = self._pair or self._source.read()
        return self._pair[1]

    def key_norms(self) -> Tensor:
        """L2 norm of each key, computed without dense keys: float32 [B, H, N]."""
        return self._source.measure(0)

    def value_norms(self) -> Tensor:
        """L2 norm of each value: float32 [B, H, N]."""
        return self._source.measure(1)

    def key_cosines(self) -> Tensor:
        """Cosine similarity of each key and the mean of the head's normalized keys: float32 [B, H, N]."""
        return self._source.measure(2)

    def window_attention(self, queries: int) -> Tensor:
        """Attention from the last `queries` queries, summed over them and over the query heads of a KV head: float32
        [B, H, N]. Needs a policy with `window >= queries`."""
        return self._source.window_attention(queries)

    def queries(self, n: int) -> tuple[Tensor, Tensor, float]:
        """The last n queries, or fewer if there were fewer: (float32 [B, Hq, n, Dk] after RoPE, NaN at padding; their
        positions, int64 [B, n]; the softmax scale). Needs a policy with `window >= n`."""
        return self._source.last_queries(n)

    def frequencies(self) -> Tensor:
        """Frequencies of the model's RoPE: float64 [Dk / 2]. Needs a policy with `needs_rope`."""
        return self._source.rope

    def mean_scores(self) -> Tensor:
        """`scores` divided by the number of queries that could see the token: float32 [B, H, N]."""
        return self._source.means(self._at, self.real)

    def smoothed(self, x: Tensor, kernel: int, newest: int, largest: bool = False) -> Tensor:
        """x [B, H, N], set to 0 at the `newest` tokens of a row, then pooled over `kernel` adjacent tokens in sequence
        order: their mean, or with `largest` their maximum. float32 [B, H, N]."""
        return torch.from_numpy(_C.smooth(
            x.cpu().contiguous().numpy(), self.line_slots.numpy(), self.line_positions.numpy(),
            (self.real - newest).numpy(), kernel, largest,
        ))  # fmt: skip

    def best(
        self, score: Tensor, budgets: Tensor, sinks: int, recent: int, protected: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Selects `budgets` [B, h] tokens of each head: the first `sinks`, the newest `recent` and the `protected`
        first, then by score [B, H, N] (or [B, 1, N]); of equal scores the newer token. Returns bool [B, h, N]. With
        h = 1 instead of H, heads share the selection by their mean score."""
        shapes = [[*self.slots.shape[:-2], heads, self.slots.shape[-1]] for heads in (self.heads, 1)]
        if not isinstance(score, Tensor) or list(score.shape) not in shapes:
            got = list(score.shape) if isinstance(score, Tensor) else type(score).__name__
            raise ValueError(f"Policy: score: expected a tensor [B, H, N] = {shapes[0]} (or H = 1), got {got}")
        protect = None if protected is None else protected[:, : budgets.shape[1]].contiguous().numpy()
        if score.shape[1] < budgets.shape[1]:
            score = score.expand(-1, budgets.shape[1], -1)
        return torch.from_numpy(_C.keep(
            score.cpu().float().contiguous().numpy(), self.line_slots.numpy(), self.line_positions.numpy(), protect,
            budgets.contiguous().numpy(), (self.real - recent).numpy(), sinks,
        ))  # fmt: skip


def check_latent(policy: Policy) -> None:
    """Raises ValueError for a policy that does not work with latents (MLA), which stand for both K before RoPE and
    V."""
    needs = {
        "rotates keys": policy.positions == "cache",
        "needs queries and keys before RoPE": policy.needs_rope,
        "needs the values of all heads": policy.needs_outputs,
    }
    if why := [what for what, needed in needs.items() if needed]:
        raise ValueError(
            "PagedKV: policy: expected a policy that scores by attention, positions or stored keys, for latent "
            f"attention (MLA), got {policy!r}, which {why[0]}"
        )


def check_budget(name: str, budget: Any) -> int | float:
    """`budget`, checked: tokens (int, at least 1) or a share (float in (0, 1])."""
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise TypeError(f"{name}: budget: expected tokens (int) or a share (float), got {type(budget).__name__}")
    if not (budget >= 1 if isinstance(budget, int) else 0 < budget <= 1):
        raise ValueError(f"{name}: budget: expected at least 1 token or a share in (0, 1], got {budget}")
    return budget


class Policy:
    """Base class of eviction policies: each row and head keeps the `budget` tokens with the highest scores, protected
    tokens first.

    A layer evicts after attention, when a row exceeds its budget by `slack` tokens, down to the budget. A policy has
    no state of sequences: one object can be used for all layers and caches.

    Args:
        budget: tokens that a head keeps, protected ones included: int, or float: share of all tokens so far.
        sinks: number of first tokens of each row that are never evicted.
        recent: number of newest tokens that are not evicted.
        slack: number of tokens over the budget before a row is evicted. Default: page_size.

    Subclasses override `score`, and other methods if needed. Raises TypeError and ValueError for invalid arguments.
    """

    needs_attention = False  # accumulate the attention of every call in `StoredTokens.scores`
    window = 0  # number of last queries available to `StoredTokens.window_attention` and `queries`
    positions = "original"  # or "cache": see StreamingLLM
    needs_rope = False  # uses `StoredTokens.frequencies`
    needs_outputs = False  # uses the model's output projection
    clusters = 0  # clusters of evicted keys, for `evicted_attention`: see Watch
    ladder: tuple[tuple[str, str], ...] = ()  # K and V formats for pages with low scores: see Demote
    shares: tuple[float, ...] = ()  # share of the pages for each format of the ladder
    arguments: tuple[tuple, dict[str, Any]]
    heads = "each"  # or "shared": all KV heads keep the same tokens, in one block table
    uneven = False  # heads may keep different numbers of tokens

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        signature = inspect.signature(cls.__init__)  # for editors, which would show that of `__new__`
        cls.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]

    def __new__(cls, *args: Any, **options: Any) -> Policy:
        policy = super().__new__(cls)
        policy.arguments = (args, options)  # for `to_dict`
        return policy

    def to_dict(self) -> dict[str, Any]:
        """The policy as a JSON-serializable dict; see `policies.from_dict`."""

        def plain(x: Any) -> Any:
            return x.to_dict() if isinstance(x, Policy) else x

        args, options = self.arguments
        return {
            "policy": type(self).__name__,
            "args": [plain(x) for x in args],
            "options": {name: plain(x) for name, x in options.items()},
        }

    def __init__(self, budget: int | float, *, sinks: int = 4, recent: int = 0, slack: int | None = None) -> None:
        name = type(self).__name__
        self.budget = check_budget(name, budget)
        self.sinks = checks.integer(f"{name}: sinks", sinks, 0)
        self.recent = checks.integer(f"{name}: recent", recent, 0)
        self.slack = None if slack is None else checks.integer(f"{name}: slack", slack, 1)
        if isinstance(budget, int) and self.sinks + self.recent > budget:
            raise ValueError(
                f"{name}: expected a budget of at least sinks + recent = {self.sinks + self.recent} tokens, "
                f"got {budget}"
            )

    def limit(self, real: int, layer: int, layers: int) -> int:
        """Mean number of tokens that a head of this layer keeps, for a row with `real` tokens so far."""
        return self.budget if isinstance(self.budget, int) else math.ceil(self.budget * real)

    def budgets(self, stored: StoredTokens) -> Tensor:
        """Number of tokens that each head keeps: int64 [B, H]."""
        return torch.tensor([
            [self.limit(real, stored.layer, stored.layers)] * stored.heads for real in stored.real.tolist()
        ], device="cpu")  # fmt: skip

    def score(self, stored: StoredTokens) -> Tensor:
        """Score of each token, float32 [B, H, N], or [B, 1, N] for all heads, on any device. The highest are kept. NaN
        raises ValueError."""
        raise NotImplementedError(f"{type(self).__name__}: expected a policy that defines score(), got none")

    def protected(self, stored: StoredTokens) -> Tensor | None:
        """Tokens to keep regardless of score, besides `sinks` and `recent`: bool [B, H, N], or None."""
        return None

    def decay_of(self, queries: int) -> float:
        """Decay of accumulated attention in a call of `queries` tokens: scores = decay * scores + new."""
        return 1.0

    def keep(self, stored: StoredTokens) -> Tensor:
        """The tokens to keep: bool [B, H, N], or [B, 1, N] for all heads."""
        score, budgets, protected = self.score(stored), self.budgets(stored), self.protected(stored)
        if self.heads == "shared" and stored.line_slots.shape[1] == 1:  # else `evict(keep)` has split the heads
            budgets = budgets[:, :1]
        return stored.best(score, budgets, self.sinks, self.recent, protected)

    def bind(self, model: Any) -> Policy:
        """Reads what the policy needs from `model`, a transformers model (most need nothing). Returns itself."""
        return self

    def describe(self) -> str:
        """The policy as text."""
        return f"{type(self).__name__}(budget={self.budget})"

    __repr__ = describe
