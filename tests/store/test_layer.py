"""PagedKV compared with float64 attention over plain tensors."""

import copy
import math

import pytest
import torch
from torch.autograd import forward_ad

from kvcompress import _C, PagedKV

BOUND = {"raw": 1e-5, "int8": 5e-3, "fp8_e4m3": 5e-3, "int4": 2e-2}  # error of the op, given the stored values
# error of the format, relative, for Gaussian values
STORED = {"raw": 1e-6, "int8": 0.01, "fp8_e4m3": 0.04, "int4": 0.12}


def rand(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm())


def eager(q, K, V, scale, real=None, window=0, softcap=0.0, s_aux=None):
    """Causal attention of the last q.shape[2] slots, float64; out, lse."""
    group, T, S = q.shape[1] // K.shape[1], q.shape[2], K.shape[2]
    K, V = (x.double().repeat_interleave(group, 1) for x in (K, V))
    s = torch.einsum("bhqd,bhkd->bhqk", q.double(), K) * scale
    if softcap:
        s = torch.tanh(s / softcap) * softcap
    slot, asks = torch.arange(S), torch.arange(S - T, S)[:, None]
    hidden = slot > asks
    if window:
        hidden = hidden | (slot <= asks - window)
    hidden = hidden[None, None].expand(q.shape[0], 1, T, S)
    if real is not None:
        hidden = hidden | ~real[:, None, None]
    s = s.masked_fill(hidden, -math.inf)
    lse = s.logsumexp(-1)
    total = lse if s_aux is None else torch.logaddexp(lse, s_aux.double()[None, :, None])
    p = (s - total[..., None]).exp().nan_to_num(0.0)
    return torch.einsum("bhqk,bhkd->bhqd", p, V), lse


class Twin:
    """A PagedKV, and plain tensors of the same tokens."""

    def __init__(self, key="raw", B=1, H=2, G=2, D=32, Dv=None, dtype=torch.float32, seed=0, **options):
        options.setdefault("page_size", 16)
        self.kv = PagedKV(H, D, key=key, value_dim=Dv, batch=B, dtype=dtype, **options)
        self.shape, self.Dv, self.dtype, self.seed = (B, H, G, D), Dv or D, dtype, seed
        self.K, self.V = rand(B, H, 0, D, seed=0, dtype=dtype), rand(B, H, 0, self.Dv, seed=0, dtype=dtype)
        self.real = torch.zeros(B, 0, dtype=torch.bool)

    def new(self, T):
        B, H, G, D = self.shape
        self.seed += 3
        return (
            rand(B, H * G, T, D, seed=self.seed, dtype=self.dtype),
            rand(B, H, T, D, seed=self.seed + 1, dtype=self.dtype),
            rand(B, H, T, self.Dv, seed=self.seed + 2, dtype=self.dtype),
        )

    def keep(self, k, v, mask=None):
        B, _, T, _ = k.shape
        self.K, self.V = torch.cat([self.K, k], 2), torch.cat([self.V, v], 2)
        self.real = torch.cat([self.real, torch.ones(B, T, dtype=torch.bool) if mask is None else mask], 1)

    def append(self, T, mask=None):
        _, k, v = self.new(T)
        self.kv.append(k, v, mask)
        self.keep(k, v, mask)

    def check(self, T=1, bound=1e-5, mask=None, **options):
        """One attend with T new tokens, compared with attention over what the layer stores (own tokens unrounded)."""
        q, k, v = self.new(T)
        scale = options.pop("scale", None)
        (K0, V0), starts = self.kv.dense(), self.kv.page_store.page_starts()
        out, lse = self.kv.attend(q, k, v, mask=mask, scale=scale, **options)
        self.keep(k, v, mask)
        K, V = (x.clone() for x in self.kv.dense())
        for b, slot in enumerate(starts):  # a page that the call fills is still raw during the call
            K[b, :, slot:-T], V[b, :, slot:-T] = K0[b, :, slot:], V0[b, :, slot:]
        K[:, :, -T:], V[:, :, -T:] = k, v
        want, want_lse = eager(q, K, V, self.shape[3] ** -0.5 if scale is None else scale, self.real, **options)
        assert out.shape == want.shape and out.dtype == q.dtype and lse.dtype == torch.float32
        assert error(out, want) <= bound
        sees = want_lse > -math.inf
        assert torch.equal(lse > -math.inf, sees) and not out[~sees].any()
        assert (lse.double() - want_lse)[sees].abs().max() <= max(20 * bound, 1e-5)

    def check_dense(self, bound=1e-6):
        K, V = self.kv.dense()
        assert K.shape == self.K.shape and V.shape == self.V.shape and K.dtype == self.dtype
        real = self.real[:, None, :, None]
        assert error(K, torch.where(real, self.K, 0.0)) <= bound
        assert error(V, torch.where(real, self.V, 0.0)) <= bound
        assert not K[(~real).expand_as(K)].any()


@pytest.mark.parametrize("key", list(BOUND))
@pytest.mark.parametrize("page_size", [16, 64])
def test_chunks_over_page_borders(key, page_size):
    twin = Twin(key, B=2, G=3, D=64, page_size=page_size)
    for T in (1, 3, page_size, 1, page_size - 1, 5 * page_size + 7, 1, 1, page_size + 1, 2):
        twin.check(T, BOUND[key])
    twin.check_dense(STORED[key])


@pytest.mark.parametrize("options", [
    {"window": 10}, {"window": 100}, {"softcap": 3.0}, {"scale": 0.31},
    {"window": 7, "softcap": 2.0, "scale": 0.5}, {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])},
])  # fmt: skip
@pytest.mark.parametrize("key", ["raw", "int8"])
def test_attention_options(key, options):
    twin = Twin(key)
    for T in (40, 1, 17, 1):
        twin.check(T, BOUND[key], **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("key", list(BOUND))
def test_half_dtypes_and_other_value_dim(key, dtype):
    twin = Twin(key, D=64, Dv=32, dtype=dtype)
    rounding = {torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    for T in (50, 1, 20):
        twin.check(T, BOUND[key] + rounding)
    twin.check_dense(STORED[key] + rounding)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("options", [
    {"key": "int4"}, {"key": "int8", "residual_length": 20}, {"key": "int8", "residual_length": 0},
])  # fmt: skip
def test_append_dense_is_what_attend_sees(options, masked):
    twin = Twin(B=2, **options)
    for T in (30, 1, 50, 3, 17):
        q, k, v = twin.new(T)
        mask = None
        if masked:
            mask = torch.ones(2, T, dtype=torch.bool)
            mask[0, T // 3 : T // 2] = False
        other = twin.kv.clone()
        K, V = other.append_dense(k, v, mask)
        out, _ = twin.kv.attend(q, k, v, mask=mask)
        twin.keep(k, v, mask)
        assert error(out, eager(q, K, V, 32**-0.5, twin.real)[0]) <= 5e-3
        assert all(torch.equal(a, b) for a, b in zip(twin.kv.dense(), other.dense(), strict=True))


def test_append_dense_has_zeros_at_pads():
    kv, mask = PagedKV(2, 32, page_size=16), torch.tensor([[False, True, True]])
    for n in (1, 2):  # empty, then not
        x = rand(1, 2, 3, 32, seed=n)
        pair = kv.append_dense(x, x, mask)
        assert all(torch.equal(a, b) for a, b in zip(pair, kv.dense(), strict=True))


@pytest.mark.parametrize("key", list(BOUND)[1:])
def test_the_largest_fp16_numbers_stay_finite(key):
    twin = Twin(key, D=64, dtype=torch.float16, sinks=0)
    x = torch.where(rand(1, 2, 64, 64, seed=1) > 0, 65504.0, -65504.0).half()
    x[:, :, 1::2] = 65504
    twin.kv.append(x, x)
    assert all(y.isfinite().all() and y.abs().max() == 65504 for y in twin.kv.dense())
    out, _ = twin.kv.attend(x[:, :, :1].repeat(1, 2, 1, 1))
    assert out.isfinite().all()


def test_mixed_formats_pick_their_side():
    twin = Twin("int8", value="raw")
    twin.append(100)
    K, V = twin.kv.dense()
    assert torch.equal(V, twin.V) and not torch.equal(K, twin.K) and error(K, twin.K) < 0.01


def test_queries_alone_attend_to_what_is_stored():
    twin = Twin("int8", B=2)
    twin.append(70)
    q, _, _ = twin.new(5)
    before = twin.kv.stats()
    out, lse = twin.kv.attend(q)
    K, V = twin.kv.dense()
    want, want_lse = eager(q, K, V, 32**-0.5)
    assert error(out, want) <= 5e-3 and (lse - want_lse).abs().max() <= 0.1
    assert twin.kv.stats() == before


@pytest.mark.parametrize("key", list(BOUND))
def test_pads_anywhere(key):
    """Left padding, right padding, a row of padding only, holes: tokens and attention are those of the real slots."""
    twin = Twin(key, B=4)
    mask = torch.ones(4, 40, dtype=torch.bool)
    mask[0, :21] = mask[1, 30:] = mask[2, :] = mask[3, 5:9] = False
    twin.check(40, BOUND[key], mask=mask)
    twin.check(1, BOUND[key])
    twin.check(20, BOUND[key], mask=torch.tensor([[True], [False], [True], [True]]).repeat(1, 20))
    twin.check(1, BOUND[key])
    twin.check_dense(STORED[key])
    slots, positions = twin.kv.kept()
    for row in range(4):
        assert slots[row].tolist() == twin.real[row].nonzero().flatten().tolist()
        assert positions[row].tolist() == (slots[row] - slots[row][0]).tolist()
    assert torch.equal(twin.kv.real(), twin.real)
    assert twin.kv.stats()["kept"] == int(twin.real.sum())


def test_padded_row_equals_the_row_alone():
    """The same tokens with and without padding before them: the same stored bits and attention."""
    twin = Twin("int4", B=2, D=32)
    q, k, v = twin.new(60)
    mask = torch.ones(2, 60, dtype=torch.bool)
    mask[0, :33] = False
    alone = PagedKV(2, 32, key="int4", page_size=16)
    out, _ = twin.kv.attend(q, k, v, mask=mask)
    want, _ = alone.attend(q[:1, :, 33:], k[:1, :, 33:], v[:1, :, 33:])
    assert error(out[:1, :, 33:], want) <= 1e-6
    q, k, v = twin.new(1)
    assert error(twin.kv.attend(q, k, v)[0][:1], alone.attend(q[:1], k[:1], v[:1])[0]) <= 1e-6
    assert torch.equal(twin.kv.dense()[0][:1, :, 33:], alone.dense()[0])


@pytest.mark.parametrize("cut", [0, 1, 3, 4, 5, 20, 36, 37, 60, 68, 77, 80])
@pytest.mark.parametrize("key", ["raw", "int8"])
def test_crop_then_go_on(key, cut):
    twin = Twin(key, B=2)
    mask = torch.ones(2, 50, dtype=torch.bool)
    mask[1, :19] = False
    twin.append(50, mask)
    for _ in range(30):
        twin.append(1)
    before = twin.kv.dense()[0]
    twin.kv.crop(cut)
    assert twin.kv.seen == cut
    assert torch.equal(twin.kv.dense()[0], before[:, :, :cut])
    twin.K, twin.V, twin.real = twin.K[:, :, :cut], twin.V[:, :, :cut], twin.real[:, :cut]
    for T in (1, 1, 20, 1):
        twin.check(T, BOUND[key])
    twin.check_dense(STORED[key])


def test_crop_of_a_rejected_draft_leaves_no_trace():
    """Within the open page a crop is exact: later bytes equal those of a run without the draft."""
    one, two = Twin("int4", seed=1), Twin("int4", seed=1)
    one.append(70)
    two.append(70)
    draft = rand(1, 2, 5, 32, seed=99)
    two.kv.append(draft, draft)
    two.kv.crop(70)
    for _ in range(40):
        one.append(1)
        two.append(1)
    assert all(torch.equal(a, b) for a, b in zip(one.kv.dense(), two.kv.dense(), strict=True))


@pytest.mark.parametrize("key", ["raw", "int4"])
def test_select_shares_pages_and_copies_on_write(key):
    twin = Twin(key, B=3)
    twin.append(37)
    used = twin.kv.page_store.pool.stats()["used"]
    index = torch.tensor([2, 0, 2, 1, 2])
    twin.kv.select(index)
    assert twin.kv.page_store.pool.stats()["used"] == used
    twin.shape = (5, *twin.shape[1:])
    twin.K, twin.V, twin.real = twin.K[index], twin.V[index], twin.real[index]
    for T in (1, 1, 30, 1):
        twin.check(T, BOUND[key])
    twin.check_dense(STORED[key])
    twin.kv.select(torch.tensor([True, False, False, True, False]))
    assert twin.kv.batch == 2
    twin.K, twin.V, twin.real = twin.K[[0, 3]], twin.V[[0, 3]], twin.real[[0, 3]]
    twin.check_dense(STORED[key])


def test_repeat_and_reset():
    twin = Twin("raw", B=2)
    twin.append(20)
    twin.kv.repeat(3)
    assert torch.equal(twin.kv.dense()[0], twin.K.repeat_interleave(3, 0))
    twin.kv.reset()
    assert (twin.kv.batch, twin.kv.seen, twin.kv.stats()["kept"]) == (6, 0, 0)
    twin.kv.reset(batch=1)
    assert twin.kv.batch == 1 and twin.kv.page_store.pool.stats()["used"] == 0
    fresh = Twin("raw", B=1)
    fresh.kv = twin.kv
    for T in (30, 1):
        fresh.check(T)


def test_clones_share_pages_and_part_ways():
    twin = Twin("int8", B=2)
    twin.append(75)
    used = twin.kv.page_store.pool.stats()["used"]
    other = copy.deepcopy(twin.kv)
    assert twin.kv.page_store.pool.stats()["used"] == used
    frozen = [x.clone() for x in twin.kv.dense()]
    more = rand(2, 2, 30, 32, seed=5)
    other.append(more, more)
    other.crop(50)
    assert all(torch.equal(a, b) for a, b in zip(twin.kv.dense(), frozen, strict=True))
    assert torch.equal(other.dense()[0], frozen[0][:, :, :50])
    del other
    assert twin.kv.page_store.pool.stats()["used"] == used
    twin.kv.page_store.pool.check()


@pytest.mark.parametrize("key", ["int8", "fp8_e4m3"])
def test_direct_mode_has_no_open_page(key):
    twin = Twin(key, B=2, residual_length=0)
    for T in (30, 1, 1, 1, 20, 1):
        twin.check(T, BOUND[key])
    assert twin.kv.page_store.parts()["open"] == 0
    twin.check_dense(STORED[key])
    twin.kv.crop(40)
    twin.K, twin.V, twin.real = twin.K[:, :, :40], twin.V[:, :, :40], twin.real[:, :40]
    twin.check(1, BOUND[key])
    with pytest.raises(ValueError, match="8-bit"):
        PagedKV(2, 32, key="int4", residual_length=0)


def test_newest_tokens_and_sinks_stay_raw():
    twin = Twin("int4", sinks=6, residual_length=40)
    twin.append(30)
    for _ in range(100):
        twin.append(1)
    K, _ = twin.kv.dense()
    assert torch.equal(K[:, :, :6], twin.K[:, :, :6]) and torch.equal(K[:, :, -40:], twin.K[:, :, -40:])
    assert not torch.equal(K[:, :, 6:22], twin.K[:, :, 6:22])


def test_stats_count_every_byte():
    kv = PagedKV(2, 64, key="int8", page_size=64, sinks=0, dtype=torch.bfloat16)
    x = rand(1, 2, 64 * 20, 64, seed=1, dtype=torch.bfloat16)
    kv.append(x, x)
    s = kv.stats()
    page = _C.page_bytes(3, 3, 64, 64, 64)
    assert page == 64 * 64 * 2 + 2 * 64 * 2
    assert s["parts"]["sealed"] == 19 * 2 * page and s["parts"]["open"] == 2 * 64 * 64 * 2 * 2
    assert s["parts"]["sinks"] == 0 and s["parts"]["tables"] > 0
    pool = kv.page_store.pool.stats()
    assert s["bytes"] == sum(s["parts"].values()) == pool["resident"] + s["parts"]["tables"]
    assert (s["seen"], s["kept"]) == (1280, 1280) and s["bytes_per_token"] == s["bytes"] / 1280
    assert s["ratio"] == pytest.approx(1280 * 2 * 64 * 2 * 2 / s["bytes"])


def test_repr_says_what_it_is():
    kv = PagedKV(2, 64, key="int8", value="int4", dtype=torch.bfloat16)
    x = rand(1, 2, 10, 64, seed=1, dtype=torch.bfloat16)
    kv.append(x, x)
    text = repr(kv)
    for part in ("PagedKV(2 heads x 64", "key='int8'", "value='int4'", "bfloat16", "batch 1", "seen 10"):
        assert part in text


@pytest.mark.parametrize("key,masked", [("raw", False), ("int8", True), ("int4", False)])
def test_every_failing_allocation_changes_nothing(key, masked):
    """For every n, the n-th allocation of a call fails: MemoryError and unchanged state; then the same result as
    without."""
    twin = Twin(key, B=2)
    twin.append(45)
    other = twin.kv.clone()  # open pages are shared: the call must copy them, and undo that
    q, k, v = twin.new(40)
    mask = None
    if masked:
        mask = torch.ones(2, 40, dtype=torch.bool)
        mask[0, 3:7] = False
    frozen, used = twin.kv.dense(), twin.kv.page_store.pool.stats()["used"]
    failures = 0
    while True:
        _C.alloc_fail_at(failures + 1)
        try:
            out, lse = twin.kv.attend(q, k, v, mask=mask)
            break
        except MemoryError:
            failures += 1
        finally:
            _C.alloc_fail_at(0)
        assert twin.kv.seen == 45 and twin.kv.page_store.pool.stats()["used"] == used
        assert all(torch.equal(a, b) for a, b in zip(twin.kv.dense(), frozen, strict=True))
        twin.kv.page_store.pool.check()
        assert failures < 200
    assert failures >= 5
    want, want_lse = other.attend(q, k, v, mask=mask)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    assert all(torch.equal(a, b) for a, b in zip(twin.kv.dense(), other.dense(), strict=True))


def test_layer_needs_no_transformers():
    import subprocess
    import sys

    code = (
        "import sys, torch; sys.modules['transformers'] = None; import kvcompress;"
        "kv = kvcompress.PagedKV(2, 32); x = torch.ones(1, 2, 5, 32); kv.append(x, x); print(kv.seen)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "5\n"


def test_tensors_that_are_more_than_their_numbers_are_refused():
    """torch.func and forward-mode AD: pages would lose a mapped dim or a tangent."""
    q, k, v = rand(3, 1, 4, 5, 32, seed=1), rand(3, 1, 2, 5, 32, seed=2), rand(3, 1, 2, 5, 32, seed=3)
    for grad in (True, False):
        with (
            torch.set_grad_enabled(grad),
            pytest.raises(ValueError, match=r"k: expected a plain tensor, .* torch.func"),
        ):
            torch.func.vmap(lambda q, k, v: PagedKV(2, 32).attend(q, k, v)[0])(q, k, v)
    q, k, v, kv = q[0], k[0], v[0], PagedKV(2, 32)
    with pytest.raises(ValueError, match=r"q: expected a plain tensor, .* torch.func"):
        torch.func.jvp(lambda q: kv.attend(q, k, v)[0], (q,), (q,))
    with forward_ad.dual_level():
        for name, x in (("q", q), ("k", k), ("v", v)):
            dual = {"q": q, "k": k, "v": v, name: forward_ad.make_dual(x, x)}
            with pytest.raises(ValueError, match=f"{name}: expected a plain tensor, got one with a tangent"):
                kv.attend(**dual)
        assert kv.seen == 0
        kv.attend(q, k, v)
