"""Each policy compared with its paper's formula over plain tensors: the same tokens kept, the same output."""

import inspect

import evict_reference as reference
import pytest
import torch
from evict_reference import PAGE, Row, slow_attention

from kvcompress import PagedKV
from kvcompress.policies import (
    H2O,
    RKV,
    TOVA,
    AdaKV,
    Chain,
    CriticalKV,
    ExpectedAttention,
    KeyDiff,
    KNorm,
    Protect,
    PyramidBudget,
    Random,
    ScoreOnly,
    SlidingWindow,
    SnapKV,
    StreamingLLM,
)  # fmt: skip

B, H, G, D = 3, 2, 2, 32
PADS = (0, 7, 19)


SPEED = 10000.0 ** -(torch.arange(0, D, 2, dtype=torch.float64) / D)
OUTPUT = torch.randn(48, H * G * D, generator=torch.Generator().manual_seed(11)) * torch.linspace(0.1, 3, H * G * D)


def bound(policy):
    policy.outputs = [OUTPUT]
    return policy


CASES = {
    "h2o": (H2O(48), reference.h2o(48), 48),
    "h2o sum": (H2O(48, score="sum", sinks=0), reference.h2o(48, 0, "sum"), 48),
    "h2o ema": (H2O(48, score="ema"), reference.h2o(48, 4, "ema"), 48),
    "h2o shared": (H2O(48, 8, heads="shared"), reference.h2o(48, 4, "mean", True, 8), 48),
    "h2o ratio": (H2O(0.3), reference.h2o(0.3), 0.3),
    "score only": (ScoreOnly(40), reference.h2o(40, 0, "mean", recent=0), 40),
    "streaming": (StreamingLLM(4, 40), reference.streaming(4, 40), 44),
    "no sinks": (SlidingWindow(36), reference.streaming(0, 36), 36),
    "every token": (StreamingLLM(2, 20, slack=1), reference.streaming(2, 20), 22),
    "tova": (TOVA(40), reference.tova(40), 40),
    "snapkv": (SnapKV(48, 8, 5), reference.snapkv(48, 8, 5), 48),
    "snapkv of many": (SnapKV(48, 30, 3), reference.snapkv(48, 30, 3), 48),
    "knorm": (KNorm(40), reference.knorm(40), 40),
    "keydiff": (KeyDiff(40), reference.keydiff(40), 40),
    "rkv": (RKV(40, 4, similar=0.2, weight=0.3), reference.rkv(40, 4, 7, 0.3, 0.2), 40),
    "adakv": (
        AdaKV(KNorm(40, sinks=4), 0.5), reference.adakv(40, 0.5, lambda row: -row.K.norm(dim=-1), 4), 40,
    ),
    "adakv of h2o": (
        AdaKV(H2O(40, 10, 0, score="sum")), reference.adakv(40, 0.2, lambda row: row.accumulated, 0, 10), 40,
    ),
    "expected": (ExpectedAttention(40, queries=20, future=64), reference.expected(40, 20, 64), 40),
    "expected of few": (
        ExpectedAttention(40, 8, queries=300, future=8, epsilon=0.1), reference.expected(40, 300, 8, 8, 0.1), 40,
    ),
    "critical": (
        bound(CriticalKV(H2O(40, 8, 4))),
        reference.critical(40, OUTPUT, lambda r: r.accumulated / (r.n - torch.arange(r.n)), sinks=4, recent=8), 40,
    ),
    "critical sums": (
        bound(CriticalKV(ScoreOnly(40, score="sum"), 0.25, 0.5)),
        reference.critical(40, OUTPUT, lambda row: row.accumulated, 0.25, 0.5), 40,
    ),
}  # fmt: skip
CALLS = (50, 33, 40, *[1] * 17, 21, *[1] * 18)  # chunks of a prompt, an answer, a second turn, an answer


def rows_of(rule, budget, slack):
    def limit(row):
        return budget if isinstance(budget, int) else -(-budget * row.n // 1)

    return [Row(H, G, rule, limit, slack or PAGE) for _ in range(B)]


def run(kv, calls, rows=None, pads=PADS, seed=0):
    """Feeds both; compares outputs and kept tokens after every call."""
    generator = torch.Generator().manual_seed(seed)
    outs = []
    for step, T in enumerate(calls):
        q = torch.randn(B, H * G, T, D, generator=generator)
        k, v = (torch.randn(B, H, T, D, generator=generator) for _ in range(2))
        # Some keys get much attention, so that scores differ by more than rounding.
        k = k * (1 + 2 * torch.rand(B, H, T, 1, generator=generator))
        mask = torch.arange(T) >= torch.tensor(pads)[:, None] if step == 0 and any(pads) else None
        rows_in = [int(p) if step == 0 else 0 for p in pads]
        out, _ = kv.attend(q, k, v, mask=mask)
        outs.append(out)
        if rows is None:
            continue
        kept = kv.kept_heads()
        for b, row in enumerate(rows):
            p = rows_in[b]
            want = row.call(q[b, :, p:], k[b, :, p:], v[b, :, p:])
            assert (out[b, :, p:] - want).norm() <= 1e-5 * want.norm(), (step, b)
            for h in range(H):
                assert kept.positions[b][h].tolist() == sorted(row.kept[h]), (step, b, h)
                assert (kept.slots[b][h] - kept.positions[b][h]).unique().tolist() == [pads[b]]
    kv.page_store.pool.check()
    return outs


@pytest.mark.parametrize("name", CASES)
def test_as_the_paper_says(name):
    policy, rule, budget = CASES[name]
    rope = SPEED if policy.needs_rope else None
    kv = PagedKV(H, D, key="raw", batch=B, page_size=PAGE, policy=policy, rope=rope)
    run(kv, CALLS, rows_of(rule, budget, policy.slack))
    assert kv.eviction.count > 2
    assert (kv.page_store.table.rows.shape[1] == 1) == (policy.heads == "shared")


@pytest.mark.parametrize("policy", [H2O(10**6), StreamingLLM(4, 10**6), SnapKV(10**6), AdaKV(KeyDiff(1.0))])
@pytest.mark.parametrize("key", ["raw", "int8", "int4"])
def test_a_budget_of_all_tokens_is_no_policy(policy, key):
    kept = run(PagedKV(H, D, key=key, batch=B, page_size=PAGE, policy=policy), CALLS)
    plain = run(PagedKV(H, D, key=key, batch=B, page_size=PAGE), CALLS)
    assert all(torch.equal(a, b) for a, b in zip(kept, plain, strict=True))


def kept_of(kv):
    kept = kv.kept_heads()
    return [[x.tolist() for x in row] for row in kept.positions], kept.scores


@pytest.mark.parametrize("policy", [
    H2O(40), TOVA(40), SnapKV(40, 8), RKV(40), KNorm(40), KeyDiff(40), Random(40), AdaKV(H2O(40)), ScoreOnly(0.2),
    StreamingLLM(4, 36), ExpectedAttention(40, queries=20), Protect(H2O(60), [(10, 20)]),
    Chain(KNorm(60), H2O(40)), PyramidBudget(H2O(40)),
], ids=repr)  # fmt: skip
@pytest.mark.parametrize("options", [
    {"key": "int8"}, {"key": "int4"}, {"key": "int8", "residual_length": 0}, {"key": "int4_token", "value": "kivi2"},
    {"key": "int8", "residual_length": 40},
], ids=str)  # fmt: skip
def test_a_row_alone_is_the_row_in_the_batch(policy, options):
    """Padding on the left, and in the second turn; sequences that end up on different pages."""
    generator = torch.Generator().manual_seed(3)
    pads, turns = [0, 9, 30], [12, 0, 3]
    options = {"page_size": PAGE, "policy": policy, "layer": (1, 4), "rope": SPEED, **options}
    batch = PagedKV(H, D, batch=3, **options)
    alone = [PagedKV(H, D, **options) for _ in range(3)]
    for step, T in enumerate((70, 30, *[1] * 20, 40, *[1] * 6)):
        q = torch.randn(3, H * G, T, D, generator=generator)
        k, v = (torch.randn(3, H, T, D, generator=generator) for _ in range(2))
        left = {0: pads, 22: turns}.get(step, [0, 0, 0])
        out, _ = batch.attend(q, k, v, mask=torch.arange(T) >= torch.tensor(left)[:, None])
        for b, kv in enumerate(alone):
            x = left[b]
            want, _ = kv.attend(q[b : b + 1, :, x:], k[b : b + 1, :, x:], v[b : b + 1, :, x:])
            assert (out[b : b + 1, :, x:] - want).norm() <= 2e-4 * want.norm(), (step, b)
    positions, scores = kept_of(batch)
    for b, kv in enumerate(alone):
        mine, own = kept_of(kv)
        assert positions[b] == mine[0]
        for h in range(H if scores else 0):
            torch.testing.assert_close(scores[b][h], own[0][h], atol=1e-4, rtol=1e-3)
    assert batch.eviction.count >= 2
    batch.page_store.pool.check()


def test_protected_spans_chains_and_pyramids():
    kv = PagedKV(H, D, key="raw", batch=B, page_size=PAGE, policy=Protect(StreamingLLM(4, 40), [(10, 15), (30, 31)]))
    run(kv, CALLS)
    assert all(set(range(10, 15)) | {30} <= set(x.tolist()) for row in kv.kept_heads().positions for x in row)
    chain = PagedKV(H, D, key="raw", batch=B, page_size=PAGE, policy=Chain(StreamingLLM(4, 100), KNorm(40)))
    run(chain, (300, 1))
    kept = [x for row in chain.kept_heads().positions for x in row]
    assert all(len(x) < 40 + PAGE and int(x[4]) >= 200 - 19 for x in kept)
    sizes = []
    for layer in range(4):
        kv = PagedKV(H, D, key="raw", batch=B, page_size=PAGE, policy=PyramidBudget(KNorm(60), 3), layer=(layer, 4))
        run(kv, CALLS)
        sizes.append(kv.eviction.policy.limit(int(kv.eviction.real()[0]), layer, 4))
        assert sizes[-1] <= len(kv.kept_heads().slots[0][0]) < sizes[-1] + PAGE
    assert sizes == [90, 70, 50, 30]


def test_adakv_budgets_by_head():
    """AdaKV: real pages follow the budgets; no head falls below its floor."""
    kv = PagedKV(4, 64, key="int8", page_size=PAGE, policy=AdaKV(KNorm(0.5, sinks=0, slack=16), 0.2))
    k = torch.randn(1, 4, 2000, 64) * torch.tensor([1.0, 2.0, 2.1, 4.0])[None, :, None, None]
    before = PagedKV(4, 64, key="int8", page_size=PAGE)
    before.append(k, k)
    kv.append(k, k)
    lengths = [len(x) for x in kv.kept_heads().slots[0]]
    assert sum(lengths) == 4000 and lengths[0] > 1500 and min(lengths) >= 200
    assert kv.stats()["bytes"] <= 0.55 * before.stats()["bytes"]


def test_h2o_with_attention_from_outside_and_its_accumulated_attention():
    """`observe` with eager weights equals what the op accumulates; the weights of a query sum to 1 per head."""
    one, two = (PagedKV(H, D, key="raw", page_size=PAGE, policy=H2O(10**6, score="sum")) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    for T in (40, 1, 7):
        q, k, v = (torch.randn(1, h, T, D, generator=generator) for h in (H * G, H, H))
        one.attend(q, k, v)
        two.append(k, v)
        K = two.dense()[0].repeat_interleave(G, 1)
        hidden = torch.arange(two.seen) > torch.arange(two.seen - T, two.seen)[:, None]
        two.observe((q @ K.transpose(2, 3) / D**0.5).masked_fill(hidden, -torch.inf).softmax(-1))
    a, b = one.kept_heads().scores, two.kept_heads().scores
    for h in range(H):
        torch.testing.assert_close(a[0][h], b[0][h], atol=1e-5, rtol=1e-5)
        assert abs(float(a[0][h].sum()) - 48 * G) < 1e-3
    with pytest.raises(ValueError, match="observe: weights: expected"):
        two.observe(torch.ones(1, 4, 1, 5))
    with pytest.raises(ValueError, match="policy that accumulates attention"):
        PagedKV(H, D).observe(torch.ones(1, 4, 1, 5))


def test_plain_sums_favour_early_tokens():
    """Attention without structure: plain sums favour the beginning, the default does not (features: bias of H2O)."""
    early = {}
    for kind in ("sum", "mean"):
        policy = H2O(128, recent=64, sinks=0, score=kind, slack=16)
        kv = PagedKV(1, D, key="raw", page_size=PAGE, policy=policy)
        generator = torch.Generator().manual_seed(1)
        for _ in range(512):
            kv.attend(*(torch.randn(1, 1, 1, D, generator=generator) for _ in range(3)))
        heavy = kv.kept_heads().positions[0][0][:64]
        early[kind] = float((heavy < 64).float().mean())
    assert early["sum"] > 0.9 and early["mean"] < 0.7


def test_accumulated_attention_is_that_of_eager_attention():
    kv = PagedKV(H, D, key="raw", batch=2, page_size=PAGE, policy=AdaKV(H2O(40)))
    generator = torch.Generator().manual_seed(0)
    for T in (50, 30, 1, 1):
        kv.attend(*(torch.randn(2, h, T, D, generator=generator) for h in (H * G, H, H)))
    q = torch.randn(2, H * G, 3, D, generator=generator)
    got, want = kv.eviction.attention_of(q, scale=0.2), slow_attention(kv, q, 0.2)
    assert (got - want).abs().max() <= 1e-5


@pytest.mark.parametrize("make, error, text", [
    (lambda: H2O(0), ValueError, "at least 1 token"), (lambda: H2O(1.5), ValueError, "a share in"),
    (lambda: H2O("8"), TypeError, "tokens"), (lambda: H2O(8, 8), ValueError, "sinks \\+ recent = 12 tokens, got 8"),
    (lambda: H2O(8, score="max"), ValueError, "sum, mean, ema"), (lambda: SnapKV(64, kernel=4), ValueError, "odd"),
    (lambda: StreamingLLM(4, 0), ValueError, "at least 1"), (lambda: AdaKV(TOVA(9)), ValueError, "each head"),
    (lambda: AdaKV(4), TypeError, "expected a policy"), (lambda: Chain(), ValueError, "at least one"),
    (lambda: Chain(H2O(9, 0), H2O(9, 0)), ValueError, "at most one"), (lambda: KNorm(9, slack=0), ValueError, "slack"),
    (lambda: StreamingLLM(positions="mine"), ValueError, "original, cache"),
    (lambda: CriticalKV(H2O(9, 0), 1.5), ValueError, "first: expected a number"),
    (lambda: ExpectedAttention(9, queries=0), ValueError, "queries: expected at least 1"),
    (lambda: PagedKV(1, 32, policy=ExpectedAttention(9)), ValueError, "expected rope="),
    (lambda: PagedKV(1, 32, policy=CriticalKV(KNorm(9))).append(*[torch.randn(1, 1, 99, 32)] * 2), ValueError, "bind"),
])  # fmt: skip
def test_bad_policies(make, error, text):
    with pytest.raises(error, match=text):
        make()


class InCache:
    """StreamingLLM with positions in the cache, as in its paper: keys without RoPE, rotated at every call."""

    def __init__(self, frequency, sinks, window):
        self.frequency, self.sinks, self.window = frequency, sinks, window
        self.k, self.v = (torch.zeros(H, 0, D, dtype=torch.float64) for _ in range(2))

    def rotate(self, x, positions):
        angle = (positions[:, None].double() * self.frequency).repeat(1, 2)
        turned = torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1)
        return x * angle.cos() + turned * angle.sin()

    def call(self, q, k, v):
        self.k, self.v = torch.cat([self.k, k.double()], 1), torch.cat([self.v, v.double()], 1)
        n, T = self.k.shape[1], k.shape[1]
        at = torch.arange(n)
        K = self.rotate(self.k, at).repeat_interleave(G, 0)
        s = self.rotate(q.double(), at[n - T :]) @ K.transpose(1, 2) / D**0.5
        out = s.masked_fill(at > at[n - T :, None], -torch.inf).softmax(-1) @ self.v.repeat_interleave(G, 0)
        if n >= self.sinks + self.window + PAGE:
            keep = torch.cat([at[: self.sinks], at[n - self.window :]])
            self.k, self.v = self.k[:, keep], self.v[:, keep]
        return out


def test_positions_in_the_cache():
    """Queries and keys have RoPE at their sequence positions; the result is that of the paper. Reordered rows continue
    with their own sinks."""
    frequency = 10000.0 ** -(torch.arange(0, D, 2, dtype=torch.float64) / D)
    policy = StreamingLLM(4, 40, positions="cache")
    kv = PagedKV(H, D, key="raw", batch=B, page_size=PAGE, policy=policy, rope=frequency)
    rows = [InCache(frequency, 4, 40) for _ in range(B)]
    generator = torch.Generator().manual_seed(0)
    seen, twin = 0, None
    for step, T in enumerate((50, 33, *[1] * 40, 21, *[1] * 60)):
        q = torch.randn(B, H * G, T, D, generator=generator)
        k, v = (torch.randn(B, H, T, D, generator=generator) for _ in range(2))
        pads = PADS if step == 0 else (0,) * B
        if step == 70:
            twin = kv.clone()
            kv.select([1, 0, 2])
            rows = [rows[1], rows[0], rows[2]]
        left = torch.tensor(PADS)[[1, 0, 2] if step >= 70 else [0, 1, 2]]
        at = seen + torch.arange(T) - left[:, None]
        turn = [rows[0].rotate(x.double(), p).float() for x, p in zip(q, at, strict=True)]
        kturn = [rows[0].rotate(x.double(), p).float() for x, p in zip(k, at, strict=True)]
        mask = torch.arange(T) >= left[:, None] if step == 0 else None
        out, _ = kv.attend(torch.stack(turn), torch.stack(kturn), v, mask=mask)
        seen += T
        for b, row in enumerate(rows):
            p = pads[b]
            want = row.call(q[b, :, p:], k[b, :, p:], v[b, :, p:])
            assert (out[b, :, p:] - want).norm() <= 2e-5 * want.norm(), (step, b)
    assert twin is not None and twin.seen < kv.seen and kv.eviction.count > 6
    kv.page_store.pool.check()
    with pytest.raises(ValueError, match="positions='cache.: expected rope="):
        PagedKV(H, D, policy=policy)


def test_signatures_are_those_of_the_policies():
    assert list(inspect.signature(KNorm).parameters) == ["budget", "sinks", "recent", "slack"]
    assert list(inspect.signature(SnapKV).parameters)[:3] == ["budget", "window", "kernel"]
