"""Decoders with cross-attention: a KVCache within transformers' EncoderDecoderCache; alone, the error says what to
do."""

import pytest
import torch
import transformers as hf
from models import ids

from kvcompress import KVCache, enable

ENCODER = hf.BertConfig(
    vocab_size=96, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64
)  # fmt: skip
DECODERS = {
    "bert": lambda: hf.BertConfig(
        vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        initializer_range=0.2,
    ),
    "mbart": lambda: hf.MBartConfig(
        vocab_size=96, d_model=64, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=64, init_std=0.2,
        is_encoder_decoder=False, forced_eos_token_id=None, eos_token_id=None,
    ),
    "gpt2": lambda: hf.GPT2Config(
        vocab_size=96, n_embd=64, n_layer=2, n_head=4, initializer_range=0.2, bos_token_id=0, eos_token_id=None
    ),
}  # fmt: skip


def build(name):
    torch.manual_seed(7)
    config = hf.EncoderDecoderConfig.from_encoder_decoder_configs(ENCODER, DECODERS[name]())
    m = hf.EncoderDecoderModel(config=config).eval()
    m.generation_config.update(decoder_start_token_id=0, pad_token_id=0, eos_token_id=None)
    return m


def generate(m, cache, **options):
    return m.generate(
        input_ids=ids(2, 9), past_key_values=cache, max_new_tokens=70, do_sample=False, return_dict_in_generate=True,
        output_logits=True, **{"attention_mask": torch.ones(2, 9, dtype=torch.long), **options},
    )  # fmt: skip


def both(m, *args):
    return hf.EncoderDecoderCache(KVCache(m.config.decoder, *args), hf.DynamicCache())


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", DECODERS)
def test_beside_a_cache_of_the_encoder(name, fused):
    m = build(name)
    want = [generate(m, None, **options) for options in ({}, {"num_beams": 3})]
    if fused:
        assert enable(m.decoder, verbose=False).fused
    for i, options in enumerate(({}, {"num_beams": 3})):
        cache = both(m, "raw")
        assert torch.equal(generate(m, cache, **options).sequences, want[i].sequences)
        assert cache.self_attention_cache.get_seq_length() == 70
    got = generate(m, both(m, "int8"))
    torch.testing.assert_close(got.logits[0], want[0].logits[0])
    same = (got.sequences == want[0].sequences).all(0).long().cumprod(0).sum()  # followed by other tokens
    assert same > 10
    for x, y in zip(got.logits[: same - 1], want[0].logits, strict=False):
        assert (x - y).norm() < 0.05 * y.norm()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("pads", [0, 3])
@pytest.mark.parametrize("name", ["bert", "mbart"])
def test_alone_it_says_what_to_pass(name, pads, fused):
    """Otherwise models would append the encoder's K and V to the same layer, with a mask of the encoder's length."""
    m = build(name)
    if fused:
        enable(m.decoder, verbose=False)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :pads] = 0
    with pytest.raises((AttributeError, ValueError), match=r"EncoderDecoderCache\(cache, DynamicCache\(\)\)"):
        generate(m, KVCache(m.config.decoder, "raw"), attention_mask=mask)
    assert not hasattr(KVCache(m.config.decoder), "is_updated")


def test_the_whole_config_is_refused_with_what_to_pass():
    m = build("bert")
    with pytest.raises(ValueError, match=r"EncoderDecoderCache\(KVCache\(model.config.decoder\), DynamicCache\(\)\)"):
        KVCache(m.config)
    with pytest.raises(ValueError, match="not supported .decoders have config.is_decoder or config.use_cache.$"):
        enable(hf.BertModel(ENCODER))


@pytest.mark.parametrize("config", [hf.CLIPConfig, hf.SiglipConfig, hf.DistilBertConfig, hf.Wav2Vec2Config])
def test_encoders_are_refused(config):
    """Their configs do not say that they are none."""
    with pytest.raises(ValueError, match="expected a decoder-only language model, got .*encoder models are not supp"):
        KVCache(config())


def test_a_decoder_alone_of_which_transformers_counts_the_encoder():
    """The error says how to make it count its own layers."""
    config = DECODERS["mbart"]()
    config.encoder_layers, config.decoder_layers, config.is_decoder = 2, 3, True
    torch.manual_seed(0)
    m = hf.MBartForCausalLM(config).eval()
    options = {"max_new_tokens": 8, "do_sample": False}
    want = m.generate(ids(2, 20), **options, use_cache=False)
    assert enable(m, verbose=False).fused
    with pytest.raises(ValueError, match=r"expected 0 to 1, got 2; .*set its encoder_layers to decoder_layers first"):
        m.generate(ids(2, 20), past_key_values=KVCache(m.config, "raw"), **options)
    m.config.encoder_layers = m.config.decoder_layers
    assert torch.equal(m.generate(ids(2, 20), past_key_values=KVCache(m.config, "raw"), **options), want)
