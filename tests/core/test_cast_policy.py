"""Casts at every boundary, through rows, pages and standalone ops, on every kernel level."""

import cast_policy
import levels
import pytest


@pytest.mark.parametrize("check", cast_policy.CHECKS)
def test_this_level(check):
    cast_policy.CHECKS[check]()


@pytest.mark.parametrize("level", levels.OTHERS)
def test_other_levels(level):
    assert levels.on(level, cast_policy.check_all) == (level, len(cast_policy.CHECKS))
