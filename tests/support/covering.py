"""Covering arrays: rows in which every combination of `strength` compatible values occurs.

covertable generates the pairs of the composition matrix in seconds, but for triples it did not finish a row in 7
minutes. This is a greedy construction (AETG; Cohen, Dalal, Fredman, Patton, "The AETG system", IEEE TSE 23, 1997): a
row starts with values that are not covered yet, then each axis takes the value that covers most uncovered combinations;
the best of several candidate rows is kept."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import numpy as np

Row = dict[str, str]


def rows(axes: dict[str, list[str]], strength: int, possible: Callable[[Row], bool], tries: int = 4) -> list[Row]:
    """Deterministic. possible: predicate on a partial row; once False, it must stay False whatever is added."""
    names, chance = list(axes), random.Random(strength)
    counts = [len(values) for values in axes.values()]
    groups = list(itertools.combinations(range(len(names)), strength))
    sizes = [int(np.prod([counts[i] for i in group])) for group in groups]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    # A combination has one index in `due`: the start of its group, plus the values as digits of a mixed radix number.
    digits = np.array([[int(np.prod([counts[j] for j in g[n + 1 :]])) for n in range(strength)] for g in groups])
    due, tuples = np.zeros(starts[-1], bool), []
    for group, start in zip(groups, starts, strict=False):
        for at, values in enumerate(itertools.product(*(range(counts[i]) for i in group)), start):
            tuples.append((group, values))
            due[at] = possible({names[i]: axes[names[i]][v] for i, v in zip(group, values, strict=True)})
    with_axis = []  # for each axis: starts of its groups, indices and digits of the other axes, its own digit
    for axis in range(len(names)):
        own = np.array([axis in g for g in groups])
        table = np.array(groups)[own]
        others = table != axis
        shape = (len(table), strength - 1)
        with_axis.append(
            (starts[:-1][own], table[others].reshape(shape), digits[own][others].reshape(shape), digits[own][~others])
        )

    def complete(row: np.ndarray, left: list[int]) -> bool:
        """Yields the axes with `left` values; False if an axis has no value that is compatible with the row so far."""
        for axis in left:
            start, others, digit, own = with_axis[axis]
            known = (row[others] >= 0).all(1)
            at = start[known] + (row[others[known]] * digit[known]).sum(1)
            values = np.arange(counts[axis])
            gain = due[at[:, None] + own[known][:, None] * values].sum(0) + np.array([chance.random() for _ in values])
            for value in np.argsort(-gain):
                row[axis] = value
                if possible(named(row)):
                    break
            else:
                return False
        return True

    def named(row: np.ndarray) -> Row:
        return {name: axes[name][v] for name, v in zip(names, row, strict=True) if v >= 0}

    def places(row: np.ndarray) -> np.ndarray:
        return starts[:-1] + (row[np.array(groups)] * digits).sum(1)

    found = []
    for seed in chance.sample(range(len(tuples)), len(tuples)):
        if not due[seed]:
            continue
        made: list[np.ndarray] = []
        for _ in range(50):  # other orders of the axes
            row = np.full(len(names), -1)
            row[list(tuples[seed][0])] = tuples[seed][1]
            left = [i for i in range(len(names)) if row[i] < 0]
            chance.shuffle(left)
            made += [row] if complete(row, left) else []
            if len(made) == tries:
                break
        due[seed] = False
        if made:
            best = max(made, key=lambda row: due[places(row)].sum())
            due[places(best)] = False
            found.append(named(best))
    return found
