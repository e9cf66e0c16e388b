"""What policies cost: a decode step at 2,048 kept tokens, and an eviction; one layer, 32/8 heads of 128, bf16 model.

    python benchmarks/eviction.py [--key int8] [--threads 1]

"with": mean of all steps, evictions included, over the median step without a policy at the mean length.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from kvcompress import H2O, AdaKV, KeyDiff, PagedKV, SnapKV, StreamingLLM
from kvcompress.policies import Policy

H, HQ, D, KEPT, PAGE = 8, 32, 128, 2048, 64
POLICIES: dict[str, Policy | None] = {
    "none": None,
    "StreamingLLM": StreamingLLM(4, KEPT - 4),
    "H2O": H2O(KEPT),
    "H2O shared": H2O(KEPT, heads="shared"),
    "AdaKV(H2O)": AdaKV(H2O(KEPT)),
    "SnapKV": SnapKV(KEPT),
    "KeyDiff": KeyDiff(KEPT),
}


def measure(policy: Policy | None, key: str, steps: int) -> tuple[list[float], list[float]]:
    """(seconds of each step, of each eviction among them)."""
    kv = PagedKV(H, D, key=key, dtype=torch.bfloat16, policy=policy)
    evictions: list[float] = []
    filled = KEPT + PAGE // 2 if policy is None else 2 * KEPT
    for T in [512] * (filled // 512) + [filled % 512] * (filled % 512 > 0):
        kv.attend(*(torch.randn(1, h, T, D).bfloat16() for h in (HQ, H, H)))
    if kv.eviction:
        evict = kv.eviction
        run = evict.run

        def timed() -> bool:
            start = time.perf_counter()
            done = run()
            evictions.extend([time.perf_counter() - start] * done)
            return done

        evict.run = timed  # type: ignore[method-assign]
    times, warm = [], 8
    q, k, v = (torch.randn(1, h, 1, D).bfloat16() for h in (HQ, H, H))
    for _ in range(warm + steps if policy else PAGE // 2):
        start = time.perf_counter()
        kv.attend(q, k, v)
        times.append(time.perf_counter() - start)
    return times[warm:], evictions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--key", default="int8")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    base = 0.0
    for name, policy in POLICIES.items():
        runs = [measure(policy, options.key, 4 * PAGE) for _ in range(3)]
        step = min(statistics.median(times) for times, _ in runs)
        mean = min(statistics.mean(times) for times, _ in runs)
        base = base or step
        each = [seconds for _, found in runs for seconds in found]
        eviction = f"{1e3 * statistics.median(each):6.2f} ms an eviction" if each else ""
        print(f"{name:13} step {1e6 * step:5.0f} us  with evictions {mean / base:5.2f}x none  {eviction}")


if __name__ == "__main__":
    main()
