"""A `.kvc` file of this version with a layer in every format: every later version must read it.

    python tests/golden/cache.py    writes <version>/cache.kvc and <version>/dense.npz beside this file, once a version

Before a release; never again for a version that is out.
"""

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

HERE = Path(__file__).parent
H, D, TOKENS, PAGE = 1, 32, 40, 16


def config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(hidden_size=32, num_attention_heads=1, num_key_value_heads=H, head_dim=D, vocab_size=64,
                       intermediate_size=64, num_hidden_layers=len(NAMES))  # fmt: skip


# The formats of version 0.1.0, in its order; formats that come later get a file of their own
NAMES = ("raw", "int8", "fp8_e4m3", "int4", "int8_asym", "fp8_e5m2", "int2", "int4_token", "int4_g32", "int4_asym",
         "int2_asym", "kivi4", "kivi2", "nvfp4", "mxfp4")  # fmt: skip


def filled() -> kvcompress.KVCache:
    cache = kvcompress.KVCache(config(), "int8", per_layer=dict(enumerate(NAMES)), page_size=PAGE)
    for begin, end in ((0, 37), (37, TOKENS)):  # pages seal when they are left behind
        for i in range(len(NAMES)):
            k, v = (torch.from_numpy(bells(2 * i + side, (1, H, TOKENS, D))) for side in (0, 1))
            cache.update(k[:, :, begin:end], v[:, :, begin:end], i)
            cache.layers[i].commit()
    return cache


def dense(cache: kvcompress.KVCache) -> dict[str, np.ndarray]:
    """fp32 of what each layer holds."""
    return {f"{NAMES[i]}.{name}": x.numpy() for i, layer in enumerate(cache.layers)
            for name, x in zip("kv", layer.store.dense(), strict=True)}  # fmt: skip


def write() -> None:
    assert set(NAMES) <= set(formats.NAMES)
    folder = HERE / kvcompress.__version__
    cache = filled()
    folder.mkdir()
    cache.save(folder / "cache.kvc")
    np.savez_compressed(folder / "dense.npz", **dense(cache))


if __name__ == "__main__":
    write()
