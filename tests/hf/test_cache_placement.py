"""Model placement and modes: devices as accelerate distributes them, meta, autograd."""

import pytest
import torch
import transformers as hf
from generation import cache_of, select
from models import ids, model

from kvcompress import KVCache, enable

BOOKS = "assets/books-tiny"


@pytest.fixture(autouse=True)
def _at_root(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("spread", ["cpu", "auto", "two"])
def test_device_map(spread, fused, tmp_path):
    """`two`: half of the layers are in files, on "meta", and are loaded to the CPU when they run."""
    layers = hf.AutoConfig.from_pretrained(BOOKS).num_hidden_layers
    two = {f"model.layers.{i}": "cpu" if i < layers // 2 else "disk" for i in range(layers)}
    two |= {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "disk", "lm_head": "cpu"}
    device_map = two if spread == "two" else spread
    m = hf.AutoModelForCausalLM.from_pretrained(
        BOOKS, dtype=torch.float32, device_map=device_map, offload_folder=tmp_path
    )
    assert ("meta" in {p.device.type for p in m.parameters()}) == (spread == "two")
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    want = m.generate(ids(2, 70), **options)
    if fused:
        assert enable(m, verbose=False).fused
    cache = KVCache(m.config, "raw")
    assert torch.equal(m.generate(ids(2, 70), past_key_values=cache, **options), want)
    assert cache.get_seq_length() == 81


@pytest.mark.parametrize("implementation", ["kvcompress", "sdpa"])
def test_a_model_on_meta_is_refused(implementation):
    config = model("llama").config
    with torch.device("meta"):
        m = hf.AutoModelForCausalLM.from_config(config)
    select(m, implementation)
    cache = cache_of(m, "int8")
    with pytest.raises(ValueError, match="expected cpu, got meta"):
        m(torch.ones(1, 3, dtype=torch.long, device="meta"), past_key_values=cache)
    assert cache.get_seq_length() == 0
    assert "a KVCache needs it on the CPU" in str(enable(m, verbose=False))


@pytest.mark.parametrize("implementation", ["kvcompress", "sdpa", "eager"])
def test_under_autograd_it_says_so_and_loses_nothing(implementation):
    m = select(model("llama"), implementation)
    cache = cache_of(m, "int8")
    for seen in (0, 20):
        with pytest.raises(ValueError, match=r"outside autograd.*torch\.no_grad"):
            m(ids(2, 3), past_key_values=cache)
        assert cache.get_seq_length() == seen
        with torch.inference_mode():
            m(ids(2, 20), past_key_values=cache)
