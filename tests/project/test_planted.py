"""The planted bugs are up to date: each patch applies, and names existing tests. `make planted` runs them."""

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


@pytest.mark.full  # runs pytest with workers three times
def test_a_failure_is_caught_and_an_error_is_none(tmp_path: Path) -> None:
    """With -x under xdist, both a failure and a collection error end with exit code 2."""
    (tmp_path / "failed.py").write_text("def test_a(): assert 0\n")
    (tmp_path / "passed.py").write_text("def test_a(): pass\n")
    (tmp_path / "error.py").write_text("import nowhere\n")
    assert run.notice(tmp_path, ["failed.py"]) == "caught"
    assert run.notice(tmp_path, ["passed.py"]) == ""
    with pytest.raises(SystemExit, match="(?s)got an error; pytest says 2.*No module named 'nowhere'"):
        run.notice(tmp_path, ["error.py"])


CRASH = "worker 'gw0' crashed while running 'tests/test_a.py::test_b'"
LEFT = "_____ ERROR at teardown of test_bad[k] _____\nE       assert 44 == 0\n16 passed, 1 error in 27.16s"
IMPORT = "E   ImportError: 1 failed, a worker crashed\n1 error in 8.90s"


@pytest.mark.parametrize(
    ("code", "said"), [(1, "1 failed, 3 passed in 1.0s"), (2, "2 failed, 1 error in 9s"), (2, LEFT), (3, CRASH)]
)
def test_caught(code: int, said: str) -> None:
    assert run.verdict(code, f"some output\n{said}\n") == "caught"


@pytest.mark.parametrize(("code", "said"), [(2, IMPORT), (1, "3 passed, 1 error in 2s"), (5, "no tests ran in 1s")])
def test_not_caught(code: int, said: str) -> None:
    with pytest.raises(SystemExit, match=f"pytest says {code}"):
        run.verdict(code, said)
