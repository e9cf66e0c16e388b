"""Files that this process alone writes, until they have the name that others read."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file of a name that nobody can foresee, next to `path`. It takes the place of `path` when the block ends, whole
    and on the disk; it is removed if the block raises. Of several that write one path the last to end wins."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    with open(temporary, "xb") as file:  # O_EXCL: no file that is there, and no link, is written
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # and its name
    finally:
        os.close(folder)
