"""Measures the errors of our attention call by call, on the CPU or a device."""

import contextlib
from unittest import mock

import torch
from generation import error

from kvcompress.hf.attention import eager
from kvcompress.hf.layer import PagedLayer


def sees_of(layer, block, mask, T):
    """bool [B or 1, 1, T, kv]: the tokens of dense K and V that each query sees, by definition."""
    slots = torch.arange(block.base + block.k.shape[2])
    asks, mask = slots[len(slots) - T :, None], torch.ones(1, len(slots), dtype=torch.bool) if mask is None else mask
    sees = (slots <= asks) & mask[:, None]
    if layer.chunked:
        first = mask.int().argmax(1)[:, None, None]
        sees &= (slots - first) // layer.window == (asks - first) // layer.window
    elif layer.window:
        sees &= slots > asks - layer.window
    return sees[:, None, :, block.start :]


@contextlib.contextmanager
def shadow():
    """Collects the errors of every fused call, compared with torch's attention over the decoded pages and the exact
    own tokens."""
    original, calls = PagedLayer.attend, []

    def attend(layer, block, query, mask, **options):
        store = layer.store.clone()
        out = original(layer, block, query, mask, **options)
        if out is not None:
            own = None if mask is None else mask[:, block.base :]
            if store.seen > block.base:  # own tokens of another layer, which are stored
                k, v = store.dense(block.start)
                k[:, :, block.base - block.start :], v[:, :, block.base - block.start :] = block.k, block.v
            else:
                k, v = store.append_dense(block.k, block.v, own, block.start)
            q, k, v, whole, s_aux = (x if x is None else x.cpu() for x in (query, k, v, mask, options["s_aux"]))
            sees = sees_of(layer, block, whole, q.shape[2])
            if layer.store.page_store.latent:
                k, v = torch.cat([k, v], -1), k
            want, _ = eager(q, k, v, sees, options["scale"], options["softcap"], s_aux)
            calls.append(error(out.cpu().transpose(1, 2), want))
        return out

    with mock.patch.object(PagedLayer, "attend", attend):
        yield calls
