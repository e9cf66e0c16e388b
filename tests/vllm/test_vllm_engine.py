"""kvcompress in vLLM (`make test-vllm`): tokens compared with those of vLLM's own backend, on books-tiny."""

import atexit
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path

import pytest

if not importlib.util.find_spec("vllm.config"):  # for "vllm" alone this folder would be found
    pytest.skip("vLLM is not installed: make vllm, then make test-vllm", allow_module_level=True)

ALONE = {"speculative_config", "tensor_parallel_size", "pipeline_parallel_size", "shared"}
"""Settings of engines that leave a process in which vLLM 0.32 cannot start another one."""
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


class Runner:
    """A process that runs engines one after another, so that vLLM is imported once."""

    def __init__(self):
        self.said = tempfile.TemporaryFile("w+")  # noqa: SIM115 lives as long as the process
        command = [sys.executable, str(Path(__file__).with_name("engine.py"))]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.said, text=True
        )

    def __call__(self, settings):
        late = threading.Timer(400, self.process.kill)
        late.start()
        try:
            self.process.stdin.write(json.dumps(settings) + "\n")
            self.process.stdin.flush()
            printed = []
            for line in self.process.stdout:
                if line.startswith("RESULT "):
                    return json.loads(line[7:])
                printed.append(line)
        finally:
            late.cancel()
        self.said.seek(0)
        raise AssertionError(f"{settings}: {''.join(printed)[-3000:]}{self.said.read()[-3000:]}")

    def end(self):
        self.process.communicate()


@cache
def shared_runner():
    runner = Runner()
    atexit.register(runner.end)
    return runner


def engines(*settings):
    """Results of the engines of one process, in order."""
    alone = any(ALONE & set(each) for each in settings)
    runner = Runner() if alone else shared_runner()
    try:
        return [runner(each) for each in settings]
    finally:
        if alone:
            runner.end()


@cache
def plain(dtype):
    """vLLM's own backend."""
    return engines({"dtype": dtype, "forced": dtype == "float32"})[0]


def own(dtype):
    return plain(dtype)["tokens"][0]


def same(tokens, wanted):
    pairs = [(x, y) for u, v in zip(tokens, wanted, strict=True) for x, y in zip(u, v, strict=True)]
    return sum(x == y for x, y in pairs) / len(pairs)


MODES = {
    "plain": {},
    "chunks that end in the middle of pages": {"max_num_batched_tokens": 100},
    "preemption": {"mib": 20},
    "drafts": {"speculative_config": NGRAM},
    "drafts and chunks": {"speculative_config": NGRAM, "max_num_batched_tokens": 100},
}


@pytest.mark.parametrize("mode", MODES)
def test_raw_gives_the_tokens_of_vllm(mode):
    got = engines({"format": "raw", **MODES[mode]})[0]
    assert [same(tokens, own("float32")) for tokens in got["tokens"]] == [1, 1]
    if mode == "preemption":
        assert got["metrics"]["vllm:num_preemptions"] > 0
    else:
        assert got["hits"] > 2000
    if "drafts" in mode:
        said = got["metrics"]
        assert 0 < said["vllm:spec_decode_num_accepted_tokens"] < said["vllm:spec_decode_num_draft_tokens"]


def leaves_at_near_ties(tokens, wanted):
    """Number of answers that differ; each only after a token that was hardly more likely than the next best one."""
    firsts = [
        margins[next(i for i in range(len(x)) if x[i] != y[i])]
        for x, y, margins in zip(tokens, wanted["tokens"][0], wanted["margins"], strict=True)
        if x != y
    ]
    assert all(margin < 0.01 for margin in firsts), firsts
    return len(firsts)


def test_int8_gives_nearly_the_same_tokens():
    """A different token at a near tie changes the rest of the text, so each token after the same text is compared,
    too."""
    got = engines({"format": "int8", "forced": True, "max_num_batched_tokens": 256})[0]
    assert max(leaves_at_near_ties(tokens, plain("float32")) for tokens in got["tokens"]) <= 1
    assert same(got["choices"], plain("float32")["choices"]) >= 0.99


@pytest.mark.parametrize("format", ["int4", "int8/int4"])
@pytest.mark.parametrize("mode", ["plain", "drafts"])
def test_formats_with_residual_pages(format, mode):
    """Results differ because tokens are processed in other chunks: most tokens are equal."""
    got = engines({"format": format, "dtype": "bfloat16", "block_size": 512, **MODES[mode]})[0]
    assert min(same(tokens, own("bfloat16")) for tokens in got["tokens"]) > 0.5 and got["hits"] >= 512


def test_answers_computed_again_in_pieces_with_drafts():
    """Preempted requests are recomputed, also in chunks as short as drafts: every full page is sealed before it can be
    found."""
    small = {"block_size": 512, "max_num_batched_tokens": 67, "mib": 4, "tokens": 160, "watched": True}
    got = engines({"format": "int4", "dtype": "bfloat16", "speculative_config": NGRAM, **small})[0]
    assert got["metrics"]["vllm:num_preemptions"] > 0
    assert all(len(x) == 160 for tokens in got["tokens"] for x in tokens)
    assert got["not sealed"] == [] and got["looked at"] > 1000


def test_engines_of_one_process_with_different_settings():
    a, b, c = engines({}, {"format": "int8"}, {"format": "raw"})
    assert same(c["tokens"][0], a["tokens"][0]) == 1 and leaves_at_near_ties(b["tokens"][0], a) <= 1
    assert b["logprobs"][0] != a["logprobs"][0], "it has not used int8"


BAD = [
    ({"format": "int9"}, "expected one of|expected one of"),
    ({"format": {"form": "int8"}}, "the keys 'format' and"),
    ({"format": 8}, "expected a format"),
    ({"format": "int8", "key": "kvcompres"}, "the key 'kvcompress' in additional_config, got 'kvcompres'"),
    ({"format": "int4"}, "--block-size of at least"),
    ({"format": "int8", "kv_cache_dtype": "fp8"}, "--kv-cache-dtype auto"),
]


def test_bad_settings_are_errors():
    for (settings, text), got in zip(BAD, engines(*[settings for settings, _ in BAD]), strict=True):
        assert re.search(text, got.get("error", "none")), (settings, got)
