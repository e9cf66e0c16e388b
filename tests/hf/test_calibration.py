"""Calibrated coordinates: they do not change attention, cal2 follows its formula, files are checked."""

import copy
import json
from pathlib import Path

import models
import numpy as np
import pytest
import torch
from generation import error
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from kvcompress import KVCache, PagedKV, PrefixCache, enable, formats, patch_generate, policies
from kvcompress.hf.calibrate import calibrate
from kvcompress.quantization.calibration import Basis, Calibration
from kvcompress.tools.cli import main

H, G, D = 2, 3, 64


def basis(seed=0, heads=H, dim=D):
    """Random matrices that stretch."""
    g = torch.Generator().manual_seed(seed)
    maps = torch.randn(2, heads, dim, dim, generator=g).double()
    maps = torch.linalg.qr(maps)[0] * torch.logspace(-1, 1, dim, dtype=torch.float64)
    return Basis(*(x.float() for m in maps for x in (m, torch.linalg.inv(m))))


def data(T, seed, heads=H, dtype=torch.float32):
    return torch.randn(1, heads, T, D, generator=torch.Generator().manual_seed(seed)).to(dtype)


def digits(x, mean):
    """cal2 of rows of coordinates [n, D], float64: 4-bit levels, 2-bit levels, zeros, with the norm preserved."""
    x = x - mean
    fine, used = D // 4, D - D // 4
    step = np.r_[np.full(fine, 21 / 64), np.ones(used - fine)]
    top = np.r_[np.full(fine, 8.0), np.full(used - fine, 2.0)]
    rms = np.sqrt((x[:, :used] ** 2).mean(1, keepdims=True))
    level = np.clip(np.floor(x[:, :used] / (step * rms)), -top, top - 1) + 0.5
    level = np.pad(level * step, ((0, 0), (0, D - used)))
    gain = np.linalg.norm(x[:, :used], axis=1, keepdims=True) / np.linalg.norm(level, axis=1, keepdims=True)
    return gain * level + mean


def test_cal2_is_its_formula_in_float64():
    b, k, v = basis(), data(200, 1), data(200, 2)
    kv = PagedKV(H, D, key="cal2", sinks=4, basis=b)
    kv.append(k, v)
    kv.append(k[:, :, :1], v[:, :, :1])
    for x, got, to, centred in ((k, kv.dense()[0], b.key, True), (v, kv.dense()[1], b.value, False)):
        assert error(got[:, :, :4], x[:, :, :4]) < 1e-5 and error(got[:, :, 196:200], x[:, :, 196:]) < 1e-5
        for h in range(H):
            m = to[h].double().numpy()
            for page in range(4, 132, 64):  # two are sealed
                rows = x[0, h, page : page + 64].double().numpy() @ m
                mean = np.float16(rows.mean(0)).astype(float) if centred else 0.0
                want = digits(rows, mean) @ np.linalg.inv(m)
                there = got[0, h, page : page + 64].double().numpy()
                close = np.abs(there - want).max(1) < 2e-2 * np.abs(want).max()
                assert close.mean() > 0.9  # a number next to a boundary of the grid may be rounded the other way
                assert np.linalg.norm(there - want) < 0.1 * np.linalg.norm(want)


@pytest.mark.parametrize("dtype,bound", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_raw_pages_give_the_same_attention(dtype, bound):
    plain, mapped = PagedKV(H, D, key="raw", dtype=dtype), PagedKV(H, D, key="raw", dtype=dtype, basis=basis())
    for seed, T in enumerate((90, 1, 7, 1)):
        k, v, q = data(T, 3 * seed, dtype=dtype), data(T, 3 * seed + 1, dtype=dtype), data(T, 9, H * G, dtype)
        (a, lse_a), (b, lse_b) = plain.attend(q, k, v), mapped.attend(q, k, v)
        assert a.dtype == b.dtype == dtype and error(b, a) < bound and error(lse_b, lse_a) < bound
    assert all(error(x, y) < bound for x, y in zip(mapped.dense(), plain.dense(), strict=True))


@pytest.mark.parametrize("key,value", [("cal2", "cal2"), ("int4", "cal2"), ("cal2", "int2"), ("int8", "kivi2")])
def test_attention_is_that_of_what_is_stored(key, value):
    """Compared with float64 over `dense()`, through appends, rejected drafts, selected rows, evicted tokens."""
    kv, b = PagedKV(H, D, key=key, value=value, basis=basis()), basis()
    assert all(torch.equal(x, y) for x, y in zip(b[:4], kv.page_store.basis[:4], strict=True))
    for seed, T in enumerate((300, 1, 20)):
        kv.append(data(T, seed), data(T, seed + 50))
    kv.crop(310)
    kv.select([0, 0])
    keep = torch.rand(2, 310, generator=torch.Generator().manual_seed(3)) < 0.8
    keep[:, :4] = True
    kv.evict(keep)
    q = torch.randn(2, H * G, 1, D, generator=torch.Generator().manual_seed(4))
    out, lse = kv.attend(q)
    K, V = (x.double().repeat_interleave(G, 1) for x in kv.dense())
    s = (q.double() @ K.mT / D**0.5).masked_fill(~keep[:, None, None], -torch.inf)
    assert error(out, torch.softmax(s, -1) @ V) < 2e-2 and error(lse, s.logsumexp(-1)) < 2e-2
    twin = kv.clone()
    assert torch.equal(twin.attend(q)[0], out)


@pytest.fixture(scope="module")
def made():
    """A random model with our attention, and its calibration."""
    model = copy.deepcopy(models.model("llama", head_dim=64))
    found = calibrate(model, models.ids(1, 1200), context=300, tokens=1200)
    enable(model, verbose=False)
    return model, found


def test_several_texts_count_alike(made):
    model, texts = made[0], models.ids(1, 1500)[0].split((700, 800))
    found = calibrate(model, list(texts), context=300, tokens=1200)
    want = calibrate(model, torch.cat([text[:600] for text in texts]), context=300, tokens=1200)
    assert found.digest() == want.digest()
    with pytest.raises(ValueError, match="at least 300 tokens, got 299"):
        calibrate(model, [texts[0], texts[1][:299]], context=300, tokens=1200)
    with pytest.raises(ValueError, match="tokens: expected at least 600"):
        calibrate(model, list(texts), context=300, tokens=599)


def test_formats_of_one_width_get_the_axes(made):
    """Each side by its own formats, including spans; without deviations all formats use the same matrices."""
    model, found = made
    even, uneven = found.basis(0, (True, True)), found.basis(0)
    assert torch.equal(even.key, found.layers[0][0] / found.deviations[0][0][:, None] ** 0.125)
    assert not torch.allclose(even.key, uneven.key) and uneven.key_costs is None
    for options, key, value in (
        ({"key": "int4"}, even, even),
        ({"key": "cal2"}, uneven, uneven),
        ({"key": "int4", "value": "cal2"}, even, uneven),
        ({"key": "int3", "spans": [(0, 100, "cal2"), (100, None, "int8")]}, uneven, uneven),
    ):
        cache = KVCache(model.config, calibration=found, **options)
        with torch.no_grad():
            model(models.ids(1, 20), past_key_values=cache)
        got = cache.layers[0].store.page_store.basis
        assert torch.equal(got.key, key.key) and torch.equal(got.value_back, value.value_back)
    old = Calibration(found.layers, found.model, found.weights)
    assert all(x is y for x, y in zip(old.basis(0), old.basis(0, (True, True)), strict=True))


def test_generate_and_files(made, tmp_path):
    model, found = made
    path = tmp_path / "model.kvcal"
    found.save(path)
    again = Calibration.load(path)
    assert again.digest() == found.digest() and all(
        torch.equal(x, y) for i in found.layers for x, y in zip(found.basis(i)[:4], again.basis(i)[:4], strict=True)
    )
    ids = models.ids(1, 200)
    cache = KVCache(model.config, "cal2", calibration=path)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        step = model(ids[:, :1], past_key_values=cache).logits
        assert cache.layers[0].store.key == "cal2" and cache.layers[0].store.page_store.basis is not None
        dense = cache.to_dynamic_cache()
        dense.crop(-1)
        model.set_attn_implementation("sdpa")
        want = model(ids[:, :1], past_key_values=dense).logits
        model.set_attn_implementation("kvcompress")
    assert error(step, want) < 2e-2
    cache.save(tmp_path / "a.kvc")
    loaded = KVCache.load(tmp_path / "a.kvc", model.config, calibration=path)
    with torch.no_grad():
        a, b = (model(ids[:, 1:2], past_key_values=c).logits for c in (cache, loaded))
    assert torch.equal(a, b)
    assert cache.to_dict()["calibration"] == str(path)
    KVCache.from_dict(model.config, json.loads(json.dumps(cache.to_dict())))
    for wrong in (None, Calibration({0: found.layers[0]}, found.model, {0: found.weights[0]})):
        with pytest.raises(ValueError, match="pass load\\(\\) the calibration that it was saved with|with layer"):
            KVCache.load(tmp_path / "a.kvc", model.config, calibration=wrong)
    plain = KVCache(model.config, "int2")
    plain.save(tmp_path / "b.kvc")
    with pytest.raises(ValueError, match="a cache with none for calibration="):
        KVCache.load(tmp_path / "b.kvc", model.config, calibration=path)


def test_prefixes_are_shared_by_equal_calibrations(made, tmp_path):
    """A prompt's pages are reused by the next one; pages with another calibration, or none, are not."""
    model, found = made
    found.save(tmp_path / "here.kvcal")
    found.save(tmp_path / "there.kvcal")
    maps = {i: tuple(2 * x for x in pair) for i, pair in found.layers.items()}
    prefix, prompt = PrefixCache(model.config, "cal2", calibration=tmp_path / "here.kvcal"), models.ids(1, 200)
    cold = prefix.open(prompt)
    with torch.no_grad():
        model(prompt, past_key_values=cold)
        prefix.commit(cold, prompt)
        warm = prefix.open(prompt)
        shared = warm.get_seq_length()
        assert shared == 4 + 2 * 64 and warm.layers[0].store.page_store.basis is not None
        rest = prompt[:, shared:]
        logits = model(rest, past_key_values=warm).logits
        again = KVCache(model.config, "cal2", calibration=found)
        model(prompt, past_key_values=again)
        again.crop(shared - prompt.shape[1])
        want = model(rest, past_key_values=again).logits
    assert error(logits, want) < 1e-4
    for calibration, hit in ((tmp_path / "there.kvcal", True), (Calibration(maps, found.model, found.weights), False)):
        assert bool(prefix.open(prompt, calibration=calibration).get_seq_length()) == hit
    other = prefix.open(prompt, key="int2", value="int2", calibration=None)
    assert not other.get_seq_length()


def test_a_compiled_step(made):
    model, found = made
    ids = models.ids(1, 190)
    fixed, free = (KVCache(model.config, "cal2", calibration=found, max_length=n) for n in (200, None))
    step = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        for cache in (fixed, free):
            model(ids[:, :186], past_key_values=cache)
        for i in range(186, 190):
            got = step(ids[:, i : i + 1], past_key_values=fixed).logits
            assert torch.equal(got, model(ids[:, i : i + 1], past_key_values=free).logits)


@pytest.mark.parametrize("policy", [policies.H2O(100), policies.KNorm(100), policies.StreamingLLM(4, 96)])
def test_policies_see_keys_and_attention_as_they_are(made, policy):
    """The same tokens are kept as without calibration: raw pages lose nothing."""
    model, found = made
    caches = [KVCache(model.config, "raw", policy=policy, calibration=c) for c in (None, found)]
    with torch.no_grad():
        for part in models.ids(1, 240).split((200, 40), 1):
            a, b = (model(part, past_key_values=cache).logits for cache in caches)
    assert error(b, a) < 1e-3
    for layer in range(2):
        slots = [[set(x.tolist()) for row in cache.kept(layer).slots for x in row] for cache in caches]
        for x, y in zip(*slots, strict=True):
            assert len(x & y) >= 0.95 * len(x)


def other(model, name):
    config = copy.deepcopy(model.config)
    setattr(config, name, getattr(config, name) + 1)
    return config


REFUSED = {
    "no file": (ValueError, "cal2: expected calibration= with layer 0", lambda m, c: KVCache(
        m.config, "cal2")),
    "for a layer": (ValueError, "with layer 1", lambda m, c: KVCache(m.config, "int4", per_layer={1: "cal2"})),
    "by position": (ValueError, "with layer 0", lambda m, c: KVCache(m.config, "int8", spans=[(0, None, "cal2")])),
    "of another": (ValueError, "its config differs", lambda m, c: KVCache(other(m, "vocab_size"), calibration=c)),
    "ranks": (ValueError, "calibration or group", lambda m, c: KVCache(m.config, calibration=c, group=object())),
    "moved sinks": (ValueError, "no calibration", lambda m, c: KVCache(
        m.config, calibration=c, policy=policies.StreamingLLM(4, 60, positions="cache"))),
    "no calibration": (TypeError, "a path or a Calibration, got int", lambda m, c: KVCache(m.config, calibration=3)),
    "no such file": (OSError, "nowhere", lambda m, c: KVCache(m.config, calibration="nowhere.kvcal")),
    "other heads": (ValueError, "basis: expected", lambda m, c: PagedKV(3, 64, basis=basis())),
    "latents": (ValueError, "basis: expected.*latents", lambda m, c: PagedKV(
        1, 64, latent=True, basis=basis(heads=1))),
    "short text": (ValueError, "at least 1024 tokens", lambda m, c: calibrate(m, models.ids(1, 90))),
    "append direct": (ValueError, "8-bit format", lambda m, c: KVCache(
        m.config, "cal2", calibration=c, residual_length=0)),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case, made):
    kind, says, do = REFUSED[case]
    with pytest.raises(kind, match=says):
        do(*made)


def test_other_weights_are_refused_at_the_first_call(made):
    model, found = made
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.model.layers[1].self_attn.k_proj.weight.mul_(1.01)
        cache = KVCache(changed.config, "cal2", calibration=found)
        with pytest.raises(ValueError, match="other weights in layer 1 .*; run `kvcompress calibrate`"):
            changed(models.ids(1, 20), past_key_values=cache)
    assert cache.get_seq_length() == 0


def test_bind_finds_other_weights_before_any_token(made):
    """Also without `enable`, where nothing else checks them; caches that generate() creates are bound, too."""
    model, found = made
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.model.layers[1].self_attn.v_proj.weight.mul_(1.01)
    for implementation in ("sdpa", "kvcompress"):
        changed.set_attn_implementation(implementation)
        with pytest.raises(ValueError, match="other weights in layer 1"):
            KVCache(changed.config, "cal2", calibration=found).bind(changed)
    assert KVCache(model.config, "cal2", calibration=found).bind(model).get_seq_length() == 0
    with (
        patch_generate(changed, "cal2", calibration=found),
        pytest.raises(ValueError, match="other weights in layer 1"),
    ):
        changed.generate(models.ids(1, 20), max_new_tokens=2)


def test_a_calibration_of_no_layers_says_so():
    with pytest.raises(ValueError, match="at least one layer, got none; run `kvcompress calibrate`"):
        Calibration({}, "m", {})


def test_autocast_does_not_round_the_maps():
    x, q = torch.randn(1, 2, 90, 64), torch.randn(1, 4, 1, 64)
    there = PagedKV(2, 64, key="raw", basis=basis())
    there.append(x, x)
    want = there.attend(q)[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert (there.attend(q)[0].float() - want).abs().max() < 1e-5


def test_a_calibration_without_a_file_goes_along(made):
    model, found = made
    found = Calibration(found.layers, found.model, found.weights)
    again = KVCache.from_dict(model.config, KVCache(model.config, "cal2", calibration=found).to_dict())
    assert again.forward_pass.calibration is found


def test_a_patched_model_keeps_its_calibration(made, tmp_path):
    """generate() does not read the file again, which may be moved or replaced meanwhile."""
    model, found = made
    ids, path = models.ids(1, 100), tmp_path / "m.kvcal"
    found.save(path)
    want = model.generate(ids, past_key_values=KVCache(model.config, "cal2", calibration=path), max_new_tokens=8)
    for given in (path, Calibration.load(path)):
        found.save(path)
        with patch_generate(model, "cal2", calibration=given):
            path.unlink()
            assert torch.equal(model.generate(ids, max_new_tokens=8), want)


def test_a_head_without_variance_gets_the_identity(made):
    model, ids = copy.deepcopy(made[0]), models.ids(1, 400)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.zero_()
    found = calibrate(model, ids, context=400)
    value = found.layers[0][1]
    assert torch.equal(value, torch.eye(value.shape[1]).expand_as(value)) and found.deviations[0][1].eq(1).all()


def test_damaged_files(made, tmp_path):
    path, bad = tmp_path / "good.kvcal", tmp_path / "bad.kvcal"
    made[1].save(path)
    parts = load_file(path)
    about = {"kind": "kvcompress calibration", "version": "1", "model": "m", "layers": json.dumps(made[1].weights)}
    singular = {**parts, "0.key": torch.zeros_like(parts["0.key"])}
    cases = {
        "file of another kind": lambda: save_file(parts, bad),
        "version 2": lambda: save_file(parts, bad, {**about, "version": "2"}),
        "no safetensors file, or a damaged": lambda: bad.write_bytes(path.read_bytes()[:-9]),
        "a damaged": lambda: save_file({"0.key": parts["0.key"]}, bad, about),
        "maps that are invertible": lambda: save_file(singular, bad, about),
        r"expected float32 \[H, D, D\]": lambda: save_file({**parts, "0.key": parts["0.key"].half()}, bad, about),
        "deviations above 0": lambda: save_file({**parts, "0.key.deviation": -parts["0.key.deviation"]}, bad, about),
        "a damaged file": lambda: save_file(parts, bad, {**about, "layers": "[1]"}),
        "bad.kvcal: expected maps of at least one layer, got none": lambda: save_file(
            parts, bad, {**about, "layers": "{}"}
        ),
    }
    for says, write in cases.items():
        write()
        with pytest.raises(ValueError, match=says):
            Calibration.load(bad)


def test_command(tmp_path, capsys):
    folder, text, out = Path(__file__).parents[2] / "assets" / "books-tiny", tmp_path / "ids.npy", tmp_path / "m.kvcal"
    np.save(text, models.ids(1, 600)[0].numpy())
    arguments = ["calibrate", str(folder), "--text", str(text), "-o", str(out), "--context", "300", "--json"]
    assert main(arguments) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["layers"] == 6 and said["wrote"] == str(out) and said["tokens"] == 600
    KVCache(AutoConfig.from_pretrained(folder), "cal2", calibration=out)
    assert main([*arguments[:-2], "400", "--json"]) == 0  # one pass of 400; the other 200 tokens are not read
    assert json.loads(capsys.readouterr().out)["tokens"] == 400
    assert main([*arguments[:3], str(tmp_path / "none.txt")]) == 1 and "expected a file" in capsys.readouterr().err


def test_the_names():
    assert formats.CALIBRATED == ("cal2",) and not set(formats.CALIBRATED) & set(formats.NAMES)
    rows = {row["name"]: row for row in formats.matrix(128)}
    assert (rows["cal2"]["key_bits"], rows["cal2"]["value_bits"], rows["cal2"]["devices"]) == (
        2.375,
        2.125,
        ["cpu", "cuda"],
    )
