"""The same random operations store the same bytes on every kernel level of this CPU, step by step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvcompress import _C

LIFE = Path(__file__).parents[1] / "support" / "life.py"


@pytest.mark.parametrize("lives", [24, pytest.param(600, marks=pytest.mark.full)])
def test_stored_bytes_after_random_operations(lives: int) -> None:
    paths = os.pathsep.join(x for x in sys.path if x)
    running = {
        level: subprocess.Popen(
            [sys.executable, LIFE, "0", str(lives)], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "KVCOMPRESS_ISA": level, "PYTHONPATH": paths},
        )
        for level in _C.isa_available()
    }  # fmt: skip
    said = {level: process.communicate()[0].splitlines() for level, process in running.items()}
    assert all(process.returncode == 0 for process in running.values())
    assert len(said["scalar"]) == lives and len({x.split()[-1] for x in said["scalar"]}) == lives
    for level, lines in said.items():
        for got, want in zip(lines, said["scalar"], strict=True):
            assert got == want, f"{level} and scalar part in life {got.split()[0]}"
