"""Suspended caches: the file is theirs, or resume raises."""

from __future__ import annotations

import copy

import pytest
import torch
from families import family
from generation import PAGE as P
from generation import feed
from models import ids
from test_files import same

from kvcompress import _C, KVCache
from kvcompress.policies import H2O
from kvcompress.store import serialize


def test_where_a_suspended_cache_waits_nobody_writes(llama, tmp_path, monkeypatch):
    path = tmp_path / "a.kvc"
    first, second = KVCache(llama.config, "int8", page_size=P), KVCache(llama.config, "int8", page_size=P)
    feed(llama, first, ids(1, 50))
    feed(llama, second, ids(1, 50, 7))
    twin = copy.deepcopy(first)
    first.suspend(path)
    monkeypatch.chdir(tmp_path)
    for act in (second.save, second.suspend):
        for same_place in (path, "a.kvc", tmp_path / "." / "a.kvc"):
            with pytest.raises(ValueError, match="which a suspended cache uses"):
                act(same_place)
    assert second.get_seq_length() == 50 and second.forward_pass.suspended is None
    own = path.read_bytes()
    second.save(tmp_path / "b.kvc")
    path.write_bytes((tmp_path / "b.kvc").read_bytes())  # by another process
    with pytest.raises(ValueError, match="expected the file that suspend"):
        first.resume()
    path.write_bytes(own)
    first.resume()
    assert same(first, twin)
    second.suspend(path)  # free again
    second.reset()
    first.save(path)
    first.suspend(path)
    del first
    second.save(path)


def test_suspended_file_that_goes_wrong(llama, tmp_path):
    """A failed resume leaves the cache suspended; after the file is restored it succeeds."""
    path = tmp_path / "a.kvc"
    cache = KVCache(llama.config, "int8")
    feed(llama, cache, ids(1, 150))
    twin = copy.deepcopy(cache)
    cache.suspend(path)
    good, used = path.read_bytes(), cache.pool.stats()["used"]
    broken = bytearray(good)
    broken[8 + int.from_bytes(good[:8], "little") + 500] ^= 1  # within a page
    path.write_bytes(broken)
    with pytest.raises(ValueError, match="checksum"):
        cache.resume()
    path.unlink()
    with pytest.raises(FileNotFoundError):
        cache.resume()
    path.write_bytes(good)
    for n in (1, 2, 3, 5, 8, 13, 21):
        _C.alloc_fail_at(n)
        try:
            cache.resume()
        except MemoryError:
            assert cache.pool.stats()["used"] == used  # no layer came back
        else:
            cache.suspend(path)
        finally:
            _C.alloc_fail_at(0)
    cache.resume()
    cache.pool.check()
    assert same(cache, twin)


@pytest.mark.parametrize("name", ["linear", "conv"])
def test_a_call_of_a_suspended_cache_leaves_states_alone(name):
    """Linear-attention layers come before the first paged one, which used to be the first to raise."""
    m = family(name)
    cache = KVCache(m.config, "int8", page_size=P)
    feed(m, cache, ids(1, 50))
    twin = copy.deepcopy(cache)
    cache.suspend()
    for call in (ids(1, 1, 3), ids(1, 5, 4)):
        with pytest.raises(ValueError, match="a suspended one"):
            feed(m, cache, call)
    cache.resume()
    with torch.inference_mode():
        a, b = (m(ids(1, 3, 5), past_key_values=c).logits for c in (cache, twin))
    assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["linear", "conv"])
def test_a_file_does_not_lose_states(name, tmp_path):
    """Files hold K and V; a suspended cache keeps its states in memory."""
    m = family(name)
    cache = KVCache(m.config, "int8", page_size=P)
    cache.save(tmp_path / "empty.kvc")
    feed(m, cache, ids(1, 50))
    twin = copy.deepcopy(cache)
    with pytest.raises(ValueError, match="got the states of LinearAttentionLayer at 0"):
        cache.save(tmp_path / "a.kvc")
    assert not (tmp_path / "a.kvc").exists()
    cache.suspend(tmp_path / "b.kvc")
    cache.resume()
    assert torch.equal(feed(m, cache, ids(1, 3, 5)), feed(m, twin, ids(1, 3, 5)))


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_files_of_models_whose_layers_share(name, tmp_path):
    """The last layers hold nothing."""
    m = family(name)
    cache = KVCache(m.config, "int8", page_size=P)
    feed(m, cache, ids(1, 50))
    cache.save(tmp_path / "a.kvc")
    twin = KVCache.load(tmp_path / "a.kvc", m.config)
    assert torch.equal(feed(m, cache, ids(1, 3, 5)), feed(m, twin, ids(1, 3, 5)))


@pytest.mark.parametrize("during", ["survey", "gather"])
@pytest.mark.parametrize("fmt, policy", [("int8", None), ("int4", H2O(32, slack=4))])
def test_a_cache_that_changes_while_it_is_saved(llama, tmp_path, monkeypatch, during, fmt, policy):
    """As by another thread that runs a step: the file before is not replaced by a mixture."""
    cache, path = KVCache(llama.config, fmt, page_size=P, policy=policy), tmp_path / "a.kvc"
    feed(llama, cache, ids(1, 40))
    cache.save(path)
    whole, meanwhile, plain = path.read_bytes(), [1], getattr(serialize, during)

    def step(*args):
        found = plain(*args)
        if meanwhile and meanwhile.pop():
            feed(llama, cache, ids(1, 1))
        return found

    monkeypatch.setattr(serialize, during, step)
    with pytest.raises(ValueError, match="expected a cache that no other thread uses meanwhile"):
        cache.save(path)
    assert path.read_bytes() == whole and len(list(tmp_path.iterdir())) == 1
    cache.save(path)
    assert torch.equal(feed(llama, KVCache.load(path, llama.config), ids(1, 3, 5)), feed(llama, cache, ids(1, 3, 5)))


def test_an_interrupted_pass_is_not_saved(llama, tmp_path):
    """The file of the state before, which could go on, is not replaced by one that cannot."""
    cache, path = KVCache(llama.config, "int8", page_size=P), tmp_path / "a.kvc"
    feed(llama, cache, ids(1, 40))
    cache.save(path)
    hook = llama.model.layers[0].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        feed(llama, cache, ids(1, 3))
    hook.remove()
    with pytest.raises(ValueError, match="an exception interrupted a forward pass"):
        cache.save(path)
    assert feed(llama, KVCache.load(path, llama.config), ids(1, 1)).isfinite().all()
