"""Third-party programs through patch_generate, as in the examples: lm-evaluation-harness, TRL."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_the_harness_runs_with_our_cache(tmp_path):
    pytest.importorskip("lm_eval")
    command = [sys.executable, "-W", "ignore", str(ROOT / "examples" / "harness" / "run.py"), "--limit", "16"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if "exact match" in line}
    assert float(rows["int8"].split()[3]) >= float(rows["DynamicCache"].split()[3]) - 0.13
    assert "2 calls" in rows["int8"] and "2 calls" in rows["int4"]


@pytest.mark.full
def test_a_trainer_samples_through_our_cache(tmp_path):
    pytest.importorskip("trl")
    command = [sys.executable, "-W", "ignore", str(ROOT / "examples" / "trl" / "run.py")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert "2 calls of generate" in done.stdout
