"""Writes docs/plan.md and docs/faq.md, and the pictures that `kvcompress plot` makes of shipped figures; part of
`make docs`."""

# ruff: noqa: E501

from __future__ import annotations

from pathlib import Path

import errata
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvcompress
from kvcompress.tools import plot
from kvcompress.tools.plan import models, plan

DOCS = Path(__file__).parent
ASSETS = DOCS.parent / "assets"

PLAN = """# Planning
Made by `make docs`. `kvcompress plan` computes the size of a model's cache, what fits on a device, and which format to use and why.
It takes a second and does not need torch:

```
kvcompress plan --config llama-3-70b --gpu 80GB --context 32k
```
```
{example}
```
`--config` accepts a config.json, its folder, or one of these names: {names} (`kvcompress/tools/plan/models.json`, with sources).
`--gpu` accepts `80GB` (80 x 10^9 bytes), `80GiB` (80 x 2^30 bytes) or a name such as `h100`. `--context 32k` is 32 x 1,024 tokens.
The exit status is 3 if nothing fits. In Python:

```python
from kvcompress.tools.plan import exact, formula, plan, read

found = plan("llama-3-70b", gpu="80GB", context="32k", workload="retrieval")
print(found.choices[0].strategy, found.choices[0].why)
model = read("llama-3-70b")  # or model.config, or a path
print(formula(model, 32_768), exact(model, "int8/int4", 32_768).parts)
```

## Sizes
The usual formula is `2 * B * L * H * D * S * bytes`: K and V, sequences, layers, KV heads (not query heads), dims, tokens, bytes per
element. It ignores sliding windows (half of GPT-OSS's layers keep 128 tokens) and latent attention (DeepSeek: 512 + 64 numbers per
token and layer); `plan` sums over layers instead. It also ignores scales, raw sinks and open pages, block tables and rounding to pages.
`exact` counts these as the library allocates them; the tests compare it with real caches, part by part, to the byte.

![Bytes by part](savings.png)

## Choosing
The recommendation follows rules, based on this project's measurements (`kvcompress/tools/plan/measured.json`, made from
`benchmarks/results`):

1. The quality floor is `lossless` (KL up to 1e-4 nats per token), `high` (2e-3), `medium` (5e-2), or a number. The smallest of `int8`,
   `int8/int4`, `int4`, `int4/int2`, `int2` whose KL is below it, on the worse of the two shipped models, is recommended.
2. A smaller format must save at least an eighth of the bytes at the given context length: below a few hundred tokens, raw pages dominate.
3. The workload matters: `streaming` gets sinks and a window, with positions inside the cache beyond the trained length; `retrieval` and
   `multi-turn` never evict; `reasoning` keeps all tokens as long as quantization alone suffices.
4. `--drafts` excludes formats that reduce the acceptance rate of speculative decoding by more than the noise (none did, see
   [speculative decoding](speculation.md)).

The shipped models are very small. **Measure your own model:**
```
kvcompress plan --measure MODEL TEXT --context 32k --quality high --out results
```
This measures each layer separately at 4 and 2 bits, lowers formats from 8 bits on in the order of KL per byte saved, and measures the
whole strategy at points along the way, then with H2O at several budgets. It prints the Pareto front and writes
`results/strategy.json`:
```python
import json
from kvcompress import KVCache
from transformers import AutoConfig

config = AutoConfig.from_pretrained("assets/books-tiny")
strategy = {{"key": "int2", "value": "int2", "per_layer": {{"0": "int4", "3": "int4", "4": "int4"}}}}  # or json.load
cache = KVCache.from_dict(config, strategy)
```
This strategy was found for `books-tiny`: a fifth fewer bytes than `int4`, at a KL of 8.6e-4 instead of 5.5e-4
(`kvcompress plan --measure assets/books-tiny assets/text/book.txt`). With `--calibration FILE` the search uses the calibrated formats
`int4_lloyd`, `int3` and `cal2`, lowering V before K. `--steps int8 int8/int4 int4 int4/int2` chooses other formats. All heads of a
layer have the same format, because its pages have one size.

## Other engines
The closest format to each cache option of other engines, as documented in 2026:
[vLLM](https://docs.vllm.ai/en/latest/features/quantization/quantized_kvcache/),
[SGLang](https://docs.sglang.io/advanced_features/quantized_kv_cache.html),
[TensorRT-LLM](https://nvidia.github.io/TensorRT-LLM/features/quantization.html),
[transformers](https://huggingface.co/docs/transformers/kv_cache),
[llama.cpp](https://github.com/ggml-org/llama.cpp).

| engine | option | here | what differs |
|---|---|---|---|
| vLLM | `--kv-cache-dtype auto` | `raw` | the model's dtype |
| vLLM | `--kv-cache-dtype fp8 (= fp8_e4m3)` | `fp8_e4m3` | one scale for all of K and of V, 1.0 unless calibrated; here a scale per token and head |
| vLLM | `--kv-cache-dtype fp8_e5m2` | `fp8_e5m2` | no scale; here a scale per token and head |
| vLLM | `--kv-cache-dtype fp8_per_token_head` | `fp8_e4m3` | the same granularity |
| vLLM | `--kv-cache-dtype int8_per_token_head` | `int8` | the same granularity |
| vLLM | `--kv-cache-dtype int4_per_token_head` | `int4_token` | not rotated, K not centred; `int4` does both, for 0.25 bits more per element of K |
| vLLM | `--kv-cache-dtype nvfp4` | `nvfp4` | here without the second-level scale |
| vLLM | `--kv-cache-dtype turboquant_k8v4` | `int8/int4` | other codes, about the same bits |
| vLLM | `--kv-cache-dtype turboquant_4bit_nc` | `int4` | other codes; also rotated, K not centred |
| SGLang | `--kv-cache-dtype auto` | `raw` | the model's dtype |
| SGLang | `--kv-cache-dtype fp8_e4m3` | `fp8_e4m3` | one scale per tensor, from a file or 1.0 |
| SGLang | `--kv-cache-dtype fp8_e5m2` | `fp8_e5m2` | one scale per tensor, from a file or 1.0 |
| SGLang | `--kv-cache-dtype fp4_e2m1` | `mxfp4` | blocks of 16 dims; `mxfp4` has blocks of 32 (OCP MX), `nvfp4` of 16 |
| TensorRT-LLM | `KvCacheConfig(dtype='auto')` | `raw` | the dtype of the checkpoint |
| TensorRT-LLM | `KvCacheConfig(dtype='fp8')` | `fp8_e4m3` | a calibrated scale per tensor |
| TensorRT-LLM | `KvCacheConfig(dtype='nvfp4')` | `nvfp4` | calibrated offline |
| TensorRT-LLM | `int8 KV cache (trtllm-build)` | `int8` | a calibrated scale per tensor |
| transformers | `QuantizedCache('quanto', nbits=4)` | `int4_g32` | groups of 64 dims; dequantizes all tokens at every step, and requantizes all of them when its residual is full |
| llama.cpp | `-ctk q8_0 -ctv q8_0` | `int8` | blocks of 32 dims: 8.5 bits |
| llama.cpp | `-ctk q4_0 -ctv q4_0` | `int4_token` | blocks of 32 dims: 4.5 bits |
"""

FAQ = """# FAQ
Made by `make docs`.

## How much smaller is the cache?
3.7 times with `int4` and 2 times with `int8`, compared with bf16, from a few thousand tokens on. Short contexts save less, because the
newest page and the first tokens are not quantized ([picture](savings.png)). Ratios of 30 and more in tutorials count evicted tokens.

## Why is my cache not smaller at all?
Contexts shorter than a page (64 tokens) are not quantized. With small eviction budgets, use `page_size=16`. `print(cache)` and
`cache.stats()["parts"]` show where the bytes are. For a float32 model, the ratio is relative to float32.

## Why is generation not faster?
Attention reads the cache; the rest of a step reads the weights. With one sequence of up to a few thousand tokens, the weights dominate.
Without `kvcompress.enable(model)`, pages are dequantized at every step; check with `kvcompress doctor MODEL`.

## Is perplexity enough to judge quality?
No: perplexity averages over many tokens that need no context. Use KL and retrieval instead ([evaluation](evaluation.md)).

## K or V: which takes fewer bits?
Give K at least as many bits as V, especially where keys have a bias (Qwen2) or outlier channels. `int8/int4` means K/V.

## FP8 or INT8?
`int8`. It has the same size, and its KL is a thirtieth of FP8's with plain keys and a fourteenth with biased keys
([formats](formats.md)). FP8 is for hardware that multiplies in FP8.

## Which tokens can be evicted?
None, if questions are asked after the context was compressed: with half of the tokens, policies that use attention find less than a
quarter of the facts hidden in the shipped models' contexts, and a window finds only those inside it ([budgets](benchmarks.md)). For
next-token prediction on plain text, a window with sinks is as good as any policy.

## Does a quantized cache change results between runs?
No: the same calls store the same bytes, on every kernel level and with any number of threads. Results depend slightly on how a text is
split into calls, because the tokens of the current call are attended to exactly.

## Wrong figures in tutorials
The correct values are computed in `docs/errata.py`. GB always means 10^9 bytes here, GiB 2^30.

{errata}
"""


def pictures() -> None:
    """The pictures of shipped figures, and the pages of a live cache."""
    for kind in plot.KINDS:
        plot.draw(kind, DOCS / f"{kind}.png")
    model = AutoModelForCausalLM.from_pretrained(ASSETS / "books-tiny", dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "books-tiny")
    kvcompress.enable(model, verbose=False)
    ids = torch.tensor([tokenizer((ASSETS / "text" / "book.txt").read_text()[20_000:28_000])["input_ids"][:1400]])
    cache = kvcompress.KVCache(
        model.config, "int8", value="int4", per_layer={0: "int8", -1: "int2"}, residual_length=128
    )
    with torch.inference_mode():
        model(ids[:, :1300], past_key_values=cache)
        model(ids[:, 1300:1340], past_key_values=cache)
    cache.plot(DOCS / "pages.png")


def write() -> None:
    """All of it."""
    example = str(plan("llama-3-70b", gpu="80GB", context="32k", isa="avx512bf16"))
    names = ", ".join(f"`{name}`" for name in models.names())
    (DOCS / "plan.md").write_text(PLAN.format(example=example, names=names))
    (DOCS / "faq.md").write_text(FAQ.format(errata=errata.table()))
    pictures()
