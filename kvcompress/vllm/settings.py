"""What `additional_config={"kvcompress": ..}` says, checked against the engine's other settings."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch

from .. import formats

KEY = "kvcompress"
PAGE = 64
"""Tokens of a page, and of the blocks that the kernels see."""

NO_LATENTS = (
    "latent attention (MLA) is not served inside of vLLM: leave kvcompress out, or use KVCache with transformers"
)

MOST_DRAFTS = PAGE - 2
"""Of a step, for formats with residual pages."""

WITHOUT_LAYERS = ("ngram", "ngram_gpu", "suffix")
"""Methods of speculation that have no attention of their own."""


def asked_for(config: Any) -> bool:
    """Whether a VllmConfig (or None) names kvcompress. ValueError where it nearly does: vLLM takes any key."""
    extra = config.additional_config if config is not None else None
    if not isinstance(extra, dict) or KEY in extra:
        return isinstance(extra, dict)
    for key in extra:
        if get_close_matches(KEY, [str(key).lower()], cutoff=0.9):
            raise ValueError(f"kvcompress: expected the key '{KEY}' in additional_config, got {key!r}: is that a typo?")
    return False


def _format(config: Any) -> str:
    """What the configuration names."""
    value = config.additional_config[KEY] if asked_for(config) else None
    if value is None:
        raise ValueError(
            f"kvcompress: expected additional_config={{'{KEY}': 'int8'}} (or another format) with its attention "
            "backend, got none"
        )
    if isinstance(value, dict):
        unknown = sorted(set(value) - {"format"})
        if "per_layer" in unknown:
            raise ValueError(
                "kvcompress: expected one format for all layers, got per_layer; vLLM asks for the size of "
                f"a layer's pages without saying of which layer. Use {{'{KEY}': 'int8/int4'}} or KVCache"
            )
        if unknown or "format" not in value:
            raise ValueError(f"kvcompress: expected the key 'format' alone, got {sorted(value)}")
        value = value["format"]
    if not isinstance(value, str):
        raise ValueError(f"kvcompress: expected a format such as 'int8' or 'int8/int4', got {value!r}")
    return value


@dataclass(frozen=True)
class Settings:
    """format: of pages, as `formats.page_geometry` takes it; drafts: tokens of a step that may be rejected."""

    format: str
    dtype: torch.dtype
    drafts: int

    @classmethod
    def of(cls, config: Any) -> Settings:
        """From a VllmConfig. ValueError for what this backend does not take."""
        value = _format(config)
        dtype = config.model_config.dtype
        for name in value.split("/"):
            formats.resolve(name, dtype)
            if name in formats.CALIBRATED:
                raise ValueError(
                    f"kvcompress: expected a format that needs no calibration, got {name}; KVCache takes it"
                )
        if value.count("/") > 1:
            raise ValueError(f"kvcompress: expected a format, or one for K and one for V, got {value!r}")
        cache = config.cache_config.cache_dtype
        if cache not in ("auto", None):
            raise ValueError(f"kvcompress: expected --kv-cache-dtype auto with it, got {cache}; the format is {value}")
        if config.kv_transfer_config is not None:
            raise ValueError(
                "kvcompress: expected no --kv-transfer-config and no KV offloading with it, got one; leave it out: a "
                "sequence's newest tokens, kept raw, would stay behind"
            )
        if config.cache_config.block_size % PAGE:
            raise ValueError(
                f"kvcompress: expected a --block-size of a multiple of {PAGE}, got {config.cache_config.block_size}"
            )
        speculation = config.speculative_config
        settings = cls(value, dtype, speculation.num_speculative_tokens if speculation else 0)
        if settings.geometry(1, 64).residual_bytes:
            settings._check_residual(config, speculation.method if speculation else WITHOUT_LAYERS[0])
        return settings

    def _check_residual(self, config: Any, method: str) -> None:
        """What formats that keep the newest tokens raw do not go with. method: of speculation."""
        if method not in WITHOUT_LAYERS:
            raise ValueError(
                f"kvcompress: expected a format of 8 bits or more with drafts by {method}, got {self.format}; "
                "vLLM wants all layers that draft in one group, and the newest tokens of such formats lie in one of "
                "their own. Use int8, or method ngram"
            )
        if self.drafts > MOST_DRAFTS:
            raise ValueError(
                f"kvcompress: expected at most {MOST_DRAFTS} drafts a step with {self.format}, got {self.drafts}: raw "
                "tokens of a page that one step fills are not kept"
            )
        if config.scheduler_config.disable_hybrid_kv_cache_manager:
            raise ValueError(
                f"kvcompress: expected vLLM's hybrid KV cache manager with {self.format}, got "
                "--disable-hybrid-kv-cache-manager: a sequence's newest tokens lie in a group of blocks of their own. "
                "Leave it out, or use a format of 8 bits"
            )

    def geometry(self, heads: int, head_dim: int, value_dim: int | None = None) -> formats.Geometry:
        """The page of a layer."""
        return formats.page_geometry(
            self.format, heads, head_dim, dtype=self.dtype, value_dim=value_dim, page_size=PAGE
        )

    @property
    def residual_pages(self) -> int:
        """Of a sequence, for formats that have them. Drafts are sealed as all tokens are; the page that one which is
        taken back lies in is raw again, and its raw tokens are still there: what came behind them is in the other."""
        return 2 if self.drafts else 1

    def check_block(self, geometry: formats.Geometry, block_size: int) -> None:
        """ValueError if a block has no room for a sequence's residual pages."""
        need = self.residual_pages * geometry.residual_bytes
        if need > block_size // PAGE * geometry.page_bytes:
            raise ValueError(
                f"kvcompress: expected --block-size of at least {-(-need // geometry.page_bytes) * PAGE} for "
                f"{self.format} in {str(self.dtype).removeprefix('torch.')}: "
                "a block has to hold the raw tokens of a sequence; "
                f"got {block_size}"
            )
