"""PagedKV: the keys and values of one attention layer in pages. No model, no transformers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from . import _C, checks, formats, ops
from .eviction.evicting_layer import Keeping
from .eviction.eviction import Eviction
from .policies import Policy
from .quantization.mixed_precision import Spans
from .store.device_memory import Mirror, sent
from .store.display import Shown
from .store.pools import Moving, device_of
from .store.sequence import copies, select_rows, slots_of
from .store.window import Ring

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class PagedKV(Shown, Keeping, Moving):
    """Keys and values of one layer, in pages: full pages sealed in `key`/`value` format, the newest ones raw.

    Shapes: B batch, H KV heads, Hq query heads (a multiple of H), T new tokens, D head dim (Dk, Dv). A *slot*
    is an index in the padded sequence; `seen` counts slots, pads included; pads are never stored.

    Args:
        num_kv_heads: H.
        head_dim: Dk, up to 576 (256 on a GPU). Pages hold a multiple of 16 (some formats: of 32); zeros fill it up.
        key: format of sealed K pages: a name out of `kvcompress.formats.NAMES`.
        value: format of sealed V pages; the same as `key` if None.
        value_dim: Dv; `head_dim` if None.
        batch: B.
        dtype: of k and v, and of open pages: float32, float16 or bfloat16.
        device: "cpu", or a GPU where the build has CUDA kernels (docs/cuda.md).
        page_size: tokens of a page, a multiple of 16.
        sinks: first tokens of each row, kept raw for ever; the policy's sinks if None, 4 without a policy.
        recent: newest tokens that stay raw at least, over the open page.
        residual: 0 appends straight into sealed pages (8-bit formats); n > 0 is another name for `recent=n`.
        spans, span_tokens: formats by position, in place of key and value; see `quantization.mixed_precision.Spans`.
        policy: which tokens stay (`kvcompress.policies`); all if None. Evictions follow calls.
        layer: (number of this layer, how many there are), for policies that tell layers apart.
        window: slots that a query sees, itself included: pages that no query can see any more are freed, and
            `crop` goes back to the beginning of the last call, if that had at most a page. 0: all slots. Wants no
            sinks, spans or policy.
        chunked: the window is not around each query: rows are cut into chunks of `window` tokens (a multiple of
            page_size), of which each sees itself alone (Llama 4).
        rope: float64 [Dk / 2], frequencies of the model's RoPE, for policies with positions="cache".
        pool: the `_C.Pool` to take pages from, shared between layers; a new one if None.

    Every method either succeeds or raises (ValueError, TypeError, MemoryError) and changes nothing.
    """

    _op = staticmethod(ops.attend)

    def __init__(
        self,
        num_kv_heads: int,
        head_dim: int,
        *,
        key: str = "int8",
        value: str | None = None,
        value_dim: int | None = None,
        batch: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        page_size: int = 64,
        sinks: int | None = None,
        recent: int = 0,
        residual: int | None = None,
        spans: Any = None,
        span_tokens: int | None = None,
        policy: Policy | None = None,
        layer: tuple[int, int] = (0, 1),
        window: int = 0,
        chunked: bool = False,
        rope: torch.Tensor | None = None,
        pool: Any = None,
    ) -> None:
        if dtype not in _DTYPES:
            raise TypeError(f"PagedKV: dtype: wanted torch.float32, float16 or bfloat16, got {dtype}")
        checks.policy(policy)
        device = device_of(device)
        recent = checks.integer("recent", recent, 0)
        if residual is not None:
            residual = checks.integer("residual", residual, 0)
            if recent:
                raise ValueError(f"PagedKV: wanted recent or residual, got both ({recent}, {residual})")
        value = key if value is None else value
        self.num_kv_heads = checks.integer("num_kv_heads", num_kv_heads, 1)
        self.head_dim = checks.integer("head_dim", head_dim, 1, formats.MAX_DIM)
        self.value_dim = (
            self.head_dim if value_dim is None else checks.integer("value_dim", value_dim, 1, formats.MAX_DIM)
        )
        self.key, self.value, self.dtype = key, value, dtype
        self.page_size = checks.integer("page_size", page_size, 1)
        sinks = (policy.sinks if policy else 0 if window else 4) if sinks is None else sinks
        self.sinks = checks.integer("sinks", sinks, 0)
        self.recent, self.direct = residual or recent, residual == 0
        self.spans = None if spans is None else Spans(spans, span_tokens)
        ladder = policy.ladder if policy else ()
        pairs = [(key, value), *(self.spans.formats() if self.spans else ()), *ladder]
        self._codes = {(k, v): (formats.resolve(k, dtype), formats.resolve(v, dtype)) for k, v in pairs}
        self.codes = self._codes[key, value]
        self._fill = tuple(
            -dim % max(formats.TABLE[codes[side]]["dim_multiple"] for codes in self._codes.values())
            for side, dim in enumerate((self.head_dim, self.value_dim))
        )
        self._ranges = tuple(
            any(formats.TABLE[codes[side]]["zero_point"] for codes in self._codes.values()) for side in (0, 1)
        )
        self._scale = 1 / math.sqrt(self.head_dim)
        self._formats = sum(1 << code for code in {c for pair in self._codes.values() for c in pair})
        self.lay(device, _C.Pool() if pool is None else pool, checks.integer("batch", batch, 1))
        self.place_spans(1)
        self.away = None
        self.eviction = None if policy is None else Eviction(self, policy, *layer, rope)
        self.ring = Ring(self, window, chunked) if window or chunked else None

    # ------------------------------------------------------------------ state

    def place_spans(self, first_call: int) -> None:
        """Fractional spans become tokens: the first call is about to bring `first_call` of them."""
        if self.spans:
            self._table.spans = [(end, *self._codes[names]) for end, names in self.spans.resolve(first_call)]

    def _forget_views(self) -> None:
        self._version = self._arena_bytes = self._empty_batch = -1

    def _views(self, table: Any = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(arena, entries, rows, slots) as tensors over the core's memory, of `table` if it is not all; rebuilt only
        when an array has moved."""
        if self._mirror:
            return self._mirror.views(table or self._table)
        if self._pool.extent != self._arena_bytes:
            arena = self._pool.arena
            self._arena = torch.from_numpy(arena)
            self._arena_bytes = arena.nbytes
        if table:
            return self._arena, *map(torch.from_numpy, table)  # type: ignore[return-value]
        table = self._table
        if table.version != self._version:
            self._entries, self._rows, self._slots = map(torch.from_numpy, (table.entries, table.rows, table.slots))
            self._version = table.version
        return self._arena, self._entries, self._rows, self._slots

    def _empties(self) -> tuple[torch.Tensor, torch.Tensor]:
        """k [B, H, 0, Dk] and v [B, H, 0, Dv] for calls that bring none."""
        if self._empty_batch != self.batch:
            self._empty_batch = self.batch
            shape = (self.batch, self.num_kv_heads, 0)
            self._no_k = self._like.new_empty(*shape, self.head_dim + self._fill[0])
            self._no_v = self._like.new_empty(*shape, self.value_dim + self._fill[1])
        return self._no_k, self._no_v

    # ------------------------------------------------------------------ work

    def check_pair(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Raises unless k [B, H, T, Dk] and v [B, H, T, Dv] could be appended (NaN is not looked for)."""
        checks.tensor("k", k, "[B, H, T, Dk]", self.device)
        checks.tensor("v", v, "[B, H, T, Dv]", self.device)
        rows = (self.batch, self.num_kv_heads, k.shape[2])
        checks.side("k", k, (*rows, self.head_dim), self.dtype)
        checks.side("v", v, (*rows, self.value_dim), self.dtype)

    def _step(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
        s_aux: torch.Tensor, window: int, scale: float, softcap: float, mass: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """plan -> op -> commit; whatever goes wrong on the way, the table is put back."""
        if self.eviction:
            self.eviction.catch_up()
        table = self._table
        seen, seals = table.seen, None
        mass = mass or (self.eviction is not None and self.eviction.wants_mass(k.shape[2]))
        if seen == 0:
            self.place_spans(k.shape[2])
        if any(self._fill):
            q, k, v = pad(q, (0, self._fill[0])), self._filled(k, 0), self._filled(v, 1)
        try:
            seals = self.planned(k.shape[2], mask)
            result = self._attend(
                q, k, v, self._no_mask if mask is None else sent(mask, self.device), s_aux,
                sent(seals, self.device) if len(seals) else self._no_seals, seen, window, scale,
                softcap, self._width(k.shape[2]) if mass else 0,
            )  # fmt: skip
        except BaseException as error:
            # A plan that failed has put itself back, and one that is there now is another thread's; but Ctrl-C may
            # come right after ours.
            if seals is not None or not isinstance(error, Exception):
                table.rollback()
            raise
        table.commit()
        if self.eviction:
            self._follow(q, k.shape[2], mask, result[1], result[2], scale=scale, window=window, softcap=softcap)
        if self.ring:
            self.ring.appended(k.shape[2], mask)
        return self._cut(result[0], 1), *result[1:]

    def _settle(self) -> None:
        """A call is over: pages that are behind the window go."""
        if self.ring and not self.ring.deferred:
            self.ring.run()

    def _width(self, own: int) -> int:
        """Stored tokens of the longest row when `own` more are there."""
        return self._table.longest + own

    def _filled(self, x: torch.Tensor, side: int) -> torch.Tensor:
        """x with its last dim filled up: zeros, or the last element again where zeros would stretch the row's range.
        q has zeros there, and what is read is cut."""
        if self._ranges[side]:
            return torch.cat([x, x[..., -1:].expand(*x.shape[:-1], self._fill[side])], -1)
        return pad(x, (0, self._fill[side]))

    def _cut(self, x: torch.Tensor, side: int) -> torch.Tensor:
        """x without what fills its last dim up."""
        return x[..., : -self._fill[side]] if self._fill[side] else x

    def append(self, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Stores k [B, H, T, Dk] and v [B, H, T, Dv] at slots seen .. seen + T - 1.

        mask: bool [B, T], True for tokens, False for pads, which take a slot but are not stored. None: all
            tokens.
        """
        self.check_pair(k, v)
        mask = checks.own_mask(mask, self.batch, k.shape[2])
        self._step(k[:, :, :0], k, v, mask, self._no_aux, 0, self._scale, 0.0)
        self._settle()

    def append_dense(
        self, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, start: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`append`, and dense K, V of the slots from `start` on as `attend` sees them in the same call: own tokens
        exact, the page that the call fills raw even where it is sealed in the end, zeros at pads."""
        self.check_pair(k, v)
        mask = checks.own_mask(mask, self.batch, k.shape[2])
        if mask is not None:
            pads = ~mask[:, None, :, None].to(self.device)
            k, v = k.masked_fill(pads, 0), v.masked_fill(pads, 0)
        base = self.seen
        if base == 0:
            self.append(k, v, mask)
            return k, v
        if self.eviction:
            keys, values = self.dense()
            self.append(k, v, mask)
            return torch.cat([keys, k], 2), torch.cat([values, v], 2)
        # A shorter call cannot both fill a page and push it out of the newest page_size tokens.
        starts = self.page_starts() if k.shape[2] > self.page_size else []
        before = self.dense(start) if starts else ()
        self._step(k[:, :, :0], k, v, mask, self._no_aux, 0, self._scale, 0.0)
        after = self.dense(start)
        for now, old in zip(after, before, strict=False):
            for b, slot in enumerate(starts):
                now[b, :, max(0, slot - start) : base - start] = old[b, :, max(0, slot - start) :]
        after[0][:, :, base - start :], after[1][:, :, base - start :] = k, v
        self._settle()
        return after

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        *,
        mask: torch.Tensor | None = None,
        scale: float | None = None,
        window: int = 0,
        softcap: float = 0.0,
        s_aux: torch.Tensor | None = None,
        mass: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        """Causal attention by slot; with k and v also appends them, in the same call.

        Args:
            q: [B, Hq, T, Dk], the last T slots (those of k and v if given). float32, float16 or bfloat16.
            k, v: [B, H, T, Dk] and [B, H, T, Dv] to append; q attends to them exactly, before they are
                quantized.
            mask: bool [B, T], True for tokens, False for pads (see `append`); only with k and v.
            scale: of the scores; 1 / sqrt(Dk) if None.
            window: slots that a query sees, itself included; 0 for the layer's own window, or all.
            softcap: scores become softcap * tanh(score / softcap); 0 for none.
            s_aux: fp32 [Hq], a logit per query head that takes probability and gives no value.
            mass: also return the attention that each stored token got.

        Returns:
            out [B, Hq, T, Dv] in q's dtype (zeros where a query sees nothing), and lse fp32 [B, Hq, T], the
            natural log of the sum of exp(score), without s_aux; -inf where a query sees nothing. NaN in both
            where q has NaN or Inf, or scores overflow. With `mass` also fp32 [B, H, N], N the longest row's tokens
            after the call, in stored order, own tokens last: the sum over T and the group of exp(score - lse), what
            H2O accumulates (Zhang et al. 2023, section 4); 0 behind a row's last token.
        """
        if k is not None and v is not None:
            self.check_pair(k, v)
        out, *rest = self.attend_checked(q, k, v, mask, scale, window, softcap, s_aux, mass)
        return out.transpose(1, 2), *rest

    def attend_checked(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, mask: torch.Tensor | None,
        scale: float | None, window: int = 0, softcap: float = 0.0, s_aux: torch.Tensor | None = None,
        mass: bool = False,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        """`attend`, of k and v that `check_pair` has passed, but out [B, T, Hq, Dv]."""
        checks.tensor("q", q, "[B, Hq, T, Dk]", self.device)
        scale = self._scale if scale is None else checks.number("scale", scale)
        aux = self._no_aux if s_aux is None else checks.aux(s_aux, q.shape[1]).to(self.device)
        window, softcap = checks.integer("window", window, 0), checks.number("softcap", softcap, 0)
        if self.ring:
            window = self.ring.of_call(window, q.shape[2], k is not None)
        if k is not None and v is not None:
            if q.shape[2] != k.shape[2]:
                raise ValueError(f"PagedKV: q: wanted {k.shape[2]} tokens as k has, got {q.shape[2]}")
            own = checks.own_mask(mask, self.batch, k.shape[2])
            out, *rest = self._step(q, k, v, own, aux, window, scale, softcap, mass)
            if self.ring:
                self._settle()
            return out, *rest[: 1 + mass]
        if k is not None or v is not None or mask is not None:
            raise ValueError("PagedKV: wanted k and v together, mask only with them; got one without the other")
        if q.shape[2] > self.seen:
            raise ValueError(f"PagedKV: q: wanted at most the {self.seen} slots seen, got {q.shape[2]}")
        no_k, no_v = self._empties()
        if self._fill[0]:
            q = pad(q, (0, self._fill[0]))
        out, *rest = self._attend(
            q, no_k, no_v, self._no_mask, aux, self._no_seals, self.seen, window, scale, softcap,
            self._width(0) if mass else 0,
        )  # fmt: skip
        return self._cut(out, 1), *rest[: 1 + mass]

    def dense(self, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """K [B, H, seen - start, Dk] and V [B, H, seen - start, Dv] by slot from `start` on, decoded, in the layer's
        dtype; what is not stored (pads) is zero. New tensors."""
        start = checks.integer("start", start, 0, self.seen)
        with self._present():
            arena, entries, rows, slots = self._views()
            if start:
                slots = sent((slots_of(self._table) - start).contiguous(), self.device)
            k, v = ops.read(
                self._like, arena, entries, rows, slots, self.num_kv_heads, self.head_dim + self._fill[0],
                self.value_dim + self._fill[1], self.seen - start, self.page_size, self.sinks,
            )  # fmt: skip
        return self._cut(k, 0), self._cut(v, 1)

    # ------------------------------------------------------------------ rows and slots

    def crop(self, seen: int) -> None:
        """Keeps the first `seen` slots and forgets the rest. Exact back to the last seal; tokens that stay in
        a sealed page keep the codes that they have."""
        seen = checks.integer("seen", seen, 0)
        if self.ring:
            self.ring.check_crop(seen)
        if self.away:
            self.away.before_crop(seen)
        if self.eviction:
            self.eviction.settle()
        self._table.crop(seen)
        for follower in self._followers():
            follower.cropped(seen)

    def select(self, index: Any) -> None:
        """New batch: row i is old row index[i] (repeats and reorders rows; pages are shared until
        written)."""
        select_rows([self], index)

    def repeat(self, n: int) -> None:
        """Every row n times, copies side by side."""
        self.select(copies(self.batch, n))

    def selected(self, rows: np.ndarray) -> None:
        """The table has new rows: what follows it too."""
        for follower in self._followers():
            follower.selected(rows)

    def reset(self, batch: int | None = None) -> None:
        """Forgets all tokens; a new batch size if `batch` is given."""
        if self.away:
            self.away.lose()
        self._table.reset(0 if batch is None else checks.integer("batch", batch, 1))
        for follower in self._followers():
            follower.reset()

    def clone(self) -> PagedKV:
        """An independent copy that shares this one's pages until one of them writes."""
        self._home()
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy._table, copy.away = self._table.clone(), None
        copy._forget_views()
        copy._mirror = self._mirror and Mirror(self._pool, self.device)
        if self.eviction:
            copy.eviction = self.eviction.clone(copy)
        if self.ring:
            copy.ring = self.ring.clone(copy)
        return copy

    def __copy__(self) -> PagedKV:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("PagedKV: cannot be pickled; use clone() for a copy, dense() for its tokens")

    def __deepcopy__(self, memo: dict) -> PagedKV:
        return self.clone()
