"""How much memory a call asks for: all that malloc and its like, and mappings, were asked for in it (asked.c), granted
or not. Counts where a program runs with `environment()`."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def environment() -> dict[str, str]:
    """Of a program whose requests are counted, each object of Python's by itself."""
    built = Path(tempfile.mkdtemp(prefix="kvcompress-asked-")) / "asked.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", HERE / "asked.c", "-o", built], check=True)
    paths = os.pathsep.join(x for x in sys.path if x)
    return {**os.environ, "PYTHONPATH": paths, "LD_PRELOAD": str(built), "PYTHONMALLOC": "malloc"}


def counts() -> bool:
    """Is this such a program?"""
    return hasattr(ctypes.CDLL(None), "asked_most")


def peak(act: Callable[[], Any]) -> tuple[Any, int]:
    """(what `act` gives, or the exception that it raises; bytes that were asked for at once, above those of before)."""
    library = ctypes.CDLL(None)
    library.asked_live.restype = library.asked_most.restype = ctypes.c_longlong
    before = library.asked_live()
    library.asked_reset()
    try:
        result = act()
    except Exception as error:
        result = error
    return result, library.asked_most() - before
