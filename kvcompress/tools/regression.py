"""Straight lines through measured times, and where two of them cross."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def fit(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(intercept, slope) of the least-squares line through (x, y)."""
    x0, y0 = (statistics.fmean(axis) for axis in zip(*points, strict=True))
    spread = sum((x - x0) ** 2 for x, _ in points)
    slope = sum((x - x0) * (y - y0) for x, y in points) / spread if spread else 0.0
    return y0 - slope * x0, slope


def break_even(base: tuple[float, float], other: tuple[float, float]) -> float | None:
    """Tokens from which on `other` (intercept, slope) is faster than `base`; 0 if it always is, None if it never is."""
    gain, loss = base[1] - other[1], other[0] - base[0]
    if loss <= 0:
        return 0.0 if gain >= 0 else None
    return loss / gain if gain > 0 else None
