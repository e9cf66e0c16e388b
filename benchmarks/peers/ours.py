"""kvcompress and torch on the shapes of this comparison. Usage: ours.py SHAPE THREADS"""

from __future__ import annotations

import torch
from timing import LATENT, arguments, report

from kvcompress import PagedKV

shape, threads = arguments()
B, Hq, H, D, S, T = shape
torch.set_num_threads(threads)
g = torch.Generator().manual_seed(0)
k, v, q = (torch.randn(B, heads, n, D, generator=g).bfloat16() for heads, n in ((H, S), (H, S), (Hq, T)))
dims: dict = {"head_dim": D}
if latent := H == 1:  # the rotary part has 8 bits, except with raw
    k, v = k[..., :LATENT], k[..., LATENT:]
    dims = {"head_dim": LATENT, "value_dim": D - LATENT, "latent": True}
for name in ("raw", "int8", "fp8_e4m3", "int4", "int2"):
    side = {"key": name, "value": "int8" if latent and name != "raw" else name}
    kv = PagedKV(H, batch=B, dtype=torch.bfloat16, **side, **dims)
    if T == 1:
        kv.append(k, v)
        kv.append(k[:, :, :1], v[:, :, :1])  # seals the page that the previous call filled
        report("kvcompress", name, kv.stats()["bytes"] / 1e6, lambda kv=kv: kv.attend(q))
    else:
        kv.append(k[:, :, : S - T], v[:, :, : S - T])
        own = k[:, :, S - T :].contiguous(), v[:, :, S - T :].contiguous()
        report("kvcompress", name, kv.stats()["bytes"] / 1e6, lambda kv=kv, own=own: kv.clone().attend(q, *own))
attend = torch.nn.functional.scaled_dot_product_attention
if T == 1:
    folded = q.view(B, H, Hq // H, D)
    k, v = (torch.cat([k, v], 3), k.contiguous()) if latent else (k, v)
    report("torch", "sdpa bf16 folded", (k.nbytes + v.nbytes) / 1e6, lambda: attend(folded, k, v))
else:
    see = torch.arange(S)[None] <= torch.arange(S - T, S)[:, None]
    report("torch", "sdpa bf16", (k.nbytes + v.nbytes) / 1e6, lambda: attend(q, k, v, attn_mask=see, enable_gqa=True))
