"""Memory asked for, as a property: a file, an op, a cache asks for no more than its input lets one expect. Counted in a
process of its own, by an allocator that notes every request, granted or not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import asked
import pytest

SUPPORT = Path(__file__).parents[1] / "support"
pytestmark = pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="has an allocator of its own")


def run(program: str, *args: str) -> str:
    command = [sys.executable, SUPPORT / program, *args]
    done = subprocess.run(command, env=asked.environment(), capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("turns", [60, pytest.param(2000, marks=pytest.mark.full)])
def test_files(turns: int) -> None:
    """Loading a sealed file, and what is asked of the cache before it gets new tokens: 4 times its length and 1 MB."""
    taken = int(run("asked_files.py", str(turns)).split()[0])
    assert turns // 20 <= taken <= turns * 2 // 3  # both ways are tried


def test_calls() -> None:
    """Ops, layers, caches: what they are given and give back, some workspace, and nothing that grows with what is
    stored where it need not."""
    assert "MORE" not in run("asked_calls.py")
