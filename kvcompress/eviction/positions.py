"""Positions inside the cache, for StreamingLLM beyond the trained length (2309.17453, section 3.2).

RoPE scores depend on the distance between query and key alone. Between a query and the window it is the same in the
cache as in the sequence; only the sinks are too far off, by the tokens that were evicted between. So the raw sinks are
rotated forward by that many, from the keys as they were written: S rows at every eviction; nothing else is touched.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import formats, ops
from ..store.page_store import PageStore
from ..store.serialize import page_size

# Halves of the head are rotated, as in Llama; others pair neighbours, or rotate a part of the head.
_MODELS = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "olmo2")


def frequencies(config: Any, head_dim: int) -> Tensor:
    """float64 [Dk / 2] of a model's RoPE. ValueError where keys cannot be rotated any further: another kind of position
    (ALiBi, learned, mrope), or frequencies that change with the length (dynamic, longrope)."""
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "none")
    if config.model_type not in _MODELS or kind not in ("default", "linear"):
        raise ValueError(
            f"KVCache: policy: expected a model with plain rotary positions ({', '.join(_MODELS)}; rope_type default "
            f"or linear), got {config.model_type} with {kind}; use positions='original', or another policy"
        )
    steps = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    return rope["rope_theta"] ** -steps / (rope.get("factor", 1.0) if kind == "linear" else 1.0)


class MovedSinks:
    """The sinks of a layer, rotated forward by what has been evicted from each row."""

    def __init__(self, frequency: Tensor) -> None:
        self.frequency = frequency
        self.rows: dict[int, tuple[int, Tensor]] = {}  # how far, and as they were written: float64 [H, S, Dk]

    def clone(self) -> MovedSinks:
        """An independent copy."""
        twin = MovedSinks(self.frequency)
        twin.rows = dict(self.rows)
        return twin

    def to(self, device: torch.device) -> None:
        """Rotates there."""
        self.frequency = self.frequency.to(device)
        self.rows = {b: (n, k.to(device)) for b, (n, k) in self.rows.items()}

    def reset(self) -> None:
        """The layer is empty."""
        self.rows = {}

    def select(self, index: list[int]) -> None:
        """Row i becomes old row index[i]."""
        self.rows = {i: self.rows[b] for i, b in enumerate(index) if b in self.rows}

    def state(self) -> tuple[dict[int, int], dict[str, Tensor]]:
        """For files: how far each row's sinks were rotated, and their keys."""
        far = {b: n for b, (n, _) in self.rows.items()}
        return far, {f"sinks.{b}": k.cpu() for b, (_, k) in self.rows.items()}

    def restore(self, store: PageStore, far: dict[Any, Any], tensors: dict[str, Any]) -> None:
        """The way back. Raises ValueError, KeyError, TypeError for what `state` has not given."""
        shape = (store.num_kv_heads, store.sinks, store.head_dim)
        for b, n in far.items():
            keys = tensors[f"sinks.{b}"]
            if tuple(keys.shape) != shape or not 0 <= int(b) < store.batch:
                raise ValueError(f"expected sinks {list(shape)}, got {list(keys.shape)}")
            self.rows[int(b)] = int(n), keys.to(store.device)

    def move(self, store: PageStore, evicted: list[int], keys: Tensor) -> None:
        """`evicted` tokens of each row were dropped; keys: float [B, H, S, Dk], the sinks as the layer holds them."""
        for b, n in enumerate(evicted):
            before, k = self.rows.get(b, (0, keys[b].double()))
            if n == before:
                continue
            angle = (n * self.frequency) % (2 * torch.pi)
            cos, sin = angle.cos().repeat(2), angle.sin().repeat(2)
            half = k.shape[-1] // 2
            turned = torch.cat([-k[..., half:], k[..., :half]], -1)
            _write(store, b, (k * cos + turned * sin).to(store.dtype))
            self.rows[b] = n, k


def own_sinks(store: PageStore) -> None:
    """Sinks that rows share become each row's own, before anything moves. MemoryError: some are; nothing else is."""
    table, pool = store.table, store.pool
    for b, entry in enumerate(table.entries[:, 0, 0].tolist()):
        offset = formats.offset_of(entry)
        if entry >= 0 and pool.refs(offset) > 1:
            size = page_size(store, formats.pair_of(entry), 0, 1)
            fresh = pool.alloc(size)
            arena = store.views()[0]
            arena[fresh : fresh + size] = arena[offset : offset + size]
            table.entries[b, 0, 0] = formats.entry_of(fresh, formats.pair_of(entry))
            pool.unref(offset)


def _write(store: PageStore, b: int, keys: Tensor) -> None:
    """keys [H, S, Dk] into the sink page of row b."""
    raw, tokens = formats.resolve("raw", store.dtype), -(-store.sinks // 16) * 16
    k = pad(keys, (0, 0, 0, tokens - store.sinks))[None]
    pages = ops.pack(k, k.new_zeros(*k.shape[:3], store.page_dims[1]), raw, raw, tokens)[0, 0]
    H, size = pages.shape
    of_keys = tokens * k.shape[3] * k.itemsize  # come first in a page
    offset = formats.offset_of(int(store.table.entries[b, 0, 0]))
    store.views()[0][offset : offset + H * size].view(H, size)[:, :of_keys] = pages[:, :of_keys]
