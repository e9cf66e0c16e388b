"""PagedKV without a model: the pages of one attention layer, without transformers."""

import torch

import kvcompress

kv = kvcompress.PagedKV(num_kv_heads=8, head_dim=128, key="int8", value="int4")
k, v = torch.randn(1, 8, 1000, 128), torch.randn(1, 8, 1000, 128)
kv.append(k, v)  # full pages are sealed, the newest tokens stay raw

q, k, v = torch.randn(1, 32, 1, 128), torch.randn(1, 8, 1, 128), torch.randn(1, 8, 1, 128)
out, lse = kv.attend(q, k, v)  # one decode step: append and attend
print(out.shape, lse.shape)
print(kv)
kv.crop(990)  # remove tokens from slot 990 on
print(kv.seen, {name: kv.stats()[name] for name in ("kept", "bytes", "ratio")})
