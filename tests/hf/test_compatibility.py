"""Files written by earlier versions load exactly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from golden.cache import FILES, calibration, config, dense, filled

import kvcompress
from kvcompress import formats

GOLDEN = Path(__file__).parents[1] / "golden"
FOUND = sorted((path.parent.name, path.stem) for path in GOLDEN.glob("*/*.kvc"))


@pytest.mark.parametrize("version,file", FOUND)
def test_files_of_all_versions_are_read(version, file):
    cache = kvcompress.KVCache.load(GOLDEN / version / f"{file}.kvc", config(file), calibration=calibration(file))
    wanted = np.load(GOLDEN / version / f"{file}.npz")
    got = dense(cache, file)
    assert got.keys() == set(wanted.files)
    for name, x in got.items():
        assert np.array_equal(x, wanted[name]), name
    cache.update(torch.ones(1, 1, 1, 32), torch.ones(1, 1, 1, 32), 0)  # and can be continued
    assert cache.get_seq_length() == 41


@pytest.mark.parametrize("file", FILES)
def test_this_version_has_a_file_that_it_would_write_again(file):
    assert (kvcompress.__version__, file) in FOUND, "python tests/golden/cache.py writes it"
    wanted = np.load(GOLDEN / kvcompress.__version__ / f"{file}.npz")
    assert all(np.array_equal(x, wanted[name]) for name, x in dense(filled(file), file).items())


def test_every_format_has_a_file():
    assert {*formats.NAMES, *formats.CALIBRATED} == {name for names in FILES.values() for name in names}
