"""Multi-head latent attention (MLA): a lazy `expand_kv`, and attention in the latent space (weight absorption).

A layer that defines `expand_kv(latents, rotary)` caches latents [B, 1, S, rank] and the rotary part of K. At every step
it would expand all of them to K and V of every head: rank * (nope + v) multiply-adds per head and token. With
absorption, W_uk is applied to q and W_uv to the sum of latents, and a token takes 2 * rank + rope multiply-adds.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch
from torch import Tensor, nn

from ..store.device_memory import usable
from .layer import Block, PagedLayer
from .lazy import LazyKV

_ABSORBS = "_kvcompress_absorbs"  # attribute of a module whose expand_kv only applies kv_b_proj


class Expanded(LazyKV):
    """K or V of all heads, the result of `expand_kv`, not yet computed. Any operation other than the kvcompress
    attention computes it."""

    module: Any

    def dense(self) -> Tensor:
        return expand(self.module, *self.block.dense_pair())[self.side]

    def attend(self, query: Tensor, mask: Tensor | None, **options: Any) -> Tensor | None:
        """Attention [B, T, Hq, Dv] over pages of latents. Returns None and does nothing if weights cannot be absorbed,
        or if expanding is cheaper and the policy does not need attention."""
        block: Any = self.block
        module = self.module
        if _weight(module) is None:
            return None
        if isinstance(block.layer, PagedLayer) and _expands(module, block, query.shape[2], self.shape[2]):
            return None
        out = block.layer.attend(block, absorbed(module, query), mask, **options)
        return None if out is None else values_of(module, out)


class Latents(LazyKV):
    """K (latents and rotary part, concatenated) or V (latents) for queries with W_uk absorbed."""

    def dense(self) -> Tensor:
        latents, rotary = self.block.dense_pair()
        return latents if self.side else torch.cat([latents, rotary], -1)


def absorbed(module: Any, query: Tensor) -> Tensor:
    """Absorbs W_uk: queries [B, H, T, nope + rope] of a module -> [B, H, T, rank + rope]."""
    weight, nope = _weight(module), module.qk_nope_head_dim
    assert weight is not None
    rows = torch.bmm(query[..., :nope].transpose(0, 1).flatten(1, 2), weight[:, :nope].to(query.dtype))
    own = rows.unflatten(1, (query.shape[0], query.shape[2])).transpose(0, 1)
    return torch.cat([own, query[..., nope:]], -1)


def values_of(module: Any, out: Tensor) -> Tensor:
    """Applies the module's W_uv: sums of latents [B, T, H, rank] -> [B, T, H, v]."""
    weight = _weight(module)
    assert weight is not None
    own = weight[:, module.qk_nope_head_dim :].to(out.dtype)
    rows = torch.bmm(own, out.flatten(0, 1).permute(1, 2, 0))  # [H, v, B * T]: faster for bf16
    return rows.permute(2, 0, 1).unflatten(0, out.shape[:2])


def _expands(module: Any, block: Block, queries: int, slots: int) -> bool:
    """True if expanding takes fewer multiply-adds per head than absorption, and the layer's policy does not need
    queries or their attention."""
    policy, rank, rope = block.layer.options["policy"], block.k.shape[3], block.v.shape[3]
    if policy is not None and (policy.needs_attention or policy.window or policy.clusters):
        return False
    nope, v = module.qk_nope_head_dim, module.v_head_dim
    once = rank * (nope + v)
    return queries * (once + slots * (2 * rank + rope)) >= slots * (once + queries * (nope + rope + v))


def expand(module: Any, latents: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """`expand_kv` of the module's class."""
    return type(module).expand_kv(module, latents, rotary)


def expand_kv(self: Any, latents: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """Replacement of `expand_kv`, installed by `absorb`."""
    if torch.compiler.is_dynamo_compiling() and (layer := getattr(latents, "kvcompress_layer", None)) is not None:
        if _weight(self) is None:
            return expand(self, *layer.traced_dense(latents, rotary))
        latents.kvcompress_module = self  # type: ignore[attr-defined]  # its attention absorbs
        return latents, rotary
    block: Any = getattr(latents, "block", None)
    other: Any = getattr(rotary, "block", None)
    if block is None or other is not block or self.training:
        return expand(self, latents, rotary)
    weight = _weight(self)
    if weight is not None:
        heads, dims = weight.shape[0], (self.qk_nope_head_dim + rotary.shape[3], self.v_head_dim)
    else:  # the module tells
        some = expand(self, *(x.new_zeros(1, 1, 1, x.shape[3]) for x in (block.k, block.v)))
        heads, dims = some[0].shape[1], (some[0].shape[3], some[1].shape[3])
    shape = (latents.shape[0], heads, latents.shape[2])
    return Expanded.pair(shape, dims, latents.dtype, latents.device, block=block, module=self)


def _weight(module: Any) -> Tensor | None:
    """W_uk and W_uv of each head, concatenated, [heads, nope + v, rank]; None if the projection is not a plain linear
    layer (quantized, with an adapter or a bias), and the module itself must be applied."""
    linear = getattr(module, "kv_b_proj", None) if module.__dict__.get(_ABSORBS, True) else None
    if type(linear) is not nn.Linear or linear.bias is not None or not linear.weight.is_floating_point():
        return None
    each = module.qk_nope_head_dim + module.v_head_dim
    return linear.weight.unflatten(0, (-1, each)) if linear.weight.shape[0] % each == 0 else None


def _expands_so(module: Any) -> bool:
    """True if the class's `expand_kv` equals the projection by the weight, tested on two tokens."""
    weight = _weight(module)
    if weight is None or (weight.is_meta and usable(weight.device)):
        return False
    g = torch.Generator().manual_seed(0)
    latents = torch.randn(1, 1, 2, weight.shape[2], generator=g).to(weight)
    rotary = torch.randn(1, 1, 2, module.qk_rope_head_dim, generator=g).to(weight)
    with torch.no_grad():
        keys, values = expand(module, latents, rotary)
        want = latents @ weight.mT
    k, v = want[..., : module.qk_nope_head_dim], want[..., module.qk_nope_head_dim :]
    k = torch.cat([k, rotary.expand(-1, k.shape[1], -1, -1)], -1)
    fits = keys.shape == k.shape and values.shape == v.shape
    close = 1e-4 if weight.dtype == torch.float32 else 5e-2
    return fits and all(torch.allclose(a, b, rtol=close, atol=close) for a, b in ((keys, k), (values, v)))


def layers(model: nn.Module) -> list[Any]:
    """Modules that define `expand_kv`. Raises ValueError if its arguments are unexpected."""
    found: list[Any] = [m for m in model.modules() if callable(getattr(type(m), "expand_kv", None))]
    for m in found:
        names = list(inspect.signature(type(m).expand_kv).parameters)
        if len(names) != 3:
            raise ValueError(
                f"enable: {type(m).__name__}: expand_kv: expected (latents, rotary part), got {tuple(names[1:])}; use "
                'the model with its own attention: model.set_attn_implementation("sdpa")'
            )
    return found


def absorb(model: nn.Module) -> None:
    """Makes `expand_kv` of the model's layers lazy, and enables absorption where the weight defines it."""
    for m in layers(model):
        m.__dict__["expand_kv"], m.__dict__[_ABSORBS] = types.MethodType(expand_kv, m), _expands_so(m)


def unabsorbed(model: nn.Module) -> str:
    """Why layers with `expand_kv` are decoded at every step; "" if none are."""
    found = layers(model)
    rest = [m for m in found if not m.__dict__.get(_ABSORBS) or _weight(m) is None]
    if not rest:
        return ""
    kinds = ", ".join(sorted({type(getattr(m, "kv_b_proj", None)).__name__ for m in rest}))
    return f"decoded at every step, then expanded, in {len(rest)} of {len(found)} layers (kv_b_proj is {kinds})"
