"""calibrate(model, ids): measures a basis in which few dims of K and V carry most of the information.

Errors of K matter through q . k, errors of V through the output projection. Queries and tokens are weighted by how much
of a token's noise reaches the output; attention to sinks and to the last tokens, which are raw, hardly counts. In the
metric of these second moments, the principal axes of K (minus the mean of its page, which pages store) and V are sorted
by variance, and scaled to the variance that rounding costs them, where codes of equal width cost least. This is
transform coding (Goyal 2001, IEEE Signal Processing Magazine). `Calibration.basis` adapts the axes to formats.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .. import checks
from ..quantization.calibration import Calibration
from .attention import eager
from .backend import observing
from .configs import reads_others, text_config
from .modules import weights_hash
from .save_load import model_hash

_PAGE, _SINKS, _ROWS = 64, 4, 256
_LEAST = 0.1  # minimum weight, as a share of the mean cost; see `second_moments`
_OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj")
Measure = Callable[[dict[str, Any], Any, Tensor, Tensor, Tensor], None]


def _of_output(module: Any, heads: int, D: int) -> Tensor:
    """W^T W of the part of the output projection for each query head: float64 [Hq, D, D]."""
    for name in _OUTPUTS:
        linear = getattr(module, name, None)
        w = linear.weight.T if isinstance(linear, Conv1D) else getattr(linear, "weight", None)
        if w is not None and w.dim() == 2 and w.shape[1] == heads * D:
            parts = w.detach().double().T.unflatten(0, (heads, D))
            return parts @ parts.mT
    return torch.eye(D, dtype=torch.float64, device=next(module.parameters()).device).expand(heads, D, D)


def _costs(q: Tensor, k: Tensor, v: Tensor, metric: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Costs of noise in one KV head, for q [1, G, T, D], k and v [1, 1, T, D]: by query for noise in K, [G, T]; by
    token for noise in K and in V, [G, T] each; float64. metric: [G, Dv, Dv], of the output.

    Noise n in K of token j changes output i by p_ij (q_i . n) (v_j - o_i) to first order, noise in V by p_ij n. The
    costs are the squares of these factors, without q_i and n, summed where token j is in a sealed page at query i.
    """
    (G, T), scale, cap = q.shape[1:3], given.get("scaling") or q.shape[3] ** -0.5, given.get("softcap") or 0.0
    q, k, v, metric = (x.float() for x in (q, k, v, metric))
    at = torch.arange(T, device=q.device)
    page = (at - _SINKS).div(_PAGE, rounding_mode="floor")
    asked, keys, values = q.new_zeros(3, G, T, dtype=torch.float64)
    for asks in at.split(_ROWS):
        n = int(asks[-1]) + 1
        seen, held = at[:n] <= asks[:, None], v[0, 0, :n]
        out, p = eager(q[:, :, asks], k[:, :, :n], v[:, :, :n], seen, scale, cap, given.get("s_aux"))
        p = p[0].square() * ((page[:n] >= 0) & (page[:n] < page[asks, None]))
        read = out[0] @ metric
        moved = (held @ metric * held).sum(-1)[:, None] - 2 * read @ held.T + (read * out[0]).sum(-1)[..., None]
        lost = p * moved.clamp_min(0)
        asked[:, asks] = lost.sum(2).double()
        keys[:, :n] += lost.sum(1)
        values[:, :n] += p.sum(1)
    return asked, keys, values


def second_moments(found: dict[str, Any], module: Any, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Adds the second moments of a call, float64 [H, D, D], of queries, of K minus the mean of its page, and of V, with
    rows weighted by `_costs`; and those of the output metric, "o"."""
    H, pages = k.shape[1], (k.shape[2] - _SINKS) // _PAGE
    there, G = slice(_SINKS, _SINKS + pages * _PAGE), q.shape[1] // k.shape[1]
    output, aux = _of_output(module, q.shape[1], v.shape[3]).unflatten(0, (H, G)), found["given"].get("s_aux")
    added: dict[str, list[Tensor]] = {name: [] for name in "qkvo"}
    for h in range(H):
        group, own = slice(h * G, h * G + G), slice(h, h + 1)
        given = found["given"] | {"s_aux": None if aux is None else aux[group]}
        asked, keys, values = _costs(q[:, group], k[:, own], v[:, own], output[h], given)
        rows = k[0, h, there].unflatten(0, (pages, _PAGE)).double()
        centred = (rows - rows.mean(1, keepdim=True)).flatten(0, 1)
        for name, x, cost in (
            ("q", q[0, group].flatten(0, 1), asked.flatten()),
            ("k", centred, keys[:, there].sum(0)),
            ("v", v[0, h, there], values[:, there].sum(0)),
        ):
            x, cost = (
                x.double(),
                cost + _LEAST * cost.mean() + 1e-30,
            )  # no row counts nothing, for the sake of other texts
            added[name].append((x * cost[:, None]).mT @ x)
        added["o"].append((output[h] * (values.sum(1)[:, None, None] + 1e-30)).sum(0))
    for name, parts in added.items():
        found[name] = found.get(name, 0) + torch.stack(parts)


def _axes(moments: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Eigenvalues (in descending order, at least `floor` times the largest) and eigenvectors of [H, D, D]."""
    values, axes = torch.linalg.eigh(moments)
    values, axes = values.flip(-1), axes.flip(-1)
    return values.clamp_min(values[..., :1] * floor + 1e-300), axes


def _map(moments: Tensor, metric: Tensor) -> tuple[Tensor, Tensor]:
    """(map [H, D, D] of rows to the principal axes of `moments` in the metric, sorted, each scaled to the variance that
    its noise costs; deviations [H, D] of the axes in the metric, in units of their mean)."""
    if not bool(moments.isfinite().all() and metric.isfinite().all()):
        raise ValueError("calibrate: expected finite q, K and V on this text, got NaN or Inf")
    values, axes = _axes(metric, 1e-4)
    root = axes * values.sqrt()[..., None, :] @ axes.mT
    variance, principal = _axes(root @ moments @ root, 1e-6)
    deviation, D = variance.sqrt(), moments.shape[-1]
    found = (root @ (principal * deviation.rsqrt()[..., None, :])).float()
    alive = (moments.diagonal(dim1=1, dim2=2).sum(-1) > 0) & (metric.diagonal(dim1=1, dim2=2).sum(-1) > 0)
    found = torch.where(alive[:, None, None], found, torch.eye(D, device=found.device))  # identity without rows
    deviation = torch.where(alive[:, None], deviation / deviation.mean(-1, keepdim=True), 1.0)
    return found.cpu(), deviation.float().cpu()


@torch.no_grad()
def measured(
    model: PreTrainedModel, ids: Any, measure: Measure, *, context: int = 2048, tokens: int = 16384
) -> dict[int, dict[str, Any]]:
    """Runs `model` on a text and returns {layer: dict}, filled by `measure` and with the attention module ("module");
    see `calibrate`.

    measure: called with the dict of the layer, its module, and q [B, Hq, T, D], k [B, H, T, D] and v of each call.
    """
    text = text_config(model.config)
    several = isinstance(ids, (list, tuple)) and len(ids) > 0 and not isinstance(ids[0], numbers.Integral)
    texts = [checks.as_tensor(x).reshape(-1) for x in (ids if several else [ids])]
    context = checks.integer("context", context, _SINKS + 4 * _PAGE)
    context = min(context, getattr(text, "max_position_embeddings", None) or context)
    tokens = checks.integer("tokens", tokens, context * len(texts))
    if getattr(text, "kv_lora_rank", None):
        raise ValueError("calibrate: expected a model with K and V heads, got one with latent attention (MLA)")
    if (least := min(map(len, texts))) < context:
        raise ValueError(f"calibrate: ids: expected at least {context} tokens, got {least}; use a longer text")
    found: dict[int, dict[str, Any]] = {}

    def observe(module: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> None:
        layer = found.setdefault(module.layer_idx, {"module": module})
        layer["given"] = options
        measure(layer, module, q, k, v)

    with observing(model, observe):
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
    """Measures a calibration of `model` on a text. Takes minutes on a CPU.

    Args:
        model: a transformers model.
        ids: int [N], tokens of a text similar to what will be cached; or a list of several texts, read in equal parts.
        context: tokens per forward pass, at most the model's positions.
        tokens: maximum number of tokens to read.

    Returns a `Calibration`. Raises ValueError for a text that is too short, K or V that are not finite, models with
    latent attention, and models without transformers' attention interface.
    """
    text = text_config(model.config)
    maps, weights, deviations = {}, {}, {}
    for index, x in measured(model, ids, second_moments, context=context, tokens=tokens).items():
        key, value = _map(x["k"], x["q"]), _map(x["v"], x["o"])
        maps[index], deviations[index] = (key[0], value[0]), (key[1], value[1])
        weights[index] = weights_hash(x["module"]) or ""
    return Calibration(maps, model_hash(text), weights, deviations=deviations)
