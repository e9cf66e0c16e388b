"""The slow reference of the matrix: the tokens that a layer must hold, the contents of its pages, and attention in
float64. Pages are decoded by `matrix_pages`; policies are recomputed from their definitions. Shares no code with
the package and only takes the table's arrays from it."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from codec_reference import SPEC
from matrix_pages import RAW, Line, lines_of

TOKEN = {8: 0.15, 4: 0.6, 3: 1.0, 2: 1.4}  # relative error of a stored token
ALL = {8: 0.08, 4: 0.3, 3: 0.5, 2: 0.7}  # relative error over all tokens of a head with that many bits
# error of attention compared with float64 over the stored values: bounds of the design
OUT = {8: 5e-3, 4: 2e-2, 3: 2e-2, 2: 2e-2}
HALF = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


# ---------------------------------------------------------------- expected state


@dataclass
class Spec:
    """A row of the matrix, as far as it determines what is stored. recent = -1: tokens go directly to sealed pages."""

    H: int
    G: int
    Dk: int
    Dv: int
    dtype: torch.dtype
    page: int
    policy_name: str
    policy: Any
    key: str
    value: str
    recent: int
    pads_stored: bool
    moved: bool
    draft: bool
    unsealed: bool  # attention is over what was stored before the call


def bits_of(name: str) -> int:
    return SPEC[name][0]


class Model:
    """Sequences that a cache of layers `kinds` (("full" or "sliding" or "chunked", window)) must hold."""

    def __init__(self, spec: Spec, layers: int, rows: int, kinds: list[tuple[str, int]]) -> None:
        self.spec, self.kinds = spec, kinds
        self.real = torch.ones(rows, 0, dtype=torch.bool)
        self.k = [torch.zeros(rows, spec.H, 0, spec.Dk, dtype=torch.float64) for _ in range(layers)]
        self.v = [torch.zeros(rows, spec.H, 0, spec.Dv, dtype=torch.float64) for _ in range(layers)]
        self.accumulated = [torch.zeros(rows, spec.H, 0, dtype=torch.float64) for _ in range(layers)]
        self.kept: list[list[list[set[int]]]] = [
            [[set() for _ in range(spec.H)] for _ in range(rows)] for _ in range(layers)
        ]
        self.drafts = False  # the last call may have been a draft: its eviction is deferred to the next call
        self.gone = [0] * rows  # number of tokens evicted before the row's last eviction, for moved sinks

    @property
    def rows(self) -> int:
        return len(self.real)

    @property
    def seen(self) -> int:
        return self.real.shape[1]

    def token(self) -> torch.Tensor:
        """bool [B, seen]: slots that store a token."""
        return torch.ones_like(self.real) if self.spec.pads_stored else self.real

    # ------------------------------------------------------------------ a call

    def begin(self, own: torch.Tensor) -> None:
        self.base = self.seen
        self.real = torch.cat([self.real, own], 1)

    def exact_keys(self, layer: int, b: int, h: int, slots: list[int]) -> torch.Tensor:
        """Expected K of stored slots: unchanged, except sinks that are moved with the window."""
        k = self.k[layer][b, h, slots].clone()
        if self.spec.moved and self.gone[b] and self.kinds[layer][0] == "full":
            positions = self.positions(b)
            speed = 10000.0 ** -(torch.arange(0, self.spec.Dk, 2, dtype=torch.float64) / self.spec.Dk)
            angle = self.gone[b] * speed
            for i, slot in enumerate(slots):
                if positions[slot] < 4:
                    z = torch.complex(k[i, : self.spec.Dk // 2], k[i, self.spec.Dk // 2 :])
                    z = z * torch.exp(1j * angle)
                    k[i] = torch.cat([z.real, z.imag]).to(self.spec.dtype).double()
        return k

    def positions(self, b: int) -> list[int]:
        return (self.token()[b].long().cumsum(0) - 1).tolist()

    def lines(self, layer: int, paged: Any) -> list[list[Line]]:
        """The stored contents."""
        if not paged.is_initialized:
            return [[Line([], [], [], [], []) for _ in range(self.spec.H)] for _ in range(self.rows)]
        return lines_of(paged.store)

    def read(self, layer: int, paged: Any, old: int) -> list[list[Line]]:
        """Decodes the layer, and compares it with what it must hold of `old` slots."""
        spec, found = self.spec, self.lines(layer, paged)
        raw = (RAW[spec.dtype], RAW[spec.dtype])
        own = tuple(RAW[spec.dtype] if x == "raw" else x for x in (spec.key, spec.value))
        rungs = {
            tuple(RAW[spec.dtype] if x == "raw" else x for x in pair) for pair in getattr(spec.policy, "ladder", ())
        }
        for b, heads in enumerate(found):
            for h, line in enumerate(heads):
                where = f"layer {layer}, row {b}, head {h}"
                self.check_slots(layer, b, h, line.slots, old, where)
                if not line.slots:
                    continue
                assert set(line.kinds) <= {raw, own, *rungs}, f"{where}: pages in {set(line.kinds)}"
                exact = self.exact_keys(layer, b, h, line.slots), self.v[layer][b, h, line.slots]
                for side, (got, want) in enumerate(zip((line.k, line.v), exact, strict=True)):
                    lengths = want.norm(dim=-1).clamp(min=1e-9)
                    error = (got - want).norm(dim=-1)
                    bits = [bits_of(kinds[side]) for kinds in line.kinds]
                    # The grid of a channel spans its page, whose largest token may be three times this one.
                    grown = [1.6 if kinds in rungs or (side == 0 and SPEC[kinds[0]][3] == "channel") else 1.0
                             for kinds in line.kinds]  # fmt: skip
                    bound = torch.tensor(
                        [TOKEN[n] * x if n <= 8 else 0.0 for n, x in zip(bits, grown, strict=True)]
                    )  # fmt: skip
                    if spec.moved and side == 0:  # rotation to other positions, rounded
                        bound = bound.clamp(min=2e-2 if spec.dtype is not torch.float32 else 1e-5)
                    worst = (error / lengths - bound).argmax()
                    assert bool((error <= bound * lengths).all()), (
                        f"{where}: {'KV'[side]} of slot {line.slots[int(worst)]} in {line.kinds[int(worst)][side]}: "
                        f"error {float((error / lengths)[worst]):.3g}"
                    )
                    # with fewer tokens, a single one dominates
                    for n in {n for n in bits if n <= 8 and bits.count(n) >= 16}:
                        at = torch.tensor([x == n for x in bits])
                        more = max(x for x, y in zip(grown, bits, strict=True) if y == n)
                        most = min(0.95, ALL[n] * more)  # zeros have a relative error of 1
                        assert error[at].norm() <= most * want[at].norm(), (where, "KV"[side], n)
                if spec.policy is None and own != raw and self.kinds[layer][0] == "full":
                    open_ = sum(kinds == raw for kinds in line.kinds) - 4
                    most = 0 if spec.recent < 0 else 2 * spec.page + spec.recent
                    assert open_ <= most, f"{where}: {open_} raw tokens of {len(line.slots)}"
        return found

    def check_slots(self, layer: int, b: int, h: int, slots: list[int], old: int, where: str) -> None:
        kind, window = self.kinds[layer]
        tokens = [i for i, t in enumerate(self.token()[b, :old].tolist()) if t]
        assert len(set(slots)) == len(slots), f"{where}: a slot is there twice"
        if kind == "full":
            want = self.kept[layer][b][h] if self.spec.policy is not None else set(tokens)
            missing, extra = sorted(want - set(slots)), sorted(set(slots) - want)
            assert not missing and not extra, f"{where}: missing {missing[:9]}, too many {extra[:9]}"
            return
        assert set(slots) <= set(tokens), where
        if kind == "sliding":
            needed = {i for i in tokens if i > old - window}
        else:
            first = int(self.real[b].int().argmax())
            needed = {i for i in tokens if (i - first) // window == (old - first) // window}
        assert needed <= set(slots), f"{where}: missing {sorted(needed - set(slots))[:9]} of the window"
        self.kept[layer][b][h] = set(slots)

    def merged(self, layer: int, before: Line, after: Line) -> Line:
        """The state that a call attends to: pages that were full are sealed first, others are unchanged."""
        if self.spec.unsealed and self.kinds[layer][0] == "full":
            return before
        at = {slot: i for i, slot in enumerate(after.slots)}
        where = [at[slot] if full else None for slot, full in zip(before.slots, before.full, strict=True)]
        pairs = [(before, i) if j is None else (after, j) for i, j in enumerate(where)]
        return Line(
            before.slots, [x.k[i].numpy() for x, i in pairs], [x.v[i].numpy() for x, i in pairs],
            [x.kinds[i] for x, i in pairs], before.full,
        )  # fmt: skip

    def attended(
        self, layer: int, before: list[list[Line]], after: list[list[Line]], q: torch.Tensor, k: torch.Tensor,
        v: torch.Tensor, out: torch.Tensor,
    ) -> None:  # fmt: skip
        """Checks `out` [B, Hq, T, Dv] of a layer for q, k, v; its contents `before` and `after` the call, except for
        evictions."""
        spec, (kind, window), base = self.spec, self.kinds[layer], self.base
        self.k[layer] = torch.cat([self.k[layer], k.double()], 2)
        self.v[layer] = torch.cat([self.v[layer], v.double()], 2)
        paid = torch.zeros(self.rows, spec.H, self.seen, dtype=torch.float64)
        asks = torch.arange(base, self.seen)
        for b in range(self.rows):
            real = self.real[b, base:]
            first = int(self.real[b].int().argmax())
            for h in range(spec.H):
                line = self.merged(layer, before[b][h], after[b][h])
                slots = torch.tensor([*line.slots, *range(base, self.seen)])
                K = torch.cat([line.k.reshape(-1, spec.Dk), k[b, h].double()])
                V = torch.cat([line.v.reshape(-1, spec.Dv), v[b, h].double()])
                sees = (slots <= asks[:, None]) & self.real[b, slots]
                if kind == "sliding":
                    sees &= slots > asks[:, None] - window
                if kind == "chunked":
                    sees &= (slots - first) // window == (asks[:, None] - first) // window
                Q = q[b, h * spec.G : (h + 1) * spec.G].double()
                s = (Q @ K.T / math.sqrt(spec.Dk)).masked_fill(~sees, -math.inf)
                p = s[:, real].softmax(-1)
                want, got = p @ V, out[b, h * spec.G : (h + 1) * spec.G][:, real].double()
                paid[b, h, slots] += p.sum((0, 1))
                if not want.numel():
                    continue
                bits = [bits_of(name) for kinds in line.kinds for name in kinds if bits_of(name) <= 8]
                bound = HALF[spec.dtype] + (OUT[min(bits)] if bits else 0)
                error = float((got - want).norm() / want.norm())
                assert error <= bound, f"layer {layer}, row {b}, head {h}: attention off by {error:.3g}"
        self.accumulated[layer] = (
            torch.nn.functional.pad(self.accumulated[layer], (0, self.seen - self.accumulated[layer].shape[2])) + paid
        )

    def end(self, cache: Any) -> None:
        """The end of a pass, after evictions."""
        for layer, (kind, _) in enumerate(self.kinds):
            if kind == "full" and self.spec.policy is not None:
                self.evict(layer, cache.layers[layer])
        self.base = self.seen

    # ------------------------------------------------------------------ policies

    def evict(self, layer: int, paged: Any) -> None:
        spec, policy = self.spec, self.spec.policy
        budget, found = policy.budget, None
        for b in range(self.rows):
            kept, tokens = self.kept[layer][b], self.token()[b].tolist()
            for h in range(spec.H):
                kept[h] |= {i for i in range(self.base, self.seen) if tokens[i]}
            if (self.drafts and self.base < self.seen) or sum(map(len, kept)) < spec.H * (budget + policy.slack):
                continue
            positions, n = self.positions(b), sum(tokens)
            sure = {i for i in kept[0] if positions[i] < policy.sinks or positions[i] >= n - policy.recent}
            if spec.policy_name == "StreamingLLM":
                new = {i for i in range(self.seen) if tokens[i] and positions[i] >= n - (budget - policy.sinks)}
                for h in range(spec.H):
                    kept[h] = {i for i in kept[h] if i in sure or i in new}
                if layer == len(self.kinds) - 1 and spec.moved:
                    self.gone[b] = n - len(kept[0])
                continue
            found = found or self.lines(layer, paged)
            sizes = [len(found[b][h].slots) for h in range(spec.H)]
            assert sum(sizes) == spec.H * budget, f"layer {layer}, row {b}: kept {sizes} of {budget}"
            for h in range(spec.H):
                there = set(found[b][h].slots)
                sure_h = {i for i in kept[h] if positions[i] < policy.sinks or positions[i] >= n - policy.recent}
                assert sure_h <= there <= kept[h], f"layer {layer}, row {b}, head {h}: protected {sure_h - there} gone"
                if "AdaKV" in spec.policy_name:
                    assert len(there) >= budget // 5
                else:
                    assert len(there) == budget
                self.check_order(layer, b, h, there - sure_h, kept[h] - there, positions, n)
                kept[h] = there

    def check_order(
        self, layer: int, b: int, h: int, stay: set[int], go: set[int], positions: list[int], n: int
    ) -> None:
        """Checks that the kept tokens have the higher scores, within rounding."""
        spec = self.spec
        if not stay or not go or spec.draft or spec.policy_name not in ("KNorm", "Demote(KNorm)", "H2O"):
            return
        low = [bits_of(name) for name in (spec.key, spec.value) if name != "raw"]
        # Error of a score, from measured errors of a stored token (TOKEN): 3 bits are between 4 and 2.
        wide = {16: 1e-3, 8: 0.1, 4: 0.4, 3: 0.65, 2: 0.9}[min([16, *low])] + 10 * HALF[spec.dtype]
        if "KNorm" in spec.policy_name:
            length = self.k[layer][b, h].norm(dim=-1)
            assert max(float(length[i]) for i in stay) <= (1 + wide) * min(float(length[i]) for i in go)
        else:
            score = {i: float(self.accumulated[layer][b, h, i]) / (n - positions[i]) for i in stay | go}
            assert min(score[i] for i in stay) * (1 + wide) >= max(score[i] for i in go)

    # ------------------------------------------------------------------ changes

    def opened(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """The cache starts with these K, V [B, H, n, D]."""
        n = pairs[0][0].shape[2]
        self.real = torch.ones(self.rows, n, dtype=torch.bool)
        for layer, (k, v) in enumerate(pairs):
            self.k[layer], self.v[layer] = k.double(), v.double()
            self.accumulated[layer] = torch.zeros(self.rows, self.spec.H, n, dtype=torch.float64)
            self.kept[layer] = [[set(range(n)) for _ in range(self.spec.H)] for _ in range(self.rows)]
        self.base = n

    def crop(self, change: int) -> None:
        seen = self.seen + change
        self.real = self.real[:, :seen]
        for parts in (self.k, self.v, self.accumulated):
            parts[:] = [x[:, :, :seen] for x in parts]
        self.kept = [[[{i for i in s if i < seen} for s in row] for row in layer] for layer in self.kept]
        self.base = seen

    def select(self, index: list[int]) -> None:
        self.real = self.real[index]
        for parts in (self.k, self.v, self.accumulated):
            parts[:] = [x[index] for x in parts]
        self.kept = [[[set(s) for s in layer[b]] for b in index] for layer in self.kept]
        self.gone = [self.gone[b] for b in index]

    def copied(self) -> Model:
        return copy.deepcopy(self)
