"""Computes how fast warps issue: replays their traces with the stall counts and scoreboards that the compiler
encoded, and with assumed latencies. A scheduler issues one instruction per cycle, from the next warp that is ready."""

import collections

from program import Kernel

LATENCY = {"LDG": 330, "LD": 330, "LDS": 30, "LDL": 40, "LDC": 40, "LDCU": 40, "ULDC": 40, "SHFL": 25, "MUFU": 20,
           "HMMA": 33, "MOVM": 25, "REDUX": 20, "S2R": 25, "S2UR": 25, "R2UR": 12, "VOTEU": 12, "I2F": 20,
           "F2I": 20, "F2F": 20, "STS": 20, "STG": 20, "STL": 20}  # fmt: skip
"""Cycles until a result is available, for instructions with a scoreboard; 330: a load that hits L2. Others: 12.
Asynchronous copies are complete when they are waited for."""
BUSY = {"HMMA": ("tensor", 8), "MUFU": ("special", 8), "I2F": ("special", 8), "F2I": ("special", 8),
        **dict.fromkeys(("LDS", "STS", "LDG", "LDGSTS", "SHFL"), ("memory", 4))}  # fmt: skip
"""The unit of the scheduler that an instruction occupies, and for how many cycles."""
JUMP = 12
"""Additional cycles after a taken branch."""


class _Warp:
    def __init__(self, kernel: Kernel, trace: list[int]):
        self.kernel, self.trace, self.at, self.ready, self.barriers = kernel, trace, 0, 0, [0] * 6

    def may(self, free: dict[str, int]) -> int:
        """The first cycle at which the warp can issue."""
        x = self.kernel.code[self.trace[self.at]]
        waited = x.control[4]
        times = [self.ready, free[BUSY[x.name][0]] if x.name in BUSY else 0]
        return max(times + [t for i, t in enumerate(self.barriers) if waited >> i & 1])

    def issue(self, now: int, free: dict[str, int]) -> None:
        at = self.trace[self.at]
        x = self.kernel.code[at]
        stall, _, writes, reads, _ = x.control
        latency = LATENCY.get(x.name, 12)
        if writes < 6:
            self.barriers[writes] = max(self.barriers[writes], now + latency)
        if reads < 6:
            self.barriers[reads] = max(self.barriers[reads], now + min(latency, 15))
        if x.name in BUSY:
            free[BUSY[x.name][0]] = now + BUSY[x.name][1]
        self.at, self.ready = self.at + 1, now + max(stall, 1)
        if self.at < len(self.trace) and self.trace[self.at] != at + 1:
            self.ready += JUMP


def cycles(kernel: Kernel, traces: list[list[int]]) -> int:
    """Cycles until one scheduler has issued all instructions of its warps."""
    warps, now, last = [_Warp(kernel, trace) for trace in traces], 0, -1
    free: dict[str, int] = collections.defaultdict(int)
    while True:
        order = [(last + 1 + i) % len(warps) for i in range(len(warps))]
        left = [i for i in order if warps[i].at < len(warps[i].trace)]
        if not left:
            return now
        times = [warps[i].may(free) for i in left]
        soonest = min(times)
        now = max(now, soonest)
        last = next(i for i, t in zip(left, times, strict=True) if t <= now)
        warps[last].issue(now, free)
        now += 1
