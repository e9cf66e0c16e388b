"""Shared by the tests of faults: makes the n-th allocation fail, for every n, and counts injected failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from kvcompress import _C

INJECTED: Counter[str] = Counter()


def every_failing_allocation(
    make: Callable[[], Any],
    act: Callable[[Any], Any],
    look: Callable[[Any], Any],
    follow: Callable[[Any], Any],
    same: Callable[[Any, Any], bool],
    most: int = 400,
    quiet: int = 0,
) -> int:
    """Runs act(make()) with its n-th allocation failing, for every n: it must raise MemoryError and leave `look`
    unchanged; then act() must succeed and follow() give the same result as without a fault. Returns the number of
    allocations. quiet: for an act that can work without some of its memory: n goes up to that, and success is
    accepted."""
    thing = make()
    act(thing)
    want = follow(thing)
    for n in range(1, most):
        thing = make()
        before, live, raised = look(thing), _C.alloc_live(), False
        _C.alloc_fail_at(n)
        try:
            act(thing)
        except (MemoryError, RuntimeError) as error:  # torch.ops raise only this type
            raised = True
            assert isinstance(error, MemoryError) or str(error).startswith("kvcompress.MemoryError"), error
            assert "memory" in str(error) or "full" in str(error), str(error)
        finally:
            _C.alloc_fail_at(0)
        if raised:
            INJECTED["allocations"] += 1
            assert same(look(thing), before), f"allocation {n}: something changed"
            assert _C.handles_live() == 0
            act(thing)
        elif n > quiet:
            return n - 1
        assert same(follow(thing), want), f"allocation {n}: goes on differently"
        del live
    raise AssertionError(f"more than {most} allocations")
