"""The torch ops on plain tensors: tracing, errors, and torch's own checks of ops."""

import math
import os
import shutil
import subprocess
import sys

import pytest
import torch
from test_varlen import Engine
from torch.library import opcheck

from kvcompress import _C, formats, ops, schemes

NONE = torch.empty(0)
ONE = torch.tensor(1)
NO_SEALS = torch.empty(0, 2, dtype=torch.int64)
INT8 = formats.resolve("int8", torch.float32)
RAW = formats.resolve("raw", torch.float32)


@pytest.fixture(autouse=True)
def no_handle_stays():
    yield
    assert _C.handles_live() == 0


def paged(B=1, H=2, P=2, D=32, key=INT8, value=INT8):
    """Arguments of attend: P sealed pages per row, followed by one open raw page; handmade tables."""
    k, v = torch.randn(B, H, 64 * P, D), torch.randn(B, H, 64 * P, D)
    pages = ops.pack(k, v, key, value, 64)
    size, open_size = pages.shape[3], formats.page_bytes(RAW, RAW, D)
    arena = torch.cat([pages.flatten(), torch.zeros(B * H * open_size, dtype=torch.uint8)])
    table = torch.full((B, 1, P + 2), -1)
    for b in range(B):
        for p in range(P):
            table[b, 0, 1 + p] = (((b * P + p) * H * size // 64) << 16) | (key << 8) | value
        table[b, 0, 1 + P] = (((B * P * H * size + b * H * open_size) // 64) << 16) | (RAW << 8) | RAW
    return arena, table, torch.tensor([[[64 * P, 0]]] * B)


def attend_args(T=1, **shape):
    arena, table, rows = paged(**shape)
    B, D, H = table.shape[0], shape.get("D", 32), shape.get("H", 2)
    q, k, v = torch.randn(B, 2 * H, T, D), torch.randn(B, H, T, D), torch.randn(B, H, T, D)
    return [q, k, v, arena, table, rows, NONE.int(), NONE.bool(), NONE, NO_SEALS, int(rows[0, 0, 0]), 64, 0, 0,
            1 / math.sqrt(D), 0.0]  # fmt: skip


def attention_args(width=131, **shape):
    args = attend_args(**shape)
    args[8] = ops.attend(*args)[1] + 0.5  # as if there were more tokens elsewhere
    return *args, width


def step_args(**shape):
    args = attend_args(**shape)
    args[9], args[10] = torch.full((3, 2), -1), torch.tensor([args[10]])
    return *args, 0, 0, torch.zeros(8, dtype=torch.int32)


ASYM = schemes.grain("int4_asym", "channel").codes


def varlen() -> tuple:
    engine = Engine("int8")
    engine.open(), engine.open()
    return tuple(engine.arguments([70, 3]).values())


def stored() -> tuple:
    cache = torch.zeros(4, formats.page_geometry("int8", 2, 32, dtype=torch.float32).page_bytes, dtype=torch.uint8)
    k, v = torch.randn(5, 2, 32), torch.randn(5, 2, 32)
    return k, v, cache, torch.arange(62, 67), torch.empty(0, dtype=torch.int32), INT8 << 8 | INT8, 64, 64


CALLS = {
    "attend_varlen": varlen,
    "store_tokens": stored,
    "quantize": lambda: (torch.randn(3, 5, 32), INT8),
    "dequantize": lambda: (*ops.quantize(torch.randn(3, 32), "int4"), formats.CODES["int4"]),
    "pack": lambda: (torch.randn(1, 2, 64, 32), torch.randn(1, 2, 64, 32), INT8, formats.CODES["int4"], 64),
    "quantize_by": lambda: (torch.randn(2, 3, 5, 32).transpose(1, 2), NONE, NONE, NONE, *ASYM),
    "dequantize_by": lambda: (*ops.quantize_by(torch.randn(2, 3, 5, 32), NONE, NONE, NONE, *ASYM), NONE, *ASYM),
    "pack_codes": lambda: (
        *[torch.randint(0, 256, (1, 2, 64, 32), dtype=torch.uint8)] * 2,
        *[torch.rand(1, 2, 64).half()] * 2,
        INT8,
        INT8,
        32,
    ),
    "select": lambda: (
        torch.randn(2, 3, 9),
        torch.arange(9).int().expand(2, 3, 9).contiguous(),
        NONE.bool(),
        torch.full((2, 3), 4),
    ),
    "share": lambda: (
        torch.randn(2, 3, 9),
        torch.arange(9).int().expand(2, 3, 9).contiguous(),
        NONE.bool(),
        torch.full((2,), 11),
        torch.ones(2, dtype=torch.int64),
    ),
    "score_tokens": lambda: (*paged(), NONE.int(), 2, 32, 32, 128, 64, 0, 2),
    "compact": lambda: (
        paged()[0],
        torch.tensor([[0, INT8 << 8 | INT8, 3, INT8 << 8 | INT8, 5, 64]]),
        2,
        1,
        32,
        32,
        64,
        0,
    ),
    "map_heads": lambda: (torch.randn(2, 5, 6, 40).transpose(1, 2), torch.randn(3, 40, 40), NONE.half()),
    "read": lambda: (NONE, *paged(), NONE.int(), 2, 32, 32, 128, 64, 0),
    "attend_feedback": lambda: (*attend_args(T=3, B=2), 0, 0, torch.rand(2, 33, 32), NONE),
    "attend": lambda: tuple(attend_args(T=3, B=2)),
    "attend_step": lambda: step_args(T=3, B=2),
    "accumulate_attention": lambda: attention_args(T=3, B=2),
}


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name):
    result = opcheck(getattr(torch.ops.kvcompress, name).default, CALLS[name]())
    assert set(result.values()) == {"SUCCESS"} and len(result) == 4


@pytest.mark.parametrize("name", CALLS)
def test_a_tensor_without_memory_is_refused(name):
    """On the meta device, mixed with others: torch then calls the op's fake implementation."""
    for i, x in enumerate(args := CALLS[name]()):
        others = sum(isinstance(y, torch.Tensor) for y in args) > 1
        if isinstance(x, torch.Tensor) and others:
            call = [*args[:i], x.to("meta"), *args[i + 1 :]]
            with pytest.raises(ValueError, match=r"expected all tensors on one device, got \['cpu', 'meta'\]"):
                getattr(torch.ops.kvcompress, name)(*call)


def test_attend_step_is_attend():
    args = attend_args(T=3, B=2)
    step = [x.clone() if isinstance(x, torch.Tensor) else x for x in (*args, 0, 0, torch.zeros(8, dtype=torch.int32))]
    step[9], step[10] = torch.full((2, 2), -1), torch.tensor([args[10]])
    for a, b in zip(ops.attend(*args), ops.attend_step(*step), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(args[3], step[3])
    for bad, text in ((torch.tensor([1, 2]), "expected 1 in dimension 0"), (torch.tensor(3), "expected 1 dimensions")):
        with pytest.raises(ValueError, match=text):
            ops.attend_step(*step[:10], bad, *step[11:])
    with pytest.raises(TypeError, match="seen: expected int64"):
        ops.attend_step(*step[:10], torch.tensor([1.0]), *step[11:])
    with pytest.raises(ValueError, match="seals"):
        ops.attend_step(*step[:9], torch.tensor([[-1, -1], [1 << 60, 3]]), *step[10:])
    with pytest.raises(TypeError, match="counters: expected int32"):
        ops.attend_step(*step[:-1], torch.zeros(8))


def decode(q, k, v, arena, table, rows):
    codes, scales = torch.ops.kvcompress.quantize(k, INT8)
    k = torch.ops.kvcompress.dequantize(codes, scales, INT8)
    out, lse, _ = torch.ops.kvcompress.attend(
        q * 1.0, k, v, arena, table, rows, NONE.int(), NONE.bool(), NONE, NO_SEALS, 128, 64, 0, 0, 0.17, 0.0
    )
    return out + 0.0, lse


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=[
    pytest.mark.full, pytest.mark.skipif(not shutil.which("g++"), reason="inductor on CPU needs g++")])])  # fmt: skip
def test_compiles_to_one_graph(backend):
    args = attend_args()[:6]
    written, compiled_args = args[3].clone(), [x.clone() for x in args]
    want = decode(*args)
    got = torch.compile(decode, fullgraph=True, backend=backend)(*compiled_args)
    assert torch.allclose(got[0], want[0], atol=1e-6) and torch.allclose(got[1], want[1], atol=1e-6)
    assert torch.equal(compiled_args[3], args[3]) and not torch.equal(args[3], written)


def test_quantize_round_trip_bounds():
    x = torch.randn(50, 128) * torch.logspace(-3, 3, 50)[:, None]
    for name, relative in (("int8", 0.5 / 127), ("fp8_e4m3", 1 / 16)):
        error = (ops.dequantize(*ops.quantize(x, name), name) - x).abs()
        assert torch.all(error <= x.abs().amax(1, keepdim=True) * relative * 1.01)


def test_merge_states_joins_two_halves():
    q, k, v = (
        torch.randn(1, 2, 3, 16).double(),
        torch.randn(1, 2, 10, 16).double(),
        torch.randn(1, 2, 10, 16).double(),
    )

    def part(k, v):
        s = q @ k.transpose(2, 3)
        return torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)

    out, lse = ops.merge_states(*part(k[:, :, :4], v[:, :, :4]), *part(k[:, :, 4:], v[:, :, 4:]))
    want, want_lse = part(k, v)
    assert torch.allclose(out, want) and torch.allclose(lse, want_lse)
    nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    assert all(torch.equal(a, b) for a, b in zip(ops.merge_states(*nothing, *nothing), nothing, strict=True))
    assert torch.allclose(ops.merge_states(out, lse, *nothing)[0], want)


def change(**by_name):
    names = ["q", "k", "v", "arena", "table", "rows", "slots", "mask", "s_aux", "seals", "seen", "page_size", "sinks",
             "window", "scale", "softcap"]  # fmt: skip
    args = attend_args()
    for name, f in by_name.items():
        i = names.index(name)
        args[i] = f(args[i])
    return args


BAD = {
    "q dtype": (TypeError, "q: expected float32", {"q": lambda x: x.double()}),
    "k int": (TypeError, "k: expected float32", {"k": lambda x: x.int()}),
    "k and v dtype": (TypeError, "one dtype", {"v": lambda x: x.half()}),
    "not the page's dtype": (TypeError, "raw page", {"k": lambda x: x.half(), "v": lambda x: x.half()}),
    "q rank": (ValueError, "4 dimensions", {"q": lambda x: x[0]}),
    "heads": (ValueError, "multiple of 2 KV heads", {"q": lambda x: x[:, :3]}),
    "head dim of q": (ValueError, "head dim of k", {"q": lambda x: x[..., :16].contiguous()}),
    "head dim": (ValueError, "head dim", {n: (lambda x: x[..., :20].contiguous()) for n in "qkv"}),
    "batch": (ValueError, "sequences", {"k": lambda x: x.repeat(2, 1, 1, 1)}),
    "last dim": (ValueError, "stride", {"k": lambda x: x.repeat(1, 1, 1, 2)[..., ::2]}),
    "NaN": (ValueError, "NaN or Inf at sequence 0, head 1, token 0", {"k": lambda x: x.index_fill(1, ONE, math.nan)}),
    "Inf": (ValueError, "v: expected finite", {"v": lambda x: x * math.inf}),
    "arena dtype": (TypeError, "arena: expected uint8", {"arena": lambda x: x.int()}),
    "table rank": (ValueError, "table: expected 3", {"table": lambda x: x[0]}),
    "rows": (ValueError, "rows: expected", {"rows": lambda x: x.repeat(1, 2, 1)}),
    "rows strides": (ValueError, "contiguous", {"rows": lambda x: x.repeat(1, 1, 2)[..., ::2]}),
    "mask": (ValueError, "mask: expected 1", {"mask": lambda x: torch.ones(1, 5, dtype=torch.bool)}),
    "mask dtype": (TypeError, "mask: expected bool", {"mask": lambda x: torch.ones(1, 1)}),
    "s_aux": (ValueError, "query heads", {"s_aux": lambda x: torch.ones(3)}),
    "seals": (ValueError, "seals", {"seals": lambda x: torch.tensor([[0, 0, 0]])}),
    "a seal that is none": (ValueError, "raw page", {"seals": lambda x: torch.tensor([[INT8 << 8, INT8 << 8]])}),
    "page size": (ValueError, "page_size", {"page_size": lambda x: 40}),
    "window": (ValueError, "window", {"window": lambda x: -(1 << 31)}),
    "scale": (ValueError, "attend: scale: expected a finite float32, got nan", {"scale": lambda x: math.nan}),
    "endless scale": (ValueError, "scale: expected a finite float32, got -inf", {"scale": lambda x: -math.inf}),
    "softcap": (ValueError, "softcap of at least 0, got 0 and inf", {"softcap": lambda x: math.inf}),
    "seen beyond all": (ValueError, "2\\^31", {"seen": lambda x: 2**63 - 1}),
    "first slot": (ValueError, "first slot", {"rows": lambda x: x + torch.tensor([0, 2**62])}),
    "seen": (ValueError, "seen|queries", {"seen": lambda x: -5}),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    error, text, changes = BAD[case]
    args = change(**changes)
    # NaN and Inf are found while writing: only the open page, which has no token yet, may have been written.
    kept = formats.page_bytes(RAW, RAW, 32) * -2 if case in ("NaN", "Inf") else None
    before = args[3].clone()
    with pytest.raises(error, match=text):
        ops.attend(*args)
    assert torch.equal(args[3][:kept], before[:kept]), "the arena was written"
    with pytest.raises(RuntimeError, match=f"kvcompress.{error.__name__}: "):
        torch.ops.kvcompress.attend(*args)


@pytest.mark.parametrize("text,change", [
    ("table: expected a page at column 1", lambda a: a[2].fill_(-1)),
    ("table: expected pages inside the arena", lambda a: a.__setitem__(1, a[1][:64])),
    ("rows: expected a length", lambda a: a[3].fill_(10**9)),
    ("rows: expected a first slot", lambda a: a[3][..., 1].fill_(-1)),
    ("page_size: expected", lambda a: a.__setitem__(9, 40)),
    ("expected heads", lambda a: a.__setitem__(5, 0)),
])  # fmt: skip
def test_bad_reads_say_read(text, change):
    args = list(CALLS["read"]())
    change(args)
    with pytest.raises(ValueError, match=f"^read: {text}"):
        ops.read(*args)


def test_an_unknown_level_is_an_error_in_every_op():
    """Also when handmade int4 pages are read."""
    code = """
import torch
from kvcompress import formats, ops
none, x = torch.empty(0), torch.zeros(1, 1, 64, 32)
int4 = formats.CODES["int4"]
pages = torch.zeros(formats.page_bytes(int4, int4, 32), dtype=torch.uint8)
store = pages, torch.tensor([[[-1, int4 << 8 | int4]]]), torch.tensor([[[64, 0]]]), none.int()
for call in (
    lambda: ops.read(none, *store, 1, 32, 32, 64, 64, 0),
    lambda: ops.attend(x, x[:, :, :0], x[:, :, :0], *store, none.bool(), none, torch.empty(0, 2, dtype=torch.int64),
                       64, 64, 0, 0, 1.0, 0.0),
    lambda: ops.pack(x, x, int4, int4, 64),
    lambda: ops.quantize(x, "int4"),
    lambda: ops.dequantize(torch.zeros(1, 16, dtype=torch.uint8), torch.ones(1).half(), "int4"),
):
    try:
        call()
    except ValueError as error:
        print(str(error)[:14])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "KVCOMPRESS_ISA": "mmx"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["KVCOMPRESS_ISA"] * 5 + [""]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_finite_numbers_are_read_as_finite_ones(dtype):
    arena, table, rows = paged(key=RAW, value=RAW)
    most = torch.finfo(torch.float32).max
    arena[: 4 * 64].view(torch.float32)[:] = most
    k, v = ops.read(torch.empty(0, dtype=dtype), arena, table, rows, NONE.int(), 2, 32, 32, 128, 64, 0)
    assert k.isfinite().all() and v.isfinite().all() and torch.maximum(k, v).max() == torch.finfo(dtype).max


def test_bad_codec_arguments():
    x = torch.randn(4, 32)
    for call, error, text in (
        (lambda: ops.quantize(x, "int9"), ValueError, "expected one of raw, int8"),
        (lambda: ops.quantize(x, "raw"), ValueError, "quantized"),
        (lambda: ops.quantize(x[:, :20], "int8"), ValueError, "head dim"),
        (lambda: ops.quantize(x.double(), "int8"), TypeError, "float64|another dtype"),
        (lambda: ops.quantize(x[:0], "int8"), ValueError, "at least one"),
        (lambda: ops.quantize(x * math.nan, "int8"), ValueError, "NaN or Inf"),
        (lambda: ops.dequantize(*ops.quantize(x, "int8")[::-1], "int8"), TypeError, "uint8"),
        (lambda: ops.dequantize(ops.quantize(x, "int8")[0], x[:3, 0].half(), "int8"), ValueError, "scales"),
        (lambda: ops.pack(x[None, None], x[None, None], INT8, INT8, 64), ValueError, "page_size"),
        (lambda: ops.pack(x[None, None], x[None, None], 99, INT8, 16), ValueError, "format"),
    ):
        with pytest.raises(error, match=text):
            call()
