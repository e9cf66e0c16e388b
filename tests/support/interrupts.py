"""Raises KeyboardInterrupt at the n-th point of a call where Python checks for signals: after a call returns, and at
the start of a function."""

from __future__ import annotations

import dis
import functools
import gc
import sys
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any


@functools.cache
def _places(code: CodeType) -> frozenset[int]:
    """Offsets of instructions that follow a call, and of the first instruction of a function."""
    found, before = set(), "RESUME"
    for instruction in dis.get_instructions(code):
        if "CALL" in before or before == "RESUME":
            found.add(instruction.offset)
        if instruction.opname not in ("CACHE", "EXTENDED_ARG", "PRECALL"):
            before = instruction.opname
    return frozenset(found)


def interrupted(act: Callable[[Any], Any], argument: Any, at: int, files: Sequence[str]) -> tuple[int, bool]:
    """Calls act(argument) and raises KeyboardInterrupt at point `at` (from 1; 0: nowhere) in code of files whose path
    starts with one of `files`. Returns the number of points passed, and whether the exception propagated."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if event == "call":
            if not frame.f_code.co_filename.startswith(tuple(files)):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode" and frame.f_lasti in _places(frame.f_code):
            count += 1
            if count == at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    gc.disable()  # so that garbage of other tests is not collected here
    sys.settrace(trace)
    try:
        act(argument)
    except KeyboardInterrupt:
        return count, True
    finally:
        sys.settrace(before)
        gc.enable()
    return count, False
