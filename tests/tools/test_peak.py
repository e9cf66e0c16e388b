"""Memory is saved, including the peak."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from peak import measure


@pytest.mark.full
@pytest.mark.parametrize("tokens", [4000, 16384])
def test_a_long_prompt_in_chunks_peaks_lower_by_what_is_saved(tokens):
    dense, ours = measure("dynamic", tokens), measure("int4", tokens)
    saved = dense["held"] - ours["held"]
    assert saved > 0.6 * dense["held"]
    assert dense["peak"] - ours["peak"] > 0.6 * saved
