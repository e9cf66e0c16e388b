"""kvcompress inside of vLLM (`make test-vllm`): tokens beside those of vLLM's own backend, on books-tiny."""

import importlib.util
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

if not importlib.util.find_spec("vllm.config"):  # of "vllm" this folder would do
    pytest.skip("vLLM is not installed: make vllm, then make test-vllm", allow_module_level=True)

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


def engines(*settings):
    """What engines of one process gave, in order."""
    command = [sys.executable, str(Path(__file__).with_name("engine.py")), json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    found = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(found) == len(settings), done.stdout[-3000:] + done.stderr[-3000:]
    return found


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
    """How many answers are other ones; each only from a token on that was hardly likelier than the next best one."""
    firsts = [
        margins[next(i for i in range(len(x)) if x[i] != y[i])]
        for x, y, margins in zip(tokens, wanted["tokens"][0], wanted["margins"], strict=True)
        if x != y
    ]
    assert all(margin < 0.01 for margin in firsts), firsts
    return len(firsts)


def test_int8_gives_nearly_the_same_tokens():
    """One token after a near tie makes all that follow another text: so also each token after the same text."""
    got = engines({"format": "int8", "forced": True, "max_num_batched_tokens": 256})[0]
    assert max(leaves_at_near_ties(tokens, plain("float32")) for tokens in got["tokens"]) <= 1
    assert same(got["choices"], plain("float32")["choices"]) >= 0.99


@pytest.mark.parametrize("format", ["int4", "int8/int4"])
@pytest.mark.parametrize("mode", ["plain", "drafts"])
def test_formats_with_residual_pages(format, mode):
    """Not the same numbers, as tokens enter in other pieces: most of the tokens."""
    got = engines({"format": format, "dtype": "bfloat16", "block_size": 512, **MODES[mode]})[0]
    assert min(same(tokens, own("bfloat16")) for tokens in got["tokens"]) > 0.5 and got["hits"] >= 512


def test_engines_of_one_process_with_different_settings():
    a, b, c = engines({}, {"format": "int8"}, {"format": "raw"})
    assert same(c["tokens"][0], a["tokens"][0]) == 1 and leaves_at_near_ties(b["tokens"][0], a) <= 1
    assert b["logprobs"][0] != a["logprobs"][0], "it has not used int8"


BAD = [
    ({"format": "int9"}, "expected one of|expected one of"),
    ({"format": {"form": "int8"}}, "the key 'format' alone"),
    ({"format": 8}, "expected a format"),
    ({"format": "int4"}, "--block-size of at least"),
    ({"format": "int8", "kv_cache_dtype": "fp8"}, "--kv-cache-dtype auto"),
]


def test_bad_settings_are_errors():
    import re

    for (settings, text), got in zip(BAD, engines(*[settings for settings, _ in BAD]), strict=True):
        assert re.search(text, got.get("error", "none")), (settings, got)
