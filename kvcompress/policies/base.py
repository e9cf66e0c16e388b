"""Policy: which tokens a layer keeps. StoredTokens: what a policy sees of a layer."""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any

import torch
from torch import Tensor

from .. import _C, checks


class StoredTokens:
    """The stored tokens of a layer as a policy sees them, by index (not in the order of the sequence).

    keys(), values(), queries() and frequencies() lie on the layer's device; all else is on the CPU.

    Attributes: slots int32 [B, H, N] (-1: no token here); live bool [B, H, N]; positions int64 [B, H, N], tokens of the
    row before this one (pads do not count; -1: no token); real int64 [B], tokens of each row so far, evicted ones
    included; scores float32 [B, H, N], the attention that was gathered, or None; layer, layers: which of how many.
    line_slots, line_positions: the same as slots and positions, [B, 1, N] where all heads hold the same tokens.
    """

    def __init__(
        self, slots: Tensor, positions: Tensor, heads: int, real: Tensor, scores: Tensor | None, layer: int,
        layers: int, source: Any,
    ) -> None:  # fmt: skip
        self.line_slots, self.line_positions, self.heads = slots, positions, heads
        self._at = positions  # whatever is narrowed
        self.real, self.scores = real, scores
        self.layer, self.layers = layer, layers
        self._source = source  # an Eviction
        self._pair: tuple[Tensor, Tensor] | None = None

    @property
    def slots(self) -> Tensor:
        """int32 [B, H, N], -1 where no token is."""
        return self.line_slots.expand(-1, self.heads, -1)

    @property
    def positions(self) -> Tensor:
        """int64 [B, H, N], tokens of the row before this one; -1 where no token is."""
        return self.line_positions.expand(-1, self.heads, -1)

    @property
    def live(self) -> Tensor:
        """bool [B, H, N]: there is a token."""
        return self.slots >= 0

    def narrowed(self, keep: Tensor) -> StoredTokens:
        """The same with the tokens of keep [B, 1 or H, N] alone."""
        other = copy.copy(self)
        other.line_slots = self.line_slots.masked_fill(~keep, -1)
        other.line_positions = self.line_positions.expand(other.line_slots.shape).contiguous()
        return other

    def keys(self) -> Tensor:
        """float32 [B, H, N, Dk], as they are read back (after RoPE)."""
        self._pair = self._pair or self._source.read()
        return self._pair[0]

    def values(self) -> Tensor:
        """float32 [B, H, N, Dv]."""
        self._pair = self._pair or self._source.read()
        return self._pair[1]

    def key_norms(self) -> Tensor:
        """float32 [B, H, N]: length of each key; without reading keys back."""
        return self._source.measure(0)

    def value_norms(self) -> Tensor:
        """float32 [B, H, N]: length of each value."""
        return self._source.measure(1)

    def key_cosines(self) -> Tensor:
        """float32 [B, H, N]: cosine of each key with the mean of the head's keys, each of length 1."""
        return self._source.measure(2)

    def window_attention(self, queries: int) -> Tensor:
        """float32 [B, H, N]: the attention that the last `queries` queries gave, summed over them and over the query
        heads of a KV head. Needs a policy whose `window` is at least that."""
        return self._source.window_attention(queries)

    def queries(self, n: int) -> tuple[Tensor, Tensor, float]:
        """The last n queries (or all that there were): float32 [B, Hq, n, Dk] as they attend (after RoPE), NaN at
        pads; int64 [B, n], their positions; the scale of their scores. Needs a policy whose `window` is n at least."""
        return self._source.last_queries(n)

    def frequencies(self) -> Tensor:
        """float64 [Dk / 2]: of the model's RoPE. Needs a policy with `needs_rope`."""
        return self._source.rope

    def mean_scores(self) -> Tensor:
        """float32 [B, H, N]: scores per query that could see the token."""
        return self._source.means(self._at, self.real)

    def smoothed(self, x: Tensor, kernel: int, newest: int, largest: bool = False) -> Tensor:
        """float32 [B, H, N]: x [B, H, N], 0 at the `newest` tokens of a row, smoothed over the `kernel` tokens around
        each in the order of the sequence: their mean, or the largest."""
        args = (
            x.cpu().contiguous().numpy(),
            self.line_slots.numpy(),
            self.line_positions.numpy(),
            (self.real - newest).numpy(),
        )
        return torch.from_numpy(_C.smooth(*args, kernel, largest))

    def best(
        self, score: Tensor, budgets: Tensor, sinks: int, recent: int, protected: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """bool [B, h, N]: of each head the `budgets` [B, h] tokens of highest score [B, H, N] (or [B, 1, N]), ties for
        the younger; before all others the first `sinks`, the newest `recent` and the `protected`. h is H, or 1: by
        the mean score."""
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
    """ValueError for a policy that cannot go by latents (MLA), which hold K before RoPE and V in one."""
    needs = {
        "rotates keys": policy.positions == "cache",
        "wants queries and keys before RoPE": policy.needs_rope,
        "wants values of all heads": policy.needs_outputs,
    }
    if why := [what for what, needed in needs.items() if needed]:
        raise ValueError(
            "PagedKV: policy: expected one that goes by attention, positions, or keys as they are stored, for latent "
            f"attention (MLA), got {policy!r}, which {why[0]}"
        )


def tokens_of(budget: float, real: int) -> int:
    """A budget in tokens (int) or as a share of the tokens so far (float up to 1)."""
    return budget if isinstance(budget, int) else math.ceil(budget * real)


def check_budget(name: str, budget: Any) -> int | float:
    """`budget` if it is tokens (int, at least 1) or a share (float in (0, 1])."""
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise TypeError(f"{name}: budget: expected tokens (int) or a share (float), got {type(budget).__name__}")
    if not (budget >= 1 if isinstance(budget, int) else 0 < budget <= 1):
        raise ValueError(f"{name}: budget: expected at least 1 token or a share in (0, 1], got {budget}")
    return budget


class Policy:
    """What a layer keeps: of each row and head the `budget` tokens of highest score, protected ones first.

    A layer evicts a row when it holds `slack` tokens more than its budget (a page if None), down to the budget, after
    attention. A policy holds no state of a sequence: one object serves all layers and caches.

    Args:
        budget: tokens that a head keeps, protected ones included: an int, or a float, a share of the tokens so far.
        sinks: first tokens of each row, never evicted.
        recent: newest tokens, not evicted.
        slack: tokens over the budget that are put up with until the next eviction.

    A policy of your own overrides `score`, and what else it needs to. Raises TypeError and ValueError for arguments
    that are none.
    """

    needs_attention = False  # attention of every call is gathered in `StoredTokens.scores`
    window = 0  # last queries that `StoredTokens.window_attention` may be asked for
    positions = "original"  # or "cache": see StreamingLLM
    needs_rope = False  # `StoredTokens.frequencies` must tell
    needs_outputs = False  # goes by the model's output projection, of V
    clusters = 0  # of the keys that go, for `evicted_attention`: see Watch
    ladder: tuple[tuple[str, str], ...] = ()  # K and V formats that pages of low scorers take: see Demote
    shares: tuple[float, ...] = ()  # of the pages, for each rung of the ladder
    arguments: tuple[tuple, dict[str, Any]]
    heads = "each"  # or "shared": all KV heads keep the same tokens; the table stays uniform
    uneven = False  # heads may keep different numbers of tokens

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        signature = inspect.signature(cls.__init__)  # what editors show, instead of `__new__`'s
        cls.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]

    def __new__(cls, *args: Any, **options: Any) -> Policy:
        policy = super().__new__(cls)
        policy.arguments = (args, options)  # what `to_dict` tells
        return policy

    def to_dict(self) -> dict[str, Any]:
        """The policy as JSON takes it; see `policies.from_dict`."""

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
        """Tokens that a head of this layer keeps on average, for a row of `real` tokens so far."""
        return tokens_of(self.budget, real)

    def budgets(self, stored: StoredTokens) -> Tensor:
        """int64 [B, H]: tokens that each head keeps."""
        return torch.tensor([
            [self.limit(real, stored.layer, stored.layers)] * stored.heads for real in stored.real.tolist()
        ], device="cpu")  # fmt: skip

    def score(self, stored: StoredTokens) -> Tensor:
        """float32 [B, H, N] (or [B, 1, N]: all heads alike), on any device; the highest are kept. Not NaN."""
        raise NotImplementedError(f"{type(self).__name__}: expected a policy with a score")

    def protected(self, stored: StoredTokens) -> Tensor | None:
        """bool [B, H, N]: kept whatever their score, next to the first `sinks` and the newest `recent`; or None."""
        return None

    def decay_of(self, queries: int) -> float:
        """What older attention counts when a call of `queries` tokens adds its own: scores = decay * scores + new."""
        return 1.0

    def keep(self, stored: StoredTokens) -> Tensor:
        """bool [B, H, N], or [B, 1, N] if all heads keep the same tokens."""
        score, budgets, protected = self.score(stored), self.budgets(stored), self.protected(stored)
        if self.heads == "shared" and stored.line_slots.shape[1] == 1:  # more: heads were evicted apart, by hand
            budgets = budgets[:, :1]
        return stored.best(score, budgets, self.sinks, self.recent, protected)

    def bind(self, model: Any) -> Policy:
        """Takes what it needs to know of `model` (a transformers model); most need nothing. Returns itself."""
        return self

    def describe(self) -> str:
        """The policy as text."""
        return f"{type(self).__name__}(budget={self.budget})"

    __repr__ = describe
