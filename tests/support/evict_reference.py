"""Policies as in their papers: float64, dense, a single row without padding, a mask instead of eviction. Shares no
code with the package."""

import math

import torch

PAGE = 16


def slow_attention(store, q, scale, window=0, softcap=0.0):
    """Reference of `Eviction.attention_of`, computed from decoded keys."""
    evict = store.eviction
    B, Hq, T, _ = q.shape
    K = evict.read()[0].double()
    H = K.shape[1]
    slots = evict.slots().expand(B, H, -1).repeat_interleave(Hq // H, 1)[:, :, None].long()
    asks = torch.arange(store.seen - T, store.seen)[:, None]
    s = q.double() @ K.repeat_interleave(Hq // H, 1).transpose(2, 3) * scale
    if softcap:
        s = torch.tanh(s / softcap) * softcap
    hidden = (slots < 0) | (slots > asks)
    if window:
        hidden = hidden | (slots <= asks - window)
    p = s.masked_fill(hidden, -math.inf).softmax(-1).nan_to_num(0)
    real = evict.pads.real(store.seen)[:, None, store.seen - T :, None]
    return (p * real).sum(2).reshape(B, H, Hq // H, -1).sum(2).float()


class Row:
    """One sequence. rule(row) returns for each head the positions to keep, out of row.kept."""

    def __init__(self, H, G, rule, limit, slack=PAGE):
        self.H, self.G, self.rule, self.limit, self.slack = H, G, rule, limit, slack
        self.K = self.V = self.Q = None
        self.n, self.kept = 0, [[] for _ in range(H)]
        self.accumulated = torch.zeros(H, 0, dtype=torch.float64)
        self.ema = torch.zeros(H, 0, dtype=torch.float64)
        self.decay = 0.99

    def weights(self, last):
        """Attention of the last queries to the kept tokens: [H, G, last, n]."""
        mask = torch.zeros(self.H, self.n, dtype=torch.bool)
        for h, kept in enumerate(self.kept):
            mask[h, kept] = True
        asks = torch.arange(self.n - last, self.n)
        causal = torch.arange(self.n) <= asks[:, None]
        q = self.Q[:, -last:].reshape(self.H, self.G, last, -1)
        s = q @ self.K[:, None].transpose(2, 3) / math.sqrt(q.shape[-1])
        return s.masked_fill(~(mask[:, None, None] & causal), -math.inf).softmax(-1)

    def call(self, q, k, v):
        """Attends with q [Hq, T, D], k, v [H, T, D], then evicts; returns out [Hq, T, D]."""
        q, k, v = q.double(), k.double(), v.double()
        T = k.shape[1]
        if self.K is None:
            self.K, self.V, self.Q = k, v, q
        else:
            self.K, self.V, self.Q = (torch.cat(x, 1) for x in ((self.K, k), (self.V, v), (self.Q, q)))
        for kept in self.kept:
            kept.extend(range(self.n, self.n + T))
        self.n += T
        p = self.weights(T)
        out = (p @ self.V[:, None]).reshape(self.H * self.G, T, -1)
        paid, new = p.sum((1, 2)), torch.zeros(self.H, T, dtype=torch.float64)
        self.accumulated = torch.cat([self.accumulated, new], 1) + paid
        self.ema = torch.cat([self.ema * self.decay**T, new], 1) + paid
        if sum(map(len, self.kept)) >= self.H * (self.limit(self) + self.slack):
            self.kept = [sorted(kept) for kept in self.rule(self)]
        return out


def best(row, score, budget, sinks=0, recent=0, shared=False):
    """The `budget` best of each head: sinks and recent tokens first, then by score; ties to the younger."""
    if shared:
        score = score.mean(0, keepdim=True).expand_as(score)
    result = []
    for h, kept in enumerate(row.kept):
        sure = [i for i in kept if i < sinks or i >= row.n - recent]
        rest = sorted((i for i in kept if i not in sure), key=lambda i: (-float(score[h, i]), -i))
        result.append(sure + rest[: max(0, budget - len(sure))])
    return result


def h2o(budget, sinks=4, kind="mean", shared=False, recent=None):
    def rule(row):
        tokens = budget if isinstance(budget, int) else math.ceil(budget * row.n)
        near = (
            (min(tokens // 2, tokens - sinks) if isinstance(budget, int) else tokens // 2) if recent is None else recent
        )
        age = row.n - torch.arange(row.n, dtype=torch.float64)
        score = {"sum": row.accumulated, "mean": row.accumulated / age, "ema": row.ema}[kind]
        return best(row, score, tokens, sinks, near, shared)

    return rule


def streaming(sinks, window):
    return lambda row: [[i for i in kept if i < sinks or i >= row.n - window] for kept in row.kept]


def tova(budget):
    return lambda row: best(row, row.weights(1).sum((1, 2)), budget, shared=True)


def snapkv(budget, window, kernel, sinks=4):
    def rule(row):
        score = torch.zeros(row.H, row.n, dtype=torch.float64)
        received = row.weights(window).sum((1, 2))
        for h, kept in enumerate(row.kept):
            prefix = [i for i in sorted(kept) if i < row.n - window]
            for j, i in enumerate(prefix):
                around = prefix[max(0, j - kernel // 2) : j + kernel // 2 + 1]
                score[h, i] = sum(received[h, a] for a in around) / kernel
        return best(row, score, budget, sinks, window)

    return rule


def knorm(budget, sinks=4):
    return lambda row: best(row, -row.K.norm(dim=-1), budget, sinks)


def keydiff(budget, sinks=4):
    def rule(row):
        score = torch.zeros(row.H, row.n, dtype=torch.float64)
        for h, kept in enumerate(row.kept):
            unit = row.K[h, kept] / row.K[h, kept].norm(dim=-1, keepdim=True)
            anchor = unit.mean(0)
            score[h, kept] = -(unit @ anchor) / anchor.norm()
        return best(row, score, budget, sinks)

    return rule


def rkv(budget, window, kernel, weight, similar):
    def rule(row):
        score = torch.zeros(row.H, row.n, dtype=torch.float64)
        received = row.weights(window).sum((1, 2))
        for h, kept in enumerate(row.kept):
            kept = sorted(kept)
            paid = [0.0 if i >= row.n - window else float(received[h, i]) for i in kept]
            near = torch.tensor(
                [max(paid[max(0, j - kernel // 2) : j + kernel // 2 + 1]) for j in range(len(kept))],
                dtype=torch.float64,
            )
            unit = row.K[h, kept] / row.K[h, kept].norm(dim=-1, keepdim=True)
            cos = unit @ unit.T
            mean = torch.zeros(len(kept), dtype=torch.float64)
            for j in range(len(kept)):  # tokens similar to key j are redundant, except the youngest of them
                like = [a for a in range(len(kept)) if a != j and cos[a, j] > similar]
                for i in like[:-1]:
                    mean[i] += cos[i, j] / len(kept)
            score[h, kept] = weight * near / near.sum() - (1 - weight) * mean.softmax(0)
        return best(row, score, budget, 0, window)

    return rule


def adakv(budget, floor, score_of, sinks=0, recent=0):
    def rule(row):
        score, total = score_of(row), budget * row.H
        sure = {(h, i) for h in range(row.H) for i in row.kept[h] if i < sinks or i >= row.n - recent}
        for h, kept in enumerate(row.kept):
            mine = sorted(kept, key=lambda i: (-((h, i) in sure), -float(score[h, i])))
            sure |= {(h, i) for i in mine[: int(floor * budget)]}
        rest = [(h, i) for h in range(row.H) for i in row.kept[h] if (h, i) not in sure]
        rest.sort(key=lambda x: -float(score[x]))
        chosen = sure | set(rest[: total - len(sure)])
        return [[i for i in kept if (h, i) in chosen] for h, kept in enumerate(row.kept)]

    return rule


def expected(budget, queries, future, sinks=4, epsilon=0.0, theta=10000.0):
    """Evaluates each query with complex numbers instead of moments: E over queries of (q.k)^2 is k' Cov k."""

    def rule(row):
        score = torch.zeros(row.H, row.n, dtype=torch.float64)
        D = row.K.shape[-1]
        speed = theta ** -(torch.arange(D // 2, dtype=torch.float64) * 2 / D)
        ahead = torch.exp(1j * (row.n + torch.arange(future))[:, None] * speed).mean(0)
        first = max(row.n - queries, sinks)
        q = torch.complex(row.Q[:, first:, : D // 2], row.Q[:, first:, D // 2 :])
        q = q * torch.exp(-1j * torch.arange(first, row.n)[:, None] * speed)
        mean = q.mean(1, keepdim=True)
        mean, apart = (torch.cat([x.real, x.imag], -1) for x in (mean * ahead, (q - mean) * ahead))
        for h, kept in enumerate(row.kept):
            k, v, p = row.K[h, kept], row.V[h, kept], 0
            for g in range(row.G):
                at = h * row.G + g
                z = (mean[at] @ k.T)[0] / D**0.5 + (apart[at] @ k.T).square().mean(0) / (2 * D)
                p = p + z.softmax(0) / row.G
            score[h, kept] = (p + epsilon) * v.norm(dim=-1)
        return best(row, score, budget, sinks)

    return rule


def critical(budget, output, score_of, first=0.5, epsilon=1e-4, sinks=0, recent=0):
    """output: W_o [hidden, Hq * Dv]."""

    def rule(row):
        score = score_of(row)
        one = best(row, score, int(budget * first), sinks, recent)
        D = row.V.shape[-1]
        two = torch.full_like(score, -math.inf)
        for h, kept in enumerate(row.kept):
            for i in kept:
                parts = [output[:, (h * row.G + g) * D :][:, :D].double() @ row.V[h, i] for g in range(row.G)]
                two[h, i] = (score[h, i] + epsilon) * sum(x.abs().sum() for x in parts)
            two[h, one[h]] = math.inf
        return best(row, two, budget, sinks, recent)

    return rule
