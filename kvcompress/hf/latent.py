"""Latent attention (MLA): a model's `expand_kv` made lazy, and attention in the space of the latents.

A layer that defines `expand_kv(latents, rotary)` caches latents [B, 1, S, rank] and the rotary part of K, and would
expand all of them to K and V of every head at every step: rank * (nope + v) multiply-adds a head and token. Absorbed,
W_uk goes onto q and W_uv onto the sum of latents, and a token takes 2 * rank + rope of them.
"""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch
from torch import Tensor, nn

from .layer import Block, LazyKV


class Expanded(LazyKV):
    """K or V of all heads that `expand_kv` would give, not yet computed. Any operation but the kvcompress attention
    computes it."""

    module: Any

    def dense(self) -> Tensor:
        return expand(self.module, *self.block.dense_pair())[self.side]

    def attend(
        self, query: Tensor, own: Tensor | None, sees: Tensor | None, scale: float, s_aux: Tensor | None = None
    ) -> Tensor | None:
        """Attention [B, T, Hq, Dv] over latents as they were stored, the call's own exact. Stores the call's tokens.
        None if expanding them is cheaper, or tokens were evicted. own: bool [B, T], False at pads; sees: bool [B or 1,
        1, T, slots]; None: all."""
        block, module, T = self.block, self.module, query.shape[2]
        weight = _weight(module)
        latents, rotary = block.dense_pair(own)
        rank, rope, nope = latents.shape[3], rotary.shape[3], module.qk_nope_head_dim
        if weight is None or block.there is not None or not _cheaper(module, T, latents.shape[2], rank, rope):
            return None
        q = torch.einsum("bhtn,hnr->bhtr", query[..., :nope], weight[:, :nope].to(query.dtype))
        B, H = q.shape[:2]
        q = torch.cat([q, query[..., nope:]], -1).flatten(1, 2)  # [B, H * T, rank + rope]
        scores = q @ torch.cat([latents, rotary], -1)[:, 0].mT.to(q.dtype)
        scores = (scores.float() * scale).unflatten(1, (H, T))
        if sees is not None:
            scores = scores.masked_fill(~sees, -torch.inf)
        if s_aux is not None:
            scores = torch.cat([scores, s_aux.float().view(1, H, 1, 1).expand(B, H, T, 1)], -1)
        p = torch.softmax(scores, -1).nan_to_num(0.0)[..., : latents.shape[2]]  # rows that see nothing: zeros
        sums = (p.to(q.dtype).flatten(1, 2) @ latents[:, 0].to(q.dtype)).unflatten(1, (H, T))
        return torch.einsum("bhtr,hvr->bthv", sums, weight[:, nope:].to(query.dtype))


def expand(module: Any, latents: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """What the module's class defines."""
    return type(module).expand_kv(module, latents, rotary)


def expand_kv(self: Any, latents: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """`expand_kv` of a module that `absorb` has seen."""
    block = getattr(latents, "block", None)
    if not isinstance(block, Block) or getattr(rotary, "block", None) is not block or self.training:
        return expand(self, latents, rotary)
    weight = _weight(self)
    if weight is None:
        return expand(self, latents, rotary)
    heads, nope, v = weight.shape[0], self.qk_nope_head_dim, self.v_head_dim
    out = []
    for side, dim in enumerate((nope + rotary.shape[3], v)):
        shape = (latents.shape[0], heads, latents.shape[2], dim)
        x: Any = torch.Tensor._make_wrapper_subclass(Expanded, shape, dtype=latents.dtype, device=latents.device)
        x.block, x.side, x.module = block, side, self
        out.append(x)
    return out[0], out[1]


def _weight(module: Any) -> Tensor | None:
    """W_uk above W_uv of each head, [heads, nope + v, rank]; None if the projection is no plain linear layer
    (quantized, with an adapter, with a bias): then the module itself is applied."""
    linear = getattr(module, "kv_b_proj", None)
    if type(linear) is not nn.Linear or linear.bias is not None or not linear.weight.is_floating_point():
        return None
    each = module.qk_nope_head_dim + module.v_head_dim
    return linear.weight.unflatten(0, (-1, each)) if linear.weight.shape[0] % each == 0 else None


def _expands_so(module: Any) -> bool:
    """Does the class's `expand_kv` compute what the weight says? Tried on two tokens."""
    weight = _weight(module)
    if weight is None or weight.is_meta:
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


def absorb(model: nn.Module) -> tuple[int, int, str]:
    """Makes `expand_kv` of the model's layers lazy. (layers that attend absorbed, layers with `expand_kv`, why those
    that do not). ValueError for an `expand_kv` with other arguments."""
    found: list[Any] = [m for m in model.modules() if callable(getattr(type(m), "expand_kv", None))]
    for m in found:
        names = list(inspect.signature(type(m).expand_kv).parameters)
        if len(names) != 3:
            raise ValueError(
                f"enable: {type(m).__name__}: expand_kv: expected (latents, rotary part), got {tuple(names[1:])}; use "
                'the model with its own attention: model.set_attn_implementation("sdpa")'
            )
    fit = [m for m in found if _expands_so(m)]
    for m in fit:
        m.__dict__["expand_kv"] = types.MethodType(expand_kv, m)
    rest = sorted({type(getattr(m, "kv_b_proj", None)).__name__ for m in found if m not in fit})
    return len(fit), len(found), f"kv_b_proj is {', '.join(rest)}" if rest else ""


def _cheaper(module: Any, queries: int, slots: int, rank: int, rope: int) -> bool:
    """Are there fewer multiply-adds a head to the absorbed form?"""
    nope, v = module.qk_nope_head_dim, module.v_head_dim
    once = rank * (nope + v)
    return queries * (once + slots * (2 * rank + rope)) < slots * (once + queries * (nope + rope + v))
