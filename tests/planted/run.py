"""Applies each bug of this folder to a copy of the tree and runs the tests of its layer, which must detect it.

    make planted                                        # all
    python tests/planted/run.py causal-off-by-one       # some
    python tests/planted/run.py --resume                # all except those detected before, if unchanged

A patch starts with a description and `tests:`, the test files that must fail. A patch that no longer applies is an
error (checked in every commit by tests/project/test_planted.py): recreate it from the current code."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NOTICED = ROOT / "build" / "planted" / "noticed.json"  # patches, with commit and seconds of the run
LIMIT = 400  # time limit in seconds for the tests of one bug


class Bug(NamedTuple):
    name: str
    what: str
    tests: list[str]
    path: Path

    def digest(self) -> str:
        return hashlib.sha256(self.path.read_bytes()).hexdigest()


def bugs() -> list[Bug]:
    found = []
    for path in sorted(HERE.glob("*.patch")):
        what, tests, *_ = path.read_text().splitlines()
        assert tests.startswith("tests: "), f"{path.name}: expected a second line with tests:, got {tests!r}"
        found.append(Bug(path.stem, what, [f"tests/{name}" for name in tests.split()[1:]], path))
    return found


def apply(tree: Path, bug: Bug, *options: str) -> subprocess.CompletedProcess:
    """git apply, whatever repository the tree is in."""
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    env.pop("GIT_DIR", None)
    return subprocess.run(
        ["git", "apply", *options, str(bug.path)], cwd=tree, env=env, capture_output=True, text=True, check=False
    )


def copy_of_the_tree(to: Path) -> None:
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    shutil.rmtree(to, ignore_errors=True)
    for name in names.decode().split("\0")[:-1]:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, to / name)


def build(tree: Path) -> None:
    env = {**os.environ, "CC": f"{sys.executable} {HERE / 'cc.py'} {tree.parent / 'objects'} cc"}
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=tree, env=env, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"the tree does not build:\n{done.stdout}{done.stderr}")


def verdict(code: int, said: str) -> str:
    """The verdict by pytest's exit code and output. The code is not sufficient: with -x, 2 is a failure or a failed
    import. A failing assertion in a fixture's teardown is a failure, too, though pytest calls it an error."""
    if code == 0:
        return ""
    if re.search(r"^\d+ failed\b|^_+ ERROR at teardown of |^worker '\w+' crashed while running", said, re.MULTILINE):
        return "caught"
    raise SystemExit(f"expected a failed test or none, got an error; pytest says {code}:\n{said[-4000:]}")


def notice(tree: Path, files: list[str], limit: int | None = LIMIT) -> str:
    """How the bug was detected: by a failed test or a crash, or by exceeding `limit` seconds; "" if the tests pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "2", "-p", "no:cacheprovider", "-m"]
    command += ["not full and not soak", *files]
    try:
        done = subprocess.run(
            command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1"}, capture_output=True,
            text=True, timeout=limit, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no end in {limit} s"
    return verdict(done.returncode, done.stderr + done.stdout)


def plant(chosen: list[Bug], tree: Path, commit: str) -> list[str]:
    """Applies the bugs one after the other, each by itself; returns the names of undetected ones."""
    noticed, missed = json.loads(NOTICED.read_text()) if NOTICED.exists() else {}, []
    for bug in chosen:
        start = time.monotonic()
        if (done := apply(tree, bug)).returncode:
            raise SystemExit(f"{bug.path.name} is stale, make it anew:\n{done.stderr}")
        build(tree)
        caught = notice(tree, bug.tests)
        apply(tree, bug, "-R")
        seconds = round(time.monotonic() - start)
        print(f"{caught or 'MISSED'}  {bug.name}: {bug.what} ({seconds} s)", flush=True)
        if caught:
            noticed[bug.digest()] = [commit, seconds]
            NOTICED.write_text(json.dumps(noticed))
        else:
            missed.append(bug.name)
    return missed


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from record import commit, record

    resume, names = "--resume" in sys.argv[1:], set(sys.argv[1:]) - {"--resume"}
    if not resume and not names:
        NOTICED.unlink(missing_ok=True)
    every = [bug for bug in bugs() if not names or bug.name in names]
    before = json.loads(NOTICED.read_text()) if resume and NOTICED.exists() else {}
    chosen, tree = [bug for bug in every if bug.digest() not in before], ROOT / "build" / "planted" / "tree"
    copy_of_the_tree(tree)
    build(tree)
    files = sorted({name for bug in chosen for name in bug.tests})
    if files and notice(tree, files, None):
        raise SystemExit(f"expected tests that pass without any bug, got failures in {' '.join(files)}")
    missed = plant(chosen, tree, commit())
    print(f"{len(every) - len(missed)} of {len(every)} caught; missed: {missed or 'none'}")
    if not names:
        told = [json.loads(NOTICED.read_text())[bug.digest()] for bug in every if bug.name not in missed]
        since = {"first of them at": told[0][0]} if len({at for at, _ in told}) > 1 else {}
        minutes = round(sum(seconds for _, seconds in told) / 60)
        record("planted", "make planted", planted=len(every), caught=len(told), minutes=minutes, **since)
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
