"""calibrate(model, ids): coordinates in which few dims of K and V hold most of what matters.

K matters by what queries make of it, q . k; V by what the output projection makes of it. In the metric of these second
moments the principal axes of rows (of K without its page's mean, which pages store) are sorted by variance, and scaled
to the variance that rounding costs them, which is where codes of one width cost least. This is transform coding (Goyal
2001, IEEE Signal Processing Magazine). What formats make of the axes is in `Calibration.basis`.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.pytorch_utils import Conv1D

from .. import checks
from ..quantization.calibration import Calibration
from .attention import kvcompress_attention_forward
from .backend import attending
from .configs import reads_others, text_config
from .save_load import model_hash
from .weights import weights_hash

_NAME = "kvcompress_calibrate"
_PAGE, _SINKS = 64, 4
_OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj")
Measure = Callable[[dict[str, Any], Any, Tensor, Tensor, Tensor], None]
_seen: tuple[dict[int, dict[str, Any]], Measure] | None = None  # while a model is measured


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    if _seen is not None:
        layers, measure = _seen
        found = layers.setdefault(module.layer_idx, {"module": module})
        measure(found, module, *(x.detach() for x in (query, key, value)))
    return kvcompress_attention_forward(module, query, key, value, mask, *args, **kwargs)


def second_moments(found: dict[str, Any], module: Any, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Adds those of a call's rows, float64 [H, D, D]."""
    H = k.shape[1]
    pages = (k.shape[2] - _SINKS) // _PAGE
    rows = k[:, :, _SINKS : _SINKS + pages * _PAGE].unflatten(2, (pages, _PAGE)).double()
    centred = (rows - rows.mean(3, keepdim=True)).transpose(0, 1).flatten(1, 3)
    queries = q.unflatten(1, (H, -1)).transpose(0, 1).flatten(1, 3).double()
    for name, x in (("q", queries), ("k", centred), ("v", v.transpose(0, 1).flatten(1, 2).double())):
        found[name] = found.get(name, 0) + x.mT @ x


def _of_output(module: Any, heads: int, H: int, D: int) -> Tensor:
    """float64 [H, D, D]: W^T W of the part of the output projection that takes a head's V, over the group."""
    for name in _OUTPUTS:
        linear = getattr(module, name, None)
        w = linear.weight.T if isinstance(linear, Conv1D) else getattr(linear, "weight", None)
        if w is not None and w.dim() == 2 and w.shape[1] == heads * D:
            parts = w.detach().double().T.unflatten(0, (H, heads // H, D))
            return (parts @ parts.mT).sum(1)
    return torch.eye(D, dtype=torch.float64, device=next(module.parameters()).device).expand(H, D, D)


def _axes(moments: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Eigenvalues (largest first, at least `floor` of the largest) and axes of [H, D, D]."""
    values, axes = torch.linalg.eigh(moments)
    values, axes = values.flip(-1), axes.flip(-1)
    return values.clamp_min(values[..., :1] * floor + 1e-300), axes


def _map(moments: Tensor, metric: Tensor) -> tuple[Tensor, Tensor]:
    """[H, D, D]: rows times it lie along the axes of `moments` in that metric, sorted, each with the variance that
    noise in it costs. [H, D]: these, which are what the axes deviate by in the metric, in units of their mean."""
    if not bool(moments.isfinite().all() and metric.isfinite().all()):
        raise ValueError("calibrate: expected a model whose q, K and V are finite on this text, got NaN or Inf")
    values, axes = _axes(metric, 1e-4)
    root = axes * values.sqrt()[..., None, :] @ axes.mT
    variance, principal = _axes(root @ moments @ root, 1e-6)
    deviation, D = variance.sqrt(), moments.shape[-1]
    found = (root @ (principal * deviation.rsqrt()[..., None, :])).float()
    alive = (moments.diagonal(dim1=1, dim2=2).sum(-1) > 0) & (metric.diagonal(dim1=1, dim2=2).sum(-1) > 0)
    found = torch.where(alive[:, None, None], found, torch.eye(D, device=found.device))  # no axes without rows
    deviation = torch.where(alive[:, None], deviation / deviation.mean(-1, keepdim=True), 1.0)
    return found.cpu(), deviation.float().cpu()


@contextmanager
def _measuring(model: PreTrainedModel, measure: Measure) -> Iterator[dict[int, dict[str, Any]]]:
    global _seen
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    _seen = {}, measure
    try:
        with attending(model, _NAME):
            yield _seen[0]
    finally:
        _seen = None


@torch.no_grad()
def measured(
    model: PreTrainedModel, ids: Any, measure: Measure, *, context: int = 2048, tokens: int = 16384
) -> dict[int, dict[str, Any]]:
    """What `measure` finds of each layer of `model` on a text, with its attention module ("module"); see `calibrate`.

    measure: is given the dict of the layer, its module, and q [B, Hq, T, D], k [B, H, T, D], v of each call.
    """
    text = text_config(model.config)
    several = isinstance(ids, (list, tuple)) and len(ids) > 0 and not isinstance(ids[0], numbers.Integral)
    texts = [checks.as_tensor(x).reshape(-1) for x in (ids if several else [ids])]
    context = checks.integer("context", context, _SINKS + 4 * _PAGE)
    context = min(context, getattr(text, "max_position_embeddings", None) or context)
    tokens = checks.integer("tokens", tokens, context * len(texts))
    if getattr(text, "kv_lora_rank", None):
        raise ValueError("calibrate: expected K and V of heads, got a model with latent attention (MLA)")
    if (least := min(map(len, texts))) < context:
        raise ValueError(f"calibrate: ids: expected at least {context} tokens, got {least}; take a longer text")
    with _measuring(model, measure) as found:
        for flat in texts:
            for part in flat[: min(len(flat), tokens // len(texts))].split(context):
                if len(part) == context:
                    model(part[None].to(model.device), use_cache=False, logits_to_keep=1)
    types = getattr(text, "layer_types", None)
    full = {i for i in found if (types is None or types[i] == "full_attention") and not reads_others(text, i)}
    if not full:
        raise ValueError(f"calibrate: expected full-attention layers that transformers' interface reaches, got none in "
                         f"{type(model).__name__}")  # fmt: skip
    return {i: found[i] for i in sorted(full)}


@torch.no_grad()
def calibrate(model: PreTrainedModel, ids: Any, *, context: int = 2048, tokens: int = 16384) -> Calibration:
    """Measures `model` on a text; minutes on a CPU.

    ids: int [N], the tokens of a text that is like what will be cached; or a list of such, one of each kind, of which
    as much is read. context: tokens of a forward pass, at most the model's positions. tokens: read at most.
    Raises ValueError for too short a text, K or V that are not finite, models with latent attention, and models without
    transformers' attention interface.
    """
    text = text_config(model.config)
    maps, weights, deviations = {}, {}, {}
    for index, x in measured(model, ids, second_moments, context=context, tokens=tokens).items():
        H, D = x["v"].shape[:2]
        heads = text.per_layer_config[index].num_attention_heads
        key, value = _map(x["k"], x["q"]), _map(x["v"], _of_output(x["module"], heads, H, D))
        maps[index], deviations[index] = (key[0], value[0]), (key[1], value[1])
        weights[index] = weights_hash(x["module"]) or ""
    return Calibration(maps, model_hash(text), weights, deviations=deviations)
