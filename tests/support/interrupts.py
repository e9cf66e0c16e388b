"""Ctrl-C at the n-th place of a call: where Python looks for signals, after a call has come back and at the beginning
of a function."""

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
    """Offsets of instructions that follow a call, and the first one of a line that begins the function."""
    found, before = set(), "RESUME"
    for instruction in dis.get_instructions(code):
        if "CALL" in before or before == "RESUME":
            found.add(instruction.offset)
        if instruction.opname not in ("CACHE", "EXTENDED_ARG", "PRECALL"):
            before = instruction.opname
    return frozenset(found)


def interrupted(act: Callable[[Any], Any], argument: Any, at: int, files: Sequence[str]) -> tuple[int, bool]:
    """Calls act(argument); raises KeyboardInterrupt at place `at` (from 1 on; 0: nowhere) of code in files whose path
    begins with one of `files`. Returns how many places were passed, and whether the exception came through."""
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
    gc.disable()  # what others have left behind ends elsewhere
    sys.settrace(trace)
    try:
        act(argument)
    except KeyboardInterrupt:
        return count, True
    finally:
        sys.settrace(before)
        gc.enable()
    return count, False
