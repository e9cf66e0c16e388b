"""Each policy against its paper's formula over plain tensors: the same tokens kept, the same output."""

import evict_reference as reference
import pytest
import torch
from evict_reference import PAGE, Row, slow_mass

from kvcompress import PagedKV, eviction
from kvcompress.policies import (
    H2O,
    RKV,
    TOVA,
    AdaKV,
    KeyDiff,
    KNorm,
    ScoreOnly,
    SlidingWindow,
    SnapKV,
    StreamingLLM,
)  # fmt: skip

B, H, G, D = 3, 2, 2, 32
PADS = (0, 7, 19)


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
        AdaKV(H2O(40, 10, 0, score="sum")), reference.adakv(40, 0.2, lambda row: row.mass, 0, 10), 40,
    ),
}  # fmt: skip
CALLS = (50, 33, 40, *[1] * 17, 21, *[1] * 18)  # chunks of a prompt, answer, second turn, answer


def rows_of(rule, budget, slack):
    def limit(row):
        return budget if isinstance(budget, int) else -(-budget * row.n // 1)

    return [Row(H, G, rule, limit, slack or PAGE) for _ in range(B)]


def run(kv, calls, rows=None, pads=PADS, seed=0):
    """Feeds both; compares outputs and kept sets after every call."""
    generator = torch.Generator().manual_seed(seed)
    outs = []
    for step, T in enumerate(calls):
        q = torch.randn(B, H * G, T, D, generator=generator)
        k, v = (torch.randn(B, H, T, D, generator=generator) for _ in range(2))
        # Some keys are loved: scores differ by more than rounding.
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
    kv._pool.check()
    return outs


@pytest.mark.parametrize("name", CASES)
def test_as_the_paper_says(name):
    policy, rule, budget = CASES[name]
    kv = PagedKV(H, D, key="raw", batch=B, page_size=PAGE, policy=policy)
    run(kv, CALLS, rows_of(rule, budget, policy.slack))
    assert kv.eviction.count > 2
    assert (kv._table.rows.shape[1] == 1) == (policy.heads == "shared")
