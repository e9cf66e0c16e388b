"""Effects of evictions on storage, and what policies read from it, on plain tensors."""

import numpy as np
import pytest
import torch
from test_evict import PAGE, D, H, filled

from kvcompress import PagedKV, ops
from kvcompress.policies import H2O, TOVA, StreamingLLM


@pytest.mark.parametrize("key, value", [("raw", "raw"), ("int8", "int4_token"), ("nvfp4", "int2_asym")])
def test_order_in_storage_is_free(key, value):
    """The same tokens at other places in other pages give the same attention, except for rounding."""
    kv = filled(4 + 16 * 9 + 5, key=key, value=value, batch=2)
    keep = torch.rand(2, H, kv.seen, generator=torch.Generator().manual_seed(2)) < 0.7
    keep[:, :, :4] = True
    kv.evict(keep)
    arena, entries, rows, slots = kv.page_store.views()
    far = torch.cat([arena, torch.zeros_like(arena)])
    moved, order, moves = entries.clone(), slots.clone(), []
    random = torch.Generator().manual_seed(3)
    for b, h in np.ndindex(2, H):
        line, used = b * H + h, -(-(int(rows[b, h, 0]) - 4) // PAGE)
        there = entries[b, h, : used + 1] + (len(arena) // 64 << 16)
        closed = int((entries[b, h, 1:used] & 0xFFFF == entries[b, h, 1] & 0xFFFF).sum())  # the others are open
        whole = (0, *range(closed + 1, used + 1))
        moves += [(line, int(entries[b, h, c]), -1, int(there[c]), 0, 16) for c in whole]
        for i, j in enumerate(torch.randperm(closed * PAGE, generator=random).tolist()):
            a, z = int(entries[b, h, 1 + i // PAGE]), int(there[1 + j // PAGE])
            moves.append((line, a, i % PAGE, z, j % PAGE, PAGE))
            order[b, h, 4 + j] = slots[b, h, 4 + i]
        moved[b, h, : used + 1] = there
    ops.compact(far, torch.tensor(moves), H, H, D, D, PAGE, 4)
    q = torch.randn(2, 2 * H, 3, D, generator=random)
    none = torch.empty(0)
    a, z = (
        ops.attend(
            q,
            *kv.page_store.empties(),
            *store,
            none.bool(),
            none,
            torch.empty(0, 2).long(),
            kv.seen,
            PAGE,
            4,
            0,
            0.2,
            0.0,
        )
        for store in ((arena, entries, rows, slots), (far, moved, rows, order))
    )
    for x, y in zip(a, z, strict=True):
        torch.testing.assert_close(x, y, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("key, value", [("raw", "int8"), ("int4", "int4"), ("kivi2", "nvfp4"), ("fp8_e4m3", "raw")])
def test_numbers_of_tokens_are_those_of_what_is_read_back(key, value):
    kv = filled(4 + 16 * 6 + 5, key=key, value=value, batch=2)
    keep = torch.rand(2, H, kv.seen, generator=torch.Generator().manual_seed(2)) < 0.7
    keep[:, :, :4] = True
    kv.evict(keep)
    slots = kv.eviction.slots()
    at = slots.clamp(min=0).long()[..., None].expand(-1, -1, -1, D)
    k, v = (x.double().gather(2, at) * (slots >= 0)[..., None] for x in kv.dense())
    unit = torch.nn.functional.normalize(k, dim=-1)
    want = k.norm(dim=-1), v.norm(dim=-1), torch.cosine_similarity(unit, unit.sum(2, keepdim=True), dim=-1)
    geometry = (*kv.page_store.views(), H, D, D, slots.shape[2], PAGE, 4)
    for kind, x in enumerate(want):
        torch.testing.assert_close(ops.score_tokens(*geometry, kind).double(), x, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="kind: expected 0 to 2, got 3"):
        ops.score_tokens(*geometry, 3)
    with pytest.raises(ValueError, match=f"expected the {slots.shape[2]} tokens"):
        ops.score_tokens(*geometry[:7], slots.shape[2] - 1, PAGE, 4, 0)


@pytest.mark.parametrize("policy", [StreamingLLM(4, 28, slack=8), TOVA(32, slack=8), H2O(32, heads="shared", slack=8)])
def test_heads_evicted_separately_choose_separately(policy):
    """Separate evictions by hand, under a policy that keeps the same tokens in all heads."""
    kv = PagedKV(H, D, page_size=PAGE, policy=policy)
    call = lambda T: kv.attend(*(torch.randn(1, h, T, D) for h in (2 * H, H, H)))  # noqa: E731
    call(39)
    keep = torch.ones(1, H, 39, dtype=torch.bool)
    keep[:, 0, 10:20] = False
    kv.evict(keep)
    assert [row.numel() for row in kv.kept_heads().slots[0]] == [29, *[39] * (H - 1)]
    for _ in range(60):
        call(1)
    kept = kv.kept_heads().slots[0]
    assert all(32 <= row.numel() <= 40 for row in kept)
    for row in kept if isinstance(policy, StreamingLLM) else ():
        assert row[:4].tolist() == [0, 1, 2, 3] and row[-28:].tolist() == list(range(kv.seen - 28, kv.seen))


@pytest.mark.parametrize("batch", [1, 2])
def test_a_layer_without_tokens_keeps_none(batch):
    for policy in (None, H2O(32), StreamingLLM(4, 28)):
        kept = PagedKV(H, D, batch=batch, page_size=PAGE, policy=policy).kept_heads()
        lists = [kept.slots, kept.positions] + ([kept.scores] if isinstance(policy, H2O) else [])
        assert [[[x.numel() for x in row] for row in nest] for nest in lists] == [[[0] * H] * batch] * len(lists)


def test_share_deals_out_by_score_and_leaves_a_floor():
    scores = torch.tensor([[[9.0, 8.0, 7.0, 6.0], [1.0, 2.0, 3.0, 5.5]]])
    slots = torch.arange(4, dtype=torch.int32).expand(1, 2, 4).contiguous()
    for total, floor, want in (
        (4, 0, [4, 0]),
        (4, 1, [3, 1]),
        (5, 0, [4, 1]),
        (4, 2, [2, 2]),
        (9, 0, [4, 4]),
        (0, 0, [0, 0]),
    ):
        assert ops.share(scores, slots, None, torch.tensor([total]), torch.tensor([floor]))[0].tolist() == want
    protect = torch.tensor([[[False] * 4, [True, True, False, False]]])
    assert ops.share(scores, slots, protect, torch.tensor([4]), torch.tensor([2]))[0].tolist() == [2, 2]
    slots[0, 0, :2] = -1
    assert ops.share(scores, slots, None, torch.tensor([3]), torch.tensor([0]))[0].tolist() == [2, 1]
    with pytest.raises(ValueError, match="total: expected the first dimensions"):
        ops.share(scores, slots, None, torch.tensor([3, 3]), torch.tensor([0]))
    with pytest.raises(ValueError, match="NaN"):
        ops.share(scores * torch.nan, slots, None, torch.tensor([3]), torch.tensor([0]))
