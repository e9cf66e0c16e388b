"""Measures how much memory a call requests: everything passed to malloc and related functions and to mmap (asked.c),
whether granted or not. Works in programs started with `environment()`."""

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
    """Environment of a program whose requests are counted, with one allocation per Python object."""
    built = Path(tempfile.mkdtemp(prefix="kvcompress-asked-")) / "asked.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", HERE / "asked.c", "-o", built], check=True)
    paths = os.pathsep.join(x for x in sys.path if x)
    return {**os.environ, "PYTHONPATH": paths, "LD_PRELOAD": str(built), "PYTHONMALLOC": "malloc"}


def counts() -> bool:
    """Whether this process counts requests."""
    return hasattr(ctypes.CDLL(None), "asked_most")


def peak(act: Callable[[], Any]) -> tuple[Any, int]:
    """(result of `act`, or the exception it raises; peak of requested bytes above those before)."""
    library = ctypes.CDLL(None)
    library.asked_live.restype = library.asked_most.restype = ctypes.c_longlong
    before = library.asked_live()
    library.asked_reset()
    try:
        result = act()
    except Exception as error:
        result = error
    return result, library.asked_most() - before
