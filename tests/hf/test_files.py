"""`.kvc` files and suspension: what is loaded is what was saved, whatever happens to the file."""

from __future__ import annotations

import builtins
import copy
import errno
import io
import json
import os
from pathlib import Path

import pytest
import torch
from generation import PAGE as P
from generation import feed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import ids, left_pads, model

from kvcompress import H2O, AdaKV, KVCache, PrefixCache, SnapKV, StreamingLLM, enable
from kvcompress.hf import save_load
from kvcompress.policies import Demote, Watch


def same(a, b):
    """Whether two caches are equal, to the byte of their pages."""
    for x, y in zip(a.layers, b.layers, strict=True):
        if hasattr(x, "store"):
            assert all(torch.equal(s, t) for s, t in zip(x.store.dense(), y.store.dense(), strict=True))
            assert x.store.page_store.table.rows.tolist() == y.store.page_store.table.rows.tolist()
            for ours, theirs in zip(x.store.kept_heads()[0], y.store.kept_heads()[0], strict=True):
                assert [s.tolist() for s in ours] == [s.tolist() for s in theirs]
            if x.store.eviction and x.store.eviction.evicted:
                assert torch.equal(x.store.evicted_attention(), y.store.evicted_attention())
            assert x.store.page_store.parts() | {"tables": 0} == y.store.page_store.parts() | {"tables": 0}
        else:
            assert torch.equal(x.keys, y.keys) and x.cumulative_length == y.cumulative_length
    return True


CASES = {
    "int8": ("int8", {}),
    "int4, mixed": ("int4", {"value": "int2", "per_layer": {0: "raw"}, "residual_length": 32}),
    "kivi2": ("kivi2", {}),
    "raw": ("raw", {"sinks": 0}),
    "direct": ("int8", {"residual_length": 0}),
    "spans": (None, {"spans": [(0, 0.5, "int8"), (0.5, None, "int4")], "span_tokens": 200}),
    "h2o": ("int4_token", {"policy": H2O(budget=64)}),
    "ada": ("int8", {"policy": AdaKV(H2O(budget=64))}),
    "snapkv": ("int8", {"policy": SnapKV(budget=64)}),
    "streaming": ("int8", {"policy": StreamingLLM(4, 64, positions="cache")}),
    "watch": ("int8", {"policy": Watch(Demote(H2O(budget=64), ["int8", "int4"]), 8)}),
}


@pytest.mark.parametrize("old,length", [
    ({"recent": 0, "residual": None}, None), ({"recent": 32, "residual": None}, 32), ({"recent": 0, "residual": 0}, 0),
])  # fmt: skip
def test_the_raw_tokens_of_version_0_1(old, length):
    """`residual_length` had two other names."""
    read = save_load.options_of({"key": "int8", **old, "per_layer": {"1": {"key": "int4", **old}, "2": "raw"}})
    assert read == {
        "key": "int8", "residual_length": length,
        "per_layer": {1: {"key": "int4", "residual_length": length}, 2: "raw"},
    }  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("how", ["file", "memory", "suspended file"])
def test_goes_on_as_if_nothing_had_been(llama, case, how, tmp_path):
    fmt, options = CASES[case]
    cache = KVCache(llama.config, fmt, page_size=P, **options)
    tokens, mask = left_pads(ids(2, 150), [0, 9])
    feed(llama, cache, tokens, mask)
    twin, path = KVCache(llama.config, fmt, page_size=P, **options), tmp_path / "a.kvc"
    feed(llama, twin, tokens, mask)  # a deep copy would share pages and therefore be evicted differently
    if how == "file":
        cache.save(path, tokens=tokens)
        cache = KVCache.load(path, llama.config, tokens=tokens)
        assert cache.to_dict().keys() == twin.to_dict().keys()
    else:
        before = cache.stats()
        cache.suspend(path if how != "memory" else None)
        assert cache.stats()["bytes"] < before["bytes"] / 20 and cache.get_seq_length() == 150
        with pytest.raises(ValueError, match="suspended one; call resume"):
            feed(llama, cache, tokens[:, :1])
        for act in (lambda: cache.crop(-1), lambda: copy.deepcopy(cache), lambda: cache.layers[0].keys, cache.suspend,
                    lambda: cache.reorder_cache(torch.tensor([1, 0])), lambda: cache.save(path), lambda: cache.kept(0),
                    cache.evicted_attention, lambda: cache.use_tiers(None), lambda: cache.to("cpu")):  # fmt: skip
            with pytest.raises(ValueError, match="suspended"):
                act()
        cache.resume()
        assert cache.stats()["parts"]["sealed"] == before["parts"]["sealed"]
        with pytest.raises(ValueError, match="expected a suspended cache"):
            cache.resume()
    assert same(cache, twin)
    for step in range(3):
        more = ids(2, 40, step)
        mask = torch.cat([mask, torch.ones(2, 40, dtype=mask.dtype)], 1)
        assert torch.equal(feed(llama, cache, more, mask), feed(llama, twin, more, mask))
    assert same(cache, twin)


def test_shared_pages_come_back_shared(llama, tmp_path):
    cache = KVCache(llama.config, "int8", page_size=P)
    feed(llama, cache, ids(1, 150))
    cache.batch_repeat_interleave(4)
    feed(llama, cache, ids(4, 5))
    size = cache.stats()["bytes"]
    cache.suspend()
    cache.resume()
    assert abs(cache.stats()["bytes"] - size) < 0.1 * size
    cache.save(tmp_path / "a.kvc")
    twin = KVCache.load(tmp_path / "a.kvc", llama.config)
    assert same(cache, twin) and twin.stats()["parts"] | {"slack": 0} == cache.stats()["parts"] | {"slack": 0}
    for x in (cache, twin):
        x.pool.check()
    assert torch.equal(feed(llama, cache, ids(4, 20, 3)), feed(llama, twin, ids(4, 20, 3)))


@pytest.mark.parametrize("name", ["gemma3", "mistral", "gpt_oss"])
def test_sliding_layers_are_saved_too(name, tmp_path):
    made = model(name)
    enable(made, verbose=False)
    cache = KVCache(made.config, "int8")
    feed(made, cache, ids(1, 100))
    cache.save(tmp_path / "a.kvc")
    twin = KVCache.load(tmp_path / "a.kvc", made.config)
    assert same(cache, twin)
    if name != "gpt_oss":  # whose full-attention layers can be cropped arbitrarily
        for x in (cache, twin):
            with pytest.raises(ValueError, match="a window of"):
                x.crop(-99)
    assert torch.equal(feed(made, cache, ids(1, 7, 3)), feed(made, twin, ids(1, 7, 3)))


def test_empty_cache(llama, tmp_path):
    cache = KVCache(llama.config, "int8")
    cache.save(tmp_path / "a.kvc")
    twin = KVCache.load(tmp_path / "a.kvc", llama.config)
    assert twin.get_seq_length() == 0
    cache.suspend()
    cache.resume()
    assert torch.equal(feed(llama, cache, ids(1, 20)), feed(llama, twin, ids(1, 20)))


def test_a_file_for_the_prefix_cache(llama, tmp_path):
    prompt = ids(1, 100)
    cache = KVCache(llama.config, "int4", page_size=P)
    feed(llama, cache, prompt)
    cache.save(tmp_path / "system.kvc", tokens=prompt)
    prefix = PrefixCache(llama.config, "int4", page_size=P)
    loaded = KVCache.load(tmp_path / "system.kvc", llama.config, tokens=prompt, pool=prefix.pool)
    assert prefix.commit(loaded, prompt, pin=True) == 84
    assert prefix.open(torch.cat([prompt, ids(1, 9)], 1)).get_seq_length() == 84


# ------------------------------------------------------------------ damaged files


@pytest.fixture(scope="module")
def saved(llama, tmp_path_factory):
    path = tmp_path_factory.mktemp("kvc") / "a.kvc"
    cache = KVCache(llama.config, "int4", page_size=P, policy=H2O(budget=96))
    feed(llama, cache, ids(1, 150))
    cache.save(path)
    return path.read_bytes()


def load(data, path, config):
    """Loads bytes; returns the cache, or None if an error reports damage."""
    path.write_bytes(data)
    try:
        return KVCache.load(path, config)
    except ValueError as error:
        assert "expected a file that save() wrote, got" in str(error) and len(str(error)) < 1000
        return None


quiet = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@quiet
@given(st.data())
def test_damage_is_found(llama, saved, tmp_path, data):
    """Changed bytes anywhere, or truncation: never a cache (digest and checksums cover everything)."""
    broken = bytearray(saved)
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(broken) - 1))
        broken[at] ^= data.draw(st.integers(1, 255))
    elif data.draw(st.booleans()):
        del broken[data.draw(st.integers(0, len(broken) - 1)) :]
    else:
        at = data.draw(st.integers(0, len(broken) - 1))
        broken[at : at + 8] = data.draw(st.binary(min_size=8, max_size=8))
    found = load(bytes(broken), tmp_path / "b.kvc", llama.config)
    if found is not None:  # a space in the header was replaced by another
        assert same(found, load(saved, tmp_path / "c.kvc", llama.config))


def header_of(saved):
    """The header of a file, and the rest."""
    size = int.from_bytes(saved[:8], "little")
    return json.loads(saved[8 : 8 + size]), saved[8 + size :]


def with_header(header, body):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def parts_of(saved):
    header, body = header_of(saved)
    about = header.pop("__metadata__")
    return about, {name: (x["dtype"], x["shape"], body[slice(*x["data_offsets"])]) for name, x in header.items()}


def forge(about, parts):
    """A file with a valid digest."""
    parts.pop("seal", None)
    small = ((name, parts[name][2]) for name in sorted(parts) if not name.endswith(".pages"))
    parts["seal"] = ("U8", [32], save_load._digest(about, small))
    header, at = {"__metadata__": about}, 0
    for name, (dtype, shape, data) in parts.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    return with_header(header, b"".join(data for *_, data in parts.values()))


PLACES = {
    "behind the end": lambda a, b: [a, 1 << 40],
    "beyond 2^63": lambda a, b: [1 << 63, (1 << 63) + b - a],
    "beyond 2^64": lambda a, b: [a, (1 << 64) + b],
    "negative": lambda a, b: [-64, b],
    "backwards": lambda a, b: [b, a],
    "another's": lambda a, b: [a + 64, b + 64],
    "empty": lambda a, b: [a, a],
    "text": lambda a, b: [str(a), str(b)],
    "one": lambda a, b: [a],
}


@pytest.mark.parametrize("lie", PLACES)
def test_forged_offsets(llama, saved, tmp_path, lie):
    header, body = header_of(saved)
    for name in ("0.pages", "1.rows"):
        lying = {**header, name: {**header[name], "data_offsets": PLACES[lie](*header[name]["data_offsets"])}}
        assert load(with_header(lying, body), tmp_path / "b.kvc", llama.config) is None


@pytest.mark.parametrize("size", [0, 1, 1 << 31, 1 << 32, 1 << 40, (1 << 63) - 1, (1 << 64) - 1])
def test_forged_header_sizes(llama, saved, tmp_path, size):
    assert load(size.to_bytes(8, "little") + saved[8:], tmp_path / "b.kvc", llama.config) is None


WORDS = [0, 1, -1, 2, 15, 16, 1 << 16, 1 << 16 | 3, 0xFFFF, 1 << 31, (1 << 31) - 1, 1 << 40, -(1 << 63), (1 << 63) - 1]


@quiet
@given(st.data())
def test_hostile_files(llama, saved, tmp_path, data):
    """A file with a valid digest and invalid numbers: an error, or a cache that can be read, used and freed."""
    about, parts = parts_of(saved)
    kind = data.draw(st.sampled_from(["array", "shape", "json", "drop", "copy", "pages"]))
    name = data.draw(st.sampled_from(sorted(parts)))
    dtype, shape, raw = parts[name]
    if kind == "array" and len(raw) >= 8:
        words = bytearray(raw)
        for _ in range(data.draw(st.integers(1, 3))):
            width = 4 if dtype in ("I32", "F32") else 8
            at = data.draw(st.integers(0, len(words) // width - 1)) * width
            value = data.draw(st.sampled_from(WORDS)) & ((1 << 8 * width) - 1)
            words[at : at + width] = value.to_bytes(width, "little")
        parts[name] = (dtype, shape, bytes(words))
    elif kind == "shape":
        parts[name] = (dtype, data.draw(st.permutations(shape)), raw)
    elif kind == "drop":
        del parts[name]
    elif kind == "copy":
        other = data.draw(st.sampled_from(sorted(parts)))
        parts[name] = parts[other]
    elif kind == "pages":
        parts["0.pages"] = ("U8", [len(saved)], saved)
    else:
        layers, options = json.loads(about["layers"]), json.loads(about["options"])
        target = data.draw(st.sampled_from([*layers, options]))
        key = data.draw(st.sampled_from(sorted(target)))
        target[key] = data.draw(
            st.sampled_from([None, -1, 0, 7, 1 << 40, "int8", "x", [], {}, [[1, 2, 3]], 1e300, True])
        )
        about["layers"], about["options"] = json.dumps(layers), json.dumps(options)
    cache = load(forge(about, parts), tmp_path / "b.kvc", llama.config)
    if cache is not None:
        for layer in cache.layers:
            if layer.is_initialized:
                layer.store.dense()
        try:
            feed(llama, cache, ids(max(1, cache.layers[0].store.batch if cache.layers[0].is_initialized else 1), 3))
        except ValueError:
            pass
        pool = cache.pool
        del cache, layer
        pool.check()


def test_wrong_files_say_what_they_are(llama, saved, tmp_path):
    path = tmp_path / "a.kvc"
    for data, text in ((b"", "no safetensors"), (b"GGUF" * 100, "no safetensors"), (saved[:1000], "truncated")):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=text):
            KVCache.load(path, llama.config)
    path.write_bytes(saved)
    with pytest.raises(ValueError, match="a cache of another model"):
        KVCache.load(path, model("qwen2").config)
    with pytest.raises(ValueError, match="saved without tokens="):
        KVCache.load(path, llama.config, tokens=ids(1, 150, 5))
    with pytest.raises(FileNotFoundError):
        KVCache.load(tmp_path / "none.kvc", llama.config)
    about, parts = parts_of(saved)
    path.write_bytes(forge({**about, "version": "9"}, parts))
    with pytest.raises(ValueError, match="version 9"):
        KVCache.load(path, llama.config)
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match="a file of another kind"):
        KVCache.load(path, llama.config)


# ------------------------------------------------------------------ disk errors


class Full(io.FileIO):
    left = 0

    def write(self, data):  # type: ignore[override]
        if len(memoryview(data).cast("B")) > Full.left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        Full.left -= len(memoryview(data).cast("B"))
        return super().write(data)


@pytest.mark.parametrize("left", [0, 100, 3000, 20000])
def test_full_disk_loses_nothing(llama, tmp_path, monkeypatch, left):
    path = tmp_path / "a.kvc"
    cache = KVCache(llama.config, "int8")
    feed(llama, cache, ids(1, 150))
    cache.save(path)
    old = path.read_bytes()
    real = builtins.open
    Full.left = left
    monkeypatch.setattr(
        builtins, "open", lambda p, mode="r", **k: Full(p, mode) if mode == "xb" else real(p, mode, **k)
    )
    used = cache.stats()["bytes"]
    with pytest.raises(OSError, match="No space left"):
        cache.save(path)
    with pytest.raises(OSError, match="No space left"):
        cache.suspend(path)
    monkeypatch.undo()
    assert path.read_bytes() == old and os.listdir(tmp_path) == ["a.kvc"] and cache.stats()["bytes"] == used
    feed(llama, cache, ids(1, 1))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_truly_full_device(llama, tmp_path, monkeypatch):
    cache = KVCache(llama.config, "int8")
    feed(llama, cache, ids(1, 150))
    real = builtins.open
    monkeypatch.setattr(
        builtins, "open", lambda p, mode="r", **k: real("/dev/full" if mode == "xb" else p, mode.replace("x", "w"), **k)
    )
    with pytest.raises(OSError, match="No space left"):
        cache.suspend(tmp_path / "a.kvc")
    monkeypatch.undo()
    feed(llama, cache, ids(1, 1))


def test_read_only_folder(llama, tmp_path, monkeypatch):
    cache = KVCache(llama.config, "int8")
    feed(llama, cache, ids(1, 150))
    with pytest.raises(OSError):
        cache.suspend(Path("/proc/kvcompress.kvc"))  # where not even root can write
    with pytest.raises(FileNotFoundError):
        cache.save(tmp_path / "none" / "a.kvc")
    feed(llama, cache, ids(1, 1))


def test_tokens_of_a_file(llama, tmp_path):
    path, cache = tmp_path / "a.kvc", KVCache(llama.config, "int8", page_size=P)
    tokens = ids(1, 50)
    feed(llama, cache, tokens)
    for wrong in (tokens[:, :5], torch.zeros(1, 51, dtype=torch.long), torch.tensor(5)):
        with pytest.raises(ValueError, match="tokens: expected the 50 tokens of the cache"):
            cache.save(path, tokens=wrong)
    assert not path.exists()
    cache.save(path, tokens=tokens[0].tolist())
    for known in (tokens, tokens[0], tokens.numpy()):
        assert same(KVCache.load(path, llama.config, tokens=known), cache)
    with pytest.raises(ValueError, match="a cache of other tokens"):
        KVCache.load(path, llama.config, tokens=ids(1, 50, 5))
    cache.save(path)
    with pytest.raises(ValueError, match="saved without tokens="):
        KVCache.load(path, llama.config, tokens=tokens)
    with pytest.raises(TypeError, match="pool: expected"):
        KVCache.load(path, llama.config, pool=3)
    with pytest.raises(TypeError, match="expected a transformers config"):
        KVCache.load(path, llama)
