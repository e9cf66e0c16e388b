"""Residual tokens in vLLM. Formats that are written as whole pages keep the newest tokens of a sequence raw, in one
block per sequence that vLLM's scheduler allocates (a CircularBufferSpec group next to the layers), so that it is
counted, and freed when the request ends or is preempted."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import CircularBufferSpec, KVCacheLayout

from .. import formats
from .settings import PAGE, Settings


class ResidualBackend(AttentionBackend):
    """Backend of ResidualLayer; its metadata is the column of blocks."""

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN" if current_platform.is_cpu() else "CUSTOM"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("no layer of the model uses this backend")

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return ResidualBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return KVCacheLayout.LBHNC, KVCacheLayout.BLHNC


class ResidualBuilder(AttentionMetadataBuilder):
    """int32 [B, 1]."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> torch.Tensor:
        return common_attn_metadata.block_table_tensor[: common_attn_metadata.num_reqs, :1]


class ResidualLayer(AttentionLayerBase):
    """A pseudo layer that requests the blocks of residual tokens."""

    def __init__(self, settings: Settings, geometry: formats.Geometry, heads: int, head_dim: int) -> None:
        self.settings, self.geometry, self.heads, self.head_dim = settings, geometry, heads, head_dim

    def get_attn_backend(self) -> type[AttentionBackend]:
        return ResidualBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> CircularBufferSpec:
        return CircularBufferSpec(
            block_size=self.settings.residual_pages * PAGE,
            num_kv_heads=self.heads,
            head_size=self.head_dim,
            dtype=torch.uint8,
            state_content_bytes=self.geometry.residual_bytes // self.heads // PAGE,
            page_size_padded=vllm_config.cache_config.block_size // PAGE * self.geometry.page_bytes,
        )
