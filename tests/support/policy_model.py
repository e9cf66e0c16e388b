"""Eviction policies in float64, written from docs/eviction.md and the policies' docstrings only: which tokens of each
row and head of a layer are kept. Scores come from float64 attention over the K and V that a cache decodes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from kvcompress import H2O, TOVA, Chain, KeyDiff, KNorm, Protect, SlidingWindow, SnapKV, StreamingLLM

KINDS = {
    "streaming": StreamingLLM, "window": SlidingWindow, "h2o": H2O, "tova": TOVA, "snapkv": SnapKV, "knorm": KNorm,
    "keydiff": KeyDiff,
}  # fmt: skip
# Scores that differ by less than this, relative to the largest, may be ordered either way (float32 and quantized
# pages).
NEAR = {True: 1e-5, False: 2e-4}


class State:
    """A row of a layer: its real tokens so far, without padding; alive and received are [H, n]."""

    def __init__(self, heads: int, raw: bool) -> None:
        self.near = NEAR[raw]
        self.alive = torch.zeros(heads, 0, dtype=torch.bool)
        self.received = torch.zeros(heads, 0, dtype=torch.float64)
        # [H, n, n]: attention of each query, summed by group
        self.weights = torch.zeros(heads, 0, 0, dtype=torch.float64)
        self.exact: tuple[torch.Tensor, ...] = ()  # K, V [H, n, D] as given
        self.attended: list[torch.Tensor] = []  # the same as decoded, before and after the call
        self.stored: list[torch.Tensor] = []
        self.sealed: list[torch.Tensor] = []  # after the next call has sealed full pages
        self.queries = torch.zeros(0)  # [Hq, n, D]
        self.known: dict[int, int] = {}  # by window: number of its queries that certainly remain after crops

    def crop(self, n: int) -> None:
        self.exact = tuple(x[:, :-n] for x in self.exact)
        self.known = {window: max(0, known - n) for window, known in self.known.items()}
        self.alive, self.received = self.alive[:, :-n], self.received[:, :-n]
        self.weights, self.queries = self.weights[:, :-n, :-n], self.queries[:, :-n]

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention of q [Hq, T, D] to the stored tokens and the call's own k, v [H, T, D]: [Hq, T, D]."""
        T, n = k.shape[1], self.alive.shape[1]
        self.exact = tuple(torch.cat(x, 1) for x in zip(self.exact, (k, v), strict=True)) if n else (k, v)
        self.queries = torch.cat([self.queries, q], 1) if n else q
        self.scale = scale
        keys, values = (torch.cat([x[:, :n], own], 1) for x, own in zip(self.attended, (k, v), strict=True))
        self.alive = torch.cat([self.alive, torch.ones(len(k), T, dtype=torch.bool)], 1)
        given = self.given(T, keys)
        self.weights = torch.cat([torch.nn.functional.pad(self.weights, (0, T)), by_head(given, len(k))], 1)
        return given @ values.repeat_interleave(len(q) // len(k), 0)

    def given(self, T: int, keys: torch.Tensor) -> torch.Tensor:
        """[Hq, T, n]: attention of the last T queries to keys [H, n, D]."""
        n, group = keys.shape[1], len(self.queries) // len(keys)
        seen = self.alive[:, None] & torch.ones(T, n, dtype=torch.bool).tril(n - T)
        scores = self.queries[:, -T:] @ keys.repeat_interleave(group, 0).mT * self.scale
        return scores.masked_fill(~seen.repeat_interleave(group, 0), -torch.inf).softmax(-1)


def by_head(given: torch.Tensor, heads: int) -> torch.Tensor:
    """[Hq, T, n] summed over the query heads of each KV head."""
    return given.unflatten(0, (heads, -1)).sum(1)


@dataclass
class Rule:
    """A policy, with its options."""

    kind: str
    budget: int | float
    sinks: int = 0
    recent: int | None = 0
    slack: int | None = None
    options: dict = field(default_factory=dict)
    spans: tuple = ()

    def made(self):
        more = {"slack": self.slack, **self.options}
        if self.kind == "streaming":
            made = StreamingLLM(self.sinks, self.budget - self.sinks, **more)
        elif self.kind == "window":
            made = SlidingWindow(self.budget, **more)
        else:
            if self.kind in ("h2o", "knorm", "keydiff"):
                more["recent"] = self.recent
            made = KINDS[self.kind](self.budget, sinks=self.sinks, **more)
        return Protect(made, list(self.spans)) if self.spans else made

    def limit(self, real: int) -> int:
        return math.ceil(self.budget * real) if isinstance(self.budget, float) else self.budget

    @property
    def window(self) -> int:
        """Number of last queries that it uses."""
        return {"tova": 1, "snapkv": self.recent or 0}.get(self.kind, 0)

    def score(self, state: State, alive: torch.Tensor) -> tuple[torch.Tensor, float]:
        """float64 scores [H, n], and a tolerance: a policy may use what the call saw or what it left, sealed or not."""
        n = alive.shape[1]
        at = torch.arange(n, dtype=torch.float64)
        if self.kind in ("streaming", "window"):
            return at.expand_as(alive), 0.0
        if self.kind == "h2o":
            found = [state.received / (n - at) if self.options.get("score", "mean") == "mean" else state.received]
        elif self.kind in ("tova", "snapkv"):
            H, found = len(alive), []
            for T in range(state.known[self.window], self.window + 1):  # queries that a crop may have left
                recent = [by_head(state.given(T, keys), H) for keys in (state.stored[0], state.sealed[0])]
                found += [x.sum(1) for x in (state.weights[:, -T:], *recent)]
            if self.kind == "snapkv":
                found = [smoothed(x, alive, self.options["kernel"], self.recent) for x in found]
        else:
            found = [
                -keys.norm(dim=-1) if self.kind == "knorm" else unlike(keys, state.alive)
                for keys in (state.stored[0], state.sealed[0], state.exact[0])
            ]
        if self.shared:
            found = [x.mean(0).expand_as(x) for x in found]
        found = [x.masked_fill(~alive, 0.0) for x in found]
        return found[0], state.near * float(found[0].abs().max()) + 2 * max(
            float((found[0] - x).abs().max()) for x in found
        )

    @property
    def shared(self) -> bool:
        return self.options.get("heads", "shared" if self.kind == "tova" else "each") == "shared"

    def protected(self, n: int) -> torch.Tensor:
        """bool [n]: tokens kept whatever their score."""
        recent = self.limit(n) // 2 if self.recent is None else self.recent
        at = torch.arange(n)
        found = (at < self.sinks) | (at >= n - recent)
        for begin, end in self.spans:
            found |= (at >= begin) & (at < end)
        return found

    def choose(self, state: State, alive: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of the live tokens [H, n]: those kept for certain, those that may be kept (scores too close to decide), and
        how many of the latter [H]."""
        n = alive.shape[1]
        (score, near), first = self.score(state, alive), self.protected(n)
        sure, maybe, room = alive & first, torch.zeros_like(alive), torch.zeros(len(alive), dtype=torch.long)
        for h, free in enumerate(alive & ~first):
            count = min(self.limit(n) - int(sure[h].sum()), int(free.sum()))
            if count > 0:
                least = score[h][free].sort(descending=True).values[count - 1]
                above = free & (score[h] > least + near)
                sure[h] |= above
                maybe[h] = free & ((score[h] - least).abs() <= near)
                room[h] = count - above.sum()
        return sure, maybe, room


def remember(rules: list[Rule], state: State) -> None:
    """Updates the state that policies derive from the last call's attention."""
    T = state.alive.shape[1] - state.received.shape[1]
    state.received = torch.nn.functional.pad(state.received, (0, T))
    for rule in rules:
        if rule.kind == "h2o":
            decay = rule.options.get("decay", 0.99) ** T if rule.options["score"] == "ema" else 1.0
            state.received = decay * state.received + state.weights[:, -T:].sum(1)
        elif rule.window:
            state.known[rule.window] = min(rule.window, state.known.get(rule.window, 0) + T)


def unlike(keys: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
    """Negative cosine of each key with the mean of the head's live keys, all normalized to length 1."""
    unit = torch.nn.functional.normalize(keys, dim=-1)
    mean = torch.stack([u[a].mean(0) for u, a in zip(unit, alive, strict=True)])
    return -torch.nn.functional.cosine_similarity(unit, mean[:, None], dim=-1)


def smoothed(x: torch.Tensor, alive: torch.Tensor, kernel: int, newest: int) -> torch.Tensor:
    """Mean over `kernel` neighbouring stored tokens in sequence order; 0 from the newest tokens on and past the
    ends."""
    found = torch.zeros_like(x)
    n = x.shape[1]
    for h, live in enumerate(alive):
        line = torch.where(torch.arange(n) < n - newest, x[h], 0.0)[live]
        padded = torch.nn.functional.pad(line, (kernel // 2, kernel // 2))
        found[h, live] = padded.unfold(0, kernel, 1).mean(-1)
    return found


def due(rules: list[Rule], state: State, page: int) -> bool:
    """Whether a row is evicted after this call; decided by the last policy of a chain."""
    slack = page if rules[-1].slack is None else rules[-1].slack
    return float(state.alive.double().sum(1).mean()) >= rules[-1].limit(state.alive.shape[1]) + slack


def check_kept(theirs: torch.Tensor, rules: list[Rule], state: State, page: int, sinks: int) -> bool:
    """Raises if the tokens that a cache kept, theirs [H, n], are not those that the policy or chain keeps after a
    call; returns whether the eviction was unambiguous. sinks: the cache's, which are always kept."""
    n = state.alive.shape[1]
    if not due(rules, state, page):
        assert torch.equal(theirs, state.alive), "evicted before it was due"
        return False
    raw = state.alive & (torch.arange(n) < sinks)
    sure, maybe, room = rules[0].choose(state, state.alive)
    told = not (maybe.sum(1) > room).any()
    for rule in rules[1:]:
        if not told:  # the result of the first is ambiguous, and so are the choices of the next
            assert not (theirs & ~(sure | maybe | raw)).any(), "keeps what the first policy drops"
            assert (theirs.sum(1) <= rule.limit(n) + sinks).all(), "keeps more than the budget"
            return False
        sure, maybe, room = rule.choose(state, sure | maybe)
        told = not (maybe.sum(1) > room).any()
    assert not ((sure | raw) & ~theirs).any(), "lacks what scores higher"
    assert not (theirs & ~(sure | maybe | raw)).any(), "keeps what scores lower"
    among = (theirs & maybe).sum(1)
    assert ((among >= room) & (among <= room + (raw & maybe).sum(1))).all(), "keeps another number than the budget"
    return told


def attention(module, query, key, value, mask, scaling, dropout=0.0, states=None, **_):
    out = states[module.layer_idx].attend(query[0], key[0], value[0], scaling)
    return out.transpose(0, 1)[None], None


AttentionInterface.register("kept_float64", attention)
AttentionMaskInterface.register("kept_float64", lambda *_, **__: None)


def policy(rules: list[Rule]):
    return rules[0].made() if len(rules) == 1 else Chain(*(rule.made() for rule in rules))
