"""Files change between any two of our system calls."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "support" / "meddle.py"


@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="is preloaded itself")
def test_files_that_change_between_any_two_calls() -> None:
    """Deleted, truncated, overwritten or replaced by links before each call in turn: it succeeds, or is rejected."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(x for x in sys.path if x)}
    done = subprocess.run([sys.executable, PROGRAM], env=env, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    meddled, refused = (int(x) for x in done.stdout.replace(",", "").split() if x.isdigit())
    assert meddled > 100 and meddled // 10 < refused < meddled
