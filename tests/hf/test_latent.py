"""Latent attention (MLA) under enable(): attended absorbed, beside the model's own expansion and float64."""

import pytest
import torch
import transformers as hf
from families import MLA, some
from generation import cache_of, check_same, generate
from models import ids, left_pads

from kvcompress import enable
from kvcompress.hf import latent

MOE = {
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}  # fmt: skip
CONFIGS = {
    "deepseek_v2": lambda: hf.DeepseekV2Config(**some(**MLA), **MOE),
    "deepseek_v3": lambda: hf.DeepseekV3Config(**some(**{**MLA, "kv_lora_rank": 512, "qk_rope_head_dim": 64}), **MOE),
    "minicpm3": lambda: hf.MiniCPM3Config(**some(**MLA)),
}


def build(name, dtype=torch.float32):
    torch.manual_seed(7)
    m = hf.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager", dtype=dtype)
    return m.eval()


def counted(monkeypatch):
    """How often latents were expanded, and attended absorbed."""
    counts = {"expand": 0, "attend": 0}
    for what in counts:
        where = latent.Expanded if what == "attend" else latent
        before = getattr(where, what)

        def count(*args, _what=what, _before=before):
            out = _before(*args)
            counts[_what] += out is not None
            return out

        monkeypatch.setattr(where, what, count)
    return counts


@pytest.mark.parametrize("name", CONFIGS)
def test_steps_attend_absorbed_and_give_the_same_tokens(name, monkeypatch):
    m = build(name)
    tokens, mask = left_pads(ids(2, 45), [0, 9])
    want = generate(m, tokens, hf.DynamicCache(config=m.config), mask)
    report = enable(m, verbose=False)
    assert not report.fused and "attended absorbed" in str(report)
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


@pytest.mark.parametrize("padded", [False, True])
def test_absorbed_equals_the_definition_in_float64(padded):
    """Over what int8 pages hold, read back; every head expanded by hand."""
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
    for first, last in ((0, n), (n, n + T)):
        lazy = cache.update(*(x[:, :, first:last] for x in parts), 0)
        k, v = a.expand_kv(*lazy)
        x = q if first else torch.zeros(2, a.num_heads, n, a.qk_head_dim)
        mask = real[:, :last] if padded else None
        stored = None if not first else [x.double() for x in (cache.layers[0].keys, cache.layers[0].values)]
        if first:  # reading stores what was staged: the call's own tokens are exact in attention
            for old, new in zip(stored, parts, strict=True):
                old[:, :, n:] = new[:, :, n:].double()
        out, _ = attention(a, x, k, v, mask, scaling=a.scaling)
    W = a.kv_b_proj.weight.double().view(a.num_heads, a.qk_nope_head_dim + a.v_head_dim, -1)
    kv = torch.einsum("bsr,hdr->bhsd", stored[0][:, 0], W)
    keys = torch.cat([kv[..., : a.qk_nope_head_dim], stored[1].expand(-1, a.num_heads, -1, -1)], -1)
    scores = torch.einsum("bhtd,bhsd->bhts", q.double(), keys) * a.scaling
    sees = torch.arange(n + T)[None] <= torch.arange(n, n + T)[:, None]
    scores = scores.masked_fill(~(sees[None, None] & real[:, None, None]), -torch.inf)
    want = torch.einsum("bhts,bhsd->bthd", scores.softmax(-1), kv[..., a.qk_nope_head_dim :])
    assert (out - want).abs().max() < 1e-5 * want.abs().max() + 1e-6


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
    assert "(kv_b_proj is Scaled)" in str(report)
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
