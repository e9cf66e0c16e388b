"""Measurements of one cache on one piece of text, read *through the cache*.

The context is fed first, like a prompt; the scored tokens follow in chunks that attend to the compressed context. (A
single forward pass would not test the cache: transformers' quantized caches return the raw keys of the first call.)
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ...hf.configs import CACHE_ARGUMENT
from ..strategy import Strategy
from .caches import attention_for, held_bytes, open_cache
from .tasks import Sample

BLOCK = 16
"""Number of tokens to average before results are stored: the unit of the bootstrap."""

_DYNAMIC = Strategy("dynamic")
Opener = Callable[[PreTrainedModel, Strategy], Any]


def _forward(model: PreTrainedModel, ids: torch.Tensor, cache: Any, keep: int) -> torch.Tensor:
    """Logits [keep, V] for the last `keep` inputs."""
    return model(ids, **{CACHE_ARGUMENT: cache}, use_cache=True, logits_to_keep=keep).logits[0, -keep:]


def _prefill(model: PreTrainedModel, ids: torch.Tensor, cache: Any, chunk: int) -> torch.Tensor:
    """Feeds ids [1, T] in chunks of `chunk` tokens (0: in one call). Returns logits [1, V] for the last token."""
    logits = torch.empty(0)
    for at in range(0, ids.shape[1], chunk or ids.shape[1]):
        logits = _forward(model, ids[:, at : at + (chunk or ids.shape[1])], cache, 1)
    return logits


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, ids: torch.Tensor, scored: int) -> torch.Tensor:
    """Logits [scored, V] for the last `scored` inputs of ids [1, T], by one forward pass without a cache."""
    with attention_for(model, _DYNAMIC):
        return model(ids, use_cache=False, logits_to_keep=scored).logits[0, -scored:]


@torch.inference_mode()
def logits_through(
    model: PreTrainedModel, strategy: Strategy, ids: torch.Tensor, scored: int, chunk: int, prefill: int,
    open_it: Opener = open_cache,
) -> Iterator[torch.Tensor]:  # fmt: skip
    """The same logits, `chunk` rows at a time, computed through a cache that contains the tokens before."""
    context = ids.shape[1] - scored
    with attention_for(model, strategy):
        cache = open_it(model, strategy)
        if context:
            _prefill(model, ids[:, :context], cache, prefill)
        for at in range(context, ids.shape[1], chunk):
            part = ids[:, at : at + chunk]
            yield _forward(model, part, cache, part.shape[1])


def figures(reference: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Compares logits [N, V] with `reference` [N, V], for tokens followed by targets [N].

    Returns float64 [5, N], for each token: kl: KL(reference || logits) in nats; agree: 1 for the same most likely
    token; nll: negative log likelihood of the target in nats; nll_reference; accept: probability that a draft token
    sampled from logits is accepted by the reference, sum of min(p, q) (speculative sampling, arXiv 2211.17192).
    """
    want, got = (x.double().log_softmax(-1) for x in (reference, logits))
    return torch.stack([
        (want.exp() * (want - got)).sum(-1),
        (want.argmax(-1) == got.argmax(-1)).double(),
        -got.gather(-1, targets[:, None])[:, 0],
        -want.gather(-1, targets[:, None])[:, 0],
        torch.minimum(want.exp(), got.exp()).sum(-1),
    ])  # fmt: skip


def by_block(found: torch.Tensor) -> dict[str, list[float]]:
    """{name: means over blocks of BLOCK tokens} of `figures`; the last block may be shorter."""
    blocks = [part.mean(-1) for part in found.split(BLOCK, 1)]
    names = ("kl", "agree", "nll", "nll_reference", "accept")
    return {name: [float(b[i]) for b in blocks] for i, name in enumerate(names)}


@torch.inference_mode()
def quality(
    model: PreTrainedModel,
    strategy: Strategy,
    ids: torch.Tensor,
    scored: int,
    reference: torch.Tensor,
    *,
    chunk: int = 32,
    prefill: int = 0,
    open_it: Opener = open_cache,
) -> dict[str, list[float]]:
    """Compares the model with this cache to the model without a cache, on ids [1, context + scored + 1].

    The last `scored` inputs except the very last are compared with `reference` (from `reference_logits`). Returns means
    over blocks of BLOCK tokens, see `figures`. open_it: creates the cache, if no strategy describes it.
    """
    at, rows = 0, []
    for logits in logits_through(model, strategy, ids[:, :-1], scored, chunk, prefill, open_it):
        part = slice(at, at + len(logits))
        rows.append(figures(reference[part], logits, ids[0, -scored:][part]))
        at += len(logits)
    return by_block(torch.cat(rows, 1))


def _correct(model: PreTrainedModel, cache: Any, ids: list[int], answer: list[int], device: torch.device) -> int:
    """1 if each token of the answer is the most likely one after `ids`, else 0."""
    fed = torch.tensor([ids + answer[:-1]], device=device)
    logits = _forward(model, fed, cache, len(answer))
    return int(logits.argmax(-1).tolist() == answer)


@torch.inference_mode()
def retrieval(
    model: PreTrainedModel, strategy: Strategy, sample: Sample, *, prefill: int = 0, inside: int = 1
) -> dict[str, list[int]]:
    """For each question of a sample, 1 if it is answered correctly, else 0.

    outside: only the context was compressed, and each question follows, with a copy of the same cache. inside: the
    first `inside` questions again, each compressed together with the context (which favours policies that use the last
    queries).
    """
    device = model.device
    right: dict[str, list[int]] = {"outside": [], "inside": []}
    with attention_for(model, strategy):

        def compressed(ids: list[int]) -> Any:
            cache = open_cache(model, strategy)
            _prefill(model, torch.tensor([ids], device=device), cache, prefill)
            return cache

        cache = compressed(sample.context)
        for question, answer in sample.questions:
            try:
                own = copy.deepcopy(cache)
            except RuntimeError:  # quanto's tensors cannot be copied
                own = compressed(sample.context)
            right["outside"].append(_correct(model, own, question, answer, device))
        del cache
        for question, answer in sample.questions[:inside]:
            asked = compressed(sample.context + question[:-1])
            right["inside"].append(_correct(model, asked, question[-1:], answer, device))
    return right


# ---------------------------------------------------------------------- cost


def _resident(field: str) -> int:
    """A size of this process from /proc, in bytes; 0 without /proc."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), 0)


def _calm() -> None:
    """Collects garbage and returns free heap to the system, so that the size of a cache can be measured."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@torch.inference_mode()
def memory(model: PreTrainedModel, strategy: Strategy, ids: torch.Tensor, *, chunk: int = 256) -> dict[str, int | None]:
    """Memory in bytes after ids [1, T] were fed in chunks. held: the size of the cache; steady, peak: growth of the
    process or the CUDA allocator, at the end and at most; None if the system does not report it."""
    with attention_for(model, strategy):
        _forward(model, ids[:, :chunk], open_cache(model, strategy), 1)  # libraries, threads
        _calm()
        if model.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        else:
            before = _resident("VmRSS")
            try:
                Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
            except OSError:
                before = 0
        cache = open_cache(model, strategy)
        _prefill(model, ids, cache, chunk)
        if model.device.type == "cuda":
            peak, steady = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        else:
            peak = _resident("VmHWM")
            _calm()
            steady = _resident("VmRSS")
        held = held_bytes(cache)
    if not before:
        return {"held": held, "steady": None, "peak": None}
    return {"held": held, "steady": max(0, steady - before), "peak": max(0, peak - before)}


def _sync(model: PreTrainedModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


@torch.inference_mode()
def speed(
    model: PreTrainedModel, strategy: Strategy, ids: torch.Tensor, *, steps: int = 64, turn: int = 8
) -> dict[str, Any]:
    """Times prefill and decode together with the uncompressed cache, in turns of `turn` steps to share noise.

    ids [1, T + steps]: the first T are the context. Times in ms: prefill, decode (medians), spread (10th and 90th
    percentile), and the same for "dynamic"; decode_ratio: decode time / that of "dynamic".
    """
    T = ids.shape[1] - steps
    kinds = {"ours": strategy, "dynamic": _DYNAMIC}
    caches, prefill = {}, {}
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for name, kind in kinds.items():
        with attention_for(model, kind):
            caches[name] = open_cache(model, kind)
            _sync(model)
            start = time.perf_counter()
            _forward(model, ids[:, :T], caches[name], 1)
            _sync(model)
            prefill[name] = 1e3 * (time.perf_counter() - start)
    for at in range(T, T + steps, turn):
        for name in kinds if (at - T) // turn % 2 else reversed(kinds):
            with attention_for(model, kinds[name]):
                for i in range(at, min(at + turn, T + steps)):
                    start = time.perf_counter()
                    _forward(model, ids[:, i : i + 1], caches[name], 1)
                    _sync(model)
                    if i > at:  # the first step of a turn has a cold CPU cache
                        times[name].append(1e3 * (time.perf_counter() - start))
    out: dict[str, Any] = {}
    for name, prefix in (("ours", ""), ("dynamic", "dynamic_")):
        tenth = statistics.quantiles(times[name], n=10, method="inclusive")
        out[prefix + "prefill"] = prefill[name]
        out[prefix + "decode"] = statistics.median(times[name])
        out[prefix + "spread"] = [tenth[0], tenth[-1]]
    out["decode_ratio"] = out["decode"] / out["dynamic_decode"]
    return out
