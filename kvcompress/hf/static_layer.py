"""Layers with a fixed number of slots, for `torch.compile(fullgraph=True)`.

State that changes between steps is opaque to the graph: the length is a tensor that the graph increments, and one op
per layer does what `update` and attention do outside of graphs. So one graph of a decode step serves all steps.

On a GPU the graph contains only kernels: work on the host for a step is done around it (`KVCache.step`), in tensors at
fixed addresses (`kvcompress.cuda_graph`).
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import pad

from ..cuda_graph import CUDAGraphLayer, steps
from . import attention
from .forward_pass import LayeredCache
from .latent import Latents, absorbed, values_of
from .layer import Block, PagedLayer
from .lazy import dense, lazy_pair
from .masks import WindowMask
from .sliding_layer import SlidingPagedLayer

_LIVE: weakref.WeakValueDictionary[int, StaticPagedLayer] = weakref.WeakValueDictionary()
_COUNT = itertools.count()
FEW = 16  # maximum number of new tokens for weight absorption (MLA) in a graph for all lengths


class StaticPagedLayer(PagedLayer):
    """A paged layer with at most `slots` slots."""

    is_compileable = True

    in_graph = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.graph_layer: CUDAGraphLayer | None = None  # on a GPU, for decode steps
        number = next(_COUNT)
        _LIVE[number] = self
        with torch.inference_mode(False):  # used inside and outside of inference mode
            self.handle, self.length = torch.tensor(number, device="cpu"), torch.tensor(0, device="cpu")

    def changed(self) -> None:
        super().changed()
        if not self.in_graph:
            self.length.fill_(self.store.seen)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Context manager for calls from a graph, which increments `length` itself: nothing else may write it before
        the end of the graph, since a compiler may read it at any time."""
        self.in_graph = True
        try:
            yield
        finally:
            self.in_graph = False

    def moved(self) -> None:
        self.changed()
        self.store.page_store.table.reserve(self.slots)  # a graph reads fixed addresses
        self.graph_layer = CUDAGraphLayer(self.store, self.slots) if self.store.page_store.mirror else None

    def get_seq_length(self) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            return super().get_seq_length()
        return (
            self.graph_layer.device_arrays["seen"][0] if self.graph_layer and self.graph_layer.planned else self.length
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """All slots for a decode step, which may run in a compiled model; for a prompt, as many as needed."""
        fixed = torch.compiler.is_dynamo_compiling() or query_length == 1
        return (self.slots, 0) if fixed else super().get_mask_sizes(query_length)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.graph_layer:
            self.graph_layer.drop()
        seen = super().get_seq_length() + key_states.shape[2]
        if seen > self.slots:
            raise ValueError(f"KVCache: max_length: expected at most {self.slots} slots, got {seen}; crop or reset it")
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        if self.staged is None and key_states.shape[2] == 1:
            keys, values = (pad(x, (0, 0, 0, self.slots - x.shape[2])) for x in (keys, values))
        return keys, values

    def attends(self, k: torch.Tensor | None = None) -> bool:
        """True if attention in a graph can use the layer; with latents, for calls of few tokens on the CPU."""
        here = not (self.graph_layer and self.forward_pass.reused)  # kernels in a graph append in each attention
        if self.options["latent"]:
            here = self.graph_layer is None and k is not None and k.shape[1] == 1 and k.shape[2] <= FEW
        return here and self.forward_pass.fused

    def traceable(self, k: torch.Tensor) -> bool:
        """True if `update` with k can be part of a graph; on a GPU only inside `KVCache.step`."""
        if self.graph_layer is None:
            return self.is_initialized or k.device.type == "cpu"
        return self.graph_layer.planned and k.shape[2] == self.graph_layer.tokens and self.attends()

    def traced(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`update` in a graph: with the kvcompress attention, k carries a reference to the layer; else returns dense K
        and V of all slots."""
        if self.graph_layer is None:
            self.length.add_(k.shape[2])
        v = attention.suited(v, k)
        if self.attends(k):
            k = k.view(k.shape)  # attributes of an output of split() cannot be traced
            attention.OPEN.layer, attention.OPEN.key = self, k
            k.kvcompress_layer, k.kvcompress_value = self, v  # type: ignore[attr-defined]
            return k, v
        return self.traced_dense(k, v)

    def traced_dense(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores k and v in a graph; returns dense K and V of all slots."""
        attention.OPEN.layer = attention.OPEN.key = None
        return torch.ops.kvcompress.static_dense(k, v, self.handle, self.slots)

    def traced_attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
        scale: float, window: int, softcap: float, s_aux: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """Attention in a graph, on the result of `traced`: out [B, T, Hq, Dv]. The first call stores k and v."""
        stored = attention.OPEN.key is not key
        attention.OPEN.layer = attention.OPEN.key = None
        if self.graph_layer:
            return self.graph_layer.attend(
                query, key, value, scale=scale, window=window, softcap=softcap, s_aux=s_aux
            )[0]  # fmt: skip
        module: Any = getattr(key, "kvcompress_module", None)  # of latents
        query = query if module is None else absorbed(module, query)
        options = (mask, s_aux, scale, window, softcap, stored)
        out = torch.ops.kvcompress.static_attend(query, key, value, self.handle, *options)
        return out if module is None else values_of(module, out)

    def flat_mask(self, mask: torch.Tensor, base: int) -> torch.Tensor | None:
        """The 2D padding mask equivalent to a 4D mask over all slots, or None without padding; the 4D mask itself if it
        hides more."""
        T = mask.shape[2]
        if mask.dtype != torch.bool or mask.shape[1] != 1:
            return mask
        rows = mask[:, 0, :, : base + T]
        last = rows[:, -1]
        if T > 1:
            slots = torch.arange(base + T, device=mask.device)
            if not torch.equal(rows, last[:, None] & (slots <= slots[base:, None])):
                return mask
        return None if bool(last.all()) else last


@contextlib.contextmanager
def step(cache: LayeredCache) -> Iterator[None]:
    """See `KVCache.step`."""
    forward_pass = cache.forward_pass
    static = [layer for layer in cache.layers if isinstance(layer, StaticPagedLayer)]
    paged = [layer for layer in static if layer.is_initialized]
    forward_pass.ready()
    for layer in paged:
        layer.commit()
    if any(layer.graph_layer and not layer.graph_layer.fits() for layer in paged):
        for layer in paged:
            layer.moved()  # triggers one recompilation; later steps need one copy
    graph_layers = [layer.graph_layer for layer in paged if layer.graph_layer]
    if not static or len(graph_layers) not in (0, len(paged)):
        raise ValueError("KVCache: step: expected max_length= and all layers on the same kind of device, got others")
    before: list[int] = []
    try:
        with steps(graph_layers):
            before = [layer.store.seen for layer in paged]
            yield
    except BaseException:
        if before and not all(layer.store.seen > seen for layer, seen in zip(paged, before, strict=True)):
            forward_pass.complete = False
            forward_pass.at = len(cache.layers) - 1  # some layers store tokens outside of the graph
            forward_pass.rollback(before[0])
            for layer in paged:
                layer.changed()
        raise
    for layer in paged if graph_layers else ():
        layer.changed()
        layer.evict()  # frees pages outside of a window


def steps_over(cache: LayeredCache, mask: Any) -> bool:
    """True if a decode step can run in `step`: its mask (of the model's call, for all layers or by layer type) shows
    all stored tokens and the new ones, all layers attend in the graph, and no pages are offloaded."""
    if cache.get_seq_length() == 0 or cache.forward_pass.prefetcher is not None:
        return False
    kinds, known = cache.forward_pass.config.layer_types if isinstance(mask, dict) else (), set()
    for layer in cache.layers:
        if not isinstance(layer, StaticPagedLayer):
            continue
        if not layer.attends():
            return False
        own = mask.get(kinds[layer.index]) if isinstance(mask, dict) else mask
        if own is None or (id(own), layer.window) in known:
            continue
        known.add((id(own), layer.window))
        own, base = own.cpu(), layer.store.seen
        flat = layer.flat_mask(own, base) if own.dim() == 4 else own.bool()
        if flat is None:
            continue
        if flat.dim() != 2 or flat.shape[1] != base + 1:
            return False
        pads, fits = layer.forward_pass.split_mask(flat, layer.store, 1)
        if pads is not None or not fits:
            return False
    return True


class StaticSlidingPagedLayer(StaticPagedLayer, SlidingPagedLayer):
    """A static layer with a window or chunks. Other attention gets all slots, with zeros before the window, as a fixed
    shape matters more in a graph than a small one."""

    def start_of(self, seen: int) -> int:
        return 0

    def flat_mask(self, mask: torch.Tensor, base: int) -> torch.Tensor | None:
        if isinstance(mask, WindowMask) or mask.shape[2] != 1 or mask.dtype != torch.bool or mask.shape[1] != 1:
            return SlidingPagedLayer.flat_mask(self, mask, base)
        sliding = self.sliding
        rows, first = mask[:, 0, 0].cpu(), sliding.first_seen(base)
        lo = int(first.min())
        real = sliding.pads.real(base, lo)
        sees = real & (torch.arange(lo, base, device="cpu") >= first[:, None]) if self.chunked else real
        if not torch.equal(rows[:, lo:base], sees.expand(rows.shape[0], -1)):
            return mask
        own = rows[:, base : base + 1]
        if bool(own.all()) and not any(sliding.pads.runs):
            return None
        return torch.cat([sliding.pads.real(base), own], 1).to(mask.device)


# ---------------------------------------------------------------- ops

_library = torch.library.Library("kvcompress", "FRAGMENT")
_library.define(
    "static_attend(Tensor q, Tensor k, Tensor v, Tensor handle, Tensor? mask, Tensor? s_aux, "
    "float scale, int window, float softcap, bool stored) -> Tensor"
)
_library.define("static_dense(Tensor k, Tensor v, Tensor handle, int slots) -> (Tensor, Tensor)")


def _update(layer: StaticPagedLayer, k: torch.Tensor, v: torch.Tensor) -> tuple[Any, Any]:
    cache = layer.forward_pass.cache()
    assert cache is not None  # whoever holds the layer holds the cache
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))  # a compiler may choose any strides
    return cache.update(k, v, layer.index)


def _attend(q, k, v, handle, mask, s_aux, scale, window, softcap, stored):
    layer, rank = _LIVE[int(handle)], k.shape[3]
    options = {"scaling": scale, "sliding_window": window, "softcap": softcap, "s_aux": s_aux, "is_causal": True}
    with layer.inside():
        if stored:  # by the last update, with k and v
            block = Block(layer, k, v, layer.store.seen - k.shape[2])
            block.stamp = layer.stamp
        pair = lazy_pair(block) if stored else _update(layer, k, v)
        if q.shape[3] > rank:
            pair = lazy_pair(pair[0].block, Latents, (rank + v.shape[3], rank))
        return attention.kvcompress_attention_forward(_EVAL, q, *pair, mask, **options)[0]


def _dense(k, v, handle, slots):
    layer = _LIVE[int(handle)]
    with layer.inside():
        pair = [dense(x) for x in _update(layer, k, v)]
    return tuple(pad(x, (0, 0, 0, slots - x.shape[2])).clone() for x in pair)


_EVAL = torch.nn.Module().eval()
_library.impl("static_attend", _attend, "CPU")
_library.impl("static_dense", _dense, "CPU")
for _op in (torch.ops.kvcompress.static_attend, torch.ops.kvcompress.static_dense):
    torch.fx.node.has_side_effect(_op.default)  # they store tokens: must not be eliminated or repeated


@torch.library.register_fake("kvcompress::static_attend")
def _(q, k, v, handle, mask, s_aux, scale, window, softcap, stored):
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1], (k if q.shape[3] > k.shape[3] else v).shape[3]))


@torch.library.register_fake("kvcompress::static_dense")
def _(k, v, handle, slots):
    return k.new_empty((*k.shape[:2], slots, k.shape[3])), v.new_empty((*v.shape[:2], slots, v.shape[3]))
