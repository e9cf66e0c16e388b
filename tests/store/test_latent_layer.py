"""PagedKV(latent=True): a layer of latents (MLA), compared with float64 over its contents; its policies; invalid
inputs."""

import pytest
import torch

from kvcompress import H2O, TOVA, KeyDiff, KNorm, PagedKV, SnapKV, StreamingLLM
from kvcompress.policies import AdaKV, CriticalKV, Demote, ExpectedAttention, Watch

HEADS, SCALE = 5, 0.11
DIMS = [(64, 16), (72, 24), (50, 10)]  # the last two need padding


def layer(Dk=64, Dv=16, key="int8", **options):
    options = {"value": "raw" if key == "raw" else "int8", "page_size": 16, **options}
    return PagedKV(1, Dk, key=key, value_dim=Dv, latent=True, **options)


def data(store, T, seed):
    g = torch.Generator().manual_seed(seed)
    dims = store.head_dim, store.value_dim
    q = torch.randn(store.batch, HEADS, T, sum(dims), generator=g)
    return q, *(torch.randn(store.batch, 1, T, dim, generator=g) for dim in dims)


def definition(q, K, V, there):
    """float64 (out, attention of each token) for q of the last slots; K, V and `there` by slot."""
    S, T = K.shape[2], q.shape[2]
    scores = q.double() @ torch.cat([K, V], -1).double().mT * SCALE
    sees = (torch.arange(S)[None] <= torch.arange(S - T, S)[:, None]) & there[:, None, None]
    p = scores.masked_fill(~sees, -torch.inf).softmax(-1)
    return p @ K.double(), p.sum((1, 2))


def run(store, calls, seed=0):
    """(out, definition) of each call, over what the layer holds during attention, with the call's own tokens
    unrounded."""
    for i, T in enumerate(calls):
        q, k, v = data(store, T, seed + i)
        twin = store.clone()
        if twin.eviction:
            twin.eviction.deferred = True
        K, V = twin.append_dense(k, v)
        there = torch.zeros(store.batch, store.seen + T, dtype=torch.bool)
        for b in range(store.batch):
            slots = store.kept_heads().slots[b][0] if store.seen else torch.empty(0, dtype=torch.long)
            there[b, slots] = True
        there[:, store.seen :] = True
        out = store.attend(q, k, v, scale=SCALE)[0]
        yield out, definition(q, K, V, there)[0]


def error(got, want):
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("key, bound", [("raw", 1e-6), ("int8", 5e-3), ("fp8_e4m3", 5e-3), ("int4", 2e-2)])
@pytest.mark.parametrize("Dk, Dv", DIMS)
def test_attends_to_what_it_holds(Dk, Dv, key, bound):
    store = layer(Dk, Dv, key, batch=2)
    for out, want in run(store, [40, 1, 7, 30, 1]):
        assert out.shape == want.shape and error(out, want) < bound
    q = data(store, 3, 9)[0]
    want, paid = definition(q, *store.dense(), torch.ones(2, store.seen, dtype=torch.bool))
    out, _, accumulated = store.attend(q, scale=SCALE, return_attention=True)
    assert error(out, want) < bound and error(accumulated[:, 0], paid) < max(bound, 1e-5)


@pytest.mark.parametrize("key, bound", [("int8", 5e-3), ("int4", 2e-2)])
@pytest.mark.parametrize("more", [0, 1])
def test_runs_of_sealed_pages(key, bound, more):
    """64 pages are several runs with all sums in the space of the codes; a raw page puts the last run in another
    space."""
    store = layer(64, 16, key, batch=2, sinks=0)
    store.append(*data(store, 1024, 1)[1:])
    if more:
        store.append(*data(store, more, 2)[1:])
    q = data(store, 1, 9)[0]
    want = definition(q, *store.dense(), torch.ones(2, store.seen, dtype=torch.bool))[0]
    assert error(store.attend(q, scale=SCALE)[0], want) < bound


@pytest.mark.parametrize("Dk, Dv", DIMS)
def test_other_pages_hold_the_same_bytes_a_token(Dk, Dv):
    """A latent is stored once: as many bytes as K and V of these dims."""
    one, other = layer(Dk, Dv), PagedKV(1, Dk, key="int8", value_dim=Dv, page_size=16)
    _, k, v = data(one, 200, 1)
    one.append(k, v)
    other.append(k, v)
    assert one.stats()["bytes"] == other.stats()["bytes"]


@pytest.mark.parametrize("key, value, most", [
    ("raw", "raw", 1.02), ("int8", "int8", 0.52), ("int4", "int8", 0.32), ("int8", "raw", 0.57), ("int4", "raw", 0.37),
])  # fmt: skip
def test_bytes_at_16k_tokens(key, value, most):
    """Size of DeepSeek-V3's latents, all included, compared with 1,152 B: 576 elements of 2 bytes."""
    store, tokens = layer(512, 64, key, value=value, page_size=64, dtype=torch.bfloat16), 16_384
    block = torch.randn(1, 1, 2048, 576, generator=torch.manual_seed(0)).bfloat16()
    for _ in range(tokens // 2048):
        store.append(block[..., :512], block[..., 512:])
    assert store.seen == tokens and store.stats()["bytes"] / tokens / 1152 <= most


POLICIES = {
    "window": lambda: StreamingLLM(sinks=4, window=28), "h2o": lambda: H2O(32), "snapkv": lambda: SnapKV(32, window=8),
    "tova": lambda: TOVA(32), "keydiff": lambda: KeyDiff(32), "knorm": lambda: KNorm(32),
    "adakv": lambda: AdaKV(SnapKV(32, window=8)), "watch": lambda: Watch(TOVA(32)),
    "demote": lambda: Demote(TOVA(32), ["int8", "int4"]),
}  # fmt: skip


@pytest.mark.parametrize("Dk, Dv", DIMS[:2])
@pytest.mark.parametrize("name", POLICIES)
def test_policies_evict_and_attention_is_over_what_stays(name, Dk, Dv):
    store = layer(Dk, Dv, policy=POLICIES[name](), batch=2)
    for i, (out, want) in enumerate(run(store, [50, 1, 30, *[1] * 20])):
        assert error(out, want) < 2e-2, i
    assert store.stats()["kept"] < 2 * 60
    store = store.clone()
    for out, want in run(store, [1, 1], seed=70):
        assert error(out, want) < 2e-2


def test_tova_keeps_what_the_last_query_attends_to():
    """Both parts of a key count: the policy's choice compared with one computed here."""
    store = layer(72, 24, "raw", policy=TOVA(32, sinks=0, slack=1), sinks=0, page_size=16)
    q, k, v = data(store, 60, 3)
    store.attend(q, k, v, scale=SCALE)
    paid = definition(q[:, :, -1:], k, v, torch.ones(1, 60, dtype=torch.bool))[1][0]
    want = torch.cat([paid[:-1].topk(31).indices, torch.tensor([59])]) if paid[-1] < paid.topk(32).values[-1] else None
    want = paid.topk(32).indices if want is None else want
    assert set(store.kept()[0][0].tolist()) == set(want.tolist())


def test_norms_are_of_both_parts_of_a_key():
    store = layer(72, 24, "raw", policy=KNorm(32, sinks=0, slack=1), sinks=0, page_size=16)
    q, k, v = data(store, 60, 4)
    store.attend(q, k, v, scale=SCALE)
    norms = torch.cat([k, v], -1)[0, 0].norm(dim=-1)
    assert set(store.kept()[0][0].tolist()) == set(norms.topk(32, largest=False).indices.tolist())


@pytest.mark.parametrize("policy, why", [
    (StreamingLLM(positions="cache"), "rotates keys"),
    (ExpectedAttention(64), "before RoPE"),
    (AdaKV(ExpectedAttention(64)), "before RoPE"),
    (CriticalKV(SnapKV(64)), "values of all heads"),
])  # fmt: skip
def test_policies_that_need_other_keys_are_refused(policy, why):
    rope = torch.ones(32, dtype=torch.float64)
    with pytest.raises(ValueError, match=rf"latent attention \(MLA\), got .*{why}"):
        layer(policy=policy, rope=rope)


@pytest.mark.parametrize("heads, Dk, Dv", [(1, 16, 64), (2, 64, 16)])
def test_shapes_that_are_no_latents(heads, Dk, Dv):
    with pytest.raises(ValueError, match=f"latent: .* got {heads} heads, head_dim {Dk}, value_dim {Dv}"):
        PagedKV(heads, Dk, value_dim=Dv, latent=True)


@pytest.mark.parametrize("latent, wrong", [(True, 64), (False, 80)])
def test_queries_of_the_other_kind_are_refused_and_nothing_is_stored(latent, wrong):
    store = PagedKV(1, 64, value_dim=16, latent=latent)
    q, k, v = torch.zeros(1, 4, 2, wrong), torch.zeros(1, 1, 2, 64), torch.zeros(1, 1, 2, 16)
    with pytest.raises(ValueError, match=rf"q: expected .* {144 - wrong}, got \[1, 4, 2, {wrong}\]"):
        store.attend(q, k, v)
    assert store.seen == 0
