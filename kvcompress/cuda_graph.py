"""CUDAGraphLayer: calls of a layer on a GPU that are captured once, in a CUDA graph or by torch.compile, and replayed.
All that they read stays at fixed addresses; before each replay the host writes there what has changed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from . import _C, checks, formats, ops
from .policies import Policy

if TYPE_CHECKING:
    from .layer import PagedKV
    from .store.device_memory import Arena

_SLAB, _UNIT = 16, 1 << 20
_ARRAYS = ("entries", "rows", "slots")
_LINE = 8  # words: where arrays on a board begin, as compilers like it


class CUDAGraphLayer:
    """Calls of `tokens` tokens of a layer on a GPU that comes to hold at most `slots` slots, for CUDA graphs.

        layer = CUDAGraphLayer(kv, slots=4096)
        with layer.step(), torch.cuda.graph(graph):
            out, lse = layer.attend(q, k, v)          # captured
        ...
        with layer.step():                            # plans the step, updates what the graph reads
            graph.replay()

    Between replays the layer may be appended to, cropped and reset, and its rows may be reordered. The tokens of a
    call contain no padding. From the first `step` (or `pin`) on the arena is as large as all CUDAGraphLayers of its
    pool can need, and does not grow: a pool that needs more raises MemoryError.

    Args:
        store: the layer, with all of its pages on a GPU; without a policy, a calibration, tiers or ranks.
        slots: slots that the layer holds at most.
        tokens: T of each call.

    Raises ValueError for another layer. `step` raises ValueError when the layer's arrays have changed their shape
    (another batch size, evictions or padding that need a slot per token, another device): capture again then.
    """

    def __init__(self, store: PagedKV, slots: int, tokens: int = 1) -> None:
        mirror = store.page_store.mirror
        policy = store.eviction and type(store.eviction.policy) is not Policy  # that of `evict(keep)` does nothing
        mapped = store.page_store.basis is not None
        if mirror is None or policy or mapped or store.offload or type(store).op is not store.op:
            raise ValueError(
                "CUDAGraphLayer: expected a layer with all of its pages on a GPU, without a policy, a calibration, "
                "tiers or ranks, got another; calls on the CPU need no CUDA graph"
            )
        self.store, self.mirror, self.arena = store, mirror, mirror.arena
        self.slots, self.tokens = checks.integer("slots", slots, 1), checks.integer("tokens", tokens, 1)
        store.page_store.table.reserve(self.slots)
        most = store.batch * store.page_store.table.entries.shape[1] * (self.tokens // store.page_size + 2)
        self.shapes = {name: list(getattr(store.page_store.table, name).shape) for name in _ARRAYS}
        if store.page_store.table.slots.size:
            self.shapes["slots"][2] = self.slots
        self.shapes |= {"seals": [most, 2], "seen": [1], "counters": [store.batch * store.num_kv_heads]}
        self.seals_before = self.tokens == 1 and not store.page_store.direct  # of older pages, none of which it fills
        self.board: _Board | None = None
        self.there: dict[str, torch.Tensor] = {}  # what the device reads
        self.now: dict[str, np.ndarray] = {}  # what is to be there
        self.arena.expect(room_of(store, self.slots))
        self.planned = False

    # ------------------------------------------------------------------ on the device

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None, softcap: float = 0.0,
        s_aux: torch.Tensor | None = None, window: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """`PagedKV.attend` of q, k and v [B, heads, `tokens`, D], with nothing of the host in it: (out [B, T, Hq, Dv],
        lse [B, Hq, T])."""
        if not self.there:
            raise ValueError(
                "CUDAGraphLayer: attend: expected memory that stays, got a layer before its first step; call pin()"
            )
        op = torch.ops.kvcompress.attend_step if torch.compiler.is_dynamo_compiling() else ops.attend_step
        store, pages, there = self.store, self.store.page_store, self.there
        if store.sliding:
            window = -store.sliding.window if store.sliding.chunked else window or store.sliding.window
        out, lse, _ = op(
            pages.query(q), pages.filled(k, 0), pages.filled(v, 1), self.arena.bytes, there["entries"],
            there["rows"], there["slots"], pages.no_mask, pages.no_aux if s_aux is None else s_aux.float(),
            pages.no_seals if self.seals_before else there["seals"], there["seen"],
            store.page_size, store.sinks, window, pages.scale if scale is None else scale, softcap, 0, pages.formats,
            there["counters"],
        )  # fmt: skip
        return pages.result(out, q.dtype), lse

    def _seal(self) -> None:
        """What the step seals, ahead of the run: a call without seals is one launch."""
        store, pages, there = self.store, self.store.page_store, self.there
        k, v = pages.empties()
        ops.attend_step(
            k, k, v, self.arena.bytes, there["entries"], there["rows"], there["slots"], pages.no_mask, pages.no_aux,
            there["seals"], there["seen"], store.page_size, store.sinks, 0, pages.scale, 0.0, 0, pages.formats,
            there["counters"],
        )  # fmt: skip

    # ------------------------------------------------------------------ on the host

    def pin(self) -> None:
        """From now on the memory of the layer's pool stays in place, for all of the pool's CUDAGraphLayers."""
        _pin([self])

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around a run: before it the table plans and what is new is sent; after it the tokens are stored, or, if it
        failed, not."""
        with steps([self]):
            yield

    def fits(self) -> bool:
        """Are the layer's arrays of the shapes that were recorded?"""
        for name in _ARRAYS:
            x, shape = getattr(self.store.page_store.table, name), self.shapes[name]
            if bool(x.size) != (0 not in shape) or (x.size and list(x.shape[:2]) != shape[:2]):
                return False
        return self.store.page_store.mirror is self.mirror

    def _plan(self) -> tuple[np.ndarray, int]:
        """(pages to seal, slots before)"""
        store, table = self.store, self.store.page_store.table
        if store.offload or store.page_store.mirror is not self.mirror or table.seen + self.tokens > self.slots:
            raise ValueError(
                "CUDAGraphLayer: expected the layer where it was recorded, no page elsewhere, with at most "
                f"{self.slots} slots, got one on {store.device} with {table.seen + self.tokens}; record anew, crop or "
                "reset it"
            )
        seen = table.seen
        if seen == 0:
            store.page_store.place_spans(self.tokens)
        seals, _ = store.page_store.plan(self.tokens, None)
        self.planned = True
        return seals, seen

    def drop(self) -> None:
        """The tokens of this step come by an ordinary call, which plans for itself."""
        if self.planned:
            self.store.page_store.table.rollback()
        self.planned = False

    def _write(self, seals: np.ndarray, seen: int) -> None:
        """To the board, what the step reads."""
        table, now = self.store.page_store.table, self.now
        if not self.fits() or len(seals) > len(now["seals"]):
            raise ValueError(
                f"CUDAGraphLayer: expected a table as it was recorded, {self.shapes['rows'][:2]} rows and heads, own "
                f"slots: {0 not in self.shapes['slots']}, {len(now['seals'])} seals, got {list(table.rows.shape[:2])}, "
                f"{table.slots.size > 0}, {len(seals)}; record anew"
            )
        for name in _ARRAYS:
            x, to = getattr(table, name), now[name]
            if to.size:
                n = min(to.shape[2], x.shape[2])  # the table may have room that it does not use
                to[:, :, :n] = x[:, :, :n]
        now["seals"][: len(seals)], now["seals"][len(seals) :] = seals, -1
        now["seen"][0] = seen

    def _end(self) -> None:
        if not self.planned:
            return
        self.planned = False
        self.store.page_store.table.commit()
        for listener in self.store.listeners():
            listener.on_appended(self.tokens, None)
        self.store.end_call()


class _Board:
    """All that recorded calls of several layers read of the host's, in one tensor on their device. What changes goes
    there as places and words, in one copy of pinned memory, and a kernel spreads it."""

    def __init__(self, arena: Arena, layers: Sequence[CUDAGraphLayer]) -> None:
        self.arena, size, places = arena, 0, []
        for layer in layers:
            for name, shape in layer.shapes.items():
                places.append((layer, name, size))
                size += -(-math.prod(shape) // _LINE) * _LINE  # enough for slots, of four bytes, too
        self.now = np.full(size, -1, np.int64)
        self.sent = self.now.copy()
        with torch.inference_mode(False):  # steps write it, in whatever mode
            self.there = torch.full((size,), -1, device=arena.device)
        for layer, name, at in places:
            shape, kinds = layer.shapes[name], (np.int64, torch.int64)
            if name in ("slots", "counters"):
                kinds = np.int32, torch.int32
            count = math.prod(shape)
            layer.now[name] = self.now[at : at + count].view(kinds[0])[:count].reshape(shape)
            layer.there[name] = self.there[at : at + count].view(kinds[1])[:count].view(shape)
            if name == "counters":
                layer.now[name][:] = 0
                layer.there[name].zero_()
            layer.board = self
            # CUDA graphs of torch.compile copy all other inputs, and refuse to write to them.
            torch._dynamo.mark_static_address(layer.there[name])

    def send(self) -> None:
        self.arena.joined()  # after the plans, which may have taken pages that others' calls gave back
        at = np.flatnonzero(self.now != self.sent)
        room = self.arena.copy_stream.room(16 * len(at)).view(np.int64).reshape(2, -1)
        room[0], room[1] = at, self.now[at]
        changes = torch.from_numpy(room).to(self.arena.device, non_blocking=True)
        self.there.scatter_(0, changes[0], changes[1])
        self.sent[at] = room[1]


def _pin(layers: Sequence[CUDAGraphLayer]) -> None:
    """Their memory stays from now on; those that have no board yet share one, if they share an arena."""
    new = [layer for layer in layers if layer.board is None]
    for arena in {id(layer.arena): layer.arena for layer in new}.values():
        arena.pin()
        torch._dynamo.mark_static_address(arena.bytes)
        _Board(arena, [layer for layer in new if layer.arena is arena])


@contextlib.contextmanager
def steps(layers: Sequence[CUDAGraphLayer]) -> Iterator[None]:
    """`CUDAGraphLayer.step` of several layers: of all, or of none. One copy to the device, and no wait."""
    try:
        plans = [layer._plan() for layer in layers]
        _pin(layers)
        for layer, plan in zip(layers, plans, strict=True):
            layer._write(*plan)
        for board in {id(layer.board): layer.board for layer in layers}.values():
            assert board
            board.send()
        for layer, (seals, _) in zip(layers, plans, strict=True):
            if layer.seals_before and len(seals):
                layer._seal()
        yield
    except BaseException:
        for layer in layers:
            layer.drop()
        raise
    for layer in layers:
        layer._end()


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
