"""Finished cells of an evaluation, in a file that survives a crash at any time."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any


def cell_id(what: dict[str, Any]) -> str:
    """ID of a cell: a hash of everything that determines its result."""
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:24]


class Store(AbstractContextManager):
    """JSON Lines file with one object per finished cell, {"cell": what, "id": hash, "result": ...}, synced to disk.

    An incomplete last line (the process was killed) is removed when the file is opened. Cells are never computed or
    written twice. A lock keeps other processes out. path=None: keep the cells in memory.

    Raises RuntimeError if another process uses the file, ValueError if a line before the last is damaged.
    """

    def __init__(self, path: Path | None) -> None:
        self._results: dict[str, Any] = {}
        self._file = None
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise RuntimeError(
                f"evaluate: expected exclusive access to {path}, but another process uses it; choose another folder"
            ) from None
        self._file.seek(0)
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            self._file.truncate(whole)
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                row = json.loads(line)
                self._results[row["id"]] = row["result"]
            except (ValueError, KeyError, TypeError):
                self.close()
                raise ValueError(
                    f"evaluate: {path}, line {number}: expected a finished cell, got {line[:40]!r}"
                ) from None

    def __contains__(self, what: dict[str, Any]) -> bool:
        return cell_id(what) in self._results

    def get(self, what: dict[str, Any]) -> Any:
        """The result of a cell, or None if it is not finished."""
        return self._results.get(cell_id(what))

    def put(self, what: dict[str, Any], result: Any) -> None:
        """Stores the result of a cell; it is on disk when this returns."""
        name = cell_id(what)
        if name in self._results:
            raise ValueError(f"evaluate: expected a cell that is not finished, got {what}")
        self._results[name] = result
        if self._file is not None:
            line = json.dumps({"cell": what, "id": name, "result": result}) + "\n"
            self._file.write(line.encode())
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __exit__(self, *error: object) -> None:
        self.close()
