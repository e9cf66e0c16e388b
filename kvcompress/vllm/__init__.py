"""kvcompress as vLLM's attention backend: `LLM(model, additional_config={"kvcompress": "int8"})`; see docs/serving.md.

vLLM finds `register` through the entry point group `vllm.general_plugins` and calls it in each of its processes.
Without "kvcompress" in the configuration vLLM is not changed.
"""

from __future__ import annotations

VERSIONS = ("0.32", "0.33")
"""Releases of vLLM that are tested."""


def supported(version: str) -> bool:
    return ".".join(version.split(".")[:2]) in VERSIONS


def register() -> None:
    """Registers the backend with vLLM."""
    from vllm import __version__
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not supported(__version__):
        import logging

        logging.getLogger("vllm.kvcompress").warning(
            "kvcompress: expected vLLM %s, got %s; its attention backend is not registered",
            " or ".join(VERSIONS),
            __version__,
        )
        return
    from . import selected  # noqa: F401 watches what vLLM selects

    # CpuPlatform.get_attn_backend_cls always returns CPU_ATTN; `selected` decides which class that is.
    register_backend(AttentionBackendEnum.CPU_ATTN, "kvcompress.vllm.selected.CPU_ATTN")
    register_backend(AttentionBackendEnum.CUSTOM, "kvcompress.vllm.selected.CUSTOM")
