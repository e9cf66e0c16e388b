"""An engine's batches on the device: attend_varlen and store_tokens of the CUDA sources compared with the CPU's: the
same bytes in the same blocks, and float64 attention."""

import math

import pytest
import torch
from cuda_twin import DEVICE, ENTRY, FINITE, ROWS, UNWRITTEN, Twin
from test_varlen import BATCHES, BOUND, INTS, Engine, changed

from kvcompress import ops

TWIN = Twin()
APART = {"int4": 2e-2, "int2": 2e-2, "kivi4": 2e-2}
"""How far results may be from the CPU's over the same pages; elsewhere 5e-3."""


def pair_of(name, n, **options):
    """The same engine on the device and on the CPU."""
    made = []
    for _ in range(2):
        torch.manual_seed(7)
        made.append(Engine(name, **options))
        for _ in range(n):
            made[-1].open()
    made[1].s_aux = made[0].s_aux
    return made


def step(pair, monkeypatch, lengths, twin=TWIN, max_query=0, **more):
    """The same step on both; returns the device's arguments."""
    far, near = pair
    a = near.step(lengths, **more)
    with monkeypatch.context() as patch:
        patch.setattr(ops, "attend_varlen", lambda *args: twin.attend_varlen(*args, max_query))
        b = far.step(lengths, **{**more, "q": a["q"], "k": a["k"], "v": a["v"]})
    assert twin.flags == 0
    return b, a


def same(pair, a, b, apart):
    far, near = pair
    used = int(a["query_start_loc"][-1])
    assert float((a["out"][:used].double() - b["out"][:used].double()).abs().max()) <= apart
    assert float((a["lse"][:, :used] - b["lse"][:, :used]).abs().max()) <= apart
    assert (a["out"][used:] == 7).all() and (a["lse"][:, used:] == 7).all()
    assert torch.equal(far.residual, near.residual)
    bad = far.cache != near.cache
    assert not bad.any(), bad.nonzero()[:4]


CASES = [
    ("int8", {"dtype": torch.bfloat16, "D": 64, "G": 4}),
    ("int4", {"dtype": torch.float16, "D": 64, "window": 50}), ("int8/int4", {"softcap": 3.0, "sinks": True}),
    ("fp8_e4m3", {"dtype": torch.float16, "D": 128, "window": -96}), ("int2", {"D": 64, "dtype": torch.bfloat16}),
]  # fmt: skip
FULL = [
    ("raw", {}), ("int4", {}),
    ("kivi4", {}), ("int8", {"D": 320, "dtype": torch.bfloat16}), ("int4", {"D": 288, "Dv": 64}), ("raw/int4", {}),
    ("int4", {"Dv": 64, "G": 4}), ("int8/fp8_e5m2", {}), ("raw", {"dtype": torch.bfloat16, "D": 128, "G": 8}),
]  # fmt: skip


@pytest.mark.parametrize("name,options", [*CASES, *(pytest.param(*x, marks=pytest.mark.full) for x in FULL)])
def test_batches_as_on_the_cpu(name, options, monkeypatch):
    """Prompts and decode steps in one call, pages sealed within a call, in random blocks: bytes, results, lse."""
    pair = pair_of(name, 4, **options)
    worst = max(APART.get(part, 5e-3) for part in name.split("/"))
    near64 = BOUND[name.split("/")[-1]] + (2e-2 if "dtype" in options else 0)
    for lengths in BATCHES:
        a, b = step(pair, monkeypatch, lengths, spare=3)
        same(pair, a, b, worst if "dtype" not in options else max(worst, 1.6e-2))
        assert pair[0].error(a) < near64


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_single_token_batches_take_one_pass(name, monkeypatch):
    """At most one token per sequence: a single pass; sequences without a token are unchanged."""
    pair = pair_of(name, 5)
    step(pair, monkeypatch, [62, 1, 200, 63, 64])
    for i in range(4):
        lengths = [1, 1, 1, i % 2, 1]
        same(pair, *step(pair, monkeypatch, lengths, max_query=1), APART.get(name, 5e-3))


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_rejected_drafts(name, monkeypatch):
    generator = torch.Generator().manual_seed(3)
    pair = pair_of(name, 3, ring=2)
    step(pair, monkeypatch, [100, 62, 7], drafts=[0, 0, 0])
    for _ in range(16):
        drafts = torch.randint(0, 6, (3,), generator=generator).tolist()
        same(pair, *step(pair, monkeypatch, [5 + n for n in drafts], drafts=drafts), APART.get(name, 5e-3))
        for b, n in enumerate(drafts):
            taken = int(torch.randint(0, n + 1, (1,), generator=generator))
            for engine in pair:
                kept = len(engine.k[b]) - taken
                engine.k[b], engine.v[b] = engine.k[b][:kept], engine.v[b][:kept]
    assert max(pair[0].sealed) >= 128


@pytest.mark.parametrize("most", [5, pytest.param(62, marks=pytest.mark.full)])
def test_drafts_sealed_like_all_tokens(most, monkeypatch):
    """By lengths alone: the raw tokens of a sealed page are still available."""
    generator = torch.Generator().manual_seed(3)
    pair, again = pair_of("int4", 3, ring=2), 0
    step(pair, monkeypatch, [62, 125, 190])
    for _ in range(12):
        drafts = torch.randint(1, most + 1, (3,), generator=generator).tolist()
        same(pair, *step(pair, monkeypatch, [1 + n for n in drafts]), APART["int4"])
        for b, n in enumerate(drafts):
            taken = int(torch.randint(n // 2, n + 1, (1,), generator=generator))
            for engine in pair:
                length = len(engine.k[b])
                engine.k[b], engine.v[b] = engine.k[b][: length - taken], engine.v[b][: length - taken]
            again += (length - taken) // 64 < length // 64
            pair[0].check_pages([len(x) // 64 * 64 for x in pair[0].k])
    assert again


@pytest.mark.parametrize("name", ["raw", "int4"])
def test_tokens_that_another_layer_stored(name, monkeypatch):
    pair = pair_of(name, 3)
    a, _ = step(pair, monkeypatch, [100, 64, 3])
    shared = {**a, "k": a["k"][:0], "v": a["v"][:0]}
    wanted = {**shared, "out": torch.zeros_like(a["out"]), "lse": torch.zeros_like(a["lse"])}
    TWIN.attend_varlen(*shared.values())
    ops.attend_varlen(*{**wanted, "cache": pair[1].cache, "residual": pair[1].residual}.values())
    assert TWIN.flags == 0
    same(pair, shared, wanted, APART.get(name, 5e-3))


def test_a_recorded_call_finds_what_is_new(monkeypatch):
    """The host reads nothing: one captured call serves other lengths, blocks and batches of the same sizes."""
    far, near = pair_of("int4", 3)
    first = near.arguments([1, 1, 1])
    at = {key: x.clone() if isinstance(x, torch.Tensor) else x for key, x in first.items()}
    at |= {"cache": far.cache, "residual": far.residual}
    at = {key: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for key, x in at.items()}
    run = TWIN.record_varlen(*at.values(), 1)
    for i in range(130):
        lengths = [1, i % 2, 1]
        a = near.step(lengths, spare=3 - sum(lengths))
        for key in ("q", "k", "v", "block_table", "residual_table", "query_start_loc", "seq_lens"):
            at[key].copy_(a[key])
        run()
        assert TWIN.flags == 0
        if i in (0, 63, 64, 65, 129):
            assert float((at["out"].cpu() - a["out"])[: sum(lengths)].abs().max()) <= 2e-2
            assert torch.equal(at["cache"].cpu(), near.cache) and torch.equal(at["residual"].cpu(), near.residual)
        if i == 64:  # the second one ends, another starts
            near.table[1] = [near.free.pop() for _ in range(8)]
            near.k[1], near.v[1], near.sealed[1] = near.k[1][:0], near.v[1][:0], 0


@pytest.mark.parametrize("name", ["raw", "int8", "int4"])
def test_bad_numbers_are_flagged(name, monkeypatch):
    far, near = pair_of(name, 3)
    step((far, near), monkeypatch, [70, 70, 70])
    a = far.arguments([1, 61, 3])
    a["k"][5, 1, 3] = math.nan
    TWIN.attend_varlen(*a.values())
    assert TWIN.flags == FINITE
    a = far.arguments([1, 61, 3])
    a["k"][5, 1, 3], a["flags"] = math.inf, torch.zeros(3, dtype=torch.int32)
    TWIN.attend_varlen(*a.values())
    assert TWIN.flags == 0 and a["flags"].tolist() == [0, 1, 0]
    out = a["out"]
    assert out[:1].isfinite().all() and out[1:62].isnan().all() and out[62:].isfinite().all()


BAD = [
    (ENTRY, lambda a: {"block_table": changed(a["block_table"], 0, 40)}, 0),
    (ENTRY, lambda a: {"block_table": changed(a["block_table"], 0, -1)}, 0),
    (ENTRY, lambda a: {"residual_table": changed(a["residual_table"], 0, 2**31 - 1)}, 0),
    (ROWS, lambda a: {"query_start_loc": torch.tensor([0, 31, 30, 33]).int()}, None),
    (ROWS, lambda a: {"query_start_loc": torch.tensor([0, 33, 0, 33]).int()}, None),
    (ROWS, lambda a: {"query_start_loc": torch.tensor([0, 1, 3, 2000]).int()}, 2),
    (ROWS, lambda a: {"query_start_loc": torch.tensor([-1, 1, 3, 33]).int()}, 0),
    (ROWS, lambda a: {"seq_lens": changed(a["seq_lens"], 0, 0)}, 0),
    (ROWS, lambda a: {"seq_lens": changed(a["seq_lens"], 0, 100000)}, 0),
    (ROWS, lambda a: {"seq_lens": changed(a["seq_lens"], 0, -5)}, 0),
    (ROWS, lambda a: {"sealed_lens": torch.tensor([63, 64, 64]).int()}, 0),
    (ROWS, lambda a: {"sealed_lens": torch.tensor([640, 64, 64]).int()}, 0),
    (ROWS, lambda a: {"sealed_lens": torch.tensor([0, 64, 64]).int()}, 0),
    (ROWS, lambda a: {"draft_lens": torch.tensor([-1, 0, 0]).int()}, 0),
    (ROWS, lambda a: {"draft_lens": torch.tensor([50, 0, 0]).int()}, 0),
]


@pytest.mark.parametrize("flag,change,only", BAD, ids=range(len(BAD)))
def test_invalid_indices_are_flagged_and_affect_no_other_sequence(flag, change, only, monkeypatch):
    """Invalid indices and lengths that the host cannot see: nothing out of bounds, and other sequences are
    unaffected."""
    far, near = pair_of("int4", 3)
    step((far, near), monkeypatch, [70, 70, 70])
    a = far.arguments([1, 2, 30])
    bad = {**a, "out": a["out"].clone(), **change(a)}
    ops.attend_varlen(*{**a, "cache": near.cache, "residual": near.residual}.values())
    TWIN.attend_varlen(*bad.values())
    assert TWIN.flags & flag and not TWIN.flags & ~(ENTRY | ROWS)
    if only is not None:
        for b in {0, 1, 2} - {only}:
            at = slice(int(a["query_start_loc"][b]), int(a["query_start_loc"][b + 1]))
            assert float((bad["out"][at] - a["out"][at]).abs().max()) <= 2e-2


def test_slots_without_attention():
    """Also with invalid slots: negative, and after the last block."""
    cases = ("raw", torch.bfloat16, 64), ("int8", torch.float32, 64), ("fp8_e4m3", torch.float16, 288)
    for name, dtype, D in cases:
        far, near = pair_of(name, 1, dtype=dtype, D=D, Dv=32)
        k, v = torch.randn(200, 2, D).to(dtype), torch.randn(200, 2, 32).to(dtype)
        slots = torch.randperm(40 * 128)[:200]
        slots[3] = -1
        code, flag = far.key << 8 | far.value, torch.zeros(1, dtype=torch.int32)
        TWIN.store_tokens(k, v, far.cache, slots, flag, code, 128, 64)
        ops.store_tokens(k, v, near.cache, slots, INTS, code, 128, 64)
        assert TWIN.flags == 0 and torch.equal(far.cache, near.cache) and not flag
        k[5] = math.nan
        TWIN.store_tokens(k, v, far.cache, slots, flag, code, 128, 64)
        assert TWIN.flags == 0 and flag.tolist() == [1]
        slots[4] = 40 * 128
        TWIN.store_tokens(k, v, far.cache, slots, INTS.clone(), code, 128, 64)
        assert TWIN.flags == ENTRY | FINITE


@pytest.mark.skipif(UNWRITTEN, reason="compares what nobody wrote")
def test_more_sequences_than_processors(monkeypatch):
    """Many sequences with few columns; and few sequences with many columns, which are split into runs."""
    for name, lengths in (("int8", [1] * 13), ("int4", [250, 230])):
        pair = pair_of(name, len(lengths), pages=4, blocks=8 * len(lengths))
        twin = Twin(processors=64)
        same(pair, *step(pair, monkeypatch, lengths, twin=twin), APART.get(name, 5e-3))
        same(pair, *step(pair, monkeypatch, [1] * len(lengths), twin=twin, max_query=1), APART.get(name, 5e-3))
