"""kvcompress.quantize and QuantizedTensor: every scheme and granularity compared with NumPy, sizes, files, errors."""

import math

import numpy as np
import pytest
import torch
from codec_reference import CODE, F, extreme_rows
from granular_reference import SCHEMES, dims_of, pairs, ref_pack, ref_quantize_by

from kvcompress import _C, QuantizedTensor, formats, ops, quantize, schemes
from kvcompress.quantization import metrics

SHAPE = (2, 3, 5, 32)


def sample(seed=0, shape=SHAPE):
    """Rows of every magnitude, which group and channel statistics cover."""
    x = extreme_rows(np.random.default_rng(seed), math.prod(shape[:-1]), shape[-1])
    return x.reshape(shape)


def grain_codes(scheme, granularity, packing="planes"):
    return schemes.grain(scheme, granularity, packing).codes


# ------------------------------------------------------------------ against the reference


def test_the_table_is_the_one_that_was_meant():
    assert tuple(row["name"] for row in schemes.TABLE) == tuple(SCHEMES)
    for row in schemes.TABLE:
        bits, coding, group = SCHEMES[row["name"]]
        assert (row["bits"], row["group"], row["zero_point"]) == (bits, group, coding == "uint")


@pytest.mark.parametrize("scheme,granularity", pairs())
def test_equals_the_formulas(scheme, granularity):
    for x in (sample(), np.random.default_rng(1).standard_normal(SHAPE).astype(F)):
        with np.errstate(all="ignore"):
            codes, scales, zeros, values = ref_quantize_by(x, scheme, granularity)
        got, got_scales, got_zeros = _C.quantize_by(x, *grain_codes(scheme, granularity))
        np.testing.assert_array_equal(got_scales, scales)
        np.testing.assert_array_equal(got, ref_pack(codes, SCHEMES[scheme][0], "planes"))
        assert (got_zeros is None) == (zeros is None)
        back = _C.dequantize_by(got, got_scales, got_zeros, *grain_codes(scheme, granularity))
        if zeros is None:
            np.testing.assert_array_equal(back, values.astype(F))
        else:
            np.testing.assert_array_equal(got_zeros, zeros)
            np.testing.assert_allclose(back, values, rtol=1e-6, atol=1e-6 * np.abs(values).max())
        q = quantize(torch.from_numpy(x), scheme, granularity)
        assert np.array_equal(q.codes.numpy(), got) and np.array_equal(q.scales.numpy(), got_scales)
        assert np.array_equal(q.unpacked().numpy(), codes)
        assert torch.equal(q.dequantize(), torch.from_numpy(back))


@pytest.mark.parametrize("packing", schemes.PACKINGS)
@pytest.mark.parametrize("scheme", [s for s, (bits, _, _) in SCHEMES.items() if bits in (2, 4)])
def test_packings_hold_the_same_codes(scheme, packing):
    granularity = schemes.grain(scheme).label
    x = torch.randn(2, 4, 64)
    plain, q = quantize(x, scheme, granularity), quantize(x, scheme, granularity, packing=packing)
    codes = q.unpacked()
    assert torch.equal(codes, plain.unpacked()) and torch.equal(q.dequantize(), plain.dequantize())
    np.testing.assert_array_equal(q.codes.numpy(), ref_pack(codes.numpy(), q.grain.bits, packing))


PAGES = (("int8", "int8", ""), ("int8_asym", "int8_asym", ""), ("fp8_e4m3", "fp8_e4m3", ""), ("nvfp4", "nvfp4", ""),
         ("fp8_e5m2", "fp8_e5m2", ""), ("int4_token", "int4_sym", ""), ("int4_asym", "int4_asym", ""),
         ("mxfp4", "mxfp4", ""), ("int2_asym", "int2_asym", ""), ("int4_g32", "int4_asym", "group:32"),
         ("kivi4", "int4_asym", ""), ("kivi2", "int2_asym", ""))  # fmt: skip


@pytest.mark.parametrize("page,scheme,granularity", PAGES)
def test_rows_are_those_of_pages(page, scheme, granularity):
    x = sample(3, (1, 2, 150, 64))
    codes, meta = _C.quantize(x.reshape(300, 64), CODE[page])
    q = quantize(torch.from_numpy(x), page)
    assert q.grain == schemes.grain(scheme, granularity or None)
    np.testing.assert_array_equal(q.codes.numpy().reshape(300, -1), codes)
    parts = [p.numpy().reshape(300, -1) for p in (q.scales, q.zeros) if p is not None]
    np.testing.assert_array_equal(np.stack(parts, -1).reshape(meta.shape), meta)
    np.testing.assert_array_equal(q.dequantize().numpy().reshape(300, 64), _C.dequantize(codes, meta, CODE[page]))


@pytest.mark.parametrize("name", schemes.ROTATED)
def test_rotated_formats_go_through_their_op(name):
    x = torch.randn(3, 7, 96)
    q = quantize(x, name)
    codes, scales = ops.quantize(x, name)
    assert torch.equal(q.codes, codes.reshape(1, 3, 7, -1)) and torch.equal(q.scales, scales.reshape(1, 3, 7, 1))
    assert torch.equal(q.dequantize(), ops.dequantize(codes, scales, name))
    assert torch.equal(q.tokens(2, 5).dequantize(), q.dequantize()[:, 2:5])


def test_a_page_of_kivis_keys_is_int4_by_channel():
    """As in docs/ops.md: pages as heads of one sequence."""
    k = torch.randn(1, 2, 128, 32) + 5
    pages = ops.pack(k, k, CODE["kivi4"], CODE["kivi4"], 64)
    q = quantize(k.reshape(1, 4, 64, 32), "int4_asym", "channel")
    size = pages.shape[3]
    table = torch.tensor([[[-1, *((p * 2 * size // 64) << 16 | CODE["kivi4"] << 8 | CODE["kivi4"] for p in (0, 1))]]])
    got, _ = ops.read(torch.empty(0), pages.flatten(), table, torch.tensor([[[128, 0]]]), torch.empty(0).int(),
                      2, 32, 32, 128, 64, 0)  # fmt: skip
    assert torch.equal(got, q.dequantize().reshape(1, 2, 128, 32))


# research figures for Gaussian rows of 128
SNR = (("int8", 43.5, 44.1), ("fp8_e4m3", 31.4, 31.9), ("fp8_e5m2", 25.3, 26.0), ("int4_sym", 18.3, 18.9),
       ("int3_sym", 10.9, 11.5), ("int4_g32", 21.8, 22.4), ("int4", 19.3, 19.9), ("nvfp4", 19, 22))  # fmt: skip


@pytest.mark.parametrize("name,low,high", SNR)
def test_signal_to_noise(name, low, high):
    x = torch.randn(2000, 128)
    assert low <= metrics.error(x, quantize(x, name).dequantize()).snr_db <= high


def test_one_scale_for_more_costs_quality():
    x = torch.randn(1, 8, 1000, 128)
    x[:, :, :, 5] *= 30  # an outlier channel
    others = [d for d in range(128) if d != 5]
    snr = {g: metrics.error(x[..., others], quantize(x, "int4_sym", g).dequantize()[..., others]).snr_db
           for g in ("tensor", "head", "token", "token_head", "group:32", "channel")}  # fmt: skip
    assert sorted(snr, key=snr.__getitem__) == ["tensor", "head", "token", "token_head", "group:32", "channel"]


def test_bytes_and_bits_are_exact():
    x = torch.randn(2, 4, 100, 128)
    rows = {"tensor": 1, "head": 4, "token": 200, "token_head": 800, "channel": 512, "group:16": 6400}
    for scheme, (bits, coding, own) in SCHEMES.items():
        for granularity, n in {f"group:{own}": 2 * 4 * 100 * 128 // own}.items() if own else rows.items():
            q = quantize(x, scheme, granularity)
            want = {"codes": x.numel() * bits // 8, "scales": n * (1 if own else 2)}
            if coding == "uint":
                want["zeros"] = 2 * n
            assert q.parts == want and q.nbytes == sum(want.values())
            assert q.effective_bits == 8 * q.nbytes / x.numel()
            assert q.nbytes == sum(t.numel() * t.element_size() for t in (q.codes, q.scales, q.zeros) if t is not None)
    bits = {name: quantize(x, name).effective_bits for name in ("int8", "int4_asym", "int3_sym", "int4_g32", "nvfp4")}
    assert bits == {"int8": 8.125, "int4_asym": 4.25, "int3_sym": 3.125, "int4_g32": 5.0, "nvfp4": 4.5}


# ------------------------------------------------------------------ arguments


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_shapes_strides_and_dtypes(dtype):
    base = torch.randn(2, 3, 4, 6, 32).to(dtype)
    for x in (base[0, 0, 0, 0], base[0, 0, 0], base[0, 0], base[0], base, base[0].transpose(1, 2), base[0, ..., ::2],
              base.permute(3, 1, 2, 0, 4), base[0, 0, :, :, None].expand(4, 6, 5, 32)):  # fmt: skip
        for scheme, granularity in (("int8", "token"), ("int3_asym", "channel"), ("int4_sym", "head")):
            q = quantize(x, scheme, granularity)
            want = quantize(x.float().contiguous(), scheme, granularity)
            assert torch.equal(q.codes, want.codes) and torch.equal(q.scales, want.scales)
            assert q.shape == x.shape and q.dequantize().dtype == dtype and q.dequantize().shape == x.shape
            full = (1,) * (4 - x.dim()) + tuple(x.shape)
            assert q.codes.shape[:3] == (math.prod(full[:-3]), full[-3], full[-2])


def test_granularity_says_what_shares_a_scale():
    shapes = {"tensor": (1, 1, 1, 1), "head": (1, 3, 1, 1), "token": (2, 1, 5, 1), "token_head": (2, 3, 5, 1),
              "channel": (1, 3, 1, 32), "group:8": (2, 3, 5, 4), "block": (2, 3, 5, 1)}  # fmt: skip
    for granularity, shape in shapes.items():
        q = quantize(torch.randn(SHAPE), "int8_asym", granularity)
        assert q.scales.shape == q.zeros.shape == shape
    assert quantize(torch.randn(SHAPE), "mxfp4", "block").grain == quantize(torch.randn(SHAPE), "mxfp4").grain


def test_given_scales_are_used_as_they_are_stored():
    x = torch.randn(SHAPE)
    for scheme, granularity in pairs():
        q = quantize(x, scheme, granularity)
        if q.grain.block_scale:
            continue
        again = quantize(x, scheme, granularity, scale=q.scales, zero=q.zeros)
        assert torch.equal(again.codes, q.codes) and torch.equal(again.scales, q.scales)
    q = quantize(x, "fp8_e4m3", "tensor", scale=1.0)
    assert torch.equal(q.codes, x.to(torch.float8_e4m3fn).view(torch.uint8))
    assert quantize(x * 1e6, "fp8_e4m3", "tensor", scale=1.0).dequantize().abs().max() == 448
    heads = torch.tensor([0.1, 0.2, 0.3]).reshape(3, 1, 1)
    q = quantize(x, "int8", "head", scale=heads)
    assert torch.equal(q.scales.reshape(3), heads.reshape(3).half())
    want = (x / heads.half().float()).round().clamp(-127, 127) * heads.half().float()
    assert torch.allclose(q.dequantize(), want, atol=1e-6)
    q = quantize(x, "int4_asym", "tensor", scale=0.25, zero=-2)
    assert torch.allclose(q.dequantize(), ((x + 2) / 0.25).round().clamp(0, 15) * 0.25 - 2)
    q = quantize(x, "int8_asym", "tensor", scale=0, zero=1.5)
    assert (q.dequantize() == 1.5).all()
    tiny, huge = (quantize(x, "int8", "tensor", scale=s).scales.item() for s in (1e-30, 1e30))
    assert tiny == 2.0**-24 and huge == 65504
    assert quantize(x, "nvfp4", scale=1.1).scales.unique().tolist() == [0x39]  # 1.125, the nearest e4m3
    assert quantize(x, "mxfp4", scale=0.7).scales.unique().tolist() == [126]  # 0.5, rounded down


def test_the_second_level_of_nvfp4_reaches_small_and_large_tensors():
    x = torch.randn(4, 16, 64)
    for factor in (1.0, 1e-6, 1e-30, 1e6, 1e30):
        y = x * factor
        q = quantize(y, "nvfp4", tensor_scale=True)
        assert q.parts["tensor_scale"] == 4
        assert 20 < metrics.error(y, q.dequantize()).snr_db < 21.5
        codes, scales, _, values = ref_quantize_by(y.numpy()[None], "nvfp4", "group:16", q.tensor_scale.item())
        assert np.array_equal(q.unpacked().numpy(), codes) and np.array_equal(q.scales.numpy(), scales)
        np.testing.assert_allclose(q.dequantize().numpy(), values[0], rtol=1e-6)
    most = torch.full((1, 16), torch.finfo(torch.float32).max)
    assert torch.allclose(quantize(most, "nvfp4", tensor_scale=True).dequantize(), most, rtol=0.1)
    assert (quantize(torch.zeros(1, 16), "nvfp4", tensor_scale=True).dequantize() == 0).all()
    assert torch.equal(quantize(x, "nvfp4", tensor_scale=1.0).codes, quantize(x, "nvfp4").codes)


def test_the_range_of_nvfp4():
    """As docs/ops.md says. Without a tensor scale: that of its e4m3 scales; with one: relative to the largest value."""
    for value, stored in ((2**-11, 0.0), (2**-11 * 1.001, 2**-10), (2688.0, 2688.0), (1e6, 2688.0)):
        x = torch.full((1, 16), value)
        assert (quantize(x, "nvfp4").dequantize() == stored).all()
        assert torch.allclose(quantize(x, "nvfp4", tensor_scale=True).dequantize(), x, rtol=1e-6)
    for unit in (1e-6, 1.0, 1e6):
        x = torch.cat([torch.ones(16), torch.full((16,), 1 / 5.6e6), torch.full((16,), 1 / 5.4e6)])[None] * unit
        kept = quantize(x, "nvfp4", tensor_scale=True).dequantize()[0, ::16] != 0
        assert kept.tolist() == [True, False, True]


BAD = {
    "format": (ValueError, "format: expected one of int8", lambda x: quantize(x, "int9")),
    "granularity": (ValueError, "granularity: expected one of tensor", lambda x: quantize(x, "int8", "row")),
    "group": (ValueError, "granularity: expected one of", lambda x: quantize(x, "int8", "group:0")),
    "not a group": (ValueError, "granularity: expected one of", lambda x: quantize(x, "int8", "token:4")),
    "group that does not divide": (ValueError, "divisor of the last", lambda x: quantize(x, "int8", "group:5")),
    "a block format's own": (ValueError, "nvfp4: expected group:16", lambda x: quantize(x, "nvfp4", "group:32")),
    "a page format's own": (ValueError, "int4_sym takes any", lambda x: quantize(x, "int4_token", "head")),
    "a rotated format's own": (ValueError, "int4: expected token_head.*int4_sym takes any",
                               lambda x: quantize(x, "int4", "tensor")),
    "a rotated format is no scheme": (ValueError, "_C.quantize", lambda x: schemes.grain("int2").codes),
    "packing": (ValueError, "packing: expected one of", lambda x: quantize(x, "int4_sym", packing="big")),
    "packing of 8 bits": (ValueError, "schemes of 4 and 2", lambda x: quantize(x, "int8", packing="low_first")),
    "dtype": (TypeError, "got torch.float64", lambda x: quantize(x.double(), "int8")),
    "not a tensor": (TypeError, "got ndarray", lambda x: quantize(x.numpy(), "int8")),
    "empty": (ValueError, "at least one element", lambda x: quantize(x[:0], "int8")),
    "no dimension": (ValueError, "at least one element", lambda x: quantize(x[0, 0, 0, 0], "int8")),
    "D of 3 bits": (ValueError, "multiple of 8", lambda x: quantize(x[..., :20], "int3_sym")),
    "D of 2 bits": (ValueError, "multiple of 4", lambda x: quantize(x[..., :6], "int2_sym")),
    "NaN": (ValueError, "at sequence 0, head 0, token 0", lambda x: quantize(x * math.nan, "int8", "tensor")),
    "Inf": (ValueError, "NaN or Inf", lambda x: quantize(x * math.inf, "nvfp4", tensor_scale=True)),
    "scale": (ValueError, "broadcasts to \\[1, 3, 1, 1\\]", lambda x: quantize(x, "int8", "head", scale=torch.ones(2))),
    "scale is negative": (ValueError, "scales of at least 0", lambda x: quantize(x, "int8", scale=-1.0)),
    "scale is NaN": (ValueError, "scales of at least 0", lambda x: quantize(x, "int8", scale=math.nan)),
    "zero is Inf": (ValueError, "zero points", lambda x: quantize(x, "int8_asym", scale=1, zero=math.inf)),
    "zero is missing": (ValueError, "scale and zero, got scale alone", lambda x: quantize(x, "int8_asym", scale=1)),
    "scale is missing": (ValueError, "got zero alone", lambda x: quantize(x, "int8_asym", zero=1)),
    "zero of a symmetric one": (ValueError, "expected scale alone", lambda x: quantize(x, "int8", scale=1, zero=1)),
    "scale of a rotated one": (ValueError, "which this format fits itself", lambda x: quantize(x, "int4", scale=1)),
    "second level": (ValueError, "only nvfp4", lambda x: quantize(x, "int8", tensor_scale=True)),
    "second level of 0": (ValueError, "2\\^-100", lambda x: quantize(x, "nvfp4", tensor_scale=0.0)),
    "dequantize to": (TypeError, "dtype: expected", lambda x: quantize(x, "int8").dequantize(torch.int8)),
    "to": (TypeError, "dtype: expected", lambda x: quantize(x, "int8").to(torch.float64)),
    "tokens": (ValueError, "tokens: expected 0 <= start", lambda x: quantize(x, "int8").tokens(2, 9)),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    error, text, call = BAD[case]
    with pytest.raises(error, match=text):
        call(torch.randn(SHAPE))


def test_numpy_errors():
    x = np.ones((1, 1, 4, 16), F)
    codes, scales, _ = _C.quantize_by(x, *grain_codes("int8", "head"))
    for error, text, call in (
        (ValueError, "from 0 to 11, got 12", lambda: _C.quantize_by(x, 12, 0)),
        (ValueError, "granularity code", lambda: _C.quantize_by(x, 0, 6)),
        (ValueError, "B, H, T, D.*got shape .1, 4, 16.", lambda: _C.quantize_by(x[0], 0, 0)),
        (ValueError, "not empty.*got shape .1, 1, 0, 16.", lambda: _C.quantize_by(x[:, :, :0], 0, 0)),
        (ValueError, "strides .*, 8. bytes", lambda: _C.quantize_by(x[..., ::2], 0, 0)),
        (ValueError, "not aligned", lambda: _C.quantize_by(np.zeros(65, "u1")[1:].view(F).reshape(1, 1, 1, 16), 0, 0)),
        (ValueError, "another byte order", lambda: _C.quantize_by(x.astype(">f4"), 0, 0)),
        (ValueError, "C-contiguous array", lambda: _C.quantize(x[..., ::2], formats.CODES["int8"])),
        (TypeError, "float32 or float16", lambda: _C.quantize_by(x.astype(int), 0, 0)),
        (ValueError, "dimension 1", lambda: _C.quantize_by(x, 0, 1, scale=np.ones((1, 2, 1, 1), F))),
        (TypeError, "dtype float32", lambda: _C.quantize_by(x, 0, 1, scale=np.ones((1, 1, 1, 1)))),
        (ValueError, "dimension 2", lambda: _C.dequantize_by(codes, scales, None, 0, 3)),
        (TypeError, "NumPy array", lambda: _C.dequantize_by(codes, scales, None, 1, 1)),
        (ValueError, "whole elements of 3 bits", lambda: _C.dequantize_by(codes[..., :7].copy(), scales, None, 4, 1)),
    ):
        with pytest.raises(error, match=text):
            call()


def test_threads_do_not_matter():
    x = torch.randn(3, 5, 200, 64)
    for scheme, granularity in (("int4_asym", "channel"), ("int3_sym", "head"), ("int8", "token"), ("nvfp4", None)):
        wide = quantize(x, scheme, granularity)
        torch.set_num_threads(1)
        alone = quantize(x, scheme, granularity)
        torch.set_num_threads(2)
        assert torch.equal(wide.codes, alone.codes) and torch.equal(wide.dequantize(), alone.dequantize())


def test_traces_whole():
    def round_trip(x):
        return quantize(x, "int4_asym", "channel").dequantize() + quantize(x, "nvfp4").dequantize()

    x = torch.randn(2, 2, 8, 32)
    assert torch.equal(torch.compile(round_trip, fullgraph=True, backend="aot_eager")(x), round_trip(x))


# ------------------------------------------------------------------ the object


@pytest.mark.parametrize("granularity", ["tensor", "head", "token", "token_head", "channel", "group:8"])
def test_tokens_are_views(granularity):
    x = torch.randn(2, 3, 20, 32)
    q = quantize(x, "int8_asym", granularity)
    part = q.tokens(4, 9)
    assert part.shape == (2, 3, 5, 32) and torch.equal(part.dequantize(), q.dequantize()[:, :, 4:9])
    assert part.codes.untyped_storage().data_ptr() == q.codes.untyped_storage().data_ptr()
    assert torch.equal(part.tokens(1, 2).dequantize(), q.dequantize()[:, :, 5:6])


def test_to_changes_what_dequantize_gives():
    x = torch.randn(4, 32) * 1e30
    q = quantize(x, "int8_asym", scale=65504, zero=0)
    half = q.to(torch.float16)
    assert half.dequantize().dtype == torch.float16 and half.dequantize().max() == 65504  # finite values stay finite
    assert half.to(device="cpu").dtype == half.to("cpu").dtype == torch.float16 and q.dtype == torch.float32
    assert q.dequantize(torch.bfloat16).dtype == torch.bfloat16


def test_repr_says_what_it_is():
    q = quantize(torch.randn(2, 64, dtype=torch.float16), "int4_sym", "group:16", packing="low_first")
    assert (
        repr(q)
        == "QuantizedTensor([2, 64], 'int4_sym', 'group:16', packing='low_first', float16, 80 bytes, 5 bits/element)"
    )


FILES = ({"format": "int8"}, {"format": "int3_asym", "granularity": "channel"}, {"format": "int2"},
         {"format": "nvfp4", "tensor_scale": True},
         {"format": "int4_asym", "granularity": "block", "packing": "high_first"})  # fmt: skip


@pytest.mark.parametrize("options", FILES)
def test_files_hold_all(tmp_path, options):
    q = quantize(torch.randn(2, 3, 4, 5, 64).to(torch.bfloat16), **options)
    for kept in (q, q.tokens(1, 4)):
        kept.save(tmp_path / "q.safetensors")
        back = QuantizedTensor.load(tmp_path / "q.safetensors")
        assert repr(back) == repr(kept) and back.grain == kept.grain and back.parts == kept.parts
        assert torch.equal(back.dequantize(), kept.dequantize())
    assert [p.name for p in tmp_path.iterdir()] == ["q.safetensors"]


def test_files_of_something_else_are_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    path = tmp_path / "q.safetensors"
    q = quantize(torch.randn(2, 64), "int8_asym")
    q.save(path)
    parts, whole = load_file(path), path.read_bytes()
    about = {"kind": "kvcompress.QuantizedTensor", "version": "1", "dtype": "float32", "shape": "[2, 64]",
             "scheme": "int8_asym", "granularity": "token_head", "packing": "planes"}  # fmt: skip
    save_file(parts, path, metadata=about)
    assert torch.equal(QuantizedTensor.load(path).dequantize(), q.dequantize())

    def refused(text):
        with pytest.raises(ValueError, match=f"q.safetensors: expected a file that save.* wrote, got .*{text}"):
            QuantizedTensor.load(path)

    for at in (-1, -6, -100):  # in zeros, scales, codes
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[len(whole) + at + 1 :])
        refused("checksum")
    for cut in (0, 5, 100, len(whole) - 1):
        path.write_bytes(whole[:cut])
        refused("no safetensors file")
    path.write_bytes(b"\x00" * 500)
    refused("no safetensors file")
    save_file(parts, path)
    refused("without a quantized tensor")
    for name, value, text in (
        ("version", "7", "version 7"),
        ("dtype", "int8", "damaged"),
        ("shape", "[2, 65]", "tensors"),
        ("shape", "[]", "damaged"),
        ("shape", "[2", "damaged"),
        ("shape", "[-2, 64]", "damaged"),
        ("scheme", "int9", "damaged"),
        ("granularity", "rows", "damaged"),
        ("granularity", "tensor", "tensors"),
        ("packing", "low_first", "damaged"),
    ):
        save_file(parts, path, metadata={**about, name: value})
        refused(text)
    for changed in (
        {k: v for k, v in parts.items() if k != "zeros"},
        {**parts, "codes": parts["codes"].int()},
        {**parts, "more": parts["zeros"]},
        {**parts, "scales": parts["scales"] * math.nan},
    ):
        save_file({k: v.clone() for k, v in changed.items()}, path, metadata=about)
        refused("tensors|not finite")
    with pytest.raises(OSError):
        QuantizedTensor.load(tmp_path / "nowhere")
    with pytest.raises(OSError):
        q.save(tmp_path / "no" / "where")


def test_dims_share_a_scale_as_the_reference_says():
    for scheme, granularity in pairs():
        g = schemes.grain(scheme, granularity)
        assert g.scale_shape(2, 3, 5, 32)[3] == 32 // dims_of(granularity, 32)
