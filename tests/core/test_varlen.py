"""attend_varlen and store_tokens: an engine's blocks, tables and batches, compared with float64 attention and with
`pack`; and invalid arguments of every kind."""

import math

import pytest
import torch

from kvcompress import _C, PagedKV, formats, ops

NONE = torch.empty(0)
INTS = torch.empty(0, dtype=torch.int32)
IN_PLACE = ("raw", "int8", "fp8_e4m3", "int8/fp8_e5m2")
WHOLE = ("int4", "int8/int4", "int2", "kivi4", "raw/int4")


@pytest.fixture(autouse=True)
def no_handle_stays():
    yield
    assert _C.handles_live() == 0


def reference(q, k, v, *, window=0, softcap=0.0, s_aux=None, scale=None):
    """float64 attention of the last tokens of one sequence: q [n, Hq, D], k and v [T, H, D]."""
    n, heads, dim = q.shape
    total, group = k.shape[0], heads // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    s = torch.einsum("nhd,thd->hnt", q.double(), k) * (scale or 1 / math.sqrt(dim))
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    at, to = torch.arange(total - n, total)[:, None], torch.arange(total)[None]
    sees = (to <= at) & ((to > at - window) if window > 0 else (to >= 0))
    if window < 0:
        sees &= to // -window == at // -window
    s = s.masked_fill(~sees, -math.inf)
    if s_aux is not None:
        s = torch.cat([s, s_aux.double()[:, None, None].expand(heads, n, 1)], -1)
    p = s.softmax(-1)[..., :total]
    return torch.einsum("hnt,thd->nhd", p, v)


class Engine:
    """Sequences in blocks of an engine, allocated in random order; all tokens are remembered."""

    def __init__(self, name, dtype=torch.float32, H=2, G=2, D=32, Dv=None, pages=2, ring=1, blocks=40, window=0,
                 softcap=0.0, sinks=False, page=64):  # fmt: skip
        self.key, self.value = (formats.resolve(n, dtype) for n in (name.split("/") * 2)[:2])
        self.dtype, self.H, self.Hq, self.D, self.Dv, self.page, self.pages = dtype, H, H * G, D, Dv or D, page, pages
        self.shape = formats.page_geometry(name, H, D, dtype=dtype, value_dim=Dv, page_size=page)
        size = pages * self.shape.page_bytes
        room = torch.full((blocks, size + 128), 255, dtype=torch.uint8)
        self.cache = room[:, :size]
        assert self.cache.data_ptr() % 64 == 0
        self.residual = torch.full((blocks, self.shape.residual_bytes), 255, dtype=torch.uint8)
        if not self.shape.residual_bytes:
            self.residual = self.residual.flatten()
        self.sliding, self.blocks = ring, blocks
        self.free, self.free_residual = torch.randperm(blocks).tolist(), torch.randperm(blocks).tolist()
        self.table, self.residual_table = [], []
        self.k, self.v, self.sealed = [], [], []
        self.window, self.softcap = window, softcap
        self.s_aux = torch.randn(self.Hq) if sinks else NONE

    def open(self, columns=8):
        self.table.append([self.free.pop() for _ in range(columns)])
        self.residual_table.append([self.free_residual.pop() for _ in range(self.sliding)])
        self.k.append(torch.empty(0, self.H, self.D, dtype=self.dtype))
        self.v.append(torch.empty(0, self.H, self.Dv, dtype=self.dtype))
        self.sealed.append(0)
        return len(self.table) - 1

    def arguments(self, lengths, drafts=None, k=None, v=None, q=None, spare=0):
        tokens = sum(lengths) + spare
        q = torch.randn(tokens, self.Hq, self.D).to(self.dtype) if q is None else q
        k = torch.randn(tokens, self.H, self.D).to(self.dtype) if k is None else k
        v = torch.randn(tokens, self.H, self.Dv).to(self.dtype) if v is None else v
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        ends = torch.tensor([len(x) + n for x, n in zip(self.k, lengths, strict=False)]).int()
        out = torch.full((tokens, self.Hq, self.Dv), 7.0).to(self.dtype)
        lse = torch.full((self.Hq, tokens), 7.0)
        return {
            "q": q, "k": k, "v": v, "cache": self.cache, "block_table": torch.tensor(self.table).int(),
            "residual": self.residual, "residual_table": torch.tensor(self.residual_table).int(),
            "query_start_loc": starts, "seq_lens": ends,
            "sealed_lens": INTS if drafts is None else torch.tensor(self.sealed).int(),
            "draft_lens": INTS if drafts is None else torch.tensor(drafts).int(), "s_aux": self.s_aux, "out": out,
            "lse": lse, "flags": INTS, "formats": self.key << 8 | self.value, "block_size": self.pages * self.page,
            "residual_size": self.page, "page_size": self.page, "window": self.window, "scale": 1 / math.sqrt(self.D),
            "softcap": self.softcap,
        }  # fmt: skip

    def step(self, lengths, **more):
        a = self.arguments(lengths, **more)
        ops.attend_varlen(*a.values())
        drafts = more.get("drafts") or [0] * len(lengths)
        for b, n in enumerate(lengths):
            at = slice(int(a["query_start_loc"][b]), int(a["query_start_loc"][b + 1]))
            self.k[b], self.v[b] = torch.cat([self.k[b], a["k"][at]]), torch.cat([self.v[b], a["v"][at]])
            if n:
                self.sealed[b] = max(self.sealed[b], (len(self.k[b]) - drafts[b]) // self.page * self.page)
        return a

    def error(self, a):
        """Largest difference from float64 attention over the given tokens, over all sequences."""
        worst = 0.0
        for b in range(len(self.table)):
            at = slice(int(a["query_start_loc"][b]), int(a["query_start_loc"][b + 1]))
            if at.start == at.stop:
                continue
            aux = self.s_aux if self.s_aux.numel() else None
            wanted = reference(a["q"][at], self.k[b], self.v[b], window=self.window, softcap=self.softcap, s_aux=aux)
            worst = max(worst, float((a["out"][at].double() - wanted).abs().max()))
        return worst

    def stored(self, b, p):
        """Bytes of sealed page p of sequence b."""
        at = p % self.pages * self.shape.page_bytes
        return self.cache[self.table[b][p // self.pages]][at : at + self.shape.page_bytes]

    def packed(self, b, p):
        k, v = (x[b][p * self.page : (p + 1) * self.page].transpose(0, 1)[None] for x in (self.k, self.v))
        return ops.pack(k.contiguous(), v.contiguous(), self.key, self.value, self.page).flatten()

    def check_pages(self, sealed=None):
        for b in range(len(self.table)):
            for p in range((self.sealed[b] if sealed is None else sealed[b]) // self.page):
                assert torch.equal(self.stored(b, p), self.packed(b, p)), (b, p)


BATCHES = [[130, 1, 64, 200], [1, 70, 1, 0], [1, 1, 63, 5], [130, 2, 1, 1]]
BOUND = {"raw": 2e-5, "int8": 0.05, "fp8_e4m3": 0.1, "fp8_e5m2": 0.2, "int4": 0.35, "kivi4": 0.35, "int2": 1.2}
EXACT = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize(
    "options", [{}, {"window": 50}, {"window": -96}, {"softcap": 3.0, "sinks": True}, {"Dv": 64, "G": 4}]
)
def test_raw_is_attention_in_float64(dtype, options):
    torch.manual_seed(0)
    engine = Engine("raw", dtype, **options)
    for _ in range(4):
        engine.open()
    for lengths in BATCHES:
        a = engine.step(lengths, spare=3)
        assert engine.error(a) < EXACT[dtype]
        assert (a["out"][sum(lengths) :] == 7).all() and (a["lse"][:, sum(lengths) :] == 7).all()
    engine.check_pages([len(k) // 64 * 64 for k in engine.k])


@pytest.mark.parametrize("name", IN_PLACE + WHOLE)
@pytest.mark.parametrize("pages", [1, 3])
def test_pages_hold_what_pack_makes(name, pages):
    """For any split of the tokens into calls, the bytes of sealed pages are those of `pack`, and results are close to
    float64."""
    torch.manual_seed(1)
    engine = Engine(name, pages=pages, ring=1)
    for _ in range(4):
        engine.open()
    for lengths in BATCHES:
        a = engine.step(lengths)
        assert engine.error(a) < BOUND[name.split("/")[-1]]
    engine.check_pages()


@pytest.mark.parametrize("name", ["int8", "int4", "int8/int4"])
def test_random_batches(name):
    """A worker processes sequences of all kinds in any order. Scratch memory contains data of earlier calls: NaN there
    is an invalid format."""
    _C.alloc_poison(False)
    for seed in range(16):
        torch.manual_seed(seed)
        engine = Engine(name, H=1 + seed % 4, blocks=40)
        for _ in range(5):
            engine.open()
        for _ in range(3):
            lengths = torch.where(torch.rand(5) < 0.3, 1, torch.randint(0, 90, (5,))).tolist()
            assert engine.error(engine.step(lengths)) < BOUND[name.split("/")[-1]]


@pytest.mark.parametrize("name", ["raw", "int8", "int4", "int8/int4"])
def test_the_same_as_a_layer_of_its_own(name):
    """Bit-identical to PagedKV for each sequence: calls that end before a second page starts are a single pass."""
    torch.manual_seed(2)
    engine = Engine(name, D=64)
    layers = []
    for _ in range(3):
        engine.open()
        key, value = (name.split("/") * 2)[:2]
        layers.append(
            PagedKV(
                2, 64, key=key, value=value, dtype=torch.float32, sinks=0, residual_length=0 if name == "int8" else None
            )
        )
    for lengths in ([128, 60, 1], [1, 4, 63], [1, 1, 1], [60, 63, 0]):
        a = engine.step(lengths)
        for b, n in enumerate(lengths):
            if not n:
                continue
            at = slice(int(a["query_start_loc"][b]), int(a["query_start_loc"][b + 1]))
            q, k, v = (a[x][at].transpose(0, 1)[None] for x in "qkv")
            out, lse = layers[b].attend(q, k, v)
            torch.testing.assert_close(a["out"][at].transpose(0, 1), out[0], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(a["lse"][:, at], lse[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["raw", "int8", "int4", "int2"])
def test_rejected_drafts(name):
    """Only pages that can no longer be rejected are sealed; in the end they hold the accepted tokens."""
    generator = torch.Generator().manual_seed(3)
    engine = Engine(name, ring=2, pages=2)
    for _ in range(3):
        engine.open()
    engine.step([100, 62, 7], drafts=[0, 0, 0])
    for _ in range(60):
        drafts = torch.randint(0, 6, (3,), generator=generator).tolist()
        a = engine.step([1 + n for n in drafts], drafts=drafts)
        assert engine.error(a) < BOUND[name]
        for b, n in enumerate(drafts):
            kept = len(engine.k[b]) - int(torch.randint(0, n + 1, (1,), generator=generator))
            engine.k[b], engine.v[b] = engine.k[b][:kept], engine.v[b][:kept]
    assert max(engine.sealed) >= 192
    engine.check_pages()


@pytest.mark.parametrize("most", [5, 62])
@pytest.mark.parametrize("name", ["int8", "int4", "kivi4"])
def test_drafts_sealed_like_all_tokens(name, most):
    """With two residual pages, lengths alone are sufficient: a page from which tokens are rejected becomes raw
    again."""
    generator = torch.Generator().manual_seed(3)
    engine, again = Engine(name, ring=2, pages=2), 0
    for _ in range(3):
        engine.open(columns=12)
    engine.step([100, 62, 7])
    while min(map(len, engine.k)) < 400:
        drafts = torch.randint(0, most + 1, (3,), generator=generator).tolist()
        assert engine.error(engine.step([1 + n for n in drafts])) < BOUND[name]
        for b, n in enumerate(drafts):
            before = len(engine.k[b]) // 64
            kept = len(engine.k[b]) - int(torch.randint(0, n + 1, (1,), generator=generator))
            engine.k[b], engine.v[b] = engine.k[b][:kept], engine.v[b][:kept]
            again += kept // 64 < before
        engine.check_pages([len(x) // 64 * 64 for x in engine.k])
    assert again > 3


@pytest.mark.parametrize("name", ["raw", "int8", "int4"])
def test_tokens_that_another_layer_stored(name):
    torch.manual_seed(4)
    engine = Engine(name)
    for _ in range(3):
        engine.open()
    for lengths in ([100, 64, 3], [1, 70, 30]):
        a = engine.step(lengths)
        before = engine.cache.clone(), engine.residual.clone()
        shared = {**a, "k": a["k"][:0], "v": a["v"][:0], "out": torch.zeros_like(a["out"])}
        ops.attend_varlen(*shared.values())
        assert torch.equal(before[0], engine.cache) and torch.equal(before[1], engine.residual)
        assert engine.error(shared) < BOUND[name]


def test_slots_without_attention():
    torch.manual_seed(5)
    for name in IN_PLACE:
        one, two = Engine(name), Engine(name)
        one.open(), two.open()
        two.table = one.table
        a = one.step([150])
        slots = torch.tensor([one.table[0][t // 128] * 128 + t % 128 for t in range(150)])
        k, v = torch.cat([a["k"], a["k"][:1]]), torch.cat([a["v"], a["v"][:1]])
        slots = torch.cat([slots, torch.tensor([-1])])
        ops.store_tokens(k, v, two.cache, slots, INTS, one.key << 8 | one.value, 128, 64)
        for p in range(2):
            assert torch.equal(one.stored(0, p), two.stored(0, p)), name
        one.step([1]), two.k.__setitem__(0, one.k[0][:-1]), two.v.__setitem__(0, one.v[0][:-1])
        b = two.step([1], q=a["q"][:1], k=one.k[0][-1:], v=one.v[0][-1:])
        assert two.error(b) < 0.05


@pytest.mark.parametrize("name", ["raw", "int8", "int4"])
def test_bad_numbers_raise_or_are_flagged(name):
    torch.manual_seed(6)
    engine = Engine(name)
    for _ in range(3):
        engine.open()
    engine.step([70, 70, 70])
    a = engine.arguments([1, 61, 3])
    a["k"][5, 1, 3] = math.nan
    with pytest.raises(ValueError, match="NaN or Inf at .*token"):
        ops.attend_varlen(*a.values())
    a["flags"] = torch.zeros(3, dtype=torch.int32)
    ops.attend_varlen(*a.values())
    assert a["flags"].tolist() == [0, 1, 0]
    out = a["out"]
    assert out[:1].isfinite().all() and out[1:62].isnan().all() and out[62:].isfinite().all()
    a["k"][5, 1, 3] = 0  # what was stored in its place
    for b, n in enumerate([1, 61, 3]):
        at = slice([0, 1, 62][b], [0, 1, 62][b] + n)
        engine.k[b], engine.v[b] = torch.cat([engine.k[b], a["k"][at]]), torch.cat([engine.v[b], a["v"][at]])
    assert engine.error(engine.step([1, 1, 1])) < 0.35


def changed(table, at, value):
    table = table.clone()
    table.view(-1)[at] = value
    return table


BAD = [
    ("block_table: expected a block from 0 to 39, got 40", lambda a: {"block_table": changed(a["block_table"], 0, 40)}),
    ("block_table: expected a block from 0 to 39, got -1", lambda a: {"block_table": changed(a["block_table"], 0, -1)}),
    ("residual_table: expected a block", lambda a: {"residual_table": changed(a["residual_table"], 2, 2**31 - 1)}),
    ("a page that one sequence writes", lambda a: {"residual_table": a["residual_table"][:1].expand(3, 1)}),
    ("query_start_loc: expected ascending", lambda a: {"query_start_loc": torch.tensor([0, 9, 8, 10]).int()}),
    ("query_start_loc: expected ascending", lambda a: {"query_start_loc": torch.tensor([0, 1, 2, 2000]).int()}),
    ("query_start_loc: expected ascending", lambda a: {"query_start_loc": torch.tensor([-1, 1, 2, 3]).int()}),
    ("query_start_loc: expected", lambda a: {"query_start_loc": a["query_start_loc"][:3]}),
    ("seq_lens: expected from 1", lambda a: {"seq_lens": changed(a["seq_lens"], 0, 0)}),
    ("seq_lens: expected from 1", lambda a: {"seq_lens": changed(a["seq_lens"], 0, 100000)}),
    ("seq_lens: expected from 1", lambda a: {"seq_lens": changed(a["seq_lens"], 0, -5)}),
    ("sealed_lens: expected whole pages", lambda a: {"sealed_lens": torch.tensor([64, 63, 64]).int()}),
    ("sealed_lens: expected whole pages", lambda a: {"sealed_lens": torch.tensor([64, 640, 64]).int()}),
    ("residual: expected room", lambda a: {"sealed_lens": torch.tensor([0, 64, 64]).int()}),
    ("draft_lens: expected 0", lambda a: {"draft_lens": torch.tensor([0, 0, -1]).int()}),
    ("draft_lens: expected 0", lambda a: {"draft_lens": torch.tensor([0, 0, 50]).int()}),
    ("residual: expected blocks for raw pages", lambda a: {"residual": a["residual"][:0]}),
    ("residual: expected blocks of at least", lambda a: {"residual": a["residual"][:, :-64]}),
    ("cache: expected blocks of at least", lambda a: {"cache": a["cache"][:, :-1]}),
    ("cache: expected blocks of at least", lambda a: {"block_size": 192}),
    ("expected blocks of whole pages", lambda a: {"block_size": 100}),
    ("begin on 64 bytes", lambda a: {"cache": torch.zeros(40, a["cache"].shape[1] + 1, dtype=torch.uint8)}),
    ("formats: expected", lambda a: {"formats": 255 << 8}),
    ("page_size", lambda a: {"page_size": 24, "block_size": 48, "residual_size": 24}),
    ("out: expected", lambda a: {"out": a["out"][:-1]}),
    ("k, v: expected", lambda a: {"k": a["k"][:-1], "v": a["v"][:-1]}),
    ("softcap", lambda a: {"softcap": -1.0}),
    ("softcap", lambda a: {"softcap": math.inf}),
    ("attend_varlen: scale: expected a finite float32, got nan", lambda a: {"scale": math.nan}),
    ("scale: expected a finite float32, got inf", lambda a: {"scale": 1e300}),
    ("max_query_len: expected at least 30 .*, got 29", lambda a: {"max_query_len": 29}),
    ("max_query_len from 0, got 3, 33, -1", lambda a: {"max_query_len": -1}),
    ("multiple of 2 KV heads", lambda a: {"q": a["q"][:, :3], "out": a["out"][:, :3], "lse": NONE}),
    ("dtype|float32", lambda a: {"k": a["k"].half()}),
    ("expected int32", lambda a: {"block_table": a["block_table"].long()}),
    ("lse: expected", lambda a: {"lse": torch.zeros(3)}),
]  # fmt: skip


@pytest.mark.parametrize("text, change", BAD, ids=range(len(BAD)))
def test_bad_arguments_are_errors_and_change_nothing(text, change):
    torch.manual_seed(7)
    engine = Engine("int4")
    for _ in range(3):
        engine.open()
    engine.step([70, 70, 70])
    a = engine.arguments([1, 2, 30])
    before = engine.cache.clone(), engine.residual.clone()
    with pytest.raises((ValueError, TypeError), match=text):
        ops.attend_varlen(*{**a, **change(a)}.values())
    assert torch.equal(before[0], engine.cache) and torch.equal(before[1], engine.residual)
    ops.attend_varlen(*a.values())


def test_bad_slots_are_errors():
    engine = Engine("int8")
    k = torch.randn(2, 2, 32)
    good = [k, k, engine.cache, torch.tensor([0, 5119]), INTS, engine.key << 8 | engine.value, 128, 64]
    ops.store_tokens(*good)
    int4 = formats.CODES["int4"]
    for at, value, text in ((3, torch.tensor([0, 5120]), "less than 5120"), (3, torch.tensor([0]), "slot_mapping"),
                            (5, int4 << 8 | int4, "single tokens"), (0, k * math.nan, "NaN or Inf")):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            ops.store_tokens(*good[:at], value, *good[at + 1 :])


def test_blocks_that_no_query_sees_need_not_exist():
    torch.manual_seed(8)
    for name in ("raw", "int4"):
        engine = Engine(name, window=40, pages=1)
        engine.open(), engine.open()
        engine.step([300, 90])
        engine.table[0][:4] = [-1] * 4
        assert engine.error(engine.step([2, 1])) < 0.35


def test_geometry():
    shape = formats.page_geometry("int4", 8, 128, dtype=torch.bfloat16)
    int4 = formats.CODES["int4"]
    assert shape.page_bytes == 8 * formats.page_bytes(int4, int4, 128) == 8 * shape.head_bytes
    assert shape.residual_bytes == 8 * 64 * 2 * 128 * 2 and shape.key == shape.value == int4
    assert formats.page_geometry("int8/raw", 2, 64, dtype=torch.float32).residual_bytes == 0
    for arguments, text in (
        (("int9", 8, 128), "expected one of"),
        (("int4", 0, 128), "heads"),
        (("int4", 8, 100), "head dim"),
    ):
        with pytest.raises(ValueError, match=text):
            formats.page_geometry(*arguments, dtype=torch.bfloat16)
