"""Accumulated attention: the attention that each stored token receives, compared with a float64 matrix of weights."""

import pytest
import torch
from test_attend import data
from test_ops import attend_args

from kvcompress import PagedKV, ops

H, G, D = 2, 3, 64


def by_matrix(K, q, window=0, softcap=0.0):
    """[B, H, S] float64, by slot: the columns of the softmax matrix, summed over queries and the group."""
    K, H, S, Tq = K.double(), K.shape[1], K.shape[2], q.shape[2]
    G = q.shape[1] // H
    s = q.double() @ K.repeat_interleave(G, 1).transpose(2, 3) * D**-0.5
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    qs, ks = torch.arange(S - Tq, S)[:, None], torch.arange(S)[None]
    sees = (ks <= qs) & ((ks > qs - window) if window else torch.tensor(True))
    sees = sees[None, None].expand(q.shape[0], 1, -1, -1)
    p = torch.softmax(s.masked_fill(~sees, -torch.inf), -1).nan_to_num(0.0)
    return p.reshape(q.shape[0], H, G, Tq, S).sum((2, 3))


@pytest.mark.parametrize("window,softcap", [(0, 0.0), (70, 0.0), (0, 5.0)])
@pytest.mark.parametrize("old,T", [(0, 1), (300, 1), (300, 5), (1500, 1), (200, 130), (0, 97)])
@pytest.mark.parametrize("name,limit", [("raw", 1e-5), ("int8", 5e-3), ("int4", 2e-2), ("kivi4", 2e-2)])
def test_accumulated_attention_is_the_column_sum_of_the_weights(name, limit, old, T, window, softcap):
    def filled():
        kv = PagedKV(H, D, key=name)
        if old:
            kv.append(data(1, H, old, D, 1), data(1, H, old, D, 2))
        return kv

    q, k, v = data(1, H * G, T, D, 3), data(1, H, T, D, 4), data(1, H, T, D, 5)
    out, lse, accumulated = filled().attend(q, k, v, window=window, softcap=softcap, return_attention=True)
    assert accumulated.shape == (1, H, old + T)
    want = by_matrix(filled().append_dense(k, v)[0], q, window, softcap)
    assert (accumulated - want).abs().max() <= limit * max(1.0, float(want.max()))
    assert accumulated.sum().item() == pytest.approx(H * G * T, rel=1e-4)
    again = filled().attend(q, k, v, window=window, softcap=softcap)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1]), (
        "asking for accumulated attention changed the result"
    )


def test_pads_and_rows_of_unequal_length():
    """Indices are of stored tokens: padding has none, and values past a row's last token are 0."""
    mask = torch.ones(2, 80, dtype=torch.bool)
    mask[0, :30] = False
    kv = PagedKV(H, D, key="int8", batch=2)
    k, v = data(2, H, 80, D, 1), data(2, H, 80, D, 2)
    kv.append(k, v, mask)
    q, k1 = data(2, H * G, 1, D, 3), data(2, H, 1, D, 4)
    accumulated = kv.attend(q, k1, k1, return_attention=True)[2]
    assert accumulated.shape == (2, H, 81) and bool((accumulated[0, :, 51:] == 0).all())
    for b, n in ((0, 50), (1, 80)):
        alone = PagedKV(H, D, key="int8")
        alone.append(k[b : b + 1, :, 80 - n :], v[b : b + 1, :, 80 - n :])
        got = alone.attend(q[b : b + 1], k1[b : b + 1], k1[b : b + 1], return_attention=True)[2]
        assert torch.equal(accumulated[b : b + 1, :, : n + 1], got)


def test_without_own_tokens_and_again():
    kv = PagedKV(H, D, key="int8")
    kv.append(data(1, H, 200, D, 1), data(1, H, 200, D, 2))
    q = data(1, H * G, 1, D, 3)
    accumulated = kv.attend(q, return_attention=True)[2]
    want = by_matrix(kv.dense()[0], q)
    assert (accumulated - want).abs().max() < 5e-3 and torch.equal(accumulated, kv.attend(q, return_attention=True)[2])


def test_a_query_of_nan_adds_nothing():
    kv = PagedKV(H, D, key="int8")
    kv.append(data(1, H, 100, D, 1), data(1, H, 100, D, 2))
    for T in (1, 4):
        q = data(1, H * G, T, D, 3)
        q[0, 0, 0, 0] = torch.nan
        out, _, accumulated = kv.attend(q, return_attention=True)
        assert bool(out[0, 0, 0].isnan().all()) and bool(accumulated.isfinite().all())
        assert accumulated[0, 0].sum().item() == pytest.approx(G * T - 1, rel=1e-4)
        assert accumulated[0, 1].sum().item() == pytest.approx(G * T, rel=1e-4)


@pytest.mark.parametrize("key", ["raw", "int8", "int4"])
@pytest.mark.parametrize("T", [1, 4, 130])
def test_a_score_that_overflows_adds_nothing(key, T):
    """Its row becomes NaN; the weights of other queries of the group are unaffected."""
    kv = PagedKV(H, D, key=key)
    kv.append(data(1, H, 300, D, 1), data(1, H, 300, D, 2))
    q = data(1, H * G, T, D, 3)
    q[0, 0, 0] = 2e38 * kv.dense()[0][0, 0, 5].sign()
    out, _, accumulated = kv.attend(q, return_attention=True)
    assert bool(out[0, 0, 0].isnan().all()) and bool(out[0, 1].isfinite().all())
    assert accumulated[0, 0].sum().item() == pytest.approx(G * T - 1, rel=1e-4)
    assert accumulated[0, 1].sum().item() == pytest.approx(G * T, rel=1e-4)


@pytest.mark.parametrize("rows", [16, 71])
def test_many_heads_of_one(rows):
    """A block of one token whose rows fill registers, and one with more rows than a block has tokens."""
    kv, q = PagedKV(1, D, key="int8"), data(1, rows, 3, D, 3)
    kv.append(data(1, 1, 300, D, 1), data(1, 1, 300, D, 2))
    accumulated = kv.attend(q, return_attention=True)[2]
    assert (accumulated - by_matrix(kv.dense()[0], q)).abs().max() < 5e-3 * rows**0.5


@pytest.mark.parametrize("width", [-1, 99])
def test_bad_widths(width):
    args = attend_args(T=3, B=2)
    before = args[3].clone()
    with pytest.raises(ValueError, match="attention"):
        ops.attend(*args, width)
    assert torch.equal(args[3], before)


@pytest.mark.parametrize("T", [1, 3, 90])
def test_accumulated_attention_against_the_lse_of_more_tokens(T):
    """The results of two halves of the tokens, each with the merged lse, add up to the whole; queries without an lse
    add nothing."""
    k, v, q = data(1, H, 300, D, 1), data(1, H, 300, D, 2), data(1, H * G, T, D, 3)
    whole, want = PagedKV(H, D, key="raw"), by_matrix(k, q)
    whole.append(k, v)
    lse = whole.attend(q)[1]
    for half, mine in ((slice(0, 140), slice(0, 140)), (slice(140, 300), slice(140, 300))):
        kv = PagedKV(H, D, key="raw")
        kv.append(k, v, torch.isin(torch.arange(300), torch.arange(half.start, half.stop))[None])
        empty = k[:, :, :0]

        def accumulated(lse, width=160, kv=kv, empty=empty):
            rest = kv.seen, kv.page_size, kv.sinks, 0, D**-0.5, 0.0, width
            return ops.accumulate_attention(
                q, empty, empty, *kv.page_store.views(), kv.page_store.no_mask, lse, kv.page_store.no_seals, *rest
            )

        got = accumulated(lse)[:, :, : half.stop - half.start]
        assert (got - want[:, :, mine]).abs().max() <= 1e-5 * max(1.0, float(want.max()))
        assert bool((accumulated(torch.full_like(lse, torch.inf)) == 0).all())
        for bad in (lse[:, :1], lse[:, :, :0], lse.double()):
            with pytest.raises((ValueError, TypeError), match="lse"):
                accumulated(bad.contiguous())
        with pytest.raises(ValueError, match="attention"):
            accumulated(lse, 20)


@pytest.mark.parametrize("T", [1, 200])
def test_accumulated_attention_does_not_depend_on_threads(T):
    """Blocks of queries are summed in fixed point, so their order does not matter."""
    got = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        kv = PagedKV(H, D, key="int8")
        kv.append(data(1, H, 1000, D, 1), data(1, H, 1000, D, 2))
        x = data(1, H, T, D, 4)
        got.append(kv.attend(data(1, H * G, T, D, 3), x, x, return_attention=True)[2])
    torch.set_num_threads(2)
    assert torch.equal(*got)
