"""Records have a date and commit; older ones without them remain readable."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import record

sys.path.append(str(record.ROOT / "benchmarks"))
import reliability


@pytest.fixture
def repository(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setattr(record, "FOLDER", tmp_path / "benchmarks" / "results" / "reliability")
    return tmp_path


def test_outside_of_git(repository, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(repository.parent))
    assert record.commit() == "unknown"
    monkeypatch.setenv("PATH", "")
    assert record.commit() == "unknown"


@pytest.mark.skipif(shutil.which("git") is None, reason="commits")
def test_day_and_commit(repository):
    def git(*arguments):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=repository, check=True)

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "first")
    record.record("one", "make one", seconds=1.5)
    record.record("two", "make two", seconds=2.5)  # the file of the first record does not count as a change
    made = json.loads((record.FOLDER / "two.json").read_text())
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", made["date"]) and re.fullmatch("[0-9a-f]{7,}", made["commit"])
    (repository / "source.c").write_text("int x;")
    assert record.commit() == made["commit"] + "+"
    page = reliability.page({"two": made, "old": {"command": "make old", "races": 0, "threads": 8}})
    assert f"| two: `make two` | {made['date']} {made['commit']} | seconds | 2.5 |" in page
    assert "| old: `make old` | - | races | 0 |\n|  |  | threads | 8 |" in page


def test_every_record_can_be_shown():
    for path in record.FOLDER.glob("*.json"):
        assert f"| {path.stem}: `" in reliability.page({path.stem: json.loads(path.read_text())})
