"""Attention to offloaded pages in place, compared with float64 attention to the stored values and with a layer that
has all pages in the pool."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from cuda_twin import Twin
from generation import PAGE as P
from generation import generate
from models import ids, left_pads
from test_cuda_layer import on
from test_tiers import content, pool_of

from kvcompress import _C, KVCache, PagedKV, Tiers
from kvcompress.offload.prefetch import LayerOffload, Prefetcher
from kvcompress.store import serialize
from kvcompress.store.device_memory import Mirror, room
from kvcompress.store.serialize import Damaged

H, HQ, D = 2, 6, 32
WHERE = {"host": {}, "file": {"host_bytes": 0, "file_bytes": None}, "both": {"host_bytes": 30_000, "file_bytes": None}}
BOUND = {"raw": 1e-5, "int8": 5e-3, "int4": 2e-2, "kivi2": 2e-2}
SAME = {"raw": 1e-5, "int8": 2e-5, "int4": 2e-5, "kivi2": 2e-5}
"""Between two ways of cutting pages into runs: q and weights are rounded to 15 bits (8e-5 of the result), weights
relative to what a run saw as largest."""


def layer(fmt, tokens=200, batch=1, mask=None, **options):
    kv = PagedKV(H, D, key=fmt, batch=batch, page_size=P, pool=_C.Pool(), **options)
    generator = torch.Generator().manual_seed(5)
    for T in (tokens, 1, 30):
        k, v = (torch.randn(batch, H, T, D, generator=generator) for _ in range(2))
        kv.append(k, v, mask if tokens == T else None)
    return kv


def send(kv, resident=32, in_place=True, unit=1, **options):
    kv.attach(
        LayerOffload(kv.page_store, Prefetcher(Tiers(**options), resident=resident, unit=unit, in_place=in_place))
    )
    kv.offload.offload_oldest()
    assert kv.offload.runs
    return kv


def wanted(kv, q, k, v, real, softcap=0.0, s_aux=None):
    """float64 attention of a call with k and v, over the tokens it sees. real: bool [B, seen + T]."""
    keys, values = (x.double().repeat_interleave(HQ // H, 1) for x in kv.clone().append_dense(k, v))
    T = q.shape[2]
    scores = q.double() @ keys.transpose(2, 3) / D**0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    there = torch.ones(T, keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - T) & real[:, None, None]
    scores = scores.masked_fill(~there, -torch.inf)
    lse = scores.logsumexp(3)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.double()[None, :, None, None].expand(*scores.shape[:3], 1)], 3)
        values = torch.cat([values, torch.zeros_like(values[:, :, :1])], 2)
    return scores.softmax(3) @ values, lse


def error(got, want):
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("fmt", BOUND)
@pytest.mark.parametrize("T", [1, 5, 40])
def test_against_float64(fmt, T, where):
    generator = torch.Generator().manual_seed(T)
    near, far = layer(fmt), send(layer(fmt), **WHERE[where])
    s_aux = torch.randn(HQ, generator=generator) if T == 5 else None
    softcap = 20.0 if T == 40 else 0.0
    for step in range(4):
        q, k, v = (torch.randn(1, h, T, D, generator=generator) for h in (HQ, H, H))
        real = torch.ones(1, far.seen + T, dtype=torch.bool)
        out, lse = wanted(near, q, k, v, real, softcap, s_aux)
        got = far.attend(q, k, v, softcap=softcap, s_aux=s_aux)
        same = near.attend(q, k, v, softcap=softcap, s_aux=s_aux)
        assert error(got[0], out) <= BOUND[fmt] and float((got[1] - lse).abs().max()) <= 20 * BOUND[fmt]
        assert error(got[0], same[0].double()) <= SAME[fmt]
        if step % 2:
            far.offload.offload_oldest()
        only = far.attend(q[:, :, -1:])  # no own tokens
        assert error(only[0], near.attend(q[:, :, -1:])[0].double()) <= SAME[fmt]
    stats = far.offload.prefetcher.tiers.stats()
    assert stats["viewed"] and not stats["fetches"]
    assert len(far.offload.runs) > 1 or T == 1
    for a, b in zip(near.dense(), far.dense(), strict=True):
        assert torch.equal(a, b)  # the stored bytes are equal


@pytest.mark.parametrize("twin", [False, True], ids=["cpu", "gpu's host twin"])
def test_rows_with_pads_and_shared_pages(twin):
    """Rows that start at different slots; pages shared with a copy stay, between pages that were offloaded. On a GPU:
    the layer's own pages are in a device arena, the others are read by the CPU's kernel."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(2, 200, dtype=torch.bool)
    mask[1, :37] = False
    layers = [layer("int8", batch=2, mask=mask) for _ in range(2)]
    shared = int(layers[0].page_store.table.entries[1, 0, 5])
    near, far = layers
    far.page_store.pool.ref((shared >> 16) * 64)
    send(far)
    assert far.page_store.table.entries[1, 0, 5] >= 0 > far.page_store.table.entries[0, 0, 5]
    where = contextlib.nullcontext
    if twin:
        far.page_store.mirror = Mirror(far.page_store.pool, torch.device("cpu"))
        far.page_store.mirror.arena.reach()[: far.page_store.pool.extent] = torch.from_numpy(far.page_store.pool.arena)

        def where():
            return on(Twin())

    for T in (1, 1, 20, 1):
        q, k, v = (torch.randn(2, h, T, D, generator=generator) for h in (HQ, H, H))
        real = torch.cat([near.real(), torch.ones(2, T, dtype=torch.bool)], 1)
        out, lse = wanted(near, q, k, v, real)
        near.append(k, v)
        with where():
            got = far.attend(q, k, v)
        assert error(got[0], out) <= 5e-3 and float((got[1] - lse).abs().max()) <= 0.05
    assert not far.offload.prefetcher.tiers.stats()["fetches"]
    far.page_store.pool.unref((shared >> 16) * 64)


def test_what_cannot_stay_is_fetched():
    near, far = layer("int8"), send(layer("int8"))
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, h, 3, D, generator=generator) for h in (HQ, H, H))
    stats = far.offload.prefetcher.tiers.stats
    for options in ({"window": 50}, {"return_attention": True}):
        for a, b in zip(near.attend(q, k, v, **options), far.attend(q, k, v, **options), strict=True):
            assert torch.equal(a, b)
    assert torch.equal(near.attend(q)[0], far.attend(q)[0])
    assert stats()["fetches"] and not stats()["viewed"]
    hole = torch.tensor([[True, False, True]])
    near.append(k, v, hole), far.append(k, v, hole)
    assert torch.equal(near.attend(q[:, :, :1])[0], far.attend(q[:, :, :1])[0])


@pytest.mark.parametrize("harm", ["a byte", "the end", "all of it"])
def test_files_that_changed_are_an_error(tmp_path, harm):
    near, far = layer("int8"), send(layer("int8"), host_bytes=0, file_bytes=None, folder=tmp_path)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, h, 1, D, generator=generator) for h in (HQ, H, H))
    (path,) = tmp_path.iterdir()
    good = path.read_bytes()
    with open(path, "r+b") as file:
        if harm == "a byte":
            file.seek(1000)
            file.write(bytes([good[1000] ^ 1]))
        else:
            file.truncate(100 if harm == "the end" else 0)
    rows = far.page_store.table.rows.copy()
    with pytest.raises(Damaged, match="expected|expected"):
        far.attend(q, k, v)
    assert np.array_equal(far.page_store.table.rows, rows) and far.seen == near.seen
    with open(path, "r+b") as file:
        file.write(good)
    near.attend(q, k, v), far.attend(q, k, v)  # mapped from here on, and without a file name
    assert not list(tmp_path.iterdir())
    assert error(far.attend(q, k, v)[0], near.attend(q, k, v)[0].double()) <= 5e-3
    for a, b in zip(near.dense(), far.dense(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("where", WHERE)
def test_a_model_generates_the_same(llama, where):
    tokens, mask = left_pads(ids(2, 150), [0, 21])
    caches = [KVCache(llama.config, "raw", page_size=P) for _ in range(2)]
    tiers = Tiers(**WHERE[where])
    caches[1].use_tiers(tiers, resident=16, unit=1, in_place=True)
    a, b = (generate(llama, tokens, cache, mask, max_new_tokens=40) for cache in caches)
    assert torch.equal(a.sequences, b.sequences)
    torch.testing.assert_close(torch.stack(a.logits), torch.stack(b.logits), rtol=1e-4, atol=1e-4)
    stats = tiers.stats()
    assert stats["viewed"] and not stats["fetches"] and stats["host"] + stats["file"]
    caches[1].use_tiers(None)
    for x, y in zip(caches[0].layers, caches[1].layers, strict=True):
        torch.testing.assert_close(x.keys, y.keys, rtol=1e-4, atol=1e-4)


def test_pages_of_an_arena_elsewhere_go_and_come():
    """As on a GPU: gathered and scattered in units of 64 bytes; fetched, attended to and offloaded again unchanged."""
    near, far = layer("int8"), layer("int8")
    far.page_store.mirror = Mirror(far.page_store.pool, torch.device("cpu"))
    arena = far.page_store.mirror.arena
    arena.reach()[: far.page_store.pool.extent] = torch.from_numpy(far.page_store.pool.arena)
    far.page_store.pool.arena[:] = 255  # these bytes are unused
    arrays, pieces = serialize.survey(far.page_store)
    memory, checksum = serialize.gather(far.page_store, pieces)
    held = b"".join(arena.bytes[at : at + n].numpy().tobytes() for at, n in pieces.tolist())
    assert memory.tobytes() == held and checksum == _C.checksum(memory)
    far.page_store.table.reset()
    arena.bytes[:] = 255
    serialize.place(far.page_store, arrays, memory, checksum)
    send(far, in_place=False)
    generator = torch.Generator().manual_seed(1)
    with on(Twin()):
        for T in (1, 20, 1):
            q, k, v = (torch.randn(1, h, T, D, generator=generator) for h in (HQ, H, H))
            assert error(far.attend(q, k, v)[0], near.attend(q, k, v)[0].double()) <= 5e-3
        assert far.offload.prefetcher.tiers.stats()["fetches"]
        far.offload.onload()
        for a, b in zip(far.dense(), near.dense(), strict=True):
            assert torch.equal(a, b)


def test_a_file_is_read_while_another_thread_maps_it(monkeypatch):
    """`view` deletes the name of the file that it maps, also while `load` is about to open it."""
    pool, pieces, data = pool_of(np.random.default_rng(0), 3)
    tiers = Tiers(host_bytes=0, file_bytes=None)
    extent = tiers.put(pool, pieces)
    pool.arena[:] = 0

    def late(*args):
        tiers.view(extent)
        return room(*args)

    monkeypatch.setattr("kvcompress.offload.tiers.room", late)
    tiers.load(extent, pool, pieces)
    assert content(pool, pieces) == data
