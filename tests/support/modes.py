"""The generation modes of the product test: each (model, new, assistant) -> Run, with a cache from new(). `alone`: the
expected result, without the method of the cache under test."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from generation import SPLIT, generate, logits_of
from models import ids, left_pads


@dataclass
class Run:
    """Result of a mode: outputs of generate() (or logits); the cache; the 2D mask of the last prompt, None if the rows
    of the cache are not those of the last output."""

    outputs: list[Any]
    cache: Any
    mask: torch.Tensor | None = None


def ones(tokens):
    return torch.ones_like(tokens)


def _plain(m, cache, tokens, mask=None, **options):
    mask = ones(tokens) if mask is None else mask
    return Run([generate(m, tokens, cache, mask, **options)], cache, mask)


def greedy(m, new, assistant):
    return _plain(m, new(), ids(2, 45))


def sampling(m, new, assistant):
    torch.manual_seed(11)
    return _plain(m, new(), ids(2, 45), do_sample=True, temperature=1.3, top_k=0)


def return_sequences(m, new, assistant):
    torch.manual_seed(12)
    run = _plain(m, new(), ids(2, 33), do_sample=True, top_k=0, num_return_sequences=3)
    run.mask = run.mask.repeat_interleave(3, 0)
    return run


def beams(m, new, assistant):
    run = _plain(m, new(), *left_pads(ids(2, 40), [0, 9]), num_beams=4, num_return_sequences=2)
    run.mask = None  # the cache holds all beams
    return run


def assisted(m, new, assistant):
    """The assistant is the model plus noise, so part of its drafts is accepted."""
    return _plain(m, new(), ids(1, 30), assistant_model=assistant(), max_new_tokens=30)


def prompt_lookup(m, new, assistant):
    """The prompt is repetitive: drafts are found, and many are rejected."""
    return _plain(m, new(), ids(1, 12).repeat(1, 4), prompt_lookup_num_tokens=4, max_new_tokens=40)


def left_padding(m, new, assistant):
    return _plain(m, new(), *left_pads(ids(4, 50), [0, 7, 30, 49]))


def early_finish(m, new, assistant):
    """Rows reach the end token at different steps and continue with padding."""
    return _plain(m, new(), *left_pads(ids(4, 37), [0, 3, 11, 20]), eos_token_id=list(range(1, 12)))


def chunked(m, new, assistant):
    return _plain(m, new(), *left_pads(ids(2, 61), [0, 20]), prefill_chunk_size=11)


def two_turns(m, new, assistant):
    cache = new()
    tokens, mask = left_pads(ids(2, 33), [0, 5])
    first = generate(m, tokens, cache, mask)
    more = torch.cat([first.sequences, ids(2, 19, seed=1)], 1)
    mask = torch.cat([mask, torch.ones(2, more.shape[1] - 33, dtype=mask.dtype)], 1)
    return Run([first, generate(m, more, cache, mask)], cache, mask)


def _filled(m, new, tokens):
    cache = new()
    with torch.no_grad():
        m(tokens, past_key_values=cache)
    return cache


def deepcopied(m, new, assistant):
    """A prefix is computed once and used for two questions; the second continues from a copy of the first."""
    prefix = ids(1, 35)
    base, outputs = _filled(m, new, prefix), []
    for seed in (1, 2):
        twin, both = copy.deepcopy(base), torch.cat([prefix, ids(1, 9, seed=seed)], 1)
        outputs.append(generate(m, both, twin, max_new_tokens=10))
    assert base.get_seq_length() == 35
    return Run(outputs, twin, ones(both))


def _go_on(m, cache, rows):
    more = torch.cat([rows, ids(rows.shape[0], 7, seed=4)], 1)
    return _plain(m, cache, more, max_new_tokens=10)


def select(m, new, assistant):
    tokens = ids(3, 40)
    cache = _filled(m, new, tokens)
    cache.batch_select_indices(torch.tensor([2, 0]))
    return _go_on(m, cache, tokens[[2, 0]])


def repeat(m, new, assistant):
    tokens = ids(2, 40)
    cache = _filled(m, new, tokens)
    cache.batch_repeat_interleave(2)
    return _go_on(m, cache, tokens.repeat_interleave(2, 0))


def reset(m, new, assistant):
    cache = new()
    generate(m, ids(3, 30), cache, max_new_tokens=5)
    cache.reset()
    return _plain(m, cache, ids(2, 41), max_new_tokens=10)


select.alone = lambda m, new, assistant: _go_on(m, _filled(m, new, ids(3, 40)[[2, 0]]), ids(3, 40)[[2, 0]])
repeat.alone = lambda m, new, assistant: _go_on(
    m, _filled(m, new, ids(2, 40).repeat_interleave(2, 0)), ids(2, 40).repeat_interleave(2, 0)
)
reset.alone = lambda m, new, assistant: _plain(m, new(), ids(2, 41), max_new_tokens=10)


def inference_mode(m, new, assistant):
    with torch.inference_mode():
        return _plain(m, new(), ids(2, 45), max_new_tokens=8)


def forced(m, new, assistant):
    """Logits of a given text in calls of many lengths, with padded rows."""
    tokens, mask = left_pads(ids(3, sum(SPLIT)), [0, 13, 30])
    cache = new()
    logits = torch.cat(logits_of(m, cache, SPLIT, tokens, mask), 1)
    return Run([logits[mask.bool()]], cache)


def _half(dtype):
    def run(m, new, assistant):
        return forced(m, new, assistant)

    run.dtype = dtype
    return run


MODES = {f.__name__: f for f in (
    greedy, sampling, return_sequences, beams, assisted, prompt_lookup, left_padding, early_finish, chunked, two_turns,
    deepcopied, select, repeat, reset, inference_mode, forced,
)}  # fmt: skip
MODES |= {"bf16": _half(torch.bfloat16), "fp16": _half(torch.float16)}
CROPPING = ("assisted", "prompt_lookup")
