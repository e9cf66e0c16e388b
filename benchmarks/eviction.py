"""Cost of policies: a decode step at 2,048 kept tokens, and an eviction; one layer, 32/8 heads of 128, bf16 model.

    python benchmarks/eviction.py [--key int8] [--threads 1] [--rounds 5]

Ratios to steps without a policy at the same lengths (2,048 to 2,112 tokens, one page sealed) in the same round: medians
over rounds, with minimum and maximum. "step": the median step; "all": the mean of the 64 steps between evictions, each
the median of four repetitions."""

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


def filled(policy: Policy | None, key: str, tokens: int) -> PagedKV:
    kv = PagedKV(H, D, key=key, dtype=torch.bfloat16, policy=policy)
    for T in [512] * (tokens // 512) + [tokens % 512] * (tokens % 512 > 0):
        kv.attend(*(torch.randn(1, h, T, D).bfloat16() for h in (HQ, H, H)))
    return kv


def measure(policy: Policy | None, key: str, pages: int) -> tuple[list[float], list[float]]:
    """(seconds of each step while this many pages fill, of each eviction among them)."""
    times: list[float] = []
    evictions: list[float] = []
    q, k, v = (torch.randn(1, h, 1, D).bfloat16() for h in (HQ, H, H))
    kv = filled(policy, key, 2 * KEPT)
    for page in range(-1, pages):  # the first one is a warm-up
        if policy is None:
            kv = filled(None, key, KEPT)
        elif page == 0:
            time_evictions(kv, evictions)
        for _ in range(PAGE):
            start = time.perf_counter()
            kv.attend(q, k, v)
            times.append(time.perf_counter() - start)
    return times[PAGE:], evictions


def time_evictions(kv: PagedKV, found: list[float]) -> None:
    """Appends the seconds of each eviction to `found`."""
    assert kv.eviction is not None
    run = kv.eviction.evict_over_budget

    def timed() -> bool:
        start = time.perf_counter()
        done = run()
        found.extend([time.perf_counter() - start] * done)
        return done

    kv.eviction.evict_over_budget = timed  # type: ignore[method-assign]


def cycle(times: list[float]) -> float:
    return statistics.mean(statistics.median(times[i::PAGE]) for i in range(PAGE))


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):5.3f}x ({min(values):5.3f} to {max(values):5.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--key", default="int8")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    runs = [{name: measure(x, options.key, 4) for name, x in POLICIES.items()} for _ in range(options.rounds)]
    for name in POLICIES:
        step = [statistics.median(run[name][0]) / statistics.median(run["none"][0]) for run in runs]
        whole = [cycle(run[name][0]) / cycle(run["none"][0]) for run in runs]
        micros = 1e6 * statistics.median([statistics.median(run[name][0]) for run in runs])
        each = [1e3 * seconds for run in runs for seconds in run[name][1]]
        text = f"{name:13} step {micros:4.0f} us  {spread(step)}  all {spread(whole)}"
        print(text, f" {statistics.median(each):5.2f} ms an eviction" if each else "")


if __name__ == "__main__":
    main()
