"""The evaluation itself: zero if nothing is lost, large if something is broken, equal to plain implementations."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import models
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaConfig

import kvcompress
from kvcompress import formats
from kvcompress.hf.cache import KVCache
from kvcompress.tools.evaluation import caches, fake, measure, suite, tasks
from kvcompress.tools.evaluation.store import Store
from kvcompress.tools.strategy import Strategy

ROOT = Path(__file__).parents[2]
SMALL = {"context": 150, "scored": 48, "chunk": 16, "windows": 2, "cost": False, "progress": False}


@pytest.fixture(scope="module")
def shipped():
    folder = ROOT / "assets" / "books-tiny"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(folder)((ROOT / "assets/text/book.txt").read_text()[:40_000])["input_ids"]
    return model, torch.tensor([[0, *ids]])


def kl_of(model, ids, strategy, scored=64):
    reference = measure.reference_logits(model, ids[:, :-1], scored)
    found = measure.quality(model, Strategy(strategy), ids, scored, reference, chunk=16)
    return float(np.mean(found["kl"])), found


def test_raw_loses_nothing(shipped):
    model, ids = shipped
    for strategy in ("raw", "dynamic"):
        kl, found = kl_of(model, ids[:, :401], strategy)
        assert abs(kl) < 1e-9
        assert np.mean(found["agree"]) == 1 and np.mean(found["accept"]) == pytest.approx(1, abs=1e-5)


def double_scales(cache):
    """Doubles every scale of every sealed int8 page."""
    for layer in cache.layers:
        store = layer.store
        D, P = store.head_dim, store.page_size
        code = formats.resolve("int8", store.dtype)
        size = formats.page_bytes(code, code, D, D, P)
        for entry in store.page_store.table.entries.reshape(-1):
            if entry and (int(entry) >> 8) & 255 == code:
                start = (int(entry) >> 16) * 64
                for h in range(store.num_kv_heads):
                    page = store.page_store.pool.arena[start + h * size : start + (h + 1) * size]
                    page[2 * P * D :].view(np.float16)[:] *= 2


def test_a_broken_cache_is_seen(shipped, monkeypatch):
    model, ids = shipped
    good, _ = kl_of(model, ids[:, :401], "int8")
    fill = measure._prefill

    def broken(model, ids, cache, chunk):
        logits = fill(model, ids, cache, chunk)
        double_scales(cache)
        return logits

    monkeypatch.setattr(measure, "_prefill", broken)
    bad, _ = kl_of(model, ids[:, :401], "int8")
    assert good < 1e-3 and bad > 0.1 and bad > 1000 * good


def plain_perplexity(model, ids, context, scored, chunk):
    """exp of the mean loss of the text after the context, as simply as possible."""
    cache, total = DynamicCache(config=model.config), 0.0
    with torch.no_grad():
        model(ids[:, :context], past_key_values=cache)
        for at in range(context, context + scored, chunk):
            logits = model(ids[:, at : at + chunk], past_key_values=cache).logits
            targets = ids[0, at + 1 : at + 1 + logits.shape[1]]
            total += torch.nn.functional.cross_entropy(logits[0].double(), targets, reduction="sum").item()
    return math.exp(total / scored)


def test_perplexity_is_the_plain_one(shipped):
    model, ids = shipped
    want = plain_perplexity(model, ids[:, :401], 336, 64, 16)
    for strategy in ("dynamic", "raw"):
        _, found = kl_of(model, ids[:, :401], strategy)
        assert math.exp(np.mean(found["nll"])) == pytest.approx(want, rel=1e-5)
        assert math.exp(np.mean(found["nll_reference"])) == pytest.approx(want, rel=1e-5)


def test_quality_against_float64_by_hand():
    """KL, agreement and acceptance of int4 on a random model, from two sets of logits and textbook formulas."""
    model, ids = models.model("llama"), models.ids(1, 201)
    reference = measure.reference_logits(model, ids[:, :-1], 48)
    found = measure.quality(model, Strategy("int4"), ids, 48, reference, chunk=16)
    parts = list(measure.logits_through(model, Strategy("int4"), ids[:, :-1], 48, 16, 0))
    p = np.exp(np.float64(reference)) / np.exp(np.float64(reference)).sum(-1, keepdims=True)
    ours = np.float64(torch.cat(parts))
    q = np.exp(ours) / np.exp(ours).sum(-1, keepdims=True)
    assert np.mean(found["kl"]) == pytest.approx((p * np.log(p / q)).sum(-1).mean(), rel=1e-6)
    assert np.mean(found["kl"]) > 1e-6
    assert np.mean(found["accept"]) == pytest.approx(np.minimum(p, q).sum(-1).mean(), rel=1e-9)
    assert np.mean(found["agree"]) == np.mean(p.argmax(-1) == q.argmax(-1))
    assert len(found["kl"]) == 48 / measure.BLOCK


def test_attention_comes_back():
    model = models.model("llama")
    model.set_attn_implementation("eager")
    with caches.attention_for(model, Strategy("int8")):
        assert model.config._attn_implementation == "kvcompress"
        with pytest.raises(KeyError), caches.attention_for(model, Strategy("dynamic")):
            assert model.config._attn_implementation == "sdpa"
            raise KeyError
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("strategy", ["quanto:4", "quanto:2", "hqq:8", "hqq:4", "hf-fp8"])
def test_transformers_own_quantized_caches(strategy):
    """If installed, they are measured by the same code and lose quality; their first call returns raw K/V."""
    if strategy != "hf-fp8":
        pytest.importorskip({"quanto": "optimum.quanto", "hqq": "hqq"}[strategy.split(":")[0]])
    model, ids = models.model("llama", 64), models.ids(1, 401)
    kl, _ = kl_of(model, ids, strategy)
    assert kl > 1e-7
    cache = caches.open_cache(model, Strategy(strategy))
    model(ids[:, :256], past_key_values=cache)
    elements = 2 * 2 * 2 * 256 * 64  # sides, layers, heads
    bits = 8 if strategy == "hf-fp8" else int(strategy[-1])
    assert elements * bits / 8 <= caches.held_bytes(cache) < elements * (bits / 8 + 1.2)


def test_held_bytes_of_a_dynamic_cache():
    model, ids = models.model("llama"), models.ids(1, 100)
    cache = caches.open_cache(model, Strategy("dynamic"))
    model(ids, past_key_values=cache)
    assert caches.held_bytes(cache) == 2 * 2 * 2 * 100 * 32 * 4


# ---------------------------------------------------------------------- fake quantization


def by_hand(x, scheme):
    """Quantizes a float64 vector with one scale."""
    bits = 8 if scheme.startswith("fp8") else int(scheme[3])
    if scheme.endswith("_asym"):
        low, step = x.min(), (x.max() - x.min()) / (2**bits - 1)
        return np.rint((x - low) / step) * step + low
    if scheme.startswith("fp8"):
        mantissa, least, largest = (3, -6, 448) if "e4m3" in scheme else (2, -14, 57344)
        y = x / (np.abs(x).max() / largest)
        exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(y), 1e-30))), least)
        unit = 2.0 ** (exponent - mantissa)
        return np.rint(y / unit) * unit * (np.abs(x).max() / largest)
    largest = 2 ** (bits - 1) - 1
    step = np.abs(x).max() / largest
    return np.rint(x / step) * step


@pytest.mark.parametrize("scheme", kvcompress.tools.strategy.SCHEMES)
@pytest.mark.parametrize("granularity", kvcompress.tools.strategy.GRANULARITIES)
def test_fake_quantize(scheme, granularity):
    x = torch.randn(2, 3, 8, 64, generator=torch.Generator().manual_seed(3)) * 3
    got, made = fake.fake_quantize(x, scheme, granularity)
    y, want = x.double().numpy(), np.zeros((2, 3, 8, 64))
    groups = {
        "tensor": [np.s_[:]],
        "static": [np.s_[:]],
        "head": [np.s_[:, h] for h in range(3)],
        "token": [np.s_[b, h, t] for b in range(2) for h in range(3) for t in range(8)],
        "channel": [np.s_[:, h, :, d] for h in range(3) for d in range(64)],
        "group32": [np.s_[b, h, t, d : d + 32] for b in range(2) for h in range(3) for t in range(8) for d in (0, 32)],
    }[granularity]
    for where in groups:
        want[where] = by_hand(y[where].ravel(), scheme).reshape(y[where].shape)
    off = np.abs(got.numpy() - want)
    # Scales are fp16: values differ by 2^-11 of the largest, and near-ties may round the other way.
    step = np.abs(y).max() / {"fp8_e4m3": 14, "fp8_e5m2": 7}.get(scheme, 2.0 ** (made.grain.bits - 2))
    assert np.mean(off > 2.0**-10 * np.abs(y).max()) < 2e-2 and off.max() <= step
    assert made.scales.numel() == len(groups) and (made.zeros is not None) == scheme.endswith("_asym")


def test_fake_cache_rounds_what_left_the_open_page():
    model, ids = models.model("llama"), models.ids(1, 140)
    cache = caches.open_cache(model, Strategy("fake:int2@tensor"))
    plain = DynamicCache(config=model.config)
    for c in (cache, plain):
        model(ids[:, :139], past_key_values=c)
        model(ids[:, 139:], past_key_values=c)
    ours, exact = cache.layers[0].keys, plain.layers[0].keys
    assert torch.equal(ours[:, :, :4], exact[:, :, :4]) and torch.equal(ours[:, :, 132:], exact[:, :, 132:])
    assert len(ours[:, :, 4:132].unique()) <= 3 and len(exact[:, :, 4:132].unique()) > 1000
    per_layer = 2 * (2 * 128 * 32 * 2 // 8 + 2 + 2 * 12 * 32 * 4)
    assert caches.held_bytes(cache) == 2 * per_layer


# ---------------------------------------------------------------------- tasks


def words(text):
    """A tokenizer of characters."""
    return [ord(c) % 96 for c in text]


@pytest.mark.parametrize("task", tasks.TASKS)
def test_every_answer_is_in_the_context(task):
    filler = [ord(c) for c in "." * 3000]
    encode = lambda text: [ord(c) for c in text]  # noqa: E731
    sample = tasks.make(task, encode, filler, 2500, 5, bos=[1])
    text = "".join(map(chr, sample.context))
    assert len(sample.context) == 2500 and sample.context[0] == 1 and sample.questions
    for question, answer in sample.questions:
        asked, said = "".join(map(chr, question)), "".join(map(chr, answer))
        if task in ("recall", "induction"):
            assert asked.removeprefix("; ") + said in text
        elif task == "tracking":  # the question names the second owner; two facts are needed for the answer
            second = asked.split()[0]
            first = text.split(f" {second} took the box of ")[1].split(".")[0]
            assert f"The box of {first} holds{said}." in text
        else:
            assert asked.strip() + said in text
    assert tasks.make(task, encode, filler, 2500, 5, bos=[1]) == sample
    assert tasks.make(task, encode, filler, 2500, 6, bos=[1]) != sample


def test_tasks_refuse_what_does_not_fit():
    with pytest.raises(ValueError, match="expected one of recall"):
        tasks.make("needle", words, [0] * 100, 50, 0)
    with pytest.raises(ValueError, match="length of at least"):
        tasks.make("recall", words, [0] * 100, 50, 0)
    with pytest.raises(ValueError, match="text of at least"):
        tasks.make("passkey", words, [0] * 100, 5000, 0)


def test_a_model_that_copies_is_right_and_one_without_memory_is_not(monkeypatch):
    """The evaluation of a synthetic model that repeats what followed the same last four tokens in the context."""
    sample = tasks.make("passkey", words, words("abcdefgh" * 60), 400, 1)

    def copies(model, ids, cache, keep):
        cache.extend(ids[0].tolist())
        rows = torch.zeros(keep, 96)
        for i in range(keep):
            known = cache[: len(cache) - keep + i + 1]
            for at in range(len(known) - 5, 2, -1):
                if model.remembers and known[at - 3 : at + 1] == known[-4:]:
                    rows[i, known[at + 1]] = 1
                    break
        return rows

    class Dummy:
        device = torch.device("cpu")
        remembers = True
        config = LlamaConfig(attn_implementation="eager")

    monkeypatch.setattr(measure, "_forward", copies)
    monkeypatch.setattr(measure, "open_cache", lambda model, strategy: [])
    assert measure.retrieval(Dummy(), Strategy("dynamic"), sample) == {"outside": [1], "inside": [1]}
    Dummy.remembers = False
    assert measure.retrieval(Dummy(), Strategy("dynamic"), sample) == {"outside": [0], "inside": [0]}


# ---------------------------------------------------------------------- the suite


def test_evaluate_tells_formats_apart(shipped, tmp_path):
    model, ids = shipped
    result = kvcompress.evaluate(model, ids[0], ["raw", "int8", "int4", "fake:int4@tensor"], out=tmp_path, **SMALL)
    kl = {row["strategy"]: row["kl"] for row in result.rows}
    assert kl["raw"] < 1e-9 < kl["int8"] < kl["int4"] < kl["fake:int4@tensor"]
    assert result.rows[0]["strategy"] == "dynamic"
    assert [row["analysis_only"] for row in result.rows] == [False] * 4 + [True]
    assert "fake:int4@tensor  (analysis only)" in str(result)
    saved = json.loads((tmp_path / "results.json").read_text())
    assert saved["rows"] == json.loads(json.dumps(result.rows))
    assert (tmp_path / "results.csv").read_text().count("\n") == 6


def test_cost_and_picture(shipped, tmp_path):
    model, ids = shipped
    settings = {**SMALL, "context": 300, "cost": True, "steps": 16, "windows": 1}
    result = kvcompress.evaluate(model, ids[0], ["int8"], out=tmp_path, **settings)
    row = result.rows[1]
    assert row["bytes_per_token"] == row["bytes"] / 300 and 1.2 < row["ratio"] < 4
    assert row["decode"] > 0 and row["decode_ratio"] > 0 and row["prefill"] > 0
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


def test_bad_input():
    model, ids = models.model("llama"), models.ids(1, 400)[0]
    for options, error, hint in (
        ({"context": 0}, ValueError, "context: expected at least 1"),
        ({"steps": 4}, ValueError, "steps: expected at least 16"),
        ({"tasks": "all"}, ValueError, "expected a tokenizer"),
        ({"tasks": ("needle",)}, ValueError, "tasks: expected names out of"),
        ({"contexts": 4}, ValueError, "expected settings out of context"),
        ({"context": 4000}, ValueError, "text: expected at least"),
        ({"strategies": ["int5"]}, ValueError, "expected a format"),
        ({"model": 3}, TypeError, "expected a transformers model"),
        ({"model": "./nowhere"}, ValueError, "expected a folder"),
        ({"text": [96]}, ValueError, "ids from 0 to 95"),
        ({"text": []}, ValueError, "expected"),
        ({"text": "some text"}, ValueError, "expected a tokenizer"),
        ({"text": Path("nowhere.txt")}, ValueError, "expected a file"),
    ):
        call = {"model": model, "text": ids, "strategies": ["int8"], **SMALL, **options}
        with pytest.raises(error, match=hint):
            kvcompress.evaluate(call.pop("model"), call.pop("text"), **call)
    result = kvcompress.evaluate(model, ids, ["int5", "int8"], skip_unavailable=True, **SMALL)
    assert "expected a format" in result.skipped["int5"] and len(result.rows) == 2


def test_window_starts_cover_and_stay_inside():
    from kvcompress.tools.evaluation.data import window_starts

    for seed in range(5):
        starts = window_starts(10_000, 600, 7, seed)
        assert starts == sorted(starts) and starts[0] >= 0 and starts[-1] + 600 <= 10_000
        assert min(b - a for a, b in pairwise(starts)) > 600
    assert window_starts(600, 600, 3, 0) == [0, 0, 0]


def test_bootstrap_covers():
    """About 95 of 100 intervals contain the true mean (binomial: 88 to 99 except once in 10,000)."""
    from kvcompress.tools.evaluation.report import bootstrap

    r = np.random.default_rng(0)
    hits = sum(low <= 1.0 <= high for low, high in (bootstrap(r.exponential(1.0, 200)) for _ in range(100)))
    assert 86 <= hits <= 99
    assert all(math.isnan(x) for x in bootstrap([1.0]))


# ---------------------------------------------------------------------- resuming


def test_store_survives_a_torn_line(tmp_path):
    path = tmp_path / "cells.jsonl"
    with Store(path) as store:
        store.put({"a": 1}, [1.5])
        store.put({"a": 2}, [2.5])
        with pytest.raises(ValueError, match="expected a cell that is not finished"):
            store.put({"a": 2}, [0])
        with pytest.raises(RuntimeError, match="another process"):
            Store(path)
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        with Store(path) as store:
            done = whole[:cut].count(b"\n")
            assert [{"a": i} in store for i in (1, 2)] == [done >= 1, done >= 2]
            for i in (1, 2):
                if {"a": i} not in store:
                    store.put({"a": i}, [i + 0.5])
        assert path.read_bytes() == whole
    path.write_bytes(b"{}\n" + whole)
    with pytest.raises(ValueError, match="line 1"):
        Store(path)


SCRIPT = """
import sys, time
import kvcompress
from kvcompress.tools.evaluation import suite
import models
compute = suite._Run.compute
def slow(self, what):
    time.sleep(0.05)
    return compute(self, what)
suite._Run.compute = slow
kvcompress.evaluate(models.model("llama"), models.ids(1, 600)[0], ["int8", "int4"], out=sys.argv[1], context=60,
                    scored=16, windows=4, cost=False, progress=False)
"""


@pytest.mark.full  # three processes that load a model
def test_killed_it_goes_on(tmp_path):
    """kill -9 in the middle; the next run keeps finished cells, computes the rest once, and gives the same result."""
    cells = tmp_path / "cells.jsonl"

    def start():
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(x for x in sys.path if x)}
        return subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path)], cwd=ROOT, env=env, stderr=subprocess.PIPE
        )

    first, deadline = start(), time.monotonic() + 120
    while not (cells.exists() and cells.read_bytes().count(b"\n") >= 3) and time.monotonic() < deadline:
        time.sleep(0.005)
        assert first.poll() is None, first.stderr.read()
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    before = cells.read_bytes()
    before = before[: before.rfind(b"\n") + 1]
    assert 3 <= before.count(b"\n") < 12
    second = start()
    assert second.wait(timeout=120) == 0, second.stderr.read()
    after = cells.read_bytes()
    rows = [json.loads(line) for line in after.splitlines()]
    assert after.startswith(before) and len(rows) == 12 and len({row["id"] for row in rows}) == 12
    third = start()
    assert third.wait(timeout=120) == 0 and cells.read_bytes() == after


def test_kvcache_is_what_is_measured():
    """No substitute: the strategy opens the cache that users get."""
    cache = caches.open_cache(models.model("llama"), Strategy("int8/int4+sinks:2+residual_length:64"))
    assert isinstance(cache, KVCache) and (cache.key, cache.value) == ("int8", "int4")
    found, _ = suite.usable(models.model("llama"), ["dynamic", "int8", "int8+sinks:4"], False)
    assert found == [Strategy("dynamic"), Strategy("int8")]
