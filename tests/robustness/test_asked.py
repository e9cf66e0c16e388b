"""Requested memory: a file, an op or a cache requests no more than its input justifies. Counted in a separate process
by an allocator that records every request, granted or not."""

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
    """Loading a sealed file, and using the cache before it gets new tokens: at most 4 times its size plus 1 MB."""
    taken = int(run("asked_files.py", str(turns)).split()[0])
    assert turns // 20 <= taken <= turns * 2 // 3  # both outcomes occur


def test_calls() -> None:
    """Ops, layers, caches: inputs and outputs, some workspace, and nothing proportional to the stored tokens unless
    needed."""
    assert "MORE" not in run("asked_calls.py")
