"""Casts at every boundary, through rows, pages and standalone ops, on every kernel level."""

import os
import subprocess
import sys
from pathlib import Path

import cast_policy
import pytest

from kvcompress import _C

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("check", cast_policy.CHECKS)
def test_this_level(check):
    cast_policy.CHECKS[check]()


@pytest.mark.parametrize("isa", [level for level in _C.isa_available() if level != _C.isa()])
def test_other_levels(isa):
    env = {
        **os.environ,
        "KVCOMPRESS_ISA": isa,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")]),
    }
    command = [sys.executable, str(ROOT / "tests" / "support" / "cast_policy.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [isa, str(len(cast_policy.CHECKS))]
