"""CUDAGraphLayer: captures calls of a layer on a GPU, in a CUDA graph or by torch.compile, and replays them. The inputs
of a captured call are at fixed addresses; before each replay the host updates those that have changed."""

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
_LINE = 8  # words: alignment of arrays in the inputs, as compilers expect


class CUDAGraphLayer:
    """CUDA graphs for calls of `tokens` tokens of a layer on a GPU, with a fixed maximum of `slots` slots.

        layer = CUDAGraphLayer(kv, slots=4096)
        with layer.step(), torch.cuda.graph(graph):
            out, lse = layer.attend(q, k, v)          # captured
        ...
        with layer.step():                            # plans the step, updates what the graph reads
            graph.replay()

    Between replays the layer may be appended to, cropped and reset, and its rows may be reordered. The tokens of a
    call contain no padding. At the first `step` (or `pin`) the pool's memory is allocated for all its CUDAGraphLayers;
    after that it does not grow: allocations beyond raise MemoryError.

    Args:
        store: the layer, with all pages on a GPU, and without policy, calibration, tiers or group.
        slots: maximum number of slots of the layer.
        tokens: T of each call.

    Raises ValueError for other layers. `step` raises ValueError when the shapes of the layer's arrays have changed
    (another batch size, evictions or padding that need a slot per token, another device): capture again then.
    """

    def __init__(self, store: PagedKV, slots: int, tokens: int = 1) -> None:
        mirror = store.page_store.mirror
        policy = store.eviction and type(store.eviction.policy) is not Policy  # `evict(keep)` leaves a plain one
        mapped = store.page_store.basis is not None
        if mirror is None or policy or mapped or store.offload or type(store).op is not store.op:
            raise ValueError(
                "CUDAGraphLayer: expected a layer with all of its pages on a GPU, without a policy, a calibration, "
                "tiers or a group, got another; calls on the CPU need no CUDA graph"
            )
        self.store, self.mirror, self.arena = store, mirror, mirror.arena
        self.slots, self.tokens = checks.integer("slots", slots, 1), checks.integer("tokens", tokens, 1)
        store.page_store.table.reserve(self.slots)
        most = store.batch * store.page_store.table.entries.shape[1] * (self.tokens // store.page_size + 2)
        self.shapes = {name: list(getattr(store.page_store.table, name).shape) for name in _ARRAYS}
        if store.page_store.table.slots.size:
            self.shapes["slots"][2] = self.slots
        self.shapes |= {"seals": [most, 2], "seen": [1], "counters": [store.batch * store.num_kv_heads]}
        self.seals_before = self.tokens == 1 and not store.page_store.direct  # seals only pages filled by earlier calls
        self.inputs: _StaticInputs | None = None
        self.device_arrays: dict[str, torch.Tensor] = {}  # inputs of the captured call
        self.host_arrays: dict[str, np.ndarray] = {}  # their next contents
        self.arena.expect(room_of(store, self.slots))
        self.planned = False

    # ------------------------------------------------------------------ on the device

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None, softcap: float = 0.0,
        s_aux: torch.Tensor | None = None, window: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """`PagedKV.attend` of q, k and v [B, heads, `tokens`, D], without work on the host, for capture. Returns (out
        [B, T, Hq, Dv], lse [B, Hq, T])."""
        if not self.device_arrays:
            raise ValueError(
                "CUDAGraphLayer: attend: expected memory at fixed addresses, got a layer before its first step; call "
                "pin() or step() first"
            )
        op = torch.ops.kvcompress.attend_step if torch.compiler.is_dynamo_compiling() else ops.attend_step
        store, pages, arrays = self.store, self.store.page_store, self.device_arrays
        if store.sliding:
            window = -store.sliding.window if store.sliding.chunked else window or store.sliding.window
        out, lse, _ = op(
            pages.query(q), pages.filled(k, 0), pages.filled(v, 1), self.arena.bytes, arrays["entries"],
            arrays["rows"], arrays["slots"], pages.no_mask, pages.no_aux if s_aux is None else s_aux.float(),
            pages.no_seals if self.seals_before else arrays["seals"], arrays["seen"],
            store.page_size, store.sinks, window, pages.scale if scale is None else scale, softcap, 0, pages.formats,
            arrays["counters"],
        )  # fmt: skip
        return pages.result(out, q.dtype), lse

    def _seal(self) -> None:
        """Seals pages before the captured call, which is then a single launch."""
        store, pages, arrays = self.store, self.store.page_store, self.device_arrays
        k, v = pages.empties()
        ops.attend_step(
            k, k, v, self.arena.bytes, arrays["entries"], arrays["rows"], arrays["slots"], pages.no_mask, pages.no_aux,
            arrays["seals"], arrays["seen"], store.page_size, store.sinks, 0, pages.scale, 0.0, 0, pages.formats,
            arrays["counters"],
        )  # fmt: skip

    # ------------------------------------------------------------------ on the host

    def pin(self) -> None:
        """Allocates the pool's memory for all of its CUDAGraphLayers and fixes its address."""
        _pin([self])

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Context manager around a capture or replay. Plans the step and updates the inputs on entry; commits the
        tokens on exit, or rolls them back on an error."""
        with steps([self]):
            yield

    def fits(self) -> bool:
        """True if the layer's arrays have the shapes of the captured call."""
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
                "CUDAGraphLayer: expected the layer where it was recorded (same device, no offloaded pages), with at "
                f"most {self.slots} slots, got one on {store.device} with {table.seen + self.tokens}; capture again, "
                "crop or reset it"
            )
        seen = table.seen
        if seen == 0:
            store.page_store.place_spans(self.tokens)
        seals, _ = store.page_store.plan(self.tokens, None)
        self.planned = True
        return seals, seen

    def drop(self) -> None:
        """Rolls the plan back, for tokens of this step that are appended by a regular call instead."""
        if self.planned:
            self.store.page_store.table.rollback()
        self.planned = False

    def _write(self, seals: np.ndarray, seen: int) -> None:
        """Writes the inputs of the step to `host_arrays`."""
        table, host = self.store.page_store.table, self.host_arrays
        if not self.fits() or len(seals) > len(host["seals"]):
            raise ValueError(
                f"CUDAGraphLayer: expected the table of the capture, {self.shapes['rows'][:2]} rows and heads, a slot "
                f"per token: {0 not in self.shapes['slots']}, up to {len(host['seals'])} seals, got "
                f"{list(table.rows.shape[:2])}, {table.slots.size > 0}, {len(seals)}; capture the graph again"
            )
        for name in _ARRAYS:
            x, to = getattr(table, name), host[name]
            if to.size:
                n = min(to.shape[2], x.shape[2])  # the table may have unused capacity
                to[:, :, :n] = x[:, :, :n]
        host["seals"][: len(seals)], host["seals"][len(seals) :] = seals, -1
        host["seen"][0] = seen

    def _end(self) -> None:
        if not self.planned:
            return
        self.planned = False
        self.store.page_store.table.commit()
        for listener in self.store.listeners():
            listener.on_appended(self.tokens, None)
        self.store.end_call()


class _StaticInputs:
    """The inputs of captured calls of several layers, in one tensor on their device. Changes are sent as indices and
    words in one copy from pinned memory, and a kernel scatters them."""

    def __init__(self, arena: Arena, layers: Sequence[CUDAGraphLayer]) -> None:
        self.arena, size, places = arena, 0, []
        for layer in layers:
            for name, shape in layer.shapes.items():
                places.append((layer, name, size))
                size += -(-math.prod(shape) // _LINE) * _LINE  # also enough for int32 arrays
        self.host = np.full(size, -1, np.int64)
        self.sent = self.host.copy()
        with torch.inference_mode(False):  # steps write it inside and outside of inference mode
            self.device = torch.full((size,), -1, device=arena.device)
        for layer, name, at in places:
            shape, kinds = layer.shapes[name], (np.int64, torch.int64)
            if name in ("slots", "counters"):
                kinds = np.int32, torch.int32
            count = math.prod(shape)
            layer.host_arrays[name] = self.host[at : at + count].view(kinds[0])[:count].reshape(shape)
            layer.device_arrays[name] = self.device[at : at + count].view(kinds[1])[:count].view(shape)
            if name == "counters":
                layer.host_arrays[name][:] = 0
                layer.device_arrays[name].zero_()
            layer.inputs = self
            # CUDA graphs of torch.compile copy other inputs, and refuse to write to them.
            torch._dynamo.mark_static_address(layer.device_arrays[name])

    def send(self) -> None:
        self.arena.joined()  # after the plans, which may reuse pages that calls on other streams have freed
        at = np.flatnonzero(self.host != self.sent)
        room = self.arena.copy_stream.room(16 * len(at)).view(np.int64).reshape(2, -1)
        room[0], room[1] = at, self.host[at]
        changes = torch.from_numpy(room).to(self.arena.device, non_blocking=True)
        self.device.scatter_(0, changes[0], changes[1])
        self.sent[at] = room[1]


def _pin(layers: Sequence[CUDAGraphLayer]) -> None:
    """Fixes the memory of layers that have no inputs yet; layers of one arena share their inputs."""
    new = [layer for layer in layers if layer.inputs is None]
    for arena in {id(layer.arena): layer.arena for layer in new}.values():
        arena.pin()
        torch._dynamo.mark_static_address(arena.bytes)
        _StaticInputs(arena, [layer for layer in new if layer.arena is arena])


@contextlib.contextmanager
def steps(layers: Sequence[CUDAGraphLayer]) -> Iterator[None]:
    """`CUDAGraphLayer.step` of several layers: commits all of them, or none. One asynchronous copy to the device."""
    try:
        plans = [layer._plan() for layer in layers]
        _pin(layers)
        for layer, plan in zip(layers, plans, strict=True):
            layer._write(*plan)
        for inputs in {id(layer.inputs): layer.inputs for layer in layers}.values():
            assert inputs
            inputs.send()
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
    """Maximum bytes of a pool for `slots` slots of each row: pages by size, in slabs of about 16 pages."""
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
