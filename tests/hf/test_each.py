"""Every value of every axis of the composition matrix once, with defaults elsewhere: the cache tests of `make
check`."""

from __future__ import annotations

import matrix
import matrix_rows
import pytest

from kvcompress import _C

LEFT = {"level": None, "device": ("cpu",)}  # levels have separate tests; "cuda" compiles the kernels for the host


def each() -> list[matrix_rows.Row]:
    rows = []
    for axis, values in matrix_rows.AXES.items():
        for value in values if axis not in LEFT else LEFT[axis] or ():
            row = matrix_rows.plainest({axis: value, "level": _C.isa()})
            if matrix_rows.possible(row._asdict()) and row not in rows:
                rows.append(row)
    return rows


EACH = each()


@pytest.mark.filterwarnings("ignore::UserWarning")  # about K that does not suit a format
@pytest.mark.parametrize("row", EACH, ids=lambda row: "-".join(x for x, y in zip(row, EACH[0], strict=True) if x != y))
def test_each(row: matrix_rows.Row) -> None:
    matrix.run(row)


def test_option_values_are_covered() -> None:
    there = {(axis, value) for row in EACH for axis, value in row._asdict().items() if axis != "level"}
    every = {(axis, value) for axis, values in matrix_rows.AXES.items() if axis != "level" for value in values}
    assert every - there <= {("device", "cuda"), ("positions", "cache"), ("open", "direct")}
