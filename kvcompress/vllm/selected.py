"""The class of vLLM's CPU_ATTN: its own, or that of kvcompress if the current engine's configuration selects it."""

from __future__ import annotations

import weakref
from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention import selector

from .settings import KEY, NO_LATENTS, Settings, asked_for


class _ByConfiguration:
    """Wrapper of vLLM's backend selection. vLLM caches selections without the configuration, which engines of one
    process must not share; and it would silently use its own backend for layers that do not select this one."""

    def __init__(self, select: Any) -> None:
        self.select, self.last = select, weakref.ref(self)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        config = get_current_vllm_config_or_none()
        if config is not self.last():
            self.select.cache_clear()
            self.last = weakref.ref(config if config is not None else self)
        chosen = self.select(*args, **keywords)
        if asked_for(config):
            from .backend import Backend

            if not issubclass(chosen, Backend):
                hint = NO_LATENTS if chosen.is_mla() else "add --attention-backend CUSTOM"
                raise ValueError(
                    f"kvcompress: expected its attention backend for all layers, with '{KEY}' in additional_config, "
                    f"got {chosen.get_name()}; {hint}"
                )
        return chosen

    def cache_clear(self) -> None:
        self.select.cache_clear()


if not isinstance(selector._cached_get_attn_backend, _ByConfiguration):
    selector._cached_get_attn_backend = _ByConfiguration(selector._cached_get_attn_backend)


def __getattr__(name: str) -> Any:
    if name not in ("CPU_ATTN", "CUSTOM"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    config = get_current_vllm_config_or_none()
    if asked_for(config):
        from .backend import Backend

        return Backend.of(Settings.of(config), name)
    if name == "CUSTOM":
        raise ValueError(f"kvcompress: expected additional_config={{'{KEY}': 'int8'}} with --attention-backend CUSTOM")
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return CPUAttentionBackend
