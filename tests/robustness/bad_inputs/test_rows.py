"""The tests named by every row of `rows.py` exist."""

import ast
from pathlib import Path

import pytest

from bad_inputs.rows import ROWS

TESTS = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("row", ROWS)
def test_row_is_tested(row: str) -> None:
    for name in ROWS[row]:
        file, _, test = name.partition("::")
        tree = ast.parse(next(TESTS.rglob(file)).read_text())
        assert any(isinstance(x, ast.FunctionDef) and x.name == test for x in ast.walk(tree)), name
