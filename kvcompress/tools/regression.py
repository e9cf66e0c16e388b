"""Linear fits of measured times, and their break-even points."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def fit(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(intercept, slope) of the least-squares line through (x, y); slope 0 if all x are equal."""
    x, y = zip(*points, strict=True)
    if len(set(x)) == 1:
        return statistics.fmean(y), 0.0
    slope, intercept = statistics.linear_regression(x, y)
    return intercept, slope


def break_even(base: tuple[float, float], other: tuple[float, float]) -> float | None:
    """Number of tokens from which `other` (intercept, slope) is faster than `base`; 0: always, None: never."""
    gain, loss = base[1] - other[1], other[0] - base[0]
    if loss <= 0:
        return 0.0 if gain >= 0 else None
    return loss / gain if gain > 0 else None
