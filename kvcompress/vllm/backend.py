"""The attention backend for vLLM. A block of vLLM consists of consecutive kvcompress pages, so vLLM's block manager,
prefix caching, preemption, chunked prefill and parallelism manage the memory; `ops.attend_varlen` does the rest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import torch
from vllm.compilation import backends
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from .. import ops
from .residual import ResidualLayer
from .settings import PAGE, Settings

logger = init_logger("vllm.kvcompress")


class Backend(AttentionBackend):
    """Selected by `additional_config={"kvcompress": format}`. `of` creates a class for an engine's settings, as vLLM
    calls methods of the class when no configuration is set."""

    settings: ClassVar[Settings]
    name: ClassVar[str]
    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list] = ["auto"]

    @classmethod
    @cache
    def of(cls, settings: Settings, name: str = "CPU_ATTN") -> type[Backend]:
        return type(cls.__name__, (cls,), {"settings": settings, "name": name})

    @classmethod
    def get_name(cls) -> str:
        return cls.name

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        if "settings" in vars(cls):
            return "kvcompress.vllm.selected", cls.name  # which knows the settings; CUDA's platform goes by the name
        return cls.__module__, cls.__qualname__  # with another builder, by vLLM: layers of one name share metadata

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list:
        return [MultipleOf(PAGE) if cls.settings.packed else PAGE]  # blocks that layers share cannot be cut into pages

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """The pages of all heads are adjacent in a block."""
        return (KVCacheLayout.BLHNC if cls.settings.packed else KVCacheLayout.LBHNC,)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # calls are split by the lengths on the host

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        if spec.state_content_bytes is not None:
            return spec
        shape = cls.settings.geometry(spec.num_kv_heads, spec.head_size, spec.head_size_v)
        return replace(spec, dtype=torch.uint8, state_content_bytes=shape.head_bytes // PAGE)

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return Builder


@dataclass
class Metadata:
    """Metadata of a step for the layers of a group."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    flags: torch.Tensor
    calls: list[tuple[slice, tuple, int]]
    """Calls: which sequences; their block table, starts, lengths and flags; maximum number of new tokens. Two calls if
    some sequences have one token."""


class Builder(AttentionMetadataBuilder[Metadata]):
    """Takes lengths and the block table from vLLM. On a GPU nothing is copied to the host, and everything that a
    captured step reads stays at fixed addresses."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold = 1

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        first = vllm_config.compilation_config.static_forward_context.get(layer_names[0])
        settings = first.impl.settings if first else Settings.of(vllm_config)  # the format may be a layer's own
        spec = kv_cache_spec
        shape = settings.geometry(spec.num_kv_heads, spec.head_size, spec.head_size_v)
        self.on_gpu = device.type != "cpu"
        self.flags = torch.zeros(vllm_config.scheduler_config.max_num_seqs, dtype=torch.int32, device=device)
        cache = vllm_config.cache_config
        fit = cache.kv_cache_size_tokens  # known in the engine core, not in worker processes
        logger.info(
            "kvcompress: %s for %d layers (%s, ..): %d bytes a block of %d tokens and layer, %s blocks in all; %s",
            settings.format, len(layer_names), layer_names[0], cache.block_size // PAGE * shape.page_bytes,
            cache.block_size, cache.num_gpu_blocks, f"{fit:,} tokens fit" if fit else "vLLM says how many tokens fit",
        )  # fmt: skip

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        cam = common_attn_metadata
        if not isinstance(cam.causal, bool) or not cam.causal:
            raise ValueError("kvcompress: expected causal attention, got a batch that is not; use vLLM's own backend")
        n, longest, parts = cam.num_reqs, 0, [slice(0, cam.num_reqs)]
        starts = cam.query_start_loc if self.on_gpu else cam.query_start_loc_cpu
        out = Metadata(starts[: n + 1], cam.seq_lens[:n], cam.block_table_tensor[:n], self.flags[:n].zero_(), [])
        if self.on_gpu:
            longest = cam.max_query_len
            ones = 0 if longest == 1 else int((cam.query_start_loc_cpu[: n + 1].diff() > 1).int().argmax())
            if ones:  # they come first; kernels are chosen per call
                parts = [slice(0, ones), slice(ones, n)]
        for part in parts:
            own = out.block_table[part], starts[part.start : part.stop + 1], out.seq_lens[part], out.flags[part]
            out.calls.append((part, own, 1 if part.stop < n else longest))
        return out


class Impl(AttentionImpl):
    """A layer's attention."""

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
                 alibi_slopes: Any = None, sliding_window: int | None = None, kv_cache_dtype: str = "auto",
                 logits_soft_cap: float | None = None, attn_type: str = AttentionType.DECODER,
                 kv_sharing_target_layer_name: str | None = None, sinks: Any = None) -> None:  # fmt: skip
        config = get_current_vllm_config()
        if alibi_slopes is not None or attn_type != AttentionType.DECODER:
            what = "ALiBi" if alibi_slopes is not None else f"{attn_type} attention"
            raise ValueError(
                f"kvcompress: expected layers of causal self-attention, got {what}; use vLLM's own backend"
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.window, self.softcap = sliding_window or 0, float(logits_soft_cap or 0)
        self.sinks = sinks
        self.kv_cache_dtype = kv_cache_dtype
        settings = Settings.of(config)
        self._take(settings if backends.model_tag == "backbone" else settings.of_draft())
        if (self.settings.per_layer or self.settings.packed) and sliding_window:
            raise ValueError(
                "kvcompress: expected layers without sliding windows with per_layer (or a format below 8 bits with a "
                "draft model), got some; omit per_layer, use an 8-bit format, or KVCache with transformers"
            )
        self.bound: torch.Tensor | None = None  # the argument of `bind`
        self.residual_name: str | None = None
        self.shares = kv_sharing_target_layer_name
        for settings in self.settings.each():
            settings.check_block(self.num_kv_heads, head_size, config.cache_config.block_size)
        self.layers = config.compilation_config.static_forward_context
        if not self.settings.packed:
            self._ask_for_residual()

    def _take(self, settings: Settings) -> None:
        self.settings = settings
        self.shape = settings.geometry(self.num_kv_heads, self.head_size)
        self.formats = self.shape.key << 8 | self.shape.value

    def _ask_for_residual(self) -> None:
        if self.shares:
            self.residual_name = self.layers[self.shares].impl.residual_name
        elif self.shape.residual_bytes:
            number = sum(isinstance(x, ResidualLayer) for x in self.layers.values())
            self.residual_name = f"kvcompress.residual.{number}"
            layer = ResidualLayer(self.settings, self.shape, self.num_kv_heads, self.head_size)
            self.layers[self.residual_name] = layer

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Called when the layer has registered its name with vLLM, before vLLM reads the size of its pages."""
        if not self.settings.per_layer and not self.settings.packed:
            return
        name, layer = next((x, y) for x, y in self.layers.items() if getattr(y, "impl", None) is self)
        if self.settings.per_layer:
            self._take(self.settings.of_layer(extract_layer_index(self.shares or name)))
        if self.settings.packed and self.residual_name is None:
            # Only now, since vLLM drafts with the block tables of the group whose layers are registered first.
            self._ask_for_residual()
        layer.attn_backend = Backend.of(self.settings, layer.attn_backend.name)

    def bind(self, kv_cache: torch.Tensor) -> None:
        """Prepares the layer's blocks for `ops.attend_varlen`."""
        there = kv_cache.device
        self.no_ints, self.residual = (torch.empty(0, dtype=x, device=there) for x in (torch.int32, torch.uint8))
        self.s_aux = self.no_floats = torch.empty(0, dtype=torch.float32, device=there)  # vLLM sets default dtypes
        if self.sinks is not None:
            self.s_aux = self.sinks.detach().float().contiguous()
        self.block_size = kv_cache.shape[2]
        self.bound, self.cache = kv_cache, _blocks(kv_cache, self.block_size // PAGE * self.shape.page_bytes)
        if self.residual_name:
            raw = get_forward_context().no_compile_layers[self.residual_name].kv_cache
            self.residual = _blocks(raw, self.settings.residual_pages * self.shape.residual_bytes)
        self.residual_size = self.settings.residual_pages * PAGE if self.residual_name else PAGE

    def forward(self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
                attn_metadata: Metadata | None, output: torch.Tensor, output_scale: Any = None,
                output_block_scale: Any = None) -> torch.Tensor:  # fmt: skip
        m = attn_metadata
        if m is None:
            return output.zero_()  # vLLM's memory profiling run
        if self.bound is not kv_cache:
            self.bind(kv_cache)
        table = self.no_ints
        if self.residual_name:
            table = get_forward_context().attn_metadata[self.residual_name]
        whole, n = output, query.shape[0]
        if self.shares:
            key, value = query.new_empty(2, 0, self.num_kv_heads, self.head_size)
        elif key.shape[0] != n:
            key, value = key[:n], value[:n]
        if output.dim() != 3:
            output = output.view(n, self.num_heads, self.head_size)
        for part, (blocks, starts, lengths, flags), longest in m.calls:
            open_blocks = table[part] if len(m.calls) > 1 else table
            ops.attend_varlen(
                query, key, value, self.cache, blocks, self.residual, open_blocks, starts, lengths, self.no_ints,
                self.no_ints, self.s_aux, output, self.no_floats, flags, self.formats, self.block_size,
                self.residual_size, PAGE, self.window, self.scale, self.softcap, longest,
            )  # fmt: skip
        return whole


def _blocks(kv_cache: torch.Tensor, size: int) -> torch.Tensor:
    """The memory that vLLM allocated for a layer, as uint8 [blocks, size]."""
    return kv_cache.as_strided((kv_cache.shape[0], size), (kv_cache.stride(0), 1))
