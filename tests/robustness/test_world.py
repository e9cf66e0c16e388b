"""A changing environment: files that other threads and processes write, replace by links, truncate; unusual defaults
of torch."""

from __future__ import annotations

import copy
import mmap
import os
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

import kvcompress
from kvcompress import KVCache, PagedKV
from kvcompress.hf import save_load
from kvcompress.offload.tiers import Tiers

CONFIG = LlamaConfig(
    hidden_size=64, num_attention_heads=2, num_key_value_heads=2, head_dim=32, num_hidden_layers=2, vocab_size=50
)


def filled(T: int = 70, **options: Any) -> KVCache:
    cache = KVCache(CONFIG, **{"page_size": 16, **options})
    for i in range(2):
        k, v = torch.randn(2, 1, 2, T, 32, device="cpu", dtype=torch.float32)
        cache.update(k, v, i)
    return cache


def test_saves_of_two_threads_to_one_path(tmp_path):
    """Each save succeeds, no reader sees a partial file, and no temporary file remains."""
    path, caches, errors = tmp_path / "one.kvc", [filled(70), filled(200)], []

    def work(cache: KVCache) -> None:
        try:
            for _ in range(15):
                cache.save(path)
                assert KVCache.load(path, CONFIG).get_seq_length() in (70, 200)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(x,)) for x in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and os.listdir(tmp_path) == ["one.kvc"]


@pytest.mark.parametrize("what", ["cache", "tensor", "tier"])
def test_a_planted_link_is_not_followed(tmp_path, monkeypatch, what):
    """An attacker who guesses our file name and creates a link there cannot redirect the write."""
    monkeypatch.setattr("secrets.token_hex", lambda n: "0" * 2 * n)  # make the name predictable
    victim, name = tmp_path / "victim", "0" * 16
    victim.write_bytes(b"precious")
    planted = {"cache": f"x.{name}.part", "tensor": f"x.{name}.part", "tier": f"{name}-0.pages"}[what]
    (tmp_path / planted).symlink_to(victim)
    if what == "tier":  # pages stay in the pool
        with pytest.warns(UserWarning, match="File exists"):
            filled(600).use_tiers(Tiers(host_bytes=0, file_bytes=None, folder=tmp_path), resident=16, unit=1)
    else:
        x = filled() if what == "cache" else kvcompress.quantize(torch.randn(1, 2, 4, 32), "int8")
        with pytest.raises(FileExistsError):
            x.save(tmp_path / "x")
    assert victim.read_bytes() == b"precious"


def test_save_syncs_before_the_rename(tmp_path, monkeypatch):
    """And before `save` returns: after a crash of the machine, the old or the new file exists, complete."""
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(number: int) -> None:
        done.append(os.readlink(f"/proc/self/fd/{number}").removeprefix(str(tmp_path)).rpartition(".")[2])
        fsync(number)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", lambda a, b: done.append("replace") or replace(a, b))
    filled().save(tmp_path / "x.kvc")
    assert done == ["part", "replace", ""]


def test_files_attended_in_place_are_unlinked(tmp_path):
    """A mapped file cannot be truncated by name any more; pages are fetched from the mapping."""
    torch.manual_seed(1)
    cache = filled(600)
    want = [x.dense() for x in (layer.store for layer in cache.layers)]
    tiers = Tiers(host_bytes=0, file_bytes=None, folder=tmp_path)
    cache.use_tiers(tiers, resident=16, unit=1, in_place=True)
    for layer in cache.layers:
        layer.store.attend(torch.randn(1, 2, 1, 32), torch.randn(1, 2, 1, 32), torch.randn(1, 2, 1, 32))
    left = list(tmp_path.glob("*.pages"))
    for path in left:
        os.truncate(path, 0)
    if not left:
        for (k, v), layer in zip(want, cache.layers, strict=True):
            got = layer.store.dense()
            assert all(torch.equal(a[:, :, :512], b[:, :, :512]) for a, b in zip(got, (k, v), strict=True))
    assert not left


def test_a_file_that_changes_after_its_check(tmp_path, monkeypatch):
    """Another process overwrites every small part between the check of the seal and its use: they are copies."""
    path = tmp_path / "x.kvc"
    cache = filled(200)
    cache.save(path)
    want = [layer.store.dense() for layer in cache.layers]
    place = save_load.Reader.place

    def meanwhile(reader: Any, index: int, store: PagedKV) -> None:
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
            begin = 8 + int.from_bytes(mapped[:8], "little")
            pages = sum(x.nbytes for name, x in reader.parts.items() if name.endswith(".pages"))
            mapped[begin + pages :] = b"\x7f" * (len(mapped) - begin - pages)
        place(reader, index, store)

    monkeypatch.setattr(save_load.Reader, "place", meanwhile)
    loaded = KVCache.load(path, CONFIG)
    for (k, v), layer in zip(want, loaded.layers, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(layer.store.dense(), (k, v), strict=True))


CUT_SHORT = """
import os, sys, torch
from kvcompress import QuantizedTensor, quantize
x = quantize(torch.randn(1, 2, 4096, 64), "int8")
x.save(sys.argv[1])
loaded = QuantizedTensor.load(sys.argv[1])
os.truncate(sys.argv[1], 0)
assert torch.equal(loaded.dequantize(), x.dequantize())
"""


def test_a_loaded_tensor_survives_truncation_of_its_file(tmp_path):
    """Truncated after it was loaded: a tensor over the mapping would end the process (SIGBUS)."""
    done = subprocess.run(
        [sys.executable, "-c", CUT_SHORT, tmp_path / "x"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_pages_that_change_while_they_are_read_are_damaged_or_those_that_were_saved(tmp_path):
    path = tmp_path / "x.kvc"
    filled(200).save(path)
    reader = save_load.Reader(path)
    with open(path, "r+b") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        file.write(b"\x55" * 64)
    cache = KVCache(CONFIG, page_size=16)
    with pytest.raises(ValueError, match="checksum"):
        reader.fill(0, cache.layers[0])


@pytest.mark.parametrize("rows", [1 << 24, 1 << 20])
def test_a_file_with_more_rows_than_bytes(tmp_path, rows):
    """A file with a valid seal that claims many sequences in a few bytes."""
    import tracemalloc

    path = tmp_path / "x.kvc"
    cache = filled(20)
    cache.save(path)
    reader = save_load.Reader(path)
    parts = {name: save_load.Part.of(x) for name, x in reader.parts.items()}
    for i in range(2):
        parts[f"{i}.entries"] = save_load.Part("I64", (rows, 1, 0), 0, lambda: np.empty(0, np.uint8))
    small = sorted(x for x in parts if not x.endswith(".pages"))
    seal = save_load._digest(reader.about, ((name, parts[name].data().tobytes()) for name in small))
    parts["seal"] = save_load.Part.of(np.frombuffer(seal, np.uint8))
    save_load._write(path, reader.about, parts)
    tracemalloc.start()
    with pytest.raises(ValueError, match="damaged layer 0"):
        KVCache.load(path, CONFIG)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most <= 4 * path.stat().st_size + (1 << 20)


def test_copies_are_independent():
    cache = filled()
    store = cache.layers[0].store
    twin = copy.copy(store)
    store.append(*torch.randn(2, 1, 2, 5, 32))
    assert (store.seen, twin.seen) == (75, 70)
    other = copy.copy(cache)
    assert other.get_seq_length() == 75 and other.layers[0].store is not store


@pytest.mark.parametrize("positions", ["cache", "original"])
def test_a_stream_longer_than_the_model_was_trained_for(tmp_path, positions):
    """It loads like any other file if the policy supports it; otherwise `max_slots=` allows it."""
    path, config = tmp_path / "x.kvc", copy.deepcopy(CONFIG)
    config.max_position_embeddings = 128
    cache = KVCache(config, page_size=16, policy=kvcompress.StreamingLLM(4, 40, positions=positions))
    for layer in cache.layers:
        for T in (100, 60):
            q, k, v = torch.randn(3, 1, 2, T, 32)
            layer.fit(k, v)
            layer.store.attend(q, k, v)
            layer.changed()
        layer.evict()
    cache.save(path)
    if positions == "original":
        with pytest.raises(ValueError, match="160 slots where .* and 128 are allowed; see max_slots="):
            KVCache.load(path, config)
    loaded = KVCache.load(path, config, max_slots=None if positions == "cache" else 160)
    assert loaded.get_seq_length() == 160
    for a, b in zip(cache.layers, loaded.layers, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a.store.dense(), b.store.dense(), strict=True))


OPTIONS: dict[str, dict[str, Any]] = {
    "raw": {"key": "raw"}, "int4": {"key": "int4"}, "kivi2": {"key": "kivi2"}, "spans": {"spans": [(0, 32, "int8")]},
    **{
        name: {"policy": getattr(kvcompress, name)(budget=40)}
        for name in ("H2O", "TOVA", "KeyDiff", "KNorm", "SnapKV")
    },
    "H2O, a share": {"policy": kvcompress.H2O(0.5)},
    "StreamingLLM": {"policy": kvcompress.StreamingLLM(32)},
}  # fmt: skip


@pytest.fixture
def odd_defaults():
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", OPTIONS)
def test_torch_defaults_do_not_matter(odd_defaults, name):
    """Default device meta, default dtype float64: tensors are created with the layer's device and dtype."""
    generator = torch.Generator("cpu").manual_seed(3)
    draw = lambda n, T: torch.randn(n, 1, 2, T, 32, generator=generator, device="cpu", dtype=torch.float32)  # noqa: E731
    store = PagedKV(2, 32, page_size=16, dtype=torch.float32, **OPTIONS[name])
    for T in (70, 1, 1, 20, 1):
        out, lse = store.attend(*draw(3, T))
        assert out.isfinite().all() and out.dtype == lse.dtype == torch.float32
    twin = copy.deepcopy(store)
    twin.attend(*draw(3, 1))
    for x in (*store.dense(), *twin.dense()):
        assert x.device.type == "cpu" and x.dtype == torch.float32
    store.select(torch.zeros(2, dtype=torch.int64, device="cpu"))
    store.kept_heads()


@pytest.mark.parametrize("options", [{}, {"key": "int4"}, {"policy": kvcompress.KNorm(budget=40)}], ids=str)
def test_files_of_caches_under_other_defaults(odd_defaults, tmp_path, options):
    cache = filled(**options)
    cache.save(tmp_path / "x.kvc", torch.arange(70, device="cpu"))
    loaded = KVCache.load(tmp_path / "x.kvc", CONFIG, tokens=list(range(70)))
    for a, b in zip(cache.layers, loaded.layers, strict=True):
        for x, y in zip(a.store.dense(), b.store.dense(), strict=True):
            assert x.device.type == "cpu" and torch.equal(x, y)
    cache.batch_select_indices([0, 0])
    cache.stats()
