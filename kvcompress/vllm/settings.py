"""What `additional_config={"kvcompress": ..}` says, checked against the engine's other settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
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

DRAFTS = "int8"
"""Format of a draft model's layers where the target's has residual pages."""

CONNECTORS = ("ExampleConnector", "OffloadingConnector")
"""Of KV transfer, for formats without residual pages."""

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


def _named(config: Any) -> tuple[str, dict[Any, Any]]:
    """(format, formats of single layers) in the configuration."""
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
    """(layer, format) of `per_layer`, as JSON has it: its keys are text."""
    from ..quantization.mixed_precision import by_layer

    numbers = {int(x) if isinstance(x, str) and x.lstrip("-").isdecimal() else x: y for x, y in named.items()}
    found = by_layer(numbers, range(config.model_config.get_total_num_hidden_layers()))
    if any(set(options) - {"key", "value", "spans"} for options in found.values()):
        raise ValueError(f"kvcompress: per_layer: expected formats alone, got {named}")
    pairs = ((layer, (options["key"], options["value"])) for layer, options in sorted(found.items()))
    return tuple((layer, "/".join(dict.fromkeys(pair))) for layer, pair in pairs)


def _check_format(text: str, dtype: torch.dtype) -> None:
    for name in text.split("/"):
        formats.resolve(name, dtype)
        if name in formats.CALIBRATED:
            raise ValueError(f"kvcompress: expected a format that needs no calibration, got {name}; KVCache takes it")
    if text.count("/") > 1:
        raise ValueError(f"kvcompress: expected a format, or one for K and one for V, got {text!r}")


def _check_connector(name: str, block_size: int) -> None:
    """A page's bytes are not its tokens' one after the other, so what is copied has to be whole blocks."""
    if name not in CONNECTORS:
        raise ValueError(
            f"kvcompress: expected a KV connector that copies whole blocks ({', '.join(CONNECTORS)}), got {name}"
        )
    if name == "ExampleConnector" and block_size != PAGE:
        raise ValueError(
            f"kvcompress: expected --block-size {PAGE} with {name}, got {block_size}: it takes a layer's blocks for "
            "vLLM's"
        )


@dataclass(frozen=True)
class Settings:
    """format: of pages, as `formats.page_geometry` takes it; drafts: tokens of a step that may be rejected; per_layer:
    (layer, format) of those that have one of their own."""

    format: str
    dtype: torch.dtype
    drafts: int
    per_layer: tuple[tuple[int, str], ...] = ()
    packed: bool = False
    """Where layers differ in size and some keep raw tokens: all layers share vLLM's blocks, so that these are of one
    size."""

    def of_draft(self) -> Settings:
        """Of the layers of a draft model: the residual pages of one would be a second kind among those that draft."""
        return replace(self, format=DRAFTS) if self.packed else self

    def of_layer(self, layer: int) -> Settings:
        return replace(self, format=dict(self.per_layer).get(layer, self.format), per_layer=())

    @classmethod
    def of(cls, config: Any) -> Settings:
        """From a VllmConfig. ValueError for what this backend does not take."""
        value, named = _named(config)
        dtype, per_layer = config.model_config.dtype, _by_layer(config, named) if named else ()
        for text in (value, *(y for _, y in per_layer)):
            _check_format(text, dtype)
        cache = config.cache_config.cache_dtype
        if cache not in ("auto", None):
            raise ValueError(f"kvcompress: expected --kv-cache-dtype auto with it, got {cache}; the format is {value}")
        if config.cache_config.block_size % PAGE:
            raise ValueError(
                f"kvcompress: expected a --block-size of a multiple of {PAGE}, got {config.cache_config.block_size}"
            )
        speculation = config.speculative_config
        settings = cls(value, dtype, speculation.num_speculative_tokens if speculation else 0, per_layer)
        by_model = speculation is not None and speculation.method not in WITHOUT_LAYERS
        residual = next((x.format for x in settings.each() if x.geometry(1, 64).residual_bytes), None)
        settings = replace(settings, packed=residual is not None and (by_model or bool(per_layer)))
        if per_layer and by_model:
            raise ValueError(f"kvcompress: expected no drafts by {speculation.method} with per_layer, got both")
        if (per_layer or settings.packed) and config.model_config.is_hybrid:
            what = "per_layer" if per_layer else f"{residual} and drafts by {speculation.method}"
            raise ValueError(f"kvcompress: expected a model of attention layers alone with {what}, got a hybrid one")
        if residual is not None:
            settings._check_residual(config, residual)
        elif config.kv_transfer_config is not None:
            _check_connector(config.kv_transfer_config.kv_connector, config.cache_config.block_size)
        return settings

    def each(self) -> list[Settings]:
        """Of all formats that layers have."""
        return [replace(self, format=x, per_layer=()) for x in (self.format, *(y for _, y in self.per_layer))]

    def _check_residual(self, config: Any, name: str) -> None:
        """What formats that keep the newest tokens raw do not go with."""
        if config.kv_transfer_config is not None:
            raise ValueError(
                f"kvcompress: expected no --kv-transfer-config and no KV offloading with {name}, got one: a "
                "sequence's newest tokens, kept raw, would stay behind. Leave it out, or use a format of 8 bits"
            )
        if self.drafts > MOST_DRAFTS:
            raise ValueError(
                f"kvcompress: expected at most {MOST_DRAFTS} drafts a step with {name}, got {self.drafts}: raw "
                "tokens of a page that one step fills are not kept"
            )
        if config.scheduler_config.disable_hybrid_kv_cache_manager:
            raise ValueError(
                f"kvcompress: expected vLLM's hybrid KV cache manager with {name}, got "
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

    def check_block(self, heads: int, head_dim: int, block_size: int) -> None:
        """ValueError if a block of a layer has no room for a sequence's residual pages."""
        geometry = self.geometry(heads, head_dim)
        need = self.residual_pages * geometry.residual_bytes
        if need > block_size // PAGE * geometry.page_bytes:
            raise ValueError(
                f"kvcompress: expected --block-size of at least {-(-need // geometry.page_bytes) * PAGE} for "
                f"{self.format} in {str(self.dtype).removeprefix('torch.')}: "
                "a block has to hold the raw tokens of a sequence; "
                f"got {block_size}"
            )
