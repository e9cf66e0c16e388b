"""`output_attentions=True` returns weights and changes nothing else: the same output, and the same tokens kept."""

import copy

import pytest
import torch
import transformers as hf
from families import family
from generation import cache_of, error, generate, select
from models import ids, left_pads, model
from test_undo import check_same, poison

from kvcompress.hf import attention
from kvcompress.policies import H2O, RKV, TOVA, AdaKV, KNorm, SnapKV

LENGTHS = [70, 23, *[1] * 30]
POLICIES = [H2O(40), SnapKV(40, 8), TOVA(40), RKV(40), AdaKV(H2O(40)), KNorm(40)]


def run(m, cache, lengths, tokens, mask, seen=False):
    """Outputs of consecutive calls of a padded batch, with weights or without."""
    out, start = [], 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for T in lengths:
        part = slice(start, start + T)
        start += T
        with torch.no_grad():
            out.append(m(
                tokens[:, part], attention_mask=mask[:, :start], position_ids=positions[:, part],
                past_key_values=cache, output_attentions=seen,
            ))  # fmt: skip
    return out


def run_last(m, cache, tokens, mask):
    """A call of the last token, with weights."""
    with torch.no_grad():
        return m(
            tokens[:, -1:], attention_mask=mask, position_ids=(mask.cumsum(1) - 1)[:, -1:], past_key_values=cache,
            output_attentions=True,
        )  # fmt: skip


def check_kept(cache, twin):
    for layer in range(len(cache.layers)):
        a, b = cache.kept(layer), twin.kept(layer)
        assert [[x.tolist() for x in row] for row in a.slots] == [[x.tolist() for x in row] for row in b.slots]
        for x, y in zip(a.scores or [], b.scores or [], strict=True):
            assert all(map(torch.equal, x, y))


@pytest.mark.parametrize("name,key", [("llama", "raw"), ("llama", "int8"), ("deepseek_v3", "raw")])
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_policies_keep_the_same_tokens(policy, name, key):
    m = select(copy.deepcopy(family(name)), "kvcompress")
    tokens, mask = left_pads(ids(2, sum(LENGTHS)), [0, 9])
    cache, twin = (cache_of(m, key, policy=policy) for _ in range(2))
    got, want = run(m, cache, LENGTHS, tokens, mask, seen=True), run(m, twin, LENGTHS, tokens, mask)
    for a, b in zip(got, want, strict=True):  # prompts of KNorm with latents are dense, by another function of torch
        torch.testing.assert_close(a.logits, b.logits, rtol=1e-4, atol=1e-4)
        assert torch.equal(a.logits, b.logits) or (name, policy) == ("deepseek_v3", POLICIES[-1])
    check_kept(cache, twin)
    assert cache.layers[1].store.eviction.count == twin.layers[1].store.eviction.count > 1


@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 64}, {"prompt_lookup_num_tokens": 4}], ids=str)
@pytest.mark.parametrize("policy", [H2O(60), SnapKV(60, 8)], ids=repr)
def test_generate_keeps_the_same_tokens(policy, options):
    m = select(copy.deepcopy(model("llama")), "kvcompress")
    tokens = ids(1, 30).repeat(1, 10)
    cache, twin = (cache_of(m, "raw", policy=policy) for _ in range(2))
    got, want = generate(m, tokens, cache, output_attentions=True, **options), generate(m, tokens, twin, **options)
    assert torch.equal(got.sequences, want.sequences) and len(got.attentions)
    check_kept(cache, twin)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "llama4", "deepseek_v3", "gemma3n"])
def test_weights_are_those_of_eager_attention(name):
    """Windows, chunks, softcap, attention sinks, latents, layers that share K and V."""
    m = copy.deepcopy(family(name))
    lengths, pads = [30, 20, 1, 1], [0, 9]
    tokens, mask = left_pads(ids(2, sum(lengths)), pads)
    select(m, "eager")
    want = run(m, hf.DynamicCache(config=m.config), lengths, tokens, mask, seen=True)
    select(m, "kvcompress")
    plain = run(m, cache_of(m, "raw"), lengths, tokens, mask)
    cache = cache_of(m, "raw")
    got = run(m, cache, lengths, tokens, mask, seen=True)
    end = 0
    for a, b, w, T in zip(got, plain, want, lengths, strict=True):
        end += T
        for row, pad in enumerate(pads):
            real = max(0, pad - (end - T))
            assert error(a.logits[row, real:], w.logits[row, real:]) < 1e-4
            assert error(a.logits[row, real:], b.logits[row, real:]) < 1e-5
            for x, y in zip(a.attentions, w.attentions, strict=True):
                assert x.shape == y.shape and error(x[row, :, real:], y[row, :, real:]) < 1e-4
    assert cache.get_seq_length() == sum(lengths)


def test_weights_of_kept_tokens_sum_to_one():
    """Eager weights without the evicted tokens, in the first layer, whose K does not depend on evictions."""
    m = copy.deepcopy(model("llama"))
    tokens, mask = left_pads(ids(2, 101), [0, 9])
    full = run(select(m, "eager"), hf.DynamicCache(config=m.config), [100, 1], tokens, mask, seen=True)[1]
    cache = cache_of(select(m, "kvcompress"), "raw", policy=H2O(40))
    run(m, cache, [100], tokens, mask, seen=True)
    kept = cache.kept(0)
    got = run_last(m, cache, tokens, mask).attentions[0]
    want = torch.zeros_like(got)
    for b in range(2):
        for h in range(4):
            at = [*kept.slots[b][h // 2].tolist(), 100]
            want[b, h, 0, at] = full.attentions[0][b, h, 0, at]
    torch.testing.assert_close(got, want / want.sum(-1, keepdim=True), rtol=1e-4, atol=1e-6)


def test_a_mask_that_hides_stored_tokens():
    """The op does not support it: weights and output are dense, and the tokens are stored once."""
    m = copy.deepcopy(model("llama"))
    tokens, mask = left_pads(ids(2, 41), [0, 9])
    hiding = mask.clone()
    hiding[0, 10:20] = 0
    found = []
    for implementation, make in (
        ("eager", lambda: hf.DynamicCache(config=m.config)),
        ("kvcompress", lambda: cache_of(m, "raw")),
    ):
        cache = (select(m, implementation), make())[1]
        run(m, cache, [40], tokens, mask)
        found.append(run_last(m, cache, tokens, hiding))
        assert cache.get_seq_length() == 41
    want, got = found
    assert error(got.logits, want.logits) < 1e-5
    assert all(error(a, b) < 1e-5 for a, b in zip(got.attentions, want.attentions, strict=True))


@pytest.mark.parametrize("where", ["weights", "attention"])
@pytest.mark.parametrize("options", [{}, {"policy": H2O(40, heads="shared")}], ids=str)
def test_a_failed_call_stores_nothing(monkeypatch, options, where):
    m = select(copy.deepcopy(model("llama")), "kvcompress")
    cache, twin = (cache_of(m, "int8", **options) for _ in range(2))
    made, calls = attention.eager, []

    def failing(*args):
        calls.append(args)
        if len(calls) % 2 == 0:  # in the last layer
            raise MemoryError("weights")
        return made(*args)

    for step, T in enumerate((70, 20, *[1] * 20)):
        for failed in (1, 6, 90):
            with monkeypatch.context() as patch, torch.no_grad():
                hook = poison(m) if where == "attention" else None
                if hook is None:
                    patch.setattr(attention, "eager", failing)
                with pytest.raises((ValueError, MemoryError), match="NaN|weights"):
                    m(ids(2, failed, 99), past_key_values=cache, output_attentions=True)
            if hook:
                hook.remove()
            if step:
                check_same(cache, twin)
        with torch.no_grad():
            got, want = (
                m(ids(2, T, step), past_key_values=c, output_attentions=seen)
                for c, seen in ((cache, True), (twin, False))
            )
        assert torch.equal(got.logits, want.logits)
    check_same(cache, twin)
