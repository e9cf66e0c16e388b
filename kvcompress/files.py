"""Files: atomic writes, JSON, reading safetensors files, finding the CUDA library."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Context manager to write `path` atomically: yields a temporary file with an unpredictable name in the same
    folder, which replaces `path`, synced to disk, when the block ends. If the block raises, it is removed."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    with open(temporary, "xb") as file:  # O_EXCL: never overwrites a file or follows a link
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
        os.fsync(folder)  # syncs the file's name
    finally:
        os.close(folder)


def json_text(x: Any) -> str:
    """`x` as indented JSON, with null instead of NaN and infinities, which JSON does not have."""

    def finite(x: Any) -> Any:
        if isinstance(x, dict):
            return {name: finite(y) for name, y in x.items()}
        if isinstance(x, (list, tuple)):
            return [finite(y) for y in x]
        return None if isinstance(x, float) and not math.isfinite(x) else x

    return json.dumps(finite(x), indent=1, allow_nan=False)


@contextmanager
def safetensors(path: str | os.PathLike[str], refuse: Callable[[str], ValueError]) -> Iterator[Any]:
    """Context manager to read a safetensors file. Raises OSError if it cannot be read, `refuse(reason)` if it is
    invalid or truncated while it is open."""
    from safetensors import SafetensorError, safe_open

    with open(path, "rb"):  # OSError for unreadable files; safetensors raises other types
        pass
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, RuntimeError) as error:
        raise refuse(f"no safetensors file, or a damaged or truncated one ({error})") from None


def cuda_library() -> Path | None:
    """The library with CUDA kernels, of this build or of the package kvcompress-cuda; None if there is none."""
    other = importlib.util.find_spec("kvcompress_cuda")
    folders = [Path(__file__).parent, *map(Path, (other and other.submodule_search_locations) or [])]
    return next((x for x in (folder / "libkvcompress_cuda.so" for folder in folders) if x.exists()), None)
