"""Positions in the cache, for StreamingLLM beyond the trained length (arXiv 2309.17453, section 3.2).

RoPE scores depend only on the distance between query and key. For the window it is the same in the cache as in the
sequence; the sinks are too far by the number of tokens evicted in between. So every eviction rotates the raw sinks
forward by that number, from the keys as they were written: S rows; nothing else changes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import formats, ops
from ..store.page_store import PageStore
from ..store.serialize import page_size

# Models that rotate halves of the head, as Llama; others pair adjacent dims, or rotate a part of the head.
_MODELS = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "olmo2")


def frequencies(config: Any, head_dim: int) -> Tensor:
    """Frequencies of a model's RoPE: float64 [Dk / 2]. Raises ValueError if keys cannot be rotated afterwards: other
    positions (ALiBi, learned, mrope), or frequencies that depend on the length (dynamic, longrope)."""
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
    """The sinks of a layer, rotated forward by the number of tokens evicted from each row."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[int, Tensor]] = {}  # (rotated by, keys as they were written: float64 [H, S, Dk])

    def to(self, device: torch.device) -> None:
        """Moves its tensors to `device`."""
        self.rows = {b: (n, k.to(device)) for b, (n, k) in self.rows.items()}

    def select(self, index: list[int]) -> None:
        """Row i becomes old row index[i]."""
        self.rows = {i: self.rows[b] for i, b in enumerate(index) if b in self.rows}

    def state(self) -> tuple[dict[int, int], dict[str, Tensor]]:
        """State for files: by how much each row's sinks were rotated, and their keys."""
        far = {b: n for b, (n, _) in self.rows.items()}
        return far, {f"sinks.{b}": k.cpu() for b, (_, k) in self.rows.items()}

    def restore(self, store: PageStore, far: dict[Any, Any], tensors: dict[str, Any]) -> None:
        """Restores what `state` returned. Raises ValueError, KeyError or TypeError for other data."""
        shape = (store.num_kv_heads, store.sinks, store.head_dim)
        for b, n in far.items():
            keys = tensors[f"sinks.{b}"]
            if tuple(keys.shape) != shape or not 0 <= int(b) < store.batch:
                raise ValueError(f"expected sinks {list(shape)}, got {list(keys.shape)}")
            self.rows[int(b)] = int(n), keys.to(store.device)

    def move(self, store: PageStore, frequencies: Tensor, evicted: list[int], keys: Tensor) -> None:
        """Rotates the sinks by `evicted` tokens for each row; keys: the sinks as stored, float [B, H, S, Dk]."""
        for b, n in enumerate(evicted):
            before, k = self.rows.get(b, (0, keys[b].double()))
            if n == before:
                continue
            angle = (n * frequencies) % (2 * torch.pi)
            cos, sin = angle.cos().repeat(2), angle.sin().repeat(2)
            half = k.shape[-1] // 2
            turned = torch.cat([-k[..., half:], k[..., :half]], -1)
            _write(store, b, (k * cos + turned * sin).to(store.dtype))
            self.rows = {**self.rows, b: (n, k)}  # copies of the layer share `rows`


def own_sinks(store: PageStore) -> None:
    """Copies sink pages that are shared, before they are rotated. On MemoryError some are copied already, which has no
    other effect."""
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
    """Writes keys [H, S, Dk] to the sink page of row b."""
    raw, tokens = formats.resolve("raw", store.dtype), -(-store.sinks // 16) * 16
    k = pad(keys, (0, 0, 0, tokens - store.sinks))[None]
    pages = ops.pack(k, k.new_zeros(*k.shape[:3], store.page_dims[1]), raw, raw, tokens)[0, 0]
    H, size = pages.shape
    of_keys = tokens * k.shape[3] * k.itemsize  # a page starts with the keys
    offset = formats.offset_of(int(store.table.entries[b, 0, 0]))
    store.views()[0][offset : offset + H * size].view(H, size)[:, :of_keys] = pages[:, :of_keys]
