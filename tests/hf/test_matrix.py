"""The composition matrix: rows of features compared with the slow reference; rejected combinations, and when they
fail."""

from __future__ import annotations

import itertools
import random
from typing import Any

import covering
import matrix
import matrix_rows
import pytest
import soaked
import torch

from kvcompress import _C, KVCache, formats

SAMPLE = matrix_rows.sample(36, 20261121, _C.isa())
FEW = [row for row in SAMPLE if row.device == "cpu"][:6]  # a row on CUDA's kernels takes as long as these together
FEW += [row for row in SAMPLE if row.device == "cuda" and row.dim in ("32", "100")][:2]


def name_of(row: matrix_rows.Row) -> str:
    return "-".join(x for x, names in zip(row, matrix_rows.AXES.values(), strict=True) if x != names[0])


@pytest.mark.filterwarnings("ignore::UserWarning")  # about K that does not suit a format
@pytest.mark.parametrize(
    "row", [*FEW, *(pytest.param(row, marks=pytest.mark.full) for row in SAMPLE if row not in FEW)], ids=name_of
)
def test_sample(row: matrix_rows.Row) -> None:
    matrix.run(row)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("fmt", [name for name in formats.NAMES if name != "raw"])
def test_pages_of_zeros_are_noticed(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds of every format are smaller than the error if nothing is stored."""
    row = matrix_rows.plainest({"key": fmt, "value": fmt, "level": _C.isa()})
    matrix.run(row)
    call = matrix.Driver.call

    def zeroing(driver: matrix.Driver, cache: KVCache, *args: Any) -> None:
        call(driver, cache, *args)
        for layer in cache.layers:
            entries = layer.store.page_store.table.entries.reshape(-1)
            for entry in {e for e in entries.tolist() if e >= 0 and e & 0xFFFF == formats.CODES[fmt] * 257}:
                at = (entry >> 16) * 64
                layer.store.page_store.pool.arena[at : at + 64 * 8] = 0

    monkeypatch.setattr(matrix.Driver, "call", zeroing)
    with pytest.raises(AssertionError):
        matrix.run(row)


@pytest.mark.full
@pytest.mark.parametrize("level", matrix_rows.AXES["level"])
def test_pairs(level: str) -> None:
    check(matrix.run_level(level, 2))


@pytest.mark.soak
@pytest.mark.parametrize("level", matrix_rows.AXES["level"])
def test_triples(level: str) -> None:
    found = matrix.run_level(level, 3)
    soaked.steps["rows of the three-way matrix"] += len(found)
    check(found)


def check(found: dict[str, str]) -> None:
    assert found and not {row: text for row, text in found.items() if text}


# ---------------------------------------------------------------- rejected combinations


def values_of(rule: matrix_rows.Rule) -> list[dict[str, str]]:
    """Every value of the rule at least once, and every pair that breaks it."""
    names = list(rule.values)
    most = max(len(x) for x in rule.values.values())
    return [{axis: rule.values[axis][i % len(rule.values[axis])] for axis in names} for i in range(most)]


REFUSED = [(rule, values) for rule in matrix_rows.RULES for values in values_of(rule)]


@pytest.mark.parametrize("rule,values", REFUSED, ids=lambda x: "+".join(x.values()) if isinstance(x, dict) else "")
def test_refused_before_any_work(rule: matrix_rows.Rule, values: dict[str, str]) -> None:
    """An error with expected, got and a hint, at the point that the rule states and not later."""
    row = matrix_rows.plainest(values)
    with pytest.raises(ValueError) as caught:
        matrix.refuse(row, rule.where)
    text = str(caught.value)
    assert rule.says in text and "expected" in text, text
    if rule.where != "new":  # the steps before raise no error
        matrix.refuse(row, "new")


@pytest.mark.parametrize("axis", ["key", "value", "page", "dim", "dtype"])
def test_an_unknown_value_names_the_valid_ones(axis: str) -> None:
    config = matrix.config_of(matrix_rows.plainest({}))
    config.head_dim = 1031 if axis == "dim" else config.head_dim
    options = {"key": {"key": "int5"}, "value": {"value": "kivi3"}, "page": {"page_size": 24}}.get(axis, {})
    wants = {
        "key": "fp8_e4m3, int4",
        "value": "fp8_e4m3, int4",
        "page": "multiple of 16",
        "dim": "576",
        "dtype": "bfloat16",
    }
    with pytest.raises((ValueError, TypeError)) as caught:
        cache = KVCache(config, **options)
        cache.update(*torch.ones(2, 1, 1, 3, 32, dtype=torch.float64), 0)
    assert wants[axis] in str(caught.value), str(caught.value)


def test_rules_are_no_wider_than_what_is_refused() -> None:
    """A row that breaks no rule can be created: the sample runs some; here many are only created."""
    chance = random.Random(5)
    for row in matrix_rows.sample(300, chance.randrange(1 << 30), _C.isa()):
        matrix.refuse(row, "new")


@pytest.mark.parametrize("strength", [2, 3])
def test_rows_cover_what_goes_together(strength: int) -> None:
    """All values of valid rows, found by exhaustive search, occur in a generated row; invalid rows do not."""
    axes = {"a": list("pqr"), "b": list("stu"), "c": list("vw"), "d": list("xyz"), "e": list("kl")}

    def possible(row: dict[str, str]) -> bool:
        values = set(row.values())
        return not any(values >= set(bad) for bad in ("ps", "vx", "wxk", "quy"))  # so v and w both exclude x from k

    def tuples(rows: list[dict[str, str]]) -> set:
        return {some for row in rows for some in itertools.combinations(sorted(row.values()), strength)}

    every = [dict(zip(axes, row, strict=True)) for row in itertools.product(*axes.values())]
    made = covering.rows(axes, strength, possible)
    assert all(map(possible, made)) and all(list(row) == list(axes) for row in made)
    assert tuples(made) == tuples([row for row in every if possible(row)])
    assert len(made) < len(every) / 2
    assert made == covering.rows(axes, strength, possible)


@pytest.mark.full
def test_pairs_are_complete() -> None:
    """Every compatible pair of values is in a row; no row breaks a rule."""
    rows = matrix_rows.rows(2)
    assert all(matrix_rows.possible(row._asdict()) for row in rows)
    axes = list(matrix_rows.AXES)
    there = {(a, row[i], b, row[j]) for row in rows for (i, a), (j, b) in itertools.combinations(enumerate(axes), 2)}
    for a, b in itertools.combinations(axes, 2):
        for x, y in itertools.product(matrix_rows.AXES[a], matrix_rows.AXES[b]):
            # A pair may be valid and still have no row, if three rules together exclude it.
            if (a, x, b, y) not in there and matrix_rows.possible({a: x, b: y}):
                assert not any(
                    matrix_rows.possible({**row, a: x, b: y})
                    for row in (r._asdict() for r in matrix_rows.sample(2000, 1, "scalar"))
                ), (x, y)
