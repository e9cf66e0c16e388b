"""The planted bugs are current: each still applies, and names tests that there are. `make planted` runs them."""

import shutil
from pathlib import Path

import pytest
from planted import run

BUGS = run.bugs()


def test_enough() -> None:
    assert len(BUGS) >= 20


@pytest.mark.skipif(shutil.which("git") is None, reason="git apply tells")
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_not_stale(bug: run.Bug) -> None:
    done = run.apply(run.ROOT, bug, "--check")
    assert done.returncode == 0, f"{bug.path.name} no longer applies, make it anew:\n{done.stderr}"
    assert bug.what and bug.tests and all((run.ROOT / name).is_file() for name in bug.tests)
    assert Path(bug.path).read_text().count("\n@@") == 1, "one place a bug"
