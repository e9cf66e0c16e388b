"""Rows of attention.py for latent attention (MLA)."""

from __future__ import annotations

import torch
from common import interleave, multiply_adds_function, quartile, spread

from kvcompress import PagedKV


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def latent(args, S: int, B: int, G: int, rank: int = 512, rope: int = 64, nope: int = 128, v: int = 128) -> list[dict]:
    """A decode step of latent attention, G query heads: the op on pages of latents, by itself and with W_uk and W_uv;
    compared with transformers' way (all latents expanded to K and V of all heads, then SDPA), and with the limit of
    the vector units. GMAC/s: of scores and sums, G * S * (2 * rank + rope)."""
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    from kvcompress.hf import latent as mla

    config = DeepseekV3Config(hidden_size=64, num_attention_heads=G, num_key_value_heads=G, q_lora_rank=16,
                              kv_lora_rank=rank, qk_rope_head_dim=rope, qk_nope_head_dim=nope,
                              v_head_dim=v)  # fmt: skip
    module = DeepseekV3Attention(config, 0).bfloat16()
    scale = module.scaling
    q, wide_q = _random(B, G, 1, nope + rope, seed=2), _random(B, G, 1, rank + rope, seed=3)
    latents, rotary = _random(B, 1, S, rank), _random(B, 1, S, rope, seed=1)
    calls = {}
    for key, value in (("raw", "raw"), ("int8", "int8"), ("fp8_e4m3", "int8"), ("int4", "int8"), ("int4", "raw")):
        store = PagedKV(
            1, rank, key=key, value=value, value_dim=rope, batch=B, dtype=torch.bfloat16, latent=True, sinks=0
        )
        store.append(latents, rotary)
        store.append(latents[:, :, :1], rotary[:, :, :1])  # seals the last page

        def bare(i: int, store=store):
            return store.attend(wide_q, scale=scale)[0]

        def absorbed(i: int, store=store):
            out = store.attend(mla.absorbed(module, q), scale=scale)[0]
            return mla.values_of(module, out.transpose(1, 2))

        calls[f"{key}/{value}"], calls[f"{key}/{value} absorbed"] = bare, absorbed

    def expanded(i: int):
        keys, values = module.expand_kv(latents, rotary)
        return torch.nn.functional.scaled_dot_product_attention(q, keys, values, scale=scale)

    threads, peaks = torch.get_num_threads(), multiply_adds_function()
    with torch.inference_mode():
        times = interleave(calls, args.rounds)
        own = spread(interleave({"expanded": expanded}, max(3, args.rounds // 8))["expanded"])
    peak = {halves: max(peaks(halves, threads) for _ in range(5)) for halves in (False, True)}
    rows = [{"name": "transformers", **own}]
    for name, seconds in times.items():
        row = {"name": name, **spread(seconds), "x transformers": own["ms"] / (1e3 * quartile(seconds, 2))}
        if not name.endswith("absorbed"):
            done = B * G * S * (2 * rank + rope) / quartile(seconds)
            row |= {
                "GMAC/s": done / 1e9,
                **{f"of {of}": done / peak[of == "BF16"] for of in ("VNNI", "BF16") if peak[of == "BF16"]},
            }
        rows.append(row)
    return [*rows, {"name": "VNNI", "GMAC/s": peak[False] / 1e9}, {"name": "BF16", "GMAC/s": peak[True] / 1e9}]
