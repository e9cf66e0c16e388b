"""Passes aborted by a model's hook, and interpreter shutdown while caches exist."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import ids, model

from kvcompress import H2O, KVCache, PrefixCache, enable

TESTS = Path(__file__).parents[1]


class Stop(Exception):
    """Raised by the hook."""


@pytest.mark.parametrize("policy", [None, H2O(32, slack=8)], ids=["plain", "h2o"])
def test_hooks_that_raise_inside_of_generate(policy: Any) -> None:
    """At the n-th module call, for many n: the cache continues as if the call had not happened, or reports an
    interrupted pass; after reset() it works."""
    m = copy.deepcopy(model("llama"))
    enable(m, verbose=False)
    countdown = [0]

    def hook(*args: Any) -> None:
        countdown[0] -= 1
        if countdown[0] == 0:
            raise Stop

    for module in m.modules():
        module.register_forward_hook(hook)
    prompt, begun = ids(1, 40, 3), KVCache(m.config, "int8", page_size=16, policy=policy)
    with torch.no_grad():
        m(prompt, past_key_values=begun)
        want = m(ids(1, 1, 5), past_key_values=copy.deepcopy(begun)).logits
        fresh = m(prompt, past_key_values=KVCache(m.config, "int8", page_size=16, policy=policy)).logits
    whole, went_on, broke = torch.cat([prompt, ids(1, 20, 4)], 1), 0, 0
    for n in range(1, 120, 3):
        cache, countdown[0] = copy.deepcopy(begun), n
        with pytest.raises(Stop):
            m.generate(whole, past_key_values=cache, max_new_tokens=4, do_sample=False)
        cache.pool.check()
        lengths = {layer.get_seq_length() for layer in cache.layers}
        with torch.no_grad():
            if lengths == {40}:
                assert torch.equal(m(ids(1, 1, 5), past_key_values=cache).logits, want)
                went_on += 1
            elif len(lengths) > 1:
                with pytest.raises(ValueError, match="interrupted a forward pass"):
                    m(ids(1, 1, 5), past_key_values=cache)
                broke += 1
            cache.reset()
            assert torch.equal(m(prompt, past_key_values=cache).logits, fresh)
    assert went_on and broke


@pytest.mark.parametrize("begun", [0, 20])
@torch.no_grad()
def test_an_interrupted_pass_is_not_saved_or_shared(begun: int, tmp_path: Path) -> None:
    """An interrupted pass cannot reach a file, a DynamicCache or a PrefixCache, which continues to serve others."""
    m = copy.deepcopy(model("llama"))
    enable(m, verbose=False)
    tokens, prefix = ids(1, begun + 40, 3), PrefixCache(m.config, "int8", page_size=16)
    cache = prefix.new()
    if begun:
        m(tokens[:, :begun], past_key_values=cache)

    def hook(*args: Any) -> None:
        raise Stop

    handle = m.model.layers[0].register_forward_hook(hook)
    with pytest.raises(Stop):
        m(tokens[:, begun:], past_key_values=cache)
    handle.remove()
    assert [layer.get_seq_length() for layer in cache.layers] == [begun + 40, begun]
    with pytest.raises(ValueError, match="interrupted a forward pass"):
        prefix.commit(cache, tokens)
    with pytest.raises(ValueError, match="interrupted a forward pass"):
        cache.to_dynamic_cache()
    with pytest.raises(ValueError, match="interrupted a forward pass"):
        cache.save(tmp_path / "x.kvc")
    assert not list(tmp_path.iterdir())
    whole = prefix.open(tokens)
    m(tokens, past_key_values=whole)
    assert whole.get_seq_length() == begun + 40 and prefix.commit(whole, tokens) > 0
    assert prefix.open(tokens).get_seq_length() > 0


SHUTDOWN = """
import os, sys, torch
from models import ids, model
from kvcompress import KVCache, PrefixCache, Tiers, enable
m = model("llama")
enable(m, verbose=False)
prefix = PrefixCache(m.config, page_size=16, tiers=Tiers(host_bytes=1 << 20))
cache = prefix.open(ids(1, 100))
out = m.generate(ids(1, 100), past_key_values=cache, max_new_tokens=4, do_sample=False)
prefix.commit(cache, out)
away = KVCache(m.config, page_size=16)
m.generate(ids(1, 300), past_key_values=away, max_new_tokens=2, do_sample=False)
away.use_tiers(Tiers(host_bytes=0, file_bytes=None, folder=sys.argv[2]), resident=16, unit=1)
assert os.listdir(sys.argv[2])
asleep = KVCache(m.config)
m.generate(ids(1, 30), past_key_values=asleep, max_new_tokens=2, do_sample=False)
asleep.suspend()
cache.knows = asleep.knows = [cache, asleep, prefix]  # a circle
if sys.argv[1] == "error":
    raise SystemExit(7)
"""


@pytest.mark.parametrize(("how", "code"), [pytest.param("plain", 0, marks=pytest.mark.full), ("error", 7)])
def test_an_interpreter_that_ends_while_caches_live(how: str, code: int, tmp_path: Path) -> None:
    """With a prefix, tiers in files, a suspended cache, a reference cycle: the process exits cleanly, and no file
    remains. (With a daemon thread in a model, torch aborts, with our cache or not.)"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(x for x in sys.path if x), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", SHUTDOWN, how, tmp_path], cwd=TESTS, env=env, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr[-2000:]
    assert "Traceback" not in done.stderr and "Fatal" not in done.stderr, done.stderr[-2000:]
    assert not os.listdir(tmp_path)
