"""Sliding-window layers: pages outside the window are freed, without other effects."""

import copy
import random

import pytest
import torch
import transformers as hf
from families import family
from generation import PAGE, cache_of, check_same, error, generate, logits_of, select
from models import ids, left_pads, model

from kvcompress import KVCache, PagedKV, policies
from kvcompress.hf import masks
from kvcompress.hf.attention import kvcompress_mask

H, G, D = 2, 2, 32
KINDS = [(24, False), (100, False), (32, True), (96, True)]


class Plain:
    """All keys and values of all rows, and float64 attention by definition."""

    def __init__(self, batch, window, chunked):
        self.window, self.chunked = window, chunked
        self.k = self.v = torch.zeros(batch, H, 0, D)
        self.real = torch.zeros(batch, 0, dtype=torch.bool)

    def append(self, k, v, own):
        self.k, self.v = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)
        self.real = torch.cat([self.real, own], 1)

    def sees(self, T):
        slots = torch.arange(self.k.shape[2])
        asks = slots[len(slots) - T :, None]
        sees = (slots <= asks)[None] & self.real[:, None]
        if self.chunked:
            first = self.real.int().argmax(1)[:, None, None]
            return sees & ((slots - first) // self.window == (asks - first) // self.window)
        return sees & (slots > asks - self.window)

    def attend(self, q):
        k, v = (x.double().repeat_interleave(G, 1) for x in (self.k, self.v))
        sees = self.sees(q.shape[2])[:, None]
        p = (q.double() @ k.transpose(2, 3) / D**0.5).masked_fill(~sees, -torch.inf).softmax(-1)
        return p.nan_to_num(0) @ v

    def crop(self, seen):
        self.k, self.v, self.real = self.k[:, :, :seen], self.v[:, :, :seen], self.real[:, :seen]

    def select(self, index):
        self.k, self.v, self.real = self.k[index], self.v[index], self.real[index]


def pair(window, chunked, batch=2, key="raw", page_size=PAGE):
    store = PagedKV(H, D, key=key, window=window, chunked=chunked, page_size=page_size, batch=batch)
    return store, Plain(batch, window, chunked)


def step(store, plain, T, pads, generator, bound=1e-5):
    """One call, compared with the definition; rows have `pads` tokens of left padding."""
    batch = store.batch
    own = torch.arange(T) >= torch.tensor(pads)[:, None]
    q, k, v = (torch.randn(batch, h, T, D, generator=generator) for h in (H * G, H, H))
    out = store.attend(q, k, v, mask=None if own.all() else own)[0]
    plain.append(k, v, own)
    want = plain.attend(q)
    assert error(out, want) < bound
    assert torch.all(out[~plain.sees(T).any(-1)[:, None].expand(-1, H * G, -1)] == 0)


def most(store, T):
    """Maximum number of tokens of a row in a layer after a call of T slots."""
    ring, slack = store.sliding, min(T, store.page_size)
    return ring.window + slack + store.page_size - 1


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (2, 3))])
@pytest.mark.parametrize("window,chunked", KINDS)
def test_a_ring_attends_to_what_its_window_sees(window, chunked, seed):
    """Random sequences of calls, rejected drafts, row selection, copies."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    store, plain = pair(window, chunked, batch=3)
    step(store, plain, chance.randint(40, 260), [0, 7, 39], generator)
    for _ in range(40):
        T = chance.choice([1, 1, 2, 5, PAGE, 40, 130])
        step(store, plain, T, [0] * store.batch, generator)
        assert store.stats()["kept"] <= store.batch * most(store, T)
        act = chance.random()
        if act < 0.4:
            back = chance.randint(0, min(T, PAGE))
            store.crop(store.seen - back)
            plain.crop(plain.k.shape[2] - back)
        elif act < 0.6:
            index = [chance.randrange(store.batch) for _ in range(chance.randint(1, 4))]
            store.select(index)
            plain.select(index)
        elif act < 0.7:
            twin = store.clone()
            step(twin, copy.deepcopy(plain), 3, [0] * store.batch, generator)
            assert twin.seen == store.seen + 3
    store.page_store.pool.check()


@pytest.mark.parametrize("key,options", [
    ("int8", {}), ("int4", {}), ("kivi2", {}), ("nvfp4", {}), ("int8", {"residual_length": 0}),
    ("int4", {"residual_length": 20}),
])  # fmt: skip
@pytest.mark.parametrize("window,chunked", KINDS)
def test_quantized_rings_attend_to_what_they_decode(window, chunked, key, options):
    store = PagedKV(H, D, key=key, window=window, chunked=chunked, page_size=PAGE, **options)
    generator = torch.Generator().manual_seed(5)
    for T in (150, 1, 1, 40, 7, 1, 33, 1):
        q, k, v = (torch.randn(1, h, T, D, generator=generator) for h in (H * G, H, H))
        start = max(0, store.seen - window + 1)
        plain = Plain(1, window, chunked)
        twin = store.clone()
        plain.append(*twin.append_dense(k, v, start=start), torch.ones(1, twin.seen - start, dtype=torch.bool))
        if chunked:  # slots count from 0, not from `start`
            hidden = torch.zeros(1, H, start, D)
            plain.k, plain.v = (torch.cat([hidden, x], 2) for x in (plain.k, plain.v))
            plain.real = torch.ones(1, twin.seen, dtype=torch.bool)
        assert error(store.attend(q, k, v)[0], plain.attend(q)) < 2e-3


@pytest.mark.parametrize("window,chunked", KINDS)
def test_memory_is_bounded(window, chunked):
    """Pages are freed, and returned to the system: memory stops growing."""
    store = PagedKV(H, D, key="int4", window=window, chunked=chunked, page_size=PAGE)
    x, held = torch.randn(1, H, 1, D), []
    store.append(*torch.randn(2, 1, H, 2000, D))
    for _ in range(8 * window):
        store.append(x, x)
        held.append(store.stats()["bytes"])
        assert store.stats()["kept"] <= most(store, 1)
    assert max(held[4 * window :]) <= max(held[: 4 * window])


def test_a_ring_takes_back_its_last_call_and_no_more():
    store, _ = pair(24, False, 1)
    x = torch.randn(1, H, 200, D)
    store.append(x, x)
    with pytest.raises(ValueError, match="expected to keep 0 or at least 184 slots, got 183: earlier slots that a w"):
        store.crop(183)
    assert store.seen == 200
    store.crop(184)
    with pytest.raises(ValueError, match="expected at most 0 queries whose window is still stored, got 1"):
        store.attend(torch.randn(1, H, 1, D))
    store.append(x[:, :, :5], x[:, :, :5])
    assert store.attend(torch.randn(1, H, 5, D))[0].isfinite().all()
    store.crop(0)
    store.append(x, x)
    store.reset()
    store.append(x, x)
    store.sliding.recording = True
    store.append(x, x)
    store.crop(200)
    assert store.kept()[1][0][-1] == 199 and store.kept_heads().positions[0][0].tolist() == list(range(160, 200))


@pytest.mark.parametrize("options,words", [
    ({"sinks": 4}, "no sinks with a window, got 4"),
    ({"policy": policies.SlidingWindow(30)}, "no policy with a window"),
    ({"spans": [(0, None, "int4")]}, "no spans with a window"),
    ({"chunked": True, "window": 40}, "multiple of page_size=16, got 40"),
    ({"window": 0, "chunked": True}, "window: expected"),
])  # fmt: skip
def test_what_does_not_go_with_a_window(options, words):
    with pytest.raises(ValueError, match=words):
        PagedKV(H, D, **{"window": 24, "page_size": 16, **options})


def test_windows_of_calls():
    store, _ = pair(24, False, 1)
    x, q = torch.randn(1, H, 30, D), torch.randn(1, H, 30, D)
    narrow, own = store.clone().attend(q, x, x, window=7)[0], store.clone().attend(q, x, x)[0]
    assert not torch.equal(narrow, own) and torch.equal(own, store.clone().attend(q, x, x, window=24)[0])
    with pytest.raises(ValueError, match="at most the layer's 24, got 25"):
        store.attend(q, x, x, window=25)


# ---------------------------------------------------------------- masks


@pytest.mark.parametrize("name", ["mistral", "llama4"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_mask_of_a_window_is_transformers_own_when_computed(name, padded):
    from transformers.masking_utils import create_chunked_causal_mask, create_sliding_window_causal_mask

    m = family(name)
    make = create_sliding_window_causal_mask if name == "mistral" else create_chunked_causal_mask
    cache = hf.DynamicCache(config=m.config)
    x = torch.randn(2, 2, 50, 32)
    for i in range(len(cache.layers)):
        cache.update(x, x, i)
    mask = left_pads(ids(2, 60), [0, 9])[1] if padded else None
    given = {"inputs_embeds": torch.zeros(2, 10, 4), "attention_mask": mask, "past_key_values": cache}
    m.set_attn_implementation("sdpa")
    want = make(m.config, **given)
    m.set_attn_implementation("kvcompress")
    got = make(m.config, **given)
    assert isinstance(got, masks.WindowMask)
    assert (got.window, got.chunked) == {"mistral": (24, False), "llama4": (32, True)}[name]
    assert got.shape == want.shape and torch.equal(got & True, want) and "WindowMask" in repr(got)
    assert (got.padding is None) == (not padded) and (not padded or torch.equal(got.padding, mask.bool()))


def test_other_masks_are_not_taken_for_windows():
    from transformers import masking_utils as hm

    window = hm.sliding_window_causal_mask_function(8)
    assert masks.window_of(window) == (8, False)
    image = hm.or_masks(window, hm.bidirectional_mask_function)
    for other in (image, hm.and_masks(window, image), hm.causal_mask_function, lambda b, h, q, k: q >= k,
                  hm.sliding_window_bidirectional_mask_function(8)):  # fmt: skip
        assert masks.window_of(other) is None
    got = kvcompress_mask(1, 4, 4, mask_function=image, allow_is_causal_skip=False)
    assert type(got) is torch.Tensor and got.all()


# ---------------------------------------------------------------- in a model


def test_a_long_conversation_holds_what_the_windows_see():
    """All layers of Mistral: memory stops growing, and pages take less than DynamicCache's ring buffer."""
    config = hf.MistralConfig(**{**model("mistral").config.to_dict(), "sliding_window": 256, "num_hidden_layers": 2})
    m = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    assert select(m, "kvcompress")
    theirs, ours, held = hf.DynamicCache(config=config), KVCache(m.config, "int4"), []
    for i, T in enumerate([900, 1, 70, 1, 300, *[1] * 40]):
        for cache in (theirs, ours):
            logits_of(m, cache, [T], ids(1, T, seed=i))
        held.append(ours.stats()["bytes"])
    dense = sum(x.nbytes for layer in theirs.layers for x in (layer.keys, layer.values))
    parts = ours.stats()["parts"]
    assert max(held[5:]) <= max(held[:5]) and parts["sealed"] + parts["open"] < 0.45 * dense
    assert ours.get_seq_length() == theirs.get_seq_length() == 1312
    assert all(layer.store.page_size == 32 for layer in ours.layers)


@pytest.mark.parametrize("implementation", ["kvcompress", "sdpa"])
@pytest.mark.parametrize("name", ["mistral", "llama4", "gemma3n"])
def test_crop_goes_as_far_as_transformers_own(name, implementation):
    m = select(family(name), implementation)
    theirs, ours = hf.DynamicCache(config=m.config), cache_of(m, "raw")
    for cache in (theirs, ours):
        cache.activate_past_recording()
        logits_of(m, cache, [70, 1, 60, 9])
        cache.crop(-65)
    got, want = (logits_of(m, cache, [20, 1], ids(1, 21, seed=3)) for cache in (ours, theirs))
    assert error(torch.cat(got, 1), torch.cat(want, 1)) < 1e-5
    ours.crop(0)  # frees what recording kept
    assert all(layer.store.stats()["kept"] < 32 + 2 * PAGE for layer in ours.layers if getattr(layer, "window", 0))


def test_a_crop_too_far_changes_no_layer():
    m = select(model("gemma3"), "kvcompress")
    cache = cache_of(m, "int8")
    logits_of(m, cache, [100, 1])
    with pytest.raises(ValueError, match="activate_past_recording"):
        cache.crop(-30)
    assert {layer.store.seen for layer in cache.layers} == {101}
    twin = copy.deepcopy(cache)
    cache.crop(-1)
    twin.crop(-101)
    assert cache.get_seq_length() == 100 and twin.get_seq_length() == 0


@pytest.mark.parametrize("name", ["mistral", "llama4"])
def test_a_prefix_of_others_goes_on(name):
    """A padded DynamicCache far past its window is converted; chunks start at the same slots."""
    m = select(family(name), "eager")
    tokens, mask = left_pads(ids(2, 120), [0, 11])
    theirs = hf.DynamicCache(config=m.config)
    logits_of(m, theirs, [110], tokens[:, :110], mask[:, :110])
    ours = KVCache.from_cache(theirs, m.config, "raw", page_size=PAGE, attention_mask=mask[:, :110])
    select(m, "kvcompress")
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, 110:]
    with torch.no_grad():
        got, want = (
            m(tokens[:, 110:], attention_mask=mask, position_ids=positions, past_key_values=c).logits
            for c in (ours, theirs)
        )
    assert error(got, want) < 1e-5
    assert all(layer.store.kept()[1][1][-1] == 108 for layer in ours.layers)
    twin = KVCache.from_cache(hf.DynamicCache(config=m.config), m.config)
    assert twin.get_seq_length() == 0


def test_chunks_under_other_attention_keep_twice_as_much_until_pads_are_known():
    m = select(family("llama4"), "sdpa")
    tokens, mask = left_pads(ids(2, 75), [0, 5])
    cache = cache_of(m, "raw")
    want = generate(m, tokens, hf.DynamicCache(config=m.config), mask, max_new_tokens=40)
    check_same([generate(m, tokens, cache, mask, max_new_tokens=40)], [want])
    ring = cache.layers[0].store.sliding
    assert not ring.sure and ring.clone(cache.layers[0].store).sure is False
    cache.reset()
    assert ring.sure
