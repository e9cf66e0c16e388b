"""Checks whether a model has the weights that a calibration was measured on."""

from __future__ import annotations

import hashlib

import torch

from ..quantization.calibration import Calibration

_SAMPLE = 4096  # elements of each weight


def weights_hash(module: torch.nn.Module) -> str | None:
    """SHA-256 over a sample of each weight of an attention module, as bfloat16; None for offloaded (meta) weights."""
    digest = hashlib.sha256()
    for name, x in module.named_parameters():
        if x.is_meta:
            return None
        flat = x.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // _SAMPLE)].to("cpu", torch.bfloat16)
        digest.update(f"{name} {list(x.shape)}".encode() + some.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def check_weights(calibration: Calibration, layer: int, module: torch.nn.Module) -> None:
    """Raises ValueError unless the weights of `module` are those that layer `layer` was measured on."""
    found = weights_hash(module)
    known = calibration.weights[layer]  # "" if they were offloaded
    if found and known and found != known:
        raise ValueError(
            "KVCache: calibration: expected the model that it was measured on, got one with other weights in layer "
            f"{layer} (or the same in float16); run `kvcompress calibrate` for this model"
        )
