"""Families x modes x formats x attention: pairs in the default tier (modes with every kind of layers, not with every
family), all pairs and the full product in the full tier.

raw: the tokens and logits of DynamicCache. Quantized and fused: each attention call equals the same call on the decoded
cache. In all: the final contents of the first paged layer are those of DynamicCache, up to the format's rounding."""

import copy
from functools import lru_cache

import families
import models
import pytest
import torch
import transformers as hf
from covertable import make
from families import family
from generation import IMPLEMENTATIONS, PAGE, check_same, error, logits_of
from models import ids, left_pads
from modes import CROPPING, MODES
from shadow import shadow
from transformers.cache_utils import get_layer_types_and_kwargs

from kvcompress import KVCache, enable
from kvcompress.hf.layer import PagedLayer

FORMATS = {"raw": 1e-5, "int8": 2e-2, "int4": 0.25}  # tolerance of K and V
HALF = {torch.float16: 6e-3, torch.bfloat16: 6e-2}


def possible(row):
    """Whether transformers itself supports a prefix of (family, mode, format, implementation)."""
    if len(row) > 1 and row[0] in families.NO_CROP and row[1] in CROPPING:
        return False
    return not (len(row) > 3 and row[3] == "sdpa" and row[0] in models.NO_SDPA)


AXES = (list(families.CONFIGS), list(MODES), list(FORMATS), list(IMPLEMENTATIONS))
NAMES = ("family", "mode", "format", "implementation")
RULES = (
    {"family": families.NO_CROP, "mode": CROPPING},
    {"family": models.NO_SDPA, "implementation": ("sdpa",)},
)


def pairs():
    """Rows with every pair of values that `possible` allows."""
    constraints = [
        {"operator": "not", "condition": {"operator": "and", "conditions": [
            {"operator": "in", "left": axis, "values": list(names)} for axis, names in rule.items()
        ]}} for rule in RULES
    ]  # fmt: skip
    found = make(dict(zip(NAMES, AXES, strict=True)), constraints=constraints)
    return [tuple(row[name] for name in NAMES) for row in found]


def layers_of(name):
    """Properties that matter for a mode: kinds of layers, latents, shared K and V."""
    text = families.CONFIGS[name]().get_text_config(decoder=True)
    kinds = sorted(set(get_layer_types_and_kwargs(text)[0]))
    return *kinds, *(x for x in ("kv_lora_rank", "num_kv_shared_layers") if getattr(text, x, None))


def usual(rows):
    """A small subset of the rows with every pair of values; of a family and a mode only one per kind of layers."""
    kind = {name: layers_of(name) for name in AXES[0]}

    def two(row):
        values = [*enumerate(row), ("layers", kind[row[0]])]
        return {(a, b) for a in values for b in values} - {((0, row[0]), (1, row[1])), ((1, row[1]), (0, row[0]))}

    left, found = set().union(*map(two, rows)), []
    while left:
        found.append(max(rows, key=lambda row: len(two(row) & left)))
        left -= two(found[-1])
    return found


PAIRS = pairs()
USUAL = usual(PAIRS)
ALL = [
    row for row in ((f, m, k, i) for f in AXES[0] for m in AXES[1] for k in AXES[2] for i in AXES[3]) if possible(row)
]


@lru_cache
def prepared(name, dtype):
    """(model, its assistant) in `dtype`."""
    m = family(name)
    m = m if dtype is torch.float32 else copy.deepcopy(m).to(dtype)

    @lru_cache
    def assistant():
        twin = copy.deepcopy(m)
        twin.set_attn_implementation("eager")
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in twin.parameters():
                p += p.std(unbiased=False) * 0.05 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
        return twin

    return m, assistant


def attend_with(m, implementation):
    m.set_attn_implementation("eager" if implementation == "kvcompress" else implementation)
    if implementation == "kvcompress":
        enable(m, verbose=False)


@lru_cache
def reference(name, mode, implementation="eager"):
    m, assistant = prepared(name, getattr(MODES[mode], "dtype", torch.float32))
    attend_with(m, implementation)
    run = MODES[mode]
    if mode == "reset" or name in families.NO_ROWS:
        run = getattr(run, "alone", run)
    return run(m, lambda: hf.DynamicCache(config=m.config.get_text_config()), assistant)


@pytest.fixture
def shadowed():
    with shadow() as errors:
        yield errors


def check_stored(m, run, bound):
    """The first paged layer holds the K and V of the generated sequences."""
    first = next(i for i, layer in enumerate(run.cache.layers) if isinstance(layer, PagedLayer))
    layer, sequences = run.cache.layers[first], run.outputs[-1].sequences
    seen = layer.get_seq_length()
    mask = torch.nn.functional.pad(run.mask, (0, seen - run.mask.shape[1]), value=1)[:, :seen]
    exact = hf.DynamicCache(config=m.config.get_text_config())
    attend_with(m, "eager")
    with torch.no_grad():
        m(
            sequences[:, :seen],
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            past_key_values=exact,
        )
    real = mask.bool()
    if layer.chunked:  # only the last chunk must be stored
        begin = mask.int().argmax(1)[:, None]
        real = real & (torch.arange(seen) >= begin + (seen - 1 - begin) // layer.window * layer.window)
    real = real[:, None, layer.start_of(seen) :, None]
    for got, want in ((layer.keys, exact.layers[first].keys), (layer.values, exact.layers[first].values)):
        assert got.shape == want.shape
        assert error(got.cpu() * real, want * real) < bound


def check(name, mode, key, implementation, shadowed):
    run_mode = MODES[mode]
    dtype = getattr(run_mode, "dtype", torch.float32)
    half = dtype is not torch.float32  # torch's attention functions round differently
    m, assistant = prepared(name, dtype)
    attend_with(m, implementation)
    own = m.config.get_text_config()._attn_implementation == "eager" or name in models.NO_SDPA
    want = reference(name, mode, "eager" if own or not half else "sdpa")
    attend_with(m, implementation)
    run = run_mode(m, lambda: KVCache(m.config, key, page_size=PAGE), assistant)
    paged = any(isinstance(layer, PagedLayer) for layer in run.cache.layers)
    exact = key == "raw" or not paged
    if isinstance(run.outputs[0], torch.Tensor):
        bound = (HALF[dtype] if half else 1e-5) if exact else 4 * FORMATS[key]
        got, wanted = run.outputs[0].double(), want.outputs[0].double()
        rows = (got - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        if half and name == "gemma4":  # which does not scale its scores: transformers' own two functions differ by more
            two = (reference(name, mode, x).outputs[0].double() for x in ("eager", "sdpa"))
            apart = torch.sub(*two).norm(dim=-1) / wanted.norm(dim=-1)
            bound = max(bound, float(apart.quantile(0.9)))
            attend_with(m, implementation)
        routed = name in families.ROUTED
        assert not half or rows.quantile(0.5 if routed else 0.9) < bound
        if not half or not routed:
            assert error(got, wanted) < (1.5 if half else 1) * bound
    elif exact:
        check_same(run.outputs, want.outputs)
    if run.mask is not None and paged:
        check_stored(m, run, FORMATS[key])
    assert bool(shadowed) == (implementation == "kvcompress")
    assert max(shadowed, default=0) < (HALF[dtype] if half else 1e-3)


def test_pairs_are_complete():
    def two(rows):
        return {(i, row[i], j, row[j]) for row in rows for i in range(4) for j in range(i)}

    assert two(PAIRS) == two(ALL)
    assert {row[:2] for row in USUAL} < {row[:2] for row in PAIRS}
    for i in range(4):
        for j in range(max(i + 1, 2 - i), 4):
            assert {(row[i], row[j]) for row in USUAL} == {(row[i], row[j]) for row in PAIRS}
    assert {(layers_of(row[0]), row[1]) for row in USUAL} == {(layers_of(row[0]), row[1]) for row in PAIRS}


@pytest.mark.parametrize("name,mode,key,implementation", [
    pytest.param(*row, marks=[] if row in USUAL else pytest.mark.full) for row in PAIRS
])  # fmt: skip
def test_pairs(name, mode, key, implementation, shadowed):
    check(name, mode, key, implementation, shadowed)


@pytest.mark.full
@pytest.mark.parametrize("name,mode,key,implementation", [row for row in ALL if row not in PAIRS])
def test_all(name, mode, key, implementation, shadowed):
    check(name, mode, key, implementation, shadowed)


@pytest.mark.parametrize("key", ["int8", *(pytest.param(x, marks=pytest.mark.full) for x in ("fp8_e4m3", "int4"))])
@pytest.mark.parametrize("name", families.CONFIGS)
def test_rows_of_a_padded_batch_equal_the_rows_alone(name, key):
    m, pads, lengths = family(name), [0, 13, 30], [50, 1, 1, 30, 1]
    attend_with(m, "kvcompress")
    tokens, mask = left_pads(ids(3, sum(lengths)), pads)

    def cache():
        return KVCache(m.config, key, page_size=PAGE)

    batch = torch.cat(logits_of(m, cache(), lengths, tokens, mask), 1)
    for row, n in enumerate(pads):
        alone = logits_of(m, cache(), [lengths[0] - n, *lengths[1:]], tokens[row : row + 1, n:])
        assert error(batch[row, n:], torch.cat(alone, 1)[0]) < 1e-3


@pytest.mark.parametrize("key", ["raw", "int8", "int4"])
def test_rows_that_finish_leave_the_batch_longest_first(key):
    """The longest row finishes first, then the next: the others continue as alone, and pages are freed."""
    m, pads = family("llama"), [30, 0, 13]
    attend_with(m, "kvcompress")
    tokens, mask = left_pads(ids(3, 90), pads)
    cache = KVCache(m.config, key, page_size=PAGE)
    logits_of(m, cache, [80], tokens[:, :80], mask[:, :80])
    rows, memory, got = [0, 1, 2], [], {}
    for at, longest in enumerate((1, 2, None)):
        step = slice(80 + 3 * at, 83 + 3 * at)
        with torch.no_grad():
            positions = mask[rows].cumsum(1)[:, step] - 1
            out = m(
                tokens[rows, step], attention_mask=mask[rows, : step.stop], position_ids=positions,
                past_key_values=cache,
            ).logits  # fmt: skip
        got.update({(row, at): out[i] for i, row in enumerate(rows)})
        memory.append(cache.pool.stats()["used"])
        if longest is not None:
            cache.batch_select_indices(torch.tensor([row != longest for row in rows]))
            rows.remove(longest)
    assert memory[0] > memory[1] > memory[2]
    for row, at in got:
        n = pads[row]
        alone = KVCache(m.config, key, page_size=PAGE)
        last = logits_of(m, alone, [80 - n, *[3] * (at + 1)], tokens[row : row + 1, n : 83 + 3 * at])[-1]
        assert error(got[row, at], last[0]) < 1e-3
