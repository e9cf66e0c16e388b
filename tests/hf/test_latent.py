"""Latent attention (MLA) under enable(): absorbed attention, compared with the model's own expansion and float64."""

import contextlib
import copy
from unittest import mock

import pytest
import torch
import transformers as hf
from families import MLA, family, some
from generation import cache_of, check_same, error, feed, generate, select
from models import ids, left_pads
from modes import MODES
from shadow import shadow

from kvcompress import (
    _C,
    H2O,
    TOVA,
    Batch,
    KeyDiff,
    KNorm,
    KVCache,
    PrefixCache,
    SnapKV,
    StreamingLLM,
    Tiers,
    enable,
)
from kvcompress.hf import latent
from kvcompress.hf.attention import eager, visible
from kvcompress.hf.layer import PagedLayer
from kvcompress.policies import RKV, CriticalKV, ExpectedAttention

MOE = {
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}  # fmt: skip
EXPERTS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def kimi_k2():
    """The text model of Kimi K2 and K2.5, as named in their files."""
    text = {**some(**MLA), **MOE, "model_type": "kimi_k2"}
    return hf.Kimi_K25Config(text_config=text).get_text_config()


CONFIGS = {
    "deepseek_v2": lambda: hf.DeepseekV2Config(**some(**MLA), **MOE),
    "deepseek_v3": lambda: hf.DeepseekV3Config(**some(**{**MLA, "kv_lora_rank": 512, "qk_rope_head_dim": 64}), **MOE),
    "minicpm3": lambda: hf.MiniCPM3Config(**some(**MLA)),
    "kimi_k2": kimi_k2,
    "glm4_moe_lite": lambda: hf.Glm4MoeLiteConfig(**some(**MLA), **EXPERTS),
    "mistral4": lambda: hf.Mistral4Config(**some(**MLA), **EXPERTS),
}


def build(name, dtype=torch.float32):
    if name not in CONFIGS:  # Gemma 4, whose wide heads are not latents
        return copy.deepcopy(family(name)).to(dtype)
    torch.manual_seed(7)
    config = CONFIGS[name]()
    kind = hf.Mistral4ForCausalLM._from_config if name == "mistral4" else hf.AutoModelForCausalLM.from_config
    m = kind(config, attn_implementation="eager", dtype=dtype)
    return m.eval()


def counted(monkeypatch):
    """Counts how often latents were expanded, and how often attention was absorbed."""
    counts = {"expand": 0, "attend": 0}
    for what in counts:
        where = latent.Expanded if what == "attend" else latent
        before = getattr(where, what)

        def count(*args, _what=what, _before=before, **options):
            out = _before(*args, **options)
            counts[_what] += out is not None and (_what == "attend" or args[1].shape[2] > 1)
            return out

        monkeypatch.setattr(where, what, count)
    return counts


@pytest.mark.parametrize("name", CONFIGS)
def test_steps_attend_absorbed_and_give_the_same_tokens(name, monkeypatch):
    m = build(name)
    tokens, mask = left_pads(ids(2, 45), [0, 9])
    want = generate(m, tokens, hf.DynamicCache(config=m.config), mask)
    report = enable(m, verbose=False)
    assert report.fused and "(MLA): absorbed" in str(report)
    counts = counted(monkeypatch)
    got = generate(m, tokens, cache_of(m, "raw"), mask)
    check_same([got], [want])
    assert counts["attend"] > counts["expand"], "decode steps expand no latents"
    check_same([generate(m, tokens, hf.DynamicCache(config=m.config), mask)], [want])


@pytest.mark.parametrize("calls", [[40, 1, 1], [7, 1, 5, 1, 30, 1]])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_in_fp32(name, calls):
    m = build(name)
    tokens = ids(2, sum(calls))
    with torch.no_grad():
        want = m(tokens).logits
        enable(m, verbose=False)
        cache, got, start = cache_of(m, "raw"), [], 0
        for T in calls:
            got.append(m(tokens[:, start : start + T], past_key_values=cache).logits)
            start += T
    assert (torch.cat(got, 1) - want).abs().max() < 1e-4


NAMED = ("deepseek_v3", "kimi_k2", "glm4_moe_lite", "mistral4", "gemma4", "gemma4_k_eq_v")
SOME = [(NAMED[i % len(NAMED)], mode) for i, mode in enumerate(MODES)]
ALL = [(name, mode) for name in NAMED for mode in MODES]


@pytest.mark.parametrize("name, mode", [x if x in SOME else pytest.param(*x, marks=pytest.mark.full) for x in ALL])
def test_every_mode(name, mode):
    """The same tokens as with DynamicCache; in fp32, logits within 1e-4."""
    run, dtype = MODES[mode], getattr(MODES[mode], "dtype", torch.float32)
    m = build(name, dtype)
    m.set_attn_implementation("eager")
    noisy = copy.deepcopy(m)
    with torch.no_grad():
        for p in noisy.parameters():
            p += p.std(unbiased=False) * 0.05 * torch.randn(p.shape, dtype=p.dtype, generator=torch.manual_seed(1))
    alone = getattr(run, "alone", run) if mode == "reset" else run
    want = alone(m, lambda: hf.DynamicCache(config=m.config), lambda: noisy).outputs
    assert enable(m, verbose=False).fused
    got = run(m, lambda: cache_of(m, "raw"), lambda: noisy).outputs
    for g, w in zip(got, want, strict=True):
        if isinstance(g, torch.Tensor):
            assert dtype is not torch.float32 or (g - w).abs().max() < 1e-4
            assert error(g, w) < (1e-4 if dtype is torch.float32 else 6e-2)
        else:
            assert torch.equal(g.sequences, w.sequences)
            assert (torch.stack(g.logits) - torch.stack(w.logits)).abs().nan_to_num(0).max() < 1e-4


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["gemma4", "gemma4_k_eq_v", "minicpm3"])
def test_half_precision_is_as_near_to_float32_as_transformers(name, mode):
    """Gemma 4 does not scale its scores: in half precision, eager and sdpa differ by more than in other models."""
    m, run, errors = build(name, MODES[mode].dtype), MODES[mode], {}
    exact = copy.deepcopy(m).float()
    exact.set_attn_implementation("eager")
    want = run(exact, lambda: hf.DynamicCache(config=m.config), None).outputs[0].double()
    for implementation in ("eager", "sdpa", "kvcompress"):
        select(m, implementation)
        ours = implementation == "kvcompress"
        got = run(m, lambda ours=ours: cache_of(m, "raw") if ours else hf.DynamicCache(config=m.config), None)
        errors[implementation] = ((got.outputs[0] - want).norm(dim=-1) / want.norm(dim=-1)).mean()
    assert errors["kvcompress"] < 1.1 * max(errors["eager"], errors["sdpa"]), errors


@pytest.mark.parametrize("policy", [
    H2O(48), SnapKV(48, window=8), TOVA(48), KeyDiff(48), KNorm(48), RKV(48), StreamingLLM(sinks=4, window=44),
])  # fmt: skip
def test_policies(policy):
    """On pages with evicted tokens, each call equals attention over the decoded pages."""
    m = build("deepseek_v3")
    enable(m, verbose=False)
    cache = cache_of(m, "raw", policy=policy)
    with shadow_kept() as errors:
        generate(m, ids(2, 90), cache, max_new_tokens=40)
    assert len(errors) >= 40 and max(errors) < 1e-5
    assert cache.stats()["kept"] <= 2 * (48 + 16 + 2) * len(m.model.layers)


@contextlib.contextmanager
def shadow_kept():
    """Errors of layers with eviction: each call compared with `eager` over the slots that the layer still holds."""
    original, errors = PagedLayer.attend, []

    def attend(layer, block, query, mask, **options):
        twin = layer.store.clone()
        twin.eviction.deferred = True
        there = torch.zeros(twin.batch, 1, 1, block.base + query.shape[2], dtype=torch.bool)
        for b in range(twin.batch if twin.seen else 0):
            there[b, 0, 0, twin.kept_heads().slots[b][0]] = True
        there[..., block.base :] = True
        out = original(layer, block, query, mask, **options)
        k, v = twin.append_dense(block.k, block.v)
        sees = visible(None, query.shape[2], k.shape[2], 0, k.device)
        want, _ = eager(query, torch.cat([k, v], -1), k, there if sees is None else sees & there, options["scale"])
        errors.append(error(out.transpose(1, 2), want))
        return out

    with mock.patch.object(PagedLayer, "attend", attend):
        yield errors


@pytest.mark.parametrize("policy", [StreamingLLM(positions="cache"), ExpectedAttention(64), CriticalKV(SnapKV(64))])
def test_policies_that_do_not_fit_are_refused_before_any_token(policy):
    with pytest.raises(ValueError, match=r"latent attention \(MLA\), got"):
        cache_of(build("minicpm3"), "int8", policy=policy)


def test_tiers_and_files(tmp_path):
    """Old pages are on the host and read in place; a file holds the same cache."""
    m = build("deepseek_v3")
    enable(m, verbose=False)
    tokens = ids(2, 150)
    want = generate(m, tokens, cache_of(m, "int8"))
    cache = cache_of(m, "int8")
    tiers = Tiers(host_bytes=None)
    cache.use_tiers(tiers, resident=32, unit=1, in_place=True)
    got = generate(m, tokens, cache)
    assert tiers.stats()["host"] > 0
    check_same([got], [want])
    cache = cache_of(m, "int8")
    feed(m, cache, tokens[:, :-1])
    cache.save(tmp_path / "a.kvc")
    loaded = KVCache.load(tmp_path / "a.kvc", m.config)
    check_same([generate(m, tokens, loaded)], [generate(m, tokens, cache)])


@pytest.mark.parametrize("key", ["raw", "int8", "int4"])
def test_a_prefix_is_shared(key):
    """A second prompt reuses the pages of the common prefix, and generates what a separate cache does."""
    m, P = build("deepseek_v3"), 16
    enable(m, verbose=False)
    prefix = PrefixCache(m.config, key, page_size=P)
    common, known = ids(1, 100, seed=1), 4 + 6 * P
    one, two = (torch.cat([common, ids(1, 30, seed=s)], 1) for s in (2, 3))
    first = prefix.open(one)
    feed(m, first, one[:, :known])
    feed(m, first, one[:, known:])
    assert prefix.commit(first, one) >= known
    hit, fresh = prefix.open(two), cache_of(m, key)
    assert hit.get_seq_length() == known
    feed(m, fresh, two[:, :known])
    got = generate(m, two, hit)
    check_same([got], [generate(m, two, fresh)])
    assert all(hit.layers[0].store.page_store.latent for hit in (hit, fresh))
    if key == "raw":
        check_same([got], [generate(m, two, hf.DynamicCache(config=m.config))])


@pytest.mark.parametrize("removed", [3, 40])
def test_crop_takes_tokens_back(removed):
    m = build("deepseek_v3")
    enable(m, verbose=False)
    tokens = ids(2, 90)
    cache = cache_of(m, "raw")
    feed(m, cache, tokens[:, :80])
    feed(m, cache, ids(2, removed, seed=5))
    cache.crop(-removed)
    got = torch.cat([feed(m, cache, tokens[:, 80:85]), feed(m, cache, tokens[:, 85:])], 1)
    with torch.no_grad():
        want = m(tokens).logits[:, 80:]
    assert (got - want).abs().max() < 1e-4


@pytest.mark.parametrize("key", ["int8", "int4"])
def test_formats_by_position_and_by_layer(key):
    """Attention is over the contents of the pages, also if a layer's pages have two formats."""
    m = build("glm4_moe_lite")
    enable(m, verbose=False)
    options = {"spans": [(0, 48, "raw"), (48, None, key)], "per_layer": {0: "int8/raw"}}
    cache = cache_of(m, key, **options)
    with shadow() as errors:
        generate(m, *left_pads(ids(2, 90), [0, 9])[:1], cache)
    assert errors and max(errors) < 1e-3


def test_sequences_in_one_batch():
    """Prompts together, then single tokens, two in one call of the op: as each alone."""
    m = build("deepseek_v3")
    enable(m, verbose=False)
    pool, lengths = _C.Pool(0), (20, 1, 70)
    caches, alone = [cache_of(m, "int8", pool=pool) for _ in lengths], [cache_of(m, "int8") for _ in lengths]
    for counts in (lengths, (1, 1, 1), (1, 15, 1), (1, 1, 1)):
        tokens, step = [ids(1, n, seed=n + i) for i, n in enumerate(counts)], Batch(caches, counts)
        with torch.no_grad():
            new = torch.cat(tokens, 1)
            got = m(new, position_ids=step.positions, past_key_values=step, logits_to_keep=step.last).logits[0]
        want = [feed(m, cache, x)[0, -1] for cache, x in zip(alone, tokens, strict=True)]
        assert error(got, torch.stack(want)) < 5e-3


def test_a_batch_cannot_expand():
    """If nothing can be absorbed, a Batch raises, and nothing is stored."""
    m = build("minicpm3")
    enable(m, verbose=False)
    m.model.layers[1].self_attn.kv_b_proj.bias = torch.nn.Parameter(torch.zeros(4 * 32))
    cache = cache_of(m, "int8")
    step = Batch([cache], [9])
    with pytest.raises(ValueError, match="Batch: expected causal attention"), torch.no_grad():
        m(ids(1, 9), position_ids=step.positions, past_key_values=step)
    assert cache.get_seq_length() == 0


@torch.no_grad()
@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("padded", [False, True])
def test_absorbed_equals_the_definition_in_float64(padded, staged, monkeypatch):
    """Over decoded int8 pages, with every head expanded explicitly. staged: the call's own tokens come with it,
    unrounded; otherwise they are stored first."""
    m = build("deepseek_v3")
    enable(m, verbose=False)
    a = m.model.layers[0].self_attn
    cache, T, n = cache_of(m, "int8"), 3, 150
    g = torch.Generator().manual_seed(3)
    real = torch.ones(2, n + T, dtype=torch.bool)
    if padded:
        real[1, :20] = False
    parts = [torch.randn(2, 1, n + T, D, generator=g) for D in (a.kv_lora_rank, a.qk_rope_head_dim)]
    q = torch.randn(2, a.num_heads, T, a.qk_head_dim, generator=g)
    attention = hf.AttentionInterface()["kvcompress"]
    layer, counts = cache.layers[0], counted(monkeypatch)
    for first, last in ((0, n), (n, n + T)):
        held = [x.double() for x in (layer.keys, layer.values)] if first else []
        k, v = a.expand_kv(*cache.update(*(x[:, :, first:last] for x in parts), 0))
        if first and not staged:
            layer.commit(real[:, n:])
        x = q if first else torch.zeros(2, a.num_heads, n, a.qk_head_dim)
        before = dict(counts)
        out, _ = attention(a, x, k, v, real[:, :last] if padded else None, scaling=a.scaling)
    assert counts["attend"] == before["attend"] + 1 and counts["expand"] == before["expand"], "absorbed"
    latents, rotary = (torch.cat([x, new[:, :, n:].double()], 2) for x, new in zip(held, parts, strict=True))
    W = a.kv_b_proj.weight.double().view(a.num_heads, a.qk_nope_head_dim + a.v_head_dim, -1)
    kv = torch.einsum("bsr,hdr->bhsd", latents[:, 0], W)
    keys = torch.cat([kv[..., : a.qk_nope_head_dim], rotary.expand(-1, a.num_heads, -1, -1)], -1)
    scores = torch.einsum("bhtd,bhsd->bhts", q.double(), keys) * a.scaling
    sees = torch.arange(n + T)[None] <= torch.arange(n, n + T)[:, None]
    scores = scores.masked_fill(~(sees[None, None] & real[:, None, None]), -torch.inf)
    want = torch.einsum("bhts,bhsd->bthd", scores.softmax(-1), kv[..., a.qk_nope_head_dim :])
    assert error(out, want) < 1e-2


def test_what_is_no_plain_linear_layer_is_applied_itself():
    m = build("minicpm3")
    tokens, mask = left_pads(ids(2, 45), [0, 9])

    class Scaled(torch.nn.Linear):
        def forward(self, x):
            return 0.5 * super().forward(x)

    for layer in m.model.layers[:1]:
        layer.self_attn.kv_b_proj.__class__ = Scaled
    want = generate(m, tokens, hf.DynamicCache(config=m.config), mask)
    report = enable(m, verbose=False)
    assert not report.fused and "in 1 of 2 layers (kv_b_proj is Scaled)" in str(report)
    check_same([generate(m, tokens, cache_of(m, "raw"), mask)], [want])


def test_another_signature_is_refused():
    m = build("minicpm3")
    kind = type(m.model.layers[0].self_attn)
    before = kind.expand_kv
    try:
        kind.expand_kv = lambda self, latents, rotary, scale: None
        with pytest.raises(
            ValueError, match=r"expand_kv: expected \(latents, rotary part\), got \('latents', 'rotary', 's"
        ):
            enable(m, verbose=False)
    finally:
        kind.expand_kv = before


def test_a_rotary_part_wider_than_the_latent_is_refused():
    config = hf.MiniCPM3Config(**some(**{**MLA, "kv_lora_rank": 16, "qk_rope_head_dim": 32}))
    with pytest.raises(ValueError, match=r"latent: .* got 1 heads, head_dim 16, value_dim 32"):
        KVCache(config, "int8")
