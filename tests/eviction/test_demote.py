"""Demotion: which pages are re-encoded, in which format, and their contents; compared with loops that share no code
with it."""

import itertools

import codec_reference as codec
import numpy as np
import pytest
import torch

from kvcompress import PagedKV, formats, policies
from kvcompress.eviction.eviction import Eviction
from kvcompress.policies import H2O, AdaKV, Demote, KNorm, Protect, SnapKV, StreamingLLM, Watch

B, H, G, D, PAGE = 2, 2, 2, 32, 16
LADDER = ("raw", "int8", "int4_token")


def feed(kv, calls, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for T in calls:
        q, k, v = (torch.randn(kv.batch, h, T, D, generator=generator) for h in (H * G, H, H))
        yield kv.attend(q, k, v)


def pages(kv):
    """For each row and head: {slot: (column, K format, V format)} of live tokens."""
    table, found = kv.page_store.table, []
    for b, h in itertools.product(range(kv.batch), range(H)):
        line = h if table.rows.shape[1] > 1 else 0
        n, first = table.rows[b, line]
        at = {}
        for i in range(n):
            slot = int(table.slots[b, line, i]) if table.slots.size else first + i
            column = 0 if i < kv.sinks else 1 + (i - kv.sinks) // PAGE
            entry = int(table.entries[b, line, column])
            if slot >= 0:
                at[slot] = (column, *(formats.name_of(entry >> shift & 255) for shift in (8, 0)))
        found.append(at)
    return found


def expected(before, after, score, seen, shares, ladder, sinks=4):
    """Formats of the kept slots: pages ranked by mean score, with loops over dicts."""
    columns = {}
    for slot, (column, *_) in before.items():
        if slot in after and column > 0:
            columns.setdefault(column, []).append(slot)
    may = {c: s for c, s in columns.items() if max(s) < seen - PAGE}
    ranked = sorted(may, key=lambda c: (-sum(score[s] for s in may[c]) / len(may[c]), c))
    result = {slot: before[slot][1:] for slot in after}
    for place, column in enumerate(ranked):
        rung = next(i for i in range(len(shares)) if place * sum(shares) < sum(shares[: i + 1]) * len(ranked))
        bits = {"raw": 32, "int8": 8, "int4_token": 4}
        if bits[ladder[rung]] < bits[before[may[column][0]][1]]:
            result.update({slot: (ladder[rung],) * 2 for slot in may[column]})
    return result


def rounded(x, name):
    """A row after quantization with format `name`."""
    return codec.ref_values(*codec.ref_quantize(x[None].numpy(), name), name)[0]


@pytest.mark.parametrize("policy, shares", [
    (StreamingLLM(4, 150), (1, 1, 1)), (KNorm(140), (1, 2, 3)), (AdaKV(KNorm(140), 0.5), (2, 1, 1)),
], ids=repr)  # fmt: skip
def test_pages_go_down_by_their_mean_score(policy, shares, monkeypatch):
    times, run = [], Eviction.evict_over_budget

    def watched(self):
        before, dense, count = pages(kv), kv.dense(), self.count
        run(self)
        if self.count == count:
            return
        times.append(kv.seen)
        now = kv.dense()
        for i, (old, new) in enumerate(zip(before, pages(kv), strict=True)):
            b, h = divmod(i, H)
            norm = dense[0][b, h].double().norm(dim=-1)
            score = {s: float(s) if "Stream" in repr(policy) else -float(norm[s]) for s in old}
            assert {s: x[1:] for s, x in new.items()} == expected(old, new, score, kv.seen, shares, LADDER)
            for s, side in itertools.product(new, (0, 1)):
                x, y, name = dense[side][b, h, s], now[side][b, h, s], new[s][1 + side]
                want = x.numpy() if old[s][1:] == new[s][1:] else rounded(x, name)
                np.testing.assert_array_equal(y.numpy(), np.float32(want))

    kv = PagedKV(H, D, key="raw", batch=B, page_size=PAGE, policy=Demote(policy, LADDER, shares))
    monkeypatch.setattr(Eviction, "evict_over_budget", watched)
    for _ in feed(kv, (100, 60, *[1] * 90)):
        pass
    assert len(times) > 3
    assert {x[1] for at in pages(kv) for x in at.values()} == set(LADDER)
    kv.page_store.pool.check()


@pytest.mark.parametrize("options", [
    {"key": "raw"}, {"key": "int8"}, {"key": "int8", "residual_length": 0},
    {"key": "int8", "value": "int4", "residual_length": 30},
    {"key": "raw", "sinks": 20},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("inner", [H2O(100, 20), SnapKV(100, 8), StreamingLLM(4, 96)], ids=repr)
def test_attention_is_that_over_what_is_read_back(inner, options):
    """Every format of the ladder in one sequence, with crops and copies in between."""
    kv = PagedKV(H, D, batch=B, page_size=PAGE, policy=Demote(inner), **options)
    twin = None
    for step, _ in enumerate(feed(kv, (80, 60, *[1] * 120))):
        if step in (30, 61):
            kv.crop(kv.seen - 3)
        if step == 60:
            twin = kv.clone()
            dense = [x.clone() for x in twin.dense()]
    found = {x[1] for at in pages(kv) for x in at.values()}
    assert {"raw", "int8"} <= found and (isinstance(inner, StreamingLLM) or {"int4", "int2"} & found)
    q = torch.randn(B, H * G, 1, D, generator=torch.Generator().manual_seed(9))
    out, _ = kv.attend(q)
    k, v = (x.double().repeat_interleave(G, 1) for x in kv.dense())
    there = torch.zeros(B, H, kv.seen, dtype=torch.bool)
    for i, at in enumerate(pages(kv)):
        there[i // H, i % H, list(at)] = True
    s = (q.double() @ k.transpose(2, 3) / D**0.5).masked_fill(~there.repeat_interleave(G, 1)[:, :, None], -torch.inf)
    assert (out - s.softmax(-1) @ v).norm() <= 2e-3 * out.norm()
    assert all(torch.equal(a, b) for a, b in zip(dense, twin.dense(), strict=True))
    kv.page_store.pool.check()


def test_memory_falls_by_what_the_ladder_says():
    size = {}
    for policy in (H2O(1024), Demote(H2O(1024)), Demote(H2O(1024), ["raw", "int4"], [1, 3])):
        kv = PagedKV(H, 64, key="raw", dtype=torch.bfloat16, policy=policy)
        generator = torch.Generator().manual_seed(0)
        for T in (700, 500, 300, *[1] * 70):
            kv.attend(*(torch.randn(1, h, T, 64, generator=generator).bfloat16() for h in (H * G, H, H)))
        size[repr(policy), len(size)] = sum(kv.page_store.parts().values())
    plain, four, two = size.values()
    assert four < 0.65 * plain and two < 0.65 * plain


def test_within_other_wrappers():
    """The ladder is applied with the wrapped policy."""
    kinds = []
    for policy in (Demote(H2O(100)), Watch(Demote(H2O(100))), Protect(Demote(H2O(100)), [])):
        kv = PagedKV(H, D, key="int8", page_size=PAGE, policy=policy)
        for _ in feed(kv, (80, 60, *[1] * 60)):
            pass
        kinds.append(pages(kv))
    assert kinds[0] == kinds[1] == kinds[2] and {x[1] for at in kinds[0] for x in at.values()} >= {
        "raw",
        "int8",
        "int2",
    }


def test_to_and_from_json():
    policy = Demote(AdaKV(H2O(64)), ["int8", "int4/int2"], [1, 2])
    again = policies.from_dict(policy.to_dict())
    assert again.ladder == (("int8", "int8"), ("int4", "int2")) and again.shares == (1, 2) and again.needs_attention


@pytest.mark.parametrize("ladder, shares, text", [
    (["int8", "raw"], None, "largest first, got 'int8' before 'raw'"), (["int4", "int8"], None, "largest first"),
    ([], None, "shares"), (["int8"], [1, 2], "1 numbers above 0"), (["int8", "int4"], [1, 0], "above 0"),
    (["int8", 3], None, "expected a format"), (["int8", "int5"], None, "expected formats out of .*got 'int5'"),
])  # fmt: skip
def test_bad_ladders(ladder, shares, text):
    with pytest.raises(ValueError, match=text):
        Demote(KNorm(64), ladder, shares)


def test_bad_formats_change_nothing():
    kv = PagedKV(H, D, page_size=PAGE)
    kv.append(*(torch.randn(1, H, 100, D) for _ in range(2)))
    keep, before = np.ones((1, 1, 100), bool), kv.page_store.table.entries.tolist()
    for code, text in ((99 << 8 | 99, "expected quantized formats"), (0, "expected quantized formats")):
        with pytest.raises(ValueError, match=text):
            kv.page_store.table.plan_evict(keep, np.full((1, 1, 7), code, np.int32))
    with pytest.raises(ValueError, match="as many heads"):
        kv.page_store.table.plan_evict(keep, np.full((1, 2, 7), -1, np.int32))
    assert kv.page_store.table.entries.tolist() == before
