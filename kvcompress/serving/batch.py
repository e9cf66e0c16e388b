"""Batch: one forward pass over several sequences, each with a KVCache of its own, for continuous batching.

The tokens of all sequences are concatenated in one row, without padding. Projections and MLPs process N tokens;
attention runs per sequence. All sequences with one new token share a single call of the op: their block tables are
joined for it, their pages are not copied.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from .. import checks, ops
from ..hf.cache import KVCache
from ..hf.layer import Block, PagedLayer
from ..hf.lazy import LazyKV, lazy_pair
from ..layer import PagedKV
from ..store.sequence import slots_of


class Batch(
    checks.ProcessBound,
    Cache,
    instead="create a new Batch for each pass; copy its caches with copy.deepcopy if needed",
):
    """A forward pass over several sequences with a KVCache each. Create a new one for each pass.

        step = kvcompress.Batch([a, b, c], [1, 1, 40])       # two decode, one prefills 40 tokens
        logits = model(ids, position_ids=step.positions, past_key_values=step, logits_to_keep=step.last).logits

    Shapes: N = sum(counts). ids: int64 [1, N], the new tokens of all sequences, concatenated. logits: [1, len(caches),
    vocab], of the last token of each sequence. Between passes sequences may join, leave, and be cropped, copied or
    suspended.

    Args:
        caches: different KVCaches of the model with one pool, batch size 1 and full-attention layers only.
        counts: number of new tokens of each sequence, at least 1. Default: 1 each.

    Attributes:
        bases: list of int, the length of each sequence before the pass.
        positions: int64 [1, N], RoPE positions of the new tokens, on the CPU.
        last: int64 [len(caches)], index of the last token of each sequence.
        counts: list of int.
        failed: after an error, the index of the sequence whose tokens could not be stored, or None if the whole pass
            failed. Leave that sequence out and repeat the pass.

    Raises TypeError or ValueError for invalid arguments; in the pass, ValueError if the attention is not "kvcompress",
    MemoryError if the pool is full. An error of storing or attending, in any layer, restores all caches to their state
    before the pass. An eviction after the pass may fail too, as in a single cache; the tokens then stay stored.

    Caches are not restored after other exceptions: in the model's own code, a hook, your sampling code, or Ctrl-C.
    After the attention of the last layer the new tokens stay stored (get_seq_length() is bases + counts), and repeating
    the pass would store them twice: repeat it with copies made before it (copy.deepcopy shares pages), or crop to
    `bases`, which is exact if the pass added at most a page of tokens and its policy evicted none. Between two layers,
    `rollback()` restores all caches; without it the next pass raises ValueError.
    """

    calibration = True  # one of its caches may have one: `check_weights` checks each

    def __init__(self, caches: Sequence[KVCache], counts: Sequence[int] | None = None) -> None:
        self.caches: list[KVCache] = checks.listed("Batch: caches", caches, "KVCaches")
        told = [1] * len(self.caches) if counts is None else checks.listed("Batch: counts", counts, "ints")
        self.counts = [checks.integer("counts", n, 1) for n in told]
        if not self.caches or len(self.counts) != len(self.caches):
            raise ValueError(
                f"Batch: expected caches and a count for each, got {len(self.caches)} and {len(self.counts)}"
            )
        for i, cache in enumerate(self.caches):
            _check(i, cache, self.caches[0])
        if len({id(cache) for cache in self.caches}) < len(self.caches):
            raise ValueError("Batch: expected each cache once, got one twice; copy.deepcopy() shares its pages")
        self.bases = [cache.get_seq_length() for cache in self.caches]
        ends = list(accumulate(self.counts))
        self.parts = [slice(end - n, end) for end, n in zip(ends, self.counts, strict=True)]
        self.last = torch.tensor(ends, device="cpu") - 1
        self.positions = torch.cat(
            [torch.arange(b, b + n, device="cpu") for b, n in zip(self.bases, self.counts, strict=True)]
        )[None]
        self.failed: int | None = None
        super().__init__(layers=[])  # empty, so that masks cover the new tokens alone

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[LazyKV, LazyKV]:
        """Takes k [1, H, N, Dk] and v [1, H, N, Dv]; returns a LazyKV for the attention function."""
        if not self.caches[0].forward_pass.fused:
            raise ValueError("Batch: expected kvcompress attention, got another; call kvcompress.enable(model)")
        for name, x in (("k", key_states), ("v", value_states)):
            if x.dim() != 4 or x.shape[0] != 1 or x.shape[2] != sum(self.counts):
                raise ValueError(
                    f"Batch: {name}: expected [1, H, {sum(self.counts)}, D], the concatenated tokens of all sequences, "
                    f"got {list(x.shape)}"
                )
        rows: Any = _Rows(self, layer_idx)
        rows.staged = Block(rows, key_states, value_states, 0)
        return lazy_pair(rows.staged)

    def rollback(self, base: int = 0) -> None:
        """Restores all caches after an error before the last layer has stored its tokens; later it does nothing. (Name
        and argument are those of `ForwardPass.rollback`.)"""
        for cache, seen in zip(self.caches, self.bases, strict=True):
            cache.forward_pass.rollback(seen)

    def check_weights(self, module: torch.nn.Module) -> None:
        """`ForwardPass.check_weights` of all caches."""
        for cache in self.caches:
            cache.forward_pass.check_weights(module)


def _check(i: int, cache: Any, first: KVCache) -> None:
    if not isinstance(cache, KVCache):
        raise TypeError(f"Batch: caches[{i}]: expected a KVCache, got {type(cache).__name__}")
    cache.forward_pass.check_there()
    if cache.pool is not first.pool or cache.forward_pass.config is not first.forward_pass.config:
        raise ValueError(
            f"Batch: caches[{i}]: expected the same model and pool as caches[0], got another; see KVCache(pool=)"
        )
    for index, layer in enumerate(cache.layers):
        if type(layer) is not PagedLayer:
            raise ValueError(
                f"Batch: caches[{i}]: expected full-attention layers, got {type(layer).__name__} at {index}"
            )
        if layer.is_initialized and (layer.commit() or layer.store.batch) != 1:
            raise ValueError(f"Batch: caches[{i}]: expected a cache of one sequence, got {layer.store.batch}")


class _Rows:
    """One layer of a Batch, in place of a PagedLayer. staged: the new K and V of all sequences."""

    window, stamp = 0, -1

    def __init__(self, batch: Batch, index: int) -> None:
        self.batch, self.index, self.forward_pass = batch, index, batch
        self.staged: Block | None = None

    @property
    def store(self) -> Any:
        raise ValueError("Batch: expected causal attention over the pages, got a call that needs dense K and V")

    def start_of(self, seen: int) -> int:
        return 0

    def flat_mask(self, mask: Tensor, base: int) -> Tensor:
        raise ValueError("Batch: expected attention_mask=None, since sequences are not padded, got a mask")

    def attend(self, block: Block, query: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
        """Stores the block and attends: query [1, Hq, N, Dk] -> out [1, N, Hq, Dv]."""
        if mask is not None:
            self.flat_mask(mask, 0)
        self.staged = None
        batch, k, v = self.batch, block.k, block.v
        layers = [cache.layers[self.index] for cache in batch.caches]
        together: dict[Any, list[int]] = defaultdict(list)
        for i, (cache, layer, part) in enumerate(zip(batch.caches, layers, batch.parts, strict=True)):
            batch.failed = i  # if anything below raises
            cache.forward_pass.begin(self.index, layer)
            usual = batch.counts[i] == 1 and layer.format_checked and layer.store.seen > 0
            if not usual:
                layer.fit(k[:, :, part], v[:, :, part])
            rows = together[_kind(layer.store) if batch.counts[i] == 1 else i]
            if not (usual and rows):  # what the first row of a kind takes, the others take as well
                layer.store.check_pair(k[:, :, part], v[:, :, part])
                layer.before_append(batch.bases[i], k[:, :, part])
            rows.append(i)
            batch.failed = None
        out = query.new_empty(
            1, query.shape[2], query.shape[1], (k if layers[0].store.page_store.latent else v).shape[3]
        )
        for rows in together.values():
            if len(rows) == 1:
                part = batch.parts[rows[0]]
                batch.failed = rows[0]
                own, _ = layers[rows[0]].store.attend_checked(
                    query[:, :, part], k[:, :, part], v[:, :, part], None, **options
                )
                out[:, part] = own
                batch.failed = None
            else:
                at = slice(None) if len(rows) == query.shape[2] else batch.last[rows]
                q1, k1, v1 = (x[0, :, at].transpose(0, 1).unsqueeze(2) for x in (query, k, v))
                out[0, at] = attend_rows([layers[i].store for i in rows], q1, k1, v1, **options)[:, 0]
        for layer, base in zip(layers, batch.bases, strict=True):
            layer.after_append(base)
        return out


def _kind(store: PagedKV) -> Any:
    """Stores with equal kinds can be rows of one joined table. A store that cannot be joined has a unique kind."""
    if type(store) is not PagedKV or store.offload or store.device.type != "cpu" or not store.page_store.as_given:
        return id(store)
    return (
        store.num_kv_heads, store.head_dim, store.value_dim, store.dtype, store.page_size, store.sinks,
        store.page_store.table.rows.shape[1],
    )  # fmt: skip


def attend_rows(
    stores: Sequence[PagedKV], q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int, softcap: float,
    s_aux: Tensor | None,
) -> Tensor:  # fmt: skip
    """`PagedKV.attend` of n layers of batch 1 in one pool, with one new token each, in one call of the op.

    q [n, Hq, 1, Dk], k [n, H, 1, Dk], v [n, H, 1, Dv] -> out [n, 1, Hq, Dv].
    """
    first, tables = stores[0], [store.page_store.table for store in stores]
    asked = [store.eviction is not None and store.eviction.wants_attention(1) for store in stores]
    planned: list[tuple[Any, Any]] = []  # seals, and the raw pages to be sealed
    try:
        for store in stores:  # if one fails, those before it are rolled back
            planned.append(store.page_store.plan(1, None))
        end = max(table.seen for table in tables)
        width = max(table.longest for table in tables) + 1 if any(asked) else 0
        out, lse, received = ops.attend(
            q, k, v, first.page_store.views()[0], *_joined(tables, end), first.page_store.no_mask,
            first.page_store.no_aux if s_aux is None else checks.aux(s_aux, q.shape[1]).cpu(),
            torch.from_numpy(np.concatenate([seals for seals, _ in planned])), end, first.page_size, first.sinks,
            window, scale, softcap, width, 0,
        )  # fmt: skip
        for store, (_, held) in zip(stores, planned, strict=True):
            store.commit(held)
    except BaseException as error:
        # A plan that failed has rolled itself back, but Ctrl-C may come right after one. Committed tables keep theirs.
        for table in tables[: len(planned) + (not isinstance(error, Exception))]:
            table.rollback()
        raise
    for i, store in enumerate(stores):
        if store.eviction:
            own = received[i : i + 1, :, : tables[i].longest if asked[i] else 0].contiguous()
            store.after_append(q[i : i + 1], 1, None, lse[i : i + 1], own, scale=scale, window=window, softcap=softcap)
    return out


def _joined(tables: Sequence[Any], end: int) -> tuple[Tensor, Tensor, Tensor]:
    """(entries, rows, slots) of a joined table with the rows of `tables`, shifted so that each ends before `end`."""
    entries = [table.entries for table in tables]
    lines, columns = entries[0].shape[1], max(e.shape[2] for e in entries)
    joined = np.full((len(tables), lines, columns), -1, np.int64)
    rows = np.empty((len(tables), lines, 2), np.int64)
    slots = torch.empty(0, dtype=torch.int32, device="cpu")
    for i, table in enumerate(tables):
        joined[i, :, : entries[i].shape[2]] = entries[i][0]
        rows[i] = table.rows[0]
        rows[i, :, 1] += end - table.seen
    if any(table.slots.size for table in tables):
        slots = torch.full((len(tables), lines, int(rows[:, :, 0].max())), -1, dtype=torch.int32, device="cpu")
        for own, table in zip(slots, tables, strict=True):
            at = slots_of(table)[0]
            own[:, : at.shape[1]] = torch.where(at < 0, -1, at + (end - table.seen))
    return torch.from_numpy(joined), torch.from_numpy(rows), slots
