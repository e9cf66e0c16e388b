"""Files: written by this process alone until they have the name that others read; safetensors files to read; the CUDA
library."""

from __future__ import annotations

import importlib.util
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


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


@contextmanager
def safetensors(path: str | os.PathLike[str], refuse: Callable[[str], ValueError]) -> Iterator[Any]:
    """A safetensors file to read. Raises OSError if it cannot be read; what `refuse` makes of the reason if it is none,
    or has another length meanwhile."""
    from safetensors import SafetensorError, safe_open

    with open(path, "rb"):  # safetensors' own errors for files that cannot be read are of other types
        pass
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, RuntimeError) as error:
        raise refuse(f"no safetensors file, or a damaged one, perhaps cut short ({error})") from None


def cuda_library() -> Path | None:
    """The kernels for GPUs: of this build, or of the package kvcompress-cuda; None without."""
    other = importlib.util.find_spec("kvcompress_cuda")
    folders = [Path(__file__).parent, *map(Path, (other and other.submodule_search_locations) or [])]
    return next((x for x in (folder / "libkvcompress_cuda.so" for folder in folders) if x.exists()), None)
