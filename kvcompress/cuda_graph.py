"""Fixed: a layer on a device whose calls are recorded once (a CUDA graph, a compiled one) and run again: all that they
read stays where it is, and the host writes there what is new before each run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from . import _C, checks, formats, ops
from .policies import Policy

if TYPE_CHECKING:
    from .layer import PagedKV

_SLAB, _UNIT = 16, 1 << 20
_ARRAYS, _DTYPES = ("entries", "rows", "slots"), (torch.int64, torch.int64, torch.int32)


class Fixed:
    """The calls of `tokens` tokens of a layer on a GPU that holds at most `slots` slots.

        fixed = Fixed(kv, slots=4096)
        with fixed.step(), torch.cuda.graph(graph):
            out, lse = fixed.attend(q, k, v)          # recorded: its tensors are the graph's
        ...
        with fixed.step():                            # plans, and tells the graph's tensors
            graph.replay()

    Between runs the layer may be appended to, cropped, reset, its rows reordered. What makes its arrays other ones (a
    batch of another size, evictions or pads that want slots of their own, another device) is a ValueError of the next
    `step`: record anew. Own tokens are all real; a policy, tiers and ranks are not for it. From the first `step` (or
    `pin`) on the arena is as long as all Fixed of its pool can need, and stays; what outgrows it is a MemoryError.
    """

    def __init__(self, store: PagedKV, slots: int, tokens: int = 1) -> None:
        mirror = store.page_store.mirror
        policy = store.eviction and type(store.eviction.policy) is not Policy  # that of `evict(keep)` does nothing
        mapped = store.page_store.basis is not None
        if mirror is None or policy or mapped or store.offload or type(store).op is not store.op:
            raise ValueError(
                "Fixed: expected a layer with all of its pages on a GPU, without a policy, a calibration, tiers or "
                "ranks, got another; calls on the CPU need no recording"
            )
        self.store, self.mirror, self.arena = store, mirror, mirror.arena
        self.slots, self.tokens = checks.integer("slots", slots, 1), checks.integer("tokens", tokens, 1)
        store.page_store.table.reserve(self.slots)
        most = store.batch * store.page_store.table.entries.shape[1] * (self.tokens // store.page_size + 2)
        there = self.mirror.device
        shapes = [list(getattr(store.page_store.table, name).shape) for name in _ARRAYS]
        if store.page_store.table.slots.size:
            shapes[2][2] = self.slots
        with torch.inference_mode(False):  # steps write them, in whatever mode
            self.entries, self.rows, self.sidecar = (
                torch.full(shape, -1, dtype=dtype, device=there) for shape, dtype in zip(shapes, _DTYPES, strict=True)
            )
            self.seals = torch.full((most, 2), -1, device=there)
            self.seen = torch.full((1,), store.seen, device=there)
        self.sent: dict[str, np.ndarray] = {}  # what is there
        self.arena.expect(room_of(store, self.slots))
        self.pinned = self.planned = False

    # ------------------------------------------------------------------ on the device

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None, softcap: float = 0.0,
        s_aux: torch.Tensor | None = None, window: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """`PagedKV.attend` of q, k and v [B, heads, `tokens`, D], with nothing of the host in it: (out [B, T, Hq, Dv],
        lse [B, Hq, T])."""
        if not self.arena.stays:
            raise ValueError("Fixed: attend: expected memory that stays, got a layer before its first step; pin() it")
        op = torch.ops.kvcompress.attend_step if torch.compiler.is_dynamo_compiling() else ops.attend_step
        store, pages = self.store, self.store.page_store
        if store.sliding:
            window = -store.sliding.window if store.sliding.chunked else window or store.sliding.window
        out, lse, _ = op(
            pages.query(q), pages.filled(k, 0), pages.filled(v, 1), self.arena.bytes, self.entries, self.rows,
            self.sidecar, pages.no_mask, pages.no_aux if s_aux is None else s_aux.float(), self.seals, self.seen,
            store.page_size, store.sinks, window, pages.scale if scale is None else scale, softcap, 0, pages.formats,
        )  # fmt: skip
        return pages.result(out, q.dtype), lse

    # ------------------------------------------------------------------ on the host

    def pin(self) -> None:
        """From now on the memory stays, for all Fixed of the layer's pool that there are."""
        if self.pinned:
            return
        self.arena.pin()
        # CUDA graphs of torch.compile copy all other inputs, and refuse to write to them.
        for x in (self.arena.bytes, self.entries, self.rows, self.sidecar, self.seals, self.seen):
            torch._dynamo.mark_static_address(x)
        self.pinned = True

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around a run: before it the table plans and what is new is sent; after it the tokens are stored, or, if it
        failed, not."""
        with steps([self]):
            yield

    def fits(self) -> bool:
        """Are the layer's arrays of the shapes that were recorded?"""
        known = self.entries, self.rows, self.sidecar
        for name, there in zip(_ARRAYS, known, strict=True):
            x = getattr(self.store.page_store.table, name)
            if bool(x.size) != bool(there.numel()) or (x.size and x.shape[:2] != there.shape[:2]):
                return False
        return self.store.page_store.mirror is self.mirror

    def _begin(self) -> None:
        store, table = self.store, self.store.page_store.table
        if store.offload or store.page_store.mirror is not self.mirror or table.seen + self.tokens > self.slots:
            raise ValueError(
                f"Fixed: expected the layer where it was recorded, no page elsewhere, with at most {self.slots} slots, "
                f"got one on {store.device} with {table.seen + self.tokens}; record anew, crop or reset it"
            )
        seen = table.seen
        if seen == 0:
            store.page_store.place_spans(self.tokens)
        seals, _ = store.page_store.plan(self.tokens, None)
        try:
            self._send(table, seals, seen)
        except BaseException:
            table.rollback()
            raise
        self.planned = True

    def drop(self) -> None:
        """The tokens of this step come by an ordinary call, which plans for itself."""
        if self.planned:
            self.store.page_store.table.rollback()
        self.planned = False

    def _send(self, table: Any, seals: np.ndarray, seen: int) -> None:
        self.pin()
        if not self.fits() or len(seals) > len(self.seals):
            raise ValueError(
                f"Fixed: expected a table as it was recorded, {list(self.rows.shape[:2])} rows and heads, own slots: "
                f"{self.sidecar.numel() > 0}, {len(self.seals)} seals, got {list(table.rows.shape[:2])}, "
                f"{table.slots.size > 0}, {len(seals)}; record anew"
            )
        self.arena.joined()  # after the plan, which may have taken pages that others' calls gave back
        for name, there in zip(_ARRAYS, (self.entries, self.rows, self.sidecar), strict=True):
            if there.numel():
                x = getattr(table, name)
                n = min(there.shape[2], x.shape[2])  # the table may have room that it does not use
                self._tell(name, x[:, :, :n], there[:, :, :n])
        padded = np.full(self.seals.shape, -1, np.int64)
        padded[: len(seals)] = seals
        self._tell("seals", padded, self.seals)
        self.seen.fill_(seen)

    def _tell(self, name: str, x: np.ndarray, there: torch.Tensor) -> None:
        """Most steps change the lengths alone: no new page, no seal, no slots of one's own."""
        known = self.sent.get(name)
        if known is None or not np.array_equal(known, x):
            copy = x.copy()
            there.copy_(torch.from_numpy(copy))
            self.sent[name] = copy

    def _end(self) -> None:
        if not self.planned:
            return
        self.planned = False
        self.store.page_store.table.commit()
        for follower in self.store.followers():
            follower.appended(self.tokens, None)
        self.store.end_call()


@contextlib.contextmanager
def steps(all_fixed: Sequence[Fixed]) -> Iterator[None]:
    """`Fixed.step` of several layers: of all, or of none."""
    begun: list[Fixed] = []
    try:
        for fixed in all_fixed:
            fixed._begin()
            begun.append(fixed)
        yield
    except BaseException:
        for fixed in begun:
            fixed.drop()
        raise
    for fixed in begun:
        fixed._end()


def room_of(store: PagedKV, slots: int) -> int:
    """Bytes of a pool, at most, that `slots` slots of each row take: pages by size, in slabs of about 16."""
    H, (Dk, Dv) = store.num_kv_heads, store.page_store.page_dims
    raw, lines = formats.resolve("raw", store.dtype), store.batch
    columns = 2 + slots // store.page_size
    counts = {(raw, raw): min(columns, 3 + store.page_store.residual_length // store.page_size)}
    counts |= {pair: columns for pair in store.page_store.codes_of.values()}
    sizes = [(H * _C.page_bytes(*pair, Dk, Dv, store.page_size), n) for pair, n in counts.items()]
    sizes.append((H * _C.page_bytes(raw, raw, Dk, Dv, max(16, -(-store.sinks // 16) * 16)), 1))
    total = 0
    for size, n in sizes:
        slab = -(-size * _SLAB // _UNIT) * _UNIT
        total += (1 + -(-lines * n // (slab // size))) * slab
    return total
