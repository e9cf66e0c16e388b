"""What the cache options of serving engines correspond to here."""

from __future__ import annotations

from typing import NamedTuple

VLLM = "https://docs.vllm.ai/en/latest/features/quantization/quantized_kvcache/"
SGLANG = "https://docs.sglang.io/advanced_features/quantized_kv_cache.html"
TRTLLM = "https://nvidia.github.io/TensorRT-LLM/features/quantization.html"


class Option(NamedTuple):
    """An engine's option: `ours`, the page format whose codes are closest; what differs; source."""

    engine: str
    option: str
    ours: str
    differs: str
    source: str


_FLAG = "--kv-cache-dtype "
OPTIONS: tuple[Option, ...] = (
    Option("vLLM", _FLAG + "auto", "raw", "the model's dtype", VLLM),
    Option("vLLM", _FLAG + "fp8 (= fp8_e4m3)", "fp8_e4m3",
           "one scale for all of K and of V, 1.0 unless calibrated; ours: a scale per token and head", VLLM),
    Option("vLLM", _FLAG + "fp8_e5m2", "fp8_e5m2", "no scale; ours: a scale per token and head", VLLM),
    Option("vLLM", _FLAG + "fp8_per_token_head", "fp8_e4m3", "the same granularity", VLLM),
    Option("vLLM", _FLAG + "int8_per_token_head", "int8", "the same granularity", VLLM),
    Option("vLLM", _FLAG + "int4_per_token_head", "int4_token",
           "not rotated, K not centred; `int4` here is both, for 0.25 bits more of K", VLLM),
    Option("vLLM", _FLAG + "nvfp4", "nvfp4", "ours without the second-level scale", VLLM),
    Option("vLLM", _FLAG + "turboquant_k8v4", "int8/int4", "other codes, about the same bits", VLLM),
    Option("vLLM", _FLAG + "turboquant_4bit_nc", "int4", "other codes; rotated alike, K not centred", VLLM),
    Option("SGLang", _FLAG + "auto", "raw", "the model's dtype", SGLANG),
    Option("SGLang", _FLAG + "fp8_e4m3", "fp8_e4m3", "one scale a tensor, from a file or 1.0", SGLANG),
    Option("SGLang", _FLAG + "fp8_e5m2", "fp8_e5m2", "one scale a tensor, from a file or 1.0", SGLANG),
    Option("SGLang", _FLAG + "fp4_e2m1", "mxfp4", "blocks of 16; ours of 32 dims (OCP MX), `nvfp4` of 16", SGLANG),
    Option("TensorRT-LLM", "KvCacheConfig(dtype='auto')", "raw", "what the checkpoint says", TRTLLM),
    Option("TensorRT-LLM", "KvCacheConfig(dtype='fp8')", "fp8_e4m3", "calibrated scale a tensor", TRTLLM),
    Option("TensorRT-LLM", "KvCacheConfig(dtype='nvfp4')", "nvfp4", "calibrated offline", TRTLLM),
    Option("TensorRT-LLM", "int8 KV cache (trtllm-build)", "int8", "calibrated scale a tensor", TRTLLM),
    Option("transformers", "QuantizedCache('quanto', nbits=4)", "int4_g32",
           "groups of 64 dims; decodes and quantizes anew all of the history",
           "https://huggingface.co/docs/transformers/kv_cache"),
    Option("llama.cpp", "-ctk q8_0 -ctv q8_0", "int8", "blocks of 32 dims: 8.5 bits", "https://github.com/ggml-org/llama.cpp"),
    Option("llama.cpp", "-ctk q4_0 -ctv q4_0", "int4_token", "blocks of 32 dims: 4.5 bits",
           "https://github.com/ggml-org/llama.cpp"),
)  # fmt: skip
"""Read in the engines' documentation of 2026; an engine may have added or renamed options since."""


def same_as(ours: str) -> list[Option]:
    """Options of engines that come closest to a format of ours, or to K and V formats ("int8/int4")."""
    return [option for option in OPTIONS if option.ours == ours]


def table() -> str:
    """`OPTIONS` as a Markdown table."""
    lines = ["| engine | option | here | what differs |", "|---|---|---|---|"]
    lines += [f"| [{o.engine}]({o.source}) | `{o.option}` | `{o.ours}` | {o.differs} |" for o in OPTIONS]
    return "\n".join(lines)
