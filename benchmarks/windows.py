"""Size of sliding-window layers: pages of a steady decode, as a fraction of the `window - 1` tokens in 16 bits that
transformers' layers keep. 12 layers of 8 heads of 128, bf16, after a prompt longer than the window.

    python benchmarks/windows.py"""

import torch

from kvcompress import _C, PagedKV
from kvcompress.hf.layer_options import window_options

LAYERS, HEADS, DIM = 12, 8, 128


def share(window: int, key: str) -> float:
    """Bytes held (spare capacity and tables included) / bytes of the dense window; mean over 128 steps."""
    pool = _C.Pool()
    options = window_options({"key": key, "page_size": 64}, {}, "sliding_attention", {"sliding_window": window})
    layers = [PagedKV(HEADS, DIM, dtype=torch.bfloat16, pool=pool, **options) for _ in range(LAYERS)]
    x = torch.randn(1, HEADS, window + 300, DIM).bfloat16()
    for layer in layers:
        layer.append(x, x)
    held = 0
    for _ in range(128):
        for layer in layers:
            layer.append(x[:, :, :1], x[:, :, :1])
        held += pool.stats()["resident"] + sum(layer.page_store.parts()["tables"] for layer in layers)
    return held / 128 / (LAYERS * (window - 1) * layers[0].page_store.token_bytes())


if __name__ == "__main__":
    print("window  " + "  ".join(f"{key:>6}" for key in ("raw", "int8", "int4", "int2")))
    for window in (128, 512, 1024, 4096, 8192):
        print(f"{window:6}  " + "  ".join(f"{share(window, key):6.2f}" for key in ("raw", "int8", "int4", "int2")))
