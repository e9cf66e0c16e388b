"""PrefixCache: what a prefix depends on besides its tokens."""

from __future__ import annotations

import copy
import tracemalloc

import numpy as np
import pytest
import torch
from models import ids
from test_prefix import OPTIONS, committed, feed

from kvcompress import PrefixCache, SlidingWindow


def test_other_keys_miss(llama):
    prefix, prompt = committed(llama, "int8", salt="a", extra=("adapter",))
    assert prefix.open(prompt, extra=("adapter",)).get_seq_length() == 84

    def misses(tokens=prompt, extra=("adapter",), **options):
        return prefix.open(tokens, extra=extra, **options).get_seq_length() == 0

    assert misses(key="int4") and misses(value="int4") and misses(policy=SlidingWindow(200))
    assert misses(page_size=32) and misses(sinks=0) and misses(residual_length=32) and misses(guard=True)
    assert misses(spans=[(0, 50, "int4")]) and misses(per_layer={0: "raw"})
    assert misses(extra=()) and misses(extra=("adapte", "r")) and misses(extra=(b"adapter",))
    for at in (0, 3, 4, 19):
        wrong = prompt.clone()
        wrong[0, at] += 1
        assert misses(wrong)
    wrong = prompt.clone()
    wrong[0, 20] += 1  # the first token of the second link: the first link is still known
    assert prefix.open(wrong, extra=("adapter",)).get_seq_length() == 20
    for other in ({"salt": "b"}, {"salt": b"a"}, {"model": "tuned"}):  # in the same index
        twin = PrefixCache(llama.config, "int8", **{"salt": "a", **OPTIONS, **other}, pool=prefix.pool)
        twin._prefix, twin._shapes = prefix._prefix, prefix._shapes
        assert twin.open(prompt, extra=("adapter",)).get_seq_length() == 0
    assert prefix.open(prompt, extra=("adapter",)).get_seq_length() == 84


def test_extra_inputs_are_hashed_completely(llama):
    """Images and other inputs: every element counts, whatever str() prints."""
    image = torch.zeros(3, 64, 64)
    pixel = image.clone()
    pixel[1, 30, 30] = 1
    for known, *others in (
        (image, pixel, image.half(), image.reshape(64, 3, 64), image.numpy(), [image, image], [[image]]),
        ([image.numpy()], [pixel.numpy()], [image.numpy().view(np.int32)], image),
        (image.bfloat16(), pixel.bfloat16(), image.half()),
        (torch.zeros(1, 1).expand(1, 3)[:, :1], torch.ones(1, 1), torch.zeros(1)),
        (["a", ["b", 5]], ["a", "b", 5], ["a", ["b", 6]], ["a", ["b", "5"]], "a", b"a"),
        (5, 6, "5", True, 5.0),
        (None, (), "None"),
    ):
        prefix, prompt = committed(llama, "int8", extra=known)
        assert prefix.open(prompt, extra=known).get_seq_length() == 84
        if isinstance(known, torch.Tensor):
            assert prefix.open(prompt, extra=[known.clone()]).get_seq_length() == 84
        for other in others:
            assert prefix.open(prompt, extra=other).get_seq_length() == 0, (known, other)
    for wrong in ({"a": 1}, {1, 2}, object(), [{"a": 1}], iter("a"), np.array([object()])):
        with pytest.raises(TypeError, match="salt or extra: expected str"):
            prefix.open(prompt, extra=wrong)
    with pytest.raises(TypeError, match="salt or extra: expected str"):
        PrefixCache(llama.config, salt={"tenant": 1})


def test_other_weights_of_the_same_shape_are_another_model(llama):
    prefix, prompt = committed(llama, "int8")
    config = copy.deepcopy(llama.config)
    config._name_or_path = "elsewhere"
    twin = PrefixCache(config, "int8", **OPTIONS, pool=prefix.pool)
    twin._prefix, twin._shapes = prefix._prefix, prefix._shapes
    assert twin.open(prompt).get_seq_length() == 0


def test_extra_inputs_leave_nothing_behind(llama):
    """An image per request: neither commits nor evicted prefixes take memory."""
    prefix, prompt = PrefixCache(llama.config, "int8", max_entries=2, **OPTIONS), ids(1, 60, 1)
    feed(llama, cache := prefix.open(prompt), prompt)

    def commit(numbers):
        for i in numbers:
            prefix.commit(cache, prompt, extra=i)

    tracemalloc.start()
    commit(range(100))
    before = tracemalloc.get_traced_memory()[0]
    commit(range(100, 500))
    assert tracemalloc.get_traced_memory()[0] - before < 400 * 50
    tracemalloc.stop()
    assert prefix.open(prompt, extra=499).get_seq_length() == 36 and not prefix.open(prompt, extra=498).get_seq_length()


def test_models_of_two_dtypes_share_nothing(llama):
    """The config does not tell in which dtype a model runs."""
    prefix, half, prompt = PrefixCache(llama.config, "int8", **OPTIONS), copy.deepcopy(llama).bfloat16(), ids(1, 60, 1)
    for made in (llama, half):
        feed(made, cache := prefix.new(), prompt)
        assert prefix.commit(cache, prompt, pin=True) == 36
    assert prefix.stats()["entries"] == prefix.stats()["pinned"] == 2 * 2
    assert prefix.open(prompt).layers[0].store.dtype == torch.float32
    prefix.unpin(prompt)
    assert prefix.stats()["pinned"] == 0
