"""Properties of formats over random shapes, strides and magnitudes. KVCOMPRESS_SOAK=n: n examples of each."""

import os
from itertools import pairwise

import levels
import numpy as np
import torch
from codec_reference import CODE, QUANTIZED, SPEC, F, extreme_rows, page_fields
from granular_reference import SCHEMES, dims_of, pairs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcompress import _C, PagedKV, quantize

SOAK = os.environ.get("KVCOMPRESS_SOAK")
examples = settings(
    max_examples=int(SOAK or "40"), deadline=None, derandomize=SOAK is None, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
MOVABLE = [name for name in QUANTIZED if SPEC[name][3] == "token"]
seeds = st.integers(0, 2**32 - 1)


@st.composite
def tensors(draw, least=1, multiple=32, largest=6e4):
    """fp32 [B, H, T, D] with random strides, and rows of every magnitude up to `largest`, zeros, constants,
    denormals."""
    B, H, T = (draw(st.integers(least, n)) for n in (2, 3, 9))
    D = multiple * draw(st.integers(1, 3))
    order, step = draw(st.permutations([0, 1, 2])), draw(st.integers(1, 2))
    shape = [(B, H, T)[i] * step for i in order]
    x = extreme_rows(np.random.default_rng(draw(seeds)), int(np.prod(shape)), D)
    x = np.clip(x, -largest, largest).reshape(*shape, D)[::step, ::step, ::step]
    return x.transpose(*np.argsort(order), 3)


@examples
@given(tensors(), st.sampled_from(pairs()))
def test_round_trip_is_within_half_a_step(x, pair):
    """Half a step of the stored scale; values beyond its range are clipped."""
    scheme, granularity = pair
    bits, coding, _ = SCHEMES[scheme]
    q = quantize(torch.from_numpy(x), scheme, granularity)
    y = q.dequantize().double().numpy()
    stored = q.scales.numpy()
    if coding == "e2m1":
        stored = q.scales.view(torch.float8_e4m3fn).double().numpy() if scheme == "nvfp4" else 2.0 ** (stored - 127.0)
    n = dims_of(granularity, x.shape[3])

    def wide(part):
        return np.broadcast_to(np.repeat(part.astype(np.float64), n, 3), x.shape)

    step, zero = wide(stored), 0.0 if q.zeros is None else wide(q.zeros.numpy())
    top = {"int": 2 ** (bits - 1) - 1, "uint": 2**bits - 1, "e4m3": 448, "e5m2": 57344, "e2m1": 6}[coding]
    clipped = np.clip(x - zero, 0 if coding == "uint" else -top * step, top * step)
    least, digits, gap = {"e4m3": (2.0**-6, 3, 0), "e5m2": (2.0**-14, 2, 0), "e2m1": (1, 1, 0)}.get(coding, (0, 0, 1))
    if digits:  # distance between levels at each magnitude
        magnitude = np.maximum(np.abs(clipped), least * step)
        gap = 2.0 ** (np.floor(np.log2(magnitude / np.where(step > 0, step, 1), where=magnitude > 0,
                                       out=np.zeros_like(magnitude)) + 1e-6) - digits)  # fmt: skip
    bound = gap / 2 * step * (1 + 1e-5) + 1e-6 * np.abs(zero) + 1e-6 * np.abs(clipped)
    assert (np.abs(y - zero - clipped) <= bound).all()
    if q.grain.scheme.startswith("fp8") or coding == "int":
        assert (step * top >= np.abs(x) * (1 - 2.0**-10))[
            step > 2.0**-14
        ].all()  # clipped only because the scale was rounded


@examples
@given(tensors(), st.sampled_from(["int4", "int2"]))
def test_rotated_rows_lose_no_more_than_they_hold(x, name):
    """The gain is a least-squares fit: the residual is never longer than the row."""
    y = quantize(torch.from_numpy(x), name).dequantize().double().numpy()
    error, norm = (np.sqrt((z.astype(np.float64) ** 2).sum(-1)) for z in (y - x, x))
    assert (error <= norm * (1 + 2.0**-10) + 2.0**-24 * 16 * np.sqrt(x.shape[3])).all()


@examples
@given(tensors(), st.sampled_from(QUANTIZED), st.sampled_from(QUANTIZED), st.sampled_from([16, 32]))
def test_strides_do_not_change_pages(x, key, value, size):
    x = np.resize(x, (*x.shape[:2], size, x.shape[3])) if x.shape[2] < size else x
    plain = np.ascontiguousarray(x)
    assert packed(x, key, value, size) == _C.pack(plain, plain, CODE[key], CODE[value], size).tobytes()


def packed(x, key, value, size):
    """Pages of x on this process's level, from strided memory."""
    strided = np.empty((x.shape[2], x.shape[1], x.shape[0], x.shape[3] + 5), F).transpose(2, 1, 0, 3)[..., :-5]
    strided[...] = x
    return _C.pack(strided, strided, CODE[key], CODE[value], size).tobytes()


@examples
@given(tensors(), st.sampled_from(QUANTIZED), st.sampled_from(QUANTIZED), st.sampled_from([16, 32]))
def test_levels_write_the_same_pages(x, key, value, size):
    x = np.resize(x, (*x.shape[:2], size, x.shape[3]))
    assert set(levels.on_each(packed, x, key, value, size).values()) == {packed(x, key, value, size)}


@examples
@given(seeds, st.sampled_from(QUANTIZED), st.sampled_from([16, 32]))
def test_permuting_tokens_permutes_codes(seed, name, size):
    """For K in movable formats and all V: a token's code and metadata do not depend on other tokens."""
    rng = np.random.default_rng(seed)
    x = extreme_rows(rng, size, 32)
    order = rng.permutation(size)
    fields = [page_fields(_C.pack(rows[None, None], rows[None, None], CODE[name], CODE[name], size)[0, 0, 0].copy(),
                          name, name, (32, 32), size) for rows in (x, np.ascontiguousarray(x[order]))]  # fmt: skip
    for side in (0, 1) if name in MOVABLE else (1,):
        np.testing.assert_array_equal(fields[1][side], fields[0][side][order])
        before, after = (f[side + 2].view(np.uint8 if SPEC[name][1] == "e2m1" else np.float16) for f in fields)
        np.testing.assert_array_equal(after.reshape(-1, size), before.reshape(-1, size)[:, order])


# ------------------------------------------------------------------ a layer's pages over time


def sealed(kv: PagedKV) -> dict[int, bytes]:
    """Bytes of every sealed page group in the table, by entry."""
    arena, entries, _, _ = kv.page_store.views()
    found = {}
    for entry in entries.flatten().tolist():
        if entry >= 0 and entry >> 8 & 255 == CODE[kv.key]:
            size = kv.num_kv_heads * _C.page_bytes(entry >> 8 & 255, entry & 255, 32, 32, kv.page_size)
            at = (entry >> 16) * 64
            found[entry] = arena[at : at + size].numpy().tobytes()
    return found


def tokens(rng: np.random.Generator, n: int) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal((1, 2, n, 32)).astype(F))


layers = {"key": st.sampled_from(QUANTIZED), "value": st.sampled_from(QUANTIZED), "sinks": st.integers(0, 5)}


@examples
@given(seeds, st.lists(st.integers(1, 40), min_size=2, max_size=8), st.fixed_dictionaries(layers))
def test_sealed_pages_never_change(seed, lengths, options):
    rng = np.random.default_rng(seed)
    kv = PagedKV(2, 32, page_size=16, **options)
    before: dict[int, bytes] = {}
    for n in lengths:
        kv.append(tokens(rng, n), tokens(rng, n))
        now = sealed(kv)
        assert all(now[entry] == page for entry, page in before.items())
        before = now
    assert sum(lengths) < 40 + options["sinks"] or before


@examples
@given(seeds, st.integers(1, 70), st.data(), st.fixed_dictionaries(layers))
def test_crop_inside_the_open_page_is_as_if_never_appended(seed, n, data, options):
    rng = np.random.default_rng(seed)
    k, v, k_more, v_more = tokens(rng, n), tokens(rng, n), tokens(rng, 50), tokens(rng, 50)
    room = 16 - max(0, n - options["sinks"]) % 16
    draft = data.draw(st.integers(1, room), "draft")
    stays, never = (PagedKV(2, 32, page_size=16, **options) for _ in "ab")
    for kv in (stays, never):
        kv.append(k, v)
    stays.append(tokens(rng, draft), tokens(rng, draft))
    stays.crop(n)
    cuts = sorted({0, data.draw(st.integers(1, 50), "cut"), 50})
    for a, b in pairwise(cuts):
        for kv in (stays, never):
            kv.append(k_more[:, :, a:b], v_more[:, :, a:b])
    assert all(map(torch.equal, stays.dense(), never.dense()))
    assert sorted(sealed(stays).values()) == sorted(sealed(never).values())


def small_queries(small):
    """Formats whose attention, for queries of this size, differs from that of equal scores; for 64 rows, too."""
    wrong, g = [], torch.Generator().manual_seed(5)
    k, v = torch.randn(2, 1, 1, 128, 64, generator=g)
    for key in (*QUANTIZED, "raw"):
        layer = PagedKV(1, 64, key=key, sinks=0)
        layer.append(k, v)
        for q in torch.randn(1, 4, 1, 64, generator=g), torch.randn(1, 4, 64, 64, generator=g):
            out, lse = layer.attend(q * small)
            count = torch.arange(129 - q.shape[2], 129)
            mean = (layer.dense()[1].cumsum(2)[:, :, -q.shape[2] :] / count[:, None]).expand_as(out)
            if not ((out - mean).abs().max() < 2e-2 and (lse - count.log()).abs().max() < 1e-4):
                wrong.append((key, q.shape[2]))
    return wrong


def test_queries_too_small_for_steps_see_all_alike():
    """1 / step of such a row overflows; multiplied by 0 it gave NaN where zero points are summed in units of the
    step."""
    for small in (1e-25, 1e-36, 1e-40):
        assert levels.on_each(small_queries, small) == {isa: [] for isa in _C.isa_available()}
