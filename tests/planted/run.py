"""Plants each bug of this folder in a copy of the tree and runs the tests of its layer: do they notice?

    make planted                                    # all
    python tests/planted/run.py causal-off-by-one   # some

A patch begins with what it does and with `tests:`, the files that must fail. One that no longer applies is an error
(tests/project/test_planted.py looks in every commit): make it anew from the code as it is now.
"""

from __future__ import annotations

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
LIMIT = 400  # seconds of the tests of one bug


class Bug(NamedTuple):
    name: str
    what: str
    tests: list[str]
    path: Path


def bugs() -> list[Bug]:
    found = []
    for path in sorted(HERE.glob("*.patch")):
        what, tests, *_ = path.read_text().splitlines()
        assert tests.startswith("tests: "), f"{path.name}: expected a second line with tests:, got {tests!r}"
        found.append(Bug(path.stem, what, [f"tests/{name}" for name in tests.split()[1:]], path))
    return found


def apply(tree: Path, bug: Bug, *options: str) -> subprocess.CompletedProcess:
    """git apply, whatever repository the tree lies in."""
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
    """Of pytest's exit code and output; the code alone does not tell: with -x, 2 is a failure or a failed import.
    What a fixture asserts when a test has ended is a failure too, though pytest calls it an error."""
    if code == 0:
        return ""
    if re.search(r"^\d+ failed\b|^_+ ERROR at teardown of |^worker '\w+' crashed while running", said, re.MULTILINE):
        return "caught"
    raise SystemExit(f"expected a failed test or none, got an error; pytest says {code}:\n{said[-4000:]}")


def notice(tree: Path, files: list[str], limit: int | None = LIMIT) -> str:
    """How they notice: by a failed test or a crash, or by no end within `limit` seconds; "" if they pass."""
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


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from record import record

    chosen = [bug for bug in bugs() if not sys.argv[1:] or bug.name in sys.argv[1:]]
    tree, began = ROOT / "build" / "planted" / "tree", time.monotonic()
    copy_of_the_tree(tree)
    build(tree)
    files = sorted({name for bug in chosen for name in bug.tests})
    if notice(tree, files, None):
        raise SystemExit(f"expected tests that pass without any bug, got failures in {' '.join(files)}")
    missed = []
    for bug in chosen:
        start = time.monotonic()
        if (done := apply(tree, bug)).returncode:
            raise SystemExit(f"{bug.path.name} is stale, make it anew:\n{done.stderr}")
        build(tree)
        caught = notice(tree, bug.tests)
        apply(tree, bug, "-R")
        missed += [] if caught else [bug.name]
        print(f"{caught or 'MISSED'}  {bug.name}: {bug.what} ({time.monotonic() - start:.0f} s)", flush=True)
    minutes = (time.monotonic() - began) / 60
    print(f"{len(chosen) - len(missed)} of {len(chosen)} caught in {minutes:.0f} minutes; missed: {missed or 'none'}")
    if not sys.argv[1:]:
        record("planted", "make planted", planted=len(chosen), caught=len(chosen) - len(missed), minutes=round(minutes))
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
