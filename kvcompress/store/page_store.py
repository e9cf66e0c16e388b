"""PageStore: the pages of one layer on one device, and their block table."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.nn.functional import pad

from .. import _C, formats, ops
from ..quantization.calibration import Basis, feedback, mapped
from ..quantization.mixed_precision import Spans
from .device_memory import Mirror, mirror_of, sent
from .sequence import slots_of

AttendOp = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
Views = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


_NO_SEALS = np.empty((0, 2), np.int64)


def _no_gradients() -> bool:
    """True without autograd and forward-mode AD, which `_C.Table` cannot detect. (It rejects tensors of torch.func,
    which have no memory.)"""
    return not torch.is_grad_enabled() and forward_ad._current_level < 0


class Offload(Protocol):
    """Holder of the offloaded pages of a layer."""

    def present(self) -> AbstractContextManager[None]: ...

    def onload(self) -> None: ...


class PageStore:
    """Block table, lengths, and sealed and raw pages of a layer. Independent of policies, tiers and models; eviction
    and offloading are given a PageStore to work on.

    ladder: further (key, value) formats that pages may be re-encoded in. Other arguments as of `PagedKV`.
    """

    def __init__(
        self, num_kv_heads: int, head_dim: int, value_dim: int, *, key: str, value: str, batch: int, dtype: torch.dtype,
        device: torch.device, page_size: int, sinks: int, residual_length: int | None, spans: Spans | None,
        ladder: Any, pool: Any, latent: bool = False, basis: Basis | None = None,
    ) -> None:  # fmt: skip
        if latent and (num_kv_heads != 1 or value_dim > head_dim):
            raise ValueError(
                "PagedKV: latent: expected one KV head, and value_dim (the rotary part) at most head_dim (the latent), "
                f"got {num_kv_heads} heads, head_dim {head_dim}, value_dim {value_dim}"
            )
        pairs = [(key, value), *(spans.formats() if spans else ()), *ladder]
        if latent and (spread := sorted({x for pair in pairs for x in pair} & set(formats.CALIBRATED))):
            raise ValueError(f"PagedKV: latent: expected a format with a scale per row, got {spread[0]}")
        self.num_kv_heads, self.head_dim, self.value_dim, self.latent = num_kv_heads, head_dim, value_dim, latent
        self.basis = basis
        if basis is not None:
            got = [list(basis.key.shape), list(basis.value.shape)]
            if latent or got != [[num_kv_heads, dim, dim] for dim in (head_dim, value_dim)]:
                what = "latents" if latent else f"{num_kv_heads} heads of {head_dim} and {value_dim}"
                raise ValueError(f"PagedKV: basis: expected [H, Dk, Dk] and [H, Dv, Dv] of this layer's K and V heads, "
                                 f"got {got[0]}, {got[1]} for {what}")  # fmt: skip
        self.query_dim = head_dim + value_dim if latent else head_dim
        self.key, self.value, self.dtype, self.page_size = key, value, dtype, page_size
        self.sinks, self.spans = sinks, spans
        self.direct, self.residual_length = residual_length == 0, residual_length or 0
        self.codes_of = {(k, v): (formats.resolve(k, dtype), formats.resolve(v, dtype)) for k, v in pairs}
        self.codes = self.codes_of[key, value]
        self.fill = tuple(  # padding dims of K and V in pages
            -dim % max(formats.TABLE[codes[side]]["dim_multiple"] for codes in self.codes_of.values())
            for side, dim in enumerate((head_dim, value_dim))
        )
        self.page_dims = head_dim + self.fill[0], value_dim + self.fill[1]  # dims of K and V in pages
        self._ranges = tuple(
            any(formats.TABLE[codes[side]]["zero_point"] for codes in self.codes_of.values()) for side in (0, 1)
        )
        self.scale = 1 / math.sqrt(self.query_dim)
        self.formats = sum(1 << code for code in {c for pair in self.codes_of.values() for c in pair})
        self.formats |= 0 if self.direct else formats.OPEN_RAW
        self.place(device, pool, batch)
        self.place_spans(1)

    def place(self, device: torch.device, pool: Any, batch: int) -> None:
        """Creates an empty table over `pool`, and constants for calls on `device`."""
        self.basis = self.basis and self.basis.to(device)
        self.as_given = self.basis is None and not any(self.fill)  # pages hold rows as they come
        basis = self.basis  # maps of K, q, V and the output: k . q = (k key) . (q key_back^T)
        self.maps = basis and (basis.key, basis.key_back.mT.contiguous(), basis.value, basis.value_back)
        costs = self.basis[4:] if self.basis and device.type == "cpu" else ()
        self._feedback = [
            torch.empty(0) if x is None else feedback(x, self.page_dims[i])
            for i, x in enumerate(costs) if any(y is not None for y in costs)
        ]  # fmt: skip
        self.device, self.pool, self.gpu = device, pool, -1 if device.type == "cpu" else device.index or 0
        self.table = _C.Table(
            pool, heads=self.num_kv_heads, key_dim=self.page_dims[0], value_dim=self.page_dims[1], batch=batch,
            page_size=self.page_size, sinks=self.sinks, recent=self.residual_length,
            raw=formats.resolve("raw", self.dtype), key=self.codes[0], value=self.codes[1], direct=self.direct,
        )  # fmt: skip
        self.like = torch.empty(0, dtype=self.dtype, device=device)
        self.no_mask = torch.empty(0, dtype=torch.bool, device=device)
        self.no_aux = torch.empty(0, dtype=torch.float32, device=device)
        self.no_attention = torch.empty(0, 0, 0, dtype=torch.float32, device=device)
        self.no_seals = torch.empty(0, 2, dtype=torch.int64, device=device)
        self.mirror = mirror_of(pool, device)
        # `_C.Table` takes tensors directly, without torch's dispatcher, and knows the dims of pages.
        self._by_c = ops.TENSORS and not any(self.fill) and not self.latent
        self._steps = self._by_c and self.mirror is None and device.type == "cpu"
        self.forget_views()

    @property
    def seen(self) -> int:
        """Number of slots so far, padding included."""
        return self.table.seen

    @property
    def batch(self) -> int:
        """Rows (sequences)."""
        return self.table.batch

    def clone(self) -> PageStore:
        """An independent copy; both share pages until one of them writes (copy-on-write)."""
        twin = copy.copy(self)
        twin.table, twin.mirror = self.table.clone(), self.mirror and Mirror(self.pool, self.device)
        twin.forget_views()
        return twin

    # ------------------------------------------------------------------ tensors for ops

    def can_step(self) -> bool:
        """True if `table.step`, a single call of C that plans, attends and commits, supports these pages."""
        return self._steps and _no_gradients()

    def takes(self, k: torch.Tensor, v: torch.Tensor) -> int:
        """The number of tokens of k and v if they can certainly be appended, else 0."""
        return self.table.takes(k, v, self.gpu) if self._by_c and _no_gradients() else 0

    def forget_views(self) -> None:
        """Drops cached views after the table was replaced."""
        self._version = self._arena_bytes = -1

    def views(self, table: Any = None) -> Views:
        """(arena, entries, rows, slots) as tensors over the core's memory; of `table`, if it is only a part. Rebuilt
        only when an array was reallocated."""
        if self.mirror:
            return self.mirror.views(table or self.table)
        if self.pool.extent != self._arena_bytes:
            arena = self.pool.arena
            self._arena = torch.from_numpy(arena)
            self._arena_bytes = arena.nbytes
        if table:
            return self._arena, *map(torch.from_numpy, table)  # type: ignore[return-value]
        table = self.table
        if table.version != self._version:
            self._entries, self._rows, self._slots = map(torch.from_numpy, (table.entries, table.rows, table.slots))
            self._version = table.version
        return self._arena, self._entries, self._rows, self._slots

    def empties(self) -> tuple[torch.Tensor, torch.Tensor]:
        """k [B, H, 0, Dk] and v [B, H, 0, Dv] for calls without new tokens."""
        shape, (key_dim, value_dim) = (self.batch, self.num_kv_heads, 0), self.page_dims
        return self.like.new_empty(*shape, key_dim), self.like.new_empty(*shape, value_dim)

    def filled(self, x: torch.Tensor, side: int) -> torch.Tensor:
        """x in the layer's basis, its last dim padded with zeros, or with the last element if zeros would widen the
        range of the row. q is padded with zeros, and padding is cut off when reading."""
        if self.basis is not None:
            x = mapped(x, self.basis[2 * side], x.dtype)
        if not self.fill[side]:
            return x
        if self._ranges[side]:
            return torch.cat([x, x[..., -1:].expand(*x.shape[:-1], self.fill[side])], -1)
        return pad(x, (0, self.fill[side]))

    def cut(self, x: torch.Tensor, side: int) -> torch.Tensor:
        """The inverse of `filled`, for x [B, H, N, D]: without padding, and mapped back from the layer's basis."""
        x = x[..., : -self.fill[side]] if self.fill[side] else x
        return x if self.basis is None else mapped(x, self.basis[2 * side + 1], x.dtype)

    def query(self, q: torch.Tensor) -> torch.Tensor:
        """q [B, Hq, T, query_dim] in the layer's basis (then float32), zero-padded as K, and for latents as the rotary
        part."""
        if self.as_given:
            return q
        if self.maps is not None:
            q = mapped(q, self.maps[1])
        sides = (q[..., : self.head_dim], q[..., self.head_dim :]) if q.shape[3] > self.head_dim else (q,)
        return torch.cat([pad(x, (0, fill)) for x, fill in zip(sides, self.fill, strict=False)], -1)

    def result(self, out: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The op's out [B, T, Hq, Dv] without padding, mapped back from the basis of V (for latents, of K), in the
        dtype of q."""
        fill = self.fill[0 if self.latent else 1]
        out = out[..., :-fill] if fill else out
        if self.basis is None:
            return out
        return mapped(out.transpose(1, 2), self.basis.value_back, dtype).transpose(1, 2)

    # ------------------------------------------------------------------ appending and reading

    def place_spans(self, first_call: int) -> None:
        """Resolves fractional spans to token positions, before a first call of `first_call` tokens."""
        if self.spans:
            self.table.spans = [(end, *self.codes_of[names]) for end, names in self.spans.resolve(first_call)]

    def plan(self, T: int, mask: torch.Tensor | None) -> tuple[np.ndarray, _C.Held | None]:
        """Plans an append in the table, with copies of shared pages also on the device. Returns seals [n, 2], and the
        raw pages to be sealed."""
        table = self.table
        if mask is None and self.page_size > T and table.plan_fill(T):
            return _NO_SEALS, None
        before = table.entries.copy() if self.mirror or self.page_size < T else None
        seals = table.plan(T, None if mask is None else mask.numpy())
        try:
            if self.mirror and before is not None and (len(seals) or not np.array_equal(before, table.entries)):
                geometry = self.num_kv_heads, *self.page_dims, self.page_size, self.sinks
                self.mirror.copy_shared(before, table, seals, geometry)
            return seals, _C.Held(table, seals, before) if len(seals) else None
        except BaseException:
            table.rollback()
            raise

    def attend(
        self, op: AttendOp, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, s_aux: torch.Tensor,
        seals: torch.Tensor, seen: int, window: int, scale: float, softcap: float, width: int, table: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """The attention op `op` on these pages, or those of `table`."""
        call = (
            k, v, *self.views(table), mask, s_aux, seals, seen, self.page_size, self.sinks, window, scale, softcap,
            width, self.formats,
        )  # fmt: skip
        if not (self._feedback and (len(seals) or k.shape[2] > 1)):
            return op(q, *call)
        if op is ops.attend:
            return ops.attend_feedback(q, *call, *self._feedback)
        found = op(q, *call)
        ops.attend_feedback(q[:, :, :0], *call, *self._feedback)  # writes the same tokens again, with better codes
        return found

    def read(
        self, slots: torch.Tensor, count: int, like: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K [B, H, count, Dk] and V [B, H, count, Dv], decoded to the dtype of `like` (default: the layer's). slots:
        int32 [B, 1 or H, N], by index, the destination of each stored token, or -1 to skip it. Zero elsewhere."""
        arena, entries, rows, _ = self.views()
        k, v = ops.read(
            self.like if like is None else like, arena, entries, rows, slots, self.num_kv_heads, *self.page_dims, count,
            self.page_size, self.sinks,
        )  # fmt: skip
        return self.cut(k, 0), self.cut(v, 1)

    def dense(self, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PagedKV.dense`."""
        slots = self.views()[3]
        if start:
            slots = sent((slots_of(self.table) - start).contiguous(), self.device)
        return self.read(slots, self.seen - start)

    def whole(self) -> bool:
        """True if all slots so far are stored, in each row and for all heads."""
        return not self.seen or all(self.plain_row(b) == (0, self.seen) for b in range(self.batch))

    def pieces(self, tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Decoded K, V [B, H, n, D] of all slots of a `whole` store, in pieces of about `tokens` tokens over all rows:
        some columns of pages at a time, as a separate table with an empty sink column (except for the first)."""
        arena, entries, _, slots = self.views()
        columns, first = 1 + tokens // self.batch // self.page_size, 0
        for start in range(0, entries.shape[2], columns):
            end = min(self.seen, self.sinks + (start + columns - 1) * self.page_size)
            if end <= first:
                continue
            some = entries[:, :, max(0, start - 1) : start + columns].contiguous()
            rows = sent(np.tile(np.array([end - first, 0]), (self.batch, 1, 1)), self.device)
            yield ops.read(
                self.like, arena, some, rows, slots, self.num_kv_heads, *self.page_dims, end - first, self.page_size,
                0 if start else self.sinks,
            )  # fmt: skip
            first = end

    # ------------------------------------------------------------------ which tokens are stored

    def slots(self) -> np.ndarray:
        """Slots by index: int32 [B, 1 or H, N]; -1: no token."""
        return slots_of(self.table).numpy()

    def is_stored(self) -> torch.Tensor:
        """bool [B, 1 or H, seen]: True at slots of stored tokens."""
        slots = slots_of(self.table).long()
        found = torch.zeros(*slots.shape[:2], self.seen + 1, dtype=torch.bool, device="cpu")
        return found.scatter_(2, slots.masked_fill(slots < 0, self.seen), True)[:, :, :-1]

    def stored_slots(self) -> list[torch.Tensor]:
        """For each row the slots of the stored tokens in order, int64 [N_row]. Raises ValueError if heads differ."""
        stored = self.is_stored()
        if stored.shape[1] > 1:
            raise ValueError("kept: expected the same tokens in all heads, got different ones; use kept_heads()")
        return [row.nonzero().flatten() for row in stored[:, 0]]

    def page_starts(self) -> list[int]:
        """For each row the slot of the first token of the page that is being filled; `seen` if none is."""
        slots, starts = slots_of(self.table), []
        if slots.shape[1] > 1:
            raise ValueError("page_starts: expected the same tokens in all heads, got different ones")
        for row, n in zip(slots[:, 0], self.table.rows[:, 0, 0].tolist(), strict=True):
            at = self.sinks + max(0, n - self.sinks) // self.page_size * self.page_size
            starts.append(int(row[at]) if at < n else self.seen)
        return starts

    def plain_row(self, b: int) -> tuple[int, int] | None:
        """(first slot, tokens) of row b if it stores all slots from the first on, else None."""
        table = self.table
        if table.rows.shape[1] > 1 or table.slots.size:
            return None
        n, first = (int(x) for x in table.rows[b, 0])
        return (first, n) if first + n == self.seen else None

    def sealed_columns(self, b: int) -> int:
        """Number of leading columns of row b that are sealed in their final formats."""
        full = max(0, int(self.table.rows[b, 0, 0]) - self.sinks) // self.page_size
        raw = formats.pair_of(self.table.entries[b, 0, 1 : 1 + full]) != self.sealed_format(np.arange(1, 1 + full))
        return int(raw.argmax()) if raw.any() else full

    def sealed_format(self, column: Any) -> Any:
        """Formats of a sealed page at `column` (int, or an array of them): K format << 8 | V format."""
        spans = [*self.table.spans, (0, *self.codes)]
        first = self.sinks + (column - 1) * self.page_size
        pairs = np.array([key << 8 | value for _, key, value in spans])
        return pairs[np.searchsorted([end for end, _, _ in spans[:-1]], first, side="right")]

    # ------------------------------------------------------------------ figures

    @property
    def kept_tokens(self) -> int:
        """Number of stored tokens, summed over rows."""
        return self.table.stats()["kept"]

    def parts(self) -> dict[str, int]:
        """Bytes of this layer's pages (sealed, open, sinks) and tables, without the slack of its pool."""
        s = self.table.stats()
        names = {"sealed": "sealed", "open": "open", "sinks": "sink", "tables": "table"}
        return {part: s[f"{name}_bytes"] for part, name in names.items()}

    def token_bytes(self) -> int:
        """Bytes of dense K and V of one token, for all heads, in the layer's dtype."""
        return self.num_kv_heads * (self.head_dim + self.value_dim) * self.dtype.itemsize
