"""OSCAR's rotations (arXiv 2605.17757, and its authors' compute_kv_rotation.py), as a calibration for `fake:oscar2`: K
in the eigenvectors of its queries' second moments, V in those of its own, with tokens weighted by K and the
queries; each followed by a Hadamard transform. One per KV head, which their later release found better than one per
layer. Their bit-reversal permutation is omitted: it distributes axes over groups, and a row of 64 is a single
group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcompress.hf.calibrate import measured
from kvcompress.hf.configs import text_config
from kvcompress.hf.modules import weights_hash
from kvcompress.hf.save_load import model_hash
from kvcompress.quantization.calibration import Calibration
from kvcompress.tools.evaluation.published import hadamard


def _covariances(found: dict[str, Any], module: Any, q: Tensor, k: Tensor, v: Tensor) -> None:
    queries = q.unflatten(1, (k.shape[1], -1)).transpose(0, 1).flatten(1, 3).double()
    keys, values = (x.transpose(0, 1).flatten(1, 2).double() for x in (k, v))
    seen = queries.mT @ queries / queries.shape[1]
    weight = (keys @ seen * keys).sum(-1)
    weight = weight / weight.mean(-1, keepdim=True).clamp_min(1e-12)
    found["key"] = found.get("key", 0) + seen
    found["value"] = found.get("value", 0) + (values * weight[..., None]).mT @ values


def rotations(model: PreTrainedModel, ids: Any, **how: Any) -> Calibration:
    """Measured on texts, like `calibrate`."""
    layers, weights = {}, {}
    for index, found in measured(model, ids, _covariances, **how).items():
        axes = (torch.linalg.eigh(found[side])[1] for side in ("key", "value"))
        key, value = ((x @ hadamard(x.shape[-1]).double()).float().contiguous() for x in axes)
        layers[index], weights[index] = (key, value), weights_hash(found["module"]) or ""
    return Calibration(layers, model_hash(text_config(model.config)), weights)
