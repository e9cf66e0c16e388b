"""Batch: sequences with separate caches in one forward pass, compared with each sequence alone."""

import copy
import gc

import pytest
import torch
from generation import error, logits_of
from models import ids, model

from kvcompress import _C, H2O, Batch, KVCache, PagedKV, SnapKV, StreamingLLM, enable

LENGTHS = (50, 7, 90, 1)
PASSES = [LENGTHS, *[(1, 1, 1, 1)] * 18, (1, 20, 1, 33), *[(1, 1, 1, 1)] * 20]


def ours(name="llama"):
    m = model(name)
    enable(m, verbose=False)
    return m


def run(m, caches, tokens, passes):
    """Logits of each sequence's last token, [passes, sequences, vocab]."""
    out, at = [], [c.get_seq_length() for c in caches]
    for counts in passes:
        step = Batch(caches, counts)
        new = torch.cat([t[:, a : a + n] for t, a, n in zip(tokens, at, counts, strict=True)], 1)
        at = [a + n for a, n in zip(at, counts, strict=True)]
        with torch.no_grad():
            out.append(m(new, position_ids=step.positions, past_key_values=step, logits_to_keep=step.last).logits[0])
    return torch.stack(out)


@pytest.mark.parametrize(
    ("key", "policy", "bound"),
    [
        ("raw", None, 2e-5),
        ("int8", None, 5e-3),
        ("int4", None, 5e-2),
        ("kivi4", None, 5e-2),
        ("raw", H2O(32), 2e-5),
        ("int4", H2O(32, heads="shared"), 5e-2),
        ("int8", SnapKV(40), 5e-3),
        ("raw", StreamingLLM(20), 2e-5),
    ],
)
def test_each_sequence_as_alone(key, policy, bound):
    """Rounding differs (a matrix product over N rows), so codes may differ by a level."""
    m, pool = ours(), _C.Pool()
    tokens = [ids(1, n + 120, seed=n) for n in LENGTHS]
    caches = [KVCache(m.config, key, policy=policy, page_size=16, pool=pool) for _ in LENGTHS]
    got = run(m, caches, tokens, PASSES)
    for i, own in enumerate(tokens):
        alone = KVCache(m.config, key, policy=policy, page_size=16)
        counts = [counts[i] for counts in PASSES]
        want = torch.stack([x[0, -1] for x in logits_of(m, alone, counts, own)])
        assert error(got[:, i], want) <= bound
        assert caches[i].stats()["kept"] == alone.stats()["kept"]
        for layer in range(2):
            mine, his = caches[i].kept(layer), alone.kept(layer)
            if key == "raw":
                assert all(torch.equal(a, b) for a, b in zip(mine.slots[0], his.slots[0], strict=True))
            if mine.scores:
                torch.testing.assert_close(mine.scores[0][0].sum(), his.scores[0][0].sum(), rtol=1e-3, atol=1e-3)
    del caches
    gc.collect()
    assert pool.stats()["used"] == 0


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss_full"])
def test_families(name):
    """Norms of q and k; the model's attention sinks (s_aux)."""
    if name == "gpt_oss_full":
        import transformers as hf
        from models import SIZE

        torch.manual_seed(3)
        config = hf.GptOssConfig(**SIZE, num_local_experts=2, num_experts_per_tok=1, layer_types=["full_attention"] * 2)
        m = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
        for layer in m.model.layers:
            layer.self_attn.sinks.data.normal_(0, 1)
        enable(m, verbose=False)
    else:
        m = ours(name)
    pool, tokens = _C.Pool(), [ids(1, 90, seed=n) for n in range(3)]
    got = run(m, [KVCache(m.config, "raw", page_size=16, pool=pool) for _ in tokens], tokens,
              [(40, 3, 20), *[(1, 1, 1)] * 9])  # fmt: skip
    for i, n in enumerate((40, 3, 20)):
        want = torch.stack([x[0, -1] for x in logits_of(m, KVCache(m.config, "raw"), [n, *[1] * 9], tokens[i])])
        assert error(got[:, i], want) < 2e-5


def test_joining_leaving_forking_suspending():
    """Sequences join, leave, share pages, and are suspended: the others are unaffected."""
    m, pool = ours(), _C.Pool()
    tokens = [ids(1, 200, seed=n) for n in range(3)]
    a, b = (KVCache(m.config, "int8", page_size=16, pool=pool) for _ in range(2))
    first = run(m, [a, b], tokens[:2], [(40, 60), (1, 1), (1, 1)])
    fork = copy.deepcopy(a)
    b.suspend()
    alone = run(m, [a], tokens[:1], [(1,)] * 8)
    twin = run(m, [fork], tokens[:1], [(1,)] * 8)
    assert torch.equal(alone, twin)
    b.resume()
    both = run(m, [fork, b], tokens[:2], [(1, 1)] * 8)
    want = torch.stack([x[0, -1] for x in logits_of(m, KVCache(m.config, "int8", page_size=16), [60, *[1] * 10],
                                                    tokens[1])])  # fmt: skip
    assert error(torch.cat([first[:, 1], both[:, 1]]), want) < 5e-3
    pool.check()


def test_a_pool_that_ends_changes_nothing():
    """MemoryError in the middle of a pass: every sequence is unchanged, and continues when memory is available."""
    m, pool = ours(), _C.Pool(2 << 20)
    caches = [KVCache(m.config, "int8", page_size=16, pool=pool) for _ in range(20)]
    tokens = [ids(1, 1000, seed=n) for n in range(20)]
    run(m, caches, tokens, [(16,) * 20])
    failed, at = 0, 16
    with pytest.raises(MemoryError):
        while True:
            before = [c.to_dynamic_cache() for c in caches]
            run(m, caches, tokens, [(16,) * 20])
            at += 16
    for cache, old in zip(caches, before, strict=True):
        assert cache.get_seq_length() == at
        for layer, was in zip(cache.layers, old.layers, strict=True):
            assert torch.equal(layer.keys, was.keys) and torch.equal(layer.values, was.values)
        failed += 1
    pool.check()
    del cache, caches[3:], layer
    gc.collect()
    got = run(m, caches, tokens[:3], [(1, 1, 1)])
    want = [logits_of(m, KVCache(m.config, "int8", page_size=16), [*[16] * (at // 16), 1], t)[-1][0, -1]
            for t in tokens[:3]]  # fmt: skip
    assert failed == 20 and error(got[0], torch.stack(want)) < 5e-3


def test_bad_inputs():
    m, pool = ours(), _C.Pool()
    a, b = (KVCache(m.config, "int8", pool=pool) for _ in range(2))
    two = KVCache(m.config, "int8", pool=pool)
    logits_of(m, two, [5], ids(2, 5))
    gone = KVCache(m.config, "int8", pool=pool)
    logits_of(m, gone, [5], ids(1, 5))
    gone.suspend()
    for caches, counts, text in (
        ([], None, "a count for each"),
        ([a, b], [1], "a count for each"),
        ([a, b], [1, 0], "counts"),
        ([a, a], None, "got one twice"),
        ([a, KVCache(m.config, "int8")], None, "the same model and pool"),
        ([a, two], None, "one sequence, got 2"),
        ([gone], None, "suspended"),
        ([KVCache(ours("mistral").config, "int8")], None, "full-attention"),
    ):
        with pytest.raises(ValueError, match=text):
            Batch(caches, counts)
        if a in caches:  # the others of the batch continue without the rejected one
            assert Batch([a, b]).last.tolist() == [0, 1]
    for given, text in (
        ((["a"],), "a KVCache, got str"),
        ((m,), r"Batch: caches: expected a list of KVCaches, got \w+ForCausalLM"),
        ((a,), "Batch: caches: expected a list of KVCaches, got KVCache"),
        (([a], 1), "Batch: counts: expected a list of ints, got int"),
    ):
        with pytest.raises(TypeError, match=text):
            Batch(*given)
    with pytest.raises(ValueError, match="tokens of all sequences"), torch.no_grad():
        m(ids(1, 4), past_key_values=Batch([a, b], [2, 3]))
    with pytest.raises(ValueError, match="not padded"), torch.no_grad():
        m(ids(1, 5), attention_mask=torch.tensor([[0, 1, 1, 1, 1]]), past_key_values=Batch([a, b], [2, 3]))
    m.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="enable"), torch.no_grad():
        m(ids(1, 5), past_key_values=Batch([a, b], [2, 3]))
    assert a.get_seq_length() == b.get_seq_length() == 0


def test_a_sequence_that_cannot_be_admitted_concerns_itself_alone():
    """A prompt that does not fit, or a cache of another pool: the error names it, and the others continue."""
    m, tokens = ours(), [ids(1, 60, seed=n) for n in range(2)]
    prompt, outs = ids(1, 1020, seed=9), []
    for visited in (False, True):
        pool = _C.Pool(1 << 20)
        caches = [KVCache(m.config, "raw", page_size=16, pool=pool) for _ in tokens]
        out = run(m, caches, tokens, [(20, 20)])
        if visited:
            for guest in (KVCache(m.config, "raw", page_size=16, pool=pool), KVCache(m.config, pool=_C.Pool())):
                before = [x.store.dense() for c in caches for x in c.layers]
                with pytest.raises((MemoryError, ValueError)) as raised:
                    step = Batch([*caches, guest], (1, 1, prompt.shape[1]))
                    new = torch.cat([*(t[:, 20:21] for t in tokens), prompt], 1)
                    with torch.no_grad():
                        m(new, position_ids=step.positions, past_key_values=step)
                assert "caches[2]" in str(raised.value) or (isinstance(raised.value, MemoryError) and step.failed == 2)
                after = [x.store.dense() for c in caches for x in c.layers]
                assert all(
                    torch.equal(x, y) for a, b in zip(before, after, strict=True) for x, y in zip(a, b, strict=True)
                )
            assert guest.get_seq_length() == 0
            with pytest.raises(TypeError, match=r"caches\[1\]: expected a KVCache, got str"):
                Batch([caches[0], "another"])
        outs.append(torch.cat([out, run(m, caches, tokens, [(1, 1)] * 20)]))
        pool.check()
    assert torch.equal(*outs)


def test_sequences_that_decode_are_checked_together():
    """The new tokens of equal sequences are sliced and checked once; another dtype among them is still found."""
    m, pool = ours(), _C.Pool()
    caches = [KVCache(m.config, "int8", page_size=16, pool=pool) for _ in range(5)]
    run(m, caches, [ids(1, 60, seed=n) for n in range(5)], [(40,) * 5])
    with pytest.MonkeyPatch.context() as patch:
        checked, check = [], PagedKV.check_pair
        patch.setattr(PagedKV, "check_pair", lambda store, *pair: checked.append(store) or check(store, *pair))
        run(m, caches, [ids(1, 60, seed=n) for n in range(5)], [(1,) * 5])
        assert checked == [layer.store for layer in caches[0].layers]
    half = copy.deepcopy(m).half()
    enable(half, verbose=False)
    other = KVCache(m.config, "int8", page_size=16, pool=pool)
    logits_of(half, other, [40], ids(1, 40))
    step = Batch([*caches, other])
    with pytest.raises(TypeError, match="float16"), torch.no_grad():
        m(ids(1, 6), position_ids=step.positions, past_key_values=step)
    assert step.failed == 5
    assert [c.get_seq_length() for c in (*caches, other)] == [41] * 5 + [40]


# ------------------------------------------------------------------ exceptions in the model's own code


def fail_once(module):
    """Its next call raises, as docs/serving.md describes: the caches do not see that."""

    def fail(*args):
        hook.remove()
        raise RuntimeError("elsewhere")

    hook = module.register_forward_hook(fail)


def repeated(m, key, policy, passes, place, undo):
    """`run`; each pass is repeated after an exception at `place`, with the caches of undo(step, caches, copies)."""
    pool, tokens = _C.Pool(), [ids(1, 300, seed=n) for n in range(2)]
    caches = [KVCache(m.config, key, policy=policy, page_size=16, pool=pool) for _ in tokens]
    out, at = [], [0, 0]
    for counts in passes:
        new = torch.cat([t[:, a : a + n] for t, a, n in zip(tokens, at, counts, strict=True)], 1)
        if place is not None:
            copies, step = copy.deepcopy(caches), Batch(caches, counts)
            fail_once(place)
            with pytest.raises(RuntimeError, match="elsewhere"), torch.no_grad():
                m(new, position_ids=step.positions, past_key_values=step)
            assert [c.get_seq_length() for c in caches] == [b + n for b, n in zip(step.bases, counts, strict=True)]
            caches = undo(step, caches, copies)
            assert [c.get_seq_length() for c in caches] == at
            del copies
        out.append(run(m, caches, [t[:, a:] for t, a in zip(tokens, at, strict=True)], [counts]))
        at = [a + n for a, n in zip(at, counts, strict=True)]
    pool.check()
    return torch.cat(out)


def take_copies(step, caches, copies):
    return copies


def crop(step, caches, copies):
    for cache, base in zip(caches, step.bases, strict=True):
        cache.crop(base - cache.get_seq_length())
    return caches


def roll_back(step, caches, copies):
    step.rollback()
    return caches


@pytest.mark.parametrize(("key", "policy"), [("raw", None), ("int8", None), ("int4", None), ("int8", H2O(32))])
def test_a_pass_that_failed_elsewhere_can_be_repeated(key, policy):
    """As docs/serving.md says: with copies; cropped, if passes are short; rolled back between two layers."""
    m, steps = ours(), [(1, 1)] * 20
    short, long = [(50, 7), *steps, (16, 9), *steps], [(50, 7), *steps, (40, 70), *steps[:3]]
    for passes, place, undo in (
        (long, m.lm_head, take_copies),
        (long, m.model.layers[0].mlp, take_copies),
        (long, m.model.layers[0].mlp, roll_back),
        *([(short, m.lm_head, crop)] if policy is None else []),
    ):
        want = repeated(m, key, policy, passes, None, None)
        got = repeated(m, key, policy, passes, place, undo)
        assert error(got, want) <= (5e-3 if policy and undo is take_copies else 0)  # evictions leave shared pages alone
