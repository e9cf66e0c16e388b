"""Models with images: tiny random ones, whose first call has images and whose later calls are text."""

import pytest
import torch
import transformers as hf
from families import some
from generation import cache_of, check_same
from models import WINDOW, ids

from kvcompress import H2O, SnapKV, StreamingLLM, enable
from kvcompress.hf.backend import attending

IMAGE = 98
SIDE = {"image_size": 8, "patch_size": 4, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2}  # fmt: skip


def paligemma(text):
    config = hf.PaliGemmaConfig(
        text_config=text, vision_config=hf.SiglipVisionConfig(**SIDE), image_token_index=IMAGE, projection_dim=64
    )
    tokens = torch.cat([torch.full((2, 4), IMAGE), ids(2, 37)], 1)
    prefix = torch.zeros_like(tokens)
    prefix[:, -10:] = 1  # the prompt sees all of itself and the image; what follows is causal
    return config, {"input_ids": tokens, "token_type_ids": prefix, "pixel_values": torch.randn(2, 3, 8, 8)}


def mllama():
    text = some(num_hidden_layers=4, head_dim=None, vocab_size=99, bos_token_id=1)
    vision = {
        **SIDE, "num_global_layers": 1, "attention_heads": 2, "max_num_tiles": 2, "intermediate_layers_indices": [0],
        "vision_output_dim": 64, "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
    }  # fmt: skip
    config = hf.MllamaConfig(
        text_config={
            **text, "cross_attention_layers": [1, 3],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        vision_config=vision, image_token_index=IMAGE,
    )  # fmt: skip
    tokens, sees = ids(2, 40), torch.zeros(2, 40, 1, 2, dtype=torch.long)
    sees[:, 10:, :, :1] = 1
    return config, {
        "input_ids": tokens, "pixel_values": torch.randn(2, 1, 2, 3, 8, 8), "cross_attention_mask": sees,
        "aspect_ratio_mask": torch.tensor([[[1, 0]]] * 2), "aspect_ratio_ids": torch.tensor([[1]] * 2),
    }  # fmt: skip


def gemma3():
    config = hf.Gemma3Config(
        text_config=hf.Gemma3TextConfig(
            **some(vocab_size=99), sliding_window=WINDOW, query_pre_attn_scalar=32,
            layer_types=["sliding_attention", "full_attention"],
        ),
        vision_config=hf.SiglipVisionConfig(**SIDE), mm_tokens_per_image=4, image_token_index=IMAGE,
        boi_token_index=96, eoi_token_index=97,
    )  # fmt: skip
    tokens = torch.cat([ids(2, 3), torch.full((2, 4), IMAGE), ids(2, 34)], 1)
    images = (tokens == IMAGE).long()
    return config, {"input_ids": tokens, "token_type_ids": images, "pixel_values": torch.randn(2, 3, 8, 8)}


MODELS = {
    "gemma3": gemma3,
    "mllama": mllama,
    "paligemma": lambda: paligemma(hf.GemmaConfig(**some(vocab_size=99))),
    "paligemma2": lambda: paligemma(
        hf.Gemma2Config(
            **some(vocab_size=99), sliding_window=WINDOW, query_pre_attn_scalar=32, attn_logit_softcapping=5.0
        )
    ),
}


def build(name):
    torch.manual_seed(7)
    config, inputs = MODELS[name]()
    m = hf.AutoModelForImageTextToText.from_config(config, attn_implementation="eager", dtype=torch.float32)
    return m.eval(), inputs


def generate(m, inputs, cache, **options):
    with torch.no_grad():
        return m.generate(
            **{"attention_mask": torch.ones_like(inputs["input_ids"]), **inputs}, past_key_values=cache,
            max_new_tokens=12, do_sample=False, suppress_tokens=[IMAGE], return_dict_in_generate=True,
            output_logits=True, **options,
        )  # fmt: skip


def turns(m, inputs, cache):
    """A prompt with an image, then text only, in the same cache."""
    first = generate(m, inputs, cache)
    more = torch.cat([first.sequences, ids(2, 19, seed=1)], 1)
    return [first, generate(m, {"input_ids": more}, cache)]


def own(m):
    return hf.DynamicCache(config=m.config)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_turns_as_dynamic_cache(name, fused):
    """Text after the image is causal, although PaliGemma's modules say otherwise; Mllama's attention to an earlier
    image is not, although its modules do not say so."""
    m, inputs = build(name)
    want = turns(m, inputs, own(m))
    if fused:
        assert enable(m, verbose=False).fused
    check_same(turns(m, inputs, cache_of(m, "raw")), want)
    check_same(turns(m, inputs, own(m)), want)


@pytest.mark.parametrize("name", MODELS)
def test_text_alone(name):
    m, _ = build(name)
    inputs = {"input_ids": ids(2, 45)}
    want = generate(m, inputs, own(m))
    assert enable(m, verbose=False).fused
    for cache in (cache_of(m, "raw"), own(m)):
        check_same([generate(m, inputs, cache)], [want])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ["gemma3", "paligemma", "paligemma2"])
def test_of_fixed_length(name, fused):
    """For compilable caches `generate` creates masks by layer type, which PaliGemma 2 does not support."""
    m, inputs = build(name)
    want = turns(m, inputs, own(m))
    if fused:
        assert enable(m, verbose=False).fused
    cache = cache_of(m, "raw", max_length=96)
    assert cache.is_compileable == (name != "paligemma2")
    check_same(turns(m, inputs, cache), want)


def test_a_cache_that_was_reset_begins_anew():
    """PaliGemma asks the cache whether the prefix, whose tokens all see each other, was already processed."""
    m, inputs = build("paligemma")
    want = generate(m, inputs, own(m))
    assert enable(m, verbose=False).fused
    cache = cache_of(m, "raw")
    assert not cache.is_initialized
    generate(m, inputs, cache)
    assert cache.is_initialized
    cache.reset()
    assert not cache.is_initialized
    check_same([generate(m, inputs, cache)], [want])


def test_policies_leave_images_of_cross_attention_alone():
    m, inputs = build("mllama")
    assert enable(m, verbose=False).fused
    cache = cache_of(m, "raw", policy=StreamingLLM(1, 3))
    generate(m, inputs, cache)
    lengths = [(layer.store.seen, len(cache.kept(i).slots[0][0])) for i, layer in enumerate(cache.layers)]
    assert lengths[1] == lengths[3] == (10, 10) and lengths[0] == lengths[2] and lengths[0][1] < 51 == lengths[0][0]


@pytest.mark.parametrize("policy", [H2O(20), SnapKV(20, window=4)])
def test_policies_that_look_at_attention_do_not_see_a_4d_mask(policy):
    """Image tokens see each other, which transformers expresses by a mask; attention is then computed densely."""
    m, inputs = build("gemma3")
    assert enable(m, verbose=False).fused
    cache = cache_of(m, "raw", policy=policy)
    with pytest.raises(ValueError, match=r"expected causal attention for .*\(budget=20.*got a 4D mask \(images"):
        generate(m, inputs, cache)
    assert cache.get_seq_length() == 0
    generate(m, {"input_ids": ids(2, 45)}, cache)
    generate(m, inputs, cache_of(m, "raw", policy=StreamingLLM(4, 20)))


def test_nested_text_config():
    """Qwen-Omni: the text decoder of its thinker; towers and talker keep their attention."""
    text = some(head_dim=None, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    with torch.device("meta"):
        m = hf.Qwen2_5OmniForConditionalGeneration(
            hf.Qwen2_5OmniConfig(thinker_config={"text_config": text}, enable_audio_output=False)
        )
    thinker = m.config.thinker_config
    configs = thinker.text_config, thinker.vision_config, thinker.audio_config, m.config.talker_config
    before = [config._attn_implementation for config in configs]
    assert enable(m, verbose=False).fused
    assert [config._attn_implementation for config in configs] == ["kvcompress", *before[1:]]
    with attending(m, "eager"):
        assert thinker.text_config._attn_implementation == "eager"
    assert thinker.text_config._attn_implementation == "kvcompress"
