"""Runs code on other kernel levels. A process has a single level, so there is one process per level, reused by all
tests of a worker."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from typing import Any

import pytest

from kvcompress import _C

OTHERS = [x for x in _C.isa_available() if x != _C.isa() and "KVCOMPRESS_ISA" not in os.environ]
"""Those that tests go through; none where one was chosen from outside."""


@cache
def process(level: str) -> ProcessPoolExecutor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVCOMPRESS_ISA", level)
        made = ProcessPoolExecutor(1, get_context("spawn"))
        assert made.submit(_C.isa).result() == level
    return made


def on(level: str, call: Callable[..., Any], *args: Any) -> Any:
    """The result of call(*args) on a level; a function of a module, with picklable arguments."""
    return process(level).submit(call, *args).result()


def on_each(call: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """The result on each level of this CPU."""
    jobs = {level: process(level).submit(call, *args) for level in _C.isa_available()}
    return {level: job.result() for level, job in jobs.items()}


def failures(file: str, names: str) -> str:
    """pytest's output for the tests of a file if not all pass; `names` as after -k."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", file, "-k", names])
    return said.getvalue()[-3000:] if code else ""
