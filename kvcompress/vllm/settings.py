"""Settings from `additional_config={"kvcompress": ..}`, checked against the engine's other settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

import torch

from .. import formats

KEY = "kvcompress"
PAGE = 64
"""Tokens per page, and per block of the kernels."""

NO_LATENTS = "latent attention (MLA) is not supported in vLLM: leave kvcompress out, or use KVCache with transformers"

DRAFTS = "int8"
"""Format of a draft model's layers if the target model has residual pages."""

CONNECTORS = ("ExampleConnector", "OffloadingConnector")
"""Supported connectors for KV transfer, for formats without residual pages."""

MOST_DRAFTS = PAGE - 2
"""Maximum number of draft tokens per step, for formats with residual pages."""

WITHOUT_LAYERS = ("ngram", "ngram_gpu", "suffix")
"""Methods of speculative decoding without attention of their own."""


def asked_for(config: Any) -> bool:
    """Whether a VllmConfig (or None) selects kvcompress. Raises ValueError for misspelled keys, as vLLM accepts any."""
    extra = config.additional_config if config is not None else None
    if not isinstance(extra, dict) or KEY in extra:
        return isinstance(extra, dict)
    for key in extra:
        if get_close_matches(KEY, [str(key).lower()], cutoff=0.9):
            raise ValueError(f"kvcompress: expected the key '{KEY}' in additional_config, got {key!r}: is that a typo?")
    return False


def _named(config: Any) -> tuple[str, dict[Any, Any]]:
    """(format, formats by layer) of the configuration."""
    value = config.additional_config[KEY] if asked_for(config) else None
    if value is None:
        raise ValueError(
            f"kvcompress: expected additional_config={{'{KEY}': 'int8'}} (or another format) with its attention "
            "backend, got none"
        )
    if not isinstance(value, dict):
        value = {"format": value}
    if set(value) - {"format", "per_layer"} or "format" not in value:
        raise ValueError(f"kvcompress: expected the keys 'format' and, if any, 'per_layer', got {sorted(value)}")
    named = value.get("per_layer", {})
    if not isinstance(value["format"], str) or not isinstance(named, dict):
        raise ValueError(
            "kvcompress: expected a format such as 'int8' or 'int8/int4', and formats by layer such as "
            f"{{'0': 'raw'}}, got {value['format']!r} and {named!r}"
        )
    return value["format"], named


def _by_layer(config: Any, named: dict[Any, Any]) -> tuple[tuple[int, str], ...]:
    """(layer, format) from `per_layer` in JSON, with string keys."""
    from ..quantization.mixed_precision import by_layer

    numbers = {int(x) if isinstance(x, str) and x.lstrip("-").isdecimal() else x: y for x, y in named.items()}
    found = by_layer(numbers, range(config.model_config.get_total_num_hidden_layers()))
    if any(set(options) - {"key", "value", "spans"} for options in found.values()):
        raise ValueError(f"kvcompress: per_layer: expected {{layer: format}}, got {named}")
    pairs = ((layer, (options["key"], options["value"])) for layer, options in sorted(found.items()))
    return tuple((layer, "/".join(dict.fromkeys(pair))) for layer, pair in pairs)


def _check_format(text: str, dtype: torch.dtype) -> None:
    for name in text.split("/"):
        formats.resolve(name, dtype)
        if name in formats.CALIBRATED:
            raise ValueError(f"kvcompress: expected a format without calibration, got {name}; use it with KVCache")
    if text.count("/") > 1:
        raise ValueError(f"kvcompress: expected a format, or one for K and one for V, got {text!r}")


def _check_connector(name: str, block_size: int) -> None:
    """Raises ValueError for connectors that copy parts of blocks: the bytes of a page are not in token order."""
    if name not in CONNECTORS:
        raise ValueError(
            f"kvcompress: expected a KV connector that copies whole blocks ({', '.join(CONNECTORS)}), got {name}"
        )
    if name == "ExampleConnector" and block_size != PAGE:
        raise ValueError(
            f"kvcompress: expected --block-size {PAGE} with {name}, got {block_size}: it assumes that layers have "
            "vLLM's block size"
        )


@dataclass(frozen=True)
class Settings:
    """format: page format, as of `formats.page_geometry`; drafts: maximum number of draft tokens per step; per_layer:
    (layer, format) of layers with another format."""

    format: str
    dtype: torch.dtype
    drafts: int
    per_layer: tuple[tuple[int, str], ...] = ()
    packed: bool = False
    """True if layers differ in size and some have residual tokens: all layers then share blocks of one size."""

    def of_draft(self) -> Settings:
        """Settings for the layers of a draft model, which cannot have residual pages of its own."""
        return replace(self, format=DRAFTS) if self.packed else self

    def of_layer(self, layer: int) -> Settings:
        return replace(self, format=dict(self.per_layer).get(layer, self.format), per_layer=())

    @classmethod
    def of(cls, config: Any) -> Settings:
        """Settings from a VllmConfig. Raises ValueError for unsupported configurations."""
        value, named = _named(config)
        dtype, per_layer = config.model_config.dtype, _by_layer(config, named) if named else ()
        for text in (value, *(y for _, y in per_layer)):
            _check_format(text, dtype)
        cache = config.cache_config.cache_dtype
        if cache not in ("auto", None):
            raise ValueError(f"kvcompress: expected --kv-cache-dtype auto, got {cache}; the format is {value}")
        if config.cache_config.block_size % PAGE:
            raise ValueError(
                f"kvcompress: expected a multiple of {PAGE} for --block-size, got {config.cache_config.block_size}"
            )
        speculation = config.speculative_config
        settings = cls(value, dtype, speculation.num_speculative_tokens if speculation else 0, per_layer)
        by_model = speculation is not None and speculation.method not in WITHOUT_LAYERS
        residual = next((x.format for x in settings.each() if x.geometry(1, 64).residual_bytes), None)
        settings = replace(settings, packed=residual is not None and (by_model or bool(per_layer)))
        if per_layer and by_model:
            raise ValueError(f"kvcompress: expected no {speculation.method} drafts with per_layer, got both")
        if (per_layer or settings.packed) and config.model_config.is_hybrid:
            what = "per_layer" if per_layer else f"{residual} and drafts by {speculation.method}"
            raise ValueError(f"kvcompress: expected a model with attention layers only with {what}, got a hybrid model")
        if residual is not None:
            settings._check_residual(config, residual)
        elif config.kv_transfer_config is not None:
            _check_connector(config.kv_transfer_config.kv_connector, config.cache_config.block_size)
        return settings

    def each(self) -> list[Settings]:
        """Settings for each format that layers have."""
        return [replace(self, format=x, per_layer=()) for x in (self.format, *(y for _, y in self.per_layer))]

    def _check_residual(self, config: Any, name: str) -> None:
        """Raises ValueError for options that formats with residual tokens do not support."""
        if config.kv_transfer_config is not None:
            raise ValueError(
                f"kvcompress: expected no --kv-transfer-config and no KV offloading with {name}, got one: the raw "
                "newest tokens of a sequence would not be transferred; omit it, or use an 8-bit format"
            )
        if self.drafts > MOST_DRAFTS:
            raise ValueError(
                f"kvcompress: expected at most {MOST_DRAFTS} draft tokens per step with {name}, got {self.drafts}: raw "
                "tokens of a page that is filled by a single step are not kept"
            )
        if config.scheduler_config.disable_hybrid_kv_cache_manager:
            raise ValueError(
                f"kvcompress: expected vLLM's hybrid KV cache manager with {name}, got "
                "--disable-hybrid-kv-cache-manager: the newest tokens of a sequence are in a separate group of blocks; "
                "omit it, or use an 8-bit format"
            )

    def geometry(self, heads: int, head_dim: int, value_dim: int | None = None) -> formats.Geometry:
        """The page geometry of a layer."""
        return formats.page_geometry(
            self.format, heads, head_dim, dtype=self.dtype, value_dim=value_dim, page_size=PAGE
        )

    @property
    def residual_pages(self) -> int:
        """Number of residual pages per sequence. Drafts are sealed as other tokens; if one is rejected, its page is raw
        again, and the raw tokens of that page are still stored, as later tokens are in the other residual page."""
        return 2 if self.drafts else 1

    def check_block(self, heads: int, head_dim: int, block_size: int) -> None:
        """Raises ValueError if a block of a layer is too small for the residual pages of a sequence."""
        geometry = self.geometry(heads, head_dim)
        need = self.residual_pages * geometry.residual_bytes
        if need > block_size // PAGE * geometry.page_bytes:
            raise ValueError(
                f"kvcompress: expected --block-size of at least {-(-need // geometry.page_bytes) * PAGE} for "
                f"{self.format} in {str(self.dtype).removeprefix('torch.')}: "
                "a block must hold the raw tokens of a sequence; "
                f"got {block_size}"
            )
