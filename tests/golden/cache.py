"""`.kvc` files of this version with a layer in every format; every later version must read them.

    python tests/golden/cache.py    writes <version>/*.kvc and *.npz next to this file, if this version has none

Run it before a release; never again for a released version."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parent.parent))
from golden.make import bells

import kvcompress
from kvcompress import formats
from kvcompress.hf.save_load import model_hash
from kvcompress.quantization.calibration import Calibration

HERE = Path(__file__).parent
H, D, TOKENS, PAGE = 1, 32, 40, 16


def config(file: str) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(hidden_size=32, num_attention_heads=1, num_key_value_heads=H, head_dim=D, vocab_size=64,
                       intermediate_size=64, num_hidden_layers=len(FILES[file]))  # fmt: skip


# {file: formats}: one layer per format, in this order; later formats get separate files
FILES = {
    "cache": ("raw", "int8", "fp8_e4m3", "int4", "int8_asym", "fp8_e5m2", "int2", "int4_token", "int4_g32",
              "int4_asym", "int2_asym", "kivi4", "kivi2", "nvfp4", "mxfp4"),
    "int4_lloyd": ("int4_lloyd",),
    "cal2": ("cal2",),
    "int3": ("int3",),
}  # fmt: skip


def calibration(file: str) -> Calibration | None:
    """Exact matrices: a permutation of dims, times two."""
    if not set(FILES[file]) & set(formats.CALIBRATED):
        return None
    maps = 2 * torch.eye(D).roll(3, 0)[None]
    return Calibration({0: (maps, maps)}, model_hash(config(file)), {0: ""})


def filled(file: str) -> kvcompress.KVCache:
    cache = kvcompress.KVCache(config(file), "int8", per_layer=dict(enumerate(FILES[file])), page_size=PAGE,
                               calibration=calibration(file))  # fmt: skip
    for begin, end in ((0, 37), (37, TOKENS)):  # pages are sealed when the next call has moved on
        for i in range(len(FILES[file])):
            k, v = (torch.from_numpy(bells(2 * i + side, (1, H, TOKENS, D))) for side in (0, 1))
            cache.update(k[:, :, begin:end], v[:, :, begin:end], i)
            cache.layers[i].commit()
    return cache


def dense(cache: kvcompress.KVCache, file: str) -> dict[str, np.ndarray]:
    """The decoded contents of each layer, fp32."""
    return {f"{FILES[file][i]}.{name}": x.numpy() for i, layer in enumerate(cache.layers)
            for name, x in zip("kv", layer.store.dense(), strict=True)}  # fmt: skip


def write() -> None:
    """Writes the files that this version lacks."""
    folder = HERE / kvcompress.__version__
    folder.mkdir(exist_ok=True)
    for file in FILES:
        if not (folder / f"{file}.kvc").exists():
            cache = filled(file)
            cache.save(folder / f"{file}.kvc")
            np.savez_compressed(folder / f"{file}.npz", **dense(cache, file))


if __name__ == "__main__":
    write()
